"""The terminal screen of a watched job: where its wall clock went, start by start."""

from __future__ import annotations

from dataclasses import astuple

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.report.ledger import IncarnationLedger, Ledger
from stepsplit.analyzer.report.ledger_words import (
    format_goodput,
    format_gpu_hours,
    format_rows,
    format_start,
    format_wall,
)
from stepsplit.dashboard.reporters.console import Text

_MOST_STARTS = 8
"""Starts with a line of their own; of more, the first and the last ones."""


def build_ledger_screen(ledger: Ledger, samples: str = "") -> RenderableType:
    """The whole screen, for a console of 80 columns or more. samples: the line on its samples."""
    starts = ledger.incarnations
    steps = max((one.last_step for one in starts if one.last_step is not None), default=-1) + 1
    known = (
        f"watch {ledger.run}",
        f"{max(one.world_size for one in starts)} ranks",
        f"{len(starts)} start{'s' * (len(starts) > 1)}",
        f"{units.format_count(steps)} steps",
    )
    parts: list[RenderableType] = [Text("   ".join(known), style="bold")]
    parts += [Text(f"not known: {lack}", style="bold yellow") for lack in ledger.lacks]
    hours = f"{format_gpu_hours(ledger.gpu_hours)} GPU hours"
    parts.append(
        Text(f"wall clock {format_wall(ledger.wall_ns)} ({hours})   goodput ")
        + Text(format_goodput(ledger), style="bold")
        + Text(" (time in steps that count)")
    )
    parts += [Text(), _build_rows(ledger)]
    if len(starts) > 1:
        parts += [Text(), _build_starts(starts)]
    if samples:
        parts += [Text(), Text(samples)]
    return Group(*parts)


def _build_rows(ledger: Ledger) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column("")
    for name in ("time", "share", "number", "GPU hours"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    longest = max((row.ns for row in ledger.rows), default=0) or 1
    for row, texts in zip(ledger.rows, format_rows(ledger)[:-1], strict=True):
        name, *numbers = astuple(texts)
        table.add_row(Text(name), *numbers, Bar(longest, 0, row.ns, width=24))
    return table


def _build_starts(starts: tuple[IncarnationLedger, ...]) -> Table:
    """A line for each start."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in ("start", "ranks", "steps", "wall clock", "goodput", "most of the rest", "ending"):
        table.add_column(name, justify="right" if name in ("start", "ranks") else "left")
    half = _MOST_STARTS // 2
    shown = starts if len(starts) <= _MOST_STARTS else (*starts[:half], *starts[-half:])
    for place, one in enumerate(shown):
        if len(shown) < len(starts) and place == half:
            table.add_row("...", *[""] * 5, f"{len(starts) - len(shown)} more")
        table.add_row(*astuple(format_start(one, one is starts[-1])))
    return table
