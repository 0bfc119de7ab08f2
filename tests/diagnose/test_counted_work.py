"""Ranks that process different numbers of tokens: what their work explains, and what not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace
from support.data_parallel_job import data_parallel_job

from stepsplit.analyzer import Report, analyze, check_runs
from stepsplit.collectors.formats.rank_record import (
    RankRecord,
    RecordedWork,
    StepWork,
    write_record,
)
from stepsplit.collectors.formats.run_spec import RankInfo
from stepsplit.dashboard.reporters.verdict import format_value

Kernels = Sequence[tuple[str, float]]


def record_job(
    folder: Path,
    kernels: Callable[[int, int], Kernels],
    counts: Callable[[int, int], StepWork | None],
    steps: int = 6,
    ranks: int = 4,
) -> Report:
    """The report of ranks that run these kernels (name, us) of each (rank, step), all-reduce
    together and run an optimizer; counts is what each (rank, step) says that it processed."""
    traces = data_parallel_job(kernels, steps, ranks)
    for trace in traces:
        trace.write(folder)
        of_rank = [counts(trace.rank, step) for step in range(1, steps + 1)]
        write_work(folder, trace.rank, ranks, tuple(one for one in of_rank if one is not None))
    return analyze(folder)


def write_work(folder: Path, rank: int, ranks: int, counts: tuple[StepWork, ...]) -> None:
    """Writes the record of a rank that says what its steps processed."""
    info = RankInfo(rank, 0, "host0", 1, "Test GPU")
    work = RecordedWork("run.step", counts) if counts else None
    write_record(folder, RankRecord("job", info, ranks, "nccl", work=work))


def draw_tokens(seed: int) -> Callable[[int, int], int]:
    """From 1,000 to 4,000 tokens of each (rank, step)."""
    return lambda rank, step: random.Random(f"{seed} {rank} {step}").randint(1000, 4000)


def layers(tokens: int, times: float = 1.0, noise: float = 0.0) -> Kernels:
    """A fixed part, GEMMs in proportion to the tokens and attention as their square."""
    attention, gemm = 400 * (tokens / 2000) ** 2, 1600 * tokens / 2000
    parts = [("embed", 100.0), *(("gemm", gemm / 4),) * 4, *(("flash", attention / 4),) * 4]
    return [(name, round(took * times * (1 + noise), 3)) for name, took in parts]


def find_codes(report: Report) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.code, one.ranks) for one in report.findings]


def list_blamed_for_compute(report: Report) -> set[int | None]:
    return {row.rank for row in report.blame if row.cause == "compute"} - {None}


@pytest.mark.parametrize("ranks", [2, 4])
def test_variable_lengths_are_uneven_work_and_no_slow_rank(tmp_path: Path, ranks: int) -> None:
    """The saving of an even packing is the longest compute of each step over that of the mean
    tokens, which the ranks' own steps say: attention is not proportional."""
    tokens = draw_tokens(1)
    report = record_job(
        tmp_path,
        lambda rank, step: layers(tokens(rank, step)),
        lambda rank, step: StepWork(step, tokens=tokens(rank, step)),
        ranks=ranks,
    )
    (found,) = report.findings
    assert (found.code, found.ranks, found.bucket) == ("uneven_work", (), "skew")
    assert list_blamed_for_compute(report) == set()
    assert report.slow_kernels == ()

    def compute_us(of: float) -> float:
        return sum(took for _, took in layers(round(of)))

    saved_us = 0.0
    for step in range(1, 7):
        own = [tokens(rank, step) for rank in range(ranks)]
        saved_us += (compute_us(max(own)) - compute_us(sum(own) / ranks)) / 6
    assert found.gain_ns == pytest.approx(saved_us * 1000, rel=0.05)
    assert report.work and report.work.unit == "tokens"
    assert report.work.power == pytest.approx(1.15, abs=0.05)
    assert "to the power 1.1" in found.message


