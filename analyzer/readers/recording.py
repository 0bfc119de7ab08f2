"""Paths -> Recording: which files belong to the run, and which rank each is of."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.files import RECORD_AGAIN, read_text
from stepsplit.analyzer.readers.flight import read_flight
from stepsplit.analyzer.readers.kineto import KinetoFile, parse
from stepsplit.analyzer.readers.rank_trace import to_rank_trace
from stepsplit.analyzer.trace import Note, RankTrace
from stepsplit.collectors.run_spec import RunSpec, from_json

RUN_NAME = "run.json"
_RANK = re.compile(r"(?:rank[-_ ]?|\bworker|_worker)(\d{1,7})", re.I)
_FLIGHT = re.compile(r"rank[-_ ]?(\d+)[-_.]flight\.json(\.gz)?$", re.I)
_SUFFIXES = (".json", ".json.gz")
MOST_RANKS = 10_000_000


@dataclass(frozen=True, slots=True)
class Recording:
    """What the readers found: run.json where it was, the traces in the order of their ranks."""

    name: str
    spec: RunSpec | None
    traces: tuple[RankTrace, ...]
    notes: tuple[Note, ...]


def read_recording(paths: Sequence[Path]) -> Recording:
    """The recording in the files and folders.

    Raises DataError where a file is torn, or none is a trace.
    """
    if not paths:
        raise DataError("no path", "nothing to read", "name a trace or the folder of a recording")
    files = list({file.resolve(): file for path in paths for file in _files(path)}.values())
    flights = {int(m[1]): file for file in files if (m := _FLIGHT.search(file.name))}
    others = {*flights.values(), *(file for file in files if file.name == RUN_NAME)}
    spec = _spec(files)
    found, skipped = _traces([file for file in files if file not in others], paths, flights)
    if not found:
        why = f"; {skipped[0].message}" if skipped else ""
        raise DataError(
            paths[0], f"no trace in it{why}", "name torch.profiler traces or their folder"
        )
    traces, guessed = _ranked(found)
    name = spec.name if spec else _folder_name(paths[0])
    return Recording(name, spec, *_of_this_run(traces, spec, (*skipped, *guessed)))


def _folder_name(path: Path) -> str:
    return (path if path.is_dir() else path.parent).resolve().name


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


def _files(path: Path) -> list[Path]:
    """The JSON files of a folder; or a file, with what its recording says of it beside it."""
    if path.is_dir():
        return sorted(_inside(path))
    if not path.exists():
        raise DataError(path, "no such file or folder", "check the path")
    try:
        beside = [p for p in path.parent.iterdir() if p.name == RUN_NAME or _FLIGHT.search(p.name)]
    except OSError:
        beside = []
    return [path, *sorted(beside)]


def _inside(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(error.filename, error.strerror or "unreadable", "make it readable")

    for where, _, names in os.walk(folder, onerror=refuse):
        visible = (name for name in names if not name.startswith("."))
        yield from (Path(where, name) for name in visible if name.endswith(_SUFFIXES))


def _spec(files: Iterable[Path]) -> RunSpec | None:
    specs = [file for file in files if file.name == RUN_NAME]
    if not specs:
        return None
    try:
        return from_json(specs[0].read_bytes())
    except (ValueError, OSError) as error:
        raise DataError(specs[0], str(error), "mend it or leave it out") from None


@dataclass(frozen=True, slots=True)
class _Found:
    """A trace, and its rank as far as it says so itself."""

    trace: RankTrace
    stated_rank: int | None


def _traces(
    files: Sequence[Path], named: Sequence[Path], flights: Mapping[int, Path]
) -> tuple[list[_Found], tuple[Note, ...]]:
    """The traces among the files; what merely lies beside them is skipped, with a note."""
    found, notes = [], []
    for file in files:
        must = file in named or _RANK.search(file.name) is not None or "trace" in file.name
        try:
            one = _trace(file, flights)
        except DataError as error:
            if must:
                raise
            notes.append(Note("file_skipped", f"{file.name}: {error.problem}"))
            continue
        if one is not None:
            found.append(one)
        elif file in named:
            raise DataError(file, "JSON, but no trace", "name a torch.profiler trace")
    return found, tuple(notes)


def _trace(file: Path, flights: Mapping[int, Path]) -> _Found | None:
    """The trace in the file; None where its JSON is something else."""
    text = read_text(file)
    content = parse(file, text)
    if isinstance(content.traceEvents, msgspec.UnsetType):
        return None
    rank = _stated_rank(file, content)
    recorded = flights.get(-1 if rank is None else rank)
    flight = () if recorded is None else read_flight(recorded)
    try:
        return _Found(to_rank_trace(file, text, content, rank or 0, flight), rank)
    except OverflowError as error:
        raise DataError(file, f"a number outgrows 64 bits ({error})", RECORD_AGAIN, rank) from None


def _stated_rank(file: Path, content: KinetoFile) -> int | None:
    rank = content.distributed.rank
    if 0 <= rank < MOST_RANKS:
        return rank
    match = _RANK.search(file.name) or _RANK.search(file.parent.name)
    return int(match[1]) if match else None


def _ranked(found: Sequence[_Found]) -> tuple[list[RankTrace], tuple[Note, ...]]:
    """The traces by rank: by content, else by name, else by place; guesses are noted."""
    known: dict[int, RankTrace] = {}
    for one in found:
        if one.stated_rank is None:
            continue
        if (first := known.get(one.stated_rank)) is not None:
            problem = f"a second trace of rank {one.stated_rank}, beside {first.source}"
            raise DataError(one.trace.source, problem, "analyze one recording at a time")
        known[one.stated_rank] = one.trace
    free = (rank for rank in range(len(found)) if rank not in known)
    guessed = [_as_rank(next(free), one.trace) for one in found if one.stated_rank is None]
    notes = tuple(
        Note("rank_guessed", f"{t.source.name} names no rank; taken for rank {t.rank}", t.rank)
        for t in guessed
    )
    return sorted([*known.values(), *guessed], key=lambda trace: trace.rank), notes


def _as_rank(rank: int, trace: RankTrace) -> RankTrace:
    return replace(trace, rank=rank, world_size=max(trace.world_size, rank + 1))
