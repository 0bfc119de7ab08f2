"""Shared page components: tables, cards, cells, links, and URLs of pages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlencode

from dash import dcc, html
from dash.development.base_component import Component
from plotly.graph_objects import Figure

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.headline import round_parts, round_shares, summarize
from stepsplit.analyzer.report.report import Report, format_hosts
from stepsplit.analyzer.report.tables import Tables
from stepsplit.analyzer.units import (
    choose_part_unit_ns,
    format_gigabytes_per_second,
    format_memory_size,
    format_milliseconds,
    format_parts,
    format_percent,
    format_signed_milliseconds,
    format_signed_percent,
    format_size,
)
from stepsplit.dashboard.figures import theme
from stepsplit.dashboard.store.ids import is_watch_name
from stepsplit.dashboard.store.metrics import JobFingerprint
from stepsplit.dashboard.store.runs import RunRow

# A finished run, as input of the pages.


@dataclass(frozen=True, slots=True)
class View:
    """A finished run: its name, report and tables (None if the tables were deleted).

    run_id is "" in an exported HTML file, where links to other pages are left out. offers_job:
    whether the user may describe the job of the run, which is then analyzed again.
    """

    name: str
    report: Report
    tables: Tables | None
    run_id: str = ""
    offers_job: bool = False


# Number of steps that the report's sums cover.


def count_summed_steps(report: Report) -> Counter[int]:
    """Number of steps in the sums of each rank: its full steps, or all steps if none is full."""
    full = Counter(row.rank for row in report.steps if row.kind == "full")
    return Counter(row.rank for row in report.steps if row.kind == "full" or not full[row.rank])


# The headline numbers of a run, as cards.

# The buckets of each headline share: compute, collective, bubble, other.
COMPUTE, COLLECTIVE = ("compute",), ("collective", "p2p", "skew")

BUBBLE, OTHER = ("bubble",), ("copy", "idle")


def build_cards(report: Report) -> html.Div:
    """Cards with the mean step, its four shares, and the bubble fraction of a pipeline."""
    summary = summarize(report.steps, report.exposed)
    if summary is None:
        return html.Div([build_card("mean step", "none", "no steps found")], className="cards")
    full = any(row.kind == "full" for row in report.steps)
    note = f"over {_format_count(summary.steps, 'step')}" + ("" if full else ", none full")
    note += f"; median {format_milliseconds(summary.median_ns)}"
    unit_ns = choose_part_unit_ns(summary.step_ns)
    (step,) = round_parts([summary.step_ns], unit_ns)
    # Rounded together, so that the four shares add up to the step.
    means_ns = [row.mean_ns for row in summary.buckets]
    shares = dict(zip(BUCKETS, round_shares(means_ns), strict=True))

    def format_share(*buckets: str) -> str:
        return format_percent(sum(shares[bucket] for bucket in buckets))

    compute_ns = format_parts(round_parts(means_ns, unit_ns)[0], unit_ns)
    waits, idle = format_share("skew"), format_share("idle")
    shown = [
        build_card("mean step", format_parts(step, unit_ns), note),
        build_card("compute", format_share(*COMPUTE), compute_ns, COLOR["compute"]),
        build_card(
            "collective", format_share(*COLLECTIVE), f"of which skew {waits}", COLOR["collective"]
        ),
        build_card(
            "bubble", format_share(*BUBBLE), "of the step, for other stages", COLOR["bubble"]
        ),
        build_card("other", format_share(*OTHER), f"of which idle {idle}", COLOR["copy"]),
    ]
    if report.pipeline is not None:
        ideal = report.pipeline.ideal_bubble_fraction
        note = "of the pipeline window"
        note += "" if ideal is None else f"; ideal {format_percent(ideal)}"
        shown.append(
            build_card("bubble_fraction", format_percent(report.pipeline.bubble_fraction), note)
        )
    if report.mfu is not None:
        shown.append(build_card("MFU", format_percent(report.mfu), "of the dense peak"))
    return html.Div(shown, className="cards")


def format_subtitle(report: Report) -> str:
    """One line on the run: ranks, hosts, mesh, versions; unknown values are left out."""
    run = report.run
    mesh = None if run.mesh is None else " ".join(f"{part.axis}{part.size}" for part in run.mesh)
    parts = [
        f"{len(run.ranks):,} of {run.world_size:,} ranks",
        format_hosts(run),
        run.device,
        mesh if mesh is None else f"mesh {mesh} (from {run.mesh_source or 'unknown'})",
        report.pipeline.schedule if report.pipeline else None,
        run.backend,
        None if run.torch is None else f"torch {run.torch}",
        None if run.nccl is None else f"NCCL {run.nccl}",
        None if run.profiling_slowdown is None else f"profiling {run.profiling_slowdown:+.1%}",
        None
        if run.slowdown_after_profiling is None
        else f"after profiling {run.slowdown_after_profiling:+.1%}",
    ]
    return "  ·  ".join(part for part in parts if part)


def _format_count(count: int, unit_name: str) -> str | None:
    return None if not count else f"{count:,} {unit_name}{'' if count == 1 else 's'}"


# Building blocks of pages: tables, cards, figures, share bars.

COLOR = {look.bucket: f"var(--{look.bucket})" for look in theme.BUCKET_STYLES}
"""The color of each bucket in the theme of the page, as build_bucket_css defines it."""


def build_card(label: str, value: str, note: str = "", accent: str | None = None) -> html.Div:
    """A card with a label, a value and a note; accent is the color of its bucket."""
    mark = {"borderTopColor": accent} if accent else {}
    parts = [
        html.Div(label, className="label"),
        html.Div(value, className="value"),
        html.Div(note, className="note"),
    ]
    return html.Div(parts, className="card number", style=mark)


def build_section(title: str, note: str, *content: Component) -> html.Section:
    """A titled card."""
    head = [html.H2(title), html.Span(note, className="note")]
    return html.Section([html.Div(head, className="section-head"), *content], className="card")


def build_collapsed(summary: str, *content: Component) -> html.Details:
    """Content that is collapsed until the user opens it."""
    return html.Details([html.Summary(summary), *content], className="more")


def build_empty_card(title: str, message: str) -> html.Section:
    """A card in place of missing data, with a hint on how to get it."""
    return html.Section([html.H2(title), html.P(message)], className="card empty")


def build_menu(
    name: str, options: Mapping[str, str], value: str, default: str, label: str = ""
) -> html.Label:
    """A menu bound to the URL parameter `name`, which is omitted at the default value.

    options: texts by value; label: by default the name. assets/choose.js handles changes.
    """
    items = [html.Option(words, value=key, selected=key == value) for key, words in options.items()]
    menu = html.Select(items, **_build_data_attributes(name, default))
    shown = label or name.replace("_", " ")
    return html.Label([html.Span(shown, className="menu-label"), menu])


def build_text_field(name: str, value: str, label: str, hint: str = "") -> html.Label:
    """A text field bound to the URL parameter `name`; the label is visible only with a hint."""
    shown = "menu-label" if hint else "unseen"
    field = dcc.Input(id=f"choose-{name}", value=value, placeholder=hint or label, type="text")
    return html.Label(
        [html.Span(label, className=shown), html.Span(field, **_build_data_attributes(name, ""))]
    )


def _build_data_attributes(name: str, default: str) -> Any:
    return {"data-choice": name, "data-usual": default}


def build_aria_label(label: str) -> Any:
    """The element's label for screen readers."""
    return {"aria-label": label}


