"""How true HTA, TraceLens and stepsplit are on simulated jobs: python tests/benchmarks/accuracy.py

Prints the table of docs/accuracy.md. HTA runs itself, TraceLens by its definitions (peers.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from simulator.scenarios import SCENARIOS
from simulator.truth import TrueSplit, truth_of
from support.ground_truth import Trial, first_blamed, trial

from benchmarks.peers import PeerSplit, hta_split, tracelens_split
from benchmarks.table import in_markdown
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.report.step_rows import StepRow, select_full_steps

NAMES = (
    "tp", "tp_slow_rank", "ddp_two_hosts", "ddp_host_stall", "fsdp_four_hosts", "cp_ring",
    "ep_hot_expert", "pp_1f1b", "pp_zb_h1", "pp_slow_stage", "tp_pp_dp_slow_rank",
)  # fmt: skip
_HEAD = (
    "job", "by", "compute", "moves data", "skew", "bubble", "rest", "misplaced", "first in blame",
)  # fmt: skip
_PARTS = (
    ("compute_ns",), ("collective_ns", "p2p_ns"), ("skew_ns",), ("bubble_ns",),
    ("idle_ns", "copy_ns"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of all ranks' time, 0..1; None is what a tool does not tell."""

    compute: float
    moving: float
    skew: float | None
    bubble: float | None
    rest: float


def rows_of(name: str, seed: int) -> list[tuple[str, ...]]:
    """What really happened, and what each tool says of it."""
    with tempfile.TemporaryDirectory() as folder:
        found = trial(SCENARIOS[name](seed), Path(folder))
        traces = read_recording([folder]).traces
        hta, lens = _peer(hta_split(traces)), _peer(tracelens_split(traces))
    true, ours = _true(found), _ours(found)
    cause = found.scenario.cause
    planted = f"rank {cause.rank} {cause.cause}" if cause else "nothing planted"
    blamed = (
        f"rank {first_blamed(found.report)[0]} {first_blamed(found.report)[1]}" if cause else ""
    )
    return [
        _row(name, "truth", true, true, planted),
        _row("", "HTA", hta, true, "none"),
        _row("", "TraceLens", lens, true, "none"),
        _row("", "stepsplit", ours, true, blamed),
    ]


def _row(name: str, tool: str, shares: Shares, true: Shares, blamed: str) -> tuple[str, ...]:
    parts = (shares.compute, shares.moving, shares.skew, shares.bubble, shares.rest)
    shown = ("" if part is None else f"{100 * part:.1f} %" for part in parts)
    wrong = "" if tool == "truth" else f"{100 * _misplaced(shares, true):.1f} %"
    return (name, tool, *shown, wrong, blamed)


def _misplaced(shares: Shares, true: Shares) -> float:
    """Which part of the time is in a wrong place: half of all differences."""
    pairs = (
        (shares.compute, true.compute),
        (shares.moving, true.moving),
        (shares.skew or 0, true.skew or 0),
        (shares.bubble or 0, true.bubble or 0),
        (shares.rest, true.rest),
    )
    return sum(abs(one - other) for one, other in pairs) / 2


def _true(found: Trial) -> Shares:
    rows = [split for split in truth_of(found.run).splits if not split.partial]
    return _shares(rows, sum(row.end_ns - row.start_ns for row in rows))


def _ours(found: Trial) -> Shares:
    rows = select_full_steps(found.report.steps)
    return _shares(rows, sum(row.step_ns for row in rows))


def _shares(rows: Sequence[StepRow] | Sequence[TrueSplit], whole_ns: int) -> Shares:
    sums = [sum(getattr(row, name) for row in rows for name in names) for names in _PARTS]
    return Shares(*(part / whole_ns for part in sums))


def _peer(rows: Sequence[PeerSplit]) -> Shares:
    """TraceLens' parts are of calls, hidden or not, and may be more than the time in all."""
    waits = sum(row.wait_ns or 0 for row in rows)
    separated = any(row.wait_ns is not None for row in rows)
    parts = [sum(r.compute_ns for r in rows), sum(r.communication_ns for r in rows)]
    idle = sum(row.idle_ns for row in rows)
    whole = sum(parts) + waits + idle or 1
    skew = waits / whole if separated else None
    return Shares(parts[0] / whole, parts[1] / whole, skew, None, idle / whole)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    logging.disable(logging.WARNING)
    seed = parser.parse_args().seed
    rows = [row for name in NAMES for row in rows_of(name, seed)]
    sys.stdout.write(f"{in_markdown([_HEAD, *rows])}\n")


if __name__ == "__main__":
    main()
