"""The terminal screen of a watched job: where its wall clock went, start by start."""

from __future__ import annotations

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.analyzer.report.ledger import IncarnationLedger, Ledger, LedgerRow
from stepsplit.analyzer.report.ledger_words import ROW_NAMES, format_goodput, format_wall
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
    hours = f"{ledger.gpu_hours:.3g} GPU hours"
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
    for row in ledger.rows:
        share = row.ns / ledger.wall_ns if ledger.wall_ns else 0.0
        table.add_row(
            Text(ROW_NAMES[row.kind]),
            format_wall(row.ns),
            units.format_percent(share),
            units.format_count(row.count) if row.count else "",
            f"{row.gpu_hours:.3g}",
            Bar(longest, 0, row.ns, width=24),
        )
    return table


def _build_starts(starts: tuple[IncarnationLedger, ...]) -> Table:
    """A line for each start: its steps, goodput, largest other row, and how it ended."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in ("start", "ranks", "steps", "wall clock", "goodput", "most of the rest", "ending"):
        table.add_column(name, justify="right" if name in ("start", "ranks") else "left")
    half = _MOST_STARTS // 2
    shown = starts if len(starts) <= _MOST_STARTS else (*starts[:half], *starts[-half:])
    for place, one in enumerate(shown):
        if len(shown) < len(starts) and place == half:
            table.add_row("...", *[""] * 5, f"{len(starts) - len(shown)} more")
        train_ns = sum(row.ns for row in one.rows if row.kind == "train")
        rest: list[LedgerRow] = sorted(
            (row for row in one.rows if row.kind != "train"), key=lambda row: -row.ns
        )
        most = f"{ROW_NAMES[rest[0].kind]} {format_wall(rest[0].ns)}" if rest else ""
        steps = "none" if one.last_step is None else f"{one.first_step} to {one.last_step}"
        table.add_row(
            str(one.incarnation + 1),
            str(len(one.ranks)),
            steps,
            format_wall(one.wall_ns),
            units.format_percent(train_ns / one.wall_ns) if one.wall_ns else "",
            most,
            # Only the last one may still run.
            f"{one.ending}{', or running' * (one.ending == 'lost' and one is starts[-1])}",
        )
    return table
