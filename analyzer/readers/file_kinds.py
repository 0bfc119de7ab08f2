"""Which of a recording's files are what: traces, what a recorder left beside them, and the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.kinds import FLIGHT, NSYS, RECORD, TRACE, kinds_of
from stepsplit.analyzer.readers.listing import is_url
from stepsplit.analyzer.readers.ranks import rank_in_name
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import unpacked
from stepsplit.analyzer.trace import Note

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
