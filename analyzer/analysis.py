"""Files in, Report out: the whole pipeline on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepsplit.analyzer.model.schedule import ideal_bubble_fraction
from stepsplit.analyzer.readers.processes import Progress, no_progress
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN
from stepsplit.analyzer.report.build import build_report, origin_ns
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import PHASES, Boxes, Segments, Tables
from stepsplit.analyzer.split.run_split import RunSplit, split_run


@dataclass(frozen=True, slots=True)
class Analysis:
    """A report, and the detail that goes beside it."""

    report: Report
    tables: Tables


def analyze(*places: str | Path) -> Report:
    """The report of the recording in the files, folders, archives and URLs.

    Raises errors.DataError.
    """
    return examine(places).report


def examine(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = no_progress,
    rules: Rules = BUILT_IN,
) -> Analysis:
    """The report of the recording with its tables, read by up to that many processes.

    rules tell which kernels communicate and which compute. Raises errors.DataError.
    """
    recording = read_recording(places, workers, progress, rules)
    found = split_run(recording.traces, recording.spec, ideal_bubble_fraction, rules)
    return Analysis(build_report(recording, found), _tables(found))


def _tables(found: RunSplit) -> Tables:
    return Tables(_segments(found, origin_ns(found)), _boxes(found, origin_ns(found)))


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
