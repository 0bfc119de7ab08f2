"""Reads the Kineto traces of a recording in parallel, with a cache: one RankTrace per rank."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import list_distinct
from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import is_packed
from stepsplit.analyzer.readers.event_store import (
    EventStore,
    store_events,
    store_shapes,
    store_trace,
)
from stepsplit.analyzer.readers.flight_recorder import FlightEntry
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, EventClassifier, Rules
from stepsplit.analyzer.readers.kineto.calls import build_gloo_calls, number_device_calls
from stepsplit.analyzer.readers.kineto.columns import EntryCounts
from stepsplit.analyzer.readers.kineto.json_stream import LEAST_RANGE_BYTES, split_ranges
from stepsplit.analyzer.readers.kineto.trace_file import (
    LISTED_TRACES,
    UNKNOWN_TRACKS,
    KinetoFile,
    TraceOpening,
    TracePart,
    join_parts,
    read_kineto,
    read_opening,
    read_range,
)
from stepsplit.analyzer.readers.rank_limits import MAX_RANKS
from stepsplit.analyzer.readers.rank_traces import (
    TraceCandidate,
    TraceReading,
    choose_store_folders,
    parse_rank,
)
from stepsplit.analyzer.readers.sources import DiskFile, Source, make_absolute
from stepsplit.analyzer.readers.workers import Progress, Task, Workers, count_workers, run_all
from stepsplit.analyzer.trace import DEVICE_CATEGORIES, Category, RankTrace

LEAST_CACHED_BYTES = 16 << 20
"""Smaller files are not cached: reading them is as fast as importing pyarrow, as the cache does."""

# Many trace files, read from the cache or in parallel worker processes.

_RANGES_A_WORKER = 4
"""So that none waits long for the last one, whatever else the machine does."""

_MAX_SHARE = 1.25
"""Of what a worker has to read if all read as much: the others would wait for a larger file, so all
read ranges of it."""

_RECORD_NPU = "record with ProfilerActivity.NPU, or report the file as an issue"

_PACKED_RATIO = 12
"""Approximate compression ratio of a gzipped trace."""

_Piece = KinetoFile | TracePart | None


class _Plan(Struct, frozen=True):
    """The tasks that read a file: one, or one per byte range if opening is known."""

    source: Source
    rules: Rules
    opening: TraceOpening | None
    tasks: tuple[Task[_Piece], ...]


def read_kineto_ranks(
    sources: Sequence[Source], reading: TraceReading
) -> Iterator[list[TraceCandidate] | DataError]:
    """For each file, in order: its trace with its rank, nothing if it is no trace, or its error."""
    classifier, store = EventClassifier(reading.rules), reading.store
    files = read_traces(sources, reading.workers, reading.progress, reading.rules, store)
    for source, file in zip(sources, files, strict=True):
        if file is None or isinstance(file, DataError):
            yield file or []
            continue
        stated, named = file.header.distributed.rank, parse_rank(source.inner)
        rank = stated if 0 <= stated < MAX_RANKS else named
        flight = [] if rank is None else reading.flights.get(rank, [])
        try:
            trace = build_rank_trace(source.where, file, rank or 0, flight, classifier)
        except DataError as error:
            yield error
            continue
        if store is not None:
            trace = store_trace(store.path, trace)
        yield [TraceCandidate(trace, rank, named)]


def read_traces(
    sources: Sequence[Source],
    workers: Workers,
    progress: Progress,
    rules: Rules = BUILT_IN,
    store: EventStore | None = None,
) -> list[KinetoFile | DataError | None]:
    """For each file, in order: its trace, None if it is not a trace, or its error. The columns of
    the events are in the store, if there is one."""
    count = count_workers(workers)
    fair_bytes = sum(map(estimate_bytes, sources)) // count
    here, there = choose_store_folders(workers, store)
    if not isinstance(workers, int):
        sources = [make_absolute(source) for source in sources]
    plans = [_plan(source, fair_bytes, count, rules, there) for source in sources]
    tasks: list[Task[_Piece]] = [task for plan in plans for task in plan.tasks]
    results = run_all(tasks, workers, progress, partial(_store_piece, here))
    pieces = deque(results)
    del results
    return [_assemble_file(plan, [pieces.popleft() for _ in plan.tasks]) for plan in plans]


def read_whole_file(source: Source, rules: Rules, folder: str | None) -> KinetoFile | None:
    """The trace in the file, with its events in the folder of a store, if there is one. Raises
    DataError."""
    file = read_cached(source, rules)
    return None if file is None else _store_file(folder, file)


def _store_piece(folder: str | None, piece: _Piece) -> _Piece:
    return _store_file(folder, piece) if isinstance(piece, KinetoFile) else piece


def _store_file(folder: str | None, file: KinetoFile) -> KinetoFile:
    if folder is None:
        return file
    events, shapes = store_events(folder, file.rows.events), store_shapes(folder, file.rows.shapes)
    return replace(file, rows=replace(file.rows, events=events, shapes=shapes))


def read_cached(source: Source, rules: Rules = BUILT_IN) -> KinetoFile | None:
    """The trace in the file, from the cache if possible. Raises DataError."""
    with source.open_local() as path:
        if path.stat().st_size < LEAST_CACHED_BYTES or not _is_cache_on():
            return read_kineto(DiskFile(path, source.where), rules)
        from stepsplit.analyzer.readers.kineto import cache

        found = cache.load(source, path, rules)
        if found is None:
            found = read_kineto(DiskFile(path, source.where), rules)
            if found is not None:
                cache.save(source, path, found, rules)
        return found


def _is_cache_on() -> bool:
    return os.environ.get("STEPSPLIT_CACHE") != "off"


def _plan(source: Source, fair_bytes: int, workers: int, rules: Rules, folder: str | None) -> _Plan:
    """Plans byte ranges if the file exceeds one worker's fair share of the bytes."""
    whole_file_task: Task[_Piece] = Task(
        source.where, estimate_bytes(source), read_whole_file, (source, rules, folder)
    )
    if workers < 2 or not isinstance(source, DiskFile) or not _is_large(source, fair_bytes):
        return _Plan(source, rules, None, (whole_file_task,))
    opening = read_opening(source)
    if opening is None:
        return _Plan(source, rules, None, (whole_file_task,))
    tasks: list[Task[_Piece]] = [
        Task(source.where, wanted.end - wanted.begin, read_range, (source.path, wanted, rules))
        for wanted in split_ranges(source.path, opening.array_at, _RANGES_A_WORKER * workers)
    ]
    return _Plan(source, rules, opening, tuple(tasks))


