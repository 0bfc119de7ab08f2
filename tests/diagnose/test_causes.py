"""Bottlenecks of a run: the right cause first, a correct gain, no finding for a healthy run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from simulator.planted import PLANTED
from support.builders import COMM_STREAM, CpuTrace, GpuTrace
from support.ground_truth import SEED
from support.planted_causes import examine_planted
from support.replay_builders import scene
from support.required import shared_repro

from stepsplit.analyzer import Finding, analyze
from stepsplit.analyzer.diagnose.causes.backward_passes import BackwardPasses
from stepsplit.analyzer.diagnose.causes.cause import Remedy
from stepsplit.analyzer.diagnose.causes.unmask import unmask
from stepsplit.analyzer.diagnose.graph.segments import WorkSegments
from stepsplit.collectors.formats.rank_record import GpuState, MemoryState, RankRecord, write_record
from stepsplit.collectors.formats.run_spec import RankInfo

QUICK = (
    "slow_rank fsdp",
    "redundant_calls tp",
    "nothing tp_dp",
)
PAIR = [("0", "mesh_tp", [0, 1])]
BACKWARD = "autograd::engine::evaluate_function: MulBackward0"


def findings(folder: Path, *traces: GpuTrace | CpuTrace) -> tuple[Finding, ...]:
    return analyze(*(trace.write(folder) for trace in traces)).findings


SLOW = [
    pytest.param(name, marks=(pytest.mark.slow, pytest.mark.in_turn("analyzer/diagnose")))
    for name in PLANTED
    if name not in QUICK
]


@pytest.mark.seeded
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_planted_cause_is_first_and_its_size_within_a_tenth(name: str, tmp_path: Path) -> None:
    found = examine_planted(name, SEED, tmp_path)
    assert found.first, (SEED, found.ranks, [(f.code, f.ranks, f.gain_ns) for f in found.findings])
    if found.findings:
        assert abs(found.off) <= 0.1, (SEED, found.off)
        assert found.findings[0].steps == (1, 2, 3, 4)
        assert found.findings[0].message


def test_a_rank_with_more_work_than_its_stage_is_named(tmp_path: Path) -> None:
    """Rank 1 runs one kernel more: 90 of compute, rank 0 has 50. Without it, it reaches the
    all_reduce after 40 instead of 80, and both ranks end 40 earlier."""
    traces = []
    for rank, busy in ((0, 40), (1, 80)):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100)
        trace.kernel("gemm", 0, 40)
        if busy > 40:
            trace.kernel("more", 40, 80)
        traces.append(trace.all_reduce(busy, 90).kernel("adam", 90, 100))
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks, found.gain_ns) == ("uneven_ranks", (1,), 40_000)
    assert found.message == (
        "load imbalance: rank 1 has 80.0 % more compute than the other ranks of its stage; from a "
        "single step"
    )


@pytest.mark.parametrize(
    ("grid", "doubt"),
    [([8, 1, 1], "as many kernels of equal grids, too few to tell"),
     ([12, 1, 1], ""),
     (None, "no shapes recorded")],
    ids=["equal grid", "larger grid", "no grid"],
)  # fmt: skip
def test_a_rank_that_takes_longer_for_few_kernels_is_only_known_to_have_more_work_by_their_shapes(
    grid: list[int] | None, doubt: str, tmp_path: Path
) -> None:
    """Two gemms a step are too few to know that they are slower; rank 1 takes 40 for each."""
    traces = []
    for rank, took in enumerate((20, 40)):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100)
        own = {} if grid is None else {"grid": grid if rank else [8, 1, 1]}
        trace.kernel("gemm", 0, took, **own).kernel("gemm", took, 2 * took, **own)
        traces.append(trace.all_reduce(2 * took, 90).kernel("adam", 90, 100))
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks) == ("uneven_ranks", (1,))
    assert found.message == (
        "load imbalance: rank 1 computes 80.0 % longer than the other ranks of its stage: more "
        f"work, or a slower device ({doubt}); from a single step"
        if doubt
        else "load imbalance: rank 1 has 80.0 % more compute than the other ranks of its stage; "
        "from a single step"
    )


def test_the_slower_links_of_another_axis_are_no_slow_links(tmp_path: Path) -> None:
    """All-reduces of one size take 10 along tp and 60 along dp, whose ranks are farther apart."""
    traces = []
    for rank in range(4):
        tp, dp = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        groups = [("0", "mesh_tp", tp), ("1", "mesh_dp", dp)]
        trace = GpuTrace(rank, 4, groups=groups)
        for step in range(4):
            at = 200 * step
            trace.step(step, at, at + 190).kernel("gemm", at, at + 40)
            trace.all_reduce(at + 40, at + 50).all_reduce(at + 60, at + 70)
            trace.all_reduce(at + 80, at + 140, group="1").kernel("adam", at + 140, at + 150)
        traces.append(trace)
    assert "slow_link" not in {found.code for found in findings(tmp_path, *traces)}


def test_logits_gathered_in_each_accumulated_microbatch_are_none_too_many(tmp_path: Path) -> None:
    """Tensor parallelism, two microbatches an update: each gathers its logits once."""
    traces = []
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=PAIR)
        for step in range(2):
            trace.step(step, 300 * step, 300 * step + 290)
            for begin in (300 * step, 300 * step + 120):
                trace.op("aten::linear", begin, begin + 10).kernel("gemm", begin, begin + 10)
                trace.all_reduce(begin + 20, begin + 40)
                trace.collective("AllGather", "_allgather_base", begin + 45, begin + 65)
                trace.op(BACKWARD, begin + 70, begin + 110)
                trace.all_reduce(begin + 80, begin + 100)
            trace.annotation("Optimizer.step#AdamW.step", 300 * step + 250, 300 * step + 280)
        traces.append(trace)
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    assert "gradient accumulation" in {one.name for one in report.run.strategies}
    assert "redundant_calls" not in {found.code for found in report.findings}


def test_all_ranks_that_have_more_work_are_named(tmp_path: Path) -> None:
    """To relieve one of the two saves nothing."""
    traces = []
    for rank in range(4):
        trace = GpuTrace(rank, 4, groups=[("0", "mesh_dp", [0, 1, 2, 3])]).step(1, 0, 100)
        trace.kernel("gemm", 0, 40)
        busy = 80 if rank in (1, 3) else 40
        if busy > 40:
            trace.kernel("more", 40, 80)
        traces.append(trace.all_reduce(busy, 90).kernel("adam", 90, 100))
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks) == ("uneven_ranks", (1, 3))
    assert found.message == (
        "load imbalance: ranks 1, 3 have up to 28.6 % more compute than the average rank of their "
        "stage; from a single step"
    )


@pytest.mark.parametrize(
    ("returned", "message"),
    [(1500, "has 12.5 % more compute than the other ranks of its stage; it sends 25.0 % more in "
      "all_to_all on ep: its experts receive more tokens"),
     (1000, "computes 12.5 % longer than the other ranks of its stage: more work, or a slower "
      "device (no shapes recorded)")],
    ids=["more tokens", "equal tokens"],
)  # fmt: skip
def test_more_work_of_an_expert_parallel_rank_is_explained_by_its_tokens(
    returned: int, message: str, tmp_path: Path
) -> None:
    """Each rank sends 1000 elements to the experts. Rank 1 takes 60 for them, rank 0 takes 40, and
    returns what its experts received."""
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_ep", [0, 1])])
        took, back = (60, returned) if rank else (40, 1000)
        for step in range(3):
            at = 200 * step
            trace.step(step, at, at + 200).kernel("gemm", at, at + 50)
            trace.collective("AllToAll", "all_to_allv", at + 50, at + 60)
            trace.kernel("experts", at + 60, at + 60 + took)
            trace.collective("AllToAll", "all_to_allv", at + 60 + took, at + 130, nelems=back)
            trace.kernel("adam", at + 130, at + 200)
        traces.append(trace)
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks) == ("uneven_ranks", (1,))
    assert found.message == f"load imbalance: rank 1 {message}"


def test_balanced_experts_have_the_work_and_the_exchanges_of_the_average_rank(
    tmp_path: Path,
) -> None:
    """Rank 1's experts receive 1500 of 2000 tokens and take 60 for them, rank 0's 20; attention
    takes 50 on both, and each exchange 12 after the last arrival. Balanced experts take 40 and
    exchanges 12 / 1.5: 20 and twice 4 less."""
    traces = []
    for rank, (received, took) in enumerate([(500, 20), (1500, 60)]):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_ep", [0, 1])])
        for step in range(3):
            at = 250 * step
            trace.step(step, at, at + 250).kernel("gemm", at, at + 50)
            trace.collective("AllToAll", "all_to_allv", at + 50, at + 62, nelems=1000)
            trace.kernel("experts", at + 62, at + 62 + took, grid=[received, 1, 1])
            trace.collective("AllToAll", "all_to_allv", at + 62 + took, at + 134, nelems=received)
            trace.kernel("adam", at + 134, at + 250)
        traces.append(trace)
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks, found.gain_ns) == ("uneven_ranks", (1,), 28_000)


def test_a_host_that_is_late_costs_what_the_others_wait(tmp_path: Path) -> None:
    """Rank 0 is idle from 20 to 60, rank 1 arrives at 30. The ranks are never idle together, so
    there is no host_bound finding."""
    late = GpuTrace(0, 2, groups=PAIR).step(1, 0, 90)
    late.kernel("a", 0, 20).kernel("b", 60, 70, launched=60).all_reduce(70, 80)
    late.kernel("adam", 80, 90)
    early = GpuTrace(1, 2, groups=PAIR).step(1, 0, 90)
    early.kernel("a", 0, 20).kernel("b", 20, 30).all_reduce(30, 80).kernel("adam", 80, 90)
    (stall,) = findings(tmp_path, late, early)
    assert (stall.code, stall.ranks, stall.gain_ns) == ("host_stall", (0,), 40_000)


def test_ranks_that_are_equally_late_are_one_finding(tmp_path: Path) -> None:
    """Hosts 1 and 3 of four stall for 40 before the work: either one alone gains nothing."""
    group = [("0", "mesh_dp", [0, 1, 2, 3])]
    traces = []
    for rank in range(4):
        trace = GpuTrace(rank, 4, groups=group)
        for step in range(3):
            begin, stall = 100 * step, 40 * (rank % 2)
            trace.step(step, begin, begin + 100)
            trace.kernel("gemm", begin + stall, begin + stall + 40)
            trace.all_reduce(begin + stall + 40, begin + 90)
            trace.kernel("adam", begin + 90, begin + 100)
        traces.append(trace)
    first, *_ = findings(tmp_path, *traces)
    assert (first.code, first.ranks, first.gain_ns) == ("host_stall", (1, 3), 40_000)
    assert first.message.startswith(
        "ranks 1, 3 are host-bound and mask each other (fixing one of 2 saves at most 0.00 ms): "
    )


@pytest.mark.parametrize(
    ("slow", "named"),
    [((2, 3), "ranks 2, 3 (all of host b) are"), ((3, 4), "ranks 3, 4 are"),
     ((4, 6), "ranks 4, 6 (on host c) are")],
    ids=["a host", "two hosts", "part of a host"],
)  # fmt: skip
def test_stragglers_that_share_a_host_name_it(
    slow: tuple[int, ...], named: str, tmp_path: Path
) -> None:
    """Two ranks each on hosts a and b, three on c; the slow ones need 14 for a gemm, not 10."""
    hosts, ranks = "aabbccc", range(7)
    traces = []
    for rank in ranks:
        trace = GpuTrace(rank, 7, host=hosts[rank], groups=[("0", "mesh_dp", list(ranks))])
        took = 14 if rank in slow else 10
        for step in range(3):
            at = 200 * step
            trace.step(step, at, at + 200)
            for i in range(12):
                trace.kernel("gemm", at + took * i, at + took * i + took, grid=[8, 1, 1])
            trace.all_reduce(at + 12 * took, at + 190).kernel("adam", at + 190, at + 200)
        traces.append(trace)
    found, *_ = findings(tmp_path, *traces)
    assert (found.code, found.ranks, found.gain_ns) == ("slow_rank", slow, 48_000)
    assert found.message.startswith(f"{named} stragglers and mask each other")


def test_a_cause_that_gains_nothing_before_another_is_fixed_comes_after_it(tmp_path: Path) -> None:
    """Rank 1 arrives at 100, because its host stalls for 60, and rank 3 at 80, because its kernel
    takes 80 instead of 40. Fixing rank 1 gains 20, and then fixing rank 3 another 40."""
    traces = []
    for rank, begin, arrival in ((0, 0, 40), (1, 60, 100), (2, 0, 40), (3, 0, 80)):
        trace = GpuTrace(rank, 4, groups=[("0", "mesh_dp", [0, 1, 2, 3])])
        for step in range(12):
            at = 130 * step
            trace.step(step, at, at + 130).kernel("gemm", at + begin, at + arrival)
            trace.all_reduce(at + arrival, at + 120).kernel("adam", at + 120, at + 130)
        traces.append(trace)
    stall, slow = findings(tmp_path, *traces)
    assert (stall.code, stall.ranks, stall.gain_ns) == ("host_stall", (1,), 20_000)
    assert (slow.code, slow.ranks, slow.gain_ns) == ("slow_rank", (3,), 40_000)
    assert slow.message.endswith("; saves 0.00 ms alone, the rest once rank 1 is fixed")


def test_a_cause_behind_the_second_largest_is_found(tmp_path: Path) -> None:
    """As above, and all ranks wait 50 for their loaders first: fixing that does not help rank 3."""
    traces = []
    for rank, begin, arrival in ((0, 0, 40), (1, 60, 100), (2, 0, 40), (3, 0, 80)):
        trace = GpuTrace(rank, 4, groups=[("0", "mesh_dp", [0, 1, 2, 3])])
        for step in range(12):
            at = 180 * step
            trace.step(step, at, at + 180)
            trace.op("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, at + 50)
            trace.op("aten::mm", at + 50 + begin, at + 51 + begin)
            trace.kernel("gemm", at + 50 + begin, at + 50 + arrival)
            trace.all_reduce(at + 50 + arrival, at + 170).kernel("adam", at + 170, at + 180)
        traces.append(trace)
    found = findings(tmp_path, *traces)
    assert [(one.code, one.ranks, one.gain_ns) for one in found] == [
        ("data_loading", (), 50_000), ("host_stall", (1,), 20_000), ("slow_rank", (3,), 40_000)
    ]  # fmt: skip
    assert found[-1].message.endswith("; saves 0.00 ms alone, the rest once rank 1 is fixed")


def test_a_link_slower_than_others_with_the_same_traffic_is_found(tmp_path: Path) -> None:
    """Four calls each: 10 between ranks 0 and 1, 20 between 2 and 3; no rank waits."""
    traces = []
    for rank in range(4):
        first = rank // 2 * 2
        groups = [("0", "mesh_tp", [0, 1]), ("1", "mesh_tp", [2, 3])]
        took = 10 if first == 0 else 20
        trace = GpuTrace(rank, 4, groups=groups).step(1, 0, 4 * (took + 10) + 10)
        for call in range(4):
            at = call * (took + 10)
            trace.kernel("gemm", at, at + 10)
            trace.all_reduce(at + 10, at + 10 + took, group=str(first // 2))
        traces.append(trace.kernel("adam", 4 * (took + 10), 4 * (took + 10) + 10))
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks) == ("slow_link", (2, 3))
    assert found.gain_ns == 20_000, "of 40 on two of four ranks"
    assert "slow link between ranks 2, 3 on tp: transfers are 2.0x slower" in found.message


def test_links_that_differ_by_chance_are_no_finding(tmp_path: Path) -> None:
    """Two pairs of ranks, five steps with one call each, whose times scatter by a third: of 30 such
    recordings none has a slow link. A link that takes eight times as long is one."""
    chance = random.Random(1)

    def find_links(factor: float) -> list[tuple[int, ...]]:
        traces = []
        for rank in range(4):
            groups = [("0", "mesh_tp", [0, 1]), ("1", "mesh_tp", [2, 3])]
            traces.append(GpuTrace(rank, 4, groups=groups))
        for step in range(5):
            for pair in (0, 1):
                took = (factor if pair else 1) * 50 * chance.lognormvariate(0, 0.33)
                for trace in traces[2 * pair : 2 * pair + 2]:
                    at = 1000 * step
                    trace.step(step, at, at + 1000).kernel("gemm", at, at + 100)
                    trace.all_reduce(at + 100, at + 100 + took, group=str(pair))
                    trace.kernel("adam", at + 100 + took, at + 1000)
        return [one.ranks for one in findings(tmp_path, *traces) if one.code == "slow_link"]

    assert [find_links(1.0) for _ in range(30)] == [[]] * 30
    chance = random.Random(2)
    assert find_links(8.0) == [(2, 3)]


def test_gradients_that_overlap_already_are_no_finding(tmp_path: Path) -> None:
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_dp_replicate", [0, 1])]).step(1, 0, 110)
        trace.kernel("a", 0, 40).all_reduce(40, 60).kernel("b", 40, 80).all_reduce(80, 100)
        traces.append(trace.kernel("adam", 100, 110))
    assert findings(tmp_path, *traces) == ()


def test_gathers_of_fully_sharded_weights_are_needed_twice(tmp_path: Path) -> None:
    """Forward and backward each gather what the backward scatters: no finding."""
    traces = []
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=[("0", "mesh_dp_shard", [0, 1])]).step(1, 0, 100)
        trace.collective("AllGather", "all_gather_into_tensor", 0, 10).kernel("f", 10, 30)
        trace.collective("AllGather", "all_gather_into_tensor", 30, 40).kernel("b", 40, 70)
        trace.collective("ReduceScatter", "reduce_scatter_tensor", 70, 80)
        traces.append(trace.kernel("adam", 80, 100))
    assert findings(tmp_path, *traces) == ()


def test_a_report_without_steps_or_ranks_to_wait_for_has_no_causes(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 10)
    assert analyze(trace.write(tmp_path)).findings == ()


@pytest.mark.parametrize(
    ("clocks_mhz", "why"),
    [
        (
            (1980, 1200, 1980),
            "; SM clock 1,200 MHz (median rank: 1,980 MHz); "
            "throttled: thermal slowdown by hardware",
        ),
        ((1200, 1980, 1980), ""),
        ((), ""),
        ((0, 0, 0), "; SM clock unknown: NVML does not read AMD GPUs"),
    ],
    ids=["hot", "another is hot", "not read", "cannot be read"],
)
def test_a_straggler_finding_names_the_clock_and_throttling_if_recorded(
    clocks_mhz: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    """Rank 1 takes 14 us for a gemm, the others 10."""
    traces = [GpuTrace(rank, 3, groups=[("0", "mesh_tp", [0, 1, 2])]) for rank in range(3)]
    for rank, trace in enumerate(traces):
        took = 14 if rank == 1 else 10
        for step in (1, 2):
            at = 300 * step
            trace.step(step, at, at + 190)
            for i in range(12):
                trace.kernel("gemm", at + took * i, at + took * i + took, grid=[8, 1, 1])
            trace.all_reduce(at + 12 * took, at + 180).kernel("adam", at + 180, at + 190)
        trace.write(tmp_path)
    for rank, clock in enumerate(clocks_mhz):
        reasons = 0x40 if clock == 1200 else 0x1
        where, gpu = (
            RankInfo(rank, rank, "node0", 1, "cuda"),
            GpuState(0, sm_clock_mhz=clock, throttle_reasons=reasons),
        )
        unread = clock == 0
        note = "NVML does not read AMD GPUs" if unread else ""
        states = () if unread else (gpu,)
        write_record(tmp_path, RankRecord("job", where, 3, "nccl", gpu=states, gpu_note=note))
    (slow,) = (one for one in analyze(tmp_path).findings if one.code == "slow_rank")
    assert slow.message == (
        f"rank 1 is a straggler: its GEMM kernels are 1.40x slower than on its peers at equal "
        f"grids (no shapes recorded){why}"
    )


def uneven_job(
    grid: list[int] | None, larger: list[int] | None, *, dims: bool = False
) -> list[GpuTrace]:
    """Three data-parallel ranks with 12 gemms a step; those of rank 1 take 14 us, the others' 10.

    Its launch grid is the larger one, the others' is grid. dims: all ops have inputs of one shape.
    """
    traces = [
        GpuTrace(rank, 3, groups=[("0", "mesh_dp_replicate", [0, 1, 2])]) for rank in range(3)
    ]
    for rank, trace in enumerate(traces):
        took, own = (14, larger) if rank == 1 else (10, grid)
        for step in (1, 2, 3):
            at = 190 * step
            trace.step(step, at, at + 190)
            for i in range(12):
                begin = at + took * i
                if dims:
                    shapes = {"Input Dims": [[8, 128], [128, 512]]}
                    trace.op("aten::mm", begin, begin + 1, **shapes)
                launch = {} if own is None else {"grid": own}
                trace.kernel("gemm", begin, begin + took, **launch)
            trace.all_reduce(at + 12 * took, at + 180).kernel("adam", at + 180, at + 190)
    return traces


SLOW_GEMM = "rank 1 is a straggler: its GEMM kernels are 1.40x slower than on its peers"


@pytest.mark.parametrize(
    ("grid", "larger", "dims", "code", "message"),
    [
        ([8, 1, 1], [8, 1, 1], False, "slow_rank", f"{SLOW_GEMM} at equal grids (no shapes "
         "recorded)"),
        (None, None, False, "slow_rank", f"{SLOW_GEMM}, unless its inputs are larger (no shapes "
         "recorded)"),
        ([8, 1, 1], [12, 1, 1], False, "uneven_ranks", "load imbalance: rank 1 has 36.9 % more "
         "compute than the other ranks of its stage"),
        ([8, 1, 1], [12, 1, 1], True, "slow_rank", f"{SLOW_GEMM} at equal shapes"),
    ],
    ids=["same grid", "no shapes", "larger grid", "same shapes on another grid"],
)  # fmt: skip
def test_a_rank_with_longer_kernels_is_slow_or_has_more_work_by_their_shapes(
    grid: list[int] | None,
    larger: list[int] | None,
    dims: bool,
    code: str,
    message: str,
    tmp_path: Path,
) -> None:
    """In each case it delays the others by 48 us, and blame agrees with the finding."""
    report = analyze(*(t.write(tmp_path) for t in uneven_job(grid, larger, dims=dims)))
    (found,) = report.findings
    assert (found.code, found.ranks, found.message) == (code, (1,), message)
    assert found.gain_ns == pytest.approx(48_000, rel=0.1)
    blamed = max(report.blame, key=lambda row: row.caused_ns)
    cause = "imbalance" if code == "uneven_ranks" else "compute"
    assert (blamed.rank, blamed.cause) == (1, cause)


def throttled_job(
    slow: Sequence[int], larger: Sequence[int] = (), grid: bool = True, steps: int = 5
) -> list[GpuTrace]:
    """Two data-parallel ranks with 12 gemms of 10 us a step, on rank 1 of 20 us in these steps. In
    the larger ones their grid is larger too."""
    traces = [GpuTrace(rank, 2, groups=[("0", "mesh_dp", [0, 1])]) for rank in (0, 1)]
    for rank, trace in enumerate(traces):
        at = 0
        for step in range(1, steps + 1):
            took, end = 20 if rank and step in slow else 10, at + 12 * (20 if step in slow else 10)
            trace.step(step, at, end + 20)
            own = {"grid": [12 if rank and step in larger else 8, 1, 1]} if grid else {}
            for i in range(12):
                trace.kernel("gemm", at + took * i, at + took * (i + 1), **own)
            trace.all_reduce(at + 12 * took, end + 10).kernel("adam", end + 10, end + 20)
            at = end + 20
    return traces


@pytest.mark.parametrize(
    ("slow", "times", "equal"),
    [((2,), "1 of 5", " at equal grids (no shapes recorded)"),
     ((2, 5), "2 of 5", " at equal grids (no shapes recorded)"),
     ((2,), "1 of 5", ", unless its inputs are larger (no shapes recorded)")],
    ids=["one step", "two steps", "no shapes"],
)  # fmt: skip
def test_a_rank_that_is_slow_in_single_steps_is_a_straggler_there(
    slow: tuple[int, ...], times: str, equal: str, tmp_path: Path
) -> None:
    """Each costs the job 120 us, as the other rank waits; adam is as fast as ever."""
    (found,) = findings(tmp_path, *throttled_job(slow, grid="grids" in equal))
    assert (found.code, found.ranks, found.steps) == ("slow_rank", (1,), slow)
    assert found.gain_ns == pytest.approx(120_000 * len(slow) / 5, rel=0.05)
    assert found.message == (
        f"rank 1 is a straggler in {times} steps ({', '.join(map(str, slow))}): as many kernels "
        f"take 1.92x as long there as in its other steps{equal}"
    )


@pytest.mark.parametrize("code", ["slow_rank", "uneven_ranks"])
def test_of_many_steps_a_message_names_eight(code: str, tmp_path: Path) -> None:
    """Rank 1 takes 120 us longer in nine of sixty steps; the finding has them all."""
    steps = tuple(range(2, 60, 7))
    larger = steps if code == "uneven_ranks" else ()
    found = findings(tmp_path, *throttled_job(steps, larger, steps=60))[0]
    assert (found.code, found.ranks, found.steps) == (code, (1,), steps)
    assert " in 9 of 60 steps (2, 9, 16, 23, 30, 37, 44, 51, ...)" in found.message


def test_without_a_ring_uneven_work_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All work beside the uneven kernels is asked for by rings of context parallelism alone."""
    measure, parts = WorkSegments.measure, []

    def record(graph: Any, work: str, part_ns: Any = None) -> WorkSegments:
        parts.append("all" if part_ns is None else "uneven")
        return measure(graph, work, part_ns)

    monkeypatch.setattr(WorkSegments, "measure", record)
    (found,) = findings(tmp_path, *uneven_job([8, 1, 1], [12, 1, 1]))
    assert found.code == "uneven_ranks"
    assert set(parts) == {"uneven"}


