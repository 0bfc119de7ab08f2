"""The roles of a recording: programs of one job, such as rollouts and a trainer, each in a folder
of its own, whose ranks may have the same numbers."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.file_kinds import FileKind, FileRole
from stepsplit.analyzer.readers.rank_traces import parse_rank
from stepsplit.analyzer.readers.recording_files import RecordingFiles
from stepsplit.analyzer.readers.sources import Source
from stepsplit.collectors.formats.rank_record import read_record
from stepsplit.collectors.formats.run_spec import RUN_FILE, from_json
from stepsplit.collectors.safe_io.regular_file import read_regular


class RoleFiles(Struct, frozen=True):
    """The files of each role, by name; strays are the traces that are of none."""

    by_role: Mapping[str, RecordingFiles]
    strays: tuple[str, ...] = ()


def split_by_role(files: RecordingFiles) -> RoleFiles:
    """The files of each role; of none if there are not two roles.

    The recorder names the role in run.json and in the records of the ranks, and the files of a role
    are those in the folder of one of these, or below it. Files elsewhere are of no role.
    """
    named = _read_role_folders(files)
    if len(set(named.values())) < 2:
        return RoleFiles({})

    def find_role(source: Source) -> str | None:
        return next((named[one] for one in source.inner.parents if one in named), None)

    of_role: dict[str, dict[FileKind[Any], list[Source]]] = defaultdict(lambda: defaultdict(list))
    strays: list[str] = []
    for kind, sources in files.by_kind.items():
        for source in sources:
            role = find_role(source)
            if role is not None:
                of_role[role][kind].append(source)
            elif kind.role is FileRole.TRACE:
                strays.append(source.where)
    skipped = [*zip(files.skipped, files.notes, strict=True)]
    strays += (source.where for source in files.skipped if find_role(source) is None)
    where = {
        source.inner.parent: source.where.rpartition("/")[0] or "."
        for one in (FileRole.RUN, FileRole.RECORD)
        for _, source in files.list_files(one)
    }
    by_role = {}
    for role, by_kind in sorted(of_role.items()):
        own = [note for source, note in skipped if find_role(source) == role]
        by_role[role] = RecordingFiles(
            tuple(where[folder] for folder, one in sorted(named.items()) if one == role),
            {kind: by_kind[kind] for kind in files.by_kind if kind in by_kind},
            tuple(source for source in files.others if find_role(source) == role),
            (),
            tuple(own),
        )
    return RoleFiles(by_role, tuple(sorted(strays)))


def find_other_roles(place: Path, run: str) -> Mapping[str, Sequence[int]]:
    """The other roles of the run whose folders lie next to that of a role, with the ranks of their
    traces."""
    found: dict[str, Sequence[int]] = {}
    # What cannot be read is no known role.
    with suppress(OSError):
        own = place.resolve()
        owner = own.stat().st_uid
        for folder in sorted(own.parent.iterdir()):
            # The user has not named these folders, and in /tmp some are of other users.
            status = folder.lstat()
            if folder == own or not stat.S_ISDIR(status.st_mode) or status.st_uid != owner:
                continue
            ranks = {parse_rank(PurePosixPath(one)) for one in folder.glob("rank*_trace.json*")}
            for path in (folder / RUN_FILE, *sorted(folder.glob("rank*_record.json"))):
                with suppress(OSError, ValueError):
                    if path.stat().st_size > _LARGEST_BYTES:
                        continue
                    text = read_regular(path)
                    if path.name == RUN_FILE:
                        spec = from_json(text)
                        name, role = spec.name, spec.role
                    else:
                        record = read_record(text)
                        name, role = record.run, record.role
                    if role and name == run:
                        found[role] = sorted(rank for rank in ranks if rank is not None)
                    break
    return found


_LARGEST_BYTES = 64 << 20
"""Of a file that says the role of a folder that was not named; 100,000 ranks take 20 MB."""


def check_one_role(files: RecordingFiles) -> None:
    """Raises DataError if the files are of several roles: their ranks are not those of one job."""
    roles = sorted(set(_read_role_folders(files).values()))
    if len(roles) > 1:
        raise DataError(
            files.places[0],
            f"a recording of the roles {', '.join(roles)}",
            "name the folder of one role; stepsplit analyze shows all of them together",
        )


def _read_role_folders(files: RecordingFiles) -> Mapping[PurePosixPath, str]:
    """The folders of the roles; one file of a folder says which role it is of."""
    found: dict[PurePosixPath, str] = {}
    listed: Sequence[tuple[FileKind[Any], Source]] = [
        *files.list_files(FileRole.RUN), *files.list_files(FileRole.RECORD)
    ]  # fmt: skip
    for kind, source in listed:
        folder = source.inner.parent
        if folder not in found:
            # What cannot be read is reported where it is read.
            with suppress(DataError):
                content = kind.read(source)
                found[folder] = "" if content is None else content.role
    return {folder: role for folder, role in found.items() if role}
