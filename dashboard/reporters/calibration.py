"""The terminal's answer to a calibration: the constants, and how well they explain the runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.gap.calibrate import Calibration, Explained
from stepsplit.analyzer.model.comm_measured import TransferSweep
from stepsplit.analyzer.model.config import Hardware
from stepsplit.dashboard.reporters.bare_table import bare_table

_DIM = "bright_black"
MOST_TRANSFERS = 8
_UNSEEN = "guess"


def screen(found: Calibration, out: Path | None) -> RenderableType:
    """The whole screen of one calibration; out is the file that was written."""
    parts: list[RenderableType] = [_heading(found), Text(), _constants(found), Text()]
    if found.transfers:
        parts += [_transfers(found.transfers), Text()]
    parts += [_stages(found.stages), *_mend(found, out)]
    return Group(*parts)


def _heading(found: Calibration) -> Text:
    runs = list(dict.fromkeys(one.run for one in found.stages))
    words = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    text = Text(f"{found.hardware.name} as told by {words}: {', '.join(runs)}", style="bold")
    off = units.percent(found.hardware.efficiency.error)
    text.append(f"\nother layouts may be off by {off}", style="not bold")
    return text


def _constants(found: Calibration) -> Table:
    table = bare_table("constant", "before", "now")
    before, now = _told(found.known), _told(found.hardware)
    for (name, old), (_, new) in zip(before, now, strict=True):
        if new:
            table.add_row(name, old or _UNSEEN, new)
    return table


def _told(hardware: Hardware) -> Iterable[tuple[str, str]]:
    """(what it is, its value as people read it), in the same order for any hardware."""
    known, intra, inter = hardware.efficiency, hardware.intra, hardware.inter
    peak = hardware.peaks_flops_per_s[0][1]
    bytes_per_s = known.memory * hardware.memory_bytes_per_s
    return (
        ("products", f"{units.flops(known.gemm * peak)}/s"),
        ("attention", f"{units.flops(known.attention * peak)}/s"),
        ("memory", units.gigabytes_per_second(bytes_per_s)),
        ("launch of a kernel", units.microseconds(known.launch_ns)),
        ("host, a layer's forward", units.milliseconds(known.host_ns) if known.host_ns else ""),
        (f"{intra.name}, busbw", units.gigabytes_per_second(intra.bytes_per_s * intra.ring)),
        (f"{intra.name}, a step", units.microseconds(intra.latency_ns)),
        (f"{inter.name}, busbw", units.gigabytes_per_second(inter.bytes_per_s * inter.ring)),
        (f"{inter.name}, a step", units.microseconds(inter.latency_ns)),
        ("activations, of the predicted", units.percent(hardware.learned.activations)),
    )


def _transfers(transfers: tuple[TransferSweep, ...]) -> Group:
    table = bare_table("measured", "ranks", "size", "time")
    rows = [
        (one.op, str(one.ranks), units.size(size), units.milliseconds(ns))
        for one in transfers
        for size, ns in zip(one.sizes_bytes, one.times_ns, strict=True)
    ]
    for row in rows[:MOST_TRANSFERS]:
        table.add_row(*row)
    more = len(rows) - MOST_TRANSFERS
    left_out = Text(f"and {more} more, which --json has", style=_DIM)
    return Group(table, left_out) if more > 0 else Group(table)


def _stages(stages: tuple[Explained, ...]) -> Table:
    """Measured and predicted step of each stage, and the bucket that is farthest off."""
    table = bare_table("run", "stage", "measured", "predicted", "off", "most in")
    for one in stages:
        off = units.signed_percent(one.predicted.step_ns / one.step_ns - 1)
        table.add_row(
            one.run,
            str(one.stage),
            units.milliseconds(one.step_ns),
            units.milliseconds(one.predicted.step_ns),
            off,
            _farthest(one),
        )
    return table


def _farthest(one: Explained) -> str:
    missed = (one.predicted - one.measured).buckets_ns
    bucket, ns = max(zip(BUCKETS, missed, strict=True), key=lambda pair: abs(pair[1]))
    return f"{bucket} {units.signed_percent(ns / one.step_ns)}"


def _mend(found: Calibration, out: Path | None) -> list[RenderableType]:
    """What to do with it."""
    if out is None:
        return [Text(), Text("--out FILE keeps these constants", style=_DIM)]
    lines = ("to RUN.toml", "[hardware]", f'file = "{out}"')
    return [Text(), Text(lines[0], style="bold"), *map(Text, lines[1:])]