def test_a_larger_batch_in_one_step_is_no_slow_rank(tmp_path: Path) -> None:
    assert "slow_rank" not in [f.code for f in findings(tmp_path, *throttled_job((2,), (2,)))]


def cpu_job(rows: dict[int, int] | None) -> list[CpuTrace]:
    """Two ranks on gloo with 12 matrix products a step, 10 us on rank 0 and 15 on rank 1.

    rows: of the left matrix on each rank, where shapes are recorded.
    """
    traces = [CpuTrace(rank, 2, [("0", "mesh_dp_replicate", [0, 1])]) for rank in (0, 1)]
    for rank, trace in enumerate(traces):
        took = 15 if rank else 10
        for step in (1, 2, 3):
            at = 200 * step
            trace.step(step, at, at + 200)
            for i in range(12):
                shapes = {} if rows is None else {"Input Dims": [[rows[rank], 64], [64, 64]]}
                trace.op("aten::mm", at + took * i, at + took * (i + 1), **shapes)
            trace.all_reduce(at + 12 * took, at + 12 * took, at + 190, group="0", seq=step, tid=7)
            trace.op("aten::add_", at + 190, at + 200)
    return traces


@pytest.mark.parametrize(
    ("rows", "code"),
    [({0: 8, 1: 12}, "uneven_ranks"), ({0: 8, 1: 8}, "slow_rank"), (None, "slow_rank")],
    ids=["more rows", "as many rows", "no shapes"],
)
def test_a_larger_batch_of_a_cpu_run_is_load_imbalance(
    rows: dict[int, int] | None, code: str, tmp_path: Path
) -> None:
    first, *_ = analyze(*(trace.write(tmp_path) for trace in cpu_job(rows))).findings
    assert (first.code, first.ranks) == (code, (1,))
    assert first.message.endswith("(no shapes recorded)") == (rows is None)


