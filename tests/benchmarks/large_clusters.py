"""Published runs on large clusters as the model predicts them, and what a smaller run of each adds.

python tests/benchmarks/large_clusters.py [--gpus 1024] [--terms]

By publisher, number of GPUs and layout: runs, mean error of the step by constants that know none of
its runs, how far they are too slow or too fast, and its share of the mean of all. Then the same
error if the publisher's own runs of that model on at most half of the GPUs set one factor, as a
simulator has that measures the operators of a cluster; what would be left if a factor of each
publisher were known; and the spread of runs that publishers give of the same layout. --terms tries
parts of the step that may take longer than predicted, each by as much as the other publishers' runs
say, instead.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import in_markdown
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.predict import TimedStep, time_step
from stepsplit.analyzer.validation.predictions import UnseenRun, build_unseen_job, predict_published
from stepsplit.analyzer.validation.published_runs import ZERO_FAMILY, list_published_cases
from stepsplit.analyzer.validation.tables import Case


def count_gpus(run: UnseenRun) -> int:
    return run.case.job.parallel.world_size


def list_own_runs(run: UnseenRun, runs: Sequence[UnseenRun]) -> list[UnseenRun]:
    """The publisher's runs of the same model, length and dtype on at most half of the GPUs."""
    job = run.case.job
    return [
        other
        for other in runs
        if other.case.source == run.case.source
        and other.case.family == run.case.family
        and count_gpus(other) <= count_gpus(run) / 2
        and other.case.job.model == job.model
        and other.case.job.training.seq_len == job.training.seq_len
        and other.case.job.training.dtype == job.training.dtype
    ]


SIZES = (10_000, 4_096, 2_048)
"""From so many GPUs on, a group of its own."""


def describe_size(run: UnseenRun) -> str:
    reached = [size for size in SIZES if count_gpus(run) >= size]
    return f"from {reached[0]:,}" if reached else f"below {SIZES[-1]:,}"


def describe_layout(run: UnseenRun) -> str:
    layout = run.case.job.parallel
    parts = {"pp": layout.pp > 1, "tp": layout.tp > 1, "cp": layout.cp > 1, "ep": layout.ep > 1}
    sharded = ["zero-3"] if layout.zero == 3 else []
    return " ".join(sharded + [name for name, is_used in parts.items() if is_used]) or "dp alone"


GROUPS: Mapping[str, Callable[[UnseenRun], str]] = {
    "publisher": lambda run: run.case.source,
    "GPUs": describe_size,
    "layout": describe_layout,
}


