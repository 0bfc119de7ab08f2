"""The check of a candidate against a baseline: exact for counts, statistical for times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS, WAITS
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.regression import statistics
from stepsplit.analyzer.regression.checks import (
    Answer,
    Budget,
    CallsDelta,
    Cause,
    CheckedMetric,
    CheckedSide,
    CheckResult,
    ShiftedMetric,
)
from stepsplit.analyzer.regression.compare import format_axis, map_axes
from stepsplit.analyzer.regression.metrics import (
    EXPOSED,
    FEW_STEPS,
    INCOMPLETE,
    METRICS,
    BucketTime,
    CallMetrics,
    Doubt,
    RunMetrics,
    Value,
    has_stated_mesh,
    list_mesh_axes,
)
from stepsplit.analyzer.report.report import JOB_MISMATCH
from stepsplit.collectors.formats.run_spec import Mesh

# Runs and budgets -> result.

MIN_SHIFT = 0.01
"""Significant changes below this fraction of the value are not reported."""


def check_candidate(
    candidate: Sequence[RunMetrics],
    baseline: Sequence[RunMetrics],
    budgets: Sequence[Budget],
    across_setups: bool = False,
) -> CheckResult:
    """Check whether the candidate stays within the budgets.

    baseline may be empty if no budget needs one. Raises UsageError for runs that are not comparable
    or lack a checked metric.
    """
    if not candidate or not budgets:
        raise UsageError("nothing to check: pass a candidate and at least one budget")
    mesh_difference = _describe_difference("mesh", [*baseline, *candidate], "unknown")
    baseline, candidate = align_meshes(baseline, candidate)
    warnings = check_setups(baseline, candidate, across_setups)
    expanded = list(statistics.expand_budgets(budgets, (*baseline, *candidate)))
    doubts = _Doubts(
        list_incomplete(baseline, candidate),
        list_mismatches(candidate) if _has_model(budgets) else [],
        list_short(baseline, candidate),
    )
    gated = [
        _doubt_answer(one, budget, doubts)
        for one, budget in zip(_check_budgets(candidate, baseline, expanded), expanded, strict=True)
    ]
    regressed = [one for one in gated if one.answer == "regressed"]
    calls = compute_call_deltas(baseline, candidate)
    return CheckResult(
        answer=_combine_answers(gated),
        baseline=_build_side(baseline) if baseline else None,
        candidate=_build_side(candidate),
        gated=tuple(gated),
        causes=explain_regression(regressed, calls, baseline, candidate)
        if regressed and baseline
        else (),
        calls=tuple(row for row in calls if row.baseline != row.candidate) if baseline else (),
        others=tuple(_find_other_shifts(candidate, baseline, {one.metric for one in gated})),
        warnings=(
            *_list_mesh_warnings(mesh_difference, warnings),
            *warnings,
            *doubts.incomplete,
            *doubts.mismatches,
            *doubts.short,
        ),
        low_confidence=_has_noise(budgets) and 1 in (len(candidate), len(baseline)),
    )


def _list_mesh_warnings(difference: str | None, others: Sequence[str]) -> Iterator[str]:
    """The warning about meshes that were inferred differently, unless it is among the others."""
    if difference is not None and difference not in others:
        yield f"{difference}, inferred from the calls; groups are compared by their ranks"


def _has_model(budgets: Sequence[Budget]) -> bool:
    return any(budget.against == "model" for budget in budgets)


def _has_noise(budgets: Sequence[Budget]) -> bool:
    """Whether any budget is for a metric with noise."""
    return not all(budget.meaning.exact for budget in budgets)


def _check_budgets(
    candidate: Sequence[RunMetrics], baseline: Sequence[RunMetrics], budgets: Sequence[Budget]
) -> list[CheckedMetric]:
    """The answer for each budget, in order."""
    measured = [budget for budget in budgets if not budget.meaning.exact]
    samples = [statistics.build_sample(budget, baseline, candidate) for budget in measured]
    answers = check_measured(samples, min(len(baseline) or len(candidate), len(candidate)))
    by_budget = dict(zip(measured, answers, strict=True))
    return [
        by_budget.get(budget) or check_counted(budget, baseline, candidate) for budget in budgets
    ]


def _combine_answers(gated: Sequence[CheckedMetric]) -> Answer:
    answers = {one.answer for one in gated}
    if "regressed" in answers:
        return "regressed"
    return "inconclusive" if "inconclusive" in answers else "pass"


def _build_side(runs: Sequence[RunMetrics]) -> CheckedSide:
    return CheckedSide(
        tuple(run.name for run in runs), tuple(run.steps for run in runs), runs[0].setup
    )


def _find_other_shifts(
    candidate: Sequence[RunMetrics], baseline: Sequence[RunMetrics], gated: set[str]
) -> Iterator[ShiftedMetric]:
    """Significant changes of metrics without a budget; one false among all of them is as rare as
    that an interval misses."""
    names = [one.name for one in METRICS if not one.exact and one.name != statistics.BANDWIDTH]
    samples = {
        name: statistics.build_sample(Budget(name, "0%", "baseline"), baseline, candidate)
        for name in (names if baseline else ())
        if name not in gated
        and all(run.find_value(name) is not None for run in (*baseline, *candidate))
    }
    tested = [(name, one) for name, one in samples.items() if one.difference is not None]
    is_single = 1 in (len(candidate), len(baseline))
    ps = [statistics.compute_two_sided_p(one.difference, is_single) for _, one in tested]
    for (name, sample), p in zip(tested, statistics.adjust_holm(ps), strict=True):
        if p <= 2 * statistics.ALPHA:
            yield from _find_shift(name, sample)


def _find_shift(name: str, sample: statistics.Sample) -> Iterator[ShiftedMetric]:
    difference, before = sample.difference, sample.baseline
    if difference is None or before is None or abs(sample.harm) <= MIN_SHIFT * abs(before):
        return
    if difference.low > 0 or difference.high < 0:
        yield ShiftedMetric(
            name, before, sample.candidate, sample.harm, difference.low, difference.high
        )


# Runs whose recording or job.toml is not what it should be: no verdict by them.


@dataclass(frozen=True, slots=True)
class _Doubts:
    """Runs that lack calls, whose job.toml is of another job, and that are shorter than the
    baseline's."""

    incomplete: Sequence[str]
    mismatches: Sequence[str]
    short: Sequence[str]


