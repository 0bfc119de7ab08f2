"""The check of a candidate against a baseline: exact for counts, statistical for times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, WAITS
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.regression.checks import (
    Answer,
    Budget,
    CallsMoved,
    Cause,
    Judged,
    Shifted,
    SideFacts,
    Verdict,
)
from stepsplit.analyzer.regression.metrics import COMMUNICATION, METRICS, CallsFact, RunFacts
from stepsplit.analyzer.regression.statistics import (
    ALPHA,
    BANDWIDTH,
    Difference,
    Sample,
    holm,
    sample_of,
    spelled_out,
)

# Runs and budgets -> result.

LEAST_SHIFT = 0.01
"""Significant changes below this fraction of the value are not reported."""


def judge(
    candidate: Sequence[RunFacts],
    baseline: Sequence[RunFacts],
    budgets: Sequence[Budget],
    across_setups: bool = False,
) -> Verdict:
    """Check whether the candidate stays within the budgets.

    baseline may be empty if no budget needs one. Raises UsageError for runs that are not comparable
    or lack a checked metric.
    """
    if not candidate or not budgets:
        raise UsageError("nothing to check: pass a candidate and at least one budget")
    warnings = check_setups(baseline, candidate, across_setups)
    gated = _gated(candidate, baseline, list(spelled_out(budgets, (*baseline, *candidate))))
    regressed = [one for one in gated if one.answer == "regressed"]
    calls = calls_moved(baseline, candidate)
    return Verdict(
        answer=_run_answer(gated),
        baseline=_side_facts(baseline) if baseline else None,
        candidate=_side_facts(candidate),
        gated=tuple(gated),
        causes=causes_of(regressed, calls, baseline, candidate) if regressed and baseline else (),
        calls=tuple(row for row in calls if row.baseline != row.candidate) if baseline else (),
        others=tuple(_others(candidate, baseline, {one.metric for one in gated})),
        warnings=warnings,
        low_confidence=_unsure(budgets) and 1 in (len(candidate), len(baseline)),
    )


def _unsure(budgets: Sequence[Budget]) -> bool:
    """Whether any budget is for a metric with noise."""
    return not all(budget.meaning.exact for budget in budgets)


def _gated(
    candidate: Sequence[RunFacts], baseline: Sequence[RunFacts], budgets: Sequence[Budget]
) -> list[Judged]:
    """The answer for each budget, in order."""
    measured = [budget for budget in budgets if not budget.meaning.exact]
    answers = judge_measured([sample_of(budget, baseline, candidate) for budget in measured])
    by_budget = dict(zip(measured, answers, strict=True))
    return [
        by_budget.get(budget) or judge_counted(budget, baseline, candidate) for budget in budgets
    ]


def _run_answer(gated: Sequence[Judged]) -> Answer:
    answers = {one.answer for one in gated}
    if "regressed" in answers:
        return "regressed"
    return "inconclusive" if "inconclusive" in answers else "pass"


def _side_facts(runs: Sequence[RunFacts]) -> SideFacts:
    return SideFacts(
        tuple(run.name for run in runs), tuple(run.steps for run in runs), runs[0].setup
    )


def _others(
    candidate: Sequence[RunFacts], baseline: Sequence[RunFacts], gated: set[str]
) -> Iterator[Shifted]:
    """Significant changes of metrics without a budget."""
    names = [one.name for one in METRICS if not one.exact and one.name != BANDWIDTH]
    for name in names if baseline else ():
        known = all(run.value(name) is not None for run in (*baseline, *candidate))
        if known and name not in gated:
            sample = sample_of(Budget(name, "0%", "baseline"), baseline, candidate)
            yield from _shifted(name, sample)


def _shifted(name: str, sample: Sample) -> Iterator[Shifted]:
    found, before = sample.difference, sample.baseline
    if found is None or before is None or abs(sample.harm) <= LEAST_SHIFT * abs(before):
        return
    if found.low > 0 or found.high < 0:
        yield Shifted(name, before, sample.candidate, sample.harm, found.low, found.high)


# Counted metrics: calls and bytes per step, compared without statistics.

UNSTEADY = "baseline runs differ: an exact comparison is not possible; use a limit such as 5%"

_Counts = Mapping[tuple[str, str], int]
"""(axis, op) -> count per full step over all recorded ranks."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Minimum and maximum over the runs of one side by axis and op, and the maximum total."""

    least: _Counts
    most: _Counts
    most_total: int


