"""The words and colors of the rows of a ledger, for the terminal and the pages."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer import units
from stepsplit.analyzer.report.ledger import ROW_KINDS, Ledger


@dataclass(frozen=True, slots=True)
class RowWords:
    """A kind of row: its name, what it is in a sentence, and its color."""

    name: str
    text: str
    color: str


ROW_WORDS = {
    "train": RowWords("steps that count", "training steps, each number once", "#2f7d4f"),
    "redone": RowWords(
        "steps done again", "steps with a number that an earlier start had reached", "#c0563f"
    ),
    "evaluation": RowWords(
        "evaluation", "from model.eval() to model.train(), or marked", "#4a78b5"
    ),
    "checkpoint": RowWords("checkpoint", "torch.save, DCP or marked", "#7b62a8"),
    "compile": RowWords("compile", "torch.compile, also within a step", "#b08a2e"),
    "launcher": RowWords("launcher", "from the command to the rank's process", "#8f8f8f"),
    "imports": RowWords(
        "imports", "from the process to the import of torch's optimizers", "#a3a3a3"
    ),
    "process_group": RowWords("process group", "init_process_group", "#6d8a96"),
    "load": RowWords("load", "torch.load and DCP before the first step", "#9a83c2"),
    "startup": RowWords(
        "other start-up", "model, data and the first step, until that has ended", "#b9b9b9"
    ),
    "quorum": RowWords("quorum", "marked", "#5f9ea0"),
    "heal": RowWords("heal", "marked", "#cd853f"),
    "commit": RowWords("commit", "marked", "#708090"),
    "stall": RowWords(
        "stalls and hangs", "what steps over five times the usual one have beyond it", "#d9822b"
    ),
    "restart_gap": RowWords(
        "restart gaps", "from the last word of a start to the begin of the next", "#9c2f2f"
    ),
    "shutdown": RowWords("shutdown", "from the last step to the end", "#777777"),
    "other": RowWords("other", "marked as such", "#5c6670"),
    "unknown": RowWords("unknown", "no note accounts for it", "#d0d0d0"),
}
"""By kind; docs/ledger.md has the definitions."""

assert tuple(ROW_WORDS) == ROW_KINDS, "a word for each kind of row"


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
    """The goodput, with "at most" where steps done again are not known."""
    share = units.format_percent(ledger.goodput)
    return f"at most {share}" if ledger.is_goodput_bound else share
