"""Changes of the level of the step time and of the lateness of ranks, found as a training runs.

The rule: the median of five points is more than 5 % of the step and more than six MAD of such
medians away from the median of the fifty points before them. At the begin of a training twenty or
more points before them will do, n of them with both limits sqrt(50 / n) times as wide. The floor on
the effect prevents more false alarms than any statistic would on correlated noise. While a change
is open, its reference is frozen; it ends when the level is back within half of the difference. A
point is the median of the unprofiled steps of the interval between two samples, of at least 20.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple
from itertools import accumulate
from math import sqrt
from statistics import fmean, median, median_low
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.buckets import BUCKETS, WAITS, Bucket, Split
from stepsplit.analyzer.significance import compute_median_and_mad, compute_weighted_median
from stepsplit.analyzer.units import (
    format_milliseconds,
    format_signed_milliseconds,
    format_signed_percent,
)
from stepsplit.analyzer.watch.records import RankFinding, RankSample, WatchSample
from stepsplit.collectors.formats.watch_notes import RankWindow

REFERENCE_POINTS, RECENT_POINTS = 50, 5
"""The points before and the newest ones, whose medians are compared (docs/watch.md).

In 60 streams of tests/benchmarks/watch_rule.py with the most correlated noise, half of the former
make 2.0 false changes a stream instead of 1.6, and twice as many 1.2; 47, 40 and 37 % of 5 % longer
steps are found. Three of the latter make 1.2 instead of 0.1 in uncorrelated noise; with ten there
is none, and a 10 % longer step is found after five points instead of two."""

LEAST_REFERENCE_POINTS = 20
"""At the begin of a training, with wider limits. With 10 and with 40 the same trials have as many
false changes."""

FURTHER_POINTS = 3 * RECENT_POINTS
"""Points of an open change after which a further one is found."""

LEAST_CHANGE, LEAST_MADS = 0.05, 6.0
"""Chosen on tests/benchmarks/watch_rule.py (docs/watch.md): with four MAD 2.2 instead of 1.6 false
changes in a week of strongly correlated noise, and 99 instead of 96 % of 10 % longer steps are
found. Of steps that are 5 % longer half are found: half the floor would find more of the noise."""

POINT_STEPS = 20
"""Least steps of a point."""

MOST_WAITING = 500
"""Windows of a rank that wait for those of the others."""

# The rule.


class Point(Struct, frozen=True):
    """The median of some unprofiled steps, the first of them, and the step time by which a change
    is measured."""

    step: int
    unix_ns: int
    value_ns: float
    step_ns: float


class OnlineChange(Struct, frozen=True):
    """A change: since which step, and both levels. is_over: it is back again. mad_ns: the noise of
    the level before."""

    step: int
    unix_ns: int
    before_ns: float
    after_ns: float
    is_over: bool = False
    mad_ns: float = 0.0


class OnlineLevel(Struct, frozen=True):
    """What the rule knows of a number: its points, and the open change."""

    points: tuple[Point, ...] = ()
    change: OnlineChange | None = None

    def add(self, point: Point) -> tuple[OnlineLevel, OnlineChange | None]:
        """The level with a further point; and the change that begins or ends with it, or None."""
        points = (*self.points, point)
        if self.change is not None:
            return _follow(points, self.change)
        reference, change = points[-(REFERENCE_POINTS + RECENT_POINTS) : -RECENT_POINTS], None
        if len(reference) >= LEAST_REFERENCE_POINTS:
            values_ns = [each.value_ns for each in reference]
            n_medians = len(values_ns) - RECENT_POINTS + 1
            medians = [median(values_ns[i : i + RECENT_POINTS]) for i in range(n_medians)]
            _, mad = compute_median_and_mad(medians)
            widening = sqrt(REFERENCE_POINTS / len(reference))
            change = _compare_with_recent(points, reference, mad, widening)
        return OnlineLevel(points[-(REFERENCE_POINTS + RECENT_POINTS) :], change), change


def _compare_with_recent(
    points: Sequence[Point], reference: Sequence[Point], mad_ns: float, widening: float = 1.0
) -> OnlineChange | None:
    """The change of the newest points from the reference, within these points; None if it is below
    the floor or within the noise."""
    before, after = median(each.value_ns for each in reference), _find_recent(points)
    floor = LEAST_CHANGE * median(each.step_ns for each in reference)
    if abs(after - before) <= max(floor, LEAST_MADS * mad_ns) * widening:
        return None
    # The first of the newest points that are all nearer to the new level, but for single ones.
    is_new = [abs(each.value_ns - after) < abs(each.value_ns - before) for each in points]
    first = len(points) - 1
    while first > 0 and (is_new[first - 1] or (first > 1 and is_new[first - 2])):
        first -= 1
    onset = points[first if is_new[first] else first + 1]
    return OnlineChange(onset.step, onset.unix_ns, before, after, mad_ns=mad_ns)


def _follow(
    points: tuple[Point, ...], change: OnlineChange
) -> tuple[OnlineLevel, OnlineChange | None]:
    """Whether the open change goes on; it becomes the reference once it has lasted."""
    recent = _find_recent(points)
    if abs(recent - change.before_ns) < abs(change.after_ns - change.before_ns) / 2:
        over = replace(change, after_ns=recent, is_over=True)
        before = tuple(each for each in points if each.step < change.step)
        return OnlineLevel((*before, *points[-RECENT_POINTS:])[-REFERENCE_POINTS:]), over
    since = _list_since(points, change)
    if len(since) >= REFERENCE_POINTS + RECENT_POINTS:
        return OnlineLevel(since), None
    further = None
    if len(since) >= FURTHER_POINTS:
        # From the level of the open change, by the same floor and the noise before it.
        further = _compare_with_recent(since, since[:-RECENT_POINTS], change.mad_ns)
    if further is None:
        return OnlineLevel(points, change), None
    return OnlineLevel(since, further), further


def _list_since(points: Sequence[Point], change: OnlineChange) -> tuple[Point, ...]:
    return tuple(each for each in points if each.step >= change.step)


def _find_recent(points: Sequence[Point]) -> float:
    return median(each.value_ns for each in points[-RECENT_POINTS:])


# The step time.


class StepLevel(Struct, frozen=True):
    """The level of a rank's step time, the windows of its next point, and the level of the start of
    the job before this one; None if it is unknown."""

    windows: tuple[RankWindow, ...] = ()
    level: OnlineLevel = OnlineLevel()
    earlier_ns: float | None = None

    def add(self, window: RankWindow, point_steps: int) -> tuple[StepLevel, OnlineChange | None]:
        """Adds a window of the rank.

        Args:
            window: The window, after those before it.
            point_steps: The steps of a point.

        Returns:
            The level with it; and the change that begins or ends with it, or None.
        """
        windows = (*self.windows, window)
        if sum(each.steps for each in windows) < max(point_steps, POINT_STEPS):
            return replace(self, windows=windows), None
        step_ns = _find_median(windows, "median_step_ns")
        point = Point(windows[0].first_step, windows[0].start_unix_ns, step_ns, step_ns)
        level, change = self.level.add(point)
        return replace(self, windows=(), level=level), change

    def restart(self) -> StepLevel:
        """The level of the next start of the job, which is compared with this one."""
        change = self.level.change
        since = self.level.points if change is None else _list_since(self.level.points, change)
        if len(since) < RECENT_POINTS:
            return StepLevel(earlier_ns=self.earlier_ns)
        return StepLevel(earlier_ns=median(each.value_ns for each in since))

    def describe_restart(self) -> str:
        """One sentence that compares this start with the one before, with the last of its first
        points; else ""."""
        if not self.earlier_ns or self.windows or len(self.level.points) != RECENT_POINTS:
            return ""
        now_ns = _find_recent(self.level.points)
        growth = format_signed_percent(now_ns / self.earlier_ns - 1)
        now, earlier = format_milliseconds(now_ns), format_milliseconds(self.earlier_ns)
        return f"steps take {now} since this start, {earlier} before the restart ({growth})"


def describe_step_change(change: OnlineChange) -> str:
    """One sentence of a change of the step time."""
    after, before = format_milliseconds(change.after_ns), format_milliseconds(change.before_ns)
    if change.is_over:
        return f"steps take {after} again, as before step {change.step}"
    growth = format_signed_percent(change.after_ns / change.before_ns - 1)
    return f"steps take {after} since step {change.step}, {before} before ({growth})"


def _find_median(windows: Sequence[RankWindow], name: str) -> float:
    """The median of this number of the windows, each as often as it has steps."""
    steps = [each.steps for each in windows]
    return float(compute_weighted_median([getattr(each, name) for each in windows], steps))


# The lateness of the ranks of a host, by their local times.


class Drift(Struct, frozen=True):
    """A rank that has become later than the other ranks of its host, or a host whose ranks have
    all become slower (rank None)."""

    rank: int | None
    change: OnlineChange

    def describe(self) -> str:
        """One sentence."""
        now, step = self.change, self.change.step
        after, before = format_milliseconds(now.after_ns), format_milliseconds(now.before_ns)
        if self.rank is None:
            subject = "the ranks of this host need"
            if now.is_over:
                return f"{subject} {after} to their last gradient again, as before step {step}"
            return f"{subject} {after} to their last gradient since step {step}, {before} before"
        if now.is_over:
            return f"rank {self.rank} is {after} late again, as before step {step}"
        return (
            f"rank {self.rank} is {after} later than the other ranks of its host since step {step},"
            f" {before} before"
        )


class HostLateness(Struct, frozen=True):
    """The levels of the local times of a host's ranks, and the windows of their next points.

    host is that of the median over the ranks; ranks those of each rank above it.
    """

    windows: Mapping[int, tuple[RankWindow, ...]] = {}
    host: OnlineLevel = OnlineLevel()
    ranks: Mapping[int, OnlineLevel] = {}

    def add(
        self, windows: Sequence[RankWindow], ranks: Collection[int], point_steps: int
    ) -> tuple[HostLateness, tuple[Drift, ...]]:
        """Adds windows.

        Args:
            windows: New windows, after those before them.
            ranks: The ranks that run on the host.
            point_steps: The steps of a point.

        Returns:
            The levels with them; and the ranks that have begun to be late or are not any more.
        """
        known, drifts = self, list[Drift]()
        waiting = {rank: list(self.windows.get(rank, ())) for rank in ranks}
        for window in windows:
            if window.rank in waiting:
                waiting[window.rank].append(window)
        while taken := _take_common(waiting, max(point_steps, POINT_STEPS)):
            if all(each.local_ns for own in taken.values() for each in own):
                known, found = known._add_point(taken)
                drifts += found
        rest = {rank: tuple(own[-MOST_WAITING:]) for rank, own in waiting.items()}
        return replace(known, windows=rest), tuple(drifts)

    def _add_point(
        self, taken: Mapping[int, Sequence[RankWindow]]
    ) -> tuple[HostLateness, list[Drift]]:
        first = next(iter(taken.values()))
        local = {rank: _find_median(own, "local_ns") for rank, own in taken.items()}
        step_ns = median(_find_median(own, "median_step_ns") for own in taken.values())
        usual = median_low(local.values())
        at = first[0].first_step, first[0].start_unix_ns
        host, drifts = _find_drift(None, self.host, Point(*at, usual, step_ns))
        ranks = {}
        for rank, own_ns in local.items() if len(local) > 1 else ():
            level, point = self.ranks.get(rank, OnlineLevel()), Point(*at, own_ns - usual, step_ns)
            ranks[rank], found = _find_drift(rank, level, point)
            drifts += found
        return replace(self, host=host, ranks=ranks), drifts


def _find_drift(
    rank: int | None, level: OnlineLevel, point: Point
) -> tuple[OnlineLevel, list[Drift]]:
    """The level with the point, and the drift that begins or ends; earlier ranks are none."""
    following, change = level.add(point)
    begin = level.change if change is not None and change.is_over else change
    if change is None or begin is None or begin.after_ns < begin.before_ns:
        return following, []
    return following, [Drift(rank, change)]


def _take_common(
    waiting: dict[int, list[RankWindow]], point_steps: int
) -> dict[int, list[RankWindow]]:
    """Takes the windows of one point off the waiting ones: the same steps of every rank.

    Empty if a rank has too few so far.
    """
    last = 0
    for own in waiting.values():
        ends = zip(accumulate(each.steps for each in own), own, strict=True)
        end = next((each.last_step for passed, each in ends if passed >= point_steps), None)
        if end is None:
            return {}
        last = max(last, end)
    if any(own[-1].last_step < last for own in waiting.values()):
        return {}
    taken = {}
    for rank, own in waiting.items():
        taken[rank] = [each for each in own if each.last_step <= last]
        waiting[rank] = own[len(taken[rank]) :]
    return taken


# What explains a change, by the samples on both sides of it.


class SampleSplit(Struct, frozen=True):
    """A sample in short: its mean split and exposed communication by axis over the ranks, the ranks
    that may explain a change, and the findings that blame one rank."""

    step: int
    mean: Split
    exposed_ns: Mapping[str, float] = {}
    ranks: tuple[RankSample, ...] = ()
    rank_findings: tuple[RankFinding, ...] = ()


_OWN_BUCKETS = tuple(bucket.label for bucket in Bucket if bucket not in WAITS)


class ChangeCause(Struct, frozen=True):
    """One sentence, and the rank that others wait for; None if there is none."""

    text: str
    rank: int | None = None


def summarize_sample(sample: WatchSample, own: Collection[int]) -> SampleSplit:
    """The sample in short, with these ranks and the one that others wait for most.

    It must have ranks.
    """
    columns = zip(*(astuple(each.split) for each in sample.ranks), strict=True)
    mean = Split(*(sum(column) // len(sample.ranks) for column in columns))
    worst = max(sample.ranks, key=lambda each: each.caused_wait_ns).rank
    kept = tuple(each for each in sample.ranks if each.rank in own or each.rank == worst)
    axes = sorted({axis for each in sample.ranks for axis in each.exposed_ns})
    exposed_ns = {
        axis: fmean(each.exposed_ns.get(axis, 0) for each in sample.ranks) for axis in axes
    }
    return SampleSplit(sample.step, mean, exposed_ns, kept, sample.rank_findings)


def explain_change(before: Sequence[SampleSplit], since: Sequence[SampleSplit]) -> ChangeCause:
    """What has become of a step, by the medians over the samples before and since the change.

    If others wait longer for a rank than before, by more than 5 % of the step, it is the bucket of
    that rank that has grown most; else that of the mean of the ranks.
    """
    if not before:
        return ChangeCause("no sample before the change to compare with")
    waits = _list_waits(since)
    longer_ns = _find_growth(_list_waits(before), waits)
    worst = max(waits[-1], key=lambda rank: longer_ns[rank], default=None)
    if worst is None or longer_ns[worst] <= LEAST_CHANGE * since[-1].mean.step_ns:
        growth_ns = _find_growth(_list_buckets(before, None), _list_buckets(since, None))
        # Of a step that has become faster, what has shrunk most.
        choose = max if sum(growth_ns.values()) >= 0 else min
        name = choose(growth_ns, key=lambda one: growth_ns[one])
        text = f"mostly {name}: {format_signed_milliseconds(growth_ns[name])}"
        return ChangeCause(f"{text} in the mean of the ranks{_describe_axis(before, since)}")
    waited = format_milliseconds(median(each.get(worst, 0) for each in waits))
    return ChangeCause(f"{explain_drift(before, since, worst)}; others wait {waited} for it", worst)


def explain_drift(before: Sequence[SampleSplit], since: Sequence[SampleSplit], rank: int) -> str:
    """The bucket of the rank that has grown most, without its waits, by the medians over the
    samples, and the newest sample's first finding that blames the rank, if possible for it.

    A rank that no sample before has is compared with the mean of the ranks.
    """
    was = _list_buckets(before, rank) or _list_buckets(before, None)
    growth_ns = _find_growth(was, _list_buckets(since, rank))
    name = max(_OWN_BUCKETS, key=lambda one: growth_ns[one])
    text = f"rank {rank}: mostly {name}: {format_signed_milliseconds(growth_ns[name])}"
    blaming = [one for one in since[-1].rank_findings if one.rank == rank]
    blaming.sort(key=lambda one: one.bucket != name)
    return f"{text} ({blaming[0].text})" if blaming else text


def _describe_axis(before: Sequence[SampleSplit], since: Sequence[SampleSplit]) -> str:
    """The axis whose exposed communication has grown by more than 5 % of the step, and most."""
    growth_ns = _find_growth([each.exposed_ns for each in before], [s.exposed_ns for s in since])
    growth_ns.pop("", None)
    axis = max(growth_ns, key=lambda one: growth_ns[one], default="")
    if not axis or growth_ns[axis] <= LEAST_CHANGE * since[-1].mean.step_ns:
        return ""
    return f"; exposed communication of {axis} {format_signed_milliseconds(growth_ns[axis])}"


def _list_waits(samples: Sequence[SampleSplit]) -> list[dict[int, int]]:
    """How long others wait for each of the kept ranks."""
    return [{each.rank: each.caused_wait_ns for each in sample.ranks} for sample in samples]


def _list_buckets(samples: Sequence[SampleSplit], rank: int | None) -> list[dict[str, int]]:
    """The buckets of the rank, or of the mean of the ranks."""
    splits = (
        [sample.mean for sample in samples]
        if rank is None
        else [each.split for sample in samples for each in sample.ranks if each.rank == rank]
    )
    return [dict(zip(BUCKETS, split.buckets_ns, strict=True)) for split in splits]


_Name = TypeVar("_Name")


def _find_growth(
    before: Sequence[Mapping[_Name, float]], since: Sequence[Mapping[_Name, float]]
) -> dict[_Name, float]:
    """The growth of the median of each number; 0 where a sample lacks it."""
    names = dict.fromkeys(name for each in since for name in each)
    return {
        name: median(each.get(name, 0) for each in since)
        - median(each.get(name, 0) for each in before)
        for name in names
    }
