"""The timeline of a run: which ranks and steps there are, and any window of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables
from stepsplit.analyzer.trace import Int32, Int64
from stepsplit.dashboard.timeline.rank_tracks import Line, band_of, lanes_of
from stepsplit.dashboard.timeline.track import Drawn

_RANKS_KEPT = 64


@dataclass(frozen=True, slots=True)
class StepSpan:
    """When a step begins on the first rank and ends on the last, in the report's ns."""

    step: int
    kind: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankLabel:
    """A rank with its host and pipeline stage, where they are known."""

    rank: int
    host: str | None
    stage: int | None


@dataclass(frozen=True, slots=True)
class Shown:
    """A line of one rank within a window. name and owner have an entry a shape: name indexes names,
    -1 where the shape stands for many slices; owner is -1 for nobody."""

    rank: int
    lane: str
    depth: int
    drawn: Drawn
    name: Int64
    owner: Int64
    names: tuple[str, ...]


class Scene:
    """The timeline of one run."""

    def __init__(self, report: Report, tables: Tables) -> None:
        self._tables = tables
        self.steps = steps_of(report)
        self.ranks = labels_of(report, tables)
        self._band = lru_cache(_RANKS_KEPT * 4)(
            lambda rank: band_of(rank, tables.segments, tables.waits)
        )
        self._lanes = lru_cache(_RANKS_KEPT)(self._read_lanes)

    def window(
        self, from_ns: int, to_ns: int, slots: int, ranks: Sequence[int], opened: Sequence[int]
    ) -> tuple[Shown, ...]:
        """The bands of the ranks, and below them the lanes of those that are opened."""
        lines = [
            (rank, line)
            for rank in ranks
            for line in (self._band(rank), *(self._lanes(rank) if rank in opened else ()))
        ]
        return tuple(_shown(rank, line, from_ns, to_ns, slots) for rank, line in lines)

    def _read_lanes(self, rank: int) -> tuple[Line, ...]:
        slices = self._tables.slices
        return lanes_of(slices[rank]) if rank in slices else ()


def steps_of(report: Report) -> tuple[StepSpan, ...]:
    """The steps of all ranks together, in order."""
    spans: dict[int, list[StepSpan]] = {}
    for row in report.steps:
        own = StepSpan(row.step, row.kind, row.start_ns, row.start_ns + row.step_ns)
        spans.setdefault(row.step, []).append(own)
    return tuple(_together(own) for _, own in sorted(spans.items()))


def _together(spans: Sequence[StepSpan]) -> StepSpan:
    kind = next((one.kind for one in spans if one.kind != "full"), "full")
    start, end = min(one.start_ns for one in spans), max(one.end_ns for one in spans)
    return StepSpan(spans[0].step, kind, start, end)


def labels_of(report: Report, tables: Tables) -> tuple[RankLabel, ...]:
    """The ranks of the recording with where they ran."""
    hosts = {rank: one.host for one in report.run.hosts for rank in one.ranks}
    boxes = tables.boxes
    stages: dict[int, list[int]] = defaultdict(list)
    for rank, stage in np.unique(np.column_stack((boxes.rank, boxes.stage)), axis=0).tolist():
        stages[rank].append(stage)
    return tuple(
        RankLabel(rank, _known(hosts.get(rank)), _only(stages.get(rank, [])))
        for rank in report.run.ranks
    )


def _known(host: str | None) -> str | None:
    return None if host in (None, "unknown") else host


def _only(stages: Sequence[int]) -> int | None:
    return stages[0] if len(stages) == 1 else None


def _shown(rank: int, line: Line, from_ns: int, to_ns: int, slots: int) -> Shown:
    drawn = line.track.drawn(from_ns, to_ns, slots)
    name, owner = (_of_rows(column, drawn.row) for column in (line.name, line.owner))
    return Shown(rank, line.lane, line.depth, drawn, name, owner, line.names)


def _of_rows(column: Int32, rows: Int64) -> Int64:
    """The column's values in these rows, -1 for row -1."""
    values = np.full(len(rows), -1, dtype=np.int64)
    known = rows >= 0
    values[known] = column[rows[known]]
    return values
