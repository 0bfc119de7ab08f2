"""Changes of the level of the step time, found as a watched training runs.

The rule: the median of five points is more than 5 % and more than four MAD of such medians away
from the median of the fifty points before them. The floor on the effect prevents more false alarms
than any statistic would on correlated noise. While a change is open, its reference is frozen; it
ends when the level is back within half of the difference. A point is the median of the unprofiled
steps of the interval between two samples, of at least 20.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from statistics import median

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.units import (
    format_milliseconds,
    format_signed_milliseconds,
    format_signed_percent,
)
from stepsplit.analyzer.watch.records import WatchSample
from stepsplit.collectors.watch_notes import RankWindow

REFERENCE_POINTS, RECENT_POINTS = 50, 5

LEAST_CHANGE, LEAST_MADS = 0.05, 4.0

POINT_STEPS = 20
"""Least steps of a point."""


class Point(Struct, frozen=True):
    """The median of some unprofiled steps, and the first of them."""

    step: int
    unix_ns: int
    step_ns: float


class StepTimeChange(Struct, frozen=True):
    """A change of the step time: since which step, and both levels. is_over: it is back again."""

    step: int
    unix_ns: int
    before_ns: float
    after_ns: float
    is_over: bool = False

    def describe(self) -> str:
        """One sentence."""
        after, before = format_milliseconds(self.after_ns), format_milliseconds(self.before_ns)
        if self.is_over:
            return f"steps take {after} again, as before step {self.step}"
        change = format_signed_percent(self.after_ns / self.before_ns - 1)
        return f"steps take {after} since step {self.step}, {before} before ({change})"


class SampleSplit(Struct, frozen=True):
    """A sample in short: its mean split over the ranks, and the rank that others wait for most."""

    step: int
    mean: Split
    worst_rank: int
    caused_wait_ns: int


class StepLevel(Struct, frozen=True):
    """What the rule knows: the points, the windows of the next one, and the open change."""

    points: tuple[Point, ...] = ()
    windows: tuple[RankWindow, ...] = ()
    change: StepTimeChange | None = None

    def add(self, window: RankWindow, point_steps: int) -> tuple[StepLevel, StepTimeChange | None]:
        """Adds a window of one rank.

        Args:
            window: The window, after those before it.
            point_steps: The steps of a point.

        Returns:
            The level with it; and the change that begins or ends with it, or None.
        """
        windows = (*self.windows, window)
        if sum(each.steps for each in windows) < max(point_steps, POINT_STEPS):
            return replace(self, windows=windows), None
        first = windows[0]
        step_ns = _find_weighted_median(windows)
        points = (*self.points, Point(first.first_step, first.start_unix_ns, step_ns))
        if self.change is None:
            change = find_change(points)
            kept = points[-(REFERENCE_POINTS + RECENT_POINTS) :]
            return StepLevel(kept, (), change), change
        return self._follow(points, self.change)

    def _follow(
        self, points: tuple[Point, ...], change: StepTimeChange
    ) -> tuple[StepLevel, StepTimeChange | None]:
        """Whether the open change goes on; it becomes the reference once it has lasted."""
        recent = median(each.step_ns for each in points[-RECENT_POINTS:])
        if abs(recent - change.before_ns) < abs(change.after_ns - change.before_ns) / 2:
            over = replace(change, after_ns=recent, is_over=True)
            before = tuple(each for each in points if each.step < change.step)
            return StepLevel((*before, *points[-RECENT_POINTS:])[-REFERENCE_POINTS:]), over
        since = tuple(each for each in points if each.step >= change.step)
        if len(since) >= REFERENCE_POINTS + RECENT_POINTS:
            return StepLevel(since), None
        return StepLevel(points, (), change), None


def find_change(points: Sequence[Point]) -> StepTimeChange | None:
    """The change that the newest points show by the rule; None without one or too few points."""
    if len(points) < REFERENCE_POINTS + RECENT_POINTS:
        return None
    step_ns = [each.step_ns for each in points[-(REFERENCE_POINTS + RECENT_POINTS) :]]
    reference, recent = step_ns[:-RECENT_POINTS], step_ns[-RECENT_POINTS:]
    before, after = median(reference), median(recent)
    n_medians = len(reference) - RECENT_POINTS + 1
    medians = [median(reference[i : i + RECENT_POINTS]) for i in range(n_medians)]
    mad = median(abs(each - median(medians)) for each in medians)
    if abs(after - before) <= max(LEAST_CHANGE * before, LEAST_MADS * mad):
        return None
    onset = _find_onset(points, before, after)
    return StepTimeChange(onset.step, onset.unix_ns, before, after)


def _find_onset(points: Sequence[Point], before: float, after: float) -> Point:
    """The first of the newest points that are all nearer to the new level, but for single ones."""
    is_new = [abs(each.step_ns - after) < abs(each.step_ns - before) for each in points]
    first = len(points) - 1
    while first > 0 and (is_new[first - 1] or (first > 1 and is_new[first - 2])):
        first -= 1
    return points[first if is_new[first] else first + 1]


def _find_weighted_median(windows: Sequence[RankWindow]) -> float:
    """The median of the windows' medians, each as often as it has steps."""
    ordered = sorted(windows, key=lambda each: each.median_step_ns)
    half, passed = sum(each.steps for each in ordered) / 2, 0
    for each in ordered:
        passed += each.steps
        if passed >= half:
            return float(each.median_step_ns)
    return float(ordered[-1].median_step_ns)


# What explains a change, by the samples on both sides of it.


def summarize_sample(sample: WatchSample) -> SampleSplit:
    """The sample in short; it must have ranks."""
    columns = zip(*(astuple(each.split) for each in sample.ranks), strict=True)
    mean = Split(*(sum(column) // len(sample.ranks) for column in columns))
    worst = max(sample.ranks, key=lambda each: each.caused_wait_ns)
    return SampleSplit(sample.step, mean, worst.rank, worst.caused_wait_ns)


def explain_change(before: Sequence[SampleSplit], now: SampleSplit) -> str:
    """One sentence: the bucket that has grown most, and the rank that others wait for.

    before: the samples before the change; buckets are compared with the median over them.
    """
    if not before:
        return "no sample before the change to compare with"
    growth_ns = {
        name: getattr(now.mean, f"{name}_ns")
        - median(getattr(s.mean, f"{name}_ns") for s in before)
        for name in BUCKETS
    }
    name = max(growth_ns, key=lambda one: abs(growth_ns[one]))
    text = f"mostly {name}: {format_signed_milliseconds(growth_ns[name])} in the mean of the ranks"
    waited_ns = now.caused_wait_ns - median(s.caused_wait_ns for s in before)
    if waited_ns > LEAST_CHANGE * now.mean.step_ns:
        waited = format_milliseconds(now.caused_wait_ns)
        text += f"; others wait {waited} for rank {now.worst_rank}"
    return text