def list_incomplete(baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]) -> list[str]:
    """What is missing in the recordings of some runs and not in those of all others, by run.

    Without a baseline, what is missing in any candidate.
    """
    known = [run for run in (*baseline, *candidate) if run.doubts is not None]
    having = {code: [run for run in known if _find_doubts(run, (code,))] for code in INCOMPLETE}
    unlike = {
        code for code, runs in having.items() if runs and (not baseline or len(runs) < len(known))
    }
    return [_describe_doubt(run, unlike) for run in known if _find_doubts(run, unlike)]


def list_short(baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]) -> list[str]:
    """The candidates, if all of them keep their warm-up and no run of the baseline does."""
    codes = {FEW_STEPS}
    if not baseline or any(_find_doubts(run, codes) or run.doubts is None for run in baseline):
        return []
    if not all(_find_doubts(run, codes) for run in candidate):
        return []
    return [_describe_doubt(run, codes) for run in candidate]


def list_mismatches(candidate: Sequence[RunMetrics]) -> list[str]:
    """The candidates whose job.toml describes another job."""
    codes = {JOB_MISMATCH}
    return [_describe_doubt(run, codes) for run in candidate if _find_doubts(run, codes)]


def _find_doubts(run: RunMetrics, codes: Collection[str]) -> list[Doubt]:
    return [one for one in run.doubts or () if one.code in codes]


def _describe_doubt(run: RunMetrics, codes: Collection[str]) -> str:
    doubts = _find_doubts(run, codes)
    first = doubts[0]
    whose = "" if first.rank is None else f"rank {first.rank}: "
    more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
    return f"{run.name}: {whose}{first.message}{more}"


def _doubt_answer(checked: CheckedMetric, budget: Budget, doubts: _Doubts) -> CheckedMetric:
    """The answer, inconclusive for counts of incomplete runs, for the model of another job, and
    for a regression that may be the warm-up of short runs."""
    reasons: Sequence[str] = ()
    if budget.meaning.exact:
        reasons = doubts.incomplete
    elif budget.against == "model":
        reasons = doubts.mismatches
    elif budget.against == "baseline" and checked.answer == "regressed":
        reasons = doubts.short
    return replace(checked, answer="inconclusive", note=reasons[0]) if reasons else checked


