"""Other people's real traces, with their known answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.required import SHARED_TRACES, shared_trace

from stepsplit.analyzer import DataError, Report, StepRow, analyze

MEGATRON = "kineto_megatron_tp2_v100"


@pytest.fixture
def megatron() -> Path:
    return shared_trace(MEGATRON)


def buckets(report: Report) -> list[tuple[int, ...]]:
    return [row.split.buckets_ns for row in report.steps]


def test_rank_1_waits_for_rank_0_and_hardly_any_time_moves_data(megatron: Path) -> None:
    """13 all-reduces: NCCL kernels take 0.3 ms on rank 0 and 48.4 ms on rank 1."""
    report = analyze(megatron)
    assert [(row.rank, row.step, row.kind) for row in report.steps] == [
        (0, 6, "full"),
        (1, 6, "full"),
    ]
    assert all(sum(row.split.buckets_ns) == row.step_ns for row in report.steps)
    assert all(0 < row.collective_ns <= 300_000 for row in report.steps)
    early = report.steps[1]
    assert early.skew_ns >= 0.95 * early.split.exposed_comm_ns
    assert sum(row.count for row in report.collectives) == 13
    assert [(row.calls, row.unmatched) for row in report.coverage] == [(2 * 13, 0)]
    assert (report.blame[0].rank, report.blame[0].cause) == (0, "host")


def test_rank_1_alone_has_waited_as_well(megatron: Path) -> None:
    """Estimated without rank 0: no message of 25 kB takes the 2.4 ms of rank 1's fastest call."""
    _, both = analyze(megatron).steps
    [alone] = analyze(*megatron.glob("rank1.*")).steps
    assert alone.estimated
    assert alone.skew_ns == pytest.approx(both.skew_ns, rel=0.005)
    assert 0.5 < alone.collective_ns / both.collective_ns < 2


def test_swapping_the_files_changes_nothing(megatron: Path) -> None:
    one, other = sorted(megatron.glob("rank*.json"))
    assert analyze(one, other) == analyze(other, one)


@pytest.mark.parametrize("moved", [0, 1])
@pytest.mark.parametrize("by_us", [50_000, -50_000])
def test_moving_one_ranks_clock_changes_no_bucket(
    megatron: Path, tmp_path: Path, moved: int, by_us: int
) -> None:
    for rank, source in enumerate(sorted(megatron.glob("rank*.json"))):
        trace = json.loads(source.read_text())
        if rank == moved:
            trace["baseTimeNanoseconds"] += by_us * 1000
        (tmp_path / source.name).write_text(json.dumps(trace))
    assert buckets(analyze(tmp_path)) == buckets(analyze(megatron))


def all_traces() -> list[Path]:
    return sorted(p for p in SHARED_TRACES.glob("kineto_*/*json*") if "pytorch_et" not in p.name)


WITHOUT_DEVICE = ("cupti_profiler__", "distributed_info_unavailable__", "rank_unavailable__")
"""Hosts that launched on GPUs or ran NCCL, recorded without the kernels."""


@pytest.mark.parametrize("file", all_traces(), ids=lambda path: path.name[:40])
def test_every_real_trace_conserves_time(file: Path) -> None:
    """A Report refuses rows whose buckets do not add up, so to have it is to have the proof."""
    if file.name.startswith(WITHOUT_DEVICE):
        with pytest.raises(DataError, match="device activity was not recorded"):
            analyze(file)
        return
    report = analyze(file)
    assert all(row.step_ns > 0 for row in report.steps)
    assert all(isinstance(row, StepRow) and min(row.split.buckets_ns) >= 0 for row in report.steps)


def test_real_traces_were_there_to_read() -> None:
    assert len(list(shared_trace(MEGATRON).glob("rank*.json"))) == 2
