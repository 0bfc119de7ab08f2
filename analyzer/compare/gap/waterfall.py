"""From the predicted to the measured step: the parts of the difference, which add up to it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.compare.gap.exposed import explained_calls
from stepsplit.analyzer.compare.gap.price import Price
from stepsplit.analyzer.compare.gap.seen import Seen
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.build import why_idle
from stepsplit.analyzer.report.report import ComparedStage, Finding, GapRow, Report


@dataclass(frozen=True, slots=True)
class Sides:
    """One stage, measured and predicted, with what is known of why they differ."""

    seen: Seen
    prediction: Prediction
    price: Price
    report: Report
    stage: ComparedStage

    def gap_ns(self, bucket: str) -> int:
        """Measured - predicted of one bucket."""
        difference = self.stage.measured - self.stage.predicted
        return difference.buckets_ns[BUCKETS.index(bucket)]

    def says(self, bucket: str, more: str, less: str) -> str:
        """more where the bucket is larger than predicted, else less."""
        return more if self.gap_ns(bucket) > 0 else less


def waterfall(sides: Sides) -> tuple[GapRow, ...]:
    """The parts, in the order of the buckets; none of them zero."""
    rows = [
        *_compute(sides),
        *explained_calls(sides.seen, sides.prediction, sides.price, sides.stage),
        GapRow("skew", "skew", None, sides.gap_ns("skew"), _skew_words(sides)),
        *_bubble(sides),
        GapRow("copy", "copy", None, sides.gap_ns("copy"), _copy_words(sides)),
        GapRow("idle", "idle", None, sides.gap_ns("idle"), _idle_words(sides)),
    ]
    for bucket in BUCKETS:
        told, gap = sum(row.ns for row in rows if row.bucket == bucket), sides.gap_ns(bucket)
        assert told == gap, f"the waterfall tells {told} ns of {gap} in {bucket}"
    return tuple(row for row in rows if row.ns)


def _compute(sides: Sides) -> list[GapRow]:
    """What a slow rank loses to its peers, and the rest: kernels or work."""
    gap, rank = sides.gap_ns("compute"), sides.stage.rank
    lost = sum(one.lost_ns for one in sides.report.slow_kernels if one.rank == rank)
    slow = min(lost, max(0, gap))
    words = sides.says(
        "compute",
        "kernels take longer than the model says, or there are more of them",
        "kernels take less than the model says, or there are fewer of them",
    )
    return [
        GapRow("slow_rank", "compute", None, slow, f"rank {rank} is slower than its peers"),
        GapRow("kernels", "compute", None, gap - slow, words),
    ]


def _skew_words(sides: Sides) -> str:
    """Who is most waited for in the step, of all ranks."""
    blamed: dict[tuple[int, str], int] = defaultdict(int)
    for one in sides.seen.found.blame:
        if one.rank is not None and one.step == sides.stage.step and one.skew_ns:
            blamed[one.rank, one.cause] += one.skew_ns
    words = sides.says("skew", "more", "less") + " waiting within the stage than predicted"
    if not blamed:
        return words
    rank, cause = max(blamed, key=lambda key: blamed[key])
    return f"{words}, most for rank {rank} ({cause})"


def _bubble(sides: Sides) -> list[GapRow]:
    """What uneven stages make of the bubble, and the rest; few microbatches the model knows."""
    gap, cause = sides.gap_ns("bubble"), _uneven(sides)
    uneven = 0 if cause is None else min(cause.gain_ns, max(0, gap))
    words = sides.says("bubble", "more", "less") + " waiting for other stages than predicted"
    return [
        GapRow("uneven_stages", "bubble", "pp", uneven, cause.message if cause else ""),
        GapRow("bubble", "bubble", "pp", gap - uneven, words + _grid_words(sides)),
    ]


def _uneven(sides: Sides) -> Finding | None:
    """Stages of unequal compute, where another stage has more than the one that the model takes for
    the slowest: its waiting is not in the predicted bubble."""
    return next(
        (one for one in sides.report.findings
         if one.code == "uneven_stages" and sides.stage.rank not in one.ranks), None,
    )  # fmt: skip


def _grid_words(sides: Sides) -> str:
    grid = sides.report.pipeline
    if grid is None:
        return ""
    told = f"; the pipeline's grid idles {units.percent(grid.bubble_fraction)}"
    if grid.ideal_bubble_fraction is not None:
        told += f", {grid.schedule} itself {units.percent(grid.ideal_bubble_fraction)}"
    return f"{told}, the model's {units.percent(sides.prediction.bubble_fraction)}"


def _copy_words(sides: Sides) -> str:
    if not sides.stage.predicted.copy_ns:
        return "copies that the model does not have"
    return f"copies take {sides.says('copy', 'more', 'less')} than predicted"


def _idle_words(sides: Sides) -> str:
    """With the largest cause in the step, where something idles."""
    found = sides.seen.found
    rank = sides.seen.rank_of(sides.stage)
    window = rank.numbers.index(sides.stage.step)
    causes = found.detail.idle[found.ranks.index(rank)]
    why = why_idle(one for one in causes if one.window == window)
    words = f"nothing runs for {sides.says('idle', 'longer', 'less')} than predicted"
    return f"{words}: {why}" if why else words
