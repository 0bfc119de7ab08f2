"""The Perfetto export: a straggler, and properties of every trace."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.builders import GpuTrace
from support.perfetto_file import PerfettoFile, Slice, read
from support.report_builders import analysis

from stepsplit.analyzer import Analysis, examine
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.report import AxisSize, Host, Report, Run
from stepsplit.analyzer.report.tables import Boxes, Segments, Tables, Waits
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.perfetto import perfetto_trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
PAIR = [("0", "mesh_tp", [0, 1])]


def run(ranks: int, mesh: tuple[AxisSize, ...] | None = None) -> Run:
    names = tuple(range(ranks))
    host = (Host("host0", names),)
    return Run("run", ranks, names, host, None, "gpu", mesh, None, None, None, "0")


def segments(*rows: tuple[int, int, str, int, int]) -> Segments:
    """Of (rank, step, bucket, start_ns, dur_ns)."""
    rank, step, bucket, start, dur = zip(*rows, strict=True)
    return Segments(
        np.array(rank, np.int32), np.array(step, np.int32),
        np.array([BUCKETS.index(one) for one in bucket], np.uint8),
        np.array(start, np.int64), np.array(dur, np.int64),
    )  # fmt: skip


def boxes(*rows: tuple[int, int, int, int, int, int, int]) -> Boxes:
    """Of (rank, step, stage, microbatch, phase, start_ns, dur_ns)."""
    columns = np.array(rows, np.int64).reshape(len(rows), 7).T
    narrow = [column.astype(np.int32) for column in columns[:4]]
    return Boxes(*narrow, columns[4].astype(np.uint8), columns[5], columns[6])


def waits(*rows: tuple[int, int, str, int, str, str, int, int]) -> Waits:
    """Of (rank, step, bucket, owner, axis, op, start_ns, dur_ns)."""
    rank, step, bucket, owner, axis, op, start, dur = zip(*rows, strict=True)
    return Waits(
        np.array(rank, np.int32), np.array(step, np.int32),
        np.array([BUCKETS.index(one) for one in bucket], np.uint8), np.array(owner, np.int32),
        np.array(axis, np.str_), np.array(op, np.str_),
        np.array(start, np.int64), np.array(dur, np.int64),
    )  # fmt: skip


def shown(tables: Tables, about: Run) -> PerfettoFile:
    return read(b"".join(perfetto_trace(Report(run=about), tables)))


def straggler(folder: Path) -> Path:
    """Rank 0 computes 40 us longer than rank 1 before an all-reduce of 20 us."""
    late = GpuTrace(0, 2, groups=PAIR).step(1, 0, 100)
    late.kernel("gemm", 0, 50).all_reduce(50, 70).kernel("gemm", 70, 100).write(folder)
    early = GpuTrace(1, 2, groups=PAIR).step(1, 0, 100)
    early.kernel("gemm", 0, 10).all_reduce(10, 70).kernel("gemm", 70, 100).write(folder)
    return folder


def test_a_flow_leads_from_the_late_rank_to_the_wait(tmp_path: Path) -> None:
    file = tmp_path / "out.pftrace"
    assert cli.run(["export", str(straggler(tmp_path)), "--perfetto", str(file)]) == 0
    late, early = "rank 0 (host0)", "rank 1 (host0)"
    busy = Slice(late, "buckets", "compute", 0, 50_000)
    wait = Slice(early, "waits", "skew: waits for rank 0 (tp all_reduce)", 10_000, 50_000)
    found = read(file.read_bytes())
    assert set(found.slices) == {
        Slice(late, "steps", "step 1", 0, 100_000),
        busy,
        Slice(late, "buckets", "collective", 50_000, 70_000),
        Slice(late, "buckets", "compute", 70_000, 100_000),
        Slice(early, "steps", "step 1", 0, 100_000),
        Slice(early, "buckets", "compute", 0, 10_000),
        Slice(early, "buckets", "skew", 10_000, 50_000),
        Slice(early, "buckets", "collective", 50_000, 70_000),
        Slice(early, "buckets", "compute", 70_000, 100_000),
        wait,
    }
    assert found.flows == [(busy, wait)]
    assert found.empty_tracks == [(late, "waits")]


def test_the_wait_table_has_owner_axis_and_op(tmp_path: Path) -> None:
    found = examine([straggler(tmp_path)]).tables.waits
    row = (found.rank, found.step, found.bucket, found.owner)
    assert [column.tolist() for column in row] == [[1], [1], [BUCKETS.index("skew")], [0]]
    assert (found.axis.tolist(), found.op.tolist()) == (["tp"], ["all_reduce"])
    assert (found.start_ns.tolist(), found.dur_ns.tolist()) == ([10_000], [40_000])


def test_a_slice_that_several_ranks_waited_for_has_a_flow_to_each() -> None:
    late = (0, 1, "compute", 0, 90)
    early = [(rank, 1, "skew", 0, 90) for rank in range(1, 20)]
    table = waits(*((rank, 1, "skew", 0, "dp_shard", "all_gather", 0, 90) for rank in range(1, 20)))
    found = shown(Tables(segments(late, *early), boxes(), table), run(20))
    busy = Slice("rank 0 (host0)", "buckets", "compute", 0, 90)
    assert {one for one, _ in found.flows} == {busy}
    assert {other.process for _, other in found.flows} == {
        f"rank {rank} (host0)" for rank in range(1, 20)
    }


def test_a_wait_for_an_unrecorded_rank_has_no_flow() -> None:
    band = segments((0, 1, "skew", 0, 50), (0, 1, "bubble", 50, 50))
    table = waits(
        (0, 1, "skew", 7, "", "all_reduce", 0, 50), (0, 1, "bubble", -1, "pp", "recv", 50, 50)
    )
    found = shown(Tables(band, boxes(), table), run(1))
    assert [one.name for one in found.slices if one.track == "waits"] == [
        "skew: waits for rank 7 (all_reduce)",
        "bubble: waits (pp recv)",
    ]
    assert found.flows == []


def test_each_stage_has_a_track_and_overlapping_boxes_get_another() -> None:
    band = segments((0, 1, "compute", 0, 100))
    table = boxes(
        (0, 1, 0, 0, 0, 0, 40), (0, 1, 0, 1, 0, 30, 20), (0, 1, 2, 0, 0, 50, 20),
        (0, 1, 0, 0, 1, 70, 20), (0, 1, 0, 0, 2, 90, 10),
    )  # fmt: skip
    process = "rank 0 (host0, stages 0, 2)"
    stages = [one for one in shown(Tables(band, table), run(1)).slices if "stage " in one.track]
    assert stages == [
        Slice(process, "stage 0", "F0", 0, 40),
        Slice(process, "stage 0", "F1", 30, 50),
        Slice(process, "stage 2", "F0", 50, 70),
        Slice(process, "stage 0", "B0", 70, 90),
        Slice(process, "stage 0", "W0", 90, 100),
    ]


def test_without_boxes_the_stage_comes_from_the_mesh() -> None:
    band = segments(*((rank, 1, "compute", 0, 10) for rank in range(4)))
    mesh = (AxisSize("pp", 2), AxisSize("tp", 2))
    found = shown(Tables(band, boxes()), run(4, mesh))
    assert [one.process for one in found.slices if one.track == "steps"] == [
        f"rank {rank} (host0, stage {rank // 2})" for rank in range(4)
    ]


def test_empty_slices_are_dropped_and_negative_times_shifted() -> None:
    band = segments((0, 1, "compute", -20, 20), (0, 1, "idle", 0, 0), (0, 1, "copy", 0, 5))
    assert shown(Tables(band, boxes()), run(1)).slices == [
        Slice("rank 0 (host0)", "buckets", "compute", 0, 20),
        Slice("rank 0 (host0)", "buckets", "copy", 20, 25),
        Slice("rank 0 (host0)", "steps", "step 1", 0, 25),
    ]


def test_a_run_without_a_step_has_only_its_tracks() -> None:
    none = Segments(*(np.empty(0, kind) for kind in (np.int32, np.int32, np.uint8, "i8", "i8")))
    found = shown(Tables(none, boxes()), run(2))
    assert found.slices == []
    assert len(found.empty_tracks) == 6


row = st.tuples(st.integers(0, 1), st.sampled_from(BUCKETS), st.integers(0, 9), st.integers(-1, 3))
band_of_rank = st.lists(row, max_size=8)


@given(st.lists(band_of_rank, min_size=1, max_size=3))
def test_every_slice_lies_in_a_step_and_every_flow_between_slices(
    bands: list[list[tuple[int, str, int, int]]],
) -> None:
    rows, waited = [], []
    for rank, band in enumerate(bands):
        now = 0
        for step, bucket, dur, owner in sorted(band, key=lambda part: part[0]):
            rows.append((rank, step, bucket, now, dur))
            if bucket in ("skew", "bubble"):
                waited.append((rank, step, bucket, owner, "tp", "all_reduce", now, dur))
            now += dur
    if not rows or not waited:
        return
    found = shown(Tables(segments(*rows), boxes(), waits(*waited)), run(len(bands)))
    steps = [one for one in found.slices if one.track == "steps"]
    assert all(
        any(s.process == one.process and s.start_ns <= one.start_ns and one.end_ns <= s.end_ns
            for s in steps)
        for one in found.slices
    )  # fmt: skip
    assert sum(one.end_ns - one.start_ns for one in steps) == sum(part[4] for part in rows)
    ends = {rank: sum(part[4] for part in rows if part[0] == rank) for rank in range(len(bands))}
    known = [one for one in waited if one[7] and one[6] + one[7] <= ends.get(one[3], 0)]
    assert len(found.flows) == len(known)
    for source, wait in found.flows:
        assert f"rank {source.process[5]} " in wait.name
        assert source.start_ns < wait.end_ns <= source.end_ns


@pytest.mark.parametrize("name", ["pp2_m8", "tp2_pp2_dp2"])
def test_buckets_and_waits_of_a_sample_add_up_to_the_report(name: str) -> None:
    found = examine([SAMPLES / name])
    drawn = read(b"".join(perfetto_trace(found.report, found.tables)))
    sums: Counter[tuple[str, str]] = Counter()
    for one in drawn.slices:
        sums[one.track, one.name.split(":")[0]] += one.end_ns - one.start_ns
    for bucket in BUCKETS:
        expected = sum(getattr(row, f"{bucket}_ns") for row in found.report.steps)
        assert sums["buckets", bucket] == expected
        assert sums["waits", bucket] == (expected if bucket in ("skew", "bubble") else 0)
    assert len([one for one in drawn.slices if one.track == "steps"]) == len(found.report.steps)
    assert len(drawn.flows) == len(found.tables.waits.rank)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    traces = tmp_path / "traces"
    traces.mkdir()
    out = tmp_path / "out"
    assert cli.run(["analyze", str(straggler(traces)), "--out", str(out)]) == 0
    return out


def test_a_saved_analysis_is_not_analyzed_again(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, kept = tmp_path / "fresh.pftrace", tmp_path / "kept.pftrace.gz"
    assert cli.run(["export", str(tmp_path / "traces"), "--perfetto", str(fresh)]) == 0

    def forbidden(*_: object) -> Analysis:
        raise AssertionError("analyzed again")

    monkeypatch.setattr("stepsplit.analyzer.analysis.examine", forbidden)
    assert cli.run(["export", str(saved), "--perfetto", str(kept)]) == 0
    assert gzip.decompress(kept.read_bytes()) == fresh.read_bytes()


def test_an_older_folder_without_waits_has_no_flows(saved: Path, tmp_path: Path) -> None:
    (saved / "tables" / "waits.parquet").unlink()
    file = tmp_path / "old.pftrace"
    assert cli.run(["export", str(saved), "--perfetto", str(file)]) == 0
    found = read(file.read_bytes())
    assert {one.track for one in found.slices} == {"steps", "buckets"}
    assert found.flows == []


@pytest.mark.parametrize("broken", [b"", b"not parquet at all"])
def test_a_broken_table_is_an_error_and_writes_no_file(
    broken: bytes, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved / "tables" / "segments.parquet").write_bytes(broken)
    file = tmp_path / "x.pftrace"
    assert cli.run(["export", str(saved), "--perfetto", str(file)]) == 2
    assert "analyze the run again" in capsys.readouterr().err
    assert not file.exists()


def test_an_unwritable_path_is_an_error(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved / "report.json" / "x.pftrace"
    assert cli.run(["export", str(saved), "--perfetto", str(file)]) == 2
    assert "choose a place that can be written" in capsys.readouterr().err


def test_an_interrupted_export_leaves_no_file(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Iterator[bytes]:
        yield b"the first part"
        raise KeyboardInterrupt

    monkeypatch.setattr("stepsplit.dashboard.reporters.perfetto.perfetto_trace", broken)
    before = sorted(tmp_path.iterdir())
    assert cli.run(["export", str(saved), "--perfetto", str(tmp_path / "x.pftrace")]) == 130
    assert sorted(tmp_path.iterdir()) == before


def test_a_whole_run_shows_its_partial_step_and_its_schedule() -> None:
    found = analysis()
    drawn = read(b"".join(perfetto_trace(found.report, found.tables)))
    last = [one for one in drawn.slices if one.process == "rank 3 (node02, stage 1)"]
    assert [one.name for one in last if one.track == "steps"] == [
        "step 3 (partial)", "step 4", "step 5", "step 6", "step 7",
    ]  # fmt: skip
    assert [one.name for one in last if one.track == "stage 1"][:4] == ["F0", "B0", "F1", "B1"]
