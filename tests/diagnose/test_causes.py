"""Bottlenecks of a run: the right cause first, a correct gain, no finding for a healthy run."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import GpuTrace
from cases import for_each
from ground_truth import SEED
from planted_causes import examine_planted
from replay_builders import scene
from simulator.planted import PLANTED

from stepsplit.analyzer import Finding, analyze
from stepsplit.analyzer.diagnose.comm_causes import BackwardPasses
from stepsplit.collectors.rank_record import GpuState, RankRecord, write_record
from stepsplit.collectors.run_spec import RankInfo

QUICK = (
    "slow_link tp_dp",
    "slow_rank fsdp",
    "no_overlap ddp",
    "redundant_calls tp",
    "nothing tp_dp",
)
PAIR = [("0", "mesh_tp", [0, 1])]


def findings(folder: Path, *traces: GpuTrace) -> tuple[Finding, ...]:
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
    """Rank 1 runs one kernel more: 90 of compute, rank 0 has 50. At 70 each they meet at 62 and
    end 14 and 8 after the all_reduce."""
    traces = []
    for rank, busy in ((0, 40), (1, 80)):
        trace = GpuTrace(rank, 2, groups=PAIR).step(1, 0, 100)
        trace.kernel("gemm", 0, 40)
        if busy > 40:
            trace.kernel("more", 40, 80)
        traces.append(trace.all_reduce(busy, 90).kernel("adam", 90, 100))
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks, found.gain_ns) == ("uneven_ranks", (1,), 16_889)
    assert "28.6 % more" in found.message


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


def test_a_link_slower_than_others_with_the_same_traffic_is_found(tmp_path: Path) -> None:
    """Four calls each: 10 between ranks 0 and 1, 20 between 2 and 3; no rank waits."""
    traces = []
    for rank in range(4):
        first = rank // 2 * 2
        groups = [("0", "mesh_tp", [0, 1]), ("1", "mesh_tp", [2, 3])]
        trace = GpuTrace(rank, 4, groups=groups).step(1, 0, 200)
        took = 10 if first == 0 else 20
        for call in range(4):
            at = call * (took + 10)
            trace.kernel("gemm", at, at + 10)
            trace.all_reduce(at + 10, at + 10 + took, group=str(first // 2))
        traces.append(trace.kernel("adam", 4 * (took + 10), 4 * (took + 10) + 10))
    (found,) = findings(tmp_path, *traces)
    assert (found.code, found.ranks) == ("slow_link", (2, 3))
    assert found.gain_ns == 20_000, "of 40 on two of four ranks"
    assert "slow link between ranks 2, 3: transfers are 2.0x slower" in found.message


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


@for_each(
    ("clocks_mhz", "why"),
    [
        (
            (1980, 1200, 1980),
            "; SM clock 1,200 MHz (median rank: 1,980 MHz); "
            "throttled: thermal slowdown by hardware",
        ),
        ((1200, 1980, 1980), ""),
        ((), ""),
    ],
    ids=["hot", "another is hot", "not read"],
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
                trace.kernel("gemm", at + took * i, at + took * i + took)
            trace.all_reduce(at + 12 * took, at + 180).kernel("adam", at + 180, at + 190)
        trace.write(tmp_path)
    for rank, clock in enumerate(clocks_mhz):
        reasons = 0x40 if clock == 1200 else 0x1
        where, gpu = (
            RankInfo(rank, rank, "node0", 1, "cuda"),
            GpuState(0, sm_clock_mhz=clock, throttle_reasons=reasons),
        )
        write_record(tmp_path, RankRecord("job", where, 3, "nccl", gpu=(gpu,)))
    (slow,) = (one for one in analyze(tmp_path).findings if one.code == "slow_rank")
    assert slow.message == (
        f"rank 1 is a straggler: its GEMM kernels are 1.40x slower than on its peers{why}"
    )


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
