"""Reads a recording: finds the files of the run and the rank of each."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath, PurePosixPath

from msgspec import Struct

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError, UsageError, make_write_error, write
from stepsplit.analyzer.readers import event_store
from stepsplit.analyzer.readers.compression import (
    is_url,
    list_files,
    natural_sort_key,
    open_unpacked,
)
from stepsplit.analyzer.readers.event_store import EventStore, store_trace
from stepsplit.analyzer.readers.flight_recorder import FlightEntry, read_dump
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, EventClassifier, Rules
from stepsplit.analyzer.readers.kinds import (
    FLIGHT,
    NSYS,
    RANK_TABLE,
    RECORD,
    TRACE,
    RankTraces,
    find_kinds,
    read_rank_record,
    read_rank_table,
)
from stepsplit.analyzer.readers.kineto.reader import (
    build_rank_trace,
    choose_store_folders,
    estimate_bytes,
    read_traces,
)
from stepsplit.analyzer.readers.kineto.trace_file import KinetoFile
from stepsplit.analyzer.readers.sources import Source, is_special, make_absolute
from stepsplit.analyzer.readers.workers import Progress, Task, Workers, ignore_progress, run_all
from stepsplit.analyzer.trace import Group, Note, RankTrace
from stepsplit.collectors.formats.json_decode import replace_surrogates
from stepsplit.collectors.formats.rank_record import RankRecord, build_spec
from stepsplit.collectors.formats.run_spec import RUN_FILE, RunSpec, from_json
from stepsplit.collectors.safe_io.atomic_file import PRIVATE

_MAX_RUN_BYTES = 64 << 20

_TABLE_BYTES = 1 << 20
"""Work that reading a table is, as bytes of a trace."""

_UNPACKED_RATIO = 40
"""About how much larger the trace of a table is, unpacked."""


class Recording(Struct, frozen=True):
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
    progress: Progress = ignore_progress,
    rules: Rules = BUILT_IN,
) -> Recording:
    """Reads the recording in the files, folders, archives and URLs, with up to `workers` processes.

    rules classify the kernels. Raises DataError if a place is missing, a named file cannot be read,
    or no trace is found.
    """
    with open_recording(places) as files:
        return read_recording_files(files, workers, progress, rules)


def read_recording_files(
    files: RecordingFiles, workers: Workers, progress: Progress, rules: Rules
) -> Recording:
    """As read_recording, for files that are already listed."""
    for error in files.refused:
        raise error
    candidates, trace_notes = _read_all_traces(files, files.places, workers, progress, rules)
    records, record_notes = _read_records(files.records)
    spec = _read_spec(files.runs) or (build_spec(records) if records else None)
    notes = (*files.notes, *trace_notes, *record_notes, *_note_device_stops(records))
    if not candidates:
        raise _make_no_trace_error(files.places[0], files, notes)
    traces, guessed = assign_ranks(candidates)
    notes += (*guessed, *_check_mixed_runs(traces))
    name = spec.name if spec else _infer_name(files.places[0])
    run_traces, notes = _drop_stale_ranks(fill_group_members(traces), spec, notes)
    run_traces, unplaced = _place_clocks(_name_hosts(_mark_ends(run_traces, records), spec))
    notes += unplaced
    ranks = {trace.rank for trace in run_traces}
    run_records = tuple(record for record in records if record.rank.rank in ranks)
    notes = tuple(replace(note, message=replace_surrogates(note.message)) for note in notes)
    return Recording(replace_surrogates(name), spec, run_traces, notes, run_records)


def _read_records(sources: Sequence[Source]) -> tuple[tuple[RankRecord, ...], list[Note]]:
    """The rank records by rank, and a note per unreadable record."""
    records, notes = [], []
    for source in sources:
        try:
            records.append(read_rank_record(source))
        except DataError as error:
            notes.append(make_skipped_note(source, error))
    return tuple(sorted(records, key=lambda record: record.rank.rank)), notes


def _note_device_stops(records: Sequence[RankRecord]) -> Iterator[Note]:
    for record in records:
        if record.device_stopped_step is not None:
            text = (
                f"the profiler's GPU buffers were full in step {record.device_stopped_step}: from"
                " then on kernels are missing and steps are partial; record fewer steps, or set a"
                " larger ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB"
            )
            yield Note("device_stopped", text, record.rank.rank)


def _mark_ends(traces: Sequence[RankTrace], records: Sequence[RankRecord]) -> tuple[RankTrace, ...]:
    by_rank = {record.rank.rank: record for record in records}
    return tuple(
        replace(trace, device_stopped_step=record.device_stopped_step, end_step=record.end_step)
        if (record := by_rank.get(trace.rank))
        else trace
        for trace in traces
    )


_FARTHEST_APART_NS = 10**16
"""About 116 days: clocks of one run that differ by more do not count from the same time."""


def _place_clocks(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], tuple[Note, ...]]:
    """Traces whose times count from 0, because their file lacks the time base that others have,
    begin where the others do."""
    latest_ns = max(trace.t0_unix_ns for trace in traces)
    lacking = {t.rank for t in traces if latest_ns - t.t0_unix_ns > _FARTHEST_APART_NS}
    if not lacking:
        return tuple(traces), ()
    others_ns = min(trace.t0_unix_ns for trace in traces if trace.rank not in lacking)
    shift_ns = others_ns - min(trace.t0_unix_ns for trace in traces if trace.rank in lacking)
    text = "the times of the file count from 0, unlike those of other ranks: its begin is a guess"
    placed = tuple(
        replace(trace, t0_unix_ns=trace.t0_unix_ns + shift_ns) if trace.rank in lacking else trace
        for trace in traces
    )
    return placed, tuple(Note("no_clock", text, rank) for rank in sorted(lacking))


def _name_hosts(traces: Sequence[RankTrace], spec: RunSpec | None) -> tuple[RankTrace, ...]:
    """The traces with the hosts of run.json where they name none, as those of torch before 2.12."""
    host_of = {rank.rank: rank.host for rank in spec.ranks} if spec else {}
    return tuple(
        trace if trace.host else replace(trace, host=host_of.get(trace.rank, ""))
        for trace in traces
    )


def _read_all_traces(
    files: RecordingFiles,
    named: Sequence[str],
    workers: Workers,
    progress: Progress,
    rules: Rules,
) -> tuple[list[TraceCandidate], tuple[Note, ...]]:
    """The traces in the files. An unreadable file gives a note, or an error if it was named."""
    flights, notes = _read_dumps(files.flights)
    candidates, classifier = [], EventClassifier(rules)
    store = open_store(files)
    read = read_traces(files.traces, workers, progress, rules, store)
    for source, file in zip(files.traces, read, strict=True):
        try:
            candidates += _build_candidates(source, file, flights, classifier, store)
        except DataError as error:
            if source.where in named:
                raise
            notes.append(make_skipped_note(source, error))
    if files.nsys:
        from stepsplit.analyzer.readers.nsys import read_nsys

        for source in files.nsys:
            candidates += map(_build_nsys_candidate, read_nsys(source, rules))
    tables = _read_tables(files.tables, workers, rules, store)
    for source, table in zip(files.tables, tables, strict=True):
        if not isinstance(table, DataError):
            candidates += (TraceCandidate(trace, trace.rank) for trace in table or ())
        elif source.where in named:
            raise table
        else:
            notes.append(make_skipped_note(source, table))
    return candidates, tuple(notes)


def open_store(files: RecordingFiles) -> EventStore | None:
    """A store for the events of a large recording; None for one that fits into memory."""
    if len(files.traces) + len(files.tables) < event_store.LEAST_FILES:
        return None
    total = sum(map(estimate_bytes, files.traces))
    total += sum(_UNPACKED_RATIO * estimate_bytes(source) for source in files.tables)
    return EventStore() if total >= event_store.LEAST_BYTES else None


def _read_tables(
    sources: Sequence[Source], workers: Workers, rules: Rules, store: EventStore | None
) -> list[RankTraces | DataError | None]:
    here, there = choose_store_folders(workers, store)
    tasks = [
        Task(one.where, _TABLE_BYTES, _read_table, (make_absolute(one), rules, there))
        for one in sources
    ]
    return run_all(tasks, workers, receive=partial(_store_traces, here))


def _read_table(source: Source, rules: Rules, folder: str | None) -> RankTraces | None:
    return _store_traces(folder, read_rank_table(source, rules))


def _store_traces(folder: str | None, traces: RankTraces | None) -> RankTraces | None:
    if traces is None or folder is None:
        return traces
    return tuple(store_trace(folder, trace) for trace in traces)


def _build_candidates(
    source: Source,
    file: KinetoFile | DataError | None,
    flights: dict[int, list[FlightEntry]],
    classifier: EventClassifier,
    store: EventStore | None,
) -> list[TraceCandidate]:
    if isinstance(file, DataError):
        raise file
    if file is None:
        return []
    header_rank, name_rank = file.header.distributed.rank, parse_rank(source.inner)
    rank = header_rank if 0 <= header_rank < MAX_RANKS else name_rank
    flight = [] if rank is None else flights.get(rank, [])
    trace = build_rank_trace(source.where, file, rank or 0, flight, classifier)
    if store is not None:
        trace = store_trace(store.path, trace)
    return [TraceCandidate(trace, rank, name_rank)]


def _build_nsys_candidate(trace: RankTrace) -> TraceCandidate:
    notes = tuple(note for note in trace.notes if note.code != "rank_guessed")
    guessed = len(notes) < len(trace.notes)
    return TraceCandidate(replace(trace, notes=notes), None if guessed else trace.rank)


def _read_dumps(sources: Sequence[Source]) -> tuple[dict[int, list[FlightEntry]], list[Note]]:
    """The collectives in each rank's Flight Recorder dump, and a note per unreadable dump."""
    entries_by_rank: dict[int, list[FlightEntry]] = {}
    notes = []
    for source in sources:
        try:
            dump = read_dump(source)
        except DataError as error:
            notes.append(make_skipped_note(source, error))
            continue
        entries_by_rank[dump.rank] = [entry for entry in dump.entries if not entry.is_p2p]
    return entries_by_rank, notes


