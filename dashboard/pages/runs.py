"""The page with the list of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.headline import round_shares
from stepsplit.analyzer.units import (
    format_date,
    format_milliseconds,
    format_percent,
    format_signed_percent,
)
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url, format_query
from stepsplit.dashboard.pages.components import (
    BUBBLE,
    COLLECTIVE,
    COMPUTE,
    JobRun,
    build_aria_label,
    build_check_pill,
    build_legend,
    build_link,
    build_menu,
    build_progress_bar,
    build_share_bar,
    build_state_pill,
    build_text_field,
    label_jobs,
)
from stepsplit.dashboard.pages.page import PageContent, PageRequest, StorePage, compute_fingerprint
from stepsplit.dashboard.pages.run_actions import build_tags
from stepsplit.dashboard.pages.tables import (
    Cell,
    Content,
    SortHead,
    build_count_cell,
    build_number_cell,
    build_share_cell,
    build_table,
    build_time_cell,
)
from stepsplit.dashboard.store.run_row import RunRow

# The list of runs, searched and sorted by URL parameters, and the upload zone.

MAX_LISTED = 100

_COLUMN_ORDER = (
    "name", "added", "verdict",
    "job", "world", "mesh", "step", "", "compute", "collective", "skew", "bubble", "mfu",
)  # fmt: skip

_COMMON_COLUMNS = ("name", "added", "verdict")
"""Columns that are shown for runs without metrics too."""

_SHARES = {"compute": COMPUTE, "collective": COLLECTIVE, "skew": ("skew",), "bubble": BUBBLE}
"""The buckets of each column with a share of the mean step."""

_HIDDEN_IF_EMPTY = ("verdict", "mesh", "mfu")

GROUP_ROWS = 10
"""Runs of a job that are listed below its heading; a link leads to all of them."""

MAX_GROUPS = 25
"""Jobs with the newest runs, which are listed."""

TREND_RUNS = 24
"""Newest runs in the trend of a job."""


_MESH = r"\s*\w+=[0-9]+(\s*,\s*\w+=[0-9]+)*\s*"
"""Axes and sizes; the analysis refuses unknown axes."""


def build_upload_zone() -> html.Section:
    """The zone where files are dropped; assets/upload.js handles the upload."""
    return html.Section(
        [
            html.H2("Drop a recording here", className="drop-title"),
            html.Div(
                "the folder of a run, its rank trace files, or an archive of them",
                className="drop-hint",
            ),
            html.Div(
                [
                    html.Button("Choose files", id="choose-files", type="button"),
                    html.Button("Choose a folder", id="choose-folder", type="button"),
                ],
                className="drop-buttons",
            ),
            html.Div(
                [
                    _build_field("name", "upload-name", "of the folder or files", maxLength=200),
                    _build_field("tags", "upload-tags", "branch=main, gpus=8"),
                    _build_field("mesh", "upload-mesh", "pp=2,dp=2,tp=2", pattern=_MESH),
                ],
                className="drop-hint drop-fields",
            ),
            html.Div(id="upload-question", className="drop-question", role="group"),
            html.Div(html.Div(id="upload-bar"), id="upload-track", className="track"),
            html.Div(id="upload-status", className="drop-status", role="status"),
        ],
        id="drop-zone",
        className="card drop",
    )


def _build_field(label: str, field_id: str, example: str, **more: Any) -> html.Label:
    return html.Label([f"{label}: ", dcc.Input(id=field_id, placeholder=example, **more)])


def build_runs_page(
    runs: Sequence[RunRow], chosen: AddressQuery, *, may_upload: bool = True
) -> html.Div:
    """The list of runs that match the URL, newest first by default."""
    if not runs:
        upload = " Drop a recording above, or create one with stepsplit demo."
        hint = "No runs yet." + (upload if may_upload else "")
        return html.Div([html.H1("Runs"), html.P(hint, className="card empty")])
    matches = filter_runs(runs, chosen.find_text("q"))
    job = chosen.find_text("job")
    if job is not None:
        matches = [run for run in matches if run.job_key == job]
    if chosen.find_text("group") == "job" and matches:
        return html.Div([_build_heading(runs, chosen), *_build_groups(matches, chosen)])
    ordered = sort_runs(matches, chosen.find_text("sort") or NEWEST)
    columns = choose_columns(ordered[:MAX_LISTED])
    rows = [_build_row(run, columns) for run in ordered[:MAX_LISTED]]
    n_hidden = len(ordered) - len(rows)
    note = f"{n_hidden:,} more runs: search or sort to see them" if n_hidden else ""
    body: Component = html.Div(
        build_table(_build_table_head(chosen, columns), rows), className="card scroll"
    )
    if not rows:
        body = html.P("No run matches this search.", className="card empty")
    return html.Div([_build_heading(runs, chosen), body, html.P(note, className="note")])


def _build_heading(runs: Sequence[RunRow], chosen: AddressQuery) -> html.Div:
    search = build_text_field("q", chosen.find_text("q") or "", "search names, tags, jobs")
    group = chosen.find_text("group")
    menu = build_menu("group", {"": "no groups", "job": "by job"}, group or "", "", "group")
    hint = html.Span("", id="compare-hint", className="note", role="status")
    clear = html.Button("clear selection", id="clear-picks", type="button", className="button",
                        hidden=True)  # fmt: skip
    compare = html.A("compare selected", href="/compare", id="compare-link", className="button off")
    picks = html.Span([hint, clear, compare], className="picks")
    head = html.Div([html.H1("Runs"), search, menu, build_legend(), picks], className="heading")
    job = chosen.find_text("job")
    if job is None:
        return head
    label = label_jobs(JobRun(run.job, run.name) for run in runs).get(job, f"no job {job}")
    kept = {name: chosen.find_text(name) for name in ("q", "sort", "group")}
    line = [
        "job ",
        html.B(label),
        "   ",
        build_link("history", "/history" + format_query({"job": job})),
        "   ",
        build_link("all jobs", "/" + format_query(kept)),
    ]
    return html.Div([head, html.P(line, className="subtitle")])


def choose_columns(runs: Sequence[RunRow], with_job: bool = True) -> tuple[str, ...]:
    """The columns of the list, without those that are empty for all of the runs, and without the
    job if it is the same for all."""
    hidden = {name for name in _HIDDEN_IF_EMPTY if all(COLUMNS[name].key(r) is None for r in runs)}
    if not with_job or len({run.job_key for run in runs if run.headline is not None}) < 2:
        hidden.add("job")
    return tuple(name for name in _COLUMN_ORDER if name not in hidden)


def _build_table_head(chosen: AddressQuery, columns: Sequence[str]) -> list[Content | SortHead]:
    """Column headers; a click sorts by the column, a second click reverses the order."""
    current = chosen.find_text("sort") or NEWEST
    kept = {key: chosen.find_text(key) for key in ("q", "job", "group")}
    heads: list[Content | SortHead] = [html.Span("compare", className="unseen")]
    for name in columns:
        if not name:
            heads.append("time split")
            continue
        # Numbers and dates begin with the largest, names with the first.
        is_first_click = current.removeprefix("-") != name
        is_text = name in ("name", "mesh", "job")
        is_down = current == name or (is_first_click and not is_text)
        where = "/" + format_query({**kept, "sort": f"-{name}" if is_down else name})
        text = COLUMNS[name].head
        if current == name:
            heads.append(SortHead(build_link(f"{text} ▲", where), "ascending"))
        elif current == f"-{name}":
            heads.append(SortHead(build_link(f"{text} ▼", where), "descending"))
        else:
            heads.append(SortHead(build_link(text, where)))
    return heads


def _build_row(run: RunRow, columns: Sequence[str]) -> list[Cell]:
    name = dcc.Link(run.name, href=build_page_url(run.id), className="run-link")
    note = [html.Div(run.note, className="run-note")] if run.note else []
    added = html.Span(format_date(run.created_unix_ns), className="when")
    cells = {
        "name": Cell(html.Div([name, *build_tags(run), *note])),
        "added": Cell(added),
        "verdict": Cell(build_check_pill(run)),
        **_build_number_cells(run),
    }
    shown = [cells[name] for name in columns if name in cells]
    if len(cells) == len(_COMMON_COLUMNS):
        shown.append(Cell(_build_state(run), columns=len(columns) - len(shown)))
    # The checkbox that selects a run for comparison; assets/choose.js handles clicks.
    box: Content = ""
    if run.headline is not None and run.headline.median_step is not None:
        attributes: Any = {
            "data-pick": run.id,
            "data-added": str(run.created_unix_ns),
            "aria-checked": "false",
        }
        box = html.Button("", type="button", className="pick", role="checkbox",
                          **attributes, **build_aria_label(f"compare {run.name}"))  # fmt: skip
    return [Cell(box), *shown]


def _build_number_cells(run: RunRow) -> dict[str, Cell]:
    """The cells with metrics by column; none for a run without metrics."""
    numbers = run.headline
    if numbers is None or numbers.median_step is None:
        return {}
    middle = numbers.median_step
    job: Content = ""
    if run.job is not None:
        url = _build_job_url(run.job.key)
        job = dcc.Link(run.job.key, href=url, title=run.job.label, className="job-key")
    # Rounded together, as on the page of the run.
    rounded = dict(zip(BUCKETS, round_shares(middle.mean.buckets_ns), strict=True))
    return {
        "job": Cell(job),
        "world": build_count_cell(numbers.world_size),
        "mesh": Cell(numbers.mesh or "unknown"),
        "step": build_time_cell(middle.step_ns),
        "": Cell(build_share_bar(middle.shares)),
        **{
            name: build_number_cell(
                format_percent(sum(rounded[one] for one in of)), middle.sum_share(*of), "ratio"
            )
            for name, of in _SHARES.items()
        },
        "mfu": Cell(number=True) if numbers.mfu is None else build_share_cell(numbers.mfu),
    }


def _build_job_url(key: str) -> str:
    return "/" + format_query({"job": key})


# The list of runs, grouped by job.


def _build_groups(runs: Sequence[RunRow], chosen: AddressQuery) -> list[Component]:
    """A section for each job, that with the newest run first; unknown jobs are the last."""
    newest_first = sort_runs(runs, NEWEST)
    labels = label_jobs(JobRun(run.job, run.name) for run in newest_first)
    groups: dict[str, list[RunRow]] = {key: [] for key in labels}
    for run in newest_first:
        groups[run.job_key or ""].append(run)
    ordered = sorted(groups, key=lambda key: key == "")
    sections = [_build_group(groups[key], labels[key], chosen) for key in ordered[:MAX_GROUPS]]
    n_hidden = len(ordered) - len(sections)
    note = f"{n_hidden:,} more jobs: search to see them" if n_hidden else ""
    return [*sections, html.P(note, className="note")]


def _build_group(runs: Sequence[RunRow], label: str, chosen: AddressQuery) -> html.Section:
    """One job: its heading, and below it a table of its runs, which are newest first."""
    ordered = sort_runs(runs, chosen.find_text("sort") or NEWEST)[:GROUP_ROWS]
    columns = choose_columns(ordered, with_job=False)
    table = build_table(
        _build_table_head(chosen, columns), [_build_row(r, columns) for r in ordered]
    )
    key = runs[0].job_key
    number = f"{len(runs):,} run{'' if len(runs) == 1 else 's'}"
    summary = number if len(ordered) == len(runs) else f"{len(ordered)} of {number}"
    links: list[Content] = []
    if key is not None:
        links.append(build_link(f"all {number}" if len(runs) > 1 else number, _build_job_url(key)))
        links.append(build_link("history", "/history" + format_query({"job": key})))
    head = html.Div(
        [html.H2(label), *_build_trend(runs), html.Span(links, className="heading-links")],
        className="section-head group-head",
    )
    rows = html.Details([html.Summary(summary), table], open=True, className="more")
    return html.Section([head, rows], className="card group")


def _build_trend(runs: Sequence[RunRow]) -> list[Component]:
    """The last run of a job, its step against the median of those before, and all as bars."""
    last = f"last {format_date(runs[0].created_unix_ns)}"
    steps = [ns for run in runs if (ns := _read_step_ns(run))]
    if not steps:
        return [html.Span(last, className="note")]
    texts: list[Content] = [f"{last} · median step ", html.B(format_milliseconds(steps[0]))]
    if len(steps) > 1:
        change = format_signed_percent(steps[0] / median(steps[1:]) - 1)
        texts += [" ", html.B(change), " against the median of the runs before"]
    shown: list[Component] = [html.Span(texts, className="note")]
    if len(steps) > 1:
        newest = steps[TREND_RUNS - 1 :: -1]
        most = max(newest)
        bars = [html.I(style={"height": f"{100 * ns / most:.0f}%"}) for ns in newest]
        ends = f"{format_milliseconds(newest[0])} to {format_milliseconds(newest[-1])}"
        label = f"median step of the last {len(newest)} runs: {ends}"
        aria = build_aria_label(label)
        shown.append(html.Span(bars, className="trend", role="img", title=label, **aria))
    return shown


def _build_state(run: RunRow) -> html.Div:
    """Progress of a run without metrics, or the reason why it has none."""
    parts: list[Content] = [build_state_pill(run), " "]
    if run.state == "running" and run.progress is not None:
        parts += [build_progress_bar(run.progress), " ", run.progress_note or ""]
    message = run.error or ("no steps found" if run.headline is not None else "")
    return html.Div([*parts, html.Span(message, className="message")])


# Filter and order of the list of runs.

Key = Callable[[RunRow], float | str | None]

NEWEST = "-added"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the list: its header and sort key; None sorts last."""

    head: str
    key: Key


