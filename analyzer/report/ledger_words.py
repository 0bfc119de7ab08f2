"""The words of a ledger for people."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepsplit.analyzer import units
from stepsplit.analyzer.report.headline import round_parts, round_shares
from stepsplit.analyzer.report.ledger import ROW_KINDS, IncarnationLedger, Ledger

ROW_NAMES = {
    "train": "steps that count",
    "redone": "steps done again",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "compile": "compile",
    "launcher": "launcher",
    "imports": "imports",
    "process_group": "process group",
    "load": "load",
    "startup": "other start-up",
    "quorum": "quorum",
    "heal": "heal",
    "commit": "commit",
    "stall": "stalls and hangs",
    "restart_gap": "restart gaps",
    "shutdown": "shutdown",
    "other": "other",
    "unknown": "unknown",
}
"""By kind; docs/ledger.md has the definitions."""

assert tuple(ROW_NAMES) == ROW_KINDS, "a name for each kind of row"


def format_wall(ns: int) -> str:
    """A length of the wall clock, such as 0.42 s, 74.1 s, 12 min 5 s or 31 h 4 min."""
    seconds = ns / 1e9
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def format_goodput(ledger: Ledger) -> str:
    """The goodput, with "at most" where something of the job is not known."""
    share = units.format_percent(ledger.goodput)
    return f"at most {share}" if ledger.is_goodput_bound else share


@dataclass(frozen=True, slots=True)
class RowTexts:
    """A row as people read it: its name, time, share of the wall clock, number and GPU hours."""

    name: str
    time: str
    share: str
    number: str
    gpu_hours: str


def format_rows(ledger: Ledger) -> list[RowTexts]:
    """The texts of the rows, and last of the wall clock, to which they add up as printed.

    A kind of a later version has its own name.
    """
    times = [row.ns for row in ledger.rows]
    unit_ns = next((unit for limit, unit in _UNITS_NS if ledger.wall_ns < limit), _SECOND_NS)
    counts, shares = round_parts(times, unit_ns), round_shares(times)
    decimals = _count_hour_decimals(ledger.gpu_hours)
    hours = round_parts(
        [round(row.gpu_hours * _PER_HOUR) for row in ledger.rows], _PER_HOUR // 10**decimals
    )
    texts = [
        RowTexts(
            ROW_NAMES.get(row.kind, row.kind),
            _format_time(count * unit_ns, unit_ns),
            units.format_percent(share),
            units.format_count(row.count) if row.count else "",
            f"{hour / 10**decimals:,.{decimals}f}",
        )
        for row, count, share, hour in zip(ledger.rows, counts, shares, hours, strict=True)
    ]
    whole = RowTexts(
        "wall clock",
        _format_time(sum(counts) * unit_ns, unit_ns),
        units.format_percent(sum(shares)),
        "",
        f"{sum(hours) / 10**decimals:,.{decimals}f}",
    )
    return [*texts, whole]


def format_gpu_hours(hours: float) -> str:
    """GPU hours to three digits or more, without the unit, as the sum of all rows is printed."""
    return f"{hours:,.{_count_hour_decimals(hours)}f}"


_SECOND_NS = 10**9

_UNITS_NS = ((10 * _SECOND_NS, _SECOND_NS // 100), (1000 * _SECOND_NS, _SECOND_NS // 10))
"""In which unit the rows of a wall clock below the first time are printed, else in seconds."""

_PER_HOUR = 10**9


def _format_time(ns: int, unit_ns: int) -> str:
    """A whole number of units such as 0.42 s, 74.1 s, 12 min 5 s or 31 h 4 min 8 s."""
    decimals = len(str(_SECOND_NS // unit_ns)) - 1
    minutes, rest_ns = divmod(ns, 60 * _SECOND_NS) if ns >= 100 * _SECOND_NS else (0, ns)
    hours, minutes = divmod(minutes, 60) if minutes >= 100 else (0, minutes)
    before = f"{hours} h " * (hours > 0) + f"{minutes} min " * (hours > 0 or minutes > 0)
    return f"{before}{rest_ns / _SECOND_NS:.{decimals}f} s"


def _count_hour_decimals(hours: float) -> int:
    """So many that the sum of all rows has three digits."""
    return min(max(2 - math.floor(math.log10(hours)), 0), 6) if hours > 0 else 2


@dataclass(frozen=True, slots=True)
class StartTexts:
    """A start of the job as people read it."""

    start: str
    ranks: str
    steps: str
    wall: str
    goodput: str
    most_of_the_rest: str
    ending: str


def format_start(start: IncarnationLedger, is_newest: bool) -> StartTexts:
    """The texts of a start: its steps, goodput, largest other row, and how it ended."""
    train_ns = sum(row.ns for row in start.rows if row.kind == "train")
    rest = max((row for row in start.rows if row.kind != "train"), key=lambda r: r.ns, default=None)
    # Only the newest one may still run.
    is_open = is_newest and start.ending == "lost"
    return StartTexts(
        str(start.incarnation + 1),
        str(len(start.ranks)),
        "none" if start.last_step is None else f"{start.first_step} to {start.last_step}",
        format_wall(start.wall_ns),
        units.format_percent(train_ns / start.wall_ns) if start.wall_ns else "",
        f"{ROW_NAMES.get(rest.kind, rest.kind)} {format_wall(rest.ns)}" if rest else "",
        f"{start.ending}{', or running' * is_open}",
    )
