"""Which files are copied, and their names: the recorder's own stay, others are numbered.

The new names tell the reader what it takes from the old ones: the rank, the order, which files are
captures of one process, and in which folder they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.compression import natural_sort_key
from stepsplit.analyzer.readers.flight_recorder import find_rank_in_path
from stepsplit.analyzer.readers.kinds import FLIGHT, TRACE, find_kinds
from stepsplit.analyzer.readers.recording import (
    CAPTURE_PART,
    MAX_RANK_SPREAD,
    parse_last_number,
    parse_rank,
)
from stepsplit.analyzer.readers.registry import KINDS
from stepsplit.analyzer.readers.sources import DiskFile, Source, is_special
from stepsplit.analyzer.redact.copies import COPIES, JOB
from stepsplit.collectors.formats.run_spec import RUN_FILE
from stepsplit.collectors.safe_io.regular_file import leads_outside


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A file to copy: its kind, and its path in the output folder."""

    source: Source
    kind: str
    name: str


def plan_copies(
    sources: Sequence[Source], places: Sequence[Path]
) -> tuple[list[PlannedCopy], list[tuple[str, str]]]:
    """The files of the places to copy, in natural order, and the others with the reason."""
    chosen: list[tuple[Source, str]] = []
    left_out: list[tuple[str, str]] = []
    present = {source.where for source in sources}
    for source in sorted(sources, key=lambda each: natural_sort_key(each.where)):
        if isinstance(source, DiskFile) and all(leads_outside(source.path, one) for one in places):
            # It may be any file of this user.
            left_out.append((source.where, "a link out of the folder"))
            continue
        try:
            kinds = _find_kinds(source)
        except DataError as error:
            left_out.append((source.where, error.problem))
            continue
        kind = next((kind for kind in kinds if kind in COPIES), "")
        others = [other for other in kinds if other != kind]
        if f"{source.where}.gz" in present:
            left_out.append((source.where, "its packed file is copied"))
            continue
        if kind:
            chosen.append((source, kind))
        if others or not kind:
            left_out.append((source.where, ", ".join(others) or "not a file of a recording"))
    folders = _name_folders([source for source, _ in chosen])
    names = _name_files(chosen)
    copies = [
        PlannedCopy(source, kind, folders[source.inner.parent] + name)
        for (source, kind), name in zip(chosen, names, strict=True)
    ]
    return copies, left_out


def _find_kinds(source: Source) -> list[str]:
    """The kinds of the file, none if unknown. Raises DataError if it is damaged."""
    if not is_special(source):
        if source.inner.name == RUN_FILE:
            return [RUN_FILE]
        if source.inner.suffix == ".toml":
            return [JOB]
    return [kind.name for kind in find_kinds(source, KINDS)]


def _name_folders(sources: Sequence[Source]) -> dict[PurePosixPath, str]:
    """The new name of each folder. One that contains all others is the output itself; others are
    numbered, the outermost first, and keep the rank they name."""
    folders = {source.inner.parent for source in sources}
    in_order = sorted(folders, key=lambda each: (len(each.parts), natural_sort_key(str(each))))
    names: dict[PurePosixPath, str] = {}
    for folder in in_order:
        rank = parse_rank(PurePosixPath("_") / folder.name / "_")
        of_rank = "" if rank is None else f"_rank{rank}"
        is_top = all(folder in (other, *other.parents) for other in folders)
        names[folder] = "" if is_top else f"folder{len(names)}{of_rank}/"
    return names


_OWN_NAME = re.compile(r"rank\d{1,7}_(?:(?:trace|flight)\.json(?:\.gz)?|record\.json)", re.ASCII)


def _name_files(chosen: Sequence[tuple[Source, str]]) -> list[str]:
    """The new name of each file, without its folder."""
    captures = Counter(_identify_process(source) for source, kind in chosen if kind == TRACE.name)
    nameless = [source for source, kind in chosen if kind == TRACE.name and _is_nameless(source)]
    last = [parse_last_number(source.inner) for source in nameless]
    is_numbered = len(set(last)) == len(last) and all(
        0 <= number < MAX_RANK_SPREAD * len(last) for number in last
    )
    numbers: dict[tuple[str, bool], dict[str, int]] = {}
    seen = Counter[str]()
    names = []
    for source, kind in chosen:
        copy = COPIES[kind]
        if kind in (RUN_FILE, JOB):
            names.append(kind)
            continue
        if _OWN_NAME.fullmatch(source.inner.name):
            name = source.inner.name.removesuffix(".gz")
            names.append(name + ".gz" * copy.ending.endswith(".gz"))
            continue
        process = _identify_process(source)
        same = numbers.setdefault((kind, _is_nameless(source)), {})
        stem = f"{copy.stem}{same.setdefault(process, len(same))}"
        seen[process] += 1
        if kind == FLIGHT.name:
            rank = find_rank_in_path(source.inner)
            stem += f"_rank{rank}" if rank >= 0 else "_dump"
        elif (named := parse_rank(source.inner)) is not None:
            stem += f"_rank{named}"
        elif kind == TRACE.name and is_numbered:
            stem += f"_{parse_last_number(source.inner)}"
        if captures[process] > 1:
            # A number that is too large for the reader to take it for a rank.
            stem += f"_step{1_000_000 + seen[process]}"
        names.append(stem + copy.ending)
    return names


def _is_nameless(source: Source) -> bool:
    return parse_rank(source.inner) is None


def _identify_process(source: Source) -> str:
    """The path without what differs between captures of one process."""
    return CAPTURE_PART.sub("", source.where)
