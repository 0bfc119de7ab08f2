"""The page with the list of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, cast

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.units import format_date, format_milliseconds, format_signed_percent
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url, format_query
from stepsplit.dashboard.pages.components import (
    JobRun,
    build_aria_label,
    build_choice_link,
    build_legend,
    build_link,
    build_menu,
    build_progress_bar,
    build_state_pill,
    build_text_field,
    label_jobs,
)
from stepsplit.dashboard.pages.page import (
    PageContent,
    PageRequest,
    StorePage,
    build_live_frame,
    compute_fingerprint,
)
from stepsplit.dashboard.pages.run_actions import RunRights, build_pick_bar, build_pick_button
from stepsplit.dashboard.pages.run_columns import (
    COLUMNS,
    NAME,
    NEWEST,
    TAG,
    build_cells,
    choose_columns,
    filter_runs,
    find_column,
    has_tags,
    list_tag_keys,
    read_median_step,
    sort_runs,
    split_tags,
)
from stepsplit.dashboard.pages.tables import Cell, Content, SortHead, build_table
from stepsplit.dashboard.store.run_row import RunRow

# The list of runs, searched and sorted by URL parameters, and the upload zone.

MAX_LISTED = 100
"""Runs of a page of the list."""

MAX_TAGS = 60
"""Tags in a menu."""

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
                    _build_field("tags", "upload-tags", "branch=main"),
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


_ALL = RunRights()


@dataclass(frozen=True, slots=True)
class RunsPage:
    """What the list shows: all runs, those that match the address, and the choices in it."""

    runs: Sequence[RunRow]
    matches: Sequence[RunRow]
    chosen: AddressQuery
    rights: RunRights

    @property
    def is_grouped(self) -> bool:
        return self.chosen.find_text("group") == "job"

    @property
    def sort(self) -> str:
        return self.chosen.find_text("sort") or NEWEST

    @property
    def ordered(self) -> list[RunRow]:
        return sort_runs(self.matches, self.sort)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table, which are those of all runs: they stay while the list is
        searched and paged."""
        has_one_job = self.is_grouped or self.chosen.find_text("job") is not None
        asked = self.chosen.find_text("columns")
        return choose_columns(self.runs, asked, with_job=not has_one_job)

    def build_url(self, **changes: object) -> str:
        """The address with some choices changed; it shows the first page of the list."""
        return "/" + format_query({**self.chosen.values, "page": None, **changes})


def select_runs_page(runs: Sequence[RunRow], chosen: AddressQuery, rights: RunRights) -> RunsPage:
    """The runs that match the search, the tags and the job of the address."""
    matches, tags = filter_runs(runs, chosen.find_text("q")), split_tags(chosen.find_text("tag"))
    job = chosen.find_text("job")
    matches = [run for run in matches if has_tags(run, tags) and job in (None, run.job_key)]
    return RunsPage(runs, matches, chosen, rights)


def build_runs_page(
    runs: Sequence[RunRow], chosen: AddressQuery, rights: RunRights = _ALL, mark: str = ""
) -> html.Div:
    """The list of runs that match the URL, newest first by default; it updates by itself."""
    page = select_runs_page(runs, chosen, rights)
    parts: list[Component] = [html.H1("Runs")]
    if runs:
        # Above what is drawn again after each choice, so that the field keeps what is typed
        # meanwhile, and the menu stays open.
        group = {"": "no groups", "job": "by job"}
        parts += [
            build_text_field("q", chosen.find_text("q") or "", "search names, tags, jobs"),
            build_menu("group", group, chosen.find_text("group") or "", "", "group"),
            _build_column_choice(page),
        ]
    head = html.Div(parts, className="heading")
    live = build_live_frame(build_list(page), mark)
    return html.Div([head, live, *_build_selection(rights)])


