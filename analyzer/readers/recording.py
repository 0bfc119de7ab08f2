"""Reads a recording: finds the files of the run and the rank of each."""

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

_MOST_RUN_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Recording:
    """The traces of a run in rank order, with its run.json if there is one.

    records are the rank records; they replace a missing run.json.
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
    """Reads the recording in the files, folders, archives and URLs, with up to `workers` processes.

    rules classify the kernels. Raises DataError if a place is missing, a named file cannot be read,
    or no trace is found.
    """
    with open_recording(places) as files:
        return read_recording_files(files, workers, progress, rules)


def read_recording_files(
    files: RecordingFiles, workers: int, progress: Progress, rules: Rules
) -> Recording:
    """As read_recording, for files that are already listed."""
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
    """The rank records by rank, and a note per unreadable record."""
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
    """The traces in the files. An unreadable file gives a note, or an error if it was named."""
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
    """The collectives in each rank's Flight Recorder dump, and a note per unreadable dump."""
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
    """The error for a place without traces: what it contains instead, or the first problem."""
    kinds = [*files.others, *([FLIGHT.name] if files.flights else [])]
    there = f"; found only: {', '.join(kinds)}" if kinds else ""
    why = f"; {notes[0].message}" if notes else ""
    return DataError(place, f"no trace found{there}{why}", f"{NAME_A_TRACE}, or a folder of them")


def _spec(runs: Sequence[Source]) -> RunSpec | None:
    """The content of the run.json nearest to the top folder."""
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
    """The name of a recording without run.json: that of its folder."""
    if is_url(place):
        return PurePosixPath(place).name
    path = Path(place)
    return (path if path.is_dir() else path.parent).resolve().name


