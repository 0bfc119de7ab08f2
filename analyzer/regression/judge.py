"""The check of a candidate against a baseline: exact for counts, statistical for times."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stepsplit.analyzer import significance
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.regression.checks import (
    Answer,
    Budget,
    CheckedMetric,
    CheckedSide,
    CheckResult,
    ShiftedMetric,
    keep_last,
)
from stepsplit.analyzer.regression.explain_regression import compute_call_deltas, explain_regression
from stepsplit.analyzer.regression.kinds import (
    KindPair,
    describe_unequal_mix,
    find_swapped_headline,
    list_unpaired,
    make_kind_budget,
    pair_kinds,
)
from stepsplit.analyzer.regression.mesh_alignment import align_meshes
from stepsplit.analyzer.regression.metrics import (
    FEW_STEPS,
    GOODPUT_BOUND,
    METRICS,
    MIXED_STEPS,
    PHASE,
    Doubt,
    RunMetrics,
    list_mesh_axes,
    name_calls,
    split_role,
)
from stepsplit.analyzer.regression.samples import BANDWIDTH, Sample, build_sample, expand_budgets
from stepsplit.analyzer.report.report import INCOMPLETE, JOB_MISMATCH
from stepsplit.analyzer.significance import Difference

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

    baseline may be empty if no budget needs one. Of jobs of several roles, the budgets of step and
    phase are those of the RL step, all others hold for each role, and one such as "trainer/step"
    for that one; each role is checked as runs of its own. Raises UsageError for runs that are not
    comparable or lack a checked metric.
    """
    if not candidate or not budgets:
        raise UsageError("nothing to check: pass a candidate and at least one budget")
    if any(run.roles for run in (*baseline, *candidate)):
        return _check_roles(candidate, baseline, budgets, across_setups)
    if named := next((one.metric for one in budgets if split_role(one.metric)[0]), None):
        raise UsageError(f"budget {named}: of a role, and these runs have none; name runs of roles")
    mesh_difference = _describe_difference("mesh", _name_sides(baseline, candidate), "unknown")
    baseline, candidate = align_meshes(baseline, candidate)
    warnings = check_setups(baseline, candidate, across_setups)
    # The candidates whose job.toml describes another job, if a budget asks for the model.
    asks_model = any(budget.against == "model" for budget in budgets)
    of_other_job = candidate if asks_model else ()
    # The candidates, if all of them keep their warm-up and no run of the baseline does.
    is_short = [bool(_find_doubts(run, {FEW_STEPS})) for run in candidate]
    are_long = [run.doubts is not None and not _find_doubts(run, {FEW_STEPS}) for run in baseline]
    short = candidate if baseline and all(are_long) and all(is_short) else ()
    doubts = _Doubts(
        list_incomplete(baseline, candidate),
        _describe_doubts(of_other_job, {JOB_MISMATCH}),
        _describe_doubts(short, {FEW_STEPS}),
        _list_other_steps(baseline, candidate),
    )
    pairs = pair_kinds(baseline, candidate)
    gated = _check_budgets(candidate, baseline, budgets, doubts, pairs)
    regressed = [one for one in gated if one.answer == "regressed"]
    names = name_calls((*candidate, *baseline))
    calls = [
        replace(row, axis=names.get(row.axis, row.axis))
        for row in compute_call_deltas(baseline, candidate)
    ]
    of_headline = [one for one in regressed if not one.kind]
    causes = explain_regression(of_headline, calls, names, baseline, candidate) if baseline else ()
    slower = {one.metric for one in regressed if one.kind}
    if mesh_difference is not None and mesh_difference not in warnings:
        inferred = "inferred from the calls; groups are compared by their ranks"
        warnings = (f"{mesh_difference}, {inferred}", *warnings)
    has_noise = not all(one.meaning.exact or one.meaning.of_job for one in budgets)
    return CheckResult(
        answer=_find_worst(one.answer for one in gated),
        baseline=_build_side(baseline) if baseline else None,
        candidate=_build_side(candidate),
        gated=tuple(gated),
        causes=(*causes, *(pair.cause for pair in pairs if pair.metric in slower)),
        calls=tuple(row for row in calls if row.baseline != row.candidate) if baseline else (),
        others=tuple(_find_other_shifts(candidate, baseline, {one.metric for one in gated}, pairs)),
        warnings=(
            *warnings,
            *doubts.incomplete,
            *doubts.mismatches,
            *doubts.short,
            *doubts.mixed,
            *list_unpaired(baseline, candidate),
        ),
        low_confidence=has_noise and 1 in (len(candidate), len(baseline)),
    )


