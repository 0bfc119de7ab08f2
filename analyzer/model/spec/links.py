"""Links by name, and what the GPU families reach: presets/links.toml and efficiency.toml."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.spec.hardware import Efficiency, Link
from stepsplit.analyzer.model.spec.table import Table, either, near, read_table

PRESETS = Path(__file__).parent.parent / "presets"
_WORDS = ("frameworks", "devices", "dtypes", "rows")
_BESIDE = ("tile", "jitter", "host_ns", "error", *_WORDS)
CONSTANTS = tuple(field.name for field in fields(Efficiency) if field.name not in _BESIDE)
FITTED = (*CONSTANTS, *_BESIDE)
"""What a calibration states beside them."""
_NOTHING = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0)


def link(name: str) -> Link:
    """The link of links.toml. Raises UsageError, which lists the near names."""
    table = _links().table(name, None)
    if table is None:
        raise UsageError(f"no link {name!r}; write {either(near(name, link_names()))}")
    return Link(
        name=name,
        bytes_per_s=table.number("bytes_per_s", 0.0),
        ring=table.number("ring", 0.0),
        latency_ns=table.number("latency_ns", 0.0),
    )


def link_names() -> tuple[str, ...]:
    """The links that links.toml holds."""
    return tuple(_links().values)


def efficiency(family: str) -> Efficiency:
    """What a GPU family reaches. Raises UsageError, which lists the near names."""
    table = _families().table(family, None)
    if table is None:
        raise UsageError(f"no GPU family {family!r}; write {either(near(family, families()))}")
    table.needs(*CONSTANTS)
    return efficiency_of(table, _NOTHING)


def efficiency_of(table: Table, base: Efficiency) -> Efficiency:
    """The constants that the table states, in place of those of base. Raises DataError."""
    return replace(
        base,
        gemm=table.number("gemm", base.gemm),
        attention=table.number("attention", base.attention),
        unfused_attention=table.number("unfused_attention", base.unfused_attention),
        memory=table.number("memory", base.memory),
        launch_ns=table.number("launch_ns", base.launch_ns),
        tile=int(table.number("tile", base.tile)),
        jitter=table.number("jitter", base.jitter),
        host_ns=table.number("host_ns", base.host_ns),
        error=table.number("error", base.error),
        frameworks=table.texts("frameworks", base.frameworks),
        devices=table.texts("devices", base.devices),
        dtypes=table.texts("dtypes", base.dtypes),
        rows=table.texts("rows", base.rows),
    )


def families() -> tuple[str, ...]:
    """The GPU families that efficiency.toml holds."""
    return tuple(_families().values)


@lru_cache(maxsize=1)
def _links() -> Table:
    return read_table(PRESETS / "links.toml")


@lru_cache(maxsize=1)
def _families() -> Table:
    return read_table(PRESETS / "efficiency.toml")
