"""Paths -> Recording: which files belong to the run, and which rank each is of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import files_of, is_url, unpacked
from stepsplit.analyzer.readers.flight_recorder import FlightEntry, read_dump
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.reader import read_traces, to_rank_trace
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile
from stepsplit.analyzer.readers.nsys import read_nsys
from stepsplit.analyzer.readers.ranks import MOST_RANKS, Found, rank_in_name, ranked
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

    rules tell which kernels communicate. Raises DataError where a place is missing, a file that was
    named cannot be read, or nothing in all of them is a trace.
    """
    if not places:
        raise DataError("no path", "nothing to read", "name a trace or the folder of a recording")
    named = [str(place) for place in places]
    with files_of(with_neighbors(named)) as sources:
        files, left_alone = sorted_out(sources, named)
        found, unreadable = _traces(files, named, workers, progress, rules)
        records, odd = _records(files.records)
        spec = _spec(files.runs) or (spec_of(records) if records else None)
    notes = (*left_alone, *unreadable, *odd)
    if not found:
        raise _nothing(named[0], files, notes)
    traces, guessed = ranked(found)
    notes += (*guessed, *_mixed(traces))
    name = spec.name if spec else _folder_name(named[0])
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
    files: Files, named: Sequence[str], workers: int, progress: Progress, rules: Rules
) -> tuple[list[Found], tuple[Note, ...]]:
    """The traces in the files; one that cannot be read is skipped, with a note, unless named."""
    flights, notes = _flights(files.flights)
    found = []
    read = read_traces(files.traces, workers, progress, rules)
    for source, one in zip(files.traces, read, strict=True):
        try:
            found += _found(source, one, flights)
        except DataError as error:
            if source.where in named:
                raise
            notes.append(skipped(source, error))
    for source in files.nsys:
        found += map(_of_nsys, read_nsys(source, rules))
    return found, tuple(notes)


def _found(
    source: Source, file: KinetoFile | DataError | None, flights: dict[int, list[FlightEntry]]
) -> list[Found]:
    if isinstance(file, DataError):
        raise file
    if file is None:
        return []
    stated, named = file.header.distributed.rank, rank_in_name(source.inner)
    rank = stated if 0 <= stated < MOST_RANKS else named
    flight = [] if rank is None else flights.get(rank, [])
    return [Found(to_rank_trace(source.where, file, rank or 0, flight), rank, named)]


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


def _nothing(place: str, files: Files, notes: Sequence[Note]) -> DataError:
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
        raise DataError(nearest.where, str(error), "mend it or leave it out") from None


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
class Files:
    """The files of a recording by what they are; others are the kinds that no split is made of."""

    runs: tuple[Source, ...]
    traces: tuple[Source, ...]
    nsys: tuple[Source, ...]
    flights: tuple[Source, ...]
    records: tuple[Source, ...]
    others: tuple[str, ...]


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


def sorted_out(sources: Sequence[Source], named: Sequence[str]) -> tuple[Files, tuple[Note, ...]]:
    """The files by their kinds; what merely lies beside a trace is left alone.

    Raises DataError where a file that was named is of no kind.
    """
    by_kind: dict[str, list[Source]] = defaultdict(list)
    notes = []
    for source in sources:
        try:
            kinds = _kinds(source, source.where in named)
        except DataError as error:
            if source.where in named:
                raise
            notes.append(skipped(source, error))
            continue
        for kind in kinds:
            by_kind[kind].append(source)
    kinds = (RUN_NAME, TRACE.name, NSYS.name, FLIGHT.name, RECORD.name)
    runs, traces, nsys, flights, records = (tuple(by_kind.pop(kind, ())) for kind in kinds)
    return Files(runs, traces, nsys, flights, records, tuple(by_kind)), tuple(notes)


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
    """Why the file is of no kind, and the mend."""
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
