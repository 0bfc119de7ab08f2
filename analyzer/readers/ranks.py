"""Which rank each trace is of: by its content, its name, or its place, which is then said."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import natural
from stepsplit.analyzer.trace import Note, RankTrace

MOST_RANKS = 10_000_000
_FEW = 4
_NAMED = re.compile(
    r"(?:(?<!local)(?<!local[-_. ])rank[-_. ]?|\bworker|_worker)(\d{1,7})(?!\d)", re.I
)
"""A local rank is one of each node's, so no rank of the job."""
_LAST_NUMBER = re.compile(r"(\d{1,7})\D*$")
_SUFFIXES = re.compile(r"(\.(pt|trace|json|gz|zst|xz|bz2|sqlite))+$", re.I)
_NUMBER = re.compile(r"\d+")
_OF_A_CAPTURE = re.compile(
    r"\.\d{10,20}(?=\.pt\.trace\.json)|(?<![a-z])(?:step|iter(?:ation)?|epoch|cycle)[-_.]?\d+",
    re.I,
)
"""What differs in the names of one process's captures: the time, as TensorBoard's handler has it
behind host and process, or the step.
"""
_SPREAD = 64
"""Ranks that were not recorded lie between those that were; a larger number is a date or a size."""


@dataclass(frozen=True, slots=True)
class Found:
    """A trace, its rank as far as it or its name says so, and what its name says of it."""

    trace: RankTrace
    stated_rank: int | None
    named_rank: int | None = None


def rank_in_name(path: PurePosixPath) -> int | None:
    """The rank that the name of the file, or else of its folder, states."""
    match = _NAMED.search(path.name) or _NAMED.search(path.parent.name)
    return int(match[1]) if match else None


def ranked(found: Sequence[Found]) -> tuple[list[RankTrace], tuple[Note, ...]]:
    """The traces of one capture in the order of their ranks; what was guessed is noted.

    Raises DataError where two traces are of the same rank.
    """
    apart, renamed = _told_apart(found)
    one_capture, older = _latest_capture(apart)
    known: dict[int, RankTrace] = {}
    for one in one_capture:
        if one.stated_rank is None:
            continue
        if (first := known.get(one.stated_rank)) is not None:
            problem = f"a second trace of rank {one.stated_rank}, beside {first.source}"
            raise DataError(one.trace.source, problem, "analyze one recording at a time")
        known[one.stated_rank] = as_rank(one.stated_rank, one.trace)
    nameless = [one.trace for one in one_capture if one.stated_rank is None]
    guessed = _guessed(nameless, set(known)) if nameless else []
    notes = (*renamed, *older, *_guesses(guessed))
    return sorted([*known.values(), *guessed], key=lambda t: t.rank), notes


def _guesses(traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    """Which ranks were guessed: one by one, or in one note where they are many."""
    if len(traces) > _FEW:
        first, last = traces[0], traces[-1]
        some = f"from {first.source.name} as rank {first.rank} to {last.source.name} as {last.rank}"
        return (Note("rank_guessed", f"{len(traces)} traces name no rank; taken {some}"),)
    return tuple(
        Note("rank_guessed", f"{t.source.name} names no rank; taken for rank {t.rank}", t.rank)
        for t in traces
    )


def as_rank(rank: int, trace: RankTrace) -> RankTrace:
    """The trace as that rank's."""
    if trace.rank == rank:
        return trace
    notes = tuple(replace(note, rank=rank) for note in trace.notes)
    size = max(trace.world_size, rank + 1)
    return replace(trace, rank=rank, world_size=size, notes=notes)


def _guessed(traces: Sequence[RankTrace], taken: set[int]) -> list[RankTrace]:
    """Traces without a rank: by the last numbers of their names if small, else by place."""
    numbers = [_last_number(trace.source) for trace in traces]
    distinct = len({*numbers, *taken}) == len(numbers) + len(taken)
    if len(traces) > 1 and distinct and min(numbers) >= 0 and max(numbers) < _SPREAD * len(traces):
        return [as_rank(number, trace) for number, trace in zip(numbers, traces, strict=True)]
    free = (rank for rank in range(len(traces) + len(taken)) if rank not in taken)
    in_order = sorted(traces, key=lambda trace: natural(str(trace.source)))
    return [as_rank(rank, trace) for rank, trace in zip(free, in_order, strict=False)]


def _last_number(path: Path) -> int:
    match = _LAST_NUMBER.search(_SUFFIXES.sub("", path.name))
    return int(match[1]) if match else -1


def _told_apart(found: Sequence[Found]) -> tuple[Sequence[Found], tuple[Note, ...]]:
    """Traces that state the same rank while their names state others: their names are right."""
    named: dict[int, set[int | None]] = defaultdict(set)
    for one in found:
        if one.stated_rank is not None:
            named[one.stated_rank].add(one.named_rank)
    wrong = {rank for rank, names in named.items() if len(names) > 1 and None not in names}
    if not wrong:
        return found, ()
    apart = [
        replace(one, stated_rank=one.named_rank) if one.stated_rank in wrong else one
        for one in found
    ]
    text = f"several traces state rank {min(wrong)}: their ranks are those of their names"
    return apart, (Note("rank_by_name", text),)


def _latest_capture(found: Sequence[Found]) -> tuple[Sequence[Found], tuple[Note, ...]]:
    """Of a run that was captured several times, the latest capture, and a note of the others.

    Captures are files of one rank, or of one process where no rank is known, whose paths differ by
    their numbers alone.
    """
    by_rank: dict[int | str, list[Found]] = defaultdict(list)
    for one in found:
        by_rank[_process(one) if one.stated_rank is None else one.stated_rank].append(one)
    again = [same for same in by_rank.values() if len(same) > 1]
    if not again or any(len({_shape(one) for one in same}) > 1 for same in again):
        return found, ()
    kept = _of_fullest_folder(found) if _apart(again) else [_latest(s) for s in by_rank.values()]
    left_out = len(found) - len(kept)
    text = f"the run was captured several times: {kept[-1].trace.source} is of the latest"
    return kept, (Note("older_captures", f"{text}, {left_out} traces of others are left out"),)


def _process(one: Found) -> str:
    return _OF_A_CAPTURE.sub("", str(one.trace.source))


def _shape(one: Found) -> str:
    return _NUMBER.sub("#", str(one.trace.source))


def _apart(again: Sequence[Sequence[Found]]) -> bool:
    """Whether each capture is in a folder of its own."""
    return all(len({one.trace.source.parent for one in same}) == len(same) for same in again)


def _of_fullest_folder(found: Sequence[Found]) -> list[Found]:
    """The traces of the folder with the most ranks, the latest of those by its number."""
    folders: dict[Path, list[Found]] = defaultdict(list)
    for one in found:
        folders[one.trace.source.parent].append(one)
    best = max(folders, key=lambda folder: (len(folders[folder]), natural(str(folder))))
    return folders[best]


def _latest(same: Sequence[Found]) -> Found:
    return max(same, key=lambda one: natural(str(one.trace.source)))
