"""The tables of a job from one or more files and settings of the command line, later ones first."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsplit.analyzer.errors import DataError, UsageError, read_file
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    find_nearest_words,
    format_toml_keys,
    join_choices,
    parse_table,
)
from stepsplit.analyzer.model.job_files import KINDS
from stepsplit.analyzer.model.job_files.job_file import JobFile, JobFileKind, JobTablesBuilder
from stepsplit.analyzer.model.key_aliases import ALIASES, is_same_value, list_preset_tables
from stepsplit.analyzer.model.key_passes import (
    NormalizedTable,
    check_relations,
    replace_key_aliases,
)
from stepsplit.analyzer.model.profile import load_frameworks

JOB_KIND = "job"
"""The word of --from for a job.toml."""

SETTINGS = "--set"

TRANSFORMERS_UNFUSED = ("norms", "rotary", "activation")
"""What models of transformers run as separate operations: all but attention's softmax."""

_EXCLUSIVE = {
    "training": (("global_batch", "microbatches"),),
    "parallel": (
        ("dp", "dp_shard", "dp_replicate"), ("gpus", "world_size", "nodes"),
        ("pp", "layers_per_stage"), ("chunks", "layers_per_stage"),
    ),
}  # fmt: skip
"""Keys that say the same or depend on each other: one of a later file removes earlier others."""

_REQUIRED = (
    ("model", (), "model=llama-3.1-8b"),
    ("model", ("layers",), "layers=32"),
    ("model", ("hidden",), "hidden=4096"),
    ("model", ("heads",), "heads=32"),
    ("model", ("vocab",), "vocab=128256"),
    ("training", ("seq_len",), "seq_len=8192"),
    ("training", ("micro_batch",), "micro_batch=1"),
    ("training", ("global_batch", "microbatches"), "global_batch=64"),
    ("parallel", ("gpus", "world_size", "nodes", "dp", "dp_shard", "dp_replicate"), "gpus=8"),
    ("hardware", ("preset", "file", "memory_bytes"), "gpu=h100"),
)
"""What a job has to say: a table, keys of which one suffices (none: any), and an example."""


@dataclass(frozen=True, slots=True)
class JobSource:
    """The tables of a job, what of other programs' files was read as what, and the keys that files
    of none of their kinds can state."""

    table: TomlTable
    notes: tuple[str, ...] = ()
    unsaid: frozenset[str] = frozenset()


def read_job_tables(
    paths: Sequence[str | Path],
    kind: str,
    settings: Sequence[str],
    keys: Mapping[str, Collection[str]],
    is_planned: bool = False,
) -> JobSource:
    """Read the files and settings of a job as one table.

    A later file wins over an earlier one, and a setting over all files. keys: those of each table.
    is_planned: whether a search will choose the number of ranks. A single job.toml is returned as
    it is.

    Raises:
        DataError: A file is missing, of no known kind, or damaged; or the files of other programs
            leave out what a prediction needs: all of it is named.
        UsageError: kind is unknown, or a setting is not KEY=VALUE.
    """
    words = (JOB_KIND, *(each.name for each in KINDS))
    if kind and kind not in words:
        raise UsageError(f"--from {kind!r} is unknown; write {join_choices(words)}")
    files = [JobFile(str(path), read_file(path)) for path in paths]
    # None for a job.toml, which a file is that nothing else recognizes.
    kinds: list[JobFileKind | None] = []
    for file in files:
        is_named = bool(kind) and file is files[0]
        fitting = (k for k in KINDS if (k.name == kind if is_named else k.recognize(file)))
        kinds.append(next(fitting, None))
    if len(files) == 1 and kinds[0] is None and not settings:
        return JobSource(place_keys(parse_table(files[0].path, files[0].content), keys))
    merged: dict[str, Any] = {}
    where, notes, typed = files[0].path, list[str](), list[TomlTable]()
    for file, own in zip(files, kinds, strict=True):
        if own is None:
            read = _normalize(place_keys(parse_table(file.path, file.content), keys), keys)
            where = file.path if "hardware" in read.table.values else where
        else:
            read = _read_foreign(file, own, keys)
        _merge(merged, read.table.values)
        notes += read.notes
        typed.append(read.stated)
    read = _normalize(_parse_settings(settings, keys), keys)
    _merge(merged, read.table.values)
    notes += read.notes
    # Only now, as a later file or setting may say what one before leaves open.
    mistakes = Mistakes()
    for one in (*typed, read.stated):
        check_relations(one, merged, mistakes)
    mistakes.raise_all()
    training = merged.get("training", {})
    profile = None
    if isinstance(training, dict) and any(own.of_transformers for own in kinds if own is not None):
        profile = load_frameworks().get(str(training.get("framework")))
    is_split = profile is not None and profile.model.splits_transformers
    if is_split and not {"unfused", "compile"} & training.keys():
        training["unfused"] = list(TRANSFORMERS_UNFUSED)
        notes.append(
            f"training: {', '.join(TRANSFORMERS_UNFUSED)} as unfused, as transformers runs them;"
            " unfused = [] if kernels of a library (Liger) replace them"
        )
    if any(kinds):
        _check_required(files, merged, ("parallel",) if is_planned else ())
    silent = (frozenset[str]() if own is None else own.unsaid for own in kinds)
    unsaid = frozenset.intersection(*silent)
    return JobSource(TomlTable(where, "", merged), tuple(notes), unsaid)