def judge_counted(
    budget: Budget, baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> Judged:
    """Check a counted metric: exact budgets compare every axis and op, others the total.

    Raises UsageError if a required baseline is missing, DataError for runs without the metric.
    """
    own = _counted_side(budget, candidate)
    if budget.against == "model":
        raise UsageError(f"the model does not predict {budget.metric}; use a fixed limit")
    if budget.against == "limit":
        over = own.most_total - budget.amount
        return _counted_judged(
            budget, None, own, over, 0.0, "regressed" if over > 0 else "pass", ""
        )
    if not baseline:
        raise UsageError(f"budget {budget.metric}:{budget.text} needs a baseline; pass --baseline")
    before = _counted_side(budget, baseline)
    if budget.text == "exact":
        return _exactly(budget, before, own)
    allowed = max(budget.ratio * before.most_total, budget.amount)
    harm = own.most_total - before.most_total
    answer: Answer = "regressed" if harm > allowed else "pass"
    return _counted_judged(budget, before, own, harm, allowed, answer, "")


def _exactly(budget: Budget, before: _Side, own: _Side) -> Judged:
    kinds = dict.fromkeys((*before.most, *own.most))
    more = [kind for kind in kinds if own.most.get(kind, 0) > before.most.get(kind, 0)]
    harm = own.most_total - before.most_total
    if more:
        told = ", ".join(_moved(kind, before, own) for kind in more)
        return _counted_judged(budget, before, own, harm, 0.0, "regressed", told)
    if before.least != before.most:
        return _counted_judged(budget, before, own, harm, 0.0, "inconclusive", UNSTEADY)
    note = "improved: consider updating the baseline" if harm < 0 else ""
    return _counted_judged(budget, before, own, harm, 0.0, "pass", note)


def _moved(kind: tuple[str, str], before: _Side, own: _Side) -> str:
    axis, op = kind
    return f"{axis} {op} {before.most.get(kind, 0):,} -> {own.most.get(kind, 0):,}"


def _counted_judged(
    budget: Budget, before: _Side | None, own: _Side, harm: float, allowed: float,
    answer: Answer, note: str,
) -> Judged:  # fmt: skip
    baseline = None if before is None else float(before.most_total)
    candidate = float(own.most_total)
    return Judged(budget.metric, budget.text, answer, baseline, candidate, harm, allowed, note=note)


def _counted_side(budget: Budget, runs: Sequence[RunFacts]) -> _Side:
    counts = [_counts(budget, run) for run in runs]
    totals = [sum(one.values()) for one in counts]
    kinds = dict.fromkeys(kind for one in counts for kind in one)
    return _Side(
        {kind: min(one.get(kind, 0) for one in counts) for kind in kinds},
        {kind: max(one.get(kind, 0) for one in counts) for kind in kinds},
        max(totals),
    )


def _counts(budget: Budget, run: RunFacts) -> _Counts:
    if run.calls is None:
        hint = "analyze the recording again: this report is from an older version"
        raise DataError(run.name, f"{budget.metric} is missing", hint)
    name, _, axis = budget.metric.partition(".")
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in run.calls:
        if not axis or row.axis == axis:
            counts[row.axis, row.op] += _count(name, row)
    return counts


def _count(name: str, row: CallsFact) -> int:
    return row.calls if name == "calls" else row.calls * (row.message_bytes or 0)


# Measured metrics: Welch's t test over runs.

ZERO = ""

TELLING = 1.5
"""A pass requires a minimum detectable change of at most this multiple of the budget, because the
noise of a few runs may look small by chance."""

TOO_FEW = "noise unknown with one run per side: record 3 to 5 runs per side"

NOISE = "over the budget, but within the noise of the runs"

TOO_NOISY = "too noisy to decide: record more runs"


def judge_measured(samples: Sequence[Sample]) -> list[Judged]:
    """The answer for each metric; the false-alarm rate is controlled over all of them."""
    found = [None if sample.zero else sample.difference for sample in samples]
    adjusted = iter(holm([one.p for one in found if one is not None]))
    ps = [None if one is None else next(adjusted) for one in found]
    return [_measured_judged(sample, p) for sample, p in zip(samples, ps, strict=True)]


def _measured_judged(sample: Sample, p: float | None) -> Judged:
    found = None if p is None else sample.difference
    answer, note = _metric_answer(sample, found, p)
    return Judged(
        metric=sample.budget.metric,
        budget=sample.budget.text,
        answer=answer,
        baseline=sample.baseline,
        candidate=sample.candidate,
        harm=sample.harm,
        allowed=sample.allowed,
        low=None if found is None else found.low,
        high=None if found is None else found.high,
        p=p,
        detectable=None if found is None else found.detectable(sample.allowed),
        note=note,
    )


def _metric_answer(sample: Sample, found: Difference | None, p: float | None) -> tuple[Answer, str]:
    if sample.zero:
        return "pass", ZERO
    if found is None or p is None:
        return "inconclusive", TOO_FEW
    if found.mean > sample.allowed and _alarms(found, p):
        return "regressed", ""
    if _passes(found, sample.allowed):
        return "pass", "better" if found.high < 0 else ""
    return "inconclusive", NOISE if found.mean > sample.allowed else TOO_NOISY


def _alarms(found: Difference, p: float) -> bool:
    """Whether the t test is significant after the adjustment and the permutation test agrees."""
    level = ALPHA * (found.p / p if p else 1.0)
    return p <= ALPHA and found.told_by_order(level)


def _passes(found: Difference, allowed: float) -> bool:
    """Whether these runs rule out a change beyond the budget."""
    telling = not allowed or found.detectable(allowed) <= TELLING * allowed
    return telling and found.within(allowed)


# Whether runs are comparable.

MUST = ("device", "world_size", "mesh", "backend", "ranks")
"""Settings that must be equal on both sides, unless across_setups is set."""

MAY = ("torch", "nccl", "driver", "hosts", "schedule", "microbatches")
"""Settings whose difference may explain a change; reported as warnings."""

_WORDS = {"world_size": "world size", "ranks": "ranks recorded", "nccl": "NCCL"}


def check_setups(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts], across_setups: bool
) -> tuple[str, ...]:
    """Warnings about allowed differences in configuration. Raises UsageError for others."""
    for side in (baseline, candidate):
        _check_apart(side)
    runs = [*baseline, *candidate]
    refused = [told for name in MUST if (told := _differs(name, runs))]
    if refused and not across_setups:
        raise UsageError(
            f"runs are not comparable: {'; '.join(refused)}; use runs of the same setup, or pass "
            "--across-setups"
        )
    return (*refused, *(told for name in MAY if (told := _differs(name, runs))))


