"""Jobs of kinds that the counterfactual benchmark does not draw: two causes at once, a cause in one
step alone, layouts with few ranks. The truth is the same job without its causes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_simulator.jobs import (
    CausalBlocks,
    Cause,
    ExpertLoad,
    ExtraKernels,
    HostStall,
    Job,
    MoreWork,
    SlowKernel,
    SlowLink,
    SlowRank,
    Throttling,
)
from cuda_simulator.kineto import TraceStyle
from cuda_simulator.simulate import simulate

from stepsplit.analyzer import Report, UsageError, analyze, what_if

FEW = {"microbatches": 4, "layers": 2}
SHARDED = {"fsdp": True, "microbatches": 1, "layers": 8, "layer_ns": 400_000}
ONCE = {**FEW, "steps": 5}

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("analyzer/diagnose", "analyzer/split")]


def record(folder: Path, sizes: dict[str, Any], *causes: Cause) -> tuple[Report, float]:
    """The report of the job with its causes, and the part of the mean step that they cost."""
    job = Job("unusual", seed=4, **sizes)
    ran, cured = simulate(replace(job, causes=causes)), simulate(job)
    ran.write(folder)
    return analyze(folder), ran.step_ns - cured.step_ns


@pytest.mark.parametrize(
    ("sizes", "causes", "code", "ranks"),
    [
        ({"dp": 2, **FEW}, [SlowRank(1, 1.15)], "slow_rank", (1,)),
        ({"dp": 8, **ONCE}, [ExtraKernels(3, 2_000_000, "end", 4)], "uneven_ranks", (3,)),
        ({"dp": 4, "tp": 2, **ONCE}, [SlowKernel(5, 2_500_000, 4)], "slow_rank", (5,)),
        ({"dp": 8, **SHARDED, "steps": 5}, [SlowKernel(2, 3_000_000, 0, "begin")],
         "slow_rank", (2,)),
        ({"dp": 8, "shards": 4, **SHARDED}, [SlowRank(3, 1.15)], "slow_rank", (3,)),
        ({"dp": 8, "shards": 4, **SHARDED}, [HostStall(5, 1_500_000)], "host_stall", (5,)),
        ({"pp": 4, "dp": 2, "microbatches": 8, "early_receives": True},
         [SlowRank(4, 1.3), SlowRank(5, 1.3)], "slow_rank", (4, 5)),
        ({"pp": 4, "dp": 2, "microbatches": 8, "early_receives": True},
         [SlowLink("pp", 1, 15.0, 3)], "slow_link", (1, 3)),
        ({"pp": 4, "dp": 2, "microbatches": 8}, [SlowRank(1, 1.2), SlowRank(6, 1.2)],
         "slow_rank", (1, 6)),
        ({"dp": 4, "ep": 4, "microbatches": 2, "persistent": True}, [ExpertLoad(2, 1.5)],
         "uneven_ranks", (2,)),
        ({"dp": 8, "ep": 4, "microbatches": 2}, [SlowRank(5, 1.25)], "slow_rank", (5,)),
        ({"pp": 2, "dp": 4, "microbatches": 8}, [MoreWork(5, 1.4, "first")], "uneven_ranks", (5,)),
        ({"cp": 4, "dp": 4, "cp_ring": False, "microbatches": 4}, [SlowLink("cp", 5, 4.0)],
         "slow_link", (4, 5, 6, 7)),
        ({"dp": 16, **FEW}, [SlowRank(rank, 1.2) for rank in range(8)], "slow_rank",
         tuple(range(8))),
        ({"dp": 8, **ONCE}, [ExtraKernels(1, 2_000_000, "middle", 2), ExtraKernels(6, 3_000_000,
         "middle", 2)], "uneven_ranks", (1, 6)),
        ({"pp": 2, "microbatches": 8, "schedule": "gpipe"}, [SlowRank(1, 1.4)], "slow_rank", (1,)),
    ],
)  # fmt: skip
def test_a_job_that_the_benchmark_does_not_draw(
    sizes: dict[str, Any], causes: list[Cause], code: str, ranks: tuple[int, ...], tmp_path: Path
) -> None:
    report, cost_ns = record(tmp_path, sizes, *causes)
    (found,) = [one for one in report.findings if one.code == code]
    assert found.ranks == ranks
    assert found.gain_ns == pytest.approx(cost_ns, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [({"cp": 2}, (1,)), ({"cp": 4}, (2, 3)), ({"cp": 4, "dp": 2}, (2, 3, 6, 7)),
     ({"cp": 8, "layers": 1}, (4, 5, 6, 7)), ({"cp": 2, "layer_ns": 450_000}, (1,))],
)  # fmt: skip
def test_a_ring_of_causal_attention_with_blocks_in_order(
    sizes: dict[str, Any], ranks: tuple[int, ...], tmp_path: Path
) -> None:
    """Dealt out evenly, all rounds of the ring are as long: its work stays, the waits go."""
    sizes = {"microbatches": 2, "layers": 2, "layer_ns": 3_000_000, **sizes}
    report, cost_ns = record(tmp_path, sizes, CausalBlocks())
    assert (report.findings[0].code, report.findings[0].ranks) == ("uneven_ranks", ranks)
    assert report.findings[0].gain_ns == pytest.approx(cost_ns, rel=0.08)


def test_ends_that_are_recorded_late_hold_up_what_starts_before_them(tmp_path: Path) -> None:
    """The norm of the gradients starts when they are reduced, 3 us before the recorded end."""
    sizes = {"dp": 4, **FEW, "reduce_norm": True, "touching": True}
    job = Job("unusual", seed=4, **sizes)
    ran, cured = simulate(replace(job, causes=(SlowRank(2, 1.1),))), simulate(job)
    ran.write(tmp_path, TraceStyle(late_ends_ns=3_000))
    (slow,) = [one for one in analyze(tmp_path).findings if one.code == "slow_rank"]
    assert slow.gain_ns == pytest.approx(ran.step_ns - cured.step_ns, rel=0.05)


def test_a_device_that_heats_up_beside_a_single_other_one(tmp_path: Path) -> None:
    report, cost_ns = record(
        tmp_path, {"dp": 2, **FEW, "steps": 5, "noise": 0.02}, Throttling(1, 1.0, 1.2)
    )
    assert (report.findings[0].code, report.findings[0].ranks) == ("slow_rank", (1,))
    assert report.findings[0].gain_ns == pytest.approx(cost_ns, rel=0.05)


def test_larger_kernels_of_a_stage_leave_its_communication_as_it_is(tmp_path: Path) -> None:
    """Stages of as many layers reduce as many bytes: work that moves takes none of these along."""
    sizes = {"pp": 2, "tp": 2, "microbatches": 8, "layers": 1}
    job = Job("unusual", seed=4, **sizes)
    ran = simulate(replace(job, causes=(MoreWork(0, 1.2), MoreWork(1, 1.2))))
    even = simulate(replace(job, causes=tuple(MoreWork(rank, 1.1) for rank in range(4))))
    ran.write(tmp_path)
    (uneven,) = [one for one in analyze(tmp_path).findings if one.code == "uneven_stages"]
    assert uneven.ranks == (0, 1)
    assert uneven.gain_ns == pytest.approx(ran.step_ns - even.step_ns, rel=0.05)


def test_throttling_and_a_slow_link_are_two_findings(tmp_path: Path) -> None:
    """Together they cost what both findings say."""
    sizes = {"dp": 8, "tp": 2, **FEW, "steps": 4}
    report, cost_ns = record(tmp_path, sizes, Throttling(3, 1.05, 1.4), SlowLink("tp", 10, 3.0))
    found = {one.code: one for one in report.findings}
    assert (found["slow_link"].ranks, found["slow_rank"].ranks) == ((10, 11), (3,))
    both_ns = found["slow_link"].gain_ns + found["slow_rank"].gain_ns
    assert both_ns == pytest.approx(cost_ns, rel=0.05)


def test_a_stall_that_the_schedule_hides_is_not_said(tmp_path: Path) -> None:
    sizes = {"pp": 4, "microbatches": 8, "schedule": "zb-h1", "synchronize_microbatches": True}
    report, cost_ns = record(tmp_path, sizes, HostStall(2, 900_000))
    assert cost_ns < 0.01 * 27e6
    assert "host_stall" not in [one.code for one in report.findings]


def test_extra_kernels_of_two_ranks_in_two_steps_are_two_findings(tmp_path: Path) -> None:
    more = ExtraKernels(1, 1_800_000, "middle", 1), ExtraKernels(6, 1_800_000, "middle", 4)
    report, cost_ns = record(tmp_path, {"dp": 8, **FEW, "steps": 6}, *more)
    found = [one for one in report.findings if one.code == "uneven_ranks"]
    assert sorted((one.ranks, one.steps) for one in found) == [((1,), (3,)), ((6,), (6,))]
    assert sum(one.gain_ns for one in found) == pytest.approx(cost_ns, rel=0.05)


def test_an_evaluation_of_unequal_length_is_a_step_of_another_kind(tmp_path: Path) -> None:
    more = [ExtraKernels(rank, (2 + rank) * 500_000, "end", 2, 12 + 8 * rank) for rank in range(4)]
    report, cost_ns = record(tmp_path, {"dp": 4, **ONCE}, *more)
    assert (report.findings[0].code, report.findings[0].steps) == ("other_steps", (4,))
    assert report.findings[0].gain_ns == pytest.approx(cost_ns, rel=0.05)


@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_an_evaluation_of_few_and_long_kernels_is_a_step_of_another_kind(
    sizes: dict[str, Any], tmp_path: Path
) -> None:
    """12 kernels more of 128 or more take a fifth of the step, on each rank another time."""
    more = [ExtraKernels(rank, (2 + rank) * 500_000, "end", 2, 12) for rank in range(4)]
    report, cost_ns = record(tmp_path, {**sizes, **ONCE}, *more)
    assert (report.findings[0].code, report.findings[0].steps) == ("other_steps", (4,))
    assert report.findings[0].gain_ns == pytest.approx(cost_ns, rel=0.05)


@pytest.mark.parametrize("sizes", [{"dp": 8, **SHARDED}, {"dp": 8, "shards": 4, **SHARDED}])
def test_a_slow_rank_of_steps_that_are_graphs_costs_what_it_costs(
    sizes: dict[str, Any], tmp_path: Path
) -> None:
    """On fast ranks a gather queues behind the one before it, so that only the slow rank shows what
    compute it starts after."""
    job = Job("unusual", seed=4, described=False, **sizes)
    ran, cured = simulate(replace(job, causes=(SlowRank(3, 1.35),))), simulate(job)
    ran.write(tmp_path, TraceStyle(graph=True, captures=True))
    (slow,) = [one for one in analyze(tmp_path).findings if one.code == "slow_rank"]
    assert slow.ranks == (3,)
    assert slow.gain_ns == pytest.approx(ran.step_ns - cured.step_ns, rel=0.05)


def test_waits_for_a_rank_that_waited_in_calls_without_a_match_are_unexplained(
    tmp_path: Path,
) -> None:
    """Rank 1 is slow, and the messages to rank 3 of the next stage are not matched: rank 3 comes
    late to its replica, and nothing says why."""
    job = Job("unusual", seed=5, pp=2, dp=2, microbatches=8, described=False)
    simulate(replace(job, causes=(SlowRank(1, 1.35),))).write(
        tmp_path, TraceStyle(graph=True, captures=True)
    )
    report = analyze(tmp_path)
    assert {(row.rank, row.cause) for row in report.blame if row.rank is not None} == {
        (1, "compute")
    }
    assert "unexplained" in {row.cause for row in report.blame}
    assert "at least, as calls that are not matched" in report.findings[0].message


@pytest.mark.parametrize("layers", [2, 4])
def test_gradients_of_accumulated_microbatches_are_ready_in_the_last_one(
    layers: int, tmp_path: Path
) -> None:
    """Nothing but the repeated kernels tells how long the last backward is."""
    job = Job("unusual", seed=4, dp=4, microbatches=8, layers=layers, bucket_ns=4_000_000)
    late, in_time = simulate(replace(job, late_buckets=True)), simulate(job)
    late.write(tmp_path)
    (lost,) = [one for one in analyze(tmp_path).findings if one.code == "no_overlap"]
    assert lost.gain_ns == pytest.approx(late.step_ns - in_time.step_ns, rel=0.05)


@pytest.mark.parametrize("by", ["nccl", "deep_ep", "hybrid_ep"])
def test_even_experts_save_what_the_finding_of_the_hot_one_says(by: str, tmp_path: Path) -> None:
    job = Job("unusual", seed=4, dp=8, ep=4, microbatches=4, experts_by=by)
    ran, even = simulate(replace(job, causes=(ExpertLoad(2, 1.6),))), simulate(job)
    ran.write(tmp_path, TraceStyle(annotates=True))
    cost_ns = ran.step_ns - even.step_ns
    assert analyze(tmp_path).findings[0].gain_ns == pytest.approx(cost_ns, rel=0.05)
    for one in what_if(tmp_path, changes=["even", "even-ranks"]).changes:
        assert one.gain_ns == pytest.approx(cost_ns, rel=0.05)


def test_a_ring_whose_messages_are_longer_than_its_rounds_says_that_the_saving_is_rough(
    tmp_path: Path,
) -> None:
    sizes = {"cp": 8, "microbatches": 2, "layers": 2, "layer_ns": 450_000}
    report, _ = record(tmp_path, sizes, CausalBlocks())
    assert report.findings[0].ranks == (4, 5, 6, 7)
    assert "a rough saving" in report.findings[0].message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slow_rank_of_two_stages_that_share_messages_alone(rank: int, tmp_path: Path) -> None:
    """Of two opposite pipelines the slow rank comes last at each message: when these end tells how
    the clocks differ. The first step began when the slow rank had ended the one before."""
    sizes = {"pp": 2, "microbatches": 8, "layers": 1, "schedule": "dualpipe"}
    report, cost_ns = record(tmp_path, sizes, SlowRank(rank, 1.3))
    assert (report.findings[0].code, report.findings[0].ranks) == ("slow_rank", (rank,))
    assert report.findings[0].gain_ns == pytest.approx(cost_ns, rel=0.16)


@pytest.mark.parametrize("rank", [0, 3])
def test_groups_of_custom_sums_are_not_taken_for_those_of_other_stages(
    rank: int, tmp_path: Path
) -> None:
    """Stages in lockstep end some of their own sums at the same distance in every step."""
    sizes = {"pp": 2, "tp": 2, "microbatches": 6, "tensor_by": "sglang_two_shot"}
    job = Job("unusual", seed=3, **sizes, causes=(SlowRank(rank, 1.3),))
    ran, cured = simulate(job), simulate(replace(job, causes=()))
    ran.write(tmp_path, TraceStyle(lists_groups="none", names_groups=False))
    report = analyze(tmp_path)
    sums = {report.groups[row.group].ranks for row in report.collectives if row.op == "all_reduce"}
    assert sums == {(0, 1), (2, 3)}
    (found,) = [one for one in report.findings if one.code == "slow_rank"]
    assert found.ranks == (rank,)
    assert found.gain_ns == pytest.approx(ran.step_ns - cured.step_ns, rel=0.05)


def test_what_a_step_that_reads_its_loss_waits_for_the_host_is_what_reading_it_costs(
    tmp_path: Path,
) -> None:
    """At steps of 14 ms the host's launches after the read take 1.2 %: no false finding."""
    job = Job("unusual", seed=4, tp=2, microbatches=4, layers=2)
    reads, never = simulate(job), simulate(replace(job, end_of_step="none"))
    reads.write(tmp_path)
    (found,) = analyze(tmp_path).findings
    assert found.code == "host_bound"
    assert found.gain_ns == pytest.approx(reads.step_ns - never.step_ns, rel=0.05)


