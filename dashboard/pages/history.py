"""Page: history of a metric, per job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean

import numpy as np
from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.significance import (
    compute_difference,
    estimate_successive_noise,
    run_welch_test,
)
from stepsplit.analyzer.units import format_signed_percent
from stepsplit.dashboard.figures.communication import (
    FEWEST as FEWEST_USUAL,
    MAX_JOBS,
    HistoryPoint,
    JobHistory,
    Level,
    compute_typical_range,
    draw_history,
    draw_job_histories,
)
from stepsplit.dashboard.pages.components import (
    AddressQuery,
    Cell,
    JobRun,
    build_empty_card,
    build_graph,
    build_menu,
    build_number_cell,
    build_page_url,
    build_section,
    build_share_change_cell,
    build_table,
    build_text_field,
    label_jobs,
)
from stepsplit.dashboard.store.metrics import MetricPoint

# History: a metric over the runs of one job or several, with outliers, level changes and a budget.

MIN_POINTS = 2


@dataclass(frozen=True, slots=True)
class HistoryMetric:
    """How a metric is shown: label, unit, and the size of one unit in the stored unit."""

    label: str
    unit: str
    scale: float


METRICS: Mapping[str, HistoryMetric] = {
    "step_ns": HistoryMetric("median step", "ms", 1e6),
    "exposed_comm": HistoryMetric("exposed communication", "% of step time", 0.01),
    "skew": HistoryMetric("skew", "% of step time", 0.01),
    "bubble": HistoryMetric("bubble", "% of step time", 0.01),
    "idle": HistoryMetric("idle", "% of step time", 0.01),
    "bubble_fraction": HistoryMetric("bubble fraction of the schedule", "%", 0.01),
    "mfu": HistoryMetric("MFU", "%", 0.01),
    "peak_memory_bytes": HistoryMetric("peak memory (largest rank)", "GiB", float(2**30)),
}


def choose_metric(chosen: AddressQuery) -> str:
    """The metric named in the URL; by default the step time."""
    name = chosen.find_text("metric")
    return name if name is not None and name in METRICS else "step_ns"


@dataclass(frozen=True, slots=True)
class JobPoints:
    """The values of the runs of one job, oldest first; key is "" for runs of unknown jobs."""

    key: str
    label: str
    points: tuple[MetricPoint, ...]


@dataclass(frozen=True, slots=True)
class HistoryView:
    """What is shown of a metric: its runs by job, most runs first, and the budget."""

    metric: HistoryMetric
    jobs: tuple[JobPoints, ...]
    budget: float | None

    def scale_values(self, job: JobPoints) -> list[float]:
        """The values of the job in the displayed unit."""
        return [point.value / self.metric.scale for point in job.points]

    def build_points(self, job: JobPoints) -> tuple[HistoryPoint, ...]:
        """The runs of the job for a figure."""
        values = zip(job.points, self.scale_values(job), strict=True)
        return tuple(HistoryPoint(p.name, p.created_unix_ns, value) for p, value in values)

    @property
    def has_jobs(self) -> bool:
        """Whether runs of more than one job are shown."""
        return len(self.jobs) > 1


def build_history_page(
    points: Sequence[MetricPoint], tags: Sequence[str], chosen: AddressQuery
) -> list[Component]:
    """The history of the chosen metric, of the chosen job or with a line for each job.

    points: values of the runs with the chosen tag, oldest first; tags: all tags, as key=value.
    """
    jobs = group_by_job(points)
    wanted = chosen.find_text("job")
    shown = jobs if wanted is None else [job for job in jobs if job.key == wanted]
    view = HistoryView(
        METRICS[choose_metric(chosen)], tuple(shown), _parse_number(chosen.find_text("budget"))
    )
    controls = _build_controls(jobs, tags, chosen)
    if sum(len(job.points) for job in view.jobs) < MIN_POINTS:
        hint = "A history needs at least two runs: upload more, or choose other menus."
        return [controls, build_empty_card("Too few runs", hint)]
    drawn = view.jobs[:MAX_JOBS]
    changes = [(job, find_level_changes(view.scale_values(job))) for job in drawn]
    return [
        controls,
        _build_figure(view, changes[0][1]),
        _build_changes(view, changes),
        _build_table(view),
    ]


def group_by_job(points: Sequence[MetricPoint]) -> list[JobPoints]:
    """The points by job: jobs with most runs first, then those with the newest run."""
    newest_first = list(reversed(points))
    labels = label_jobs(JobRun(point.job, point.name) for point in newest_first)
    groups: dict[str, list[MetricPoint]] = {key: [] for key in labels}
    for point in points:
        groups[point.job.key if point.job else ""].append(point)
    jobs = [JobPoints(key, labels[key], tuple(own)) for key, own in groups.items()]
    return sorted(jobs, key=lambda job: -len(job.points))


def _build_figure(view: HistoryView, changed: Sequence[LevelChange]) -> html.Section:
    title = f"{view.metric.label}, {view.metric.unit}"
    if view.has_jobs:
        n_left = len(view.jobs) - MAX_JOBS
        note = "a line for each job; choose one to see its typical range"
        note += f"; {n_left} more jobs are not drawn" if n_left > 0 else ""
        lines = [JobHistory(job.label, view.build_points(job)) for job in view.jobs[:MAX_JOBS]]
        figure = draw_job_histories(lines, title, view.budget)
    else:
        (job,) = view.jobs
        note = "◆ outlier: beyond 3 σ of the neighboring runs"  # noqa: RUF001
        if len(job.points) < FEWEST_USUAL:
            note = f"outliers are marked from {FEWEST_USUAL} runs on"
        levels = _build_levels(changed, len(job.points))
        figure = draw_history(view.build_points(job), title, view.budget, levels)
    return build_section(view.metric.label.capitalize(), note, build_graph("history", figure))


def _build_controls(
    jobs: Sequence[JobPoints], tags: Sequence[str], chosen: AddressQuery
) -> html.Section:
    tag, job = chosen.find_text("tag"), chosen.find_text("job")
    tag_options = {"": "all runs", **{one: one for one in tags}}
    job_options = {"": "all jobs"} | {
        one.key: f"{one.label} ({len(one.points)})" for one in jobs if one.key
    }
    metrics = {key: one.label for key, one in METRICS.items()}
    menus = [
        build_menu("metric", metrics, choose_metric(chosen), "step_ns"),
        build_menu("job", job_options, job if job in job_options else "", ""),
        build_menu("tag", tag_options, tag if tag in tag_options else "", ""),
        build_text_field("budget", chosen.find_text("budget") or "", "budget", "none"),
    ]
    note = "finished runs only; choose a job and a tag to compare like with like"
    return build_section("Metric and runs", note, html.Div(menus, className="choices"))


def _parse_number(text: str | None) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _build_levels(changed: Sequence[LevelChange], count: int) -> list[Level]:
    if not changed:
        return []
    first = Level(max(0, count - MAX_RUNS), changed[0].before)
    return [first, *(Level(one.at, one.after, _format_change(one)) for one in changed)]


def _format_change(change: LevelChange) -> str:
    return "from zero" if change.ratio is None else format_signed_percent(change.ratio)


def _build_changes(
    view: HistoryView, changes: Sequence[tuple[JobPoints, Sequence[LevelChange]]]
) -> html.Section:
    note = "significant changes that last three runs or more; for information, not used by check"
    found = [(job, one) for job, changed in changes for one in changed]
    if not found:
        number = sum(min(len(job.points), MAX_RUNS) for job, _ in changes)
        of_jobs = f" of {len(changes):,} jobs" if view.has_jobs else ""
        none = f"No lasting change in {number:,} runs{of_jobs}."
        return build_section("Changes", note, html.P(none, className="message"))
    found.sort(key=lambda pair: pair[0].points[pair[1].at].created_unix_ns, reverse=True)
    heads = ("first run of the new level", *_build_job_head(view), "before", "after", "change")
    rows = [_build_change_row(view, job, one) for job, one in found]
    return build_section("Changes", note, build_table(heads, rows))


def _build_change_row(view: HistoryView, job: JobPoints, change: LevelChange) -> list[Cell]:
    point = job.points[change.at]
    return [
        Cell(_build_run_link(point)),
        *_build_job_cell(view, job),
        _build_value_cell(change.before, view.metric),
        _build_value_cell(change.after, view.metric),
        build_number_cell(_format_change(change), change.ratio, "ratio"),
    ]


def _build_run_link(point: MetricPoint) -> dcc.Link:
    return dcc.Link(point.name, href=build_page_url(point.run_id), className="run-link")


def _build_job_head(view: HistoryView) -> list[str]:
    return ["job"] if view.has_jobs else []


def _build_job_cell(view: HistoryView, job: JobPoints) -> list[Cell]:
    return [Cell(html.Span(job.label, className="job"))] if view.has_jobs else []


def _build_value_cell(value: float, metric: HistoryMetric) -> Cell:
    return build_number_cell(f"{value:,.4g} {metric.unit.split()[0]}", value)


def _build_table(view: HistoryView) -> html.Section:
    """The newest runs of all shown jobs; typical is what the runs of the same job have."""
    places = [(job, i) for job in view.jobs for i in range(len(job.points))]
    places.sort(key=lambda place: place[0].points[place[1]].created_unix_ns, reverse=True)
    values = {job.key: view.scale_values(job) for job in view.jobs}
    rows = [_build_row(view, job, values[job.key], i) for job, i in places]
    heads = ("run", *_build_job_head(view), view.metric.label, "typical", "difference", "remark")
    note = "newest first" + ("; typical of the runs of the same job" if view.has_jobs else "")
    return build_section("Runs", note, build_table(heads, rows))


def _build_row(view: HistoryView, job: JobPoints, values: Sequence[float], at: int) -> list[Cell]:
    point, typical, value = job.points[at], compute_typical_range(values, at), values[at]
    change = value / typical.median - 1 if typical and typical.median else None
    remarks = ["outlier"] if typical and not typical.is_typical(value) else []
    remarks += ["over budget"] if view.budget is not None and value > view.budget else []
    return [
        Cell(_build_run_link(point)),
        *_build_job_cell(view, job),
        _build_value_cell(value, view.metric),
        Cell(number=True)
        if typical is None
        else build_number_cell(f"{typical.median:,.4g}", typical.median),
        Cell(number=True) if change is None else build_share_change_cell(change),
        Cell(html.Span(", ".join(remarks), className="pill failed") if remarks else ""),
    ]


# Lasting changes of a metric over runs; shown on the page only, not used by the check command.
#
# Change points are proposed by PELT (R. Killick, P. Fearnhead, I. Eckley, J. Amer. Stat. Assoc.
# 107, 2012) and kept if the levels before and after differ significantly, corrected for the number
# of places tested.

MIN_LEVEL_RUNS = 3
"""Fewest runs of a level: one or two may be outliers."""

MIN_CHANGE = 0.01
"""Changes below this fraction of the previous level are ignored."""

MAX_RUNS = 200
"""Newest runs to search: with more, no permutation test reaches the corrected significance."""

ALPHA = 0.05
"""Probability of any false change over all places tested."""

_PENALTY = 3.0
"""PELT penalty per level, in units of variance times the logarithm of the number of runs."""


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A lasting change: `at` is the index of the first run of the new level; before and after are
    the means of the two levels, in the unit of the values."""

    at: int
    before: float
    after: float

    @property
    def ratio(self) -> float | None:
        """Relative change of the level; None if it was zero before."""
        return (self.after - self.before) / abs(self.before) if self.before else None


