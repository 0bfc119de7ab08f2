"""Models and hardware by name: the TOML files under presets/."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.hardware_table import hardware_of
from stepsplit.analyzer.model.spec.links import PRESETS, link
from stepsplit.analyzer.model.spec.model_table import transformer_of
from stepsplit.analyzer.model.spec.table import Table, either, near, read_table
from stepsplit.analyzer.model.spec.transformer import Transformer

MODELS = PRESETS / "models"
HARDWARE = PRESETS / "hardware"


@lru_cache(maxsize=256)
def transformer(name: str) -> Transformer:
    """The model of that name. Raises UsageError, which lists the near names."""
    table = _preset(MODELS, "model", name)
    return replace(transformer_of(table, None, seq_len=0), name=name)


@lru_cache(maxsize=256)
def hardware(
    name: str, nodes_link: str | None = None, gpus_per_node: int | None = None
) -> Hardware:
    """The accelerator of that name, in nodes of its usual size and link unless told.

    Raises UsageError, which lists the near names.
    """
    table = _preset(HARDWARE, "hardware", name)
    found = hardware_of(table, None)
    return replace(
        found,
        name=name,
        inter=found.inter if nodes_link is None else link(nodes_link),
        gpus_per_node=gpus_per_node or found.gpus_per_node,
    )


def published_parameters(name: str) -> int | None:
    """The model's parameters as its publishers count them, None where they do not."""
    return _preset(MODELS, "model", name).count("parameters", None)


@lru_cache(maxsize=1)
def model_names() -> tuple[str, ...]:
    return _names(MODELS)


@lru_cache(maxsize=1)
def hardware_names() -> tuple[str, ...]:
    return _names(HARDWARE)


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(name for file in sorted(folder.glob("*.toml")) for name in _file(file).values)


def _preset(folder: Path, kind: str, name: str) -> Table:
    """The table of a preset: it stands in the file whose name it begins with."""
    stems = [file.stem for file in folder.glob("*.toml") if name.startswith(file.stem)]
    if stems:
        found = _file(folder / f"{max(stems, key=len)}.toml").table(name, None)
        if found is not None:
            return found
    close = either(near(name, _names(folder)))
    raise UsageError(f"no {kind} preset {name!r}; write {close}")


@lru_cache(maxsize=64)
def _file(path: Path) -> Table:
    return read_table(path)
