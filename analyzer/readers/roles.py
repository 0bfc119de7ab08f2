"""The roles of a recording: programs of one job, such as rollouts and a trainer, each in a folder
of its own, whose ranks may have the same numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.file_kinds import FileKind, FileRole
from stepsplit.analyzer.readers.recording_files import RecordingFiles
from stepsplit.analyzer.readers.sources import Source


def split_by_role(files: RecordingFiles) -> dict[str, RecordingFiles]:
    """The files of each role, by name; empty if there are not two roles.

    The recorder names the role in run.json and in the records of the ranks, and the files of a role
    are those in the folder of one of these, or below it. Files elsewhere are of no role.
    """
    named = _read_role_folders(files)
    if len(set(named.values())) < 2:
        return {}
    of_role: dict[str, dict[FileKind[Any], list[Source]]] = defaultdict(lambda: defaultdict(list))
    for kind, sources in files.by_kind.items():
        for source in sources:
            role = next((named[one] for one in source.inner.parents if one in named), None)
            if role is not None:
                of_role[role][kind].append(source)
    return {
        role: RecordingFiles(
            tuple(str(folder) for folder, own in sorted(named.items()) if own == role),
            {kind: by_kind[kind] for kind in files.by_kind if kind in by_kind},
            (), (), (),
        )
        for role, by_kind in sorted(of_role.items())
    }  # fmt: skip


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