def _normalize(table: TomlTable, keys: Mapping[str, Collection[str]]) -> NormalizedTable:
    mistakes = Mistakes()
    normalized = replace_key_aliases(table, mistakes, keys, is_whole=False)
    mistakes.raise_all()
    return normalized


def _read_foreign(
    file: JobFile, kind: JobFileKind, keys: Mapping[str, Collection[str]]
) -> NormalizedTable:
    """What a file of another program says, and in notes what was read and what was not."""
    builder = JobTablesBuilder()
    kind.read(file, builder)
    own = TomlTable(file.path, "", {})
    if file.suffix == ".toml":
        # The device and keys before all tables, added to the file of a program that has no word
        # for them.
        ours = {k: v for k, v in file.tables.items() if not isinstance(v, dict) or k == "hardware"}
        mistakes, placed = Mistakes(), place_keys(TomlTable(file.path, "", ours), keys)
        added = replace_key_aliases(placed, mistakes, keys, is_whole=False)
        own = added.stated
        for name, said in builder.sections.items():
            table = added.table.get_subtable(name)
            for key, value in table.values.items():
                if not is_same_value(key, said.setdefault(key, value), value):
                    read = format_toml_keys({key: said[key]})
                    problem = f"{value!r} beside tables that say {read}"
                    mistakes.append(table.build_error(key, problem, "remove one of them"))
        mistakes.raise_all()
    stated = dict(builder.list_stated())
    if not stated:
        raise file.build_error(
            f"says nothing of a job as {kind.title}", "check the file, or give --from"
        )
    name = Path(file.path).name
    notes = (
        *(f"{name} ({kind.title}): {k}: {format_toml_keys(v)}" for k, v in stated.items()),
        *(f"{name}: not read: {one}" for one in builder.omitted),
    )
    return NormalizedTable(TomlTable(file.path, "", stated), own, notes)


def place_keys(table: TomlTable, keys: Mapping[str, Collection[str]]) -> TomlTable:
    """The table of a file with each key before all tables in the one that it belongs to.

    Raises DataError with all keys that belong to none or to several.
    """
    sections: dict[str, Any] = {k: dict(v) for k, v in table.values.items() if isinstance(v, dict)}
    mistakes = Mistakes()
    for name, value in table.values.items():
        if isinstance(value, dict):
            continue
        # A name of a table that is none is a mistake; model = "llama-3.1-8b" is a preset.
        if name in keys and not (name == "model" and isinstance(value, str)):
            return table
        try:
            section, key = _find_key(name, value, keys)
        except UsageError as error:
            problem, _, hint = str(error).removeprefix(f"{SETTINGS} ").partition("; ")
            mistakes.append(DataError(table.where, problem, hint))
        else:
            own = sections.setdefault(section, {})
            if key in own:
                problem = f"stands before the tables, and in [{section}]"
                mistakes.append(table.build_error(name, problem, "remove one of them"))
            own[key] = value
    mistakes.raise_all()
    return TomlTable(table.where, table.name, sections)