def test_a_slow_rank_is_found_beside_its_variable_lengths(tmp_path: Path) -> None:
    tokens = draw_tokens(2)
    report = record_job(
        tmp_path,
        lambda rank, step: layers(tokens(rank, step), 1.3 if rank == 2 else 1.0),
        lambda rank, step: StepWork(step, tokens=tokens(rank, step)),
    )
    slow = [one for one in report.findings if one.code == "slow_rank"]
    assert [one.ranks for one in slow] == [(2,)]
    assert slow[0].message.startswith("rank 2 is a straggler: it computes 1.")
    assert "as long as its peers for as many tokens, by all its steps" in slow[0].message
    assert list_blamed_for_compute(report) <= {2}


@pytest.mark.parametrize("seed", range(4))
def test_steps_that_a_busy_machine_made_long_do_not_hide_a_slow_rank(
    tmp_path: Path, seed: int
) -> None:
    """Three of the ten steps of each rank take up to twice as long, whatever their tokens."""
    tokens, draw = draw_tokens(seed), random.Random(seed)
    busy = {(r, s): draw.uniform(1.2, 2) for r in (0, 1) for s in draw.sample(range(1, 11), 3)}

    def kernels(rank: int, step: int) -> Kernels:
        noise = draw.gauss(0, 0.02)
        times = busy.get((rank, step), 1.0) * (1.35 if rank == 1 else 1.0)
        return layers(tokens(rank, step), times, noise)

    report = record_job(
        tmp_path, kernels, lambda rank, step: StepWork(step, tokens=tokens(rank, step)), 10, 2
    )
    assert report.work and report.work.power == pytest.approx(1.15, abs=0.1)
    assert [one.ranks for one in report.findings if one.code == "slow_rank"] == [(1,)]


