"""A peak that a run exceeded was none: it is raised to what was reached."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.config import Hardware


def within_peaks(hardware: Hardware) -> Hardware:
    """The same speeds with shares of at most 1, of peaks and of a bandwidth that allow them."""
    known = hardware.efficiency
    faster = max(1.0, known.gemm, known.attention, known.unfused_attention)
    wider = max(1.0, known.memory)
    efficiency = replace(
        known,
        gemm=known.gemm / faster,
        attention=known.attention / faster,
        unfused_attention=known.unfused_attention / faster,
        memory=known.memory / wider,
    )
    return replace(
        hardware,
        peaks_flops_per_s=tuple((d, peak * faster) for d, peak in hardware.peaks_flops_per_s),
        memory_bytes_per_s=hardware.memory_bytes_per_s * wider,
        efficiency=efficiency,
    )