def build_progress_bar(share: float) -> html.Progress:
    """A progress bar, 0..1."""
    return html.Progress(value=f"{100 * share:.0f}", max="100", **build_aria_label("progress"))


def build_link(text: str, url: str | None) -> Content:
    """A link to another dashboard page, or plain text without a URL."""
    return text if url is None else dcc.Link(text, href=url)


def build_graph(name: str, figure: Figure) -> html.Div:
    """A figure on the page, and its numbers as a table; `name` is its HTML id."""
    return html.Div([dcc.Graph(id=name, figure=figure, config=theme.GRAPH_CONFIG), ChartData(name)])


def build_share_bar(shares: Sequence[float]) -> html.Div:
    """The shares of the seven buckets as one stacked bar."""
    pieces = [
        html.Span(
            className=_choose_swatch_class(look),
            style={"width": f"{100 * share:.2f}%", "backgroundColor": COLOR[look.bucket]},
            title=f"{look.bucket} {format_percent(share)}",
        )
        for look, share in zip(theme.BUCKET_STYLES, shares, strict=True)
        if share > 0
    ]
    return html.Div(pieces, className="share")


def build_legend() -> html.Div:
    """The color of each bucket."""
    keys = [
        html.Span(
            [
                html.I(
                    className=_choose_swatch_class(k), style={"backgroundColor": COLOR[k.bucket]}
                ),
                k.bucket,
            ]
        )
        for k in theme.BUCKET_STYLES
    ]
    return html.Div(keys, className="legend")


