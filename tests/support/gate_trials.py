"""Trials of the gate: runs drawn with known noise and a known effect, judged.

A run has its own level, off by the run-to-run noise, and steps around it that follow one another
(each keeps half of what the step before was off by). The facts of a run are the medians of its
steps, as the gate takes them from a report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from stepsplit.analyzer.regression.checks import Budget, parse_budget
from stepsplit.analyzer.regression.judge import check_candidate
from stepsplit.analyzer.regression.metrics import CallMetrics, RunMetrics
from support.gate_builders import CALLS, run

STEPS, STEP_SD, KEPT = 10, 0.03, 0.5
METRICS = {"exposed_comm": 0.12, "step": 3.0e8}
RULES = tuple(parse_budget(rule) for rule in ("exposed_comm:5%", "step:5%", "calls:exact"))
ADDED = CallMetrics("tp", "all_reduce", "float32", 4_096, 64, False, 20_000, 0)

Draw = Callable[[np.random.Generator, int], np.ndarray]


def _normal(dice: np.random.Generator, count: int) -> np.ndarray:
    return dice.normal(size=count)


def _skewed(dice: np.random.Generator, count: int) -> np.ndarray:
    """Most runs a little faster than usual, a few much slower."""
    return dice.exponential(size=count) - 1


def _disturbed(dice: np.random.Generator, count: int) -> np.ndarray:
    """One run in ten is slowed down by somebody else."""
    odd = dice.random(count) < 0.1
    return (dice.normal(size=count) + 4 * (odd - 0.1)) / np.sqrt(1 + 16 * 0.09)


SHAPES: Mapping[str, Draw] = {"normal": _normal, "skewed": _skewed, "disturbed": _disturbed}


@dataclass(frozen=True)
class Cell:
    """Runs of the baseline and of the candidate, the shape and the sd of the noise between runs (a
    ratio), and what the candidate has more: of each metric (a ratio), and calls."""

    baseline: int
    candidate: int
    shape: str
    sd: float
    effect: float = 0.0
    added: bool = False


def answers(cell: Cell, trials: int, seed: int, rules: Sequence[Budget] = RULES) -> Counter[str]:
    """How often the gate says what in so many trials."""
    # Each cell draws numbers of its own.
    shape = list(SHAPES).index(cell.shape)
    ratios = (round(cell.sd * 1e4), round(cell.effect * 1e4))
    own_seed = (cell.baseline, cell.candidate, shape, *ratios, int(cell.added))
    dice = np.random.default_rng([seed, *own_seed])
    found: Counter[str] = Counter()
    for _ in range(trials):
        before = _side("base", cell.baseline, cell, 0.0, CALLS, dice)
        calls = (*CALLS, ADDED) if cell.added else CALLS
        own = _side("own", cell.candidate, cell, cell.effect, calls, dice)
        found[check_candidate(own, before, rules).answer] += 1
    return found


def _side(
    name: str, count: int, cell: Cell, effect: float, calls: Sequence[CallMetrics],
    dice: np.random.Generator,
) -> list[RunMetrics]:  # fmt: skip
    levels = {metric: SHAPES[cell.shape](dice, count) * cell.sd for metric in METRICS}
    return [
        run(
            f"{name}{i}",
            {
                metric: usual * (1 + effect) * (1 + levels[metric][i]) * (1 + _steps(dice))
                for metric, usual in METRICS.items()
            },
            calls=calls,
        )
        for i in range(count)
    ]


def _steps(dice: np.random.Generator) -> float:
    """The median of a run's steps, by how much they are off."""
    fresh = dice.normal(size=STEPS) * STEP_SD * np.sqrt(1 - KEPT**2)
    off = [float(dice.normal()) * STEP_SD]
    for one in fresh:
        off.append(KEPT * off[-1] + float(one))
    return median(off[1:])