def _check_apart(side: Sequence[RunFacts]) -> None:
    """Raises UsageError for a run that is passed twice, which would underestimate the noise."""
    seen: dict[object, str] = {}
    for run in side:
        if run.values in seen:
            told = f"{seen[run.values]} and {run.name}"
            raise UsageError(f"{told} are the same recording; pass each run once per side")
        seen[run.values] = run.name


def _differs(name: str, runs: Sequence[RunFacts]) -> str | None:
    """The different values of a setting with an example run each; None if all are equal."""
    seen: dict[object, str] = {}
    for run in runs:
        value = getattr(run.setup, name)
        if value is not None:
            seen.setdefault(value, run.name)
    if len(seen) < 2:
        return None
    told = (f"{_short(value)} in {run}" for value, run in seen.items())
    return f"{_WORDS.get(name, name)} is {', '.join(told)}"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} ranks ({', '.join(map(str, value[:4]))}, ...)"
    return str(value)


# Causes of a regression: the bucket, axis, collective and rank that changed.

MOST = 6

SAME_BYTES = 0.01

KINDS = 4

_BUCKETS_OF: Mapping[str, Sequence[str]] = {
    **{bucket: (bucket,) for bucket in BUCKETS},
    **dict.fromkeys(("step", "mfu", "hfu"), BUCKETS),
    **dict.fromkeys(("exposed_comm", "overlap"), COMMUNICATION),
    "busbw": ("collective", "p2p"),
    "bubble_fraction": ("bubble",),
}
"""The buckets that explain a change of each metric."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """All differences between the sides."""

    times: Sequence[TimeMoved]
    blame: Sequence[BlameMoved]
    calls: Sequence[CallsMoved]
    candidate: RunFacts


def causes_of(
    regressed: Sequence[Judged],
    calls: Sequence[CallsMoved],
    baseline: Sequence[RunFacts],
    candidate: Sequence[RunFacts],
) -> tuple[Cause, ...]:
    """The likely causes of the regressions; counts first because they are exact."""
    moved = _Moved(
        times_moved(baseline, candidate), blame_moved(baseline, candidate), calls, candidate[-1]
    )
    names = dict.fromkeys(judged.metric for judged in regressed)
    found = [cause for name in names for cause in _of_metric(name, moved)]
    ordered = sorted(found, key=lambda cause: (cause.bucket is not None, -cause.moved_ns))
    return tuple({cause.message: cause for cause in ordered}.values())[:MOST]


def _of_metric(name: str, moved: _Moved) -> Iterator[Cause]:
    metric, _, rest = name.partition(".")
    axis = rest.split(".")[0] or None
    if metric in ("calls", "bytes"):
        yield from _more_calls(axis, moved)
    elif metric in _BUCKETS_OF:
        yield from _of_buckets(_BUCKETS_OF[metric], axis, moved)


def _more_calls(axis: str | None, moved: _Moved) -> Iterator[Cause]:
    """Causes for each axis and op with more calls or bytes per step than in the baseline."""
    kinds = dict.fromkeys((row.axis, row.op) for row in moved.calls)
    for on, op in kinds:
        rows = [row for row in moved.calls if (row.axis, row.op) == (on, op)]
        changed = [row for row in rows if row.candidate != row.baseline]
        if (axis is None or on == axis) and _grew(changed):
            yield _calls_cause(on, op, changed, moved)


def _grew(rows: Sequence[CallsMoved]) -> bool:
    more = sum(row.candidate - row.baseline for row in rows)
    return more > 0 or _bytes(rows, "candidate") > _bytes(rows, "baseline")


def _bytes(rows: Sequence[CallsMoved], side: str) -> int:
    return sum(getattr(row, side) * (row.message_bytes or 0) for row in rows)


def _calls_cause(axis: str, op: str, rows: Sequence[CallsMoved], moved: _Moved) -> Cause:
    grown = max(rows, key=lambda row: row.candidate - row.baseline)
    before, now = (sum(getattr(row, side) for row in rows) for side in ("baseline", "candidate"))
    one, other = _bytes(rows, "baseline"), _bytes(rows, "candidate")
    told = f"{axis} {op}: {now - before:+,} calls per step (baseline: {_kinds(rows, 'baseline')}; "
    told += f"candidate: {_kinds(rows, 'candidate')})"
    if now > before and one and abs(other / one - 1) <= SAME_BYTES:
        told += ", same bytes in smaller messages"
    ns = sum(row.candidate_ns - row.baseline_ns for row in rows)
    groups = [group.ranks for group in moved.candidate.groups if group.axis == axis]
    return Cause(
        None, axis, op, grown.message_bytes, None, groups[0] if len(groups) == 1 else (), ns, told
    )


def _kinds(rows: Sequence[CallsMoved], side: str) -> str:
    held = [(getattr(row, side), row.message_bytes) for row in rows if getattr(row, side)]
    told = [f"{n:,} of {'unknown size' if b is None else units.size(b)}" for n, b in held[:KINDS]]
    rest = sum(n for n, _ in held[KINDS:])
    return " + ".join([*told, *([f"{rest:,} of other sizes"] if rest else [])]) or "none"


def _of_buckets(buckets: Sequence[str], axis: str | None, moved: _Moved) -> Iterator[Cause]:
    """The bucket that grew most, on the axis with the largest increase."""
    rows = [row for row in moved.times if row.bucket in buckets and row.moved_ns > 0]
    on_axis = [row for row in rows if row.axis is not None and axis in (None, row.axis)]
    best = [row for row in rows if row.axis is None][:1]
    found = next((row for row in on_axis if best and row.bucket == best[0].bucket), None)
    for row in [found] if found else best:
        yield _wait(row, moved) if row.bucket in WAITS else _transfer(row, moved)


def _wait(row: TimeMoved, moved: _Moved) -> Cause:
    told = _told(row)
    blamed = [one for one in moved.blame if one.moved_ns > 0 and row.axis in (None, one.axis)]
    if not blamed:
        return Cause(row.bucket, row.axis, None, None, None, (), row.moved_ns, told)
    worst = blamed[0]
    group = _group_of(worst.rank, row.axis, moved.candidate)
    longer = units.milliseconds(worst.moved_ns)
    whom = f"its group ({units.listed(group)})" if group else "other ranks"
    told += f"; rank {worst.rank} ({worst.cause}) delays {whom} by {longer} more per step"
    op = next((c.op for c in moved.calls if row.axis in (None, c.axis)), None)
    return Cause(row.bucket, row.axis, op, None, worst.rank, group, row.moved_ns, told)


def _group_of(rank: int, axis: str | None, run: RunFacts) -> tuple[int, ...]:
    """The rank's group on the axis; () if unknown."""
    groups = (group.ranks for group in run.groups if group.axis == axis and rank in group.ranks)
    return next(groups, ())