def build_state_pill(run: RunRow) -> html.Span:
    """The state of the run as a pill."""
    return html.Span(run.state, className=f"pill {run.state}")


_PILL_STYLES = {"pass": "done", "regressed": "failed", "inconclusive": "running"}


def build_check_pill(run: RunRow) -> Content:
    """The run's check result as a pill with the headline as tooltip; "" without a result."""
    if run.verdict is None:
        return ""
    look = _PILL_STYLES.get(run.verdict.answer, "")
    return html.Span(run.verdict.answer, className=f"pill {look}", title=run.verdict.words)


UNKNOWN_JOB = "unknown job"


@dataclass(frozen=True, slots=True)
class JobRun:
    """The job of a run, None if unknown, and the name of the run."""

    job: JobFingerprint | None
    name: str


def label_jobs(runs: Iterable[JobRun]) -> dict[str, str]:
    """A name for each job by its key, "" for runs of unknown jobs; runs are newest first.

    Where several jobs have one label, the name of the newest run tells them apart, else the key.
    """
    newest: dict[str, JobRun] = {}
    for run in runs:
        newest.setdefault(run.job.key if run.job else "", run)
    labels = {key: run.job.label if run.job else UNKNOWN_JOB for key, run in newest.items()}
    for more in ({key: run.name for key, run in newest.items()}, {key: key for key in newest}):
        shared = Counter(labels.values())
        labels = {
            key: f"{label} · {more[key]}" if shared[label] > 1 else label
            for key, label in labels.items()
        }
    return labels


def _choose_swatch_class(look: theme.BucketStyle) -> str:
    return "hatched" if look.hatched else ""


# URLs of pages: page, run and selected options.

RUN_PAGES = ("overview", "timeline", "pipeline", "collectives", "compute", "memory", "model")

_RUN = re.compile(rf"/run/([0-9a-f]{{8,32}})(?:/({'|'.join(RUN_PAGES[1:])}))?/?")

_OTHER_PAGES = {
    "": "runs", "/": "runs", "/compare": "compare", "/history": "history", "/watch": "watch",
}  # fmt: skip

_WATCHED = "/watch/"


@dataclass(frozen=True, slots=True)
class AddressQuery:
    """The query parameters of a URL; invalid values count as absent."""

    values: Mapping[str, str] = field(default_factory=dict)

    def parse_int(self, name: str) -> int | None:
        """The parameter as a non-negative integer; None if absent or invalid."""
        value = self.values.get(name, "")
        return int(value) if value.isascii() and value.isdigit() and len(value) < 12 else None

    def find_text(self, name: str) -> str | None:
        """The parameter as text; None if absent or empty."""
        return self.values.get(name) or None


@dataclass(frozen=True, slots=True)
class Address:
    """A page: one of RUN_PAGES with a run id, or "runs", "compare", "history" or "watch" with "";
    watched is the name of a watched run."""

    page: str
    run_id: str
    chosen: AddressQuery
    watched: str = ""


def parse_address(path: str | None, search: str | None) -> Address | None:
    """The page of a URL path and query; None if there is no such page."""
    try:
        chosen = AddressQuery(dict(parse_qsl((search or "").lstrip("?"), max_num_fields=64)))
    except ValueError:
        return None
    found = _RUN.fullmatch(path or "")
    if found:
        return Address(found.group(2) or RUN_PAGES[0], found.group(1), chosen)
    if path is not None and path.startswith(_WATCHED):
        name = unquote(path.removeprefix(_WATCHED)).rstrip("/")
        return Address("watch", "", chosen, name) if is_watch_name(name) else None
    page = _OTHER_PAGES.get(path or "")
    return None if page is None else Address(page, "", chosen)


