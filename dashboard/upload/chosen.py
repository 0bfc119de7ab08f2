"""What an upload is of: files and the paths that a run keeps them under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.errors import UsageError


@dataclass(frozen=True, slots=True)
class Chosen:
    """A file to send; path is what the run calls it, with slashes."""

    file: Path
    path: str
    size_bytes: int


def chosen(places: Sequence[Path]) -> tuple[Chosen, ...]:
    """The files of the places; a folder's keep their paths below it. Hidden ones are no part of a
    recording. Raises UsageError."""
    found = [one for place in places for one in _of(place)]
    if not found:
        raise UsageError(f"{places[0]}: no files to upload; name a recording's files or folder")
    paths = [one.path for one in found]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise UsageError(f"{twice[0]} is there twice; upload the folder that holds both")
    return tuple(found)


def _of(place: Path) -> list[Chosen]:
    if place.is_file():
        return [Chosen(place, place.name, place.stat().st_size)]
    if not place.is_dir():
        raise UsageError(f"{place}: no such file or folder; check the path")
    root = place.resolve()
    files = sorted(path for path in root.rglob("*") if path.is_file() and not _hidden(path, root))
    return [
        Chosen(path, path.relative_to(root.parent).as_posix(), path.stat().st_size)
        for path in files
    ]


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
