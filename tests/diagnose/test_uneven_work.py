"""Work that is uneven, or comes and goes: which rank, whether its device is slow, and the saving of
what exceeds the others alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_simulator.jobs import Cause, ExtraKernels, Job, MoreWork, SlowKernel, Throttling
from cuda_simulator.simulate import simulate
from support.builders import CpuTrace, GpuTrace
from support.data_parallel_job import data_parallel_job
from support.required import shared_repro

from stepsplit.analyzer import Finding, analyze


def findings(folder: Path, traces: Sequence[GpuTrace]) -> tuple[Finding, ...]:
    return analyze(*(trace.write(folder) for trace in traces)).findings


LAYERS = [("gemm", 20.0), ("flash", 10.0), ("norm", 10.0), ("gelu", 10.0)]


def test_a_kernel_more_in_one_step_is_more_work_there(tmp_path: Path) -> None:
    """The evaluation of rank 1 in step 3 costs the job its 60 us in one of four steps."""

    def kernels(rank: int, step: int) -> list[tuple[str, float]]:
        return [*LAYERS, ("evaluate", 60.0)] if (rank, step) == (1, 3) else LAYERS

    (found,) = findings(tmp_path, data_parallel_job(kernels))
    assert (found.code, found.ranks, found.steps) == ("uneven_ranks", (1,), (3,))
    assert found.gain_ns == 15_000
    assert found.message == (
        "load imbalance: rank 1 has 100.0 % more compute in 1 of 4 steps (3) than in its others: "
        "6 kernels instead of 5"
    )
    assert (found.events[0].name, found.events[0].dur_ns) == ("evaluate", 60_000)


def test_other_kernels_in_one_step_are_more_work_too(tmp_path: Path) -> None:
    def kernels(rank: int, step: int) -> list[tuple[str, float]]:
        return [*LAYERS[:3], ("conv", 70.0)] if (rank, step) == (1, 3) else LAYERS

    (found,) = findings(tmp_path, data_parallel_job(kernels))
    assert (found.code, found.gain_ns) == ("uneven_ranks", 15_000)
    assert found.message.endswith("than in its others: kernels of other grids or names")


def test_one_kernel_that_is_slow_once_is_shortened_alone(tmp_path: Path) -> None:
    def kernels(rank: int, step: int) -> list[tuple[str, float]]:
        return [("gemm", 80.0), *LAYERS[1:]] if (rank, step) == (0, 2) else LAYERS

    (found,) = findings(tmp_path, data_parallel_job(kernels))
    assert (found.code, found.ranks, found.steps) == ("slow_rank", (0,), (2,))
    assert found.gain_ns == 15_000
    assert (found.events[0].name, found.events[0].dur_ns) == ("gemm", 80_000)


def test_a_device_is_slow_by_all_its_kernels_where_each_has_few_runs(tmp_path: Path) -> None:
    """Four runs of each kernel are too few to test them one by one, and rank 0 is the only peer.
    The optimizer is as fast as there."""

    def kernels(rank: int, step: int) -> list[tuple[str, float]]:
        return [(name, took * (1.2 if rank else 1.0)) for name, took in LAYERS]

    (found,) = findings(tmp_path, data_parallel_job(kernels))
    assert (found.code, found.ranks) == ("slow_rank", (1,))
    assert found.gain_ns == pytest.approx(10_000, rel=0.03)
    assert found.message == (
        "rank 1 is a straggler: as many kernels take 1.17x as long as on its peers at equal grids "
        "(no shapes recorded)"
    )


def test_a_part_that_takes_longer_is_no_slow_device(tmp_path: Path) -> None:
    """Attention by a persistent kernel on longer sequences, with an equal grid."""

    def kernels(rank: int, step: int) -> list[tuple[str, float]]:
        return [(name, took * (2 if rank and name == "flash" else 1)) for name, took in LAYERS]

    (found,) = findings(tmp_path, data_parallel_job(kernels))
    assert (found.code, found.ranks) == ("uneven_ranks", (1,))
    assert found.gain_ns == 10_000
    assert "more work, or a slower device (as many kernels of equal grids" in found.message


@pytest.mark.parametrize(
    ("slower", "ranks", "gain_ns", "growth"),
    [((0.06, 0.12, 0.18, 0.24), 2, 7_500, "1.05x in step 1 and 1.20x in step 4"),
     ((0.01, 0.2, 0.25, 0.3), 3, 9_500, "1.01x in step 1 and 1.25x in step 4")],
    ids=["from the first step", "once it is hot"],
)  # fmt: skip
def test_a_device_that_slows_down_from_step_to_step_is_slow(
    slower: Sequence[float], ranks: int, gain_ns: int, growth: str, tmp_path: Path
) -> None:
    """50 us of kernels a step take longer on rank 1, and the optimizer as long as on the others."""

    def kernels(rank: int, step: int) -> list[tuple[str, float]]:
        return [(name, took * (1 + slower[step - 1] * (rank == 1))) for name, took in LAYERS]

    (found,) = findings(tmp_path, data_parallel_job(kernels, ranks=ranks))
    assert (found.code, found.ranks) == ("slow_rank", (1,))
    assert found.gain_ns == pytest.approx(gain_ns, rel=0.05)
    assert found.message.endswith(f"shapes recorded), {growth}")


def test_steps_that_differ_on_all_ranks_show_no_slow_device(tmp_path: Path) -> None:
    """Rank 1 is slower in three of four steps, as much as the others are apart in theirs."""
    slower = [(0.0, 0.12, 0.0, 0.2), (0.01, 0.2, 0.15, 0.2), (0.2, 0.0, 0.1, 0.0)]

    def kernels(rank: int, step: int) -> list[tuple[str, float]]:
        return [(name, took * (1 + slower[rank][step - 1])) for name, took in LAYERS]

    made = findings(tmp_path, data_parallel_job(kernels, ranks=3))
    assert "slow_rank" not in [one.code for one in made]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ("causal_ring", "uneven_ranks"),
        ("early_recv_slow_link", "slow_link"),
        ("extra_work_one_step", "uneven_ranks"),
        ("graph_data_loader", "data_loading"),
        ("hot_expert_persistent", "uneven_ranks"),
        ("hsdp_slow_rank", "slow_rank"),
        ("one_slow_kernel", "slow_rank"),
        ("slow_rank_two_a_stage", "slow_rank"),
        ("two_slow_blame", "slow_rank"),
    ],
)
def test_a_planted_cause_has_its_rank_and_saving(job: str, code: str) -> None:
    folder = shared_repro(f"causes3/{job}")
    truth = json.loads((folder / "truth.json").read_text())
    found = next(one for one in analyze(folder / "with").findings if one.code == code)
    assert found.gain_ns / 1e6 == pytest.approx(truth["saving_ms"], rel=0.15)
    assert not [one for one in analyze(folder / "without").findings if one.code == code]


SHARDED = Job("fsdp4", dp=4, fsdp=True, microbatches=1, layers=4, steps=4)
PIPELINE = Job("pp2_dp2", pp=2, dp=2, microbatches=4, layers=1, end_of_step="device")


@pytest.mark.parametrize(
    ("job", "cause", "code"),
    [
        # The first recorded step has other calls than the next ones.
        (SHARDED, SlowKernel(1, 4_000_000, step=0, place="begin"), "slow_rank"),
        (SHARDED, ExtraKernels(2, 4_000_000, step=2), "uneven_ranks"),
        # The other stage is done by then, and begins its next step no earlier.
        (PIPELINE, ExtraKernels(1, 3_000_000, step=1, place="end"), "uneven_ranks"),
        (PIPELINE, MoreWork(3, 1.25, "second"), "uneven_ranks"),
        (PIPELINE, Throttling(2, 1.05, 1.35), "slow_rank"),
    ],
)
def test_a_simulated_cause_has_its_rank_and_saving(
    tmp_path: Path, job: Job, cause: Cause, code: str
) -> None:
    planted = simulate(replace(job, causes=(cause,)))
    planted.write(tmp_path)
    (found,) = [
        one
        for one in analyze(tmp_path).findings
        if one.code in ("slow_rank", "uneven_ranks", "uneven_stages")
    ]
    assert (found.code, found.ranks) == (code, (cause.rank,))
    assert found.gain_ns == pytest.approx(planted.step_ns - simulate(job).step_ns, rel=0.15)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stragglers_by_chance_are_no_finding(tmp_path: Path, seed: int) -> None:
    simulate(Job("dp2", dp=2, microbatches=2, step_noise=0.05, steps=4, seed=seed)).write(tmp_path)
    found = {one.code for one in analyze(tmp_path).findings}
    assert not found & {"slow_rank", "uneven_ranks"}


def test_gathers_of_several_microbatches_are_needed() -> None:
    """FSDP with no_sync, and no ranges of autograd that say so."""
    report = analyze(shared_repro("causes3/fsdp_accum_shard_group") / "with")
    assert report.findings == ()


def test_two_equally_slow_ranks_are_blamed() -> None:
    """Each is the last in some steps only."""
    report = analyze(shared_repro("causes3/two_slow_blame") / "with")
    blamed = {row.rank for row in report.blame if row.caused_ns > 100_000}
    assert blamed == {1, 2}


def test_on_a_cpu_a_rank_that_runs_more_ops_in_some_steps_is_named_though_all_steps_vary(
    tmp_path: Path,
) -> None:
    """Rank 0 evaluates before its third and sixth step; other processes take time of both ranks."""
    slower = (1.0, 1.5, 1.1, 1.9, 1.3, 1.0, 1.7, 1.2)
    for rank in (0, 1):
        trace, at = CpuTrace(rank, 2, groups=[("0", "mesh_dp", [0, 1])]), 0.0
        for step, times in enumerate(slower):
            begin, took = at, 100 * times
            evaluates = step in (2, 5)
            for _ in range(30 if evaluates and rank == 0 else 10):
                trace.op("aten::mm", at, at + took)
                at += took
            arrived = begin + (30 if evaluates else 10) * took
            trace.all_reduce(at, at, arrived + 50, group="0", seq=step, tid=77)
            at = arrived + 50
            trace.step(step, begin, at)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    first = report.findings[0]
    assert (first.code, first.ranks, first.steps) == ("uneven_ranks", (0,), (2, 5))
    assert first.message.endswith("in its others: 30 ops instead of 10")
    # Of its 3.3 and 3.0 ms, its usual step keeps 1.4.
    assert first.gain_ns == (1_900_000 + 1_600_000) / 8


def test_a_call_that_the_host_makes_some_time_after_it_waited_for_another_follows_it(
    tmp_path: Path,
) -> None:
    """Rank 0 runs 20 ops of 1 ms, rank 1 ten; both reduce, and 1.5 ms later reduce again."""
    for rank, ops in ((0, 20), (1, 10)):
        trace, at = CpuTrace(rank, 2, groups=[("0", "mesh_dp", [0, 1])]), 0.0
        for step in range(4):
            begin = at
            for _ in range(ops):
                trace.op("aten::mm", at, at + 1000)
                at += 1000
            for call, end in ((0, begin + 20_100), (1, begin + 21_700)):
                trace.all_reduce(at, at, end, group="0", seq=2 * step + call, tid=77)
                at = end + 1500 * (1 - call)
            trace.op("aten::mm", at, at + 1000)
            at += 1000
            trace.step(step, begin, at)
        trace.write(tmp_path)
    first = analyze(tmp_path).findings[0]
    assert (first.code, first.ranks) == ("uneven_ranks", (0,))
    assert first.gain_ns == pytest.approx(10_000_000, rel=0.02)
