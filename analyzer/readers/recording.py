"""A recording: which files belong to the run, and which rank each is of."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import files_of, is_url, natural, unpacked
from stepsplit.analyzer.readers.flight_recorder import FlightEntry, read_dump
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, EventClassifier, Rules
from stepsplit.analyzer.readers.kineto.reader import read_traces, to_rank_trace
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile
from stepsplit.analyzer.readers.nsys import read_nsys
from stepsplit.analyzer.readers.registry import (
    FLIGHT,
    NSYS,
    RECORD,
    TRACE,
    kinds_of,
    read_rank_record,
)
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.workers import Progress, no_progress
from stepsplit.analyzer.trace import Group, Note, RankTrace
from stepsplit.collectors.rank_record import RankRecord, spec_of
from stepsplit.collectors.run_spec import RunSpec, from_json

# Paths -> Recording: which files belong to the run, and which rank each is of.

_MOST_RUN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Recording:
    """What the readers found: run.json where it was, the traces in the order of their ranks.

    records is what these ranks told of themselves; they make up for a run.json that is missing.
    """

    name: str
    spec: RunSpec | None
    traces: tuple[RankTrace, ...]
    notes: tuple[Note, ...]
    records: tuple[RankRecord, ...] = ()


def read_recording(
    places: Sequence[str | Path],
    workers: int = 1,
    progress: Progress = no_progress,
    rules: Rules = BUILT_IN,
) -> Recording:
    """The recording in the files, folders, archives and URLs, read by up to that many processes.

    rules decide what each kernel is: whether it computes or communicates, and its family. Raises
    DataError where a place is missing, a file that was named cannot be read, or nothing in all of
    them is a trace.
    """
    with open_recording(places) as files:
        return read_recording_files(files, workers, progress, rules)


def read_recording_files(
    files: RecordingFiles, workers: int, progress: Progress, rules: Rules
) -> Recording:
    """The recording in open files; arguments and what is raised as in read_recording."""
    for error in files.refused:
        raise error
    found, unreadable = _traces(files, files.named, workers, progress, rules)
    records, odd = _records(files.records)
    spec = _spec(files.runs) or (spec_of(records) if records else None)
    notes = (*files.notes, *unreadable, *odd)
    if not found:
        raise _nothing(files.named[0], files, notes)
    traces, guessed = ranked(found)
    notes += (*guessed, *_mixed(traces))
    name = spec.name if spec else _folder_name(files.named[0])
    kept, notes = _of_this_run(with_members(traces), spec, notes)
    ranks = {trace.rank for trace in kept}
    told = tuple(record for record in records if record.rank.rank in ranks)
    return Recording(name, spec, kept, notes, told)


def _records(sources: Sequence[Source]) -> tuple[tuple[RankRecord, ...], list[Note]]:
    """What the ranks told, by rank."""
    found, notes = [], []
    for source in sources:
        try:
            found.append(read_rank_record(source))
        except DataError as error:
            notes.append(skipped(source, error))
    return tuple(sorted(found, key=lambda record: record.rank.rank)), notes


def _traces(
    files: RecordingFiles, named: Sequence[str], workers: int, progress: Progress, rules: Rules
) -> tuple[list[Found], tuple[Note, ...]]:
    """The traces in the files; one that cannot be read is skipped, with a note, unless named."""
    flights, notes = _flights(files.flights)
    found, classifier = [], EventClassifier(rules)
    read = read_traces(files.traces, workers, progress, rules)
    for source, one in zip(files.traces, read, strict=True):
        try:
            found += _found(source, one, flights, classifier)
        except DataError as error:
            if source.where in named:
                raise
            notes.append(skipped(source, error))
    for source in files.nsys:
        found += map(_of_nsys, read_nsys(source, rules))
    return found, tuple(notes)


def _found(
    source: Source,
    file: KinetoFile | DataError | None,
    flights: dict[int, list[FlightEntry]],
    classifier: EventClassifier,
) -> list[Found]:
    if isinstance(file, DataError):
        raise file
    if file is None:
        return []
    stated, named = file.header.distributed.rank, rank_in_name(source.inner)
    rank = stated if 0 <= stated < MOST_RANKS else named
    flight = [] if rank is None else flights.get(rank, [])
    trace = to_rank_trace(source.where, file, rank or 0, flight, classifier)
    return [Found(trace, rank, named)]


def _of_nsys(trace: RankTrace) -> Found:
    told = tuple(note for note in trace.notes if note.code != "rank_guessed")
    guessed = len(told) < len(trace.notes)
    return Found(replace(trace, notes=told), None if guessed else trace.rank)


def _flights(sources: Sequence[Source]) -> tuple[dict[int, list[FlightEntry]], list[Note]]:
    """The collectives of each rank's recorder."""
    found: dict[int, list[FlightEntry]] = {}
    notes = []
    for source in sources:
        try:
            dump = read_dump(source)
        except DataError as error:
            notes.append(skipped(source, error))
            continue
        found[dump.rank] = [entry for entry in dump.entries if not entry.is_p2p]
    return found, notes


