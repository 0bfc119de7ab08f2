"""A run as the list of runs shows it, and how it becomes a row and comes back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import Row

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.dashboard.store.headline import Headline, Middle
from stepsplit.dashboard.store.text import plain
from stepsplit.dashboard.store.verdicts import VerdictRow

State = Literal["uploading", "queued", "running", "done", "failed"]
_MEDIANS = tuple(f"{bucket}_ns" for bucket in BUCKETS)
_SHARES = tuple(f"{bucket}_share" for bucket in BUCKETS)


@dataclass(frozen=True, slots=True, order=True)
class Tag:
    """What its uploader calls a run by, such as branch = main."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run as the list shows it. error is told when failed; headline is there when done.

    progress (0..1) and its note, what is being done, are there while it is analyzed, where known.
    """

    id: str
    name: str
    created_unix_ns: int
    state: State
    error: str | None
    headline: Headline | None
    tags: tuple[Tag, ...] = ()
    progress: float | None = None
    progress_note: str | None = None
    verdict: VerdictRow | None = None

    @property
    def pending(self) -> bool:
        """Whether an analysis of it is still to come or under way."""
        return self.state in ("queued", "running")


def run_row(row: Row[Any], tags: Iterable[Tag]) -> RunRow:
    """The run of a row of runs with its job's progress and its verdict."""
    state = cast(State, row.state)
    numbers = _headline(row) if state == "done" else None
    verdict = None if row.answer is None else VerdictRow(row.answer, row.words)
    progress, note = (row.progress, row.progress_note) if state == "running" else (None, None)
    return RunRow(
        row.id, row.name, row.created_unix_ns, state, row.error, numbers, tuple(tags),
        progress, note, verdict,
    )  # fmt: skip


def columns(numbers: Headline) -> dict[str, Any]:
    """The columns that a headline fills."""
    return {
        "world_size": numbers.world_size,
        "mesh": None if numbers.mesh is None else plain(numbers.mesh, 200),
        "backend": None if numbers.backend is None else plain(numbers.backend, 100),
        "steps": numbers.steps,
        "warnings": numbers.warnings,
        "bubble_fraction": numbers.bubble_fraction,
        "mfu": numbers.mfu,
        **_middle_columns(numbers.middle),
    }


def _middle_columns(middle: Middle | None) -> dict[str, int | float]:
    if middle is None:
        return {}
    medians = zip(_MEDIANS, middle.medians.buckets_ns, strict=True)
    shares = zip(_SHARES, middle.shares, strict=True)
    return {"step_ns": middle.step_ns, **dict(medians), **dict(shares)}


def _headline(row: Row[Any]) -> Headline:
    middle = None
    if row.step_ns is not None:
        medians = Split(*(row._mapping[name] for name in _MEDIANS))
        middle = Middle(row.step_ns, medians, tuple(row._mapping[name] for name in _SHARES))
    return Headline(
        row.world_size, row.mesh, row.backend, middle, row.steps, row.warnings,
        row.bubble_fraction, row.mfu,
    )  # fmt: skip