def build_list(page: RunsPage) -> html.Div:
    """The filters of the address, and the table of runs that match, or one for each job."""
    if not page.runs:
        upload = " Drop a recording above, or create one with stepsplit demo."
        hint = "No runs yet." + (upload if page.rights.edit else "")
        return html.Div(html.P(hint, className="card empty"))
    filters = _build_filters(page)
    if not page.matches:
        return html.Div([*filters, html.P("No run matches this search.", className="card empty")])
    if page.is_grouped:
        return html.Div([*filters, *_build_groups(page)])
    ordered, columns = page.ordered, page.columns
    n_pages = -(-len(ordered) // MAX_LISTED)
    at = min(max(page.chosen.parse_int("page") or 1, 1), n_pages)
    first = MAX_LISTED * (at - 1)
    shown = ordered[first : first + MAX_LISTED]
    table = build_table(
        _build_table_head(page, columns), [_build_row(run, columns, page.rights) for run in shown]
    )
    count = f"{len(ordered):,} run{'' if len(ordered) == 1 else 's'}"
    if len(ordered) < len(page.runs):
        count = f"{len(ordered):,} of {len(page.runs):,} runs"
    foot: list[Component] = [html.Span(count)]
    if n_pages > 1:
        foot = [html.Span(f"{first + 1:,} to {first + len(shown):,} of {count}")]
        for words, number in (("previous", at - 1), ("next", at + 1)):
            value = str(number) if number > 1 else ""
            if 1 <= number <= n_pages:
                url = page.build_url(page=value)
                foot.append(build_choice_link(f"{words} page", url, "page", value=value))
        foot.append(html.Span(f"page {at} of {n_pages}"))
    pager = html.Nav(foot, className="pager run-pager", **build_aria_label("pages of the list"))
    return html.Div([*filters, html.Div(table, className="card"), pager])


def _build_filters(page: RunsPage) -> list[Component]:
    """What the list is filtered by, and the tags by which it can be filtered further."""
    chosen, lines = page.chosen, list[Component]()
    job = chosen.find_text("job")
    if job is not None:
        label = label_jobs(JobRun(run.job, run.name) for run in page.runs).get(job, f"no job {job}")
        line = [
            "job ", html.B(label), "   ",
            build_link("history", "/history" + format_query({"job": job})), "   ",
            build_choice_link("all jobs", page.build_url(job=None), "job", value=""),
        ]  # fmt: skip
        lines.append(html.P(line, className="subtitle"))
    now = split_tags(chosen.find_text("tag"))
    parts: list[Component] = []
    if now:
        chips = []
        for one in now:
            rest = page.build_url(tag=",".join(tag for tag in now if tag != one))
            does: Component = html.Span(": remove this filter", className="unseen")
            chips.append(build_choice_link([one, does], rest, "tag", css="tag on", drop=one))
        parts.append(html.P(["with ", *chips], className="run-tags"))
    known = Counter(f"{tag.key}={tag.value}" for run in page.matches for tag in run.tags)
    # Those of several runs first, as each run may have a commit of its own; a tag of all of them
    # tells them not apart.
    others = [one for one, n in known.items() if one not in now and n < len(page.matches)]
    others.sort(key=lambda one: (known[one] == 1, one))
    if others:
        names = {"": "one more" if now else "any"}
        names |= {one: f"{one} ({known[one]:,})" for one in others[:MAX_TAGS]}
        parts.append(build_menu("tag", names, "", "", "tag", is_list=True))
    if page.matches and (page.is_grouped or "split" in page.columns):
        parts.append(build_legend())
    return [*lines, html.Div(parts, className="heading filters")]


def _build_column_choice(page: RunsPage) -> html.Details:
    """A button for each column, which shows or hides it; assets/choose.js handles clicks."""
    shown = page.columns
    tags = [f"{TAG}{key}" for key in list_tag_keys(page.runs)[:MAX_TAGS]]
    items = []
    for name in dict.fromkeys([*COLUMNS, *shown, *tags]):
        column = find_column(name)
        if column is None or name == NAME:
            continue
        head = f"tag {column.head}" if name.startswith(TAG) else column.head
        chosen: Any = {"aria-checked": str(name in shown).lower(), "data-choice": "columns",
                       "data-toggle": name}  # fmt: skip
        items.append(html.Li(html.Button(head, type="button", role="checkbox", **chosen)))
    usual: Any = {"data-choice": "columns", "data-value": ""}
    items.append(html.Li(html.Button("usual columns", type="button", **usual)))
    usual_list: Any = {"data-usual": ",".join(shown)}
    return html.Details(
        [html.Summary("columns"), html.Ul(items, className="card", **usual_list)], className="menu"
    )


def _build_selection(rights: RunRights) -> list[Component]:
    """What is done with the selected runs; assets/run_actions.js handles clicks."""
    parts: list[Component] = []
    shown: list[Component] = []
    if rights.edit:
        parts.append(build_pick_button("tag", "tag-picks"))
        named: Any = {"aria-labelledby": "tag-title"}
        form = [
            html.H2("Tag the selected runs", id="tag-title"),
            html.Label(["KEY=VALUE, or KEY to remove it, in lines", dcc.Textarea(id="tag-lines")]),
            html.Div(
                [html.Button("Save", id="tag-save", type="button"),
                 html.Button("Cancel", id="tag-cancel", type="button")],
                className="drop-buttons",
            ),
            html.Div(id="tag-status", className="drop-status failed", role="status"),
        ]  # fmt: skip
        shown.append(html.Dialog(form, id="tag-runs", className="card form", **named))
    if rights.delete:
        parts.append(build_pick_button("delete", "delete-picks"))
    return [build_pick_bar(*parts), *shown]


def _build_table_head(page: RunsPage, columns: Sequence[str]) -> list[Content | SortHead]:
    """Column headers; a click sorts by the column, a second click reverses the order."""
    current = page.sort
    attributes: Any = {"aria-checked": "false"}
    every = html.Button("", type="button", className="pick", role="checkbox", id="pick-all",
                        **attributes, **build_aria_label("select all runs shown"))  # fmt: skip
    heads: list[Content | SortHead] = [html.Span("select", className="unseen")]
    if not page.is_grouped:
        heads = [every]
    for name in columns:
        column = find_column(name)
        assert column is not None
        if not column.is_sorted:
            heads.append(column.head)
            continue
        # Numbers and dates begin with the largest, names with the first.
        is_first_click = current.removeprefix("-") != name
        is_down = current == name or (is_first_click and not column.is_text)
        where = page.build_url(sort=f"-{name}" if is_down else name)
        orders = f"{name}|-{name}" if column.is_text else f"-{name}|{name}"
        mark: dict[str, tuple[str, Literal["ascending", "descending", ""]]] = {
            name: (" ▲", "ascending"), f"-{name}": (" ▼", "descending"),
        }  # fmt: skip
        sign, order = mark.get(current, ("", ""))
        link = build_choice_link(column.head + sign, where, "sort", NEWEST, cycle=orders)
        heads.append(SortHead(link, order))
    return heads


def _build_row(run: RunRow, columns: Sequence[str], rights: RunRights) -> list[Cell]:
    shown = build_cells(run, columns)
    if read_median_step(run) is None and len(shown) < len(columns):
        shown.append(Cell(_build_state(run), columns=len(columns) - len(shown)))
    # The checkbox that selects a run; assets/choose.js handles clicks.
    box: Content = ""
    is_compared = read_median_step(run) is not None
    if is_compared or rights.edit:
        attributes: Any = {
            "data-pick": run.id,
            "data-added": str(run.created_unix_ns),
            "data-compared": "1" if is_compared else "",
            "aria-checked": "false",
        }
        box = html.Button("", type="button", className="pick", role="checkbox",
                          **attributes, **build_aria_label(f"select {run.name}"))  # fmt: skip
    return [Cell(box), *shown]


# The list of runs, grouped by job.


def _build_groups(page: RunsPage) -> list[Component]:
    """A section for each job, that with the newest run first; unknown jobs are the last."""
    newest_first = sort_runs(page.matches, NEWEST)
    labels = label_jobs(JobRun(run.job, run.name) for run in newest_first)
    groups: dict[str, list[RunRow]] = {key: [] for key in labels}
    for run in newest_first:
        groups[run.job_key or ""].append(run)
    ordered = sorted(groups, key=lambda key: key == "")
    sections = [_build_group(groups[key], labels[key], page) for key in ordered[:MAX_GROUPS]]
    n_hidden = len(ordered) - len(sections)
    note = f"{n_hidden:,} more jobs: search to see them" if n_hidden else ""
    return [*sections, html.P(note, className="note")]


def _build_group(runs: Sequence[RunRow], label: str, page: RunsPage) -> html.Section:
    """One job: its heading, and below it a table of its runs, which are newest first."""
    ordered = sort_runs(runs, page.sort)[:GROUP_ROWS]
    columns = choose_columns(ordered, page.chosen.find_text("columns"), with_job=False)
    table = build_table(
        _build_table_head(page, columns), [_build_row(r, columns, page.rights) for r in ordered]
    )
    key = runs[0].job_key
    number = f"{len(runs):,} run{'' if len(runs) == 1 else 's'}"
    summary = number if len(ordered) == len(runs) else f"{len(ordered)} of {number}"
    links: list[Content] = []
    if key is not None:
        words, query = f"all {number}" if len(runs) > 1 else number, format_query({"job": key})
        links += [build_link(words, "/" + query), build_link("history", "/history" + query)]
    head = html.Div(
        [html.H2(label), *_build_trend(runs), html.Span(links, className="heading-links")],
        className="section-head group-head",
    )
    rows = html.Details([html.Summary(summary), table], open=True, className="more")
    return html.Section([head, rows], className="card group")


def _build_trend(runs: Sequence[RunRow]) -> list[Component]:
    """The last run of a job, its step against the median of those before, and all as bars."""
    last = f"last {format_date(runs[0].created_unix_ns)}"
    known = [(run, middle.step_ns) for run in runs if (middle := read_median_step(run))]
    steps = [ns for _, ns in known]
    if not steps:
        return [html.Span(last, className="note")]
    texts: list[Content] = [f"{last} · median step ", html.B(format_milliseconds(steps[0]))]
    if len(steps) > 1:
        change = format_signed_percent(steps[0] / median(steps[1:]) - 1)
        texts += [" ", html.B(change), " against the median of the runs before"]
    shown: list[Component] = [html.Span(texts, className="note")]
    if len(steps) > 1:
        newest = steps[TREND_RUNS - 1 :: -1]
        most, hidden = max(newest), cast(Any, {"aria-hidden": "true"})
        # The table below has the same links for the keyboard and screen readers.
        bars = [
            html.A(
                href=build_page_url(run.id),
                tabIndex=-1,
                title=run.name,
                style={"height": f"{100 * ns / most:.0f}%"},
                **hidden,
            )
            for run, ns in known[TREND_RUNS - 1 :: -1]
        ]
        ends = f"{format_milliseconds(newest[0])} to {format_milliseconds(newest[-1])}"
        label = f"median step of the last {len(newest)} runs: {ends}"
        unseen = html.Span(label, className="unseen")
        shown.append(html.Span([unseen, *bars], className="trend"))
    return shown


def _build_state(run: RunRow) -> html.Div:
    """Progress of a run without metrics, or the reason why it has none."""
    parts: list[Content] = [build_state_pill(run), " "]
    if run.state == "running" and run.progress is not None:
        parts += [build_progress_bar(run.progress), " ", run.progress_note or ""]
    message = run.error or ("no steps found" if run.headline is not None else "")
    return html.Div([*parts, html.Span(message, className="message")])


# The entry.


def _build_page(request: PageRequest) -> PageContent:
    rows = request.store.list_runs()
    mark = compute_fingerprint(rows)
    page = build_runs_page(rows, request.address.chosen, request.rights, mark)
    return PageContent(page, any(row.pending for row in rows), mark)


def _build_live(request: PageRequest) -> PageContent | None:
    rows = request.store.list_runs()
    mark = compute_fingerprint(rows)
    if mark == request.mark:
        return None
    page = select_runs_page(rows, request.address.chosen, request.rights)
    return PageContent(build_list(page), any(row.pending for row in rows), mark)


PAGE = StorePage("Runs", "/", _build_page, build_live=_build_live, takes_uploads=True)