def _nothing(place: str, files: RecordingFiles, notes: Sequence[Note]) -> DataError:
    """Why there is no recording in the place: what is there instead, or what is wrong with it."""
    kinds = [*files.others, *([FLIGHT.name] if files.flights else [])]
    there = f"; there is: {', '.join(kinds)}" if kinds else ""
    why = f"; {notes[0].message}" if notes else ""
    return DataError(place, f"no trace in it{there}{why}", f"{NAME_A_TRACE}, or a folder of them")


def _spec(runs: Sequence[Source]) -> RunSpec | None:
    """What run.json says, the one nearest to the top."""
    if not runs:
        return None
    nearest = min(runs, key=lambda source: len(source.inner.parts))
    with unpacked(nearest) as content:
        text = content.read(_MOST_RUN_BYTES)
    try:
        return from_json(text)
    except ValueError as error:
        raise DataError(nearest.where, str(error), "fix it or leave it out") from None


def _folder_name(place: str) -> str:
    """What to call the recording at a place that says no name."""
    if is_url(place):
        return PurePosixPath(place).name
    path = Path(place)
    return (path if path.is_dir() else path.parent).resolve().name


def _mixed(traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    """What suggests that the traces are of several runs."""
    devices = {trace.device for trace in traces if trace.device}
    # A trace that states no world size has the least that its rank allows.
    sizes = {str(trace.world_size) for trace in traces if trace.world_size > trace.rank + 1}
    return (*_differing("devices", devices), *_differing("world sizes", sizes))


def _differing(what: str, found: set[str]) -> tuple[Note, ...]:
    if len(found) < 2:
        return ()
    text = f"traces of different {what} ({', '.join(sorted(found))}): are they of one run?"
    return (Note(f"mixed_{what.replace(' ', '_')}", text),)


def _of_this_run(
    traces: Sequence[RankTrace], spec: RunSpec | None, notes: tuple[Note, ...]
) -> tuple[tuple[RankTrace, ...], tuple[Note, ...]]:
    """The traces without those that a larger run has left in the folder."""
    size = spec.world_size if spec else len(traces) + max(trace.rank for trace in traces)
    stale = [trace for trace in traces if trace.rank >= size]
    text = f"a run of {size} ranks has none of that number: an older run's file, left out"
    notes += tuple(
        Note("stale_rank", f"{trace.source.name}: {text}", trace.rank) for trace in stale
    )
    return tuple(trace for trace in traces if trace.rank < size), notes


# Which of a recording's files are what: traces, what a recorder left beside them, and the rest.

RUN_NAME = "run.json"

NAME_A_TRACE = "name a torch.profiler trace"

EXPORT = "export it with nsys export --type sqlite"


@dataclass(frozen=True, slots=True)
class RecordingFiles:
    """The files of a recording by what they are; others are the kinds that no split is made of.

    named are the places that they were found in, refused what is wrong with a file that was named,
    notes what was left alone.
    """

    named: tuple[str, ...]
    runs: tuple[Source, ...]
    traces: tuple[Source, ...]
    nsys: tuple[Source, ...]
    flights: tuple[Source, ...]
    records: tuple[Source, ...]
    others: tuple[str, ...]
    refused: tuple[DataError, ...]
    notes: tuple[Note, ...]

    @property
    def only_dumps(self) -> bool:
        """Whether there are Flight Recorder dumps and no traces."""
        return bool(self.flights) and not self.traces and not self.nsys


@contextmanager
def open_recording(places: Sequence[str | Path]) -> Iterator[RecordingFiles]:
    """The files in the places by their kinds, on disk while the context is open.

    Raises DataError where a place is missing or an archive is torn.
    """
    if not places:
        raise DataError("no path", "nothing to read", "name a trace or the folder of a recording")
    named = tuple(str(place) for place in places)
    with files_of(with_neighbors(named)) as sources:
        yield sort_by_kind(sources, named)


def with_neighbors(named: Sequence[str]) -> list[str]:
    """The places, and what a recording says of a file beside it."""
    files = [Path(place) for place in named if not is_url(place) and Path(place).is_file()]
    beside = [path for file in files for path in _beside(file)]
    return [*named, *map(str, beside)]


def _beside(file: Path) -> list[Path]:
    try:
        return sorted(path for path in file.parent.iterdir() if _says_more(path.name))
    except OSError:
        return []


def _says_more(name: str) -> bool:
    return name == RUN_NAME or "flight" in name or name.endswith("_record.json")


def sort_by_kind(sources: Sequence[Source], named: tuple[str, ...]) -> RecordingFiles:
    """The files by their kinds; what merely lies beside a trace is left alone, and a file that was
    named and is of no kind is refused."""
    by_kind: dict[str, list[Source]] = defaultdict(list)
    refused, notes = [], []
    for source in sources:
        try:
            kinds = _kinds(source, source.where in named)
        except DataError as error:
            if source.where in named:
                refused.append(error)
            else:
                notes.append(skipped(source, error))
            continue
        for kind in kinds:
            by_kind[kind].append(source)
    kinds = (RUN_NAME, TRACE.name, NSYS.name, FLIGHT.name, RECORD.name)
    runs, traces, nsys, flights, records = (tuple(by_kind.pop(kind, ())) for kind in kinds)
    others = tuple(by_kind)
    return RecordingFiles(
        named, runs, traces, nsys, flights, records, others, tuple(refused), tuple(notes)
    )


def skipped(source: Source, error: DataError) -> Note:
    """A file that is left out, and why."""
    return Note("file_skipped", f"{source.inner.name}: {error.problem}", rank_in_name(source.inner))


def _kinds(source: Source, must: bool) -> tuple[str, ...]:
    """The names of the kinds that the file is of. Raises DataError where it should be of one."""
    if source.inner.name == RUN_NAME:
        return (RUN_NAME,)
    kinds = tuple(kind.name for kind in kinds_of(source))
    looks_like_one = rank_in_name(source.inner) is not None or "trace" in source.inner.name
    if not kinds and (must or (looks_like_one and ".json" in source.inner.name)):
        raise DataError(source.where, *_why_not(source))
    return kinds


def _why_not(source: Source) -> tuple[str, str]:
    """Why the file is of no kind, and the hint."""
    if source.inner.suffix.lower() in (".nsys-rep", ".qdrep"):
        return "a report of Nsight Systems, which only it can read", EXPORT
    with unpacked(source) as content:
        begin = content.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if content.torn and not begin:
        return f"the file is torn ({content.torn})", RECORD_AGAIN
    if not begin:
        return "the file is empty", RECORD_AGAIN
    if begin[:1] in b"{[":
        return "JSON, but no trace, or cut off before its first event", NAME_A_TRACE
    if begin.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the file itself", "fetch it with git lfs pull"
    return "not JSON, so no trace, nor another file that is read", NAME_A_TRACE


# Groups that no trace lists the ranks of: their members are who names them.


def with_members(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """The traces, with the ranks of groups of which only an identity is told.

    Such a group (an NCCL communicator in an Nsight export) has the same name on all its members, so
    that they are known where every rank of the run is there.
    """
    if len(traces) < max(trace.world_size for trace in traces):
        return tuple(traces)
    members: dict[str, list[int]] = defaultdict(list)
    for trace in traces:
        for name in {group.name for group in trace.groups if not group.ranks}:
            members[name].append(trace.rank)
    return tuple(_filled(trace, members) for trace in traces)


def _filled(trace: RankTrace, members: dict[str, list[int]]) -> RankTrace:
    if all(group.ranks for group in trace.groups):
        return trace
    groups = tuple(
        group if group.ranks else Group(group.name, tuple(sorted(members[group.name])), "")
        for group in trace.groups
    )
    return replace(trace, groups=groups)


# Which rank each trace is of: by its content, its name, or its place, which is then said.

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