def _compute_share(run: RunRow, *buckets: str) -> float | None:
    middle = run.headline.median_step if run.headline else None
    return None if middle is None else middle.sum_share(*buckets)


def _read_step_ns(run: RunRow) -> float | None:
    middle = run.headline.median_step if run.headline else None
    return None if middle is None else middle.step_ns


COLUMNS = {
    "name": Column("run", lambda run: run.name.lower()),
    "added": Column("added", lambda run: run.created_unix_ns),
    "verdict": Column("check", lambda run: run.verdict.answer if run.verdict else None),
    "job": Column("job", lambda run: run.job_key),
    "world": Column("world", lambda run: run.headline.world_size if run.headline else None),
    "mesh": Column("mesh", lambda run: (run.headline.mesh if run.headline else None) or None),
    "step": Column("step", _read_step_ns),
    "compute": Column("compute", lambda run: _compute_share(run, *COMPUTE)),
    "collective": Column("collective", lambda run: _compute_share(run, *COLLECTIVE)),
    "skew": Column("of which skew", lambda run: _compute_share(run, "skew")),
    "bubble": Column("bubble", lambda run: _compute_share(run, *BUBBLE)),
    "mfu": Column("MFU", lambda run: run.headline.mfu if run.headline else None),
}


def filter_runs(runs: Sequence[RunRow], asked: str | None) -> list[RunRow]:
    """Runs that contain all words of the search in name, tags, mesh, backend, state, id, job or
    check result."""
    words, matches = (asked or "").lower().split(), []
    for run in runs:
        numbers = run.headline
        known = [] if numbers is None else [numbers.mesh or "", numbers.backend or ""]
        known += [run.verdict.answer] if run.verdict else []
        known += [run.job.key, run.job.label] if run.job else []
        tags = [f"{tag.key}={tag.value}" for tag in run.tags]
        text = " ".join([run.name, run.state, run.id, *known, *tags]).lower()
        if all(word in text for word in words):
            matches.append(run)
    return matches


def sort_runs(runs: Sequence[RunRow], sort: str) -> list[RunRow]:
    """Runs sorted by a column, descending with a leading minus; runs without a value last."""
    column = COLUMNS.get(sort.removeprefix("-"), COLUMNS["added"])
    keyed = [(column.key(run), run) for run in runs]
    known = sorted(
        ((key, run) for key, run in keyed if key is not None),
        key=lambda pair: (pair[0], pair[1].id),
        reverse=sort.startswith("-"),
    )
    return [run for _, run in known] + [run for key, run in keyed if key is None]


# The entry.


def _build_page(request: PageRequest) -> PageContent:
    rows = request.store.list_runs()
    page = build_runs_page(rows, request.address.chosen, may_upload=request.rights.edit)
    return PageContent(page, any(row.pending for row in rows), compute_fingerprint(rows))


PAGE = StorePage("Runs", "/", _build_page, takes_uploads=True)
