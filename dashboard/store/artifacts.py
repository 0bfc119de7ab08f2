"""Files of runs (uploads, report.json, tables/, job.toml) in a local folder or remote storage."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stepsplit.analyzer.errors import DataError, StepsplitError, UsageError, write
from stepsplit.analyzer.gap.config_from_trace import NAMES, REPLACED_KEYS, list_missing_keys
from stepsplit.analyzer.model.config_decode import (
    TomlTable,
    find_nearest_words,
    format_toml,
    format_toml_lines,
    join_choices,
    parse_table,
    read_table,
)
from stepsplit.analyzer.model.config_file import (
    MODEL_KEYS,
    PARALLEL_KEYS,
    TRAINING_KEYS,
    check_job_keys,
    decode_job,
)
from stepsplit.analyzer.model.hardware_config import HARDWARE_KEYS, list_referenced_files
from stepsplit.analyzer.readers.sources import open_url
from stepsplit.analyzer.report.io import REPORT_NAME, TABLES_NAME, save
from stepsplit.analyzer.report.report import Report, WarningRow
from stepsplit.analyzer.report.tables import Tables
from stepsplit.collectors.safe_io.atomic_file import PRIVATE, make_owner_folder, replace_whole
from stepsplit.collectors.safe_io.regular_file import read_regular
from stepsplit.dashboard.store.ids import find_below, is_run_id

INPUT_NAME = "input"

JOB_FILE = "job.toml"
"""The job config of a run: among its uploads the user's, among its results the one it is of."""


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

    def save_job(self, run_id: str, text: bytes) -> None:
        """Stores the job.toml of the run, or replaces it. Raises UsageError."""

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

    def save_job(self, run_id: str, text: bytes) -> None:
        write(find_below(self.find_folder(run_id), JOB_FILE), text, PRIVATE)

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
    """The folder of a run, a direct child of the root. Raises UsageError for an invalid id and a
    symbolic link."""
    if not is_run_id(run_id):
        raise UsageError(f"invalid run id {run_id!r:.100}; use an id from the list of runs")
    return find_below(root, run_id)


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
        self._put(received, f"{run_id}/{INPUT_NAME}/{path}")
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
                self._put(path, f"{run_id}/{path.relative_to(folder)}")
        # The report last: if it exists, the results are complete.
        self._put(folder / REPORT_NAME, f"{run_id}/{REPORT_NAME}")

    def fetch_results(self, run_id: str) -> Path:
        folder = find_results(self.find_folder(run_id))
        self._drop_outdated_results(run_id)
        if not (folder / REPORT_NAME).exists():
            for name in self._list_files(run_id, TABLES_NAME):
                self._fetch(name)
            with suppress(FileNotFoundError):
                self._fetch(f"{run_id}/{REPORT_NAME}")
        return folder

    def save_job(self, run_id: str, text: bytes) -> None:
        path = find_below(self.find_folder(run_id), JOB_FILE)
        write(path, text, PRIVATE)
        self._put(path, f"{run_id}/{JOB_FILE}")

    def read_file(self, run_id: str, path: str) -> bytes | None:
        copy = find_below(self.find_folder(run_id), path)
        try:
            content: bytes = self._files.cat_file(f"{self._root}/{run_id}/{path}")
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
            newest = self._files.cat_file(f"{self._root}/{run_id}/{REPORT_NAME}")
            if report.read_bytes() != newest:
                shutil.rmtree(report.parent / TABLES_NAME, ignore_errors=True)
                report.unlink()

    def remove(self, run_id: str) -> None:
        self.find_folder(run_id)
        with suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{run_id}", recursive=True)
        remove_folder(self.local, run_id)

    def _list_files(self, run_id: str, folder: str) -> list[str]:
        """Paths under the URL of all files in the folder of the run."""
        self.find_folder(run_id)
        prefix = f"{self._root}/"
        with suppress(FileNotFoundError):
            paths = self._files.find(f"{prefix}{run_id}/{folder}")
            return [name.removeprefix(prefix) for name in paths]
        return []

    def _put(self, file: Path, name: str) -> None:
        target = f"{self._root}/{name}"
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


# The job.toml of an upload; every other .toml file gives a warning.

_NAMES = (JOB_FILE, "run.toml")
"""Names of a job config, in any case; the second one is used by older recordings."""

_JOB_TABLES = ("model", "parallel", "training")


def find_job_file(folder: Path) -> Path | None:
    """The job config of the upload: a job.toml (else run.toml) in any case, else a TOML file with
    the tables of one; the nearest to the top of the folder. None without any."""
    files = _list_toml_files(folder)
    found = [path for path in files if _rank_name(path) < len(_NAMES)]
    found = found or [path for path in files if _has_job_tables(path)]
    return min(found, key=_order, default=None)


def choose_job_path(paths: Sequence[str]) -> str | None:
    """As find_job_file for the paths of an upload, but by name alone."""
    named = [Path(path) for path in paths if _rank_name(Path(path)) < len(_NAMES)]
    return str(min(named, key=_order)) if named else None