def record_busy_cpus(
    folder: Path, seed: int, ranks: int, times: float, held: float = 0.0
) -> Report:
    """The report of a gloo job on shared cores: in a step that others leave alone no op is
    interrupted, in another one every third, for 4 ms. Rank seed % ranks takes times as long, and
    this part of its ops is interrupted for 0.6 ms, as by a limit of its container."""
    draw, tokens, begin = random.Random(seed), draw_tokens(seed), 0.0
    group = ("0", "default_pg", tuple(range(ranks)))
    traces = [CpuTrace(rank, ranks, [group]) for rank in range(ranks)]
    for step in range(1, 11):
        ready = []
        for trace in traces:
            is_slow = trace.rank == seed % ranks
            op_us = 300 * (times if is_slow else 1.0)
            at, busy = begin, 0.0 if held else draw.uniform(0, 0.3)
            for _ in range(tokens(trace.rank, step) // 50):
                end = at + op_us * draw.gauss(1, 0.02) + 4000 * (draw.random() < busy)
                end += 600 * (is_slow and draw.random() < held)
                trace.op("aten::mm", at, end)
                at = end
            ready.append(at)
        end = max(ready) + 20
        for trace, at in zip(traces, ready, strict=True):
            trace.all_reduce(at, at + 2, end, group="0", seq=step, tid=7)
            trace.op("aten::add_", end + 5, end + 25).step(step, begin, end + 30)
        begin = end + 30
    for trace in traces:
        trace.write(folder)
        counts = tuple(StepWork(step, tokens=tokens(trace.rank, step)) for step in range(1, 11))
        write_work(folder, trace.rank, ranks, counts)
    return analyze(folder)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_what_other_programs_take_of_a_cpu_neither_hides_nor_makes_a_slow_rank(
    tmp_path: Path, seed: int, ranks: int
) -> None:
    """Interrupted ops make steps up to five times as long; those between say how fast it is."""
    for times in (1.0, 1.35):
        folder = tmp_path / str(times)
        folder.mkdir()
        report = record_busy_cpus(folder, seed, ranks, times)
        slow = [one for one in report.findings if one.code == "slow_rank"]
        assert [one.ranks for one in slow] == [(seed % ranks,)] * (times > 1)
        assert all("1.3" in one.message for one in slow)
        assert list_blamed_for_compute(report) <= ({seed % ranks} if times > 1 else set())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_whose_cores_are_limited_is_slow_though_some_of_its_ops_are_not(
    tmp_path: Path, ranks: int
) -> None:
    """Two in five of its ops take as long as on the others, in each step; all do 2.2 times."""
    report = record_busy_cpus(tmp_path, 1, ranks, 1.0, held=0.6)
    first = report.findings[0]
    assert (first.code, first.ranks) == ("slow_rank", (1,))
    assert "it computes 2.2" in first.message or "it computes 2.1" in first.message


def test_more_kernels_for_more_tokens_are_no_load_imbalance_of_a_step(tmp_path: Path) -> None:
    """A kernel for each 100 tokens; in step 4 something makes all of rank 1's twice as long."""
    tokens = draw_tokens(9)

    def kernels(rank: int, step: int) -> Kernels:
        count = round(tokens(rank, step) / 100)
        return [("gemm", 200.0 if (rank, step) == (1, 4) else 100.0)] * count

    counts = [round(tokens(1, step) / 100) for step in range(1, 7)]
    assert counts[3] > 1.3 * sorted(counts)[2]
    report = record_job(
        tmp_path, kernels, lambda rank, step: StepWork(step, tokens=tokens(rank, step)), ranks=2
    )
    assert not [one for one in report.findings if "more compute in" in one.message]


@pytest.mark.parametrize("power", [1, 2])
def test_a_rank_with_always_more_tokens_has_more_work(tmp_path: Path, power: int) -> None:
    """Twice the tokens take twice the time, or four times: of attention alone."""

    def kernels(rank: int, step: int) -> Kernels:
        return [("gemm", 400.0 * (2**power if rank == 1 else 1))] * 4

    report = record_job(
        tmp_path, kernels, lambda rank, step: StepWork(step, tokens=2000 if rank == 1 else 1000)
    )
    assert find_codes(report) == [("uneven_work", (1,))]
    assert "mostly rank 1" in report.findings[0].message
    assert {(row.rank, row.cause) for row in report.blame if row.rank == 1} == {(1, "imbalance")}


def test_a_rank_is_slow_beyond_the_square_of_its_tokens(tmp_path: Path) -> None:
    """Rank 1 has always a tenth more tokens, which explains 1.21 times the time, not 1.6."""

    def kernels(rank: int, step: int) -> Kernels:
        return [("gemm", 640.0 if rank == 1 else 400.0)] * 4

    report = record_job(
        tmp_path, kernels, lambda rank, step: StepWork(step, tokens=1100 if rank == 1 else 1000)
    )
    slow = [one for one in report.findings if one.code == "slow_rank"]
    assert [one.ranks for one in slow] == [(1,)]
    assert "computes 1.32x as long" in slow[0].message


def test_a_rank_with_fewer_tokens_that_takes_longer_is_slow(tmp_path: Path) -> None:
    def kernels(rank: int, step: int) -> Kernels:
        return [("gemm", 480.0 if rank == 3 else 400.0)] * 4

    report = record_job(
        tmp_path, kernels, lambda rank, step: StepWork(step, tokens=500 if rank == 3 else 1000)
    )
    assert ("slow_rank", (3,)) in find_codes(report)


def test_layers_that_only_one_rank_runs_are_no_slow_device(tmp_path: Path) -> None:
    """More kernels than others, also for its tokens: load imbalance, as without counts."""
    tokens = draw_tokens(3)

    def kernels(rank: int, step: int) -> Kernels:
        own = [*layers(tokens(rank, step))]
        return [*own, *(("head", 300.0),) * 5] if rank == 0 else own

    report = record_job(
        tmp_path, kernels, lambda rank, step: StepWork(step, tokens=tokens(rank, step))
    )
    assert "slow_rank" not in [one.code for one in report.findings]
    assert ("uneven_ranks", (0,)) in find_codes(report)


@pytest.mark.parametrize(("tokens", "is_slow"), [(1030, True), (1500, False)])
def test_of_two_steps_a_rank_is_slow_beyond_the_square_of_its_tokens(
    tmp_path: Path, tokens: int, is_slow: bool
) -> None:
    """Too few steps for a law: twice the time is more than 1.03 x 1.03, and not than 1.5 x 1.5."""
    report = record_job(
        tmp_path,
        lambda rank, step: layers(2000, 2.0 if rank == 1 else 1.0),
        lambda rank, step: StepWork(step, tokens=tokens if rank == 1 else 1000),
        steps=2,
    )
    slow = [one for one in report.findings if one.code == "slow_rank"]
    assert [one.ranks for one in slow] == [(1,)] * is_slow
    # As in the kernels of both: 2,100 us of layers and 10 us of the optimizer, which is not slow.
    ratio = (2 * 2100 + 10) / (2100 + 10) / 1.03**2
    assert [f"take {ratio:.2f}x as long" in one.message for one in slow] == [True] * is_slow
    assert list_blamed_for_compute(report) == ({1} if is_slow else set())


def test_a_single_step_says_nothing_of_others(tmp_path: Path) -> None:
    tokens = draw_tokens(7)
    report = record_job(
        tmp_path,
        lambda rank, step: layers(tokens(rank, step)),
        lambda rank, step: StepWork(step, tokens=tokens(rank, step)),
        steps=1,
    )
    (said,) = [one.message for one in report.findings if one.code == "uneven_work"]
    assert "(from a single step)" in said and "differ: too few steps to tell" in said


def test_a_stage_of_more_kernels_is_no_other_work_of_its_ranks(tmp_path: Path) -> None:
    """Two stages of two ranks; the second has four kernels more, and one slow rank."""
    tokens = draw_tokens(5)
    groups = [(str(at), name, ranks) for at, (name, ranks) in enumerate(
        [("mesh_dp", [0, 1]), ("mesh_dp", [2, 3]), ("mesh_pp", [0, 2]), ("mesh_pp", [1, 3])]
    )]  # fmt: skip
    traces = [GpuTrace(rank, 4, groups=[g for g in groups if rank in g[2]]) for rank in range(4)]
    begin = 0.0
    for step in range(1, 9):
        parts = []
        for rank in range(4):
            own = list(layers(tokens(rank, step), 1.4 if rank == 3 else 1.0))
            parts.append(own + [("head", tokens(rank, step) / 20)] * (4 if rank > 1 else 0))
        ready = [begin + sum(took for _, took in part) for part in parts]
        ends = [max(ready[:2]) + 10] * 2 + [max(ready[2:]) + 10] * 2
        last = max(ends)
        for trace, part, end in zip(traces, parts, ends, strict=True):
            trace.step(step, begin, last + 20)
            at = begin
            for name, took in part:
                trace.kernel(name, at, at + took, grid=[8, 1, 1])
                at += took
            trace.all_reduce(at, end, group="0" if trace.rank < 2 else "1")
            trace.kernel("adam", last, last + 10, grid=[8, 1, 1])
        begin = last + 20
    for trace in traces:
        counts = tuple(StepWork(step, tokens=tokens(trace.rank, step)) for step in range(1, 9))
        trace.write(tmp_path)
        write_work(tmp_path, trace.rank, 4, counts)
    slow = [one.ranks for one in analyze(tmp_path).findings if one.code == "slow_rank"]
    assert slow == [(3,)]


def test_the_first_of_merged_steps_has_the_work_of_all_its_microbatches(tmp_path: Path) -> None:
    """run.step after each of two microbatches; no step has more tokens than another."""
    traces = [GpuTrace(rank, 2, groups=[("0", "mesh_dp", [0, 1])]) for rank in range(2)]
    for trace in traces:
        own = 700.0 if trace.rank else 1000.0
        for mark in range(1, 13):
            begin = 1100.0 * (mark - 1)
            trace.step(mark, begin, begin + 1100).kernel("gemm", begin, begin + own, grid=[8, 1, 1])
            if mark % 2 == 0:
                trace.all_reduce(begin + own, begin + 1020)
                trace.annotation("Optimizer.step#AdamW.step", begin + 1025, begin + 1060)
                trace.kernel("adam", begin + 1030, begin + 1050, grid=[8, 1, 1])
        trace.write(tmp_path)
        counts = tuple(StepWork(mark, tokens=int(own)) for mark in range(1, 13))
        write_work(tmp_path, trace.rank, 2, counts)
    report = analyze(tmp_path)
    rows = {(one.rank, one.step): one.tokens for one in report.step_work}
    steps = range(2, 13, 2)
    assert rows == {(rank, at): 1400 if rank else 2000 for rank in (0, 1) for at in steps}
    assert report.work and report.work.power is None
    assert "slow_rank" not in [one.code for one in report.findings]


def test_tokens_are_compared_where_all_flops_are_0(tmp_path: Path) -> None:
    tokens = draw_tokens(1)
    report = record_job(
        tmp_path,
        lambda rank, step: layers(tokens(rank, step)),
        lambda rank, step: StepWork(step, tokens=tokens(rank, step), flops=0),
    )
    assert report.work and report.work.unit == "tokens"
    assert [one.code for one in report.findings] == ["uneven_work"]
    assert "work_unknown" not in [one.code for one in report.warnings]


# What is missing, or no work at all.


def compare_reports(left: Report, right: Report) -> bool:
    """Whether two reports find the same."""
    return (left.findings, left.blame, left.slow_kernels) == (
        right.findings,
        right.blame,
        right.slow_kernels,
    )


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            lambda rank, step: None if rank == 2 else StepWork(step, tokens=1000 + rank),
            "tokens are unknown in steps of ranks 2",
        ),
        (
            lambda rank, step: StepWork(step, **{"samples" if rank else "tokens": 8}),
            "tokens are unknown in steps of ranks 1, 2, 3; samples are unknown in steps of ranks 0",
        ),
        (
            lambda rank, step: None if (rank, step) == (1, 3) else StepWork(step, tokens=9 + rank),
            "tokens are unknown in steps of ranks 1",
        ),
        (lambda rank, step: StepWork(step, tokens=0), "all tokens are 0"),
        (lambda rank, step: StepWork(step + 100, tokens=5), "no full step has any"),
    ],
    ids=["one rank without", "different units", "one step without", "all zero", "other steps"],
)
def test_what_is_not_counted_everywhere_changes_nothing_and_is_said(
    tmp_path: Path, counts: Callable[[int, int], StepWork | None], said: str
) -> None:
    def kernels(rank: int, step: int) -> Kernels:
        return layers(2000, 1.3 if rank == 1 else 1.0)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    report = record_job(tmp_path / "a", kernels, counts)
    plain = record_job(tmp_path / "b", kernels, lambda rank, step: None)
    assert compare_reports(report, plain)
    (warning,) = [one for one in report.warnings if one.code == "work_unknown"]
    assert warning.message == f"times are not compared by work: {said}"
    assert not report.work
    assert not plain.work and not plain.step_work


