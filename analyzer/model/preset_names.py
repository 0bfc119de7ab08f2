"""Presets of models and devices by name: the TOML files under presets/."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config_decode import (
    TomlTable,
    find_nearest_words,
    join_choices,
    read_table,
)

PRESETS = Path(__file__).parent / "presets"

MODELS = PRESETS / "models"

HARDWARE = PRESETS / "hardware"

DRIVER_NAME = "driver_name"
"""Key of a hardware preset: a regular expression that matches the names by which drivers report the
device, in capitals, and those of no other preset. Without it no recorded device has the preset."""


@lru_cache(maxsize=1)
def list_model_names() -> tuple[str, ...]:
    return _list_names(MODELS)


@lru_cache(maxsize=1)
def list_hardware_names() -> tuple[str, ...]:
    return _list_names(HARDWARE)


def _list_names(folder: Path) -> tuple[str, ...]:
    return tuple(name for file in sorted(folder.glob("*.toml")) for name in _read_file(file).values)


def find_preset(device: str) -> str | None:
    """The preset of a device name as reported by the driver; None if unknown or ambiguous."""
    matching = [name for name, words in _list_driver_names() if words.search(device.upper())]
    return matching[0] if len(matching) == 1 else None


@lru_cache(maxsize=1)
def _list_driver_names() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """The presets with a driver_name, and its pattern."""
    tables = ((name, read_preset(HARDWARE, "hardware", name)) for name in list_hardware_names())
    return tuple(
        (name, re.compile(words))
        for name, table in tables
        if (words := table.values.get(DRIVER_NAME)) is not None
    )


def read_preset(folder: Path, kind: str, name: str) -> TomlTable:
    """Reads a preset's table from the file whose name is the longest prefix of the preset's.

    kind is what it is in the message of the UsageError, which suggests similar names.
    """
    stems = [file.stem for file in folder.glob("*.toml") if name.startswith(file.stem)]
    if stems:
        presets = _read_file(folder / f"{max(stems, key=len)}.toml")
        if name in presets.values:
            return presets.get_subtable(name)
    near = join_choices(find_nearest_words(name, _list_names(folder)))
    raise UsageError(f"unknown {kind} preset {name!r}; write {near}")


@lru_cache(maxsize=64)
def _read_file(path: Path) -> TomlTable:
    return read_table(path)