def list_unused_files(folder: Path, job_file: Path | None) -> tuple[WarningRow, ...]:
    """A warning for each TOML file of the upload that the analysis does not use."""
    used: set[Path] = set()
    reason = "it has none of the tables " + ", ".join(f"[{name}]" for name in _JOB_TABLES)
    if job_file is not None:
        used = {job_file.resolve(), *_find_named_files(job_file).values()}
        reason = f"{job_file.relative_to(folder)} describes the job"
    return tuple(
        WarningRow("unused_toml", f"{path.relative_to(folder)} is not used: {reason}")
        for path in _list_toml_files(folder)
        if path.resolve() not in used
    )


def check_named_files(job_file: Path, folder: Path) -> None:
    """Raises DataError if the job file refers to files outside of the upload."""
    root = folder.resolve()
    for name, file in _find_named_files(job_file).items():
        if not file.is_relative_to(root):
            problem = f"refers to {name}, which is not in the upload"
            raise DataError(job_file, problem, "upload that file too, and use a relative path")


def _list_toml_files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() == ".toml" and path.is_file()
    )


def _rank_name(path: Path) -> int:
    name = path.name.lower()
    return _NAMES.index(name) if name in _NAMES else len(_NAMES)


def _order(path: Path) -> tuple[int, int, bool, Path]:
    return _rank_name(path), len(path.parts), path.name != path.name.lower(), path


def _has_job_tables(path: Path) -> bool:
    try:
        return _has_tables(read_table(path), _JOB_TABLES)
    except DataError:
        return False


def _has_tables(table: TomlTable, names: tuple[str, ...]) -> bool:
    return any(isinstance(table.values.get(name), dict) for name in names)


def _find_named_files(job_file: Path) -> dict[str, Path]:
    """The files that the job file refers to, by the name it gives them."""
    names = list_referenced_files(read_table(job_file))
    return {name: (job_file.parent / name).resolve() for name in names}


# The check of a job.toml that is attached to a run.

JOB_BYTES = 1 << 16
"""Largest job.toml that can be attached."""

_MOST_KEYS, _MOST_CHARACTERS, _DEEPEST = 200, 1_000, 16


def check_job_text(text: bytes) -> None:
    """Raises DataError unless the text is a job.toml, which may be incomplete, with valid keys and
    values, and names no files. If it is complete, the job must also violate no constraint."""
    table = parse_table(JOB_FILE, text)
    if not _has_tables(table, NAMES):
        needed = ", ".join(f"[{name}]" for name in NAMES)
        raise DataError(JOB_FILE, f"has none of the tables {needed}", "see docs/gap.md")
    _check_size(table.values)
    check_job_keys(table)
    if list_referenced_files(table):
        hint = "upload the recording with both files"
        raise DataError(JOB_FILE, "refers to another file", hint)
    if not any(list_missing_keys(name, table.get_subtable(name).values) for name in NAMES):
        decode_job(table)


def _check_size(values: Mapping[str, object]) -> None:
    """Refuses what no job has: many keys, long texts, or tables in tables in tables."""
    texts = list(_list_texts(values))
    if len(texts) > _MOST_KEYS:
        raise DataError(JOB_FILE, f"has more than {_MOST_KEYS} keys and texts", "see docs/gap.md")
    if any(len(text) > _MOST_CHARACTERS for text in texts):
        problem = f"has a key or text of more than {_MOST_CHARACTERS} characters"
        raise DataError(JOB_FILE, problem, "see docs/gap.md")


def _list_texts(value: object, depth: int = 0) -> Iterator[str]:
    """All keys, and all values that are texts."""
    if depth > _DEEPEST:
        raise DataError(JOB_FILE, f"is nested more than {_DEEPEST} deep", "see docs/gap.md")
    match value:
        case Mapping():
            for key, own in value.items():
                yield str(key)
                yield from _list_texts(own, depth + 1)
        case list():
            for own in value:
                yield from _list_texts(own, depth + 1)
        case str():
            yield value


# Changes of a job.toml by key, such as those of a form.


@dataclass(frozen=True, slots=True)
class JobChange:
    """A new value of a key in a table of a job.toml; None removes the key."""

    table: str
    key: str
    value: object


_KEYS = {
    "model": (*MODEL_KEYS, "preset"),
    "parallel": PARALLEL_KEYS,
    "training": TRAINING_KEYS,
    "hardware": (*HARDWARE_KEYS, "preset"),
}


def parse_job_changes(tables: Mapping[object, object]) -> tuple[JobChange, ...]:
    """The changes of a JSON object of tables, such as {"parallel": {"tp": 2}}. Raises DataError for
    tables and keys that a job.toml cannot have; the values are checked in the merged file."""
    changes: list[JobChange] = []
    for name, keys in tables.items():
        known = _KEYS.get(str(name), ())
        if not known:
            hint = f"send {join_choices(NAMES)}"
            raise DataError(JOB_FILE, f"{str(name)[:40]!r} is not a table of a job.toml", hint)
        if not isinstance(keys, Mapping):
            hint = f'send its keys: {{"{name}": {{"{known[0]}": ...}}}}'
            raise DataError(JOB_FILE, f"{name} is not a table", hint)
        for key, value in keys.items():
            changes.append(_parse_job_change(str(name), str(key), value))
    return tuple(changes)


