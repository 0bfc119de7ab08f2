"""Files of runs (uploads, report.json, tables/, job.toml) in a local folder or remote storage."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stepsplit.analyzer.errors import StepsplitError, UsageError, write
from stepsplit.analyzer.readers.sources import open_url
from stepsplit.analyzer.report.io import REPORT_NAME, TABLES_NAME, save
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, make_owner_folder, replace_whole
from stepsplit.collectors.safe_io.regular_file import read_regular
from stepsplit.dashboard.store.ids import find_below, locate_run

INPUT_NAME = "input"


class Artifacts(Protocol):
    """Storage of the files of runs; every run also has a folder on this machine."""

    @property
    def url(self) -> str:
        """The URL with which another process opens the same artifacts."""

    @property
    def folder(self) -> Path:
        """The folder on this machine with the folders of all runs."""

    def find_folder(self, run_id: str) -> Path:
        """The run's local folder; uploads are written to its input/. Raises UsageError for what is
        not the id of a run, as every method does, and for a symbolic link."""

    def keep_upload(self, run_id: str, path: str, received: Path) -> None:
        """Stores a completely received file, and moves it to its path below input/."""

    def fetch_uploads(self, run_id: str) -> Path:
        """The local folder with all uploads of the run; downloads them if missing."""

    def drop_uploads(self, run_id: str) -> None:
        """Drops the local copy of the uploads after the analysis."""

    def save(self, run_id: str, report: Report, tables: Tables) -> None:
        """Stores the results durably. Raises UsageError."""

    def fetch_results(self, run_id: str) -> Path:
        """The local folder with report.json and tables/; downloads them if missing. Empty if there
        are no results."""

    def save_file(self, run_id: str, name: str, text: bytes) -> None:
        """Stores a file of the run, such as its job.toml, or replaces it. Raises UsageError."""

    def read_file(self, run_id: str, path: str) -> bytes | None:
        """The content of one file of the run, such as job.toml; None if there is none."""

    def remove(self, run_id: str) -> None:
        """Removes all files of the run."""


@dataclass(frozen=True, slots=True)
class FolderArtifacts:
    """One folder per run, on this machine or on a shared file system."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def folder(self) -> Path:
        return self.root

    def find_folder(self, run_id: str) -> Path:
        return find_run_folder(self.root, run_id)

    def keep_upload(self, run_id: str, path: str, received: Path) -> None:
        target = find_below(self.find_folder(run_id), f"{INPUT_NAME}/{path}")
        move_file(received, target)
        # The names of new folders are only durable once the folders above are on the disk.
        for folder in (target.parent, *target.parent.parents):
            sync(folder)
            if folder == self.root:
                break

    def fetch_uploads(self, run_id: str) -> Path:
        return find_plain_tree(self.find_folder(run_id), INPUT_NAME)

    def drop_uploads(self, run_id: str) -> None:
        pass

    def save(self, run_id: str, report: Report, tables: Tables) -> None:
        save_synced(self.find_folder(run_id), report, tables)

    def fetch_results(self, run_id: str) -> Path:
        return find_results(self.find_folder(run_id))

    def save_file(self, run_id: str, name: str, text: bytes) -> None:
        write(find_below(self.find_folder(run_id), name), text, PRIVATE)

    def read_file(self, run_id: str, path: str) -> bytes | None:
        return _read_if_exists(find_below(self.find_folder(run_id), path))

    def remove(self, run_id: str) -> None:
        remove_folder(self.root, run_id)


def open_artifacts(where: str | Path, local: Path) -> Artifacts:
    """Opens artifacts in a folder or at any fsspec URL; `local` caches remote files.

    Raises UsageError.
    """
    named = str(where)
    if "://" in named and not named.startswith("file://"):
        return open_remote(named, local)
    root = Path(named.removeprefix("file://"))
    make_folder(root)
    return FolderArtifacts(root)


def make_folder(folder: Path) -> None:
    """Creates the folder if missing, for this user only. Raises UsageError."""
    try:
        make_owner_folder(folder)
    except OSError as error:
        where = f"{folder}: {error.strerror}"
        raise UsageError(f"{where}; choose another --artifacts") from None


def find_run_folder(root: Path, run_id: str) -> Path:
    """The folder of a run, a direct child of the root, or of one of its roles. Raises UsageError
    for an invalid id and a symbolic link."""
    return find_below(root, locate_run(run_id))


def remove_folder(root: Path, run_id: str) -> None:
    """Removes the folder of a run, if there is one. Raises UsageError as find_run_folder."""
    shutil.rmtree(find_run_folder(root, run_id), ignore_errors=True)


def find_plain_tree(folder: Path, name: str) -> Path:
    """The subfolder, in which nothing is a symbolic link. Raises UsageError if there is one."""
    place = find_below(folder, name)
    for path in place.rglob("*"):
        if path.is_symlink():
            raise UsageError(f"{path}: a symbolic link among the files of runs; remove it")
    return place


def find_results(folder: Path) -> Path:
    """The folder of a run, whose report and tables are no symbolic links. Raises UsageError."""
    find_below(folder, REPORT_NAME)
    find_plain_tree(folder, TABLES_NAME)
    return folder