def _check_roles(
    candidate: Sequence[RunMetrics],
    baseline: Sequence[RunMetrics],
    budgets: Sequence[Budget],
    across_setups: bool,
) -> CheckResult:
    """The check of the RL step, and of each role, as one result whose texts name the role."""
    # An example of a run for each set of roles.
    sides = {
        ", ".join(one.role for one in run.roles) or "none": run.name
        for run in _name_sides(baseline, candidate)
    }
    if len(sides) > 1:
        named = "; ".join(f"{roles} in {name}" for roles, name in sides.items())
        raise UsageError(f"runs are not comparable: their roles are {named}")
    known = [one.role for one in candidate[0].roles]
    by_role: dict[str, list[Budget]] = {"": [], **{role: [] for role in known}}
    # The budget of one role goes before one of all, wherever it is named.
    for budget in sorted(budgets, key=lambda one: bool(split_role(one.metric)[0])):
        role, metric = split_role(budget.metric)
        own = dataclasses.replace(budget, metric=metric)
        if role and role not in by_role:
            raise UsageError(
                f"budget {budget.metric}: the roles of the runs are {', '.join(known)}"
            )
        is_of_whole = metric.partition(".")[0] in ("step", PHASE)
        for one in (role,) if role or is_of_whole else known:
            by_role[one].append(own)
    parts: list[CheckResult] = []
    warnings: list[str] = []
    for role, own_budgets in by_role.items():
        own_baseline, own_candidate = (
            [
                replace(run, roles=())
                if not role
                else next(one for one in run.roles if one.role == role)
                for run in side
            ]
            for side in (baseline, candidate)
        )
        before = f"{role}: " if role else ""
        if own_budgets:
            last = keep_last(own_budgets)
            part = check_candidate(own_candidate, own_baseline, last, across_setups)
            warnings += (before + text for text in part.warnings)
            parts.append(_name_role(part, role) if role else part)
        elif role:
            # The step of a job of one rollout and two trainers is not that of two and one.
            aligned = align_meshes(own_baseline, own_candidate)
            warnings += (before + text for text in _compare_settings(*aligned, across_setups))
    return CheckResult(
        answer=_find_worst(part.answer for part in parts),
        baseline=_build_side(baseline) if baseline else None,
        candidate=_build_side(candidate),
        gated=tuple(row for part in parts for row in part.gated),
        causes=tuple(row for part in parts for row in part.causes),
        calls=tuple(row for part in parts for row in part.calls),
        others=tuple(row for part in parts for row in part.others),
        warnings=tuple(warnings),
        low_confidence=any(part.low_confidence for part in parts),
    )


def _name_role(part: CheckResult, role: str) -> CheckResult:
    """The check of a role with the role in the texts of its rows."""
    return replace(
        part,
        gated=tuple(replace(row, metric=f"{role}/{row.metric}") for row in part.gated),
        causes=tuple(replace(row, message=f"{role}: {row.message}") for row in part.causes),
        calls=tuple(replace(row, axis=f"{role}: {row.axis}") for row in part.calls),
        others=tuple(replace(row, metric=f"{role}/{row.metric}") for row in part.others),
    )


def _find_worst(answers: Iterable[Answer]) -> Answer:
    """Regressed before inconclusive before pass."""
    given = set(answers)
    return next((one for one in _WORST_FIRST if one in given), "pass")


_WORST_FIRST: tuple[Answer, ...] = ("regressed", "inconclusive")