def _mixed(traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    """Notes on signs that the traces are from several runs."""
    devices = {trace.device for trace in traces if trace.device}
    # A trace without a stated world size has the smallest one that its rank allows.
    sizes = {str(trace.world_size) for trace in traces if trace.world_size > trace.rank + 1}
    return (*_differing("devices", devices), *_differing("world sizes", sizes))


def _differing(what: str, found: set[str]) -> tuple[Note, ...]:
    if len(found) < 2:
        return ()
    text = f"traces of different {what} ({', '.join(sorted(found))}): are they from one run?"
    return (Note(f"mixed_{what.replace(' ', '_')}", text),)


def _of_this_run(
    traces: Sequence[RankTrace], spec: RunSpec | None, notes: tuple[Note, ...]
) -> tuple[tuple[RankTrace, ...], tuple[Note, ...]]:
    """The traces without stale files of an earlier, larger run in the same folder."""
    size = spec.world_size if spec else len(traces) + max(trace.rank for trace in traces)
    stale = [trace for trace in traces if trace.rank >= size]
    text = f"its rank is outside this run of {size} ranks: file of an older run, ignored"
    notes += tuple(
        Note("stale_rank", f"{trace.source.name}: {text}", trace.rank) for trace in stale
    )
    return tuple(trace for trace in traces if trace.rank < size), notes


# The files of a recording by kind.

RUN_NAME = "run.json"

NAME_A_TRACE = "name a torch.profiler trace"

EXPORT = "export it with nsys export --type sqlite"


@dataclass(frozen=True, slots=True)
class RecordingFiles:
    """The files of a recording by kind.

    named are the places that were searched. others are the names of the kinds that contain no
    traces. refused are the errors of named files, notes those of other files.
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
        """Whether there are Flight Recorder dumps but no traces."""
        return bool(self.flights) and not self.traces and not self.nsys


@contextmanager
def open_recording(places: Sequence[str | Path]) -> Iterator[RecordingFiles]:
    """The files in the places by kind, available on disk while the context is open.

    Raises DataError if a place is missing or an archive is damaged.
    """
    if not places:
        raise DataError("no path", "nothing to read", "name a trace or the folder of a recording")
    named = tuple(str(place) for place in places)
    with files_of(with_neighbors(named)) as sources:
        yield sort_by_kind(sources, named)


def with_neighbors(named: Sequence[str]) -> list[str]:
    """The places, and metadata files in the same folder as a named file."""
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
    """Sorts the files by kind. Unknown files are ignored, or are errors if they were named."""
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
    """The note on a file that is skipped, with the reason."""
    return Note("file_skipped", f"{source.inner.name}: {error.problem}", rank_in_name(source.inner))


def _kinds(source: Source, must: bool) -> tuple[str, ...]:
    """The names of the file's kinds. Raises DataError if it should have one but has none."""
    if source.inner.name == RUN_NAME:
        return (RUN_NAME,)
    kinds = tuple(kind.name for kind in kinds_of(source))
    looks_like_one = rank_in_name(source.inner) is not None or "trace" in source.inner.name
    if not kinds and (must or (looks_like_one and ".json" in source.inner.name)):
        raise DataError(source.where, *_why_not(source))
    return kinds


def _why_not(source: Source) -> tuple[str, str]:
    """Why the file is of no known kind, and the hint."""
    if source.inner.suffix.lower() in (".nsys-rep", ".qdrep"):
        return "an Nsight Systems report, readable only by Nsight Systems", EXPORT
    with unpacked(source) as content:
        begin = content.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if content.torn and not begin:
        return f"the file is damaged ({content.torn})", RECORD_AGAIN
    if not begin:
        return "the file is empty", RECORD_AGAIN
    if begin[:1] in b"{[":
        return "JSON, but not a trace, or cut off before its first event", NAME_A_TRACE
    if begin.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself", "fetch it with git lfs pull"
    return "neither JSON nor another supported format", NAME_A_TRACE


# Groups without a list of ranks: the members are the ranks whose traces name the group.


def with_members(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """The traces, with ranks filled in for groups that are known only by identity.

    Such a group (an NCCL communicator in an Nsight export) has the same name on all its members, so
    its ranks are known if the traces of all ranks are present.
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


# The rank of each trace: from its content, its file name, or its position (with a note).

MOST_RANKS = 10_000_000

_FEW = 4

_NAMED = re.compile(
    r"(?:(?<!local)(?<!local[-_. ])rank[-_. ]?|\bworker|_worker)(\d{1,7})(?!\d)", re.I
)
"""Excludes local_rank, which repeats on each node."""

_LAST_NUMBER = re.compile(r"(\d{1,7})\D*$")

_SUFFIXES = re.compile(r"(\.(pt|trace|json|gz|zst|xz|bz2|sqlite))+$", re.I)

_NUMBER = re.compile(r"\d+")

_OF_A_CAPTURE = re.compile(
    r"\.\d{10,20}(?=\.pt\.trace\.json)|(?<![a-z])(?:step|iter(?:ation)?|epoch|cycle)[-_.]?\d+",
    re.I,
)
"""The part of the name that differs between captures of one process: the time, which TensorBoard's
handler appends to host and process, or the step.
"""

_SPREAD = 64
"""The largest accepted number per trace, as not all ranks are recorded; beyond, it is a date."""


@dataclass(frozen=True, slots=True)
class Found:
    """A trace, its rank from its content or its name, and the rank in its name."""

    trace: RankTrace
    stated_rank: int | None
    named_rank: int | None = None


def rank_in_name(path: PurePosixPath) -> int | None:
    """The rank in the name of the file, or else of its folder."""
    match = _NAMED.search(path.name) or _NAMED.search(path.parent.name)
    return int(match[1]) if match else None


def ranked(found: Sequence[Found]) -> tuple[list[RankTrace], tuple[Note, ...]]:
    """The traces of one capture in rank order, with notes on guessed ranks.

    Raises DataError if two traces have the same rank.
    """
    apart, renamed = _told_apart(found)
    one_capture, older = _latest_capture(apart)
    known: dict[int, RankTrace] = {}
    for one in one_capture:
        if one.stated_rank is None:
            continue
        if (first := known.get(one.stated_rank)) is not None:
            problem = f"second trace of rank {one.stated_rank}; the first is {first.source}"
            raise DataError(one.trace.source, problem, "analyze one recording at a time")
        known[one.stated_rank] = as_rank(one.stated_rank, one.trace)
    nameless = [one.trace for one in one_capture if one.stated_rank is None]
    guessed = _guessed(nameless, set(known)) if nameless else []
    notes = (*renamed, *older, *_guesses(guessed))
    return sorted([*known.values(), *guessed], key=lambda t: t.rank), notes


def _guesses(traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    """Notes on the guessed ranks: one per trace, or a single note if there are many."""
    if len(traces) > _FEW:
        first, last = traces[0], traces[-1]
        some = f"from {first.source.name} (rank {first.rank}) to {last.source.name} ({last.rank})"
        return (
            Note("rank_guessed", f"{len(traces)} traces have no rank; assigned in order {some}"),
        )
    return tuple(
        Note("rank_guessed", f"{t.source.name} has no rank; assumed rank {t.rank}", t.rank)
        for t in traces
    )


def as_rank(rank: int, trace: RankTrace) -> RankTrace:
    """The trace with this rank."""
    if trace.rank == rank:
        return trace
    notes = tuple(replace(note, rank=rank) for note in trace.notes)
    size = max(trace.world_size, rank + 1)
    return replace(trace, rank=rank, world_size=size, notes=notes)


def _guessed(traces: Sequence[RankTrace], taken: set[int]) -> list[RankTrace]:
    """Assigns ranks by the last numbers in the names if they are small, else by position."""
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
    """If traces have the same rank but their names differ in rank, takes it from the names."""
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
    text = f"several traces have rank {min(wrong)}: ranks are taken from the file names"
    return apart, (Note("rank_by_name", text),)


def _latest_capture(found: Sequence[Found]) -> tuple[Sequence[Found], tuple[Note, ...]]:
    """The latest capture if the run was captured several times, and a note on the others.

    Captures are files of one rank, or of one process if no rank is known, whose paths differ only
    in numbers.
    """
    by_rank: dict[int | str, list[Found]] = defaultdict(list)
    for one in found:
        by_rank[_process(one) if one.stated_rank is None else one.stated_rank].append(one)
    again = [same for same in by_rank.values() if len(same) > 1]
    if not again or any(len({_shape(one) for one in same}) > 1 for same in again):
        return found, ()
    kept = _of_fullest_folder(found) if _apart(again) else [_latest(s) for s in by_rank.values()]
    left_out = len(found) - len(kept)
    text = f"the run was captured several times; the latest is used ({kept[-1].trace.source})"
    return kept, (
        Note("older_captures", f"{text}, {left_out} traces of other captures are ignored"),
    )


def _process(one: Found) -> str:
    return _OF_A_CAPTURE.sub("", str(one.trace.source))


def _shape(one: Found) -> str:
    return _NUMBER.sub("#", str(one.trace.source))


def _apart(again: Sequence[Sequence[Found]]) -> bool:
    """Whether each capture is in its own folder."""
    return all(len({one.trace.source.parent for one in same}) == len(same) for same in again)


def _of_fullest_folder(found: Sequence[Found]) -> list[Found]:
    """The traces of the folder with the most ranks; of several, the one with the last number."""
    folders: dict[Path, list[Found]] = defaultdict(list)
    for one in found:
        folders[one.trace.source.parent].append(one)
    best = max(folders, key=lambda folder: (len(folders[folder]), natural(str(folder))))
    return folders[best]


def _latest(same: Sequence[Found]) -> Found:
    return max(same, key=lambda one: natural(str(one.trace.source)))