def _is_large(source: DiskFile, fair_bytes: int) -> bool:
    """Whether to read the file in ranges; cached and compressed files cannot be."""
    least = max(2 * LEAST_RANGE_BYTES, round(_MAX_SHARE * fair_bytes))
    if source.path.stat().st_size < least or is_packed(source.path):
        return False
    if not _is_cache_on():
        return True
    from stepsplit.analyzer.readers.kineto import cache

    return not cache.has(source)


def estimate_bytes(source: Source) -> int:
    """The approximate uncompressed size; an unknown size counts as large."""
    if not isinstance(source, DiskFile):
        return LEAST_RANGE_BYTES
    size = source.path.stat().st_size
    return size * _PACKED_RATIO if is_packed(source.path) else size


def _assemble_file(plan: _Plan, pieces: list[_Piece | DataError]) -> KinetoFile | DataError | None:
    """The file that its pieces make; empties their list, as join_parts does."""
    if plan.opening is None:
        whole = pieces[0]
        assert not isinstance(whole, TracePart)
        return whole
    error = next((piece for piece in pieces if isinstance(piece, DataError)), None)
    if error is not None:
        return error
    parts = [piece for piece in pieces if isinstance(piece, TracePart)]
    pieces.clear()
    file = join_parts(plan.opening, parts, plan.rules)
    assert isinstance(plan.source, DiskFile)
    if _is_cache_on():
        from stepsplit.analyzer.readers.kineto import cache

        cache.save(plan.source, plan.source.path, file, plan.rules)
    return file


# One trace file as read, and its rank -> RankTrace.

_MAX_NAME_CHARACTERS = 8_000_000
"""Of all distinct names of kernels and ops of a trace: half a minute to classify."""


def build_rank_trace(
    where: str,
    file: KinetoFile,
    rank: int,
    flight: Sequence[FlightEntry],
    classifier: EventClassifier,
) -> RankTrace:
    """Builds the trace of one rank.

    Raises DataError if the trace has no events, or its device's events cannot be classified.
    """
    rows, header = file.rows, file.header
    if not len(rows.events):
        for note in file.notes:
            if note.code == LISTED_TRACES:
                raise DataError(where, note.message, "write each of them into a file", rank)
        raise DataError(where, _explain_no_events(rows.counts), RECORD_AGAIN, rank)
    # Raises DataError if the names of the kernels and ops take too long to classify.
    named = rows.events.is_category(*DEVICE_CATEGORIES, Category.OP)
    numbers = list_distinct(rows.events.name_id[named]).tolist()
    characters = sum(len(rows.events.names[number]) for number in numbers)
    if characters > _MAX_NAME_CHARACTERS:
        problem = (
            f"the names of its {len(numbers):,} kernels and ops have {characters:,} characters"
        )
        hint = f"at most {_MAX_NAME_CHARACTERS:,} can be classified; shorten the names"
        raise DataError(where, problem, hint, rank)
    for note in file.notes:
        if note.code == UNKNOWN_TRACKS:
            raise DataError(where, note.message, _RECORD_NPU, rank)
    info = header.distributed
    found, notes = file.calls, file.notes
    if found is None:
        found, more = build_gloo_calls(rows, flight, info.groups)
        notes = (*notes, *more)
    elif flight:
        found = number_device_calls(found, flight, rows.t0_unix_ns)
    # Any other group than that of all ranks shows only that there are at least as many.
    everyone = {len(group.ranks) for group in found.groups if group.is_default and group.ranks}
    size = max(info.world_size, *everyone, rank + 1)
    states_size = bool(everyone) or info.world_size > max(rank, 0)
    if not states_size:
        numbers = [number for group in found.groups for number in group.ranks]
        bounds = [found.largest, *(number + 1 for number in numbers)]
        size = max([size, *(bound for bound in bounds if bound <= MAX_RANKS)])
    return RankTrace(
        source=Path(where),
        rank=rank,
        world_size=size,
        host=header.host_name,
        device=header.devices[0].name if header.devices else "",
        backend="" if info.backend == "undefined" else info.backend,
        t0_unix_ns=rows.t0_unix_ns,
        events=rows.events,
        calls=found.calls,
        groups=found.groups,
        kinds=classifier.classify(rows.events, found.calls),
        notes=tuple(replace(note, rank=rank) for note in notes),
        shapes=rows.shapes,
        waits=file.waits,
        visible_devices=len(header.devices),
        states_size=states_size,
    )


def _explain_no_events(counts: EntryCounts) -> str:
    """What a trace without complete events (phase X) has instead."""
    if counts.asynchronous:
        found = f"{counts.asynchronous:,} asynchronous events (phases b, n, e)"
    elif counts.paired:
        found = f"{counts.paired:,} begin and end events (phases B, E)"
    else:
        return "the trace has no events"
    return f"only {found} and none with a duration"