def find_level_changes(values: Sequence[float]) -> tuple[LevelChange, ...]:
    """Lasting changes among the newest MAX_RUNS values, oldest first."""
    older = max(0, len(values) - MAX_RUNS)
    newest = _detect_changes(tuple(values[older:]))
    return tuple(LevelChange(older + one.at, one.before, one.after) for one in newest)


@lru_cache(maxsize=64)
def _detect_changes(values: tuple[float, ...]) -> tuple[LevelChange, ...]:
    if len(values) < 2 * MIN_LEVEL_RUNS:
        return ()
    level = ALPHA / (len(values) - 2 * MIN_LEVEL_RUNS + 1)
    edges = [0, *_propose_edges(values), len(values)]
    while len(edges) > 2:
        chances = [
            _compute_p_value(before, after, level)
            for before, after in _split_at_edges(values, edges)
        ]
        if max(chances) <= level:
            break
        del edges[1 + chances.index(max(chances))]
    sides = _split_at_edges(values, edges)
    return tuple(
        LevelChange(at, fmean(before), fmean(after))
        for at, (before, after) in zip(edges[1:-1], sides, strict=True)
    )


def _split_at_edges(
    values: Sequence[float], edges: Sequence[int]
) -> list[tuple[Sequence[float], Sequence[float]]]:
    """For each inner edge, the values of the level before it and of the level after it."""
    levels = [values[low:high] for low, high in pairwise(edges)]
    return list(pairwise(levels))


