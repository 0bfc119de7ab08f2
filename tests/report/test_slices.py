"""What ran on each lane: built from a recording, kept in a file, read a rank at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import BUCKETS, Slices, examine
from stepsplit.analyzer.report.io import save
from stepsplit.analyzer.report.tables import StoredSlices, read_tables, write_slices

SAMPLES = Path(__file__).parents[2] / "sample_traces"
Row = tuple[str, int, str, str, int, float, float]
"""(lane, depth, name, bucket, owner, us from the start, us)"""


def rows(slices: Slices) -> list[Row]:
    columns = (slices.lane, slices.depth, slices.name, slices.bucket, slices.owner)
    each = zip(*(c.tolist() for c in (*columns, slices.start_ns, slices.dur_ns)), strict=True)
    return [
        (
            slices.lanes[lane], depth, slices.names[name], BUCKETS[bucket], owner,
            start / 1e3, dur / 1e3,
        )
        for lane, depth, name, bucket, owner, start, dur in each
    ]  # fmt: skip


def test_a_call_is_a_wait_for_the_late_rank_and_then_its_transfer(tmp_path: Path) -> None:
    for rank, arrives in ((0, 40), (1, 60)):
        trace = GpuTrace(rank, 2, groups=[("0", "all", [0, 1])]).step(1, 0, 100)
        trace.kernel("gemm", 0, arrives).memcpy(90, 95).all_reduce(arrives, 80).kernel(
            "tail", 95, 100
        )
        trace.write(tmp_path)
    slices = examine([tmp_path]).tables.slices

    early = [row[2:] for row in rows(slices[0])]
    assert ("gemm", "compute", -1, 0, 40) in early
    calls = [row for row in early if row[1] in ("skew", "collective")]
    assert [row[1:] for row in calls] == [("skew", 1, 40, 20), ("collective", -1, 60, 20)]
    assert [row[1:] for row in early if row[1] == "copy"] == [("copy", -1, 90, 5)]
    assert not any(row[3] == "skew" for row in rows(slices[1]))


def test_nested_ops_of_a_cpu_run_lie_below_one_another(tmp_path: Path) -> None:
    trace = CpuTrace(0, 1).step(1, 0, 100)
    trace.op("aten::linear", 0, 50).op("aten::addmm", 10, 40).op("aten::relu", 60, 70)
    trace.write(tmp_path)
    found = rows(examine([tmp_path]).tables.slices[0])
    assert [(depth, name) for _, depth, name, *_ in found] == [
        (0, "aten::linear"), (0, "aten::relu"), (1, "aten::addmm"),
    ]  # fmt: skip


@pytest.mark.parametrize("sample", ["tp2_pp2", "built_ddp_host_stall"])
def test_slices_of_a_lane_and_depth_do_not_overlap_and_come_back_as_written(
    sample: str, tmp_path: Path
) -> None:
    analysis = examine([SAMPLES / sample])
    save(tmp_path, analysis.report, analysis.tables)
    stored = read_tables(tmp_path / "tables").slices
    assert list(stored) == list(analysis.report.run.ranks)
    for rank in stored:
        _same(stored[rank], analysis.tables.slices[rank])
        _apart(stored[rank])


def _same(one: Slices, other: Slices) -> None:
    for column in structs.fields(Slices):
        left, right = getattr(one, column.name), getattr(other, column.name)
        assert np.array_equal(left, right), column.name


def _apart(slices: Slices) -> None:
    place = slices.lane.astype(np.int64) * 256 + slices.depth
    same = (np.diff(place) == 0) & (slices.depth[1:] < 15)
    end = slices.start_ns + slices.dur_ns
    assert (slices.start_ns[1:][same] >= end[:-1][same]).all()


def test_compute_of_the_slices_is_that_of_the_split(tmp_path: Path) -> None:
    """Of a GPU run, where kernels of one stream do not overlap."""
    trace = GpuTrace(0, 1).step(1, 0, 100).kernel("a", 0, 30).kernel("b", 50, 100)
    trace.write(tmp_path)
    analysis = examine([tmp_path])
    slices = analysis.tables.slices[0]
    own = slices.bucket == BUCKETS.index("compute")
    assert slices.dur_ns[own].sum() == sum(row.compute_ns for row in analysis.report.steps)


def test_a_rank_that_is_not_there_is_not_there(tmp_path: Path) -> None:
    write_slices(tmp_path, {})
    stored = StoredSlices(tmp_path / "slices.parquet")
    assert (list(stored), 3 in stored) == ([], False)
    with pytest.raises(FileNotFoundError):
        StoredSlices(tmp_path / "none.parquet")