def lone_stages(grids: tuple[list[int], list[int]] | None) -> list[GpuTrace]:
    """Two stages of one rank: four microbatches of three gemms, 40 us each, on rank 1 60 us."""
    traces = [GpuTrace(rank, 2, groups=[("0", "mesh_pp", [0, 1])]) for rank in (0, 1)]
    for rank, trace in enumerate(traces):
        launch = {} if grids is None else {"grid": grids[rank]}
        for step in (1, 2, 3):
            begin = at = 900 * step
            trace.step(step, at, at + 900)
            for microbatch in range(4):
                if rank == 1:
                    sent = begin + 130 * (microbatch + 1)
                    trace.message("recv", 0, max(at, sent - 10), max(at + 1, sent))
                    at = max(at + 1, sent)
                took = (40, 60)[rank]
                for i in range(3):
                    trace.kernel("gemm", at + took * i, at + took * (i + 1), **launch)
                at += 3 * took
                if rank == 0:
                    trace.message("send", 1, at, at + 10)
                    at += 10
            peer_ends = begin + 130 + 4 * 180 + 3
            trace.message(("recv", "send")[rank], 1 - rank, at, peer_ends + 5)
            trace.kernel("adam", peer_ends + 5, begin + 900)
    return traces


@pytest.mark.parametrize(
    ("grids", "found"),
    [
        (([8, 1, 1], [8, 1, 1]), {"slow_rank": "rank 1 is a straggler: its GEMM kernels are 1.50x "
                                  "slower than on its peers at equal grids (no shapes "
                                  "recorded)"}),
        (([8, 1, 1], [12, 1, 1]), {"uneven_stages": "pipeline imbalance: stage 1 has 18.7 % more "
                                   "compute than average; move layers off it"}),
        (None, {"uneven_stages": "pipeline imbalance: stage 1 computes 18.7 % longer than average: "
                "more work, or a slower device (no shapes recorded)"}),
    ],
    ids=["same grid", "larger grid", "no shapes"],
)  # fmt: skip
def test_the_only_rank_of_a_stage_has_no_peers_unless_shapes_are_equal(
    grids: tuple[list[int], list[int]] | None, found: dict[str, str], tmp_path: Path
) -> None:
    findings_of_job = findings(tmp_path, *lone_stages(grids))
    assert {
        one.code: one.message
        for one in findings_of_job
        if one.code in ("slow_rank", "uneven_stages")
    } == found