def _check_budgets(
    candidate: Sequence[RunMetrics],
    baseline: Sequence[RunMetrics],
    budgets: Sequence[Budget],
    doubts: _Doubts,
    pairs: Sequence[KindPair],
) -> list[CheckedMetric]:
    """The answer for each budget, in order; busbw has one for each axis and op, and the step one
    for each kind of steps that both sides have."""
    expanded = list(expand_budgets(budgets, (*baseline, *candidate)))
    measured = [budget for budget in expanded if not budget.meaning.exact]
    samples = [build_sample(budget, baseline, candidate) for budget in measured]
    of_kind = {
        make_kind_budget(budget, pair): pair
        for budget in measured
        if budget.metric == "step" and budget.against == "baseline"
        for pair in pairs
    }
    samples += [build_sample(budget, p.baseline, p.candidate) for budget, p in of_kind.items()]
    answers = check_measured(samples, min(len(baseline) or len(candidate), len(candidate)))
    by_budget = dict(zip((*measured, *of_kind), answers, strict=True))
    unequal_mix = describe_unequal_mix(baseline, candidate)
    gated = []
    for budget in expanded:
        checked = by_budget.get(budget) or check_counted(budget, baseline, candidate)
        reasons: Sequence[str] = ()
        if budget.meaning.exact:
            reasons = doubts.incomplete
        elif budget.against == "model":
            reasons = doubts.mismatches
        elif budget.against == "baseline" and checked.answer == "regressed":
            reasons = doubts.short
        if budget.against == "baseline":
            # Whatever they show, it may be of other steps.
            reasons = doubts.mixed or reasons
            if budget.metric == "mean_step" and unequal_mix is not None:
                reasons = [unequal_mix]
        if budget.meaning.of_job and budget.against == "limit":
            is_within = checked.candidate is not None and checked.candidate >= budget.amount
            checked = replace(checked, answer="pass" if is_within else "regressed", note="")
        if budget.meaning.of_job and checked.answer == "pass":
            reasons = _describe_doubts(candidate, {GOODPUT_BOUND})
        if reasons:
            checked = replace(checked, answer="inconclusive", note=reasons[0])
        gated.append(checked)
    for budget, pair in of_kind.items():
        checked = by_budget[budget]
        note = f"{pair.words}{f': {checked.note}' if checked.note else ''}"
        gated.append(replace(checked, kind=pair.words, note=note))
    return gated


def _build_side(runs: Sequence[RunMetrics]) -> CheckedSide:
    return CheckedSide(
        tuple(run.name for run in runs), tuple(run.steps for run in runs), runs[0].setup
    )


def _find_other_shifts(
    candidate: Sequence[RunMetrics],
    baseline: Sequence[RunMetrics],
    gated: set[str],
    pairs: Sequence[KindPair],
) -> Iterator[ShiftedMetric]:
    """Significant changes of metrics without a budget; one false among all of them is as rare as
    that an interval misses."""
    # Of steps of other kinds, or of unequal mixes of kinds, no metric is compared.
    has_kinds = any(run.kinds for run in (*baseline, *candidate))
    is_unequal = describe_unequal_mix(baseline, candidate) is not None
    unlike = {"mean_step"} if is_unequal or not has_kinds else set[str]()
    if _list_other_steps(baseline, candidate):
        return
    names = [one.name for one in METRICS if not one.exact and one.name != BANDWIDTH]
    samples = {
        name: build_sample(Budget(name, "0%", "baseline"), baseline, candidate)
        for name in (names if baseline else ())
        if name not in gated
        and name not in unlike
        and all(run.find_value(name) is not None for run in (*baseline, *candidate))
    }
    samples |= {
        pair.metric: build_sample(
            Budget(pair.metric, "0%", "baseline"), pair.baseline, pair.candidate
        )
        for pair in pairs
        if pair.metric not in gated
    }
    words = {pair.metric: pair.words for pair in pairs}
    tested = [
        (name, sample, sample.baseline, sample.difference)
        for name, sample in samples.items()
        if sample.difference is not None and sample.baseline is not None
    ]
    is_single = 1 in (len(candidate), len(baseline))
    ps = [significance.compute_two_sided_p(found, is_single) for *_, found in tested]
    adjusted = significance.adjust_holm(ps)
    for (name, sample, before, found), p in zip(tested, adjusted, strict=True):
        is_large = abs(sample.harm) > MIN_SHIFT * abs(before)
        if p <= 2 * significance.ALPHA and is_large and (found.low > 0 or found.high < 0):
            yield ShiftedMetric(
                name,
                before,
                sample.candidate,
                sample.harm,
                found.low,
                found.high,
                kind=words.get(name, ""),
            )


# Runs whose recording or job.toml is not what it should be: no verdict by them.


@dataclass(frozen=True, slots=True)
class _Doubts:
    """Runs that lack calls, whose job.toml is of another job, and that are shorter than the
    baseline's: counts of the first, a prediction of the second and a regression that may be the
    warm-up of the third are inconclusive. So is all that is compared with a baseline if the steps
    of some run are a mix of kinds, or of another kind than those of the other side."""

    incomplete: Sequence[str]
    mismatches: Sequence[str]
    short: Sequence[str]
    mixed: Sequence[str]


