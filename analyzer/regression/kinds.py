"""Kinds of steps on both sides of a check: each is compared with its like, by what its steps do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.regression.checks import Budget, Cause
from stepsplit.analyzer.regression.metrics import KIND_METRIC, KindMetrics, RunMetrics, Value
from stepsplit.analyzer.split.step_kinds import HEADLINE, KindCalls, is_equal_work


class KindPair(Struct, frozen=True):
    """The steps of one kind, other than the headline, on both sides.

    metric is the name of their step in the result. baseline and candidate are runs with the
    duration of these steps as the metric, in the order of the sides; runs without such steps are
    left out.
    """

    metric: str
    words: str
    baseline: tuple[RunMetrics, ...]
    candidate: tuple[RunMetrics, ...]
    cause: Cause


def pair_kinds(baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]) -> list[KindPair]:
    """The kinds that runs of both sides have, other than the headline, in the order of the calls
    that they make more and of their work: how often each was recorded changes no name."""
    before, own = _group_kinds(baseline), _group_kinds(candidate)
    pairs: list[KindPair] = []
    for key in sorted(own, key=lambda key: (sorted(key[0]), key[1])):
        if key not in before:
            continue
        rows = own[key]
        (_, latest), was = rows[-1], before[key]
        delta = [
            fmean(now) - fmean(then)
            for now, then in zip(
                zip(*(kind.buckets_ns for _, kind in rows), strict=True),
                zip(*(kind.buckets_ns for _, kind in was), strict=True),
                strict=True,
            )
        ]
        grown = max(range(len(delta)), key=delta.__getitem__)
        longer = units.format_signed_milliseconds(delta[grown])
        words = describe_kind(latest)
        number = f"_{len(pairs) + 1}" if pairs else ""
        name = f"{KIND_METRIC}{number}"
        pairs.append(
            KindPair(
                name,
                words,
                tuple(_take_step(run, kind, name) for run, kind in was),
                tuple(_take_step(run, kind, name) for run, kind in rows),
                Cause(
                    BUCKETS[grown], None, None, None, None, (), int(delta[grown]),
                    f"{words}: {BUCKETS[grown]} {longer} per such step and rank",
                ),
            )
        )  # fmt: skip
    return pairs


def describe_kind(kind: KindMetrics) -> str:
    """Which steps they are and what they do, in words."""
    which = kind.which if kind.steps > 1 or kind.period else "1 step"
    return f"{which} ({kind.extra} more)" if kind.extra else which


_Key = tuple[frozenset[tuple[str, str]], int]
"""The calls that such a step makes more, by axis and op, and of kinds with equal ones the place by
work."""


def _group_kinds(
    runs: Sequence[RunMetrics],
) -> dict[_Key, list[tuple[RunMetrics, KindMetrics]]]:
    """The kinds of the runs by what their steps do beyond the headline: how many calls may change,
    and how long they take."""
    found: dict[_Key, list[tuple[RunMetrics, KindMetrics]]] = {}
    for run in runs:
        places: Counter[frozenset[tuple[str, str]]] = Counter()
        others = [kind for kind in run.kinds if kind.kind != HEADLINE]
        for kind in sorted(others, key=lambda one: one.kernels):
            more = _find_more_calls(run, kind)
            found.setdefault((more, places[more]), []).append((run, kind))
            places[more] += 1
    return found


def _find_more_calls(run: RunMetrics, kind: KindMetrics) -> frozenset[tuple[str, str]]:
    usual = _count_calls(run.kinds[0].calls)
    own = _count_calls(kind.calls)
    return frozenset(key for key in {*usual, *own} if own.get(key, 0) != usual.get(key, 0))


def _count_calls(calls: Sequence[KindCalls]) -> Mapping[tuple[str, str], int]:
    return {(one.axis, one.op): one.calls for one in calls}


def _take_step(run: RunMetrics, kind: KindMetrics, name: str) -> RunMetrics:
    return replace(run, values=(Value(name, kind.step_ns),), steps=kind.steps, kinds=())


def make_kind_budget(budget: Budget, pair: KindPair) -> Budget:
    """The budget of the step, for the steps of another kind."""
    return Budget(pair.metric, budget.text, "baseline", budget.ratio, budget.amount)


# What cannot be compared.


def list_unpaired(baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]) -> list[str]:
    """The kinds of steps that only one side has, in words."""
    if not baseline:
        return []
    before, own = _group_kinds(baseline), _group_kinds(candidate)
    found = []
    for side, here, there in (("candidate", own, before), ("baseline", before, own)):
        for key, rows in here.items():
            if key in there:
                continue
            run, kind = rows[-1]
            found.append(
                f"only the {side} has such steps: {describe_kind(kind)} in {run.name}, of"
                f" {units.format_milliseconds(kind.step_ns)}; they are not compared"
            )
    return found


def find_swapped_headline(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> str | None:
    """Why the headline of one side is another kind of steps than that of the other; None if it is
    not known to be.

    It is if it differs from that of the other side, which has steps of another kind like it.
    """
    for run in candidate:
        for other in baseline:
            for one, two in ((run, other), (other, run)):
                like = next(
                    (
                        kind
                        for kind in two.kinds
                        if kind.kind != HEADLINE
                        and _do_same(one, kind.calls, kind.kernels)
                        and not _do_same(one, two.kinds[0].calls, two.kinds[0].kernels)
                    ),
                    None,
                )
                if like is not None:
                    return (
                        f"most steps of {one.name} are of the kind that {two.name} has as"
                        f" {describe_kind(like)}: other steps are not compared; record more steps"
                    )
    return None


def _do_same(run: RunMetrics, calls: Sequence[KindCalls], kernels: float) -> bool:
    """Whether the headline of the run makes these calls, and as many kernels."""
    own: Counter[tuple[str, str]] = Counter()
    for row in run.calls or ():
        own[row.axis, row.op] += row.calls
    if +own != Counter(_count_calls(calls)):
        return False
    if not run.kernels or not kernels:
        return True
    return is_equal_work(run.kernels, kernels)


def describe_unequal_mix(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> str | None:
    """Why the means over all complete steps cannot be compared; None if every run has as large a
    share of each kind of steps."""
    mixes: dict[frozenset[tuple[_Key, float]], str] = {}
    for run in (*baseline, *candidate):
        total = sum(kind.steps for kind in run.kinds) or 1
        shares = [
            (key, kind.steps / total)
            for key, rows in _group_kinds([run]).items()
            for _, kind in rows
        ]
        others = total - run.kinds[0].steps if run.kinds else 0
        words = f"{others} of {total if run.kinds else run.complete} in {run.name}"
        mixes.setdefault(frozenset(shares), words)
    if len(mixes) < 2:
        return None
    listed = ", ".join(mixes.values())
    return f"the mix of kinds of steps differs: other than the headline are {listed}"