# Counted metrics: calls and bytes per step, compared without statistics.

UNSTEADY_NOTE = "baseline runs differ: an exact comparison is not possible; use a limit such as 5%"

_Counts = Mapping[tuple[str, str], int]
"""(axis, op) -> count per full step over all recorded ranks."""


@dataclass(frozen=True, slots=True)
class _Side:
    """Minimum and maximum over the runs of one side by axis and op, and the maximum total."""

    least: _Counts
    most: _Counts
    most_total: int


def check_counted(
    budget: Budget, baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> CheckedMetric:
    """Check a counted metric: exact budgets compare every axis and op, others the total.

    Raises UsageError if a required baseline is missing, DataError for runs without the metric.
    """
    own = _count_side(budget, candidate)
    if budget.against == "model":
        raise UsageError(f"the model does not predict {budget.metric}; use a fixed limit")
    if budget.against == "limit":
        over = own.most_total - budget.amount
        return _build_counted(budget, None, own, over, 0.0, "regressed" if over > 0 else "pass", "")
    if not baseline:
        raise UsageError(f"budget {budget.metric}:{budget.text} needs a baseline; pass --baseline")
    before = _count_side(budget, baseline)
    if budget.text == "exact":
        return _check_exact(budget, before, own)
    allowed = max(budget.ratio * before.most_total, budget.amount)
    harm = own.most_total - before.most_total
    answer: Answer = "regressed" if harm > allowed else "pass"
    return _build_counted(budget, before, own, harm, allowed, answer, "")


def _check_exact(budget: Budget, before: _Side, own: _Side) -> CheckedMetric:
    kinds = dict.fromkeys((*before.most, *own.most))
    more = [kind for kind in kinds if own.most.get(kind, 0) > before.most.get(kind, 0)]
    harm = own.most_total - before.most_total
    if more:
        changes = ", ".join(_format_count_change(kind, before, own) for kind in more)
        return _build_counted(budget, before, own, harm, 0.0, "regressed", changes)
    if before.least != before.most:
        return _build_counted(budget, before, own, harm, 0.0, "inconclusive", UNSTEADY_NOTE)
    note = "improved: consider updating the baseline" if harm < 0 else ""
    return _build_counted(budget, before, own, harm, 0.0, "pass", note)


def _format_count_change(kind: tuple[str, str], before: _Side, own: _Side) -> str:
    axis, op = kind
    return f"{axis} {op} {before.most.get(kind, 0):,} -> {own.most.get(kind, 0):,}"


def _build_counted(
    budget: Budget, before: _Side | None, own: _Side, harm: float, allowed: float,
    answer: Answer, note: str,
) -> CheckedMetric:  # fmt: skip
    baseline = None if before is None else float(before.most_total)
    candidate = float(own.most_total)
    return CheckedMetric(
        budget.metric, budget.text, answer, baseline, candidate, harm, allowed, note=note
    )


def _count_side(budget: Budget, runs: Sequence[RunMetrics]) -> _Side:
    counts = [_count_by_axis(budget, run) for run in runs]
    totals = [sum(one.values()) for one in counts]
    kinds = dict.fromkeys(kind for one in counts for kind in one)
    return _Side(
        {kind: min(one.get(kind, 0) for one in counts) for kind in kinds},
        {kind: max(one.get(kind, 0) for one in counts) for kind in kinds},
        max(totals),
    )


def _count_by_axis(budget: Budget, run: RunMetrics) -> _Counts:
    if run.calls is None:
        hint = "analyze the recording again: this report is from an older version"
        raise DataError(run.name, f"{budget.metric} is missing", hint)
    name, dot, axis = budget.metric.partition(".")
    axes = _list_axes(run)
    if dot and axis not in axes:
        known = ", ".join(axes) or "none"
        raise UsageError(f"{budget.metric}: {run.name} has no axis {axis!r}; its axes: {known}")
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for row in run.calls:
        if not axis or row.axis == axis:
            counts[row.axis, row.op] += _count(name, row)
    return counts


def _list_axes(run: RunMetrics) -> list[str]:
    """The axes of the run's mesh, then others that its calls have."""
    return list(dict.fromkeys((*list_mesh_axes(run), *(row.axis for row in run.calls or ()))))


def _count(name: str, row: CallMetrics) -> int:
    return row.calls if name == "calls" else row.calls * (row.message_bytes or 0)


# Measured metrics: Welch's t test over runs.

ZERO_NOTE = ""

TOO_FEW_NOTE = "noise unknown with one run per side: record 3 to 5 runs per side"

NOISE_NOTE = "over the budget, but within the noise of the runs"

TOO_NOISY_NOTE = "too noisy to decide"


def check_measured(samples: Sequence[statistics.Sample], n_runs: int) -> list[CheckedMetric]:
    """The answer for each metric; the false-alarm rate is controlled over all of them.

    n_runs: the runs of the smaller side.
    """
    differences = [None if sample.zero else sample.difference for sample in samples]
    adjusted = iter(statistics.adjust_holm([one.p for one in differences if one is not None]))
    ps = [None if one is None else next(adjusted) for one in differences]
    return [_build_measured(sample, p, n_runs) for sample, p in zip(samples, ps, strict=True)]


def _build_measured(sample: statistics.Sample, p: float | None, n_runs: int) -> CheckedMetric:
    difference = None if p is None else sample.difference
    answer, note = _decide_answer(sample, difference, p)
    runs_needed = decidable = None
    if answer == "inconclusive" and sample.budget.against == "baseline":
        runs_needed, decidable = _propose_decision(sample, n_runs)
    return CheckedMetric(
        metric=sample.budget.metric,
        budget=sample.budget.text,
        answer=answer,
        baseline=sample.baseline,
        candidate=sample.candidate,
        harm=sample.harm,
        allowed=sample.allowed,
        low=None if difference is None else difference.low,
        high=None if difference is None else difference.high,
        p=p,
        detectable=None if difference is None else difference.compute_detectable(sample.allowed),
        note=note,
        runs_needed=runs_needed,
        decidable=decidable,
    )


def _propose_decision(sample: statistics.Sample, n_runs: int) -> tuple[int | None, float | None]:
    """What would decide: more runs per side, or a larger budget with n_runs per side."""
    if sample.noise is None:
        return None, None
    needed = statistics.count_runs_needed(sample.noise, sample.allowed)
    more = None if needed is None else max(needed, n_runs + 1)
    return more, statistics.compute_decidable(sample.noise, max(n_runs, 2))


def _decide_answer(
    sample: statistics.Sample, difference: statistics.Difference | None, p: float | None
) -> tuple[Answer, str]:
    if sample.zero:
        return "pass", ZERO_NOTE
    if difference is None or p is None:
        return "inconclusive", TOO_FEW_NOTE
    if difference.mean > sample.allowed and _is_regression(difference, p):
        return "regressed", ""
    if _is_within_budget(difference, sample.allowed):
        return "pass", "better" if difference.high < 0 else ""
    return "inconclusive", NOISE_NOTE if difference.mean > sample.allowed else TOO_NOISY_NOTE


def _is_regression(difference: statistics.Difference, p: float) -> bool:
    """Whether the t test is significant after the adjustment and the permutation test agrees."""
    level = statistics.ALPHA * (difference.p / p if p else 1.0)
    return p <= statistics.ALPHA and difference.confirm_by_permutation(level)


def _is_within_budget(difference: statistics.Difference, allowed: float) -> bool:
    """Whether these runs rule out a change beyond the budget."""
    telling = (
        not allowed
        or difference.compute_detectable(allowed) <= statistics.DETECTABLE_RATIO * allowed
    )
    return telling and difference.is_within(allowed)


# Whether runs are comparable.

REQUIRED_SETTINGS = ("device", "world_size", "mesh", "backend", "ranks")
"""Settings that must be equal on both sides, unless across_setups is set."""

RELEVANT_SETTINGS = ("torch", "nccl", "driver", "hosts", "schedule", "microbatches")
"""Settings whose difference may explain a change; reported as warnings."""

_SETTING_NAMES = {"world_size": "world size", "ranks": "ranks recorded", "nccl": "NCCL"}


def check_setups(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics], across_setups: bool
) -> tuple[str, ...]:
    """Warnings about allowed differences in configuration. Raises UsageError for others."""
    for side in (baseline, candidate):
        _check_distinct(side)
    runs = [*baseline, *candidate]
    refused = [
        difference for name in REQUIRED_SETTINGS if (difference := _describe_difference(name, runs))
    ]
    if refused and not across_setups:
        raise UsageError(
            f"runs are not comparable: {'; '.join(refused)}; use runs of the same setup, or pass "
            "--across-setups"
        )
    return (
        *refused,
        *(
            difference
            for name in RELEVANT_SETTINGS
            if (difference := _describe_difference(name, runs))
        ),
    )


