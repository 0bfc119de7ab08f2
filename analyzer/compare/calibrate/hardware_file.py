"""A calibration as the TOML file that [hardware] file names."""

from __future__ import annotations

from collections.abc import Iterable

from stepsplit.analyzer.compare.calibrate.calibrate import Calibration
from stepsplit.analyzer.model.comm_measured import TransferSweep
from stepsplit.analyzer.model.config import Efficiency, Hardware, Learned, Link

_DIGITS = 6


def hardware_text(found: Calibration) -> str:
    """The file's text: every constant of the hardware, and the transfers that were measured."""
    hardware = found.hardware
    runs = ", ".join(row.removeprefix("run:") for row in hardware.efficiency.rows)
    links = (("intra", hardware.intra), ("nodes_link", hardware.inter), ("host", hardware.host))
    parts = [
        f"# stepsplit calibrate: {runs}. A RUN.toml names this file as [hardware] file.",
        *_hardware(hardware),
        *(line for key, link in links for line in _link(key, link)),
        *_efficiency(hardware.efficiency),
        *_learned(hardware.learned),
        *(line for sweep in found.transfers for line in _transfer(sweep)),
    ]
    return "\n".join(parts) + "\n"


def _hardware(hardware: Hardware) -> Iterable[str]:
    yield f"name = {_quoted(hardware.name)}"
    yield f"family = {_quoted(hardware.family)}"
    yield f"memory_bytes = {hardware.memory_bytes}"
    yield f"memory_bytes_per_s = {_number(hardware.memory_bytes_per_s)}"
    yield f"gpus_per_node = {hardware.gpus_per_node}"
    if hardware.nvls:
        yield f"nvls = {_number(hardware.nvls)}"
    if hardware.multiprocessors:
        yield f"multiprocessors = {hardware.multiprocessors}"
    yield "\n[peaks]"
    for dtype, peak in hardware.peaks_flops_per_s:
        yield f"{dtype} = {_number(peak)}"


def _link(key: str, link: Link) -> Iterable[str]:
    yield f"\n[{key}]"
    yield f"name = {_quoted(link.name)}"
    yield f"bytes_per_s = {_number(link.bytes_per_s)}"
    yield f"ring = {_number(link.ring)}"
    yield f"latency_ns = {_number(link.latency_ns)}"


def _efficiency(known: Efficiency) -> Iterable[str]:
    yield "\n[efficiency]"
    for key in ("gemm", "attention", "unfused_attention", "memory", "launch_ns", "tile", "jitter"):
        if getattr(known, key):
            yield f"{key} = {_number(getattr(known, key))}"
    if known.host_ns:
        yield f"host_ns = {_number(known.host_ns)}"
    yield f"error = {_number(known.error)}"
    for key in ("frameworks", "devices", "dtypes", "rows"):
        yield f"{key} = [{', '.join(map(_quoted, getattr(known, key)))}]"


def _learned(known: Learned) -> Iterable[str]:
    if known == Learned():
        return
    yield "\n[learned]"
    yield f"activations = {_number(known.activations)}"
    yield f"constant_bytes = {known.constant_bytes}"


def _transfer(sweep: TransferSweep) -> Iterable[str]:
    yield "\n[[transfers]]"
    yield f"op = {_quoted(sweep.op)}"
    yield f"ranks = {sweep.ranks}"
    yield f"ranks_per_node = {sweep.ranks_per_node}"
    yield f"sizes_bytes = [{', '.join(map(str, sweep.sizes_bytes))}]"
    yield f"times_ns = [{', '.join(str(round(ns)) for ns in sweep.times_ns)}]"


def _number(value: float) -> str:
    """Six digits, as TOML takes them: 0.80541, 1.16605e+09, 3000.0."""
    text = f"{value:.{_DIGITS}g}"
    return text if set(text) & {".", "e"} else f"{text}.0"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
