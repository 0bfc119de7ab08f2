"""The job.toml of a run: found among its files, checked, and changed by key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsplit.analyzer.errors import DataError
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
from stepsplit.analyzer.model.config_file import check_job_keys, decode_job, list_referenced_files
from stepsplit.analyzer.model.hardware_config import HARDWARE_KEYS
from stepsplit.analyzer.model.layout_table import PARALLEL_KEYS, build_layout
from stepsplit.analyzer.model.model_table import MODEL_KEYS
from stepsplit.analyzer.model.training_table import TRAINING_KEYS
from stepsplit.analyzer.report.report import WarningRow

JOB_FILE = "job.toml"
"""The job config of a run: among its uploads the user's, among its results the one it is of."""

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


def check_job_ranks(text: bytes, ranks: int) -> None:
    """Raises DataError if the job is of other ranks than the recording.

    What it leaves out is inferred from the recording, so that fewer ranks may be enough. A trace
    of one rank may be of a job of any size.
    """
    table = parse_table(JOB_FILE, text).get_subtable("parallel")
    is_whole = {"dp", "dp_replicate", "dp_shard", "world_size", "gpus"} & table.values.keys()
    size = build_layout(table, None).world_size
    if ranks > 1 and (size != ranks if is_whole else ranks % size):
        problem = f"parallel.tp: the layout has {size} ranks but the recording has {ranks}"
        raise DataError(JOB_FILE, problem, "fix [parallel]")


def check_needed_keys(text: bytes, known: bytes) -> None:
    """Raises DataError if the job lacks a key that the model needs and the known job, which was
    completed from the recording, lacks too."""
    table, before = parse_table(JOB_FILE, text), parse_table(JOB_FILE, known)
    for name in NAMES:
        own, earlier = (one.get_subtable(name).values for one in (table, before))
        missing = [k for k in list_missing_keys(name, own) if k in list_missing_keys(name, earlier)]
        if missing:
            problem = f"{name}.{missing[0]}: the model needs it, and the recording does not show it"
            raise DataError(JOB_FILE, problem, "fill it in")


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
        for key, value in ((str(key), value) for key, value in keys.items()):
            if key not in known:
                near = join_choices(find_nearest_words(key[:40], known))
                raise DataError(JOB_FILE, f"{name}.{key[:40]}: unknown key", f"write {near}")
            entries = value if isinstance(value, list) else [value]
            if not all(one is None or isinstance(one, str | int | float) for one in entries):
                raise DataError(JOB_FILE, f"{name}.{key}: a table", "send the job.toml as text")
            changes.append(JobChange(str(name), key, value))
    return tuple(changes)


def merge_job(text: bytes, changes: Sequence[JobChange]) -> bytes:
    """The job.toml with the changes. Other keys stay, and lines and comments as far as possible.

    A new value removes the other keys for the same quantity, as global_batch for microbatches, and
    a model preset the sizes of a model without one. Raises DataError if the text is not TOML, or
    too large.
    """
    table = parse_table(JOB_FILE, text)
    _check_size(table.values)
    # The changes that change something, and the removal of the keys that they replace.
    asked = {(one.table, one.key) for one in changes}
    removed = {
        (one.table, key): None
        for one in changes
        if one.value is not None
        for key in _list_replaced_keys(table, one)
        if (one.table, key) not in asked
    }
    needed = tuple(
        one
        for one in (*changes, *(JobChange(*place, None) for place in removed))
        if table.get_subtable(one.table).values.get(one.key) != one.value
    )
    wanted = _apply_changes(table.values, needed)
    if not needed:
        return text
    # Only an attempt: values over several lines and other forms of TOML are left as they are.
    lines = text.decode().splitlines()
    for one in needed:
        lines = _edit_line(lines, one)
    edited = ("\n".join(lines) + "\n").encode()
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


def _edit_line(lines: list[str], change: JobChange) -> list[str]:
    """The lines with one changed, added or removed for the change."""
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
