"""Paths -> Recording: which files belong to the run, and which rank each is of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.files import read_text
from stepsplit.analyzer.readers.flight import FlightEntry, read_flight
from stepsplit.analyzer.readers.kineto import KinetoFile, parse
from stepsplit.analyzer.readers.rank_trace import to_rank_trace
from stepsplit.analyzer.trace import Note, RankTrace
from stepsplit.collectors.run_spec import RunSpec, from_json

RUN_NAME = "run.json"
_RANK = re.compile(r"rank[-_ ]?(\d+)", re.I)
_FLIGHT = re.compile(r"rank[-_ ]?(\d+)[-_.]flight\.json(\.gz)?$", re.I)
_SUFFIXES = (".json", ".json.gz")


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
        raise DataError(
            "no path", "nothing to read", "name a trace file or the folder of a recording"
        )
    files = [file for path in paths for file in _files(path)]
    flights = {int(m[1]): file for file in files if (m := _FLIGHT.search(file.name))}
    spec = _spec(files)
    found = [(f, p) for f in files if f.name != RUN_NAME and f not in flights.values()
             and (p := _parsed(f, named=f in paths)) is not None]  # fmt: skip
    if not found:
        raise DataError(
            paths[0], "no trace in it", "name the folder that holds rank*_trace.json.gz"
        )
    ranks, notes = _ranks(found)
    traces = [_trace(file, parsed, rank, flights.get(rank)) for (file, parsed), rank in
              zip(found, ranks, strict=True)]  # fmt: skip
    traces.sort(key=lambda trace: trace.rank)
    name = (
        spec.name if spec else (paths[0] if paths[0].is_dir() else paths[0].parent).resolve().name
    )
    return Recording(name, spec, tuple(traces), notes)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file() and p.name.endswith(_SUFFIXES))
        return sorted(p for p in inside if not p.name.startswith("."))
    if not path.exists():
        raise DataError(path, "no such file or folder", "check the path")
    return [path]


def _spec(files: Iterable[Path]) -> RunSpec | None:
    specs = [file for file in files if file.name == RUN_NAME]
    if not specs:
        return None
    try:
        return from_json(specs[0].read_bytes())
    except (ValueError, OSError) as error:
        raise DataError(specs[0], str(error), "mend it or leave it out") from None


@dataclass(frozen=True, slots=True)
class _Parsed:
    text: bytes
    content: KinetoFile


def _parsed(file: Path, named: bool) -> _Parsed | None:
    """The trace in the file; None for other JSON that merely lies in the folder."""
    text = read_text(file)
    content = parse(file, text)
    if isinstance(content.traceEvents, msgspec.UnsetType):
        if not named:
            return None
        raise DataError(file, "JSON, but no trace", "name a torch.profiler trace")
    return _Parsed(text, content)


def _ranks(found: Sequence[tuple[Path, _Parsed]]) -> tuple[list[int], tuple[Note, ...]]:
    """Each file's rank: from its content, else its name, else its place; guesses are noted."""
    stated = [_stated_rank(file, parsed.content) for file, parsed in found]
    known = [rank for rank in stated if rank is not None]
    twice = next((rank for rank in known if known.count(rank) > 1), None)
    if twice is not None:
        both = [str(file) for (file, _), rank in zip(found, stated, strict=True) if rank == twice]
        raise DataError(both[1], f"a second trace of rank {twice}, beside {both[0]}",
                        "analyze one recording at a time", twice)  # fmt: skip
    free = (rank for rank in range(len(found) + len(known)) if rank not in known)
    ranks = [next(free) if rank is None else rank for rank in stated]
    guesses = [
        (file, rank) for (file, _), rank, s in zip(found, ranks, stated, strict=True) if s is None
    ]
    notes = [
        Note("rank_guessed", f"{file.name} names no rank; taken for rank {rank}", rank)
        for file, rank in guesses
    ]
    return ranks, tuple(notes)


def _stated_rank(file: Path, content: KinetoFile) -> int | None:
    rank = content.distributed.rank
    if rank >= 0:
        return rank
    match = _RANK.search(file.name) or _RANK.search(file.parent.name)
    return int(match[1]) if match else None


def _trace(file: Path, parsed: _Parsed, rank: int, flight: Path | None) -> RankTrace:
    entries: tuple[FlightEntry, ...] = () if flight is None else read_flight(flight)
    return to_rank_trace(file, parsed.text, parsed.content, rank, entries)
