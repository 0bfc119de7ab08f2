"""What an upload sends: the files at a place, the recordings among them, and the name of a run."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.collectors.formats.rank_record import read_record
from stepsplit.collectors.formats.run_spec import (
    FOLDERS_OF_A_RECORDING,
    MESH_FILE,
    RUN_FILE,
    from_json,
)
from stepsplit.collectors.safe_io.regular_file import describe_special, leads_outside, read_regular


@dataclass(frozen=True, slots=True)
class FileToSend:
    """A file to send; path is its POSIX path in the run."""

    file: Path
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file of the folder that is not sent, by its POSIX path in the run, and why."""

    path: str
    reason: str


def collect_files(
    places: Sequence[Path], leave_out: Callable[[LeftOut], object] = lambda _: None
) -> tuple[FileToSend, ...]:
    """Lists the files at the places; files of a folder keep their relative paths.

    Hidden files are skipped, and links of files to others of the folder, which are sent themselves.
    Other links, pipes, sockets and devices are passed to leave_out: with a link, a recording from
    somebody else would send any file of this user. Raises UsageError.
    """
    files = [one for place in places for one in _list_files_at(place, leave_out)]
    if not files:
        raise UsageError(f"{places[0]}: no files to upload; give a recording's files or folder")
    paths = [one.path for one in files]
    duplicates = sorted({path for path in paths if paths.count(path) > 1})
    if duplicates:
        raise UsageError(f"{duplicates[0]} is given twice; upload the folder that contains both")
    return tuple(files)


def _list_files_at(place: Path, leave_out: Callable[[LeftOut], object]) -> Iterator[FileToSend]:
    if place.is_file():
        # A link that the user names is followed.
        file = place.resolve() if place.is_symlink() else place
        yield FileToSend(file, place.name, place.stat().st_size)
        return
    if not place.is_dir():
        problem = describe_special(place) or "no such file or folder"
        raise UsageError(f"{place}: {problem}; check the path")
    root = place.resolve()
    for path in sorted(path for path in root.rglob("*") if not _is_hidden(path, root)):
        name, reason = path.relative_to(root.parent).as_posix(), describe_special(path)
        if not reason and path.is_symlink():
            # A link to a file of the folder needs no word: the file is sent by its own name.
            target = Path(os.path.realpath(path))
            if leads_outside(path, root):
                reason = "a link out of the folder"
            elif _is_hidden(target, root):
                reason = "a link to a hidden file"
            elif not target.is_file():
                reason = "a link to a folder, or to nothing"
        if reason:
            leave_out(LeftOut(name, reason))
        elif path.is_file() and not path.is_symlink():
            yield FileToSend(path, name, path.stat().st_size)


def _is_hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


# Several recordings in one folder.

