"""Page: history of a metric, per job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dash import dcc, html
from dash.development.base_component import Component

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
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url, format_time
from stepsplit.dashboard.pages.components import (
    JobRun,
    build_empty_card,
    build_graph,
    build_menu,
    build_section,
    build_text_field,
    build_time_fields,
    label_jobs,
)
from stepsplit.dashboard.pages.level_changes import MAX_RUNS, LevelChange, find_level_changes
from stepsplit.dashboard.pages.page import PageContent, PageRequest, StorePage
from stepsplit.dashboard.pages.tables import (
    Cell,
    build_number_cell,
    build_share_change_cell,
    build_table,
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
    """What is shown of a metric: its runs by job, most runs first, the budget, and the range of
    time; what is typical is said by all runs."""

    metric: HistoryMetric
    jobs: tuple[JobPoints, ...]
    budget: float | None
    first_ns: float = 0
    last_ns: float = math.inf

    def is_shown(self, point: MetricPoint) -> bool:
        """Whether the run is of the range of time that is chosen."""
        return self.first_ns <= point.created_unix_ns <= self.last_ns

    def scale_values(self, job: JobPoints) -> list[float]:
        """The values of the job in the displayed unit."""
        return [point.value / self.metric.scale for point in job.points]

    def build_points(self, job: JobPoints) -> tuple[HistoryPoint, ...]:
        """The runs of the job for a figure."""
        values = zip(job.points, self.scale_values(job), strict=True)
        return tuple(
            HistoryPoint(p.name, p.created_unix_ns, value, p.run_id) for p, value in values
        )

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
    first_s, last_s = chosen.parse_time_s("from"), chosen.parse_time_s("to")
    view = HistoryView(
        METRICS[choose_metric(chosen)],
        tuple(shown),
        _parse_number(chosen.find_text("budget")),
        (first_s or 0) * 1e9,
        math.inf if last_s is None else last_s * 1e9,
    )
    controls = _build_controls(jobs, tags, chosen)
    if sum(view.is_shown(point) for job in view.jobs for point in job.points) < MIN_POINTS:
        hint = "A history needs at least two runs: upload more, or choose other menus or times."
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
        levels = []
        if changed:
            levels.append(Level(max(0, len(job.points) - MAX_RUNS), changed[0].before))
            levels += [Level(one.at, one.after, _format_change(one)) for one in changed]
        figure = draw_history(view.build_points(job), title, view.budget, levels)
    when = [one.created_unix_ns for job in view.jobs for one in job.points]
    ends_ns = max(view.first_ns, min(when)), min(view.last_ns, max(when))
    if view.first_ns > min(when) or view.last_ns < max(when):
        figure.update_xaxes(range=[format_time(ns / 1e9) for ns in (ends_ns[0], ends_ns[1] + 6e10)])
    figure.update_layout(dragmode="zoom")
    figure.update_yaxes(fixedrange=True)
    note += "; drag in the chart to choose a range of time"
    return build_section(
        view.metric.label.capitalize(), note, build_graph("history", figure, "/run/{key}")
    )


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
    when = [one.created_unix_ns / 1e9 for job in jobs for one in job.points]
    if when:
        menus += build_time_fields(chosen, min(when), max(when))
    note = "finished runs only; choose a job and a tag to compare like with like"
    return build_section("Metric and runs", note, html.Div(menus, className="choices"))


def _parse_number(text: str | None) -> float | None:
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _format_change(change: LevelChange) -> str:
    return "from zero" if change.ratio is None else format_signed_percent(change.ratio)


def _build_changes(
    view: HistoryView, changes: Sequence[tuple[JobPoints, Sequence[LevelChange]]]
) -> html.Section:
    note = "significant changes that last three runs or more; for information, not used by check"
    found = [
        (job, one) for job, changed in changes for one in changed
        if view.is_shown(job.points[one.at])
    ]  # fmt: skip
    if not found:
        number = sum(min(len(job.points), MAX_RUNS) for job, _ in changes)
        of_jobs = f" of {len(changes):,} jobs" if view.has_jobs else ""
        none = f"No lasting change in {number:,} runs{of_jobs}."
        return build_section("Changes", note, html.P(none, className="message"))
    found.sort(key=lambda pair: pair[0].points[pair[1].at].created_unix_ns, reverse=True)
    heads = ("first run of the new level", *_build_job_head(view), "before", "after", "change")
    rows = [
        [
            Cell(_build_run_link(job.points[one.at])),
            *_build_job_cell(view, job),
            _build_value_cell(one.before, view.metric),
            _build_value_cell(one.after, view.metric),
            build_number_cell(_format_change(one), one.ratio, "ratio"),
        ]
        for job, one in found
    ]
    return build_section("Changes", note, build_table(heads, rows))


def _build_run_link(point: MetricPoint) -> dcc.Link:
    return dcc.Link(point.name, href=build_page_url(point.run_id), className="run-link")


def _build_job_head(view: HistoryView) -> list[str]:
    return ["job"] if view.has_jobs else []


def _build_job_cell(view: HistoryView, job: JobPoints) -> list[Cell]:
    return [Cell(html.Span(job.label, className="job"))] if view.has_jobs else []


def _build_value_cell(value: float, metric: HistoryMetric) -> Cell:
    # Four digits: 384.0 above 58.32.
    decimals = min(max(3 - math.floor(math.log10(abs(value))), 0), 3) if value else 0
    return build_number_cell(f"{value:,.{decimals}f} {metric.unit.split()[0]}", value)


def _build_table(view: HistoryView) -> html.Section:
    """The newest runs of all shown jobs; typical is what the runs of the same job have."""
    places = [
        (job, i) for job in view.jobs for i, one in enumerate(job.points) if view.is_shown(one)
    ]
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
        Cell(number=True) if typical is None else _build_value_cell(typical.median, view.metric),
        Cell(number=True) if change is None else build_share_change_cell(change),
        Cell(html.Span(", ".join(remarks), className="pill failed") if remarks else ""),
    ]


# The entry.


def _build_page(request: PageRequest) -> PageContent:
    chosen = request.address.chosen
    tags = {
        run.id: {f"{tag.key}={tag.value}" for tag in run.tags} for run in request.store.list_runs()
    }
    points = request.store.numbers.read_history(choose_metric(chosen))
    wanted = chosen.find_text("tag")
    # A run may have been deleted between the two reads.
    own = [one for one in points if not wanted or wanted in tags.get(one.run_id, ())]
    known = sorted(set().union(*tags.values()))
    return PageContent(html.Div([html.H1("History"), *build_history_page(own, known, chosen)]))


PAGE = StorePage("History", "/history", _build_page, loads_charts=True, charts=("history",))
