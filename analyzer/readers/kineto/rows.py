"""Rows of the parts of a trace -> Events, sorted by start."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stepsplit.analyzer.readers.kineto.columns import Counts, Rows
from stepsplit.analyzer.readers.kineto.schema import Args, comm_args
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Events, Int32, Int64

_T = TypeVar("_T", bound=Hashable)
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Sorted:
    """The events of a trace, its earliest start on the world's clock, and what it says beside.

    noted_row (sorted) and noted_args are the events that communicate, and their arguments' text.
    """

    events: Events
    t0_unix_ns: int
    noted_row: Int64
    noted_args: tuple[bytes, ...]
    counts: Counts

    @property
    def on_device(self) -> bool:
        """Whether an accelerator recorded anything."""
        return bool(self.events.of(*DEVICE_CATEGORIES).any())

    def args_of(self, row: int) -> Args | None:
        """The arguments of an event that communicates, None for others."""
        at = int(np.searchsorted(self.noted_row, row))
        if at == len(self.noted_row) or self.noted_row[at] != row:
            return None
        return comm_args(self.noted_args[at])


def in_order(parts: Sequence[Rows], base_ns: int) -> Sorted:
    """The rows of all parts, sorted by start; base_ns is what the trace counts its times from."""
    start = _column([part.start_ns for part in parts])
    order = np.argsort(start, kind="stable")
    t0 = int(start[order[0]]) if len(order) else 0
    names, name_ids = _joined([part.names for part in parts])
    lanes, lane_ids = _joined([part.lanes for part in parts])
    events = Events(
        start_ns=start[order] - t0,
        dur_ns=_column([part.dur_ns for part in parts])[order],
        category=_column([part.category for part in parts])[order],
        name_id=_mapped([part.name_id for part in parts], name_ids)[order],
        lane=_mapped([part.lane for part in parts], lane_ids)[order],
        correlation=_column([part.correlation for part in parts])[order],
        names=names,
        lanes=lanes,
    )
    counts = sum((part.counts for part in parts), Counts())
    return Sorted(events, base_ns + t0, *_noted(parts, order), counts)


def _joined(tables: Sequence[tuple[_T, ...]]) -> tuple[tuple[_T, ...], list[Int32]]:
    """The distinct values of all tables, and for each table where its values are among them."""
    place = {value: i for i, value in enumerate(dict.fromkeys(v for t in tables for v in t))}
    return tuple(place), [np.array([place[v] for v in t], dtype=np.int32) for t in tables]


def _mapped(columns: Iterable[Int32], ids: Iterable[Int32]) -> Int32:
    return _column([new[old] for old, new in zip(columns, ids, strict=True)])


def _column(parts: Sequence[npt.NDArray[_Number]]) -> npt.NDArray[_Number]:
    """The parts as one, without a copy where there is one alone."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _noted(parts: Sequence[Rows], order: Int64) -> tuple[Int64, tuple[bytes, ...]]:
    """The events that communicate, by their place in the order."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    before = np.cumsum([0, *map(len, parts)])
    rows = np.concatenate([p.noted_row + n for p, n in zip(parts, before, strict=False)])
    texts = [text for part in parts for text in part.noted_args]
    by_place = np.argsort(place[rows])
    return place[rows][by_place], tuple(texts[i] for i in by_place.tolist())