def list_incomplete(baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]) -> list[str]:
    """What is missing in the recordings of some runs and not in those of all others, by run.

    Without a baseline, what is missing in any candidate.
    """
    known = [run for run in (*baseline, *candidate) if run.doubts is not None]
    having = {code: [run for run in known if _find_doubts(run, (code,))] for code in INCOMPLETE}
    unlike = {
        code for code, runs in having.items() if runs and (not baseline or len(runs) < len(known))
    }
    return _describe_doubts(known, unlike)


def _list_other_steps(baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]) -> list[str]:
    """Why the headline's steps of both sides are not known to be of one kind."""
    if not baseline:
        return []
    mixed = _describe_doubts((*baseline, *candidate), {MIXED_STEPS})
    swapped = find_swapped_headline(baseline, candidate)
    return mixed if swapped is None else [*mixed, swapped]


def _find_doubts(run: RunMetrics, codes: Collection[str]) -> list[Doubt]:
    return [one for one in run.doubts or () if one.code in codes]


def _describe_doubts(runs: Iterable[RunMetrics], codes: Collection[str]) -> list[str]:
    """The first doubt with these codes of each run that has any."""
    described = []
    for run in runs:
        if doubts := _find_doubts(run, codes):
            first, others = doubts[0], len(doubts) - 1
            whose = "" if first.rank is None else f"rank {first.rank}: "
            more = f" (and {others} more)" if others else ""
            described.append(f"{run.name}: {whose}{first.message}{more}")
    return described


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
    names = name_calls((*candidate, *baseline))
    own = _count_side(budget, candidate, names)
    if budget.against == "model":
        raise UsageError(f"the model does not predict {budget.metric}; use a fixed limit")
    if budget.against == "limit":
        over = own.most_total - budget.amount
        return _build_counted(budget, None, own, over, 0.0, "regressed" if over > 0 else "pass", "")
    if not baseline:
        raise UsageError(f"budget {budget.metric}:{budget.text} needs a baseline; pass --baseline")
    before = _count_side(budget, baseline, names)
    if budget.text == "exact":
        return _check_exact(budget, before, own, names)
    allowed = max(budget.ratio * before.most_total, budget.amount)
    harm = own.most_total - before.most_total
    answer: Answer = "regressed" if harm > allowed else "pass"
    return _build_counted(budget, before, own, harm, allowed, answer, "")


def _check_exact(
    budget: Budget, before: _Side, own: _Side, names: Mapping[str, str]
) -> CheckedMetric:
    kinds = dict.fromkeys((*before.most, *own.most))
    counts = {kind: (before.most.get(kind, 0), own.most.get(kind, 0)) for kind in kinds}
    changes = ", ".join(
        f"{names.get(axis, axis)} {op} {was:,} -> {now:,}"
        for (axis, op), (was, now) in counts.items()
        if now > was
    )
    harm = own.most_total - before.most_total
    answer: Answer = "pass"
    note = "improved: consider updating the baseline" if harm < 0 else ""
    if changes:
        answer, note = "regressed", changes
    elif before.least != before.most:
        answer, note = "inconclusive", UNSTEADY_NOTE
    return _build_counted(budget, before, own, harm, 0.0, answer, note)


def _build_counted(
    budget: Budget, before: _Side | None, own: _Side, harm: float, allowed: float,
    answer: Answer, note: str,
) -> CheckedMetric:  # fmt: skip
    baseline = None if before is None else float(before.most_total)
    candidate = float(own.most_total)
    return CheckedMetric(
        budget.metric, budget.text, answer, baseline, candidate, harm, allowed, note=note
    )


def _count_side(budget: Budget, runs: Sequence[RunMetrics], names: Mapping[str, str]) -> _Side:
    """The calls of each run, or their bytes. Raises UsageError for an axis that neither the mesh
    nor a call has, DataError for a run without calls."""
    name, dot, axis = budget.metric.partition(".")
    counts: list[dict[tuple[str, str], int]] = []
    for run in runs:
        if run.calls is None:
            hint = "analyze the recording again: this report is from an older version"
            raise DataError(run.name, f"{budget.metric} is missing", hint)
        axes = dict.fromkeys((*list_mesh_axes(run), *(row.axis for row in run.calls)))
        shown = dict.fromkeys(names.get(one, one) for one in axes)
        if dot and axis not in (*axes, *shown):
            known = ", ".join(shown) or "none"
            raise UsageError(f"{budget.metric}: {run.name} has no axis {axis!r}; its axes: {known}")
        own: dict[tuple[str, str], int] = defaultdict(int)
        for row in run.calls:
            if not axis or axis in (row.axis, names.get(row.axis)):
                each = 1 if name == "calls" else row.message_bytes or 0
                own[row.axis, row.op] += row.calls * each
        counts.append(own)
    totals = [sum(one.values()) for one in counts]
    kinds = dict.fromkeys(kind for one in counts for kind in one)
    return _Side(
        {kind: min(one.get(kind, 0) for one in counts) for kind in kinds},
        {kind: max(one.get(kind, 0) for one in counts) for kind in kinds},
        max(totals),
    )