def save_synced(folder: Path, report: Report, tables: Tables) -> None:
    """Writes report.json and tables/ into the folder, for this user only, and syncs them to disk.
    Raises UsageError."""
    make_folder(find_results(folder) / TABLES_NAME)
    save(folder, report, tables)
    for path in (folder / TABLES_NAME).rglob("*"):
        path.chmod(PRIVATE)
        sync(path)
    (folder / REPORT_NAME).chmod(PRIVATE)
    sync(folder / TABLES_NAME)
    sync(folder)


def _read_if_exists(path: Path) -> bytes | None:
    with suppress(FileNotFoundError):
        return read_regular(path)
    return None


def move_file(file: Path, target: Path) -> None:
    """Moves the file to the target, creating its folder; replaces an existing file at once."""
    make_owner_folder(target.parent)
    file.replace(target)


def sync(path: Path) -> None:
    """Flushes the file or folder to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# Remote artifacts, such as s3://bucket/stepsplit, with a local cache.


@dataclass(frozen=True, slots=True)
class RemoteArtifacts:
    """Files under one URL. Another analysis replaces the results: a local copy of others is dropped
    when it is read."""

    url: str
    local: Path
    _files: Any
    _root: str

    @property
    def folder(self) -> Path:
        return self.local

    def find_folder(self, run_id: str) -> Path:
        return find_run_folder(self.local, run_id)

    def keep_upload(self, run_id: str, path: str, received: Path) -> None:
        target = find_below(self.find_folder(run_id), f"{INPUT_NAME}/{path}")
        # First to the storage: a file that is below input/ counts as stored.
        self._put(received, run_id, f"{INPUT_NAME}/{path}")
        move_file(received, target)

    def fetch_uploads(self, run_id: str) -> Path:
        folder = find_plain_tree(self.find_folder(run_id), INPUT_NAME)
        for name in self._list_files(run_id, INPUT_NAME):
            self._fetch(name)
        return folder

    def drop_uploads(self, run_id: str) -> None:
        shutil.rmtree(find_below(self.find_folder(run_id), INPUT_NAME), ignore_errors=True)

    def save(self, run_id: str, report: Report, tables: Tables) -> None:
        folder = self.find_folder(run_id)
        save_synced(folder, report, tables)
        for path in (folder / TABLES_NAME).rglob("*"):
            if path.is_file():
                self._put(path, run_id, str(path.relative_to(folder)))
        # The report last: if it exists, the results are complete.
        self._put(folder / REPORT_NAME, run_id, REPORT_NAME)

    def fetch_results(self, run_id: str) -> Path:
        folder = find_results(self.find_folder(run_id))
        self._drop_outdated_results(run_id)
        if not (folder / REPORT_NAME).exists():
            for name in self._list_files(run_id, TABLES_NAME):
                self._fetch(name)
            with suppress(FileNotFoundError):
                self._fetch(f"{locate_run(run_id)}/{REPORT_NAME}")
        return folder

    def save_file(self, run_id: str, name: str, text: bytes) -> None:
        path = find_below(self.find_folder(run_id), name)
        write(path, text, PRIVATE)
        self._put(path, run_id, name)

    def read_file(self, run_id: str, path: str) -> bytes | None:
        copy = find_below(self.find_folder(run_id), path)
        try:
            content: bytes = self._files.cat_file(self._locate(run_id, path))
            return content
        except FileNotFoundError:
            return None
        except OSError:
            # Without a connection the copy is all there is.
            return _read_if_exists(copy)

    def _drop_outdated_results(self, run_id: str) -> None:
        report = self.find_folder(run_id) / REPORT_NAME
        if not report.exists():
            return
        # Without a connection the copy is all there is.
        with suppress(OSError):
            newest = self._files.cat_file(self._locate(run_id, REPORT_NAME))
            if report.read_bytes() != newest:
                shutil.rmtree(report.parent / TABLES_NAME, ignore_errors=True)
                report.unlink()

    def remove(self, run_id: str) -> None:
        self.find_folder(run_id)
        with suppress(FileNotFoundError):
            self._files.rm(self._locate(run_id), recursive=True)
        remove_folder(self.local, run_id)

    def _list_files(self, run_id: str, folder: str) -> list[str]:
        """Paths under the URL of all files in the folder of the run."""
        self.find_folder(run_id)
        prefix = f"{self._root}/"
        with suppress(FileNotFoundError):
            paths = self._files.find(self._locate(run_id, folder))
            return [name.removeprefix(prefix) for name in paths]
        return []

    def _locate(self, run_id: str, path: str = "") -> str:
        """The URL of a file of the run, or of its folder."""
        return f"{self._root}/{locate_run(run_id)}/{path}".rstrip("/")

    def _put(self, file: Path, run_id: str, path: str) -> None:
        target = self._locate(run_id, path)
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), target)

    def _fetch(self, name: str) -> None:
        target = find_below(self.local, name)
        if target.exists():
            return
        with replace_whole(target) as draft:
            self._files.get_file(f"{self._root}/{name}", str(draft))


def open_remote(url: str, local: Path) -> RemoteArtifacts:
    """Opens the artifacts at the URL. Raises UsageError if its protocol is not supported."""
    try:
        files, root = open_url(url)
    except StepsplitError as error:
        raise UsageError(f"{error}; choose another --artifacts") from None
    make_folder(local)
    return RemoteArtifacts(url, local, files, root.rstrip("/"))