def test_even_work_leaves_the_findings_as_they_are(tmp_path: Path) -> None:
    def kernels(rank: int, step: int) -> Kernels:
        return layers(2000, 1.3 if rank == 1 else 1.0)

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    report = record_job(tmp_path / "a", kernels, lambda rank, step: StepWork(step, tokens=2000))
    assert compare_reports(report, record_job(tmp_path / "b", kernels, lambda rank, step: None))
    assert report.work and (report.work.most_ratio, report.work.power) == (1.0, None)
    assert len(report.step_work_frame()) == 24


def test_a_rank_without_tokens_waits_and_is_no_reason(tmp_path: Path) -> None:
    """Rank 3 has nothing to do in step 2; times per token of it are not infinite."""
    tokens = draw_tokens(4)

    def count(rank: int, step: int) -> int:
        return 0 if (rank, step) == (3, 2) else tokens(rank, step)

    report = record_job(
        tmp_path,
        lambda rank, step: layers(count(rank, step)),
        lambda rank, step: StepWork(step, tokens=count(rank, step)),
    )
    assert [one.code for one in report.findings] == ["uneven_work"]
    assert report.findings[0].gain_ns < report.summary.step_ns if report.summary else False
    assert report.work and math.isfinite(report.work.ns_per_unit)


def test_flops_are_compared_before_tokens(tmp_path: Path) -> None:
    """Where both are counted: FLOPs know of attention."""
    tokens = draw_tokens(5)
    report = record_job(
        tmp_path,
        lambda rank, step: [("gemm", tokens(rank, step) ** 2 / 1e4)] * 3,
        lambda rank, step: StepWork(
            step, tokens=tokens(rank, step), flops=tokens(rank, step) ** 2 * 10**6
        ),
    )
    assert report.work and report.work.unit == "flops"
    assert report.work.power == pytest.approx(1.0, abs=0.02)
    assert "TFLOP/s a rank" in report.work.describe() or "FLOP" in report.work.describe()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_twenty_jobs_no_healthy_rank_is_slow_and_each_slow_one_is_found(
    tmp_path: Path, ranks: int
) -> None:
    """Kernels that vary by 4 %; a rank that takes 1.5 times as long."""
    found = []
    for seed in range(20):
        tokens = draw_tokens(seed)
        for times in (1.0, 1.5):

            def kernels(
                rank: int,
                step: int,
                tokens: Callable[[int, int], int] = tokens,
                seed: int = seed,
                times: float = times,
            ) -> Kernels:
                noise = random.Random(f"{seed} {rank} {step} noise").gauss(0, 0.04)
                slower = times if rank == seed % ranks else 1.0
                return layers(tokens(rank, step), slower, noise)

            folder = tmp_path / f"{seed} {times}"
            folder.mkdir()
            report = record_job(
                folder,
                kernels,
                lambda rank, step, tokens=tokens: StepWork(step, tokens=tokens(rank, step)),
                ranks=ranks,
            )
            stragglers = [one for one in report.findings if "straggler" in one.message]
            named = f"rank {seed % ranks} is a straggler: "
            is_right = [named in one.message for one in stragglers] == [True] * (times > 1)
            healthy = list_blamed_for_compute(report) - ({seed % ranks} if times > 1 else set())
            found.append(is_right and not healthy)
    assert all(found), found


def test_a_check_of_the_time_per_token_passes_where_longer_batches_take_longer(
    tmp_path: Path,
) -> None:
    """Half as many tokens again take half as long again: step is over its budget, and
    step_per_token is not."""
    sides: dict[int, list[Path]] = {2000: [], 3000: []}
    for tokens, runs in sides.items():
        for number in range(3):
            folder = tmp_path / f"{tokens} {number}"
            folder.mkdir()
            runs.append(folder)
            record_job(
                folder,
                lambda rank, step, us=tokens / 2 + number: [("gemm", us)] * 4,
                lambda rank, step, tokens=tokens: StepWork(step, tokens=tokens, samples=10),
            )
    result = check_runs(
        sides[3000], sides[2000], ["step:3%", "step_per_token:3%", "step_per_sample:3%"]
    )
    assert {one.metric: one.answer for one in result.gated} == {
        "step": "regressed",
        "step_per_token": "pass",
        "step_per_sample": "regressed",
    }
    per_token = next(one for one in result.gated if one.metric == "step_per_token")
    assert format_value("step_per_token", per_token.baseline) == "2.01 µs"
