"""Artifacts beyond a URL, such as s3://bucket/stepsplit, with copies here of what is in use."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.readers.sources import fsspec
from stepsplit.analyzer.report.io import REPORT_NAME, TABLES_NAME
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.tables import Tables
from stepsplit.collectors.run_spec import replace_whole
from stepsplit.dashboard.store.artifacts import INPUT_NAME, make_folder, save_synced


@dataclass(frozen=True, slots=True)
class RemoteArtifacts:
    """Files under one URL. Results never change once they are there, so copies stay true."""

    url: str
    local: Path
    _files: Any
    _root: str

    def folder(self, run_id: str) -> Path:
        return self.local / run_id

    def keep_upload(self, run_id: str, path: str) -> None:
        self._put(f"{run_id}/{INPUT_NAME}/{path}")

    def uploads(self, run_id: str) -> Path:
        for name in self._names(f"{run_id}/{INPUT_NAME}"):
            self._fetch(name)
        return self.folder(run_id) / INPUT_NAME

    def analyzed(self, run_id: str) -> None:
        shutil.rmtree(self.folder(run_id) / INPUT_NAME, ignore_errors=True)

    def save(self, run_id: str, report: Report, tables: Tables) -> None:
        folder = self.folder(run_id)
        save_synced(folder, report, tables)
        for path in (folder / TABLES_NAME).rglob("*"):
            if path.is_file():
                self._put(f"{run_id}/{path.relative_to(folder)}")
        # The report last: where it is, the rest is.
        self._put(f"{run_id}/{REPORT_NAME}")

    def results(self, run_id: str) -> Path:
        folder = self.folder(run_id)
        if not (folder / REPORT_NAME).exists():
            for name in self._names(f"{run_id}/{TABLES_NAME}"):
                self._fetch(name)
            with suppress(FileNotFoundError):
                self._fetch(f"{run_id}/{REPORT_NAME}")
        return folder

    def remove(self, run_id: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{run_id}", recursive=True)
        shutil.rmtree(self.folder(run_id), ignore_errors=True)

    def _names(self, below: str) -> list[str]:
        """The files below, by their paths under the URL."""
        prefix = f"{self._root}/"
        with suppress(FileNotFoundError):
            found = self._files.find(f"{prefix}{below}")
            return [name.removeprefix(prefix) for name in found]
        return []

    def _put(self, name: str) -> None:
        target = f"{self._root}/{name}"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(self.local / name), target)

    def _fetch(self, name: str) -> None:
        target = self.local / name
        if target.exists():
            return
        with replace_whole(target) as draft:
            self._files.get_file(f"{self._root}/{name}", str(draft))


def open_remote(url: str, local: Path) -> RemoteArtifacts:
    """The artifacts at the URL. Raises UsageError where its protocol cannot be spoken here."""
    try:
        files, root = fsspec().core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url}: {error}; name another --artifacts") from None
    make_folder(local)
    return RemoteArtifacts(url, local, files, root.rstrip("/"))