def _propose_edges(values: Sequence[float]) -> list[int]:
    """Indices at which a new level may begin, without 0."""
    from ruptures import KernelCPD  # takes seconds to load

    penalty = _PENALTY * _estimate_noise(values) ** 2 * math.log(len(values))
    signal = np.array(values, dtype=np.float64)[:, None]
    found = KernelCPD("linear", min_size=MIN_LEVEL_RUNS).fit(signal).predict(pen=penalty)
    return [int(edge) for edge in found[:-1]]


def _estimate_noise(values: Sequence[float]) -> float:
    """Standard deviation of a run, from consecutive differences so that level changes do not
    contribute. Never zero."""
    min_noise = 0.1 * MIN_CHANGE * max(map(abs, values))
    return max(estimate_successive_noise(values), min_noise, 1e-12)


def _compute_p_value(before: Sequence[float], after: Sequence[float], level: float) -> float:
    """The p value of the difference between two levels; 1 if it is too small to matter or to be
    significant."""
    shift = run_welch_test(before, after)
    # The normal test is a lower bound for the t test; it avoids slow permutations.
    min_shift = NormalDist().inv_cdf(1 - level) * shift.error
    if abs(shift.mean) <= max(min_shift, MIN_CHANGE * abs(fmean(before)), 1e-12):
        return 1.0
    low, high = (before, after) if shift.mean > 0 else (after, before)
    test = compute_difference(low, high)
    return 1.0 if test is None else max(test.p, test.p_permutation)