def tensor_parallel_stages(unsized: Sequence[int]) -> list[GpuTrace]:
    """Two stages of two ranks: in each of four microbatches three gemms, 40 us each and on the
    second stage 60 us with a larger grid, and a reduction of 30 us. These ranks record no sizes."""
    groups = [("0", "mesh_pp", [0, 2]), ("1", "mesh_pp", [1, 3])]
    groups += [("2", "mesh_tp", [0, 1]), ("3", "mesh_tp", [2, 3])]
    traces = [GpuTrace(rank, 4, groups=groups) for rank in range(4)]
    for rank, trace in enumerate(traces):
        stage, pipe = rank // 2, {"peer": (rank + 2) % 4, "group": str(rank % 2)}
        took = (40, 60)[stage]
        for step in (1, 2, 3):
            begin = at = 1_100 * step
            trace.step(step, at, at + 1_100)
            for microbatch in range(4):
                if stage == 1:
                    sent = max(at + 1, begin + 160 * (microbatch + 1))
                    trace.message("recv", start=max(at, sent - 10), end=sent, **pipe)
                    at = sent
                for i in range(3):
                    grid = [(8, 12)[stage], 1, 1]
                    trace.kernel("gemm", at + took * i, at + took * (i + 1), grid=grid)
                at += 3 * took
                trace.all_reduce(at, at + 30, group=str(2 + stage), nelems=100_000)
                at += 30
                if stage == 0:
                    trace.message("send", start=at, end=at + 10, **pipe)
                    at += 10
            over = begin + 160 + 4 * 210 + 8
            trace.message(("recv", "send")[stage], start=at, end=over, **pipe)
            trace.kernel("adam", over, begin + 1_100)
        if rank in unsized:
            for event in trace.events:
                for key in ("In msg nelems", "Out msg nelems"):
                    event.get("args", {}).pop(key, None)
    return traces