def _transfer(row: TimeMoved, moved: _Moved) -> Cause:
    told = _told(row)
    grown = next((one for one in moved.calls if one.axis == row.axis), None)
    if grown is None or grown.candidate_ns <= grown.baseline_ns:
        return Cause(row.bucket, row.axis, None, None, None, (), row.moved_ns, told)
    size = "" if grown.message_bytes is None else f" of {units.size(grown.message_bytes)}"
    told += f"; mostly {grown.op}{size}, {grown.candidate:,} calls per step"
    groups = [group.ranks for group in moved.candidate.groups if group.axis == row.axis]
    group = groups[0] if len(groups) == 1 else ()
    return Cause(
        row.bucket, row.axis, grown.op, grown.message_bytes, None, group, row.moved_ns, told
    )


def _told(row: TimeMoved) -> str:
    where = "" if row.axis is None else f" on {row.axis}"
    return f"{row.bucket}{where}: {units.signed_milliseconds(row.moved_ns)} per step and rank"


# Differences between the sides: calls by kind, and times by bucket and axis.

_Kind = tuple[str, str, str | None, int | None]


@dataclass(frozen=True, slots=True)
class TimeMoved:
    """Increase of a bucket in the mean step of a rank, on one axis or (None) in total."""

    bucket: str
    axis: str | None
    moved_ns: int


