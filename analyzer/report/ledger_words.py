"""The words of a ledger for people."""

from __future__ import annotations

from stepsplit.analyzer import units
from stepsplit.analyzer.report.ledger import ROW_KINDS, Ledger

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