def build_page_url(run_id: str, page: str = RUN_PAGES[0], **chosen: object) -> str:
    """The URL of a run's page with the selected options."""
    path = f"/run/{run_id}" + ("" if page == RUN_PAGES[0] else f"/{page}")
    return path + format_query(chosen)


def format_query(chosen: Mapping[str, object]) -> str:
    """The URL query of the selected options, leaving out empty ones."""
    values = {name: str(value) for name, value in chosen.items() if value not in (None, "")}
    return f"?{urlencode(values, safe=',')}" if values else ""


# Tables that are sorted, filtered, paged and downloaded in the browser: cells with what they show,
# and the number by which they are sorted and downloaded.

Content = str | Component

Unit = Literal["", "ns", "bytes", "bytes/s", "ratio"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell; numbers are right-aligned; `columns` is the column span; a head names its row.

    value and unit: the number that the content shows, unrounded; None if it shows none.
    """

    content: Content = ""
    number: bool = False
    columns: int = 1
    value: float | None = None
    unit: Unit = ""
    head: bool = False


@dataclass(frozen=True, slots=True)
class SortHead:
    """The header of a column by which the server sorts; order is "" if it is by another."""

    content: Content
    order: Literal["ascending", "descending", ""] = ""


def build_number_cell(text: Content, value: float | None, unit: Unit = "") -> Cell:
    """A cell with a number that is formatted in its own way."""
    return Cell(text, number=True, value=value, unit=unit)


def build_time_cell(ns: float) -> Cell:
    """A cell with a time, given in ns."""
    return build_number_cell(format_milliseconds(ns), ns, "ns")


def build_time_change_cell(ns: float) -> Cell:
    """A cell with a difference of times, given in ns, with its sign."""
    return build_number_cell(format_signed_milliseconds(ns), ns, "ns")


def build_share_cell(ratio: float) -> Cell:
    """A cell with a ratio (0..1) in percent."""
    return build_number_cell(format_percent(ratio), ratio, "ratio")


def build_share_change_cell(ratio: float) -> Cell:
    """A cell with a relative change in percent, with its sign."""
    return build_number_cell(format_signed_percent(ratio), ratio, "ratio")


def build_ratio_cell(ratio: float) -> Cell:
    """A cell with a factor such as 1.20 x."""
    return build_number_cell(f"{ratio:.2f} x", ratio, "ratio")


def build_count_cell(count: int) -> Cell:
    """A cell with a count."""
    return build_number_cell(f"{count:,}", count)


def build_size_cell(bytes_: int | None) -> Cell:
    """A cell with the size of a message; None if it is unknown."""
    if bytes_ is None:
        return Cell("unknown", number=True)
    return build_number_cell(format_size(bytes_), bytes_, "bytes")


def build_memory_cell(bytes_: int) -> Cell:
    """A cell with an amount of memory."""
    return build_number_cell(format_memory_size(bytes_), bytes_, "bytes")


def build_rate_cell(bytes_per_s: float | None) -> Cell:
    """A cell with a bandwidth; None if it is unknown."""
    if bytes_per_s is None:
        return Cell("unknown", number=True)
    return build_number_cell(format_gigabytes_per_second(bytes_per_s), bytes_per_s, "bytes/s")


def build_name_cell(name: str) -> Cell:
    """A cell with a possibly long name: truncated on the page, in full in the tooltip."""
    return Cell(html.Span(name, className="name", title=name))


def build_worst_cell(rank: int, ns: float) -> Cell:
    """A cell with the worst rank and its time in ns."""
    return Cell(html.Span(f"rank {rank}, {format_milliseconds(ns)}", className="whole"))


# The table itself.

MAX_ROWS = 500
"""Rows of a table on a page; report.json has all of them."""

_EXPORTED_ROWS = 40


class DataTable(Component):
    """A table that assets/data_table.js draws from plain JSON values.

    A component of Dash for each cell would take seconds to draw for hundreds of ranks.

    Args:
        heads: One header per column; a SortHead is sorted by the server.
        rows: The cells of each row, at most MAX_ROWS of them.
    """

    _namespace = "stepsplit"
    _type = "DataTable"
    _base_nodes = []  # noqa: RUF012 - dash reads it from the class
    _children_props = []  # noqa: RUF012

    def __init__(self, heads: Sequence[Content | SortHead], rows: Sequence[Sequence[Cell]]) -> None:
        self._prop_names = ["columns", "rows"]
        self._valid_wildcard_attributes: list[str] = []
        self.heads, self.cells = tuple(heads), tuple(map(tuple, rows))
        first = self._find_full_row()
        columns = [_describe_column(one, cell) for one, cell in zip(heads, first, strict=True)]
        super().__init__(  # type: ignore[no-untyped-call]
            columns=columns, rows=[[_describe_cell(cell) for cell in row] for row in rows]
        )

    @property
    def children(self) -> html.Table:
        """The first rows as a table that needs no script; the page is not sent it."""
        first = self._find_full_row()
        head = [_build_th(one, cell) for one, cell in zip(self.heads, first, strict=True)]
        body = [html.Tr([_build_td(cell) for cell in row]) for row in self.cells[:_EXPORTED_ROWS]]
        left = len(self.cells) - len(body)
        if left > 0:
            words = f"{left:,} more rows in the dashboard and in report.json"
            body.append(html.Tr(html.Td(words, colSpan=len(self.heads), className="note")))
        return html.Table([html.Thead(html.Tr(head)), html.Tbody(body)])

    def _find_full_row(self) -> Sequence[Cell]:
        """The first row without spans, which tells how the columns are aligned."""
        return next(
            (row for row in self.cells if len(row) == len(self.heads)), [Cell() for _ in self.heads]
        )


def build_table(heads: Sequence[Content | SortHead], rows: Sequence[Sequence[Cell]]) -> DataTable:
    """A table of the first MAX_ROWS rows; each header is aligned like the cells below it."""
    return DataTable(heads, rows[:MAX_ROWS])


def format_hidden_rows(rows: Sized, shown: int = MAX_ROWS) -> str:
    """The end of a note on a table of which only the first rows are shown."""
    left = len(rows) - shown
    return f"; {left:,} smaller rows in report.json" if left > 0 else ""


def _describe_column(head: Content | SortHead, below: Cell) -> dict[str, Any]:
    described: dict[str, Any] = {"number": below.number, "unit": below.unit}
    if isinstance(head, SortHead):
        return {**described, "head": _to_node(head.content), "sort": head.order or "none"}
    return {**described, "head": _to_node(head)}


def _describe_cell(cell: Cell) -> Any:
    """A text, a pair of the shown text and its number, or an object for anything else."""
    shown = _to_node(cell.content)
    if cell.columns == 1 and not cell.head and isinstance(shown, str):
        return shown if cell.value is None else [shown, cell.value]
    return {"shown": shown, "value": cell.value, "columns": cell.columns, "head": cell.head}


def _to_node(content: Any) -> Any:
    """A component and its children as plain JSON values."""
    if isinstance(content, list | tuple):
        return [_to_node(one) for one in content]
    if not isinstance(content, Component):
        return content
    described = content.to_plotly_json()  # type: ignore[no-untyped-call]
    props = dict(described["props"])
    children = _to_node(props.pop("children", None))
    return {"tag": described["type"].lower(), "props": props, "children": children}


def _build_th(head: Content | SortHead, below: Cell) -> html.Th:
    content = head.content if isinstance(head, SortHead) else head
    return html.Th(content, className=_choose_cell_class(below), scope="col")


def _build_td(cell: Cell) -> html.Td | html.Th:
    span = cell.columns if cell.columns > 1 else None
    look: Any = {"className": _choose_cell_class(cell), "colSpan": span}
    if cell.head:
        return html.Th(cell.content, scope="row", **look)
    return html.Td(cell.content, **look)


def _choose_cell_class(cell: Cell) -> str:
    return "number" if cell.number else ""


# The numbers of a chart as a table.


class ChartData(Component):
    """The numbers of a chart as a table, which assets/data_table.js reads from the chart when it
    is opened: for screen readers, and to download.

    Args:
        chart: The HTML id of the chart.
    """

    _namespace = "stepsplit"
    _type = "ChartData"
    _base_nodes = []  # noqa: RUF012 - dash reads it from the class
    _children_props = []  # noqa: RUF012

    def __init__(self, chart: str) -> None:
        self._prop_names = ["chart"]
        self._valid_wildcard_attributes: list[str] = []
        super().__init__(chart=chart)  # type: ignore[no-untyped-call]