@pytest.mark.parametrize("unsized", [(), (0, 1), (2, 3), (3,), (0, 1, 2, 3)])
def test_communication_of_unknown_size_stays_with_its_stage(
    unsized: tuple[int, ...], tmp_path: Path
) -> None:
    """Both stages make as many calls: what one computes more takes none of these along.

    With gemms of 50 us the first stage sends every 190 us, and the last reduction ends 940 us after
    the begin of the step instead of 1,000 us.
    """
    found = findings(tmp_path, *tensor_parallel_stages(unsized))
    (uneven,) = [one for one in found if one.code == "uneven_stages"]
    assert uneven.ranks == (2, 3)
    assert uneven.gain_ns == pytest.approx(60_000, rel=0.05)


@pytest.mark.parametrize(
    ("name", "first", "absent_codes"),
    [("f_unevens", ("uneven_ranks", (1,)), {"slow_rank"}), ("pipe", None, {"slow_rank"})],
)
def test_recordings_with_unequal_work_have_no_straggler(
    name: str, first: tuple[str, tuple[int, ...]] | None, absent_codes: set[str]
) -> None:
    """nanoGPT with 1.5 times the batch on rank 1; PiPPy's example, whose stages have one rank."""
    found = analyze(shared_repro(f"recorded/{name}")).findings
    assert first is None or (found[0].code, found[0].ranks) == first
    assert not absent_codes & {one.code for one in found}


