"""RunSplit -> Tables: the detail beside the report."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.readers.kernel_rules import Rules
from stepsplit.analyzer.report.build import origin_ns
from stepsplit.analyzer.report.build_slices import BuiltSlices
from stepsplit.analyzer.report.tables import PHASES, Boxes, Segments, Tables, Waits
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.transfers import BUBBLE, SKEW
from stepsplit.analyzer.trace import OPS


def build_tables(found: RunSplit, rules: Rules) -> Tables:
    """The tables of a split recording, with the report's times; slices are built when asked for."""
    origin = origin_ns(found)
    return Tables(
        _segments(found, origin),
        _boxes(found, origin),
        _waits(found, origin),
        BuiltSlices(found, origin, rules),
    )


def _segments(found: RunSplit, origin: int) -> Segments:
    bands = [rank.attribution.band for rank in found.ranks]
    steps = [np.array([s.step for s in rank.steps], dtype=np.int32) for rank in found.ranks]
    starts, ends = (
        [r.clock.common_ns(at) - origin for r, at in zip(found.ranks, edge, strict=True)]
        for edge in ([b.start_ns for b in bands], [b.end_ns for b in bands])
    )
    ranks = np.array([rank.trace.rank for rank in found.ranks], dtype=np.int32)
    return Segments(
        rank=np.repeat(ranks, [len(band.bucket) for band in bands]),
        step=np.concatenate([step[b.window] for step, b in zip(steps, bands, strict=True)]),
        bucket=np.concatenate([band.bucket for band in bands]),
        start_ns=np.concatenate(starts),
        dur_ns=np.concatenate(ends) - np.concatenate(starts),
    )


def _boxes(found: RunSplit, origin: int) -> Boxes:
    rows = [
        (g.rank, g.step, box.stage, box.microbatch, PHASES.index(box.phase),
         box.start_ns - origin, box.end_ns - box.start_ns)
        for rank in found.ranks for g in rank.grids for box in g.boxes
    ]  # fmt: skip
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 7)
    return Boxes(
        rank=table[:, 0].astype(np.int32),
        step=table[:, 1].astype(np.int32),
        stage=table[:, 2].astype(np.int32),
        microbatch=table[:, 3].astype(np.int32),
        phase=table[:, 4].astype(np.uint8),
        start_ns=table[:, 5],
        dur_ns=table[:, 6],
    )


def _waits(found: RunSplit, origin: int) -> Waits:
    parts = [_waits_of(rank, origin) for rank in found.ranks]
    return Waits(
        rank=np.concatenate([part.rank for part in parts]),
        step=np.concatenate([part.step for part in parts]),
        bucket=np.concatenate([part.bucket for part in parts]),
        owner=np.concatenate([part.owner for part in parts]),
        axis=np.concatenate([part.axis for part in parts]),
        op=np.concatenate([part.op for part in parts]),
        start_ns=np.concatenate([part.start_ns for part in parts]),
        dur_ns=np.concatenate([part.dur_ns for part in parts]),
    )


def _waits_of(rank: RankSplit, origin: int) -> Waits:
    exposed, calls = rank.attribution.exposed, rank.trace.calls
    rows = np.flatnonzero(np.isin(exposed.bucket, (SKEW, BUBBLE)))
    steps = np.array([step.step for step in rank.steps], dtype=np.int32)
    axes = [rank.axis[row] or "" for row in rows.tolist()]
    start = rank.clock.common_ns(exposed.start_ns[rows])
    return Waits(
        rank=np.full(len(rows), rank.trace.rank, dtype=np.int32),
        step=steps[exposed.window[rows]],
        bucket=exposed.bucket[rows],
        owner=exposed.owner[rows],
        axis=np.array(axes, dtype=np.str_),
        op=np.array(OPS)[calls.op[exposed.call[rows]]],
        start_ns=start - origin,
        dur_ns=rank.clock.common_ns(exposed.end_ns[rows]) - start,
    )
