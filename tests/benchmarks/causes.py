"""How often the right cause is first, and how true its size is: python tests/benchmarks/causes.py

Prints the table of docs/causes.md, from simulated jobs with one thing wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from simulator.planted import PLANTED
from support.planted_causes import NOTHING, PlantedResult, examine_planted

from benchmarks.table import in_markdown

_HEAD = ("planted", "layout", "costs", "first", "size off by: median", "worst", "within 10 %")


def trials(name: str, seeds: Sequence[int]) -> list[PlantedResult]:
    """What is found in the job of that name, seed by seed."""
    found = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(examine_planted(name, seed, Path(folder)))
    return found


def row_of(name: str, found: Sequence[PlantedResult]) -> tuple[str, ...]:
    """One line of the table."""
    cause, layout = name.split()
    right = [one for one in found if one.first]
    first = f"{len(right)} of {len(found)}"
    if cause == NOTHING:
        worst = max((f.gain_ns / one.step_ns for one in found for f in one.findings), default=0.0)
        return (cause, layout, "", first, "", f"{100 * worst:.1f} % of the step", "")
    costs = sorted(one.gain_ns / one.step_ns for one in found)
    off = sorted(abs(one.off) for one in right) or [1.0]
    near = sum(each <= 0.1 for each in off) if right else 0
    return (
        cause, layout, f"{100 * costs[0]:.1f} to {100 * costs[-1]:.1f} %", first,
        f"{100 * off[len(off) // 2]:.1f} %", f"{100 * off[-1]:.1f} %", f"{near} of {len(right)}",
    )  # fmt: skip


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help="part of the names to run")
    chosen = parser.parse_args()
    rows = [_HEAD]
    for name in PLANTED:
        if chosen.only in name:
            rows.append(row_of(name, trials(name, range(1, chosen.seeds + 1))))
            sys.stderr.write(f"{' | '.join(rows[-1])}\n")
    sys.stdout.write(f"{in_markdown(rows)}\n")


if __name__ == "__main__":
    main()