@pytest.mark.parametrize(("passes", "begin"), [(1, 30_000), (3, 70_000)])
def test_gradients_are_whole_with_the_last_backward_of_a_step(
    passes: int, begin: int, tmp_path: Path
) -> None:
    """Autograd launches kernels from 30 on; of three passes the last began at 70 of 90."""
    trace = GpuTrace().step(1, 0, 100).kernel("forward", 0, 30)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 29, 90)
    trace.kernel("backward", 30, 60).kernel("backward", 60, 90).kernel("adam", 90, 100)
    rank = scene(tmp_path, trace).split.ranks[0]
    assert BackwardPasses.find(rank, passes).find_before(0, 90_000) == (begin, 90_000)


@pytest.mark.parametrize(("rounds", "begin"), [(1, 30_000), (3, 70_000)])
def test_without_ranges_microbatches_are_what_repeats(
    rounds: int, begin: int, tmp_path: Path
) -> None:
    """Two thirds of a pass over forward and backward are its backward; 90 is one or three."""
    trace = GpuTrace().step(1, 0, 120)
    for start in range(0, 90, 90 // rounds):
        for place, name in enumerate(("gemm_tn", "flash_fwd", "gemm_nn", "gemm_nt", "flash_bwd")):
            long = 18 // rounds
            trace.kernel(name, start + place * long, start + (place + 1) * long)
    trace.kernel("adam", 90, 100)
    rank = scene(tmp_path, trace).split.ranks[0]
    assert BackwardPasses.find(rank, 0).find_before(0, 90_000) == (begin, 90_000)


def ddp_step(rank: int, *calls: tuple[float, float, float, int]) -> CpuTrace:
    """A step of DistributedDataParallel from 0 to 1000: forward to 200, backward to 600, optimizer
    from 900; calls are (called, start, end, floats)."""
    trace = CpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])]).step(1, 0, 1000)
    trace.annotation("DistributedDataParallel.forward", 0, 200)
    trace.op("aten::mm", 0, 50).op("aten::mm", 150, 200)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 200, 600, tid=150)
    trace.op("aten::mm", 200, 600, tid=150)
    for number, (called, start, end, floats) in enumerate(calls):
        trace.all_reduce(called, start, end, group="0", seq=number + 1, tid=200, nelems=floats)
    return trace.op("aten::add_", 900, 1000)


@pytest.mark.parametrize("optimizer", [(900, 1000), (0, 1000)], ids=["after", "with a closure"])
def test_a_reduction_in_the_forward_is_extra_and_costs_what_all_wait_for_it(
    optimizer: tuple[float, float], tmp_path: Path
) -> None:
    """Called at 50.5 and done at 150: the forward goes on then. The gradients are reduced from 600
    to 900. Lightning gives the optimizer a closure that runs the passes."""
    calls = [(50, 51, 150, 1000), (590, 600, 900, 100_000)]
    traces = [ddp_step(rank, *calls) for rank in (0, 1)]
    for trace in traces:
        trace.annotation("Optimizer.step#Adam.step", *optimizer)
    found = findings(tmp_path, *traces)
    (extra,) = [one for one in found if one.code == "extra_reductions"]
    assert (extra.gain_ns, extra.ranks, extra.steps) == (99_500, (), (1,))
    assert extra.message == (
        "extra reductions on dp_replicate in the forward, where data parallelism needs none (a loss"
        " over all ranks or a synchronized normalization does): 1 per step of 4.00 kB; from a"
        " single step"
    )


@pytest.mark.parametrize("optimizer", [(900, 1000), (0, 1000)], ids=["after", "with a closure"])
def test_a_reduction_after_the_backward_of_more_bytes_than_all_gradients_is_extra(
    optimizer: tuple[float, float], tmp_path: Path
) -> None:
    """Gradients of 40 kB are reduced to 640, then a tensor of 400 kB to 840."""
    calls = [(590, 600, 640, 10_000), (650, 650, 840, 100_000)]
    traces = [ddp_step(rank, *calls) for rank in (0, 1)]
    for trace in traces:
        trace.op("aten::zeros", 640, 650).op("aten::mm", 840, 900)
        trace.annotation("Optimizer.step#Adam.step", *optimizer)
    found = findings(tmp_path, *traces)
    (extra,) = [one for one in found if one.code == "extra_reductions"]
    assert extra.gain_ns == pytest.approx(190_000, abs=1_000)
    assert extra.message == (
        "extra reductions on dp_replicate after the backward: 1 per step of 400 kB, while all "
        "gradients are 40.0 kB; from a single step"
    )
    assert "no_overlap" not in [one.code for one in found], "no bucket of gradients"


@pytest.mark.parametrize(
    ("gradients", "after", "weights", "is_extra"),
    [
        (10_000, (3_000,), 40_000, True),  # the backward has reduced all weights
        (10_000, (3_000,), 52_000, False),  # the last bucket
        (10_000, (3_000,), None, False),
        (0, (10_000,), 40_000, False),  # without DDP
        (0, (11_000,), 40_000, True),
        (10_000, (6_000, 6_000), None, True),
        (10_000, (200,), 40_000, False),  # a metric
    ],
)
def test_bytes_tell_gradients_from_extra_reductions(
    gradients: int, after: tuple[int, ...], weights: int | None, is_extra: bool, tmp_path: Path
) -> None:
    calls = [(590.0, 600.0, 640.0, gradients)] if gradients else []
    calls += [(650 + 100 * i, 650 + 100 * i, 740 + 100 * i, n) for i, n in enumerate(after)]
    for rank in (0, 1):
        trace = ddp_step(rank, *calls).annotation("Optimizer.step#Adam.step", 900, 1000)
        trace.op("aten::mm", 645, 650).write(tmp_path)
        place = RankInfo(rank, rank, "host0", 1, "cpu")
        memory = MemoryState(weights_bytes=weights)
        write_record(tmp_path, RankRecord("job", place, 2, "gloo", memory=memory))
    codes = [one.code for one in analyze(tmp_path).findings]
    assert ("extra_reductions" in codes) is is_extra


@pytest.mark.parametrize(("sent", "is_extra"), [(10_000, False), (11_000, True)])
def test_an_optimizer_of_a_part_of_the_gradients_says_how_large_the_others_are(
    sent: int, is_extra: bool, tmp_path: Path
) -> None:
    """ZeRO-2 of two ranks, whose 10,000 gradients are reduced in one call after the backward."""
    for rank in (0, 1):
        trace = ddp_step(rank, (650.0, 650.0, 740.0, sent))
        trace.annotation("Optimizer.step#Adam.step", 900, 1000).op("aten::mm", 645, 650)
        trace.write(tmp_path)
        place = RankInfo(rank, rank, "host0", 1, "cpu")
        memory = MemoryState(weights_bytes=40_000, gradients_bytes=20_000)
        write_record(tmp_path, RankRecord("job", place, 2, "gloo", memory=memory))
    codes = [one.code for one in analyze(tmp_path).findings]
    assert ("extra_reductions" in codes) is is_extra


