"""A [hardware] table -> Hardware."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.spec.hardware import Efficiency, Hardware, Learned, Link
from stepsplit.analyzer.model.spec.links import (
    FITTED,
    efficiency,
    efficiency_of,
    families,
    link,
    link_names,
)
from stepsplit.analyzer.model.spec.table import MOST, Table

PEAKS = ("fp32", "tf32", "bf16", "fp16", "fp8")
HARDWARE_KEYS = (
    "name", "family", "peaks", "memory_bytes", "memory_bytes_per_s", "gpus_per_node", "intra",
    "nodes_link", "host", "nvls", "multiprocessors", "efficiency",
    "learned", "measured", "transfers", "file",
)  # fmt: skip
_NEEDED = ("family", "peaks", "memory_bytes", "memory_bytes_per_s", "gpus_per_node", "intra")


def hardware_of(table: Table, base: Hardware | None) -> Hardware:
    """The hardware that the table states; what it leaves out is as in base.

    Without a base, nodes_link is as intra and host as host-pcie-5 where they are left out. Raises
    DataError.
    """
    known = base or _plain(table)
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


def _plain(table: Table) -> Hardware:
    """The hardware of a table that names no preset."""
    table.needs(*_NEEDED)
    family = table.one_of("family", families(), families()[0])
    intra = _link(table, "intra", link("pcie-5"))
    return Hardware(
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


def _peaks(table: Table, default: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    peaks = table.table("peaks", None)
    if peaks is None:
        return default
    peaks.knows(*PEAKS, "source")
    stated = ((dtype, peaks.number(dtype, None)) for dtype in PEAKS)
    return tuple((dtype, peak) for dtype, peak in stated if peak is not None)


def _link(table: Table, key: str, default: Link) -> Link:
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


def _nvls(table: Table, default: float) -> float:
    return 0.0 if table.values.get("nvls") == 0 else table.number("nvls", default)


def _efficiency(table: Table, default: Efficiency) -> Efficiency:
    """The family's constants with those that the table states in their place."""
    inner = table.table("efficiency", None)
    if inner is None:
        return default
    inner.knows(*FITTED)
    return efficiency_of(inner, default)


def _learned(table: Table, default: Learned) -> Learned:
    inner = table.table("learned", None)
    if inner is None:
        return default
    inner.knows("activations", "constant_bytes")
    return Learned(
        inner.number("activations", default.activations),
        inner.count("constant_bytes", default.constant_bytes, least=-MOST),
    )
