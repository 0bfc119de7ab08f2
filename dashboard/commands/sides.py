"""The runs of one side of a check: from files, or out of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepsplit.analyzer import UsageError
from stepsplit.dashboard.commands.cores import cores

if TYPE_CHECKING:
    from stepsplit.analyzer.regression.metrics import RunFacts
    from stepsplit.dashboard.store.store import RunRow, Store

PREFIX = "store:"
LAST = 10
"""So many runs a query yields where it does not say how many."""
_EXAMPLE = f"write {PREFIX}branch=main,last=10 or {PREFIX}ID"
OpenStore = Callable[[], "Store"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run to judge, or to judge by; id is its own in the store that it came from."""

    facts: RunFacts
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """Which runs of a store: the last ones that have all of these tags, or the one of an id."""

    tags: tuple[tuple[str, str], ...] = ()
    last: int = LAST
    id: str | None = None


def runs_at(places: Sequence[str], open_store: OpenStore, run: str | None = None) -> list[Run]:
    """The runs at the places, each a path as facts_at takes it or a query; run is as there.

    Raises StepsplitError.
    """
    found: list[Run] = []
    for place in places:
        if place.startswith(PREFIX):
            found += _stored(open_store(), parse_query(place))
        else:
            found += _read(place, run)
    return found


def _read(place: str, run: str | None) -> list[Run]:
    from stepsplit.analyzer.analysis import facts_at
    from stepsplit.dashboard.reporters.progress import reading_bar

    with reading_bar() as progress:
        return [Run(facts) for facts in facts_at(place, cores(), progress, run)]


def parse_query(text: str) -> Query:
    """The query of "store:branch=main,last=10" or "store:ID". Raises UsageError."""
    words = [word.strip() for word in text.removeprefix(PREFIX).split(",")]
    if len(words) == 1 and words[0] and "=" not in words[0]:
        return Query(id=words[0])
    split = [word.partition("=") for word in words]
    tags = {key.strip(): value.strip() for key, _, value in split}
    if not all(key and value for key, value in tags.items()):
        raise UsageError(f"{text} asks for no run of the store; {_EXAMPLE}")
    last = tags.pop("last", str(LAST))
    if not last.isdecimal() or not 0 < int(last) < 10_000:
        raise UsageError(f"{text}: last is no number of runs; {_EXAMPLE}")
    return Query(tuple(tags.items()), int(last))


def _stored(store: Store, query: Query) -> list[Run]:
    """The runs that are done and meant, the oldest first. Raises UsageError where none is."""
    from stepsplit.analyzer.regression.metrics import facts_of

    done = [run for run in store.runs() if run.state == "done" and _meant(run, query)]
    if not done:
        asked = query.id or ", ".join(f"{key}={value}" for key, value in query.tags) or "any"
        raise UsageError(f"the store has no finished run for {asked}; see the list of runs")
    kept = reversed(done[: query.last])
    return [Run(facts_of(store.report(run.id), f"{run.name} ({run.id})"), run.id) for run in kept]


def _meant(run: RunRow, query: Query) -> bool:
    if query.id is not None:
        return run.id == query.id
    tags = {(tag.key, tag.value) for tag in run.tags}
    return all(pair in tags for pair in query.tags)