@dataclass(frozen=True, slots=True)
class BlameMoved:
    """Increase of the waits caused by a rank per step, summed over all waiting ranks."""

    rank: int
    cause: str
    axis: str | None
    moved_ns: int


def calls_moved(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> tuple[CallsMoved, ...]:
    """The calls of both sides by kind, largest increase in time first."""
    one, other = _calls(baseline), _calls(candidate)
    none = (0, 0)
    rows = [
        CallsMoved(*kind, one.get(kind, none)[0], other.get(kind, none)[0],
                   one.get(kind, none)[1], other.get(kind, none)[1])
        for kind in dict.fromkeys((*one, *other))
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.baseline_ns - row.candidate_ns))


def _calls(runs: Sequence[RunFacts]) -> Mapping[_Kind, tuple[int, int]]:
    """By kind: medians over the runs of (calls per step, ns of these calls per step)."""
    kinds = dict.fromkeys(
        (row.axis, row.op, row.dtype, row.message_bytes) for run in runs for row in run.calls or ()
    )
    return {kind: _middle(kind, runs) for kind in kinds}


def _middle(kind: _Kind, runs: Sequence[RunFacts]) -> tuple[int, int]:
    found = [
        next(
            ((row.calls, row.calls * (row.transfer_ns + row.wait_ns)) for row in run.calls or ()
             if (row.axis, row.op, row.dtype, row.message_bytes) == kind),
            (0, 0),
        )
        for run in runs
    ]  # fmt: skip
    return int(median(one[0] for one in found)), int(median(one[1] for one in found))


def times_moved(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> tuple[TimeMoved, ...]:
    """The change of each bucket, in total and by axis, by medians over runs; largest first."""
    kinds = dict.fromkeys(
        (row.bucket, row.axis) for run in (*baseline, *candidate) for row in run.times
    )
    rows = [
        TimeMoved(*kind, _mean_ns(kind, candidate) - _mean_ns(kind, baseline)) for kind in kinds
    ]
    return tuple(sorted(rows, key=lambda row: -row.moved_ns))


def _mean_ns(kind: tuple[str, str | None], runs: Sequence[RunFacts]) -> int:
    values = [
        sum(row.mean_ns for row in run.times if (row.bucket, row.axis) == kind) for run in runs
    ]
    return int(median(values))


def blame_moved(
    baseline: Sequence[RunFacts], candidate: Sequence[RunFacts]
) -> tuple[BlameMoved, ...]:
    """The change of the waits caused by each rank, by medians over runs; largest first."""
    kinds = dict.fromkeys(_culprits((*baseline, *candidate)))
    rows = [
        BlameMoved(*kind, _caused_ns(kind, candidate) - _caused_ns(kind, baseline))
        for kind in kinds
    ]
    return tuple(sorted(rows, key=lambda row: -row.moved_ns))


def _culprits(runs: Sequence[RunFacts]) -> Iterator[tuple[int, str, str | None]]:
    for run in runs:
        for row in run.blame:
            if row.rank is not None:
                yield row.rank, row.cause, row.axis


def _caused_ns(kind: tuple[int, str, str | None], runs: Sequence[RunFacts]) -> int:
    values = [
        sum(row.caused_ns for row in run.blame if (row.rank, row.cause, row.axis) == kind)
        for run in runs
    ]
    return int(median(values))