def _parse_job_change(table: str, key: str, value: object) -> JobChange:
    if key not in _KEYS[table]:
        near = join_choices(find_nearest_words(key[:40], _KEYS[table]))
        raise DataError(JOB_FILE, f"{table}.{key[:40]}: unknown key", f"write {near}")
    entries = value if isinstance(value, list) else [value]
    if not all(one is None or isinstance(one, str | int | float) for one in entries):
        raise DataError(JOB_FILE, f"{table}.{key}: a table", "send the job.toml as text")
    return JobChange(table, key, value)


def merge_job(text: bytes, changes: Sequence[JobChange]) -> bytes:
    """The job.toml with the changes. Other keys stay, and lines and comments as far as possible.

    A new value removes the other keys for the same quantity, as global_batch for microbatches, and
    a model preset the sizes of a model without one. Raises DataError if the text is not TOML, or
    too large.
    """
    table = parse_table(JOB_FILE, text)
    _check_size(table.values)
    needed = _complete_changes(table, changes)
    wanted = _apply_changes(table.values, needed)
    if not needed:
        return text
    edited = _edit_lines(text.decode(), needed).encode()
    try:
        is_same = parse_table(JOB_FILE, edited).values == wanted
    except DataError:
        is_same = False
    return edited if is_same else format_toml(wanted).encode()


def complete_job(text: bytes, completed: bytes) -> bytes:
    """The job.toml with its lines and comments, and the keys that only the completed one has.

    Raises DataError if one of them is not TOML.
    """
    own, wanted = parse_table(JOB_FILE, text), parse_table(JOB_FILE, completed)
    added = [
        JobChange(name, key, value)
        for name in wanted.values
        for key, value in wanted.get_subtable(name).values.items()
        if key not in own.get_subtable(name).values
    ]
    return merge_job(text, added)


def _complete_changes(table: TomlTable, changes: Sequence[JobChange]) -> tuple[JobChange, ...]:
    """The changes that change something, and the removal of the keys that they replace."""
    asked = {(one.table, one.key) for one in changes}
    removed = {
        (one.table, key): None
        for one in changes
        if one.value is not None
        for key in _list_replaced_keys(table, one)
        if (one.table, key) not in asked
    }
    return tuple(
        one
        for one in (*changes, *(JobChange(*place, None) for place in removed))
        if table.get_subtable(one.table).values.get(one.key) != one.value
    )


def _list_replaced_keys(table: TomlTable, change: JobChange) -> tuple[str, ...]:
    own = table.get_subtable(change.table).values
    if (change.table, change.key) == ("model", "preset") and "preset" not in own:
        return tuple(own)
    return REPLACED_KEYS.get(change.key, ())


def _apply_changes(
    values: Mapping[str, object], changes: Sequence[JobChange]
) -> Mapping[str, object]:
    """The tables with the changes; one without a key is left out only if it was missing before."""
    tables = {name: dict(own) if isinstance(own, dict) else own for name, own in values.items()}
    for one in changes:
        own = tables.get(one.table)
        if not isinstance(own, dict):
            own = tables[one.table] = {}
        if one.value is None:
            own.pop(one.key, None)
        else:
            own[one.key] = one.value
    return {name: own for name, own in tables.items() if own != {} or name in values}


def _edit_lines(text: str, changes: Sequence[JobChange]) -> str:
    """The text with a line changed, added or removed for each change. Only an attempt: values over
    several lines and other forms of TOML are left as they are."""
    lines = text.splitlines()
    for one in changes:
        lines = _edit_line(lines, one)
    return "\n".join(lines) + "\n"


def _edit_line(lines: list[str], change: JobChange) -> list[str]:
    header = f"[{change.table}]"
    titled = re.compile(rf"\s*{re.escape(header)}\s*(#.*)?")
    start = next((n for n, line in enumerate(lines) if titled.fullmatch(line)), None)
    added = [] if change.value is None else format_toml_lines({change.key: change.value})
    if start is None:
        return [*lines, *([""] if lines else []), header, *added] if added else lines
    rest = range(start + 1, len(lines))
    end = next((n for n in rest if lines[n].lstrip().startswith("[")), len(lines))
    # A draft names keys that were not inferred in comments.
    written = re.compile(rf"\s*(#\s*)?{re.escape(change.key)}\s*=")
    at = next((n for n in range(start + 1, end) if written.match(lines[n])), None)
    if at is not None:
        return [*lines[:at], *added, *lines[at + 1 :]]
    while end > start + 1 and not lines[end - 1].strip():
        end -= 1
    return [*lines[:end], *added, *lines[end:]]
