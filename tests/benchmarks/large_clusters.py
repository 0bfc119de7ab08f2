"""Published runs on large clusters as the model predicts them, and what a smaller run of each adds.

python tests/benchmarks/large_clusters.py [--gpus 1024]

By publisher: runs, mean error of the step by constants that know none of its runs, how far they are
too slow or too fast, and its share of the mean of all. Then the same error if the publisher's own
runs of that model on at most half of the GPUs set one factor, as a simulator has that measures the
operators of a cluster; and the spread of runs that publishers give of the same layout.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

if not __package__:  # run as a file: its folder is no place to import from, the one above is
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.table import in_markdown
from stepsplit.analyzer.validation.predictions import UnseenRun, predict_published
from stepsplit.analyzer.validation.published_runs import ZERO_FAMILY


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


def list_publishers(large: Sequence[UnseenRun]) -> Iterator[tuple[str, ...]]:
    """A row for each publisher, the one with the largest part of the mean first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in large:
        groups[run.case.source].append(1 / run.ratio - 1)
    yield "publisher", "runs", "mean error", "too slow (+) or fast (-)", "points"
    for source, errors in sorted(groups.items(), key=lambda one: -sum(map(abs, one[1]))):
        points = 100 * sum(map(abs, errors)) / len(large)
        mean, lean = fmean(map(abs, errors)), fmean(errors)
        yield source, str(len(errors)), f"{mean:.1%}", f"{lean:+.1%}", f"{points:.1f}"


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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--gpus", type=int, default=1024, help="least number of GPUs")
    least = options.parse_args().gpus
    runs = predict_published()
    large = [run for run in runs if count_gpus(run) >= least]
    sys.stdout.write(in_markdown(list(list_publishers(large))) + "\n\n")
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
    if spreads := list_spreads(large):
        sys.stdout.write(
            f"runs of the same layout: {len(spreads)}, {fmean(spreads):.1%} from their median\n"
        )


if __name__ == "__main__":
    main()
