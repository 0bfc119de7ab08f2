"""The words of a ledger for people."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer import units
from stepsplit.analyzer.report.ledger import ROW_KINDS, IncarnationLedger, Ledger, LedgerRow

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


def format_row(row: LedgerRow, wall_ns: int) -> RowTexts:
    """The texts of a row; a kind of a later version has its own name."""
    return RowTexts(
        ROW_NAMES.get(row.kind, row.kind),
        format_wall(row.ns),
        units.format_percent(row.ns / wall_ns if wall_ns else 0.0),
        units.format_count(row.count) if row.count else "",
        format_gpu_hours(row.gpu_hours),
    )


def format_gpu_hours(hours: float) -> str:
    """GPU hours, without the unit."""
    return f"{hours:.3g}"


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
    texts = rest and format_row(rest, start.wall_ns)
    # Only the newest one may still run.
    is_open = is_newest and start.ending == "lost"
    return StartTexts(
        str(start.incarnation + 1),
        str(len(start.ranks)),
        "none" if start.last_step is None else f"{start.first_step} to {start.last_step}",
        format_wall(start.wall_ns),
        units.format_percent(train_ns / start.wall_ns) if start.wall_ns else "",
        f"{texts.name} {texts.time}" if texts else "",
        f"{start.ending}{', or running' * is_open}",
    )