# Measured metrics: Welch's t test over runs.

TOO_FEW_NOTE = "noise unknown with one run per side: record 3 to 5 runs per side"

NOISE_NOTE = "over the budget, but within the noise of the runs"

TOO_NOISY_NOTE = "too noisy to decide"


def check_measured(samples: Sequence[Sample], n_runs: int) -> list[CheckedMetric]:
    """The answer for each metric; the false-alarm rate is controlled over all of them.

    n_runs: the runs of the smaller side.
    """
    # A metric that is 0 in every run is not tested: it would cost the others sensitivity.
    differences = [None if sample.zero else sample.difference for sample in samples]
    known = [found for found in differences if found is not None]
    adjusted = iter(significance.adjust_holm([found.p for found in known]))
    checked = []
    for sample, found in zip(samples, differences, strict=True):
        p = None if found is None else next(adjusted)
        answer, note = _decide_answer(sample, found, p)
        runs_needed = decidable = None
        by_runs = answer == "inconclusive" and sample.budget.against == "baseline"
        if by_runs and sample.noise is not None:
            # What would decide: more runs per side, or a larger budget with as many.
            needed = significance.count_runs_needed(sample.noise, sample.allowed)
            runs_needed = None if needed is None else max(needed, n_runs + 1)
            decidable = significance.compute_decidable(sample.noise, max(n_runs, 2))
        checked.append(
            CheckedMetric(
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
                detectable=None if found is None else found.compute_detectable(sample.allowed),
                note=note,
                runs_needed=runs_needed,
                decidable=decidable,
            )
        )
    return checked


def _decide_answer(
    sample: Sample, difference: Difference | None, p: float | None
) -> tuple[Answer, str]:
    if sample.zero:
        return "pass", ""
    if difference is None or p is None:
        return "inconclusive", TOO_FEW_NOTE
    is_over = difference.mean > sample.allowed
    # The permutation test must agree, at the level that is left of ALPHA by Holm's adjustment.
    level = significance.ALPHA * (difference.p / p if p else 1.0)
    if is_over and p <= significance.ALPHA and difference.confirm_by_permutation(level):
        return "regressed", ""
    if _is_within_budget(difference, sample.allowed):
        return "pass", "better" if difference.high < 0 else ""
    return "inconclusive", NOISE_NOTE if is_over else TOO_NOISY_NOTE


def _is_within_budget(difference: Difference, allowed: float) -> bool:
    """Whether these runs rule out a change beyond the budget."""
    telling = (
        not allowed
        or difference.compute_detectable(allowed) <= significance.DETECTABLE_RATIO * allowed
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
    """Warnings about allowed differences in configuration. Raises UsageError for others, and for a
    run that is passed twice, which would underestimate the noise."""
    for side in (baseline, candidate):
        names: dict[object, str] = {}
        for run in side:
            if run.values in names:
                both = f"{names[run.values]} and {run.name}"
                raise UsageError(f"{both} are the same recording; pass each run once per side")
            names[run.values] = run.name
    return _compare_settings(baseline, candidate, across_setups)


def _compare_settings(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics], across_setups: bool
) -> tuple[str, ...]:
    runs = _name_sides(baseline, candidate)
    refused, relevant = (
        [found for name in settings if (found := _describe_difference(name, runs))]
        for settings in (REQUIRED_SETTINGS, RELEVANT_SETTINGS)
    )
    if refused and not across_setups:
        raise UsageError(
            f"runs are not comparable: {'; '.join(refused)}; use runs of the same setup, or pass "
            "--across-setups"
        )
    return (*refused, *relevant)


def _name_sides(
    baseline: Sequence[RunMetrics], candidate: Sequence[RunMetrics]
) -> list[RunMetrics]:
    """All runs; a name that is on both sides says which side it is of."""
    both = {run.name for run in baseline} & {run.name for run in candidate}
    return [
        replace(run, name=f"{run.name} ({side})") if run.name in both else run
        for side, runs in (("baseline", baseline), ("candidate", candidate))
        for run in runs
    ]


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