def _check_distinct(side: Sequence[RunMetrics]) -> None:
    """Raises UsageError for a run that is passed twice, which would underestimate the noise."""
    names: dict[object, str] = {}
    for run in side:
        if run.values in names:
            both = f"{names[run.values]} and {run.name}"
            raise UsageError(f"{both} are the same recording; pass each run once per side")
        names[run.values] = run.name


def _describe_difference(
    name: str, runs: Sequence[RunMetrics], unknown: str | None = None
) -> str | None:
    """The different values of a setting with an example run each; None if all are equal.

    unknown is the value of runs without the setting; None leaves them out.
    """
    values: dict[object, str] = {}
    for run in runs:
        value = getattr(run.setup, name)
        value = unknown if value is None else value
        if value is not None:
            values.setdefault(value, run.name)
    if len(values) < 2:
        return None
    values_by_run = (f"{_shorten(value)} in {run}" for value, run in values.items())
    return f"{_SETTING_NAMES.get(name, name)} is {', '.join(values_by_run)}"


def _shorten(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} ranks ({', '.join(map(str, value[:4]))}, ...)"
    return str(value)


# Causes of a regression: the bucket, axis, collective and rank that changed.

MAX_CAUSES = 6

SAME_BYTES = 0.01

MAX_SIZES = 4

