"""The screen of calibrate: the constants, and how well they reproduce the runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.model.config import HardwareConfig
from stepsplit.dashboard.reporters.console import DIM, Text
from stepsplit.dashboard.reporters.tables import build_table

if TYPE_CHECKING:
    from stepsplit.analyzer.gap.calibrate import Calibration

MAX_TRANSFERS = 8

_GUESS = "default"

_PUBLISHED = "as published"
"""The attention rate of a device: that of the kernel that runs, in presets/attention.toml."""


def build_calibration_screen(calibration: Calibration, out: Path | None) -> RenderableType:
    """Builds the screen of a calibration; out is the file that was written, if any."""
    runs = list(dict.fromkeys(one.run for one in calibration.stages))
    words = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    name = calibration.hardware.name
    off = units.format_percent(calibration.hardware.efficiency.error)
    constants = build_table("constant", "before", "calibrated")
    dtype = calibration.hardware.efficiency.dtypes[0]
    before = _list_constants(calibration.known, dtype)
    now = _list_constants(calibration.hardware, dtype)
    for (constant, old), (_, new) in zip(before, now, strict=True):
        # The time of the host is empty where none was fitted.
        if new:
            constants.add_row(constant, old or _GUESS, new)
    parts: list[RenderableType] = [
        Group(
            Text(f"{name} calibrated from {words}: {', '.join(runs)}", style="bold"),
            Text(f"expected error for other layouts: {off}"),
        ),
        Text(),
        constants,
        Text(),
    ]
    notes = [Text(f"not calibrated: {one}") for one in calibration.refused]
    notes += (Text(f"caveat: {one}", style="yellow") for one in calibration.caveats)
    if notes:
        parts += [*notes, Text()]
    if calibration.transfers:
        table = build_table("collective", "ranks", "size", "time")
        rows = [
            (one.op, str(one.ranks), units.format_size(size), units.format_milliseconds(ns))
            for one in calibration.transfers
            for size, ns in zip(one.sizes_bytes, one.times_ns, strict=True)
        ]
        for row in rows[:MAX_TRANSFERS]:
            table.add_row(*row)
        more = len(rows) - MAX_TRANSFERS
        left_out = Text(f"and {more} more (see --json)", style=DIM)
        parts += [Group(table, left_out) if more > 0 else Group(table), Text()]
    # Measured and predicted step of each stage, and the bucket with the largest error.
    table = build_table("run", "stage", "measured", "predicted", "error", "largest in")
    for stage in calibration.stages:
        errors = zip(BUCKETS, (stage.predicted - stage.measured).buckets_ns, strict=True)
        bucket, ns = max(errors, key=lambda pair: abs(pair[1]))
        table.add_row(
            stage.run,
            str(stage.stage),
            units.format_milliseconds(stage.step_ns),
            units.format_milliseconds(stage.predicted.step_ns),
            units.format_signed_percent(stage.predicted.step_ns / stage.step_ns - 1),
            f"{bucket} {units.format_signed_percent(ns / stage.step_ns)}",
        )
    parts += [table, Text()]
    if out is None:
        return Group(*parts, Text("save these constants with --out FILE", style=DIM))
    hint = (Text("[hardware]"), Text(f'file = "{out}"'))
    return Group(*parts, Text("add to job.toml", style="bold"), *hint)


def _list_constants(hardware: HardwareConfig, dtype: str) -> Iterable[tuple[str, str]]:
    """(name, formatted value) of each constant at a dtype, in the same order for any hardware."""
    known, intra, inter = hardware.efficiency, hardware.intra, hardware.inter
    peak = hardware.peak_flops_per_s(dtype) or 0.0
    bytes_per_s = known.memory * hardware.memory_bytes_per_s
    # The forward rate of attention; in words if it is that of the kernel that runs.
    if hardware.attention is not None:
        attention = f"{units.format_flops(hardware.attention.forward_flops_per_s)}/s"
    else:
        share = known.attention
        attention = f"{units.format_flops(share * peak)}/s" if share else _PUBLISHED
    return (
        ("GEMM", f"{units.format_flops(known.gemm * peak)}/s"),
        ("attention", attention),
        ("memory", units.format_gigabytes_per_second(bytes_per_s)),
        ("kernel launch", units.format_microseconds(known.launch_ns)),
        (
            "host, forward of a layer",
            units.format_milliseconds(known.host_ns) if known.host_ns else "",
        ),
        (f"{intra.name}, busbw", units.format_gigabytes_per_second(intra.bytes_per_s * intra.ring)),
        (f"{intra.name}, latency of a step", units.format_microseconds(intra.latency_ns)),
        (f"{inter.name}, busbw", units.format_gigabytes_per_second(inter.bytes_per_s * inter.ring)),
        (f"{inter.name}, latency of a step", units.format_microseconds(inter.latency_ns)),
        ("activations, measured / predicted", units.format_percent(hardware.learned.activations)),
    )