def _make_no_trace_error(place: str, files: RecordingFiles, notes: Sequence[Note]) -> DataError:
    """The error for a place without traces: what it contains instead, or the first problem, or what
    its first file is."""
    kinds = [*_list_other_kinds(files.others), *([FLIGHT.name] if files.flights else [])]
    present = f"; found only: {', '.join(kinds)}" if kinds else ""
    reason = f"; {notes[0].message}" if notes else ""
    others = [file for file in files.others if file.inner.suffix != ".toml"]
    if others and not kinds and not notes:
        file, rest = others[0], len(others) - 1
        reason = f"; {file.inner.name}: {_explain_unknown_kind(file)[0]}"
        reason += f", and {rest} more" * bool(rest)
    return DataError(
        place, f"no trace found{present}{reason}", f"{NAME_A_TRACE}, or a folder of them"
    )


def _read_spec(runs: Sequence[Source]) -> RunSpec | None:
    """The content of the run.json nearest to the top folder."""
    if not runs:
        return None
    nearest = min(runs, key=lambda source: len(source.inner.parts))
    with open_unpacked(nearest) as content:
        text = content.read(_MAX_RUN_BYTES)
    try:
        return from_json(text)
    except ValueError as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        problem = f"not valid JSON ({error})" if is_syntax else str(error)
        raise DataError(nearest.where, problem, "fix it or leave it out") from None