_BUCKETS_OF: Mapping[str, Sequence[str]] = {
    **{bucket: (bucket,) for bucket in BUCKETS},
    **dict.fromkeys(("step", "mfu", "hfu"), BUCKETS),
    **dict.fromkeys(("exposed_comm", "overlap"), EXPOSED),
    "busbw": ("collective", "p2p"),
    "bubble_fraction": ("bubble",),
}
"""The buckets that explain a change of each metric."""


@dataclass(frozen=True, slots=True)
class _Deltas:
    """All differences between the sides."""

    times: Sequence[TimeDelta]
    blame: Sequence[BlameDelta]
    calls: Sequence[CallsDelta]
    candidate: RunMetrics


def explain_regression(
    regressed: Sequence[CheckedMetric],
    calls: Sequence[CallsDelta],
    baseline: Sequence[RunMetrics],
    candidate: Sequence[RunMetrics],
) -> tuple[Cause, ...]:
    """The likely causes of the regressions; counts first because they are exact."""
    moved = _Deltas(
        compute_time_deltas(baseline, candidate),
        compute_blame_deltas(baseline, candidate),
        calls,
        candidate[-1],
    )
    names = dict.fromkeys(judged.metric for judged in regressed)
    found = [cause for name in names for cause in _explain_metric(name, moved)]
    ordered = sorted(found, key=lambda cause: (cause.bucket is not None, -cause.moved_ns))
    return tuple({cause.message: cause for cause in ordered}.values())[:MAX_CAUSES]


def _explain_metric(name: str, moved: _Deltas) -> Iterator[Cause]:
    metric, _, rest = name.partition(".")
    axis = rest.split(".")[0] or None
    if metric in ("calls", "bytes"):
        yield from _find_more_calls(axis, moved)
    elif metric in _BUCKETS_OF:
        yield from _explain_buckets(_BUCKETS_OF[metric], axis, moved)


def _find_more_calls(axis: str | None, moved: _Deltas) -> Iterator[Cause]:
    """Causes for each axis and op with more calls or bytes per step than in the baseline."""
    kinds = dict.fromkeys((row.axis, row.op) for row in moved.calls)
    for on, op in kinds:
        rows = [row for row in moved.calls if (row.axis, row.op) == (on, op)]
        changed = [row for row in rows if row.candidate != row.baseline]
        if (axis is None or on == axis) and _has_grown(changed):
            yield _build_calls_cause(on, op, changed, moved)


