"""Fits the efficiencies of a GPU family on every second published run, and prints them as TOML.

python tests/benchmarks/fit.py [--family ampere]

The constants have the least mean of |log(predicted / published)|. The rows that were fitted are
printed with them: validation reports the others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from dataclasses import replace

from stepsplit.analyzer.model.config import Efficiency
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.published_runs import Case, list_step_time_cases
from stepsplit.analyzer.validation.tables import Published, compute_percentile_90

BOUNDS = {
    "gemm": (0.3, 0.9),
    "attention": (0.1, 0.8),
    "unfused_attention": (0.1, 0.8),
    "memory": (0.35, 0.9),
    "launch_ns": (2e3, 6e3),
    "jitter": (0.001, 0.05),
}
"""What a kernel can reach at all: the best matrix product measured (MAMF) is 0.87 on A100, a copy
reaches 0.9 of the memory's bandwidth, a launch takes a few microseconds."""
START = {
    "gemm": 0.8, "attention": 0.4, "unfused_attention": 0.4, "memory": 0.75, "launch_ns": 4e3,
    "jitter": 0.02,
}  # fmt: skip
TRIES = 600
HELD_OUT = "torchtitan"
"""A whole family that no constant knows: what a model of a framework says of another table."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--family", action="append")
    wanted = options.parse_args().family or ["ampere", "hopper", "blackwell"]
    cases = [case for case in list_step_time_cases(Published()) if case.family != HELD_OUT]
    for family in wanted:
        _family(family, [case for case in cases if case.job.hardware.family == family])


def _family(family: str, cases: list[Case]) -> None:
    ordered = sorted(cases, key=likeness)
    fitted, rest = ordered[::2], ordered[1::2]
    best = fit(replace(ordered[0].job.hardware.efficiency, **START), fitted)
    off = compute_percentile_90([abs(math.expm1(error(best, case))) for case in rest])
    lines = [f"[{family}]", *(f"{name} = {getattr(best, name):.4g}" for name in BOUNDS)]
    lines += [f"error = {off:.2g}", *_seen(fitted)]
    lines += _describe("fitted", best, fitted) + _describe("rest", best, rest)
    sys.stdout.write("\n".join(lines) + "\n")


def _seen(fitted: list[Case]) -> list[str]:
    """What the fitted runs were, and which."""
    seen = {
        "frameworks": {case.job.training.framework for case in fitted},
        "devices": {case.job.hardware.name for case in fitted},
        "dtypes": {case.job.training.dtype for case in fitted},
    }
    lines = [f"{key} = {json.dumps(sorted(names))}" for key, names in seen.items()]
    return [*lines, "rows = [", *(f'  "{case.id}",' for case in fitted), "]"]


def _describe(name: str, best: Efficiency, cases: list[Case]) -> list[str]:
    off = [math.expm1(error(best, case)) for case in cases]
    mean, worst = sum(map(abs, off)) / len(off), max(map(abs, off))
    lines = [f"#   {case.id} {one:+.1%}" for case, one in zip(cases, off, strict=True)]
    return [*lines, f"# {name}: {len(off)} rows, mean {mean:.1%}, worst {worst:.1%}"]


def likeness(case: Case) -> tuple[object, ...]:
    """Puts like runs beside each other, so that each half holds some of every kind."""
    layout, model, recipe = case.job.parallel, case.job.model, case.job.training
    shape = (layout.cp, layout.ep, layout.tp, layout.pp, model.layers * model.hidden)
    return (case.table, case.job.hardware.name, *shape, recipe.seq_len, layout.dp, case.id)


def fit(start: Efficiency, cases: list[Case]) -> Efficiency:
    """The constants of least loss that a random walk of shrinking steps finds (fixed seed)."""
    draw, best, least = random.Random(0), start, loss(start, cases)
    for turn in range(TRIES):
        width = 0.2 * (1 - turn / TRIES)
        other = replace(best, **{name: _near(draw, best, name, width) for name in BOUNDS})
        found = loss(other, cases)
        if found < least:
            best, least = other, found
    return best


def _near(draw: random.Random, best: Efficiency, name: str, width: float) -> float:
    low, high = BOUNDS[name]
    return min(high, max(low, getattr(best, name) * math.exp(draw.gauss(0, width))))


def loss(efficiency: Efficiency, cases: list[Case]) -> float:
    """The mean absolute error of each kind of run, added up: a large table counts like a small."""
    kinds: dict[str, list[float]] = {}
    for case in cases:
        kinds.setdefault(case.family, []).append(abs(error(efficiency, case)))
    return sum(sum(off) / len(off) for off in kinds.values())


def error(efficiency: Efficiency, case: Case) -> float:
    """log(predicted / published) of the step time."""
    hardware = replace(case.job.hardware, efficiency=efficiency)
    predicted = predict(replace(case.job, hardware=hardware))
    return math.log(predicted.split.step_ns / case.step_ns)


if __name__ == "__main__":
    main()
