"""Runs of a step or two, a prediction for them by hand, and what lies between; times in us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as with_fields

from stepsplit.analyzer import BUCKETS, Band, CommOp, Communication, Gap, Prediction, Report, Split
from stepsplit.analyzer.diagnose.diagnosis import diagnose
from stepsplit.analyzer.gap.gap import CommCost, compute_gap
from stepsplit.analyzer.report.build import build_report
from stepsplit.collectors import Mesh, RunSpec
from support.builders import GpuTrace
from support.prediction_builders import prediction
from support.splitting import RunSplit, recording_of, split_of

US = 1_000
SIZE = 4_000
"""Bytes of GpuTrace's calls."""
Spans = Sequence[tuple[float, float]]
Expected = tuple[str, str, int, int, int]
"""(op, axis, calls, us of all of them, us of that exposed)"""
Row = tuple[str, str, str | None, float]
"""(cause, bucket, axis, us)"""


def price(like: Communication, message_bytes: int) -> float:
    """2 us of latency, and 8 us for SIZE bytes."""
    return 2 * US + 8 * US * message_bytes / SIZE


def latency(like: Communication, message_bytes: int) -> float:
    """9 us of latency, and 1 us for SIZE bytes."""
    return 9 * US + US * message_bytes / SIZE


def ranks(
    folder: Path,
    calls: Spans = (),
    compute: Spans = ((0, 60), (80, 100)),
    *,
    mesh: Mesh | None = None,
    count: int = 2,
    nelems: int = 1000,
) -> RunSplit:
    """Ranks that do the same in one step: GEMMs, and all_reduces over the whole mesh."""
    mesh = mesh or Mesh.of({"tp": count})
    world = mesh.world_size
    for rank in range(count):
        trace = GpuTrace(rank, world, groups=[("0", "all", list(range(world)))])
        trace.step(1, 0, max(end for _, end in compute))
        for start, end in compute:
            trace.kernel("gemm", start, end)
        for start, end in calls:
            trace.all_reduce(start, end, launched=1, nelems=nelems)
        trace.write(folder)
    return found_in(folder, mesh)


def found_in(folder: Path, mesh: Mesh | None) -> RunSplit:
    """The split of the folder's traces as they lie on the mesh."""
    spec = None if mesh is None else RunSpec("run", mesh.world_size, "nccl", mesh)
    return split_of(recording_of(folder), spec)


def report_of(folder: Path, found: RunSplit) -> Report:
    return build_report(recording_of(folder), found, diagnose(found))


def split(**us: float) -> Split:
    """A Split of these buckets."""
    return Split(**{f"{bucket}_ns": round(took * US) for bucket, took in us.items()})


def model(each: Split, *calls: Expected, stages: int = 1) -> Prediction:
    """A prediction of that split and these calls of SIZE bytes on every stage, free of doubt."""
    found = (
        Communication(
            CommOp("any", op, axis, stage, "forward", count, SIZE, SIZE, SIZE),
            Band(took * US, took * US, took * US),
            held * US,
        )
        for stage in range(stages)
        for op, axis, count, took, held in calls
    )
    return replace(
        prediction(), splits=(each,) * stages, split=each, communication=tuple(found),
        low_ns=each.step_ns, high_ns=each.step_ns, notes=(),
    )  # fmt: skip


def gap(
    folder: Path, found: RunSplit, expected: Prediction, of: CommCost = price, **known: object
) -> Gap:
    """The run of the folder compared with it; known replaces fields of its report."""
    return compute_gap(found, expected, of, with_fields(report_of(folder, found), **known))


def rows(found: Gap) -> list[Row]:
    """The waterfall, checked against its buckets."""
    adds_up(found)
    return [(row.cause, row.bucket, row.axis, row.ns / US) for row in found.rows]


def adds_up(found: Gap) -> None:
    """The rows of each bucket are its measured less its predicted time, and none is zero."""
    difference = found.shown.measured - found.shown.predicted
    for bucket, whole in zip(BUCKETS, difference.buckets_ns, strict=True):
        assert sum(row.ns for row in found.rows if row.bucket == bucket) == whole
    assert sum(row.ns for row in found.rows) == difference.step_ns
    assert all(row.ns for row in found.rows)