def _has_grown(rows: Sequence[CallsDelta]) -> bool:
    more = sum(row.candidate - row.baseline for row in rows)
    return more > 0 or _sum_bytes(rows, "candidate") > _sum_bytes(rows, "baseline")


def _sum_bytes(rows: Sequence[CallsDelta], side: str) -> int:
    return sum(getattr(row, side) * (row.message_bytes or 0) for row in rows)


def _build_calls_cause(axis: str, op: str, rows: Sequence[CallsDelta], moved: _Deltas) -> Cause:
    grown = max(rows, key=lambda row: row.candidate - row.baseline)
    before, now = (sum(getattr(row, side) for row in rows) for side in ("baseline", "candidate"))
    one, other = _sum_bytes(rows, "baseline"), _sum_bytes(rows, "candidate")
    text = (
        f"{axis} {op}: {now - before:+,} calls per step (baseline: "
        f"{_format_sizes(rows, 'baseline')}; "
    )
    text += f"candidate: {_format_sizes(rows, 'candidate')})"
    if now > before and one and abs(other / one - 1) <= SAME_BYTES:
        text += ", same bytes in smaller messages"
    ns = sum(row.candidate_ns - row.baseline_ns for row in rows)
    groups = [group.ranks for group in moved.candidate.groups if group.axis == axis]
    return Cause(
        None, axis, op, grown.message_bytes, None, groups[0] if len(groups) == 1 else (), ns, text
    )


def _format_sizes(rows: Sequence[CallsDelta], side: str) -> str:
    counts = [(getattr(row, side), row.message_bytes) for row in rows if getattr(row, side)]
    sizes = [
        f"{n:,} of {'unknown size' if b is None else units.format_size(b)}"
        for n, b in counts[:MAX_SIZES]
    ]
    rest = sum(n for n, _ in counts[MAX_SIZES:])
    return " + ".join([*sizes, *([f"{rest:,} of other sizes"] if rest else [])]) or "none"


def _explain_buckets(buckets: Sequence[str], axis: str | None, moved: _Deltas) -> Iterator[Cause]:
    """The bucket that grew most, on the axis with the largest increase."""
    rows = [row for row in moved.times if row.bucket in buckets and row.delta_ns > 0]
    on_axis = [row for row in rows if row.axis is not None and axis in (None, row.axis)]
    best = [row for row in rows if row.axis is None][:1]
    found = next((row for row in on_axis if best and row.bucket == best[0].bucket), None)
    for row in [found] if found else best:
        is_blamed = row.bucket in (*(bucket.label for bucket in WAITS), *_WORK_CAUSES)
        yield _explain_delay(row, moved) if is_blamed else _explain_transfer(row, moved)


_WORK_CAUSES = {"compute": ("compute", "imbalance"), "copy": ("copy",), "idle": ("host",)}
"""What a rank whose work grows is blamed for."""


def _explain_delay(row: TimeDelta, moved: _Deltas) -> Cause:
    """The cause of longer waits, or of more work, with the rank that delays others by it."""
    text = _format_time_delta(row)
    causes = _WORK_CAUSES.get(row.bucket)
    blamed = [
        one
        for one in moved.blame
        if one.delta_ns > 0
        and row.axis in (None, one.axis)
        and (causes is None or one.cause in causes)
    ]
    if not blamed:
        return Cause(row.bucket, row.axis, None, None, None, (), row.delta_ns, text)
    worst = blamed[0]
    group = _find_group(worst.rank, row.axis, moved.candidate)
    longer = units.format_milliseconds(worst.delta_ns)
    whom = f"its group ({units.format_number_list(group)})" if group else "other ranks"
    text += f"; rank {worst.rank} ({worst.cause}) delays {whom} by {longer} more per step"
    op = next((c.op for c in moved.calls if row.axis in (None, c.axis)), None)
    return Cause(row.bucket, row.axis, op, None, worst.rank, group, row.delta_ns, text)


def _find_group(rank: int, axis: str | None, run: RunMetrics) -> tuple[int, ...]:
    """The rank's group on the axis; () if unknown."""
    groups = (group.ranks for group in run.groups if group.axis == axis and rank in group.ranks)
    return next(groups, ())