@pytest.mark.parametrize(
    ("reduced", "again", "weights", "computes_first", "is_extra"),
    [
        (10_000, 10_000, 40_000, False, True),
        (10_000, 10_000, 40_000, True, False),  # updates, as Muon shares them
        (5_000, 5_000, 40_000, False, False),  # the other half of the gradients
        (5_000, 5_000, None, False, False),
        (10_000, 300, 40_000, False, False),  # of one weight alone
    ],
)
def test_gradients_that_an_optimizer_reduces_once_more_are_extra(
    reduced: int, again: int, weights: int | None, computes_first: bool, is_extra: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Each of its two calls takes 100 us, and a division follows the first."""
    calls = [(590.0, 600.0, 640.0, reduced)]
    calls += [(at, at, at + 100.0, again // 2) for at in (655.0, 765.0)]
    for rank in (0, 1):
        trace = ddp_step(rank, *calls).annotation("Optimizer.step#Adam.step", 645, 1000)
        if computes_first:
            trace.op("aten::mm", 646, 654)
        trace.op("aten::div_", 756, 760).write(tmp_path)
        place = RankInfo(rank, rank, "host0", 1, "cpu")
        memory = MemoryState(weights_bytes=weights)
        write_record(tmp_path, RankRecord("job", place, 2, "gloo", memory=memory))
    extra = [one for one in analyze(tmp_path).findings if one.code == "extra_reductions"]
    assert bool(extra) is is_extra
    for one in extra:
        assert one.gain_ns == pytest.approx(200_000, abs=20_000)
        assert one.message == (
            "extra reductions on dp_replicate in the optimizer: 2 per step of 20.0 kB, before it "
            "computes anything: as many bytes as all gradients, which the backward reduces; from a "
            "single step"
        )


@pytest.mark.parametrize(("reduced", "is_extra"), [(10_000, True), (9_500, False)])
def test_gradients_that_are_dropped_after_their_reduction_were_reduced(
    reduced: int, is_extra: bool, tmp_path: Path
) -> None:
    """Of weights of 40 kB the optimizer has gradients of 36 kB, as a layer is frozen. The backward
    has reduced all, or the last bucket follows it."""
    calls = [(590.0, 600.0, 640.0, reduced), (650.0, 650.0, 740.0, 500)]
    for rank in (0, 1):
        trace = ddp_step(rank, *calls).annotation("Optimizer.step#Adam.step", 900, 1000)
        trace.op("aten::mm", 645, 650).write(tmp_path)
        place = RankInfo(rank, rank, "host0", 1, "cpu")
        memory = MemoryState(weights_bytes=40_000, gradients_bytes=36_000)
        write_record(tmp_path, RankRecord("job", place, 2, "gloo", memory=memory))
    codes = [one.code for one in analyze(tmp_path).findings]
    assert ("extra_reductions" in codes) is is_extra


@pytest.mark.parametrize(
    ("weights", "calls"),
    [
        (None, [(610.0, 620.0, 700.0, 5_000), (710.0, 720.0, 800.0, 5_000)]),
        (0, [(610.0, 620.0, 700.0, 5_000), (710.0, 720.0, 800.0, 5_000)]),
        (20_000, [(590.0, 600.0, 640.0, 5_000), (650.0, 650.0, 740.0, 5_000)]),
    ],
    ids=["weights unknown", "no weights", "weights of 16 bits"],
)
def test_gradients_that_are_reduced_once_are_not_extra(
    weights: int | None, calls: list[tuple[float, float, float, int]], tmp_path: Path
) -> None:
    """Gradients of 40 kB in two calls: by hand after the backward, or one within it."""
    for rank in (0, 1):
        trace = ddp_step(rank, *calls).annotation("Optimizer.step#Adam.step", 900, 1000)
        trace.op("aten::mm", 645, 650).write(tmp_path)
        place = RankInfo(rank, rank, "host0", 1, "cpu")
        memory = MemoryState(weights_bytes=weights, gradients_bytes=40_000)
        write_record(tmp_path, RankRecord("job", place, 2, "gloo", memory=memory))
    assert "extra_reductions" not in [one.code for one in analyze(tmp_path).findings]


@pytest.mark.parametrize(("second", "is_extra"), [(10_000, True), (20_000, False)])
def test_gradients_reduced_after_each_microbatch_are_reduced_once_too_often(
    second: int, is_extra: bool, tmp_path: Path
) -> None:
    """DDP without no_sync: the second forward begins when the first reduction, of 100 us, ends."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])]).step(1, 0, 1000)
        for number, (at, floats) in enumerate(((0, 10_000), (400, second))):
            trace.annotation("DistributedDataParallel.forward", at, at + 100)
            trace.op("aten::mm", at, at + 100)
            trace.op(
                "autograd::engine::evaluate_function: MmBackward0", at + 100, at + 300, tid=150
            )
            trace.op("aten::mm", at + 100, at + 300, tid=150)
            trace.all_reduce(
                at + 290, at + 300, at + 400, group="0", seq=number, tid=200, nelems=floats
            )
        trace.annotation("Optimizer.step#Adam.step", 800, 1000).op("aten::add_", 800, 1000)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    extra = [one for one in report.findings if one.code == "extra_reductions"]
    assert bool(extra) is is_extra
    for one in extra:
        assert one.gain_ns == pytest.approx(100_000, abs=1_000)
        assert one.message == (
            "extra reductions of gradients after each of 2 microbatches, where those after the last"
            " are enough (DDP's no_sync): 1 per step of 40.0 kB; from a single step"
        )


def test_equal_buckets_of_the_last_microbatch_alone_are_not_extra(tmp_path: Path) -> None:
    """DDP with no_sync: two buckets of equal layers in the second of two backwards."""
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])]).step(1, 0, 1000)
        for at in (0, 400):
            trace.annotation("DistributedDataParallel.forward", at, at + 100)
            trace.op("aten::mm", at, at + 100)
            trace.op(
                "autograd::engine::evaluate_function: MmBackward0", at + 100, at + 300, tid=150
            )
            trace.op("aten::mm", at + 100, at + 300, tid=150)
        for number, at in enumerate((600, 700)):
            trace.all_reduce(at - 10, at, at + 90, group="0", seq=number, tid=200, nelems=10_000)
        trace.annotation("Optimizer.step#Adam.step", 800, 1000).op("aten::add_", 800, 1000)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert "gradient accumulation (2 microbatches, gradients summed once)" in [
        one.in_words for one in report.run.strategies
    ]
    assert "extra_reductions" not in [one.code for one in report.findings]