@pytest.mark.parametrize(
    "sizes",
    [
        {"schedule": "interleaved", "chunks": 2},
        {"schedule": "dualpipe-v"},
        {"schedule": "dualpipe"},
    ],
    ids=lambda sizes: sizes["schedule"],
)
def test_microbatches_of_several_chunks_do_not_follow_from_the_pace_of_messages(
    sizes: dict[str, Any], tmp_path: Path
) -> None:
    """A rank sends a message for each of its chunks: twice as many as there are microbatches."""
    simulate(Job("unusual", seed=4, pp=2, microbatches=8, layers=1, **sizes)).write(tmp_path)
    with pytest.raises(UsageError, match="several chunks"):
        what_if(tmp_path, changes=["microbatches=16"])


@pytest.mark.parametrize("events", ["none", "cuda_sync"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"schedule": "zb-v", "pp": 4},
        {"schedule": "zb-v", "pp": 2, "dp": 2},
        {"schedule": "interleaved", "chunks": 2, "pp": 2},
        {"schedule": "dualpipe-v", "pp": 4},
    ],
    ids=lambda sizes: f"{sizes['schedule']}-{sizes['pp']}",
)
def test_a_slow_rank_of_stages_in_a_v_or_a_ring_costs_what_it_costs(
    sizes: dict[str, Any], events: str, tmp_path: Path
) -> None:
    """Activations and gradients go the same way, and a send may end with the receive that the rank
    waits for."""
    sizes = {"microbatches": 8, "layers": 1, "whole_kernels": True, **sizes}
    job = Job("unusual", seed=11, **sizes)
    ran, cured = simulate(replace(job, causes=(SlowRank(0, 1.4),))), simulate(job)
    ran.write(tmp_path, TraceStyle(events=events))
    (slow,) = [one for one in analyze(tmp_path).findings if one.code == "slow_rank"]
    assert slow.ranks == (0,)
    assert slow.gain_ns == pytest.approx(ran.step_ns - cured.step_ns, rel=0.05)