def _merge(merged: dict[str, Any], tables: Mapping[str, Any]) -> None:
    for name, values in tables.items():
        if not isinstance(values, Mapping) or not isinstance(merged.get(name, {}), dict):
            merged[name] = values
            continue
        before = merged.setdefault(name, {})
        if "preset" in values or "file" in values:
            # Another model or device: nothing of the former one is left.
            before.clear()
        for group in _EXCLUSIVE.get(name, ()):
            if set(group) & values.keys():
                for key in group:
                    before.pop(key, None)
        before.update(values)


def _parse_settings(settings: Sequence[str], keys: Mapping[str, Collection[str]]) -> TomlTable:
    """The tables of settings of the command line, each in the one that its key belongs to."""
    stated: dict[str, dict[str, Any]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name or not text:
            raise UsageError(f"{SETTINGS} {setting!r} is not KEY=VALUE; write seq_len=8192")
        try:
            value = tomllib.loads(f"value = {text.strip()}")["value"]
        except (ValueError, RecursionError):
            # A word, which needs no quotes on a command line.
            value = text.strip()
        section, key = _find_key(name.strip(), value, keys)
        *tables, last = key.split(".")
        own: dict[str, Any] = stated.setdefault(section, {})
        for table in tables:
            own = own.setdefault(table, {})
            if not isinstance(own, dict):
                raise UsageError(f"{SETTINGS} {setting!r}: {table} has a value already")
        own[last] = value
    return TomlTable(SETTINGS, "", stated)


def _find_key(name: str, value: object, keys: Mapping[str, Collection[str]]) -> tuple[str, str]:
    """The table and the key that a setting names: "parallel.tp", or "tp" alone."""
    name = name.lower() if name.isupper() else name
    section, _, key = name.partition(".")
    if section in keys and key:
        return section, key
    if name == "model":
        return "model", "preset"
    if name == "batch_size":
        # What it means there depends on what stands beside it.
        return "training", name
    known = {one: [*own, *ALIASES.get(one, ())] for one, own in keys.items()}
    found = [one for one, own in known.items() if section in own]
    if name == "preset":
        found = list_preset_tables(value) or found
    if len(found) == 1:
        return found[0], name
    if found:
        choices = join_choices([f"{one}.{name}" for one in found])
        raise UsageError(f"{SETTINGS} {name} is a key of several tables; write {choices}")
    every = sorted({key for own in known.values() for key in own})
    near = join_choices(find_nearest_words(name, every))
    raise UsageError(f"{SETTINGS} {name}: unknown key; write {near}")


def _check_required(
    files: Sequence[JobFile], merged: Mapping[str, Any], searched: Collection[str]
) -> None:
    """Raises one DataError that names all that is missing, with an example of each."""
    names, examples = [], []
    for section, keys, example in _REQUIRED:
        values = merged.get(section, {})
        is_whole = section in searched or not isinstance(values, Mapping)
        if is_whole or (values if not keys else any(key in values for key in keys)):
            continue
        if section == "model" and keys and (not values or "preset" in values):
            continue
        names.append(f"{section}.{keys[0]}" if keys else section)
        examples.append(f"{SETTINGS} {example}")
    if names:
        where = " and ".join(file.path for file in files)
        raise DataError(
            where,
            f"{'do' if len(files) > 1 else 'does'} not state {', '.join(names)}",
            f"add {' '.join(examples)} with your values, or name a job.toml with them as well",
        )
