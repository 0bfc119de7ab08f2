"""How often the gate is right: python tests/benchmarks/gate.py

Prints the table of docs/check.md: 2,000 trials a cell, with noise between runs of 2, 5 and 10 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.gate_trials import SHAPES, Cell, answers

from benchmarks.table import in_markdown

SDS = (0.02, 0.05, 0.10)
SIDES = ((3, 3), (5, 5), (10, 10), (10, 3), (3, 10))
WORSE = 0.10
_HEAD = (
    "runs", "noise of runs", "sd", "nothing changed: alarms", "pass", "10 % worse: found", "passed",
    "a call added: found",
)  # fmt: skip


def row(sides: tuple[int, int], shape: str, sd: float, trials: int, seed: int) -> Sequence[str]:
    """One line of the table."""
    same = answers(Cell(*sides, shape, sd), trials, seed)
    worse = answers(Cell(*sides, shape, sd, WORSE), trials, seed)
    added = answers(Cell(*sides, shape, sd, added=True), trials // 10, seed)
    shares = [
        same["regressed"] / trials, same["pass"] / trials, worse["regressed"] / trials,
        worse["pass"] / trials, added["regressed"] / (trials // 10),
    ]  # fmt: skip
    cells = [f"{100 * share:.2f} %" for share in shares]
    return (f"{sides[0]} against {sides[1]}", shape, f"{100 * sd:.0f} %", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    cells = product(SIDES, SHAPES, SDS)
    rows = [row(*cell, chosen.trials, chosen.seed) for cell in cells]
    sys.stdout.write(in_markdown([_HEAD, *rows]) + "\n")


if __name__ == "__main__":
    main()
