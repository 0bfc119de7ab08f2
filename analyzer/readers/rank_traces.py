"""The traces of the ranks: how they are read from files of any format, and which rank each is of.

The rank is the one in the content, in the name of the file, or that of its position, with a note.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath, PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import natural_sort_key
from stepsplit.analyzer.readers.event_store import EventStore, store_trace
from stepsplit.analyzer.readers.flight_recorder import FlightEntry
from stepsplit.analyzer.readers.kernel_rules import Rules
from stepsplit.analyzer.readers.sources import Source, make_absolute
from stepsplit.analyzer.readers.workers import Progress, Task, Workers, run_all
from stepsplit.analyzer.trace import Note, RankTrace

RankTraces = tuple[RankTrace, ...]


# More notes become one, or a job of thousands of ranks would have nothing but these.
_MAX_SINGLE_NOTES = 4

_RANK_IN_NAME = re.compile(
    r"(?:(?<!local)(?<!local[-_. ])rank[-_. ]?|\bworker|_worker)(\d{1,7})(?!\d)", re.I
)
"""Excludes local_rank, which repeats on each node."""

# The rank mostly comes last: what else is numbered, such as hosts, stands before it.
_LAST_NUMBER = re.compile(r"(\d{1,7})\D*$")

_SUFFIXES = re.compile(r"(\.(pt|trace|json|gz|zst|xz|bz2|sqlite)){1,8}$", re.I)

_NUMBER = re.compile(r"\d+")

CAPTURE_PART = re.compile(
    r"\.\d{10,20}(?=\.pt\.trace\.json)|(?<![a-z])(?:step|iter(?:ation)?|epoch|cycle)[-_.]?\d+",
    re.I,
)
"""The part of the name that differs between captures of one process: the time, which TensorBoard's
handler appends to host and process, or the step.
"""

MAX_RANK_SPREAD = 64
"""The largest accepted number per trace, as not all ranks are recorded; beyond, it is a date."""


class TraceCandidate(Struct, frozen=True):
    """A trace, its rank from its content or its name, and the rank in its name."""

    trace: RankTrace
    stated_rank: int | None
    named_rank: int | None = None


def parse_rank(path: PurePosixPath) -> int | None:
    """The rank in the name of the file, or else of its folder."""
    match = _RANK_IN_NAME.search(path.name) or _RANK_IN_NAME.search(path.parent.name)
    return int(match[1]) if match else None


def parse_last_number(path: PurePath) -> int:
    """The last number in the name of a trace, by which its rank may be guessed; -1 for none."""
    match = _LAST_NUMBER.search(_SUFFIXES.sub("", path.name))
    return int(match[1]) if match else -1


# Reading: how the files of one format become candidates.


class TraceReading(Struct, frozen=True):
    """How the traces of a recording are read, and what completes them.

    The store takes the events of a large recording; None if they fit into memory. flights are the
    collectives in each rank's Flight Recorder dump.
    """

    workers: Workers
    progress: Progress
    rules: Rules
    store: EventStore | None
    flights: Mapping[int, Sequence[FlightEntry]]


ReadRanks = Callable[
    [Sequence[Source], TraceReading], Iterable[Sequence[TraceCandidate] | DataError]
]
"""Reads all files of one format: for each, in order, its traces or its error."""


def choose_store_folders(
    workers: Workers, store: EventStore | None
) -> tuple[str | None, str | None]:
    """(the folder in which this process stores what it receives, that in which those who read store
    it themselves): a cluster has no access to the store."""
    folder = None if store is None else store.path
    return (None, folder) if isinstance(workers, int) else (folder, None)


_WHOLE_FILE_BYTES = 1 << 20
"""Work that reading such a file is, as bytes of a trace."""


def read_whole_files(
    read: Callable[[Source, Rules], RankTraces | None],
    sources: Sequence[Source],
    reading: TraceReading,
) -> Iterator[Sequence[TraceCandidate] | DataError]:
    """The ReadRanks of a format whose files are read by one call each, possibly in parallel."""
    here, there = choose_store_folders(reading.workers, reading.store)
    tasks = [
        Task(
            one.where,
            _WHOLE_FILE_BYTES,
            _read_whole_file,
            (read, make_absolute(one), reading.rules, there),
        )
        for one in sources
    ]
    for traces in run_all(tasks, reading.workers, receive=partial(_store_traces, here)):
        if isinstance(traces, DataError):
            yield traces
            continue
        candidates = []
        for trace in traces or ():
            # A reader that guesses notes it; here all traces are known, and the guess is better.
            notes = tuple(note for note in trace.notes if note.code != "rank_guessed")
            rank = trace.rank if len(notes) == len(trace.notes) else None
            candidates.append(TraceCandidate(replace(trace, notes=notes), rank))
        yield candidates


def _read_whole_file(
    read: Callable[[Source, Rules], RankTraces | None],
    source: Source,
    rules: Rules,
    folder: str | None,
) -> RankTraces | None:
    return _store_traces(folder, read(source, rules))


def _store_traces(folder: str | None, traces: RankTraces | None) -> RankTraces | None:
    if traces is None or folder is None:
        return traces
    return tuple(store_trace(folder, trace) for trace in traces)


# The rank of each candidate.


def assign_ranks(candidates: Sequence[TraceCandidate]) -> tuple[list[RankTrace], tuple[Note, ...]]:
    """The traces of one capture in rank order, with notes on guessed ranks.

    Raises DataError if two traces have the same rank.
    """
    renamed_candidates, renamed = _resolve_rank_conflicts(candidates)
    latest, older = _keep_latest_capture(renamed_candidates)
    by_rank: dict[int, RankTrace] = {}
    for candidate in latest:
        if candidate.stated_rank is None:
            continue
        if (first := by_rank.get(candidate.stated_rank)) is not None:
            problem = f"second trace of rank {candidate.stated_rank}; the first is {first.source}"
            hint = "analyze one recording at a time"
            sizes = first.world_size, candidate.trace.world_size
            if sizes[0] != sizes[1] and min(sizes) > candidate.stated_rank + 1:
                problem += f" of a job of {sizes[0]} ranks, and this one is of a job of {sizes[1]}"
                hint = (
                    "of two programs, such as a trainer and its rollouts, analyze each one alone,"
                    " or record each with record --role"
                )
            raise DataError(candidate.trace.source, problem, hint)
        by_rank[candidate.stated_rank] = _set_rank(candidate.stated_rank, candidate.trace)
    nameless = [one.trace for one in latest if one.stated_rank is None]
    guessed = _guess_ranks(nameless, set(by_rank)) if nameless else []
    if len(guessed) > _MAX_SINGLE_NOTES:
        first, last = guessed[0], guessed[-1]
        some = f"from {first.source.name} (rank {first.rank}) to {last.source.name} ({last.rank})"
        text = f"{len(guessed)} traces have no rank; assigned in order {some}"
        guesses = [Note("rank_guessed", text)]
    else:
        guesses = [
            Note("rank_guessed", f"{t.source.name} has no rank; assumed rank {t.rank}", t.rank)
            for t in guessed
        ]
    notes = (*renamed, *older, *guesses)
    return sorted([*by_rank.values(), *guessed], key=lambda t: t.rank), notes


def _set_rank(rank: int, trace: RankTrace) -> RankTrace:
    if trace.rank == rank:
        return trace
    notes = tuple(replace(note, rank=rank) for note in trace.notes)
    size = max(trace.world_size, rank + 1)
    return replace(trace, rank=rank, world_size=size, notes=notes)


def _guess_ranks(traces: Sequence[RankTrace], taken: set[int]) -> list[RankTrace]:
    """Assigns ranks by the last numbers in the names if they are small, else by position."""
    numbers = [parse_last_number(trace.source) for trace in traces]
    # A number that two names share is not the rank.
    is_unique = len({*numbers, *taken}) == len(numbers) + len(taken)
    if (
        len(traces) > 1
        and is_unique
        and min(numbers) >= 0
        and max(numbers) < MAX_RANK_SPREAD * len(traces)
    ):
        return [_set_rank(number, trace) for number, trace in zip(numbers, traces, strict=True)]
    free = (rank for rank in range(len(traces) + len(taken)) if rank not in taken)
    in_order = sorted(traces, key=lambda trace: natural_sort_key(str(trace.source)))
    return [_set_rank(rank, trace) for rank, trace in zip(free, in_order, strict=False)]


def _resolve_rank_conflicts(
    candidates: Sequence[TraceCandidate],
) -> tuple[Sequence[TraceCandidate], tuple[Note, ...]]:
    """If traces have the same rank but their names differ in rank, takes it from the names."""
    names_by_rank: dict[int, set[int | None]] = defaultdict(set)
    for candidate in candidates:
        if candidate.stated_rank is not None:
            names_by_rank[candidate.stated_rank].add(candidate.named_rank)
    # Processes that torch.distributed does not know say rank 0 in each of their files.
    wrong = {rank for rank, names in names_by_rank.items() if len(names) > 1 and None not in names}
    if not wrong:
        return candidates, ()
    resolved = [
        replace(one, stated_rank=one.named_rank) if one.stated_rank in wrong else one
        for one in candidates
    ]
    text = f"several traces have rank {min(wrong)}: ranks are taken from the file names"
    return resolved, (Note("rank_by_name", text),)


def _keep_latest_capture(
    candidates: Sequence[TraceCandidate],
) -> tuple[Sequence[TraceCandidate], tuple[Note, ...]]:
    """The latest capture if the run was captured several times, and a note on the others."""
    by_rank: dict[int | tuple[str, int], list[TraceCandidate]] = defaultdict(list)
    of_file: Counter[Path] = Counter()
    for candidate in candidates:
        source, rank = candidate.trace.source, candidate.stated_rank
        # Traces of one file are of several processes, never captures of one.
        process = (CAPTURE_PART.sub("", str(source)), of_file[source])
        of_file[source] += 1
        by_rank[process if rank is None else rank].append(candidate)
    repeated = [same for same in by_rank.values() if len(same) > 1]
    # Captures of one rank or process have paths that differ only in numbers. Other files of the
    # same rank are from two runs, which is an error further on.
    masked = [{_NUMBER.sub("#", str(one.trace.source)) for one in same} for same in repeated]
    if not repeated or any(len(paths) > 1 for paths in masked):
        return candidates, ()
    if all(len({one.trace.source.parent for one in same}) == len(same) for same in repeated):
        # With a folder per capture, one that was cut short lacks ranks: the fullest folder counts,
        # and of several the one with the last number.
        folders: dict[Path, list[TraceCandidate]] = defaultdict(list)
        for candidate in candidates:
            folders[candidate.trace.source.parent].append(candidate)
        latest = folders[max(folders, key=lambda f: (len(folders[f]), natural_sort_key(str(f))))]
    else:
        latest = [
            max(same, key=lambda one: natural_sort_key(str(one.trace.source)))
            for same in by_rank.values()
        ]
    left_out = len(candidates) - len(latest)
    text = f"the run was captured several times; the latest is used ({latest[-1].trace.source})"
    return latest, (
        Note("older_captures", f"{text}, {left_out} traces of other captures are ignored"),
    )