def test_a_recorded_job_that_reduces_more_than_its_gradients() -> None:
    """Its own timers say 33 ms (median 38) of 124."""
    first = analyze(shared_repro("users3/post_backward_allreduce") / "red").findings[0]
    assert first.code == "extra_reductions"
    assert 25e6 < first.gain_ns < 40e6


@pytest.mark.parametrize("floats", [4, 60])
def test_metrics_are_not_to_be_merged_into_buckets(floats: int, tmp_path: Path) -> None:
    """Twelve of 20 us each after the backward, and a bucket of gradients within it."""
    calls = [(500.0, 501.0, 590.0, 100_000)]
    calls += [(599.5 + 20 * i, 600 + 20 * i, 620 + 20 * i, floats) for i in range(12)]
    found = findings(tmp_path, *(ddp_step(rank, *calls) for rank in (0, 1)))
    assert "small_collectives" not in [one.code for one in found]


def test_a_job_without_gradients_has_no_buckets(tmp_path: Path) -> None:
    calls = [(599.5, 600 + 20 * i, 620 + 20 * i, 4) for i in range(12)]
    found = findings(tmp_path, *(ddp_step(rank, *calls) for rank in (0, 1)))
    assert "small_collectives" not in [one.code for one in found]


def test_small_gradient_buckets_cost_their_latency(tmp_path: Path) -> None:
    """Twelve calls of 20 us each, eight of 4 kB and four of 400 kB: at the rate of the larger ones
    all take 81.6 us, and a single latency is a twelfth of the other 158.4."""
    calls = [(599.5, 600 + 20 * i, 620 + 20 * i, 1000 if i % 3 else 100_000) for i in range(12)]
    found = findings(tmp_path, *(ddp_step(rank, *calls) for rank in (0, 1)))
    (small,) = [one for one in found if one.code == "small_collectives"]
    assert small.message == (
        "small collectives on dp_replicate: 12 per step of 136 kB on average, 60.5 % of their "
        "time is latency; merge them into larger buckets; from a single step"
    )
    assert small.gain_ns == pytest.approx(145_200, rel=0.03)
    assert "no_overlap" not in [one.code for one in found], "it is exposed as they are small"


def test_small_buckets_without_a_match_cost_their_latency_too(tmp_path: Path) -> None:
    """All are posted at once and end in turn; rank 1 has another number for the last."""
    calls = [(599.5, 600, 620 + 20 * i, 1000 if i % 3 else 100_000) for i in range(12)]
    traces = [ddp_step(0, *calls), ddp_step(1, *calls[:-1]).all_reduce(
        *calls[-1][:3], group="0", seq=99, tid=200, nelems=calls[-1][3])]  # fmt: skip
    (small,) = [one for one in findings(tmp_path, *traces) if one.code == "small_collectives"]
    assert small.gain_ns == pytest.approx(145_200, rel=0.1)


def reduced_backward(rank: int, in_time: bool) -> GpuTrace:
    """Four gradients whose reductions a slow link runs after the backward, at 80 to 320; the host
    launches each behind its gradient (in time), or all behind the backward."""
    trace = GpuTrace(rank, 2, groups=[("0", "mesh_dp", [0, 1])]).step(1, 0, 400)
    trace.kernel("forward", 0, 40, launched=1)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 9, 19)
    for i in range(4):
        start, launched = 80 + 60 * i, (11 + 2 * i if in_time else 20 + i)
        trace.kernel("backward", 40 + 10 * i, 50 + 10 * i, launched=10 + 2 * i)
        trace.all_reduce(start, start + 60, launched=launched, nelems=1_000_000)
    done = trace.record_event(26)
    trace.wait_for_event(27, done, on_stream=COMM_STREAM)
    return trace.kernel("adam", 320, 400, launched=28)


def test_a_reduction_that_is_launched_in_the_backward_has_lost_no_overlap(tmp_path: Path) -> None:
    """What is exposed of it is the link's: to launch it earlier is no way out."""
    codes = {}
    for in_time in (True, False):
        folder = tmp_path / str(in_time)
        folder.mkdir()
        found = findings(folder, *(reduced_backward(rank, in_time) for rank in (0, 1)))
        codes[in_time] = {one.code for one in found}
    assert "no_overlap" not in codes[True]
    assert "no_overlap" in codes[False]


def test_reductions_between_kernels_are_in_time_in_a_trace_of_the_device_alone(
    tmp_path: Path,
) -> None:
    codes = {}
    for in_time in (True, False):
        folder = tmp_path / str(in_time)
        folder.mkdir()
        traces = [reduced_backward(rank, in_time) for rank in (0, 1)]
        for trace in traces:
            trace.events = [one for one in trace.events if one["cat"] != "cpu_op"]
        codes[in_time] = {one.code for one in findings(folder, *traces)}
    assert "no_overlap" not in codes[True]
    assert "no_overlap" in codes[False]


def test_a_reduction_whose_launch_is_unknown_is_not_known_to_be_in_time(tmp_path: Path) -> None:
    traces = [reduced_backward(rank, in_time=True) for rank in (0, 1)]
    for trace in traces:
        reductions = {
            event["args"]["correlation"] for event in trace.events
            if event["name"].startswith("nccl")
        }  # fmt: skip
        trace.events = [
            event for event in trace.events
            if event["cat"] != "cuda_runtime" or event["args"]["correlation"] not in reductions
        ]  # fmt: skip
    assert "no_overlap" in [one.code for one in findings(tmp_path, *traces)]


def test_calls_that_take_time_in_proportion_to_their_size_have_no_latency(tmp_path: Path) -> None:
    calls, start = [], 600
    for floats in (1000, 4000) * 6:
        calls.append((595, start, start + floats // 200, floats))
        start += floats // 200
    found = findings(tmp_path, *(ddp_step(rank, *calls) for rank in (0, 1)))
    assert "small_collectives" not in [one.code for one in found]


def test_causes_of_which_each_hardly_adds_to_the_others_leave_one() -> None:
    """Their joint gain is just above the least that counts, and shrinks with each that is left out:
    the last one stays."""
    gains = {3: 1_010_000, 2: 520_000, 1: 30_000, 0: 0}

    class Graph:
        """Counts the remedies that changed it."""

        def __init__(self, changed: int = 0) -> None:
            self.changed = changed

    class Context:
        graph, mean_ns = Graph(), 100_000_000.0

        def compute_gain_ns(self, graph: Graph) -> int:
            return gains[graph.changed]

    remedies = [Remedy(finding(rank), lambda graph: Graph(graph.changed + 1)) for rank in range(3)]
    assert unmask(Context(), remedies) == tuple(remedies)


def finding(rank: int) -> Finding:
    return Finding("slow_rank", "skew", 1000 - rank, 2000 - rank, 1000, (rank,), (), (), f"{rank}")