def _explain_transfer(row: TimeDelta, moved: _Deltas) -> Cause:
    text = _format_time_delta(row)
    grown = next((one for one in moved.calls if one.axis == row.axis), None)
    if grown is None or grown.candidate_ns <= grown.baseline_ns:
        return Cause(row.bucket, row.axis, None, None, None, (), row.delta_ns, text)
    size = "" if grown.message_bytes is None else f" of {units.format_size(grown.message_bytes)}"
    text += f"; mostly {grown.op}{size}, {grown.candidate:,} calls per step"
    groups = [group.ranks for group in moved.candidate.groups if group.axis == row.axis]
    group = groups[0] if len(groups) == 1 else ()
    return Cause(
        row.bucket, row.axis, grown.op, grown.message_bytes, None, group, row.delta_ns, text
    )


def _format_time_delta(row: TimeDelta) -> str:
    where = "" if row.axis is None else f" on {row.axis}"
    return (
        f"{row.bucket}{where}: {units.format_signed_milliseconds(row.delta_ns)} per step and rank"
    )


# Runs whose meshes were inferred from their calls, and differ because the calls do.


def align_meshes(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> tuple[list[RunMetrics], list[RunMetrics]]:
    """Both sides with the axes of one run, in which groups of the same ranks are on the same axis.

    A mesh that is stated or named is that of the job, else the baseline's is. Runs with another
    stated mesh, or without a group in common, stay as they are.
    """
    runs = [*baseline, *candidate]
    known = [run for run in runs if run.setup.mesh is not None]
    reference = next((run for run in known if has_stated_mesh(run.setup)), next(iter(known), None))
    if reference is None:
        return list(baseline), list(candidate)
    aligned = [
        run
        if run.setup.mesh == reference.setup.mesh or has_stated_mesh(run.setup)
        else _take_axes(run, reference)
        for run in runs
    ]
    return aligned[: len(baseline)], aligned[len(baseline) :]


def _take_axes(run: RunMetrics, reference: RunMetrics) -> RunMetrics:
    """The run with the reference's mesh: the axis of each group is the one along which its ranks
    differ."""
    mesh = _parse_mesh(reference.setup.mesh or "")
    if run.setup.world_size != mesh.world_size or not run.groups:
        return run
    names = map_axes(mesh, run.groups)
    return replace(
        run,
        setup=replace(run.setup, mesh=reference.setup.mesh),
        calls=None if run.calls is None else _rename_calls(run.calls, names),
        times=_rename_times(run.times, names),
        values=_rename_values(run.values, names),
        blame=tuple(replace(row, axis=names.get(row.axis or "", row.axis)) for row in run.blame),
        groups=tuple(
            replace(group, axis=names.get(format_axis(group), group.axis)) for group in run.groups
        ),
    )


def _parse_mesh(text: str) -> Mesh:
    """The mesh of a text such as "pp 2 tp 4"."""
    words = text.split()
    return Mesh.of(dict(zip(words[::2], map(int, words[1::2]), strict=True)))


def _rename_calls(
    calls: Sequence[CallMetrics], names: Mapping[str, str]
) -> tuple[CallMetrics, ...]:
    """The calls on the renamed axes; those that are now of one kind are added up."""
    same: dict[_Kind, list[CallMetrics]] = defaultdict(list)
    for row in calls:
        same[names.get(row.axis, row.axis), row.op, row.dtype, row.message_bytes].append(row)
    return tuple(
        CallMetrics(
            *kind,
            sum(row.calls for row in rows),
            any(row.varies for row in rows),
            int(median(row.transfer_ns for row in rows)),
            int(median(row.wait_ns for row in rows)),
        )
        for kind, rows in same.items()
    )


def _rename_times(times: Sequence[BucketTime], names: Mapping[str, str]) -> tuple[BucketTime, ...]:
    sums: dict[tuple[str, str | None], int] = defaultdict(int)
    for row in times:
        sums[row.bucket, names.get(row.axis or "", row.axis)] += row.mean_ns
    return tuple(BucketTime(*key, mean_ns) for key, mean_ns in sums.items())


def _rename_values(values: Sequence[Value], names: Mapping[str, str]) -> tuple[Value, ...]:
    """The values by renamed axis. Of two bandwidths that are now of one axis the lower is kept;
    others are added up."""
    found: dict[str, float] = {}
    for one in values:
        metric, *rest = one.metric.split(".")
        name = ".".join((metric, *(names.get(part, part) for part in rest)))
        if name not in found:
            found[name] = one.value
        else:
            found[name] = (
                min(found[name], one.value)
                if metric == statistics.BANDWIDTH
                else found[name] + one.value
            )
    return tuple(Value(name, value) for name, value in found.items())


# Differences between the sides: calls by kind, and times by bucket and axis.

_Kind = tuple[str, str, str | None, int | None]


@dataclass(frozen=True, slots=True)
class TimeDelta:
    """Increase of a bucket in the mean step of a rank, on one axis or (None) in total."""

    bucket: str
    axis: str | None
    delta_ns: int


@dataclass(frozen=True, slots=True)
class BlameDelta:
    """Increase of the waits caused by a rank per step, summed over all waiting ranks."""

    rank: int
    cause: str
    axis: str | None
    delta_ns: int


def compute_call_deltas(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> tuple[CallsDelta, ...]:
    """The calls of both sides by kind, largest increase in time first."""
    one, other = _collect_calls(baseline), _collect_calls(candidate)
    none = (0, 0)
    rows = [
        CallsDelta(*kind, one.get(kind, none)[0], other.get(kind, none)[0],
                   one.get(kind, none)[1], other.get(kind, none)[1])
        for kind in dict.fromkeys((*one, *other))
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: row.baseline_ns - row.candidate_ns))


def _collect_calls(runs: Sequence[RunMetrics]) -> Mapping[_Kind, tuple[int, int]]:
    """By kind: medians over the runs of (calls per step, ns of these calls per step)."""
    kinds = dict.fromkeys(
        (row.axis, row.op, row.dtype, row.message_bytes) for run in runs for row in run.calls or ()
    )
    return {kind: _compute_call_medians(kind, runs) for kind in kinds}


def _compute_call_medians(kind: _Kind, runs: Sequence[RunMetrics]) -> tuple[int, int]:
    found = [
        next(
            ((row.calls, row.calls * (row.transfer_ns + row.wait_ns)) for row in run.calls or ()
             if (row.axis, row.op, row.dtype, row.message_bytes) == kind),
            (0, 0),
        )
        for run in runs
    ]  # fmt: skip
    return int(median(one[0] for one in found)), int(median(one[1] for one in found))


def compute_time_deltas(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> tuple[TimeDelta, ...]:
    """The change of each bucket, in total and by axis, by medians over runs; largest first."""
    kinds = dict.fromkeys(
        (row.bucket, row.axis) for run in (*baseline, *candidate) for row in run.times
    )
    rows = [
        TimeDelta(*kind, _compute_median_ns(kind, candidate) - _compute_median_ns(kind, baseline))
        for kind in kinds
    ]
    return tuple(sorted(rows, key=lambda row: -row.delta_ns))


def _compute_median_ns(kind: tuple[str, str | None], runs: Sequence[RunMetrics]) -> int:
    values = [
        sum(row.mean_ns for row in run.times if (row.bucket, row.axis) == kind) for run in runs
    ]
    return int(median(values))


def compute_blame_deltas(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> tuple[BlameDelta, ...]:
    """The change of the waits caused by each rank, by medians over runs; largest first."""
    kinds = dict.fromkeys(_list_culprits((*baseline, *candidate)))
    rows = [
        BlameDelta(*kind, _compute_caused_ns(kind, candidate) - _compute_caused_ns(kind, baseline))
        for kind in kinds
    ]
    return tuple(sorted(rows, key=lambda row: -row.delta_ns))


def _list_culprits(runs: Sequence[RunMetrics]) -> Iterator[tuple[int, str, str | None]]:
    for run in runs:
        for row in run.blame:
            if row.rank is not None:
                yield row.rank, row.cause, row.axis


def _compute_caused_ns(kind: tuple[int, str, str | None], runs: Sequence[RunMetrics]) -> int:
    values = [
        sum(row.caused_ns for row in run.blame if (row.rank, row.cause, row.axis) == kind)
        for run in runs
    ]
    return int(median(values))
