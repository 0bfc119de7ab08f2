"""The folder of a recording at a URL, such as s3://bucket/runs/exp1.

What was recorded on the disk is copied there by fsspec.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.formats.file_names import is_recorded_name
from stepsplit.collectors.formats.run_spec import RUN_FILE
from stepsplit.collectors.guard import CollectError, warn
from stepsplit.collectors.job.launcher import Identity
from stepsplit.collectors.record.command import OVERWRITTEN_FOLDERS, REPORT_FILE
from stepsplit.collectors.record.gather import list_files


def is_url(place: str) -> bool:
    """Whether an --out is a URL for fsspec."""
    return "://" in place


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder at a URL; shown: the URL without the name and password that it may have."""

    shown: str
    name: str
    _files: Any
    _path: str

    def check(self, overwrite: bool) -> None:
        """Removes an earlier recording from the folder, or raises CollectError if it may not, as
        `check_out`. A server that does not answer is a warning: it may by the end of the job."""
        try:
            names = self._list_names()
            recorded = [name for name in names if is_recorded_name(name)]
            if recorded and overwrite:
                for name in names:
                    if name in (*recorded, REPORT_FILE, *OVERWRITTEN_FOLDERS):
                        self._files.rm(f"{self._path}/{name}", recursive=True)
        except Exception as error:  # noqa: BLE001  each backend has errors of its own
            warn(f"{self.shown}: {_describe(error)}; it is tried again at the end")
            return
        if recorded and not overwrite:
            raise CollectError(
                f"{self.shown} has a recording: choose another --out, or replace it with"
                " --overwrite"
            )

    def copy(self, folder: Path, identity: Identity | None) -> bool:
        """Copies the recording, and returns whether that succeeded; a failure is a warning.

        identity: the rank whose own files are copied alone, where each rank runs `record`.
        """
        files = [path for path in list_files(folder) if _is_of(path, identity)]
        try:
            # run.json last: where it is, the recording is whole.
            for path in sorted(files, key=lambda path: path.name == RUN_FILE):
                target = f"{self._path}/{path.relative_to(folder).as_posix()}"
                if target.startswith("/"):
                    # Of object storage, s3fs would make the bucket of a misspelt URL.
                    self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(path), target)
        except Exception as error:  # noqa: BLE001
            warn(f"{self.shown}: not copied ({_describe(error)}); the recording is in {folder}")
            return False
        return True

    def _list_names(self) -> list[str]:
        try:
            # What was listed before may be kept, by s3fs for one.
            self._files.invalidate_cache()
            paths = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]


def open_remote_folder(url: str) -> RemoteFolder:
    """The folder at the URL, before it is known whether the server answers.

    Raises CollectError if no installed package writes there.
    """
    try:
        import fsspec.core  # the extra [cloud]
    except ImportError:
        raise CollectError(f"a URL needs fsspec; pip install 'stepsplit[cloud]': {url}") from None
    protocol, _, place = url.partition("://")
    host, slash, path = place.partition("/")
    shown = f"{protocol}://{host.rpartition('@')[2]}{slash}{path}"
    try:
        files, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # noqa: BLE001  of a package that is missing, or has no credentials
        raise CollectError(f"{shown}: {_describe(error)}") from None
    path = path.rstrip("/")
    if not path:
        raise CollectError(f"{shown}: name a folder")
    return RemoteFolder(shown, path.rpartition("/")[2], files, path)


def _is_of(path: Path, identity: Identity | None) -> bool:
    """Whether the file is for this rank to copy: its own; run.json for rank 0; the logs of a host
    for its first rank."""
    if identity is None:
        return True
    if path.name == RUN_FILE:
        return identity.rank == 0
    if is_recorded_name(path.name):
        return path.name.startswith(f"rank{identity.rank}_")
    return identity.local_rank == 0


def _describe(error: Exception) -> str:
    problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(problem).split())
