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


# Presets by the names that people, hubs and drivers have for them.

_VARIANT = re.compile(r"-(?:hf|instruct|chat|base|it|v\d+\.\d+)$")
"""What a hub's name of a model says beyond its sizes."""


def normalize_model_name(name: str) -> str:
    """The name of a preset that a hub's name stands for, if there is one.

    >>> normalize_model_name("meta-llama/Llama-3.1-8B-Instruct")
    'llama-3.1-8b'
    >>> normalize_model_name("Llama2 70B")
    'llama-2-70b'
    """
    word = re.sub(r"[\s_]+", "-", name.rpartition("/")[2].strip().lower()).removeprefix("meta-")
    while (cut := _VARIANT.sub("", word)) != word:
        word = cut
    bare = word.replace("-", "")
    same = [known for known in list_model_names() if known.replace("-", "") == bare]
    return same[0] if len(same) == 1 else word


_GPUS = {
    "a100": "a100-sxm-80gb", "h100": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm",
    "b300": "b300-sxm", "v100": "v100-sxm-32gb", "h20": "h20-sxm", "h800": "h800-sxm",
    "a800": "a800-sxm-80gb", "a100-80gb": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb",
    "h100-80gb": "h100-sxm", "h100-sxm-80gb": "h100-sxm", "v100-32gb": "v100-sxm-32gb",
    "v100-16gb": "v100-sxm-16gb", "h100-80gb-hbm2e": "h100-pcie",
}  # fmt: skip
"""Presets of GPUs that are usually meant by these names."""

_LONGEST_NAME = 64
"""Characters of a device's name; drivers' names are shorter."""


def normalize_device_name(name: str) -> str:
    """The name of a preset that a short name, or that of the driver, stands for, if there is one.

    >>> normalize_device_name("NVIDIA H100 80GB HBM3"), normalize_device_name("A100")
    ('h100-sxm', 'a100-sxm-80gb')
    """
    words = re.split(r"[\s_-]+", name.strip().lower())
    word = "-".join(words).removeprefix("nvidia-")
    if word in list_hardware_names() or word in _GPUS:
        return _GPUS.get(word, word)
    if len(name) <= _LONGEST_NAME and (known := find_preset(" ".join(words))) is not None:
        return known
    # The kind of memory of a datasheet, and the socket of a driver, are in no preset's name.
    short = re.sub(r"-hbm\w*$", "", re.sub(r"-sxm\d\b", "-sxm", word))
    return _GPUS.get(short, short) if short in list_hardware_names() or short in _GPUS else word