def _infer_name(place: str) -> str:
    """The name of a recording without run.json: that of its folder."""
    if is_url(place):
        return PurePosixPath(place).name
    path = Path(place)
    return (path if path.is_dir() else path.parent).resolve().name


def _check_mixed_runs(traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    """Notes on signs that the traces are from several runs."""
    devices = {trace.device for trace in traces if trace.device}
    # A trace without a stated world size has the smallest one that its rank allows.
    sizes = {str(trace.world_size) for trace in traces if trace.world_size > trace.rank + 1}
    return (*_note_differences("devices", devices), *_note_differences("world sizes", sizes))


def _note_differences(what: str, values: set[str]) -> tuple[Note, ...]:
    if len(values) < 2:
        return ()
    text = f"traces of different {what} ({', '.join(sorted(values))}): are they from one run?"
    return (Note(f"mixed_{what.replace(' ', '_')}", text),)


def _drop_stale_ranks(
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


# A recording reduced to a table per rank, without its raw traces.


class Reduction(Struct, frozen=True):
    """The ranks whose tables were written, and the sizes of their traces and of the tables.

    skipped are notes on the files that were not read."""

    ranks: tuple[int, ...]
    raw_bytes: int
    table_bytes: int
    skipped: tuple[Note, ...] = ()


def reduce_recording(
    places: Sequence[str | Path],
    out: Path,
    workers: int = 1,
    progress: Progress = ignore_progress,
) -> Reduction:
    """Writes a table per rank, from which `analyze` makes the report that it makes of the traces.

    Each host can reduce the traces of its own ranks into one folder: files of the same ranks are
    replaced. run.json and the rank records are copied. Raises as read_recording, and UsageError if
    the folder cannot be written.
    """
    from stepsplit.analyzer.readers.rank_table import name_table, write_table

    check_outside(out, places)
    with open_recording(places) as files:
        recording = read_recording_files(files, workers, progress, BUILT_IN)
        copies = {source.inner.name: _read_raw(source) for source in (*files.runs, *files.records)}
        raw_bytes = sum(map(_measure_bytes, (*files.traces, *files.nsys)))
    table_bytes = 0
    for name, content in copies.items():
        # As private as the traces, of which the tables have the names.
        write(out / name, content, PRIVATE)
    for trace in recording.traces:
        path = out / name_table(trace.rank)
        try:
            write_table(path, trace)
        except OSError as error:
            raise make_write_error(path, error) from None
        table_bytes += path.stat().st_size
    ranks = tuple(trace.rank for trace in recording.traces)
    skipped = tuple(note for note in recording.notes if note.code == SKIPPED)
    return Reduction(ranks, raw_bytes, table_bytes, skipped)


def check_outside(out: Path, places: Sequence[str | Path]) -> None:
    """Raises UsageError if the folder is or lies in one of the places: with a second file of each
    rank, neither could be read."""
    whole = Path(os.path.realpath(out))
    for place in places:
        if Path(os.path.realpath(place)) in (whole, *whole.parents):
            raise UsageError(f"{out} is in the recording {place}; choose a folder outside of it")


def _read_raw(source: Source) -> bytes:
    with open_unpacked(source) as content:
        return content.read(_MAX_RUN_BYTES)


def _measure_bytes(source: Source) -> int:
    with source.open_local() as path:
        return path.stat().st_size


# The files of a recording by kind.

NAME_A_TRACE = "name a torch.profiler trace"

EXPORT = "export it with nsys export --type sqlite"

_OTHER = "other"
"""Stands for all kinds of files that are no part of a recording."""


class RecordingFiles(Struct, frozen=True):
    """The files of a recording by kind.

    places are those that were searched. others are files that are no part of a recording. refused
    are the errors of named files, notes those of other files.
    """

    places: tuple[str, ...]
    runs: tuple[Source, ...]
    traces: tuple[Source, ...]
    nsys: tuple[Source, ...]
    tables: tuple[Source, ...]
    flights: tuple[Source, ...]
    records: tuple[Source, ...]
    others: tuple[Source, ...]
    refused: tuple[DataError, ...]
    notes: tuple[Note, ...]

    @property
    def only_dumps(self) -> bool:
        """Whether there are Flight Recorder dumps but no traces."""
        return bool(self.flights) and not (self.traces or self.nsys or self.tables)


@contextmanager
def open_recording(places: Sequence[str | Path]) -> Iterator[RecordingFiles]:
    """The files in the places by kind, available on disk while the context is open.

    Raises DataError if a place is missing or an archive is damaged.
    """
    if not places:
        raise DataError("no path", "nothing to read", "name a trace or the folder of a recording")
    place_names = tuple(str(place) for place in places)
    with list_files(add_neighbors(place_names)) as sources:
        yield sort_by_kind(sources, place_names)


def add_neighbors(places: Sequence[str]) -> list[str]:
    """The places, and metadata files in the same folder as a named file."""
    files = [Path(place) for place in places if not is_url(place) and Path(place).is_file()]
    neighbors = [path for file in files for path in _list_neighbors(file)]
    return [*places, *map(str, neighbors)]


def _list_neighbors(file: Path) -> list[Path]:
    try:
        return sorted(path for path in file.parent.iterdir() if _is_neighbor(path.name))
    except OSError:
        return []


def _is_neighbor(name: str) -> bool:
    return name == RUN_FILE or "flight" in name or name.endswith("_record.json")


def sort_by_kind(sources: Sequence[Source], places: tuple[str, ...]) -> RecordingFiles:
    """Sorts the files by kind. Unknown files are ignored, or are errors if they were named."""
    by_kind: dict[str, list[Source]] = defaultdict(list)
    refused, notes = [], []
    present = {source.where for source in sources}
    for source in sources:
        if f"{source.where}.gz" in present and source.where not in places:
            # The recorder removes a raw file only after its packed file is complete.
            continue
        try:
            kinds = _find_kinds(source, source.where in places)
        except DataError as error:
            if source.where in places:
                refused.append(error)
            else:
                notes.append(make_skipped_note(source, error))
            continue
        for kind in kinds:
            by_kind[kind].append(source)
    kinds = (RUN_FILE, TRACE.name, NSYS.name, RANK_TABLE.name, FLIGHT.name, RECORD.name, _OTHER)
    runs, traces, nsys, tables, flights, records, others = (
        tuple(by_kind.pop(kind, ())) for kind in kinds
    )
    return RecordingFiles(
        places, runs, traces, nsys, tables, flights, records, others, tuple(refused), tuple(notes)
    )


SKIPPED = "file_skipped"


def make_skipped_note(source: Source, error: DataError) -> Note:
    """The note on a file that is skipped, with the reason."""
    return Note(SKIPPED, f"{source.inner.name}: {error.problem}", parse_rank(source.inner))


def _find_kinds(source: Source, required: bool) -> tuple[str, ...]:
    """The names of the file's kinds. Raises DataError if it should have one but has none."""
    if source.inner.name == RUN_FILE and not is_special(source):
        return (RUN_FILE,)
    if kinds := find_kinds(source, (TRACE, NSYS, RANK_TABLE, FLIGHT, RECORD)):
        return tuple(kind.name for kind in kinds)
    has_trace_name = parse_rank(source.inner) is not None or "trace" in source.inner.name
    should_have_kind = required or (has_trace_name and ".json" in source.inner.name)
    if should_have_kind and not _list_other_kinds([source]):
        raise DataError(source.where, *_explain_unknown_kind(source))
    return (_OTHER,)


def _list_other_kinds(sources: Iterable[Source]) -> list[str]:
    """The names of the kinds of files that are no part of a recording, each once."""
    # Imported here because most recordings have no need for the readers of all formats.
    from stepsplit.analyzer.readers.registry import KINDS

    kinds = (kind for source in sources for kind in find_kinds(source, KINDS))
    return list(dict.fromkeys(kind.name for kind in kinds))


def _explain_unknown_kind(source: Source) -> tuple[str, str]:
    """Why the file is of no known kind, and the hint."""
    if source.inner.suffix.lower() in (".nsys-rep", ".qdrep"):
        return "an Nsight Systems report, readable only by Nsight Systems", EXPORT
    with open_unpacked(source) as content:
        head = content.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if content.torn and not head:
        return f"the file is damaged ({content.torn})", RECORD_AGAIN
    if not head:
        return "the file is empty", RECORD_AGAIN
    if head[:1] in b"{[":
        return "JSON, but not a trace, or cut off before its first event", NAME_A_TRACE
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself", "fetch it with git lfs pull"
    return "neither JSON nor another supported format", NAME_A_TRACE


# Groups without a list of ranks: the members are the ranks whose traces name the group.


def fill_group_members(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
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
    return tuple(_fill_groups(trace, members) for trace in traces)


def _fill_groups(trace: RankTrace, members: dict[str, list[int]]) -> RankTrace:
    if all(group.ranks for group in trace.groups):
        return trace
    groups = tuple(
        group if group.ranks else Group(group.name, tuple(sorted(members[group.name])), "")
        for group in trace.groups
    )
    return replace(trace, groups=groups)


# The rank of each trace: from its content, its file name, or its position (with a note).

MAX_RANKS = 10_000_000

_MAX_SINGLE_NOTES = 4

_RANK_IN_NAME = re.compile(
    r"(?:(?<!local)(?<!local[-_. ])rank[-_. ]?|\bworker|_worker)(\d{1,7})(?!\d)", re.I
)
"""Excludes local_rank, which repeats on each node."""

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


@dataclass(frozen=True, slots=True)
class TraceCandidate:
    """A trace, its rank from its content or its name, and the rank in its name."""

    trace: RankTrace
    stated_rank: int | None
    named_rank: int | None = None


def parse_rank(path: PurePosixPath) -> int | None:
    """The rank in the name of the file, or else of its folder."""
    match = _RANK_IN_NAME.search(path.name) or _RANK_IN_NAME.search(path.parent.name)
    return int(match[1]) if match else None


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
            raise DataError(candidate.trace.source, problem, "analyze one recording at a time")
        by_rank[candidate.stated_rank] = set_rank(candidate.stated_rank, candidate.trace)
    nameless = [one.trace for one in latest if one.stated_rank is None]
    guessed = _guess_ranks(nameless, set(by_rank)) if nameless else []
    notes = (*renamed, *older, *_note_guesses(guessed))
    return sorted([*by_rank.values(), *guessed], key=lambda t: t.rank), notes


def _note_guesses(traces: Sequence[RankTrace]) -> tuple[Note, ...]:
    """Notes on the guessed ranks: one per trace, or a single note if there are many."""
    if len(traces) > _MAX_SINGLE_NOTES:
        first, last = traces[0], traces[-1]
        some = f"from {first.source.name} (rank {first.rank}) to {last.source.name} ({last.rank})"
        return (
            Note("rank_guessed", f"{len(traces)} traces have no rank; assigned in order {some}"),
        )
    return tuple(
        Note("rank_guessed", f"{t.source.name} has no rank; assumed rank {t.rank}", t.rank)
        for t in traces
    )


def set_rank(rank: int, trace: RankTrace) -> RankTrace:
    """The trace with this rank."""
    if trace.rank == rank:
        return trace
    notes = tuple(replace(note, rank=rank) for note in trace.notes)
    size = max(trace.world_size, rank + 1)
    return replace(trace, rank=rank, world_size=size, notes=notes)


def _guess_ranks(traces: Sequence[RankTrace], taken: set[int]) -> list[RankTrace]:
    """Assigns ranks by the last numbers in the names if they are small, else by position."""
    numbers = [parse_last_number(trace.source) for trace in traces]
    is_unique = len({*numbers, *taken}) == len(numbers) + len(taken)
    if (
        len(traces) > 1
        and is_unique
        and min(numbers) >= 0
        and max(numbers) < MAX_RANK_SPREAD * len(traces)
    ):
        return [set_rank(number, trace) for number, trace in zip(numbers, traces, strict=True)]
    free = (rank for rank in range(len(traces) + len(taken)) if rank not in taken)
    in_order = sorted(traces, key=lambda trace: natural_sort_key(str(trace.source)))
    return [set_rank(rank, trace) for rank, trace in zip(free, in_order, strict=False)]


def parse_last_number(path: PurePath) -> int:
    """The last number in the name of a trace, by which its rank may be guessed; -1 for none."""
    match = _LAST_NUMBER.search(_SUFFIXES.sub("", path.name))
    return int(match[1]) if match else -1


def _resolve_rank_conflicts(
    candidates: Sequence[TraceCandidate],
) -> tuple[Sequence[TraceCandidate], tuple[Note, ...]]:
    """If traces have the same rank but their names differ in rank, takes it from the names."""
    names_by_rank: dict[int, set[int | None]] = defaultdict(set)
    for candidate in candidates:
        if candidate.stated_rank is not None:
            names_by_rank[candidate.stated_rank].add(candidate.named_rank)
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
    """The latest capture if the run was captured several times, and a note on the others.

    Captures are files of one rank, or of one process if no rank is known, whose paths differ only
    in numbers.
    """
    by_rank: dict[int | str, list[TraceCandidate]] = defaultdict(list)
    for candidate in candidates:
        by_rank[
            _identify_process(candidate) if candidate.stated_rank is None else candidate.stated_rank
        ].append(candidate)
    repeated = [same for same in by_rank.values() if len(same) > 1]
    if not repeated or any(len({_mask_numbers(one) for one in same}) > 1 for same in repeated):
        return candidates, ()
    latest = (
        _select_fullest_folder(candidates)
        if _has_folder_per_capture(repeated)
        else [_select_latest(s) for s in by_rank.values()]
    )
    left_out = len(candidates) - len(latest)
    text = f"the run was captured several times; the latest is used ({latest[-1].trace.source})"
    return latest, (
        Note("older_captures", f"{text}, {left_out} traces of other captures are ignored"),
    )


def _identify_process(candidate: TraceCandidate) -> str:
    return CAPTURE_PART.sub("", str(candidate.trace.source))


def _mask_numbers(candidate: TraceCandidate) -> str:
    return _NUMBER.sub("#", str(candidate.trace.source))


def _has_folder_per_capture(repeated: Sequence[Sequence[TraceCandidate]]) -> bool:
    """Whether each capture is in its own folder."""
    return all(len({one.trace.source.parent for one in same}) == len(same) for same in repeated)


def _select_fullest_folder(candidates: Sequence[TraceCandidate]) -> list[TraceCandidate]:
    """The traces of the folder with the most ranks; of several, the one with the last number."""
    folders: dict[Path, list[TraceCandidate]] = defaultdict(list)
    for candidate in candidates:
        folders[candidate.trace.source.parent].append(candidate)
    best = max(folders, key=lambda folder: (len(folders[folder]), natural_sort_key(str(folder))))
    return folders[best]


def _select_latest(same: Sequence[TraceCandidate]) -> TraceCandidate:
    return max(same, key=lambda one: natural_sort_key(str(one.trace.source)))