def list_groups(
    large: Sequence[UnseenRun], name: str, describe: Callable[[UnseenRun], str]
) -> Iterator[tuple[str, ...]]:
    """A row for each group, the one with the largest part of the mean first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in large:
        groups[describe(run)].append(1 / run.ratio - 1)
    yield name, "runs", "mean error", "too slow (+) or fast (-)", "points"
    for group, errors in sorted(groups.items(), key=lambda one: -sum(map(abs, one[1]))):
        points = 100 * sum(map(abs, errors)) / len(large)
        mean, lean = fmean(map(abs, errors)), fmean(errors)
        yield group, str(len(errors)), f"{mean:.1%}", f"{lean:+.1%}", f"{points:.1f}"


def list_beside_median(large: Sequence[UnseenRun]) -> list[tuple[float, float]]:
    """The errors of publishers with several runs, as they are and by the median of their own."""
    sources: dict[str, list[float]] = defaultdict(list)
    for run in large:
        sources[run.case.source].append(run.ratio)
    return [
        (abs(1 / ratio - 1), abs(median(ratios) / ratio - 1))
        for ratios in sources.values()
        if len(ratios) > 1
        for ratio in ratios
    ]


def list_spreads(large: Sequence[UnseenRun]) -> list[float]:
    """How far runs of the same layout are from their median."""
    groups: dict[object, list[int]] = defaultdict(list)
    for run in large:
        job = run.case.job
        layout, training = job.parallel, job.training
        key = (
            job.model, job.hardware.name, layout.tp, layout.pp, layout.cp, layout.ep,
            layout.dp_replicate, layout.dp_shard, training.micro_batch, training.global_batch,
            training.seq_len, training.dtype, training.recompute,
        )  # fmt: skip
        groups[key].append(run.case.step_ns)
    return [
        abs(step_ns / median(steps) - 1)
        for steps in groups.values()
        if len(steps) > 1
        for step_ns in steps
    ]


def _sum_exposed(step: TimedStep, axis: str) -> int:
    """The exposed communication of the slowest stage along an axis, in ns."""
    found = step.list_communication(step.splits.index(step.split))
    return sum(one.exposed_ns for one in found if one.message.axis.startswith(axis))


TERMS: Mapping[str, Callable[[TimedStep], float]] = {
    "nothing": lambda step: 0.0,
    "compute x log2 of the ranks": lambda step: (
        step.split.compute_ns * math.log2(step.job.parallel.world_size)
    ),
    "waits for the slowest node": lambda step: step.split.skew_ns,
    "bubble": lambda step: step.split.bubble_ns,
    "exposed gradients and weights": lambda step: _sum_exposed(step, "dp"),
    "exposed tp": lambda step: _sum_exposed(step, "tp"),
    "messages between stages": lambda step: _sum_exposed(step, "pp"),
    "the same time in each step": lambda step: 1e9,
    "the same share of each step": lambda step: step.split.step_ns,
}
"""What may take longer in a large cluster than predicted, in ns; all but the first by a factor."""

WORST = 0.2
"""Measured over predicted steps that differ more count as if they differed by so much."""


def list_terms(cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """A row for each term: the mean error if it takes as much longer as the other publishers' runs
    say, and for how many publishers that is better and worse by 0.1 points."""
    steps = [time_step(build_unseen_job(case), Rates()) for case in cases]
    sources = np.array([case.source for case in cases])
    runs = Counter(sources.tolist())
    weights = np.array([runs[source] ** -0.5 for source in sources])
    measured = np.array([case.step_ns for case in cases])
    predicted = np.array([step.split.step_ns for step in steps])
    missing = np.clip(measured / predicted - 1, -WORST, WORST)
    before = abs(predicted / measured - 1)
    yield "term", "mean error", "better for", "worse for"
    for name, compute in TERMS.items():
        shares = np.array([compute(step) for step in steps]) / predicted
        after = before.copy()
        for source in runs:
            known, left = sources != source, sources == source
            square = (weights * shares**2)[known].sum()
            factor = (weights * shares * missing)[known].sum() / square if square else 0.0
            after[left] = abs(predicted * (1 + factor * shares) / measured - 1)[left]
        gains = [(before - after)[sources == source].mean() for source in runs]
        better, worse = (sum(sign * gain > 0.001 for gain in gains) for sign in (1, -1))
        yield name, f"{after.mean():.1%}", str(better), str(worse)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gpus", type=int, default=1024, help="least number of GPUs")
    options.add_argument("--terms", action="store_true", help="what may take longer")
    given = options.parse_args()
    least = given.gpus
    if given.terms:
        cases = list_published_cases().cases
        large_cases = [case for case in cases if case.job.parallel.world_size >= least]
        sys.stdout.write(in_markdown(list(list_terms(large_cases))) + "\n")
        return
    runs = predict_published()
    large = [run for run in runs if count_gpus(run) >= least]
    for name, describe in GROUPS.items():
        sys.stdout.write(in_markdown(list(list_groups(large, name, describe))) + "\n\n")
    known = [run for run in large if run.case.family != ZERO_FAMILY]
    for name, some in (("all", large), ("without ZeRO-3 of 2021", known)):
        own = [(run, list_own_runs(run, runs)) for run in some]
        factors = [(run, median(other.ratio for other in others)) for run, others in own if others]
        before = fmean(abs(1 / run.ratio - 1) for run, _ in factors)
        after = fmean(abs(factor / run.ratio - 1) for run, factor in factors)
        sys.stdout.write(
            f"{name}: {len(some)} runs {fmean(abs(1 / run.ratio - 1) for run in some):.1%} off;"
            f" {len(factors)} with runs of its own on fewer GPUs {before:.1%}, by these"
            f" {after:.1%}\n"
        )
    if several := list_beside_median(large):
        before, after = map(fmean, zip(*several, strict=True))
        sys.stdout.write(
            f"publishers with several runs: {len(several)} runs {before:.1%} off; with a factor of"
            f" each publisher, known from these very runs, {after:.1%}\n"
        )
    if spreads := list_spreads(large):
        sys.stdout.write(
            f"runs of the same layout: {len(spreads)}, {fmean(spreads):.1%} from their median\n"
        )


if __name__ == "__main__":
    main()
