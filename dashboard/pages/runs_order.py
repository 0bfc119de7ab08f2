"""Which runs a list shows, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepsplit.dashboard.pages.numbers import BUBBLE, COLLECTIVE, COMPUTE
from stepsplit.dashboard.store.store import RunRow

Key = Callable[[RunRow], float | str | None]
NEWEST = "-added"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list: its head, and what it is sorted by; None sorts last."""

    head: str
    key: Key


def _middle(run: RunRow, *buckets: str) -> float | None:
    middle = run.headline.middle if run.headline else None
    return None if middle is None else middle.share(*buckets)


def _step_ns(run: RunRow) -> float | None:
    middle = run.headline.middle if run.headline else None
    return None if middle is None else middle.step_ns


COLUMNS = {
    "name": Column("run", lambda run: run.name.lower()),
    "added": Column("added", lambda run: run.created_unix_ns),
    "verdict": Column("verdict", lambda run: run.verdict.answer if run.verdict else None),
    "world": Column("world", lambda run: run.headline.world_size if run.headline else None),
    "mesh": Column("mesh", lambda run: (run.headline.mesh if run.headline else None) or None),
    "step": Column("step", _step_ns),
    "compute": Column("compute", lambda run: _middle(run, *COMPUTE)),
    "collective": Column("collective", lambda run: _middle(run, *COLLECTIVE)),
    "bubble": Column("bubble", lambda run: _middle(run, *BUBBLE)),
    "mfu": Column("MFU", lambda run: run.headline.mfu if run.headline else None),
}


def matching(runs: Sequence[RunRow], asked: str | None) -> list[RunRow]:
    """The runs with all words of the question in what is told of them: name, tags, verdict, ..."""
    words = (asked or "").lower().split()
    return [run for run in runs if all(word in _text(run) for word in words)]


def _text(run: RunRow) -> str:
    numbers = run.headline
    known = [] if numbers is None else [numbers.mesh or "", numbers.backend or ""]
    known += [run.verdict.answer] if run.verdict else []
    tags = [f"{tag.key}={tag.value}" for tag in run.tags]
    return " ".join([run.name, run.state, run.id, *known, *tags]).lower()


def in_order(runs: Sequence[RunRow], sort: str) -> list[RunRow]:
    """The runs by a column, downwards with a minus before it; those without a value last."""
    column = COLUMNS.get(sort.removeprefix("-"), COLUMNS["added"])
    keyed = [(column.key(run), run) for run in runs]
    known = sorted(
        ((key, run) for key, run in keyed if key is not None),
        key=lambda pair: (pair[0], pair[1].id),
        reverse=sort.startswith("-"),
    )
    return [run for _, run in known] + [run for key, run in keyed if key is None]