_RANK_IN_NAME = re.compile(r"rank[-_. ]?[0-9]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RecordingPlaces:
    """One of several recordings: its folder, and what to upload for it."""

    folder: str
    places: tuple[Path, ...]


def split_recordings(files: Sequence[FileToSend]) -> tuple[RecordingPlaces, ...]:
    """The recordings of the files; () if they are one.

    Folders that have traces of the same ranks, with the same names, are several recordings, unless
    they are the roles of one job. Each of them has the files outside of these folders too, such as
    a job.toml.
    """
    by_name: dict[str, set[str]] = {}
    for one in files:
        folder, _, name = one.path.rpartition("/")
        if _RANK_IN_NAME.search(name):
            by_name.setdefault(name, set()).add(folder)
    folders = sorted({one for found in by_name.values() if len(found) > 1 for one in found})
    if not folders or _are_roles(files):
        return ()
    top = posixpath.commonpath(folders)
    heads = {posixpath.join(top, _read_next_part(folder, top)) for folder in folders}
    by_head: dict[str, dict[Path, None]] = {head: {} for head in sorted(heads)}
    shared: dict[Path, None] = {}
    for one in files:
        head, place = _find_head(one, top, heads)
        (shared if head is None else by_head[head])[place] = None
    return tuple(
        RecordingPlaces(posixpath.normpath(head), (*places, *shared))
        for head, places in by_head.items()
    )


def _are_roles(files: Sequence[FileToSend]) -> bool:
    """Whether the files of ranks lie in the folders of different roles of one job, by their
    run.json or a rank's record. Memory snapshots and the like lie in a folder of such a folder."""
    folders = {
        posixpath.dirname(one.path)
        for one in files
        if _RANK_IN_NAME.search(posixpath.basename(one.path))
    }
    folders = {
        posixpath.dirname(one) if posixpath.basename(one) in FOLDERS_OF_A_RECORDING else one
        for one in folders
    }
    of_path = {one.path: one for one in files}
    # The first record of each folder.
    records: dict[str, FileToSend] = {}
    for one in files:
        if _RECORD.fullmatch(one.file.name):
            records.setdefault(posixpath.dirname(one.path), one)
    roles: set[tuple[str, str]] = set()
    for folder in folders:
        # Of a process group of several roles only that of rank 0 has a run.json.
        named = of_path.get(posixpath.join(folder, RUN_FILE)) or records.get(folder)
        if named is None or named.size_bytes > _LARGEST_RUN_FILE_BYTES:
            return False
        try:
            text = read_regular(named.file)
            if named.file.name == RUN_FILE:
                spec = from_json(text)
                roles.add((spec.name, spec.role))
            else:
                record = read_record(text)
                roles.add((record.run, record.role))
        except (OSError, ValueError):
            return False
    return (
        len(roles) == len(folders)
        and len({name for name, _ in roles}) == 1
        and all(role for _, role in roles)
    )


_RECORD = re.compile(r"rank[0-9]+_record\.json")

_LARGEST_RUN_FILE_BYTES = 64 << 20
"""Of a run.json that is opened before it is sent; that of 100,000 ranks has 20 MB."""


def _read_next_part(path: str, top: str) -> str:
    """The first part of the path below the folder; "" for the folder itself."""
    return posixpath.relpath(path, top or ".").removeprefix(".").partition("/")[0]


def _find_head(item: FileToSend, top: str, heads: Set[str]) -> tuple[str | None, Path]:
    """The recording of a file and what to upload of it; None if it belongs to all of them."""
    folder = posixpath.dirname(item.path)
    own = posixpath.join(top, "")
    # Beside the folders of the recordings: traces here are one more of them.
    if folder == top:
        is_trace = _RANK_IN_NAME.search(posixpath.basename(item.path)) is not None
        return (own if own in heads and is_trace else None), item.file
    if top and not folder.startswith(own):
        return None, item.file
    head = posixpath.join(top, _read_next_part(folder, top))
    if head not in heads:
        return None, item.file
    return head, item.file.parents[len(item.path.split("/")) - len(head.split("/")) - 1]


# The name of a run without one, by its files.

_NOT_TRACES = (MESH_FILE, RUN_FILE)

_RANK_END = re.compile(r"[\s._-]*(rank|r)?[\s._-]*[0-9]*[\s._-]*$", re.IGNORECASE)


def choose_run_name(paths: Sequence[str]) -> str:
    """The outermost folder of all files, else what the names of the files begin with.

    >>> choose_run_name(["exp1/rank0.json", "exp1/rank1.json", "mesh.txt"])
    'exp1'
    >>> choose_run_name(["exp2_rank0.json", "exp2_rank1.json"])
    'exp2'
    """
    named = [path for path in paths if path not in _NOT_TRACES and not path.endswith(".toml")]
    # What else lies in the folder of a recording, such as notes, names nothing.
    ranks = [path for path in named if _RANK_IN_NAME.search(posixpath.basename(path))]
    traces = ranks or named or list(paths)
    if len(traces) == 1 and "/" not in traces[0]:
        return traces[0]
    folder = posixpath.commonpath([posixpath.dirname(path) for path in traces])
    name = folder.partition("/")[0] or _RANK_END.sub("", posixpath.commonprefix(traces))
    return name or f"{traces[0].partition('/')[0]} and {len(traces) - 1} more"
