"""Hardware of a job: devices, links and efficiencies, from presets or a TOML table."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import Efficiency, HardwareConfig, Learned, Link
from stepsplit.analyzer.model.config_table import MOST, TomlTable, either, near, read_table

# A [hardware] table -> Hardware.

PEAKS = ("fp32", "tf32", "bf16", "fp16", "fp8")

HARDWARE_KEYS = (
    "name", "family", "peaks", "memory_bytes", "memory_bytes_per_s", "gpus_per_node", "intra",
    "nodes_link", "host", "nvls", "multiprocessors", "efficiency",
    "learned", "measured", "transfers", "file",
)  # fmt: skip

_NEEDED = ("family", "peaks", "memory_bytes", "memory_bytes_per_s", "gpus_per_node", "intra")


def hardware_of(table: TomlTable, base: HardwareConfig | None) -> HardwareConfig:
    """The hardware that the table states; what it leaves out is as in base.

    Without a base, nodes_link is as intra and host as host-pcie-5 where they are left out. Raises
    DataError.
    """
    known = base or _plain_hardware(table)
    family = table.one_of("family", families(), known.family)
    return replace(
        known,
        name=table.text("name", known.name),
        family=family,
        peaks_flops_per_s=_peaks(table, known.peaks_flops_per_s),
        memory_bytes=table.count("memory_bytes", known.memory_bytes),
        memory_bytes_per_s=table.number("memory_bytes_per_s", known.memory_bytes_per_s),
        gpus_per_node=table.count("gpus_per_node", known.gpus_per_node),
        intra=_link(table, "intra", known.intra),
        inter=_link(table, "nodes_link", known.inter),
        host=_link(table, "host", known.host),
        nvls=_nvls(table, known.nvls),
        multiprocessors=table.count("multiprocessors", known.multiprocessors or 0),
        efficiency=_efficiency(
            table, known.efficiency if family == known.family else efficiency(family)
        ),
        learned=_learned(table, known.learned),
    )


def _plain_hardware(table: TomlTable) -> HardwareConfig:
    """The hardware of a table that names no preset."""
    table.needs(*_NEEDED)
    family = table.one_of("family", families(), families()[0])
    intra = _link(table, "intra", link("pcie-5"))
    return HardwareConfig(
        name="custom",
        family=family,
        peaks_flops_per_s=(),
        memory_bytes=1,
        memory_bytes_per_s=1.0,
        gpus_per_node=1,
        intra=intra,
        inter=intra,
        host=link("host-pcie-5"),
        efficiency=efficiency(family),
    )


def _peaks(
    table: TomlTable, default: tuple[tuple[str, float], ...]
) -> tuple[tuple[str, float], ...]:
    peaks = table.table("peaks", None)
    if peaks is None:
        return default
    peaks.knows(*PEAKS, "source")
    stated = ((dtype, peaks.number(dtype, None)) for dtype in PEAKS)
    return tuple((dtype, peak) for dtype, peak in stated if peak is not None)


def _link(table: TomlTable, key: str, default: Link) -> Link:
    """A link by its name, or as a table of numbers."""
    if not isinstance(table.values.get(key), dict):
        name = table.one_of(key, link_names(), None)
        return default if name is None else link(name)
    inner = table.table(key, table)
    inner.knows("name", "bytes_per_s", "ring", "latency_ns", "source")
    inner.needs("bytes_per_s")
    return Link(
        name=inner.text("name", key),
        bytes_per_s=inner.number("bytes_per_s", 0.0),
        ring=inner.number("ring", default.ring),
        latency_ns=inner.number("latency_ns", default.latency_ns),
    )


def _nvls(table: TomlTable, default: float) -> float:
    return 0.0 if table.values.get("nvls") == 0 else table.number("nvls", default)


def _efficiency(table: TomlTable, default: Efficiency) -> Efficiency:
    """The family's constants with those that the table states in their place."""
    inner = table.table("efficiency", None)
    if inner is None:
        return default
    inner.knows(*FITTED)
    return efficiency_of(inner, default)


def _learned(table: TomlTable, default: Learned) -> Learned:
    inner = table.table("learned", None)
    if inner is None:
        return default
    inner.knows("activations", "constant_bytes")
    return Learned(
        inner.number("activations", default.activations),
        inner.count("constant_bytes", default.constant_bytes, least=-MOST),
    )


# Links by name, and what the GPU families reach: presets/links.toml and efficiency.toml.

PRESETS = Path(__file__).parent / "presets"

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


def efficiency_of(table: TomlTable, base: Efficiency) -> Efficiency:
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
def _links() -> TomlTable:
    return read_table(PRESETS / "links.toml")


@lru_cache(maxsize=1)
def _families() -> TomlTable:
    return read_table(PRESETS / "efficiency.toml")


# The file that a [hardware] table names: what `stepsplit calibrate` wrote.


def hardware_file(table: TomlTable) -> TomlTable | None:
    """The keys of [hardware] that the file states which the table names, None where it names none.

    The path is relative to the table's own file. Raises DataError.
    """
    name = table.text("file", None)
    return None if name is None else read_table(Path(table.where).parent / name)
