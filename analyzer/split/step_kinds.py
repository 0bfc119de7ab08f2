"""Kinds of steps, by what they do: a training step, one with an evaluation, an outer step."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import collect_intervals, find_interval
from stepsplit.analyzer.split.host_steps import HostStep, count_optimizer_steps
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.rl_phases import has_rl_phases
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import (
    COMPILES,
    OPS,
    Bool,
    Category,
    Float,
    Int64,
    Note,
    RankTrace,
    find_earlier_calls,
)

UNKNOWN_AXIS = "unknown"


class KindCalls(Struct, frozen=True, omit_defaults=True):
    """The calls of one op along one axis in a step, summed over the recorded ranks.

    Attributes:
        axis: mesh axis, else the description of the group, else "unknown": by this and op, kinds
            are matched, also with those of older baselines.
        op: operation, such as "all_gather".
        calls: calls in each of these steps.
        name: what the calls are called, as in GroupRow; "" if that is axis.
    """

    axis: str
    op: str
    calls: int
    name: str = ""


class StepKind(Struct, frozen=True):
    """Complete steps that do the same.

    Attributes:
        kind: "headline" for those over which means and medians are taken, else "other 1", "other 2"
            in the order of their first step.
        steps: their numbers.
        calls: the calls of a step.
        kernels: compute kernels of a step and rank (ops of a CPU run), the mean.
        ranges: the named ranges of a step and rank that the headline has less often, and how much
            less often, such as ("evaluate", 1.0).
        with_more: the steps of other kinds that do what these do beyond the headline, and more: an
            evaluation in a step that also logs.
        period: every so many steps does that, with_more included; None if they are not regular, or
            fewer than two.
    """

    kind: str
    steps: tuple[int, ...]
    calls: tuple[KindCalls, ...]
    kernels: float
    ranges: tuple[tuple[str, float], ...] = ()
    with_more: tuple[int, ...] = ()
    period: int | None = None

    def describe_extra(self, headline: StepKind, ranks: int, *, on_device: bool) -> str:
        """What a step of a rank does beyond one of the headline, in words; "" if nothing that is
        known. ranks is the number of recorded ones."""
        usual = {(one.axis, one.op): one.calls for one in headline.calls}
        more = [(one, one.calls - usual.get((one.axis, one.op), 0)) for one in self.calls]
        called = [
            f"{units.format_per_step(count / ranks)} {one.op}"
            + ("" if one.axis == UNKNOWN_AXIS else f" on {one.name or one.axis}")
            for one, count in more
            if count > 0
        ]
        parts = called[:_MAX_NAMED] + (["other calls"] if len(called) > _MAX_NAMED else [])
        parts += [f"{count:.0f} {name}" for name, count in self.ranges[:_MAX_NAMED] if count >= 0.5]
        kernels = self.kernels - headline.kernels
        if kernels >= 1:
            what = "compute kernel" if on_device else "op"
            parts.append(f"{kernels:,.0f} {what}{'s' if round(kernels) > 1 else ''}")
        return ", ".join(parts)


def describe_steps(steps: Sequence[int], period: int | None) -> str:
    """Which steps they are, in words."""
    if period is not None:
        return f"every {period}{_ORDINALS.get(period, 'th')} step"
    return f"step{'s' if len(steps) > 1 else ''} {units.format_number_list(list(steps))}"


_MAX_NAMED = 2
"""Kinds of calls and ranges that are named."""

_ORDINALS = {2: "nd", 3: "rd"}

HEADLINE = "headline"


# Steps with more work than the others, on all ranks.

_SAME_WORK, _MORE_WORK = 1.02, 1.1
"""Steps of one kind run numbers of kernels that differ by at most the first factor. Those of
another kind exceed it on every rank, and on the mean rank the second one, in number or by the time
of the kernels that the usual steps do not run: ranks may evaluate unequally much. What lies between
is no kind: work that depends on data. At 1.05 an optimizer that initializes its state is a kind of
its own."""

_MIN_USUAL = 2


def mark_more_work(traces: Sequence[RankTrace], steps: Sequence[Steps]) -> list[Steps]:
    """The steps, with those as of another kind that run more kernels on every rank than most and
    make the same calls: an evaluation that communicates nothing.

    Where steps differ so but none of them can be the usual one, a note says that they are mixed.
    """
    # What a compiler tries out is not a kind of step, nor is the length of what RL generates.
    if any(t.events.match_names(COMPILES).any() or has_rl_phases(t) for t in traces):
        return list(steps)
    full = [[w for w in own.windows if w.kind == "full"] for own in steps]
    common = set.intersection(*({w.step for w in own} for own in full))
    if len(common) < _MIN_USUAL:
        return list(steps)
    ratios, times, stepped = [], [], []
    for trace, own in zip(traces, full, strict=True):
        windows = [w for w in own if w.step in common]
        works = _find_kernels(trace, windows)
        kernels = works.count()
        if not kernels.min():
            return list(steps)
        ratios.append(kernels / kernels.min())
        times.append(works.compare_times(kernels <= _SAME_WORK * kernels.min()))
        stepped.append(count_optimizer_steps(trace, [_take_host(w) for w in windows]) > 0)
    ratio, time, numbers = np.array(ratios), np.array(times), sorted(common)
    usual: Bool = np.max(ratio, axis=0) <= _SAME_WORK
    is_many = np.mean(ratio, axis=0) >= _MORE_WORK
    is_long = np.mean(time, axis=0) >= _MORE_WORK
    more: Bool = (np.min(ratio, axis=0) > _SAME_WORK) & (is_many | is_long)
    if not more.any() or not (usual | more).all():
        return list(steps)
    # A step that skips its optimizer, or is cut off, has less work and is not the usual one.
    lacks = ~np.array(stepped).any(axis=0)
    if (lacks & usual).any() and not lacks.all():
        return list(steps)
    if int(usual.sum()) < max(_MIN_USUAL, int(more.sum()) - 1):
        many, ways = more & is_many, list[str]()
        if many.any():
            ways.append(f"run {_format_range(ratio[:, many])} as many kernels as the others")
        if (long := more & ~is_many).any():
            ways.append(
                f"compute {_format_range(time[:, long])} as long as the others, with kernels that"
                " those do not run"
            )
        text = (
            f"the steps do unequal work: of {len(numbers)}, {int(more.sum())} {' or '.join(ways)},"
            " and no kind is usual: means are over all of them; record more steps"
        )
        return [replace(own, notes=(*own.notes, Note("steps_mixed", text))) for own in steps]
    marked = {number for number, is_more in zip(numbers, more.tolist(), strict=True) if is_more}
    return [
        replace(
            own,
            windows=tuple(replace(w, kind="other") if w.step in marked else w for w in own.windows),
        )
        for own in steps
    ]


def _format_range(ratio: Float) -> str:
    low, high = f"{ratio.min():.1f}", f"{ratio.max():.1f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


# What each kind does.


def find_step_kinds(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    matched: MatchedCalls,
    layout: RankLayout,
) -> tuple[StepKind, ...]:
    """The kinds of the complete steps, the headline first; () if they are of one kind.

    A step is of the headline if it is full on all ranks. Others are of one kind if they make equal
    calls, and run equally many kernels.
    """
    complete = [[w for w in own.windows if w.kind != "partial"] for own in steps]
    common = set.intersection(*({w.step for w in own} for own in complete))
    numbers = sorted(common)
    others = sorted({w.step for own in complete for w in own if w.kind == "other"} & common)
    if not others or len(others) == len(numbers):
        return ()
    calls: dict[int, Counter[tuple[str, str]]] = defaultdict(Counter)
    kernels: dict[int, float] = defaultdict(float)
    ranges: dict[int, Counter[str]] = defaultdict(Counter)
    axes = [
        layout.find_axis(group) or group.description or UNKNOWN_AXIS for group in matched.groups
    ]
    for i, (trace, own) in enumerate(zip(traces, complete, strict=True)):
        windows = [w for w in own if w.step in common]
        rows = matched.slice_trace(i)
        issued = trace.calls.issued_ns
        begun = np.where(_are_marked(windows) & (issued >= 0), issued, matched.start_ns[rows])
        counts = matched.counts[rows] & ~find_earlier_calls(trace)
        at = np.where(counts, _find_window(windows, begun), -1)
        for place, group, op in zip(
            at.tolist(), matched.group[rows].tolist(), matched.op[rows].tolist(), strict=True
        ):
            if place >= 0:
                axis = axes[group] if group >= 0 else UNKNOWN_AXIS
                calls[windows[place].step][axis, OPS[op]] += 1
        for window, count in zip(
            windows, _find_kernels(trace, windows).count().tolist(), strict=True
        ):
            kernels[window.step] += count / len(traces)
        if i == 0:
            # The named ranges that begin in each step, without numbers in their names.
            events = trace.events
            opened = np.flatnonzero(events.is_category(Category.ANNOTATION))
            at = _find_window(windows, events.start_ns[opened])
            for row, place in zip(opened.tolist(), at.tolist(), strict=True):
                text = events.name_of(row)
                if place >= 0 and not _OF_PROFILER.match(text):
                    ranges[windows[place].step][_NUMBER.sub("#", text)] += 1
    names = defaultdict[str, dict[str, None]](dict)
    for axis, group in zip(axes, matched.groups, strict=True):
        names[axis][layout.name_group(group) or UNKNOWN_AXIS] = None
    called = {axis: " + ".join(own) for axis, own in names.items() if [*own] != [axis]}
    alike: dict[tuple[frozenset[tuple[tuple[str, str], int]], int], list[int]] = defaultdict(list)
    for number in others:
        key = frozenset(calls[number].items())
        # Of steps with equal calls those are alike that run as many kernels.
        level = next(
            (
                level
                for (same, level), known in alike.items()
                if same == key and is_equal_work(kernels[known[0]], kernels[number])
            ),
            len(alike),
        )
        alike[key, level].append(number)
    headline = [number for number in numbers if number not in others]
    named = [(HEADLINE, headline)]
    named += [(f"other {i}", own) for i, own in enumerate(alike.values(), 1)]
    usual = _average_ranges(headline, ranges)
    more = _find_with_more(named, calls, kernels, ranges)
    return tuple(
        StepKind(
            kind=name,
            steps=tuple(own),
            calls=tuple(
                KindCalls(*what, count, called.get(what[0], ""))
                for what, count in sorted(_find_most_common(own, calls).items())
            ),
            kernels=sum(kernels[number] for number in own) / len(own),
            ranges=()
            if name == HEADLINE
            else tuple(
                sorted(
                    (
                        (what, count - usual.get(what, 0.0))
                        for what, count in _average_ranges(own, ranges).items()
                        if count > usual.get(what, 0.0)
                    ),
                    key=lambda one: (one[1], one[0]),
                )
            ),
            with_more=tuple(also),
            period=_find_period(sorted([*own, *also]), numbers),
        )
        for (name, own), also in zip(named, more, strict=True)
    )


def is_equal_work(one: float, other: float) -> bool:
    """Whether steps with so many kernels may be of one kind."""
    return max(one, other) <= _MORE_WORK * min(one, other)


def _find_with_more(
    named: Sequence[tuple[str, Sequence[int]]],
    calls: Mapping[int, Counter[tuple[str, str]]],
    kernels: Mapping[int, float],
    ranges: Mapping[int, Counter[str]],
) -> list[list[int]]:
    """For each kind, the headline first, the steps of other kinds that do the same and more: equal
    work and further calls, or the calls that set the kind apart and more work; and each of the
    named ranges that set it apart."""
    (_, headline), *others = named
    usual, opened = _find_most_common(headline, calls), _average_ranges(headline, ranges)
    found: list[list[int]] = [[]]
    for _, own in others:
        called = Counter(_find_most_common(own, calls))
        work = sum(kernels[number] for number in own) / len(own)
        more = {
            what
            for what, count in _average_ranges(own, ranges).items()
            if count > opened.get(what, 0.0)
        }
        found.append([
            number
            for _, apart in others
            if apart is not own
            for number in apart
            if more <= ranges[number].keys()
            and (
                (calls[number] > called and is_equal_work(kernels[number], work))
                or (calls[number] == called > Counter(usual) and kernels[number] > work)
            )
        ])  # fmt: skip
    return found


def _find_most_common(
    numbers: Sequence[int], calls: Mapping[int, Counter[tuple[str, str]]]
) -> Mapping[tuple[str, str], int]:
    """The calls of most of these steps."""
    counted = Counter(frozenset(calls[number].items()) for number in numbers)
    return dict(counted.most_common(1)[0][0])


def _average_ranges(numbers: Sequence[int], ranges: Mapping[int, Counter[str]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for number in numbers:
        total.update(ranges[number])
    return {name: count / len(numbers) for name, count in total.items()}


def _find_period(steps: Sequence[int], numbers: Sequence[int]) -> int | None:
    """The distance of these steps if it is always the same, and no more of them can be missing."""
    apart = {two - one for one, two in pairwise(steps)}
    if len(apart) != 1 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        return None
    (period,) = apart
    is_whole = steps[0] - numbers[0] < period and numbers[-1] - steps[-1] < period
    return period if period > 1 and is_whole else None


_NUMBER = re.compile(r"\d+")

_OF_PROFILER = re.compile(r"ProfilerStep|(?:gloo|nccl|nccl:|c10d|hccl)[:_]|\[param\||##")
"""Ranges that are marks of steps and calls, or that fused code is named by."""


# What the host begins in a step.


class _StepKernels(Struct, frozen=True):
    """The compute kernels that the host launched in some steps, or the ops of a CPU run: of each
    the index of its step, the number of its name, and its time; steps is how many steps."""

    at: Int64
    name: Int64
    dur_ns: Int64
    steps: int

    def count(self) -> Int64:
        """How many each step has."""
        return np.bincount(self.at, minlength=self.steps)

    def compare_times(self, is_usual: Bool) -> Float:
        """How many times as long each step computes as the usual ones by what it runs beyond them.

        Of kernels of one name those are beyond the usual that are more than in any usual step. Of
        equal kernels that take longer, as under a lower clock or of other data, nothing is.
        """
        names, name = np.unique(self.name, return_inverse=True)
        cells, shape = self.at * len(names) + name, (self.steps, len(names))
        size = self.steps * len(names)
        count = np.bincount(cells, minlength=size).reshape(shape)
        spent_ns = np.bincount(cells, self.dur_ns, minlength=size).reshape(shape)
        beyond = np.maximum(count - count[is_usual].max(axis=0), 0)
        beyond_ns = (spent_ns * beyond / np.maximum(count, 1)).sum(axis=1)
        usual_ns = float(spent_ns[is_usual].sum(axis=1).mean())
        return np.asarray(1 + beyond_ns / max(usual_ns, 1.0))


def _find_kernels(trace: RankTrace, windows: Sequence[StepWindow]) -> _StepKernels:
    events = trace.events
    rows = np.flatnonzero(trace.kinds.computes)
    begun = events.start_ns[rows]
    if trace.on_device and _are_marked(windows):
        launched = events.find_launch_ns(rows)
        begun = np.where(launched >= 0, launched, begun)
        own = ~events.is_launched_before(rows)
        rows, begun = rows[own], begun[own]
    at = _find_window(windows, begun)
    rows, at = rows[at >= 0], at[at >= 0]
    return _StepKernels(
        at, events.name_id[rows].astype(np.int64), events.dur_ns[rows], len(windows)
    )


def _find_window(windows: Sequence[StepWindow], when: Int64) -> Int64:
    """The index of the step in which the host was at each of these times, -1 for none."""
    return find_interval(collect_intervals(map(_take_host, windows)), when)


def _are_marked(windows: Sequence[StepWindow]) -> bool:
    return all(window.host_ns is not None for window in windows)


def _take_host(window: StepWindow) -> HostStep:
    return HostStep(window.step, *(window.host_ns or (window.start_ns, window.end_ns)))
