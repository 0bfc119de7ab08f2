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
from typing import Any

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers import file_kinds
from stepsplit.analyzer.readers.compression import natural_sort_key
from stepsplit.analyzer.readers.file_kinds import FileKind, FileRole, find_kinds
from stepsplit.analyzer.readers.flight_recorder import find_rank_in_path
from stepsplit.analyzer.readers.rank_traces import (
    CAPTURE_PART,
    MAX_RANK_SPREAD,
    parse_last_number,
    parse_rank,
)
from stepsplit.analyzer.readers.sources import DiskFile, Source
from stepsplit.analyzer.redact.copies import COPIES
from stepsplit.collectors.safe_io.regular_file import leads_outside


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A file to copy: its kind, and its path in the output folder."""

    source: Source
    kind: FileKind[Any]
    name: str


def plan_copies(
    sources: Sequence[Source], places: Sequence[Path]
) -> tuple[list[PlannedCopy], list[tuple[str, str]]]:
    """The files of the places to copy, in natural order, and the others with the reason."""
    chosen: list[tuple[Source, FileKind[Any]]] = []
    left_out: list[tuple[str, str]] = []
    present = {source.where for source in sources}
    for source in sorted(sources, key=lambda each: natural_sort_key(each.where)):
        if isinstance(source, DiskFile) and all(leads_outside(source.path, one) for one in places):
            # It may be any file of this user.
            left_out.append((source.where, "a link out of the folder"))
            continue
        try:
            kinds = find_kinds(source, file_kinds.KINDS)
        except DataError as error:
            left_out.append((source.where, error.problem))
            continue
        kind = next((kind for kind in kinds if kind.redact_as), None)
        others = [other.name for other in kinds if other is not kind]
        if f"{source.where}.gz" in present:
            left_out.append((source.where, "its packed file is copied"))
            continue
        if kind is not None:
            chosen.append((source, kind))
        if others or kind is None:
            left_out.append((source.where, ", ".join(others) or "not a file of a recording"))
    # A folder that contains all others is the output itself; others are numbered, the outermost
    # first, and keep the rank they name, which readers take from there.
    parents = {source.inner.parent for source, _ in chosen}
    folders: dict[PurePosixPath, str] = {}
    for folder in sorted(parents, key=lambda one: (len(one.parts), natural_sort_key(str(one)))):
        rank = parse_rank(PurePosixPath("_") / folder.name / "_")
        of_rank = "" if rank is None else f"_rank{rank}"
        is_top = all(folder in (other, *other.parents) for other in parents)
        folders[folder] = "" if is_top else f"folder{len(folders)}{of_rank}/"
    names = _name_files(chosen)
    copies = [
        PlannedCopy(source, kind, folders[source.inner.parent] + name)
        for (source, kind), name in zip(chosen, names, strict=True)
    ]
    return copies, left_out


_OWN_NAME = re.compile(r"rank\d{1,7}_(?:(?:trace|flight)\.json(?:\.gz)?|record\.json)", re.ASCII)


def _name_files(chosen: Sequence[tuple[Source, FileKind[Any]]]) -> list[str]:
    """The new name of each file, without its folder."""
    traces = [source for source, kind in chosen if kind.role is FileRole.TRACE]
    captures = Counter(map(_identify_process, traces))
    nameless = [source for source in traces if _is_nameless(source)]
    last = [parse_last_number(source.inner) for source in nameless]
    is_numbered = len(set(last)) == len(last) and all(
        0 <= number < MAX_RANK_SPREAD * len(last) for number in last
    )
    numbers: dict[tuple[FileKind[Any], bool], dict[str, int]] = {}
    seen = Counter[str]()
    names = []
    for source, kind in chosen:
        ending = COPIES[kind.redact_as].ending
        if kind.file_name is not None:
            names.append(kind.name)
            continue
        if _OWN_NAME.fullmatch(source.inner.name):
            name = source.inner.name.removesuffix(".gz")
            names.append(name + ".gz" * ending.endswith(".gz"))
            continue
        process = _identify_process(source)
        same = numbers.setdefault((kind, _is_nameless(source)), {})
        stem = f"{kind.redact_as}{same.setdefault(process, len(same))}"
        seen[process] += 1
        if kind.role is FileRole.FLIGHT:
            rank = find_rank_in_path(source.inner)
            stem += f"_rank{rank}" if rank >= 0 else "_dump"
        elif (named := parse_rank(source.inner)) is not None:
            stem += f"_rank{named}"
        elif kind.role is FileRole.TRACE and is_numbered:
            stem += f"_{parse_last_number(source.inner)}"
        if captures[process] > 1:
            # A number that is too large for the reader to take it for a rank.
            stem += f"_step{1_000_000 + seen[process]}"
        names.append(stem + ending)
    return names


def _is_nameless(source: Source) -> bool:
    return parse_rank(source.inner) is None


def _identify_process(source: Source) -> str:
    """The path without what differs between captures of one process."""
    return CAPTURE_PART.sub("", source.where)
