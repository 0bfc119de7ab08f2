"""Page: comparison of two or more runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dash import dcc, html
from dash.development.base_component import Component
from msgspec.structs import replace

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.regression.compare import (
    CallsChange,
    Change,
    ExposedChange,
    RunComparison,
    Side,
    compare_reports,
    compare_with_baseline,
)
from stepsplit.analyzer.regression.scaling import Work, build_scaling
from stepsplit.analyzer.report.axis_names import name_axis
from stepsplit.analyzer.report.part_rows import name_part
from stepsplit.analyzer.units import (
    format_date,
    format_memory_size,
    format_milliseconds,
    format_percent,
    format_signed_percent,
)
from stepsplit.dashboard.figures.run import NamedSplit, draw_difference, draw_splits
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url, format_query
from stepsplit.dashboard.pages.components import (
    View,
    build_card,
    build_empty_card,
    build_graph,
    build_link,
    build_menu,
    build_section,
    build_text_field,
)
from stepsplit.dashboard.pages.page import (
    ODD_DATA,
    PageContent,
    PageRequest,
    StorePage,
    build_problem,
)
from stepsplit.dashboard.pages.run_actions import build_pick_bar
from stepsplit.dashboard.pages.run_columns import COLUMNS, build_cells, filter_runs
from stepsplit.dashboard.pages.tables import (
    MAX_ROWS,
    Cell,
    Content,
    build_number_cell,
    build_rate_cell,
    build_size_cell,
    build_table,
    build_time_cell,
    build_time_change_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.store.ids import split_role_id
from stepsplit.dashboard.store.run_row import RunRow

# The runs that an address chooses, and the menus and buttons that change them.

MAX_COMPARED = 12

MAX_FOUND = 10
"""Runs of a search that are listed."""

_FOUND_COLUMNS = ("name", "added", "job", "mesh", "step", "split")
"""Of the list of runs."""


@dataclass(frozen=True, slots=True)
class RunSelection:
    """The finished runs that an address chooses, baseline first; how many it names besides that
    are not finished or do not exist, and how many are too many.

    is_list: whether the address lists them (runs=A,B,C), else it has baseline=A and candidate=B.
    """

    runs: tuple[RunRow, ...]
    is_list: bool
    n_unknown: int = 0
    n_over: int = 0


def select_runs(rows: Sequence[RunRow], chosen: AddressQuery) -> RunSelection:
    """The runs of the address; "ID.N" is a role of one."""
    by_id = {run.id: run for run in rows}

    def find(run_id: str) -> RunRow | None:
        owner, number = split_role_id(run_id)
        run = by_id.get(owner)
        if run is not None and number is not None:
            run = run.name_role(number)
        return run if run is not None and run.has_report else None

    text = chosen.find_text("runs")
    if text is None:
        sides = [find(chosen.find_text(side) or "") for side in ("baseline", "candidate")]
        return RunSelection(tuple(run for run in sides if run is not None), False)
    ids = dict.fromkeys(part for part in text.split(",") if part)
    runs = [run for run_id in ids if (run := find(run_id)) is not None]
    n_unknown, n_over = len(ids) - len(runs), max(0, len(runs) - MAX_COMPARED)
    return RunSelection(tuple(runs[:MAX_COMPARED]), True, n_unknown, n_over)


def build_compare_url(run_ids: Sequence[str], others: Mapping[str, object] | None = None) -> str:
    """The address of the comparison of these runs, baseline first, with other choices."""
    runs: dict[str, object] = {"runs": ",".join(run_ids)}
    if 1 <= len(run_ids) <= 2:
        runs = dict(zip(("baseline", "candidate"), run_ids, strict=False))
    return "/compare" + format_query({**runs, **(others or {})})


def build_run_pickers(
    rows: Sequence[RunRow], selection: RunSelection, chosen: AddressQuery
) -> html.Div:
    """The chosen runs with buttons that change them, and a search for those to add."""
    picked = [run.id for run in selection.runs]
    items = []
    for at, own in enumerate(selection.runs):
        others_ids = [*picked[:at], *picked[at + 1 :]]
        role: Content = html.Span("baseline", className="pill")
        if at:
            first = build_compare_url([own.id, *others_ids])
            role = _build_button("use as baseline", own.name, first)
        remove = _build_button("remove", own.name, build_compare_url(others_ids))
        items.append(
            html.Li(
                [
                    html.Span(f"{own.name}, {format_date(own.created_unix_ns)}"),
                    " ",
                    role,
                    " ",
                    remove,
                ]
            )
        )
    parts: list[Component] = [html.Ol(items)] if items else []
    parts += _build_notes(selection)
    if len(picked) < MAX_COMPARED:
        finder = _build_finder(rows, selection, chosen)
        asked = chosen.find_text("find") is not None
        is_open = asked or len(picked) < 2
        summary = html.Summary("add a run")
        parts.append(html.Details([summary, *finder], open=is_open, className="more finder"))
    return html.Div(parts, className="pickers")


def _build_finder(
    rows: Sequence[RunRow], selection: RunSelection, chosen: AddressQuery
) -> list[Component]:
    """A search over all finished runs, and a button for each that it finds; those of the job of the
    chosen runs come first, the newest first."""
    picked = [run.id for run in selection.runs]
    done = [run for run in rows if run.headline is not None and run.headline.median_step]
    found = [run for run in filter_runs(done, chosen.find_text("find")) if run.id not in picked]
    jobs = {run.job_key for run in selection.runs if run.job_key}
    found.sort(key=lambda run: run.job_key not in jobs)
    field = build_text_field("find", chosen.find_text("find") or "", "search names, tags, jobs")
    if not found:
        return [field, html.P("No other finished run matches this search.", className="message")]
    # A candidate that is chosen alone stays the candidate.
    is_baseline = not picked or (not selection.is_list and not chosen.find_text("baseline"))
    kept = {"find": chosen.find_text("find")}
    body = []
    for run in found[:MAX_FOUND]:
        ids = [run.id, *picked] if is_baseline else [*picked, run.id]
        words = "use as baseline" if is_baseline else "compare with" if len(ids) == 2 else "add"
        add = _build_button(words, run.name, build_compare_url(ids, kept if len(ids) < 2 else {}))
        body.append([Cell(add), *build_cells(run, _FOUND_COLUMNS)])
    heads: list[Content] = [html.Span("choice", className="unseen")]
    heads += [COLUMNS[name].head for name in _FOUND_COLUMNS]
    left = len(found) - len(body)
    note = f"{left:,} more: search to see them" if left else ""
    return [field, build_table(heads, body),
            html.P(note, className="note")]  # fmt: skip


def _build_button(text: str, name: str, url: str) -> dcc.Link:
    """A link that looks like a button; screen readers hear the run too."""
    return dcc.Link([text, html.Span(f" {name}", className="unseen")], href=url, className="button")


def _build_notes(selection: RunSelection) -> list[Component]:
    notes = []
    if selection.n_unknown:
        notes.append(
            f"{selection.n_unknown:,} runs of the address are not finished, not here, or have no"
            " report of their own."
        )
    if selection.n_over:
        notes.append(f"At most {MAX_COMPARED} are compared: {selection.n_over:,} are left out.")
    return [html.P(" ".join(notes), className="note")] if notes else []


# Compare: differences between two runs by bucket, axis, call and kernel.

MAX_EXPOSED_ROWS = 20

_SHORT_NOISE: Mapping[bool | None, str] = {True: "within", False: "beyond", None: "too few steps"}

_NOISE = {
    True: "within step-to-step noise",
    False: "beyond step-to-step noise",
    None: "too few steps to estimate noise",
}


def compare_page(baseline: View, candidate: View) -> list[Component]:
    """The page that compares the candidate with the baseline."""
    try:
        comparison = compare_reports(baseline.report, candidate.report)
    except UsageError as error:
        return [build_empty_card("These runs cannot be compared", str(error))]
    # That of the baseline is below.
    below = {"with": baseline.run_id}
    timelines = build_page_url(candidate.run_id, "timeline", **below)
    bars = [
        NamedSplit("baseline", comparison.baseline.mean, baseline.run_id),
        NamedSplit("candidate", comparison.candidate.mean, candidate.run_id),
    ]
    return [
        html.P(
            [
                "baseline ",
                html.B(build_link(baseline.name, build_page_url(baseline.run_id))),
                "   candidate ",
                html.B(build_link(candidate.name, build_page_url(candidate.run_id))),
                "   ",
                build_link("swap", build_compare_url((candidate.run_id, baseline.run_id))),
                "   ",
                build_link("both timelines", timelines),
            ],
            className="subtitle",
        ),
        _build_cards(comparison),
        *_build_settings(comparison),
        *_build_findings(comparison),
        html.Div(
            [
                build_section("Mean step", "over ranks and full steps",
                        build_graph("splits", draw_splits(bars), "/run/{key}")),
                build_section("Difference by bucket", "mean step",
                        build_graph("difference", draw_difference(comparison))),
            ],
            className="columns",
        ),
        html.Div([*_build_exposed(comparison), *_build_kernels(comparison)], className="columns"),
        *_build_parts(comparison),
        *_build_calls(comparison),
    ]  # fmt: skip


def _build_cards(comparison: RunComparison) -> html.Div:
    baseline, candidate = comparison.baseline, comparison.candidate
    change = "unknown" if comparison.ratio is None else format_signed_percent(comparison.ratio - 1)
    shown = []
    # The change for the same work, where the work of a step differs.
    if comparison.token_ratio is not None:
        was = f"{baseline.tokens_per_s:,.0f} to {candidate.tokens_per_s:,.0f}"
        ratio = format_signed_percent(comparison.token_ratio - 1)
        shown.append(build_card("tokens/s per rank", ratio, f"{was}; steps of other sizes"))
    elif comparison.microbatch_ratio is not None:
        was = f"{baseline.microbatches} to {candidate.microbatches} microbatches a step"
        ratio = format_signed_percent(comparison.microbatch_ratio - 1)
        shown.append(build_card("time per microbatch", ratio, was))
    shown += [
        build_card("median step", change, _NOISE[comparison.within_noise]),
        *(
            build_card(
                label, format_milliseconds(one.median_ns), f"median of {one.steps} full steps"
            )
            for label, one in (("baseline", baseline), ("candidate", candidate))
        ),
    ]
    if baseline.bubble_fraction is not None and candidate.bubble_fraction is not None:
        was = f"was {format_percent(baseline.bubble_fraction)}"
        shown.append(build_card("pipeline bubble", format_percent(candidate.bubble_fraction), was))
    if baseline.peak_allocated_bytes and candidate.peak_allocated_bytes:
        was = f"was {format_memory_size(baseline.peak_allocated_bytes)}"
        shown.append(
            build_card("peak memory", format_memory_size(candidate.peak_allocated_bytes), was)
        )
    if baseline.mfu is not None and candidate.mfu is not None:
        shown.append(
            build_card("MFU", format_percent(candidate.mfu), f"was {format_percent(baseline.mfu)}")
        )
    return html.Div(shown, className="cards")


def _build_findings(comparison: RunComparison) -> list[html.Section]:
    changed = comparison.changed_findings
    if not changed:
        return []
    rows = [
        [
            # Names of kernels in it have no place to break.
            Cell(
                html.Span(
                    one.message if one.candidate_ns else f"no longer: {one.message}",
                    className="words",
                )
            ),
            *_build_change_cells(one),
        ]
        for one in changed
    ]
    shown = build_table(("bottleneck", "baseline", "candidate", "difference"), rows)
    return [build_section("Bottlenecks that changed", "estimated saving per step", shown)]


def _build_settings(comparison: RunComparison) -> list[html.Section]:
    if not comparison.settings:
        return []
    rows = [
        [Cell(one.name), Cell(one.baseline or "unknown"), Cell(one.candidate or "unknown")]
        for one in comparison.settings
    ]
    shown = build_table(("setting", "baseline", "candidate"), rows)
    return [build_section("Configuration differences", "may explain other differences", shown)]


def _build_exposed(comparison: RunComparison) -> list[html.Section]:
    rows = [
        [Cell(_format_axes(row)), Cell(row.bucket), *_build_change_cells(row)]
        for row in comparison.exposed
    ]
    if not rows:
        return []
    heads = ("axis", "bucket", "baseline", "candidate", "difference")
    note = f"mean step{_note_meshes(comparison, 'bucket')}{format_hidden_rows(comparison.exposed)}"
    return [build_section("Exposed communication by axis", note, build_table(heads, rows))]


def _build_kernels(comparison: RunComparison) -> list[html.Section]:
    changed = [row for row in comparison.kernels if row.baseline_ns != row.candidate_ns]
    if not changed:
        return []
    rows = [
        [
            Cell(row.family),
            _build_count_cell(row.baseline_count),
            _build_count_cell(row.candidate_count),
            *_build_change_cells(row),
        ]
        for row in changed
    ]
    heads = ("family", "calls before", "calls after", "baseline", "candidate", "difference")
    note = "per rank and step" + format_hidden_rows(changed)
    return [build_section("Kernel families", note, build_table(heads, rows))]


def _build_parts(comparison: RunComparison) -> list[html.Section]:
    changed = [row for row in comparison.parts if row.baseline_ns != row.candidate_ns]
    rows = [
        [Cell(name_part(row.part)), *_build_change_cells(row), Cell(row.reason)] for row in changed
    ]
    heads = ("part", "baseline", "candidate", "difference", "its kernels")
    note = "mean step; the differences add up"
    return [build_section("Parts of the model", note, build_table(heads, rows))] if rows else []


def _build_calls(comparison: RunComparison) -> list[html.Section]:
    changed = [row for row in comparison.collectives if row.baseline != row.candidate]
    if not changed:
        return []
    heads = ("axis", "op", "size", "run", "per step", "transfer", "wait", "busbw")
    rows = []
    for row in changed:
        op = row.op if row.dtype is None else f"{row.op} {row.dtype}"
        head = [Cell(_format_axes(row)), Cell(op), build_size_cell(row.message_bytes)]
        for name, calls in (("baseline", row.baseline), ("candidate", row.candidate)):
            cells = [Cell("none", number=True), *(Cell(number=True) for _ in range(3))]
            if calls is not None:
                cells = [
                    _build_count_cell(calls.count),
                    build_time_cell(calls.transfer_ns),
                    build_time_cell(calls.wait_ns),
                    build_rate_cell(calls.busbw_bytes_per_s),
                ]
            rows.append([*head, Cell(name), *cells])
    note = f"medians per call; largest change first{_note_meshes(comparison, 'op')}"
    note += format_hidden_rows(changed, MAX_ROWS // 2)
    return [build_section("Collectives and messages", note, build_table(heads, rows))]


def _format_axes(row: ExposedChange | CallsChange) -> str:
    """The axis of a row; if the meshes differ, those of the baseline and of the candidate."""
    return " → ".join(axis for axis in (name_axis(row.axis), row.candidate_axis) if axis)


def _note_meshes(comparison: RunComparison, by: str) -> str:
    if not comparison.meshes_differ:
        return ""
    return f"; the meshes differ: compared by {by}, each run on its own axes"


def _build_change_cells(row: Change) -> list[Cell]:
    return [
        build_time_cell(row.baseline_ns),
        build_time_cell(row.candidate_ns),
        build_time_change_cell(row.difference_ns),
    ]


def _build_count_cell(number: float) -> Cell:
    return build_number_cell(f"{number:,.1f}".removesuffix(".0"), number)


# Compare: any number of runs with a baseline, a column each.

_SHORT_NAME = 24
"""Characters of a name below a figure."""


def build_comparison_of_many(views: Sequence[View], work: str = "") -> list[Component]:
    """The page that compares each run with the first, and shows how the job scales.

    work: what a step of each run has in common, "gpu" or "step"; "" to go by the tokens.
    """
    try:
        comparisons = compare_with_baseline([view.report for view in views])
    except UsageError as error:
        return [build_empty_card("These runs cannot be compared", str(error))]
    sides = [comparisons[0].baseline, *(one.candidate for one in comparisons)]
    heads: list[Content] = ["per run"]
    for at, own in enumerate(views):
        more: Content = "baseline"
        if at:
            more = build_link("in detail", build_compare_url((views[0].run_id, own.run_id)))
        link = build_link(own.name, build_page_url(own.run_id))
        note = html.Span(more, className="note")
        heads.append(html.Span([f"{at + 1} ", link, html.Br(), note]))
    rows = [
        *_build_step_rows(sides, comparisons),
        *_build_bucket_rows(sides),
        *_build_exposed_rows(comparisons),
    ]
    bars = []
    for at, (view, side) in enumerate(zip(views, sides, strict=True), 1):
        is_short = len(view.name) <= _SHORT_NAME
        name = view.name if is_short else f"{view.name[: _SHORT_NAME - 1]}…"
        bars.append(NamedSplit(f"{at} {name}", side.mean, view.run_id))
    figure = build_graph("splits", draw_splits(bars), "/run/{key}")
    return [
        html.Div(
            build_section(
                "Runs", "changes are relative to run 1, the baseline", build_table(heads, rows)
            ),
            className="matrix",
        ),
        build_section("Mean step", "over ranks and full steps", figure),
        *_build_scaling_section(views, work),
        *_build_settings_of_many(heads, comparisons),
    ]


def _build_text_row(label: str, texts: Sequence[str]) -> list[Cell]:
    return [Cell(label, head=True), *(Cell(text, number=True) for text in texts)]


def _build_known_row(
    label: str, sides: Sequence[Side], describe: Callable[[Side], str | None]
) -> list[list[Cell]]:
    """A row of what is known of the runs; none if it is known of none."""
    texts = [describe(side) for side in sides]
    return [_build_text_row(label, [text or "" for text in texts])] if any(texts) else []


def _build_group_row(title: str, n_runs: int) -> list[Cell]:
    return [Cell(html.B(title), columns=n_runs + 1, head=True)]


def _build_step_rows(
    sides: Sequence[Side], comparisons: Sequence[RunComparison]
) -> list[list[Cell]]:
    ratios = [one.ratio for one in comparisons]
    changes = ["unknown" if one is None else format_signed_percent(one - 1) for one in ratios]
    noise = [_SHORT_NOISE[one.within_noise] for one in comparisons]
    # What compares equal work, if the steps of the runs differ in it.
    of_work = []
    if any(one.token_ratio is not None for one in comparisons):
        of_work += _build_known_row(
            "tokens/s per rank",
            sides,
            lambda side: None if side.tokens_per_s is None else f"{side.tokens_per_s:,.0f}",
        )
    if any(one.microbatch_ratio is not None for one in comparisons):
        of_work += _build_known_row(
            "microbatches", sides, lambda side: f"{side.microbatches or ''}"
        )
        of_work += _build_known_row(
            "time per microbatch",
            sides,
            lambda side: format_milliseconds(side.microbatch_ns) if side.microbatch_ns else None,
        )
    return [
        _build_text_row("median step", [format_milliseconds(side.median_ns) for side in sides]),
        _build_text_row("change", ["", *changes]),
        _build_text_row("step-to-step noise", ["", *noise]),
        *of_work,
        *_build_known_row(
            "pipeline bubble", sides, lambda side: _format_ratio(side.bubble_fraction)
        ),
        *_build_known_row("MFU", sides, lambda side: _format_ratio(side.mfu)),
        *_build_known_row(
            "peak memory",
            sides,
            lambda side: (
                format_memory_size(side.peak_allocated_bytes) if side.peak_allocated_bytes else None
            ),
        ),
        _build_text_row("full steps", [f"{side.steps:,}" for side in sides]),
    ]


def _format_ratio(ratio: float | None) -> str | None:
    return None if ratio is None else format_percent(ratio)


def _build_bucket_rows(sides: Sequence[Side]) -> list[list[Cell]]:
    """Time and share of each bucket in the mean step."""
    rows = [_build_group_row("mean step", len(sides))]
    rows.append(_build_text_row("step", [format_milliseconds(side.mean.step_ns) for side in sides]))
    for at, bucket in enumerate(BUCKETS):
        times = [side.mean.buckets_ns[at] for side in sides]
        if any(times):
            cells = [Cell(bucket, head=True)]
            for ns, side in zip(times, sides, strict=True):
                share = format_percent(ns / side.mean.step_ns) if side.mean.step_ns else ""
                note = html.Span(share, className="note")
                part = html.Span([format_milliseconds(ns), html.Br(), note])
                cells.append(Cell(part, number=True))
            rows.append(cells)
    return rows


def _build_exposed_rows(comparisons: Sequence[RunComparison]) -> list[list[Cell]]:
    """Exposed communication by axis and bucket: those with most time in a run first."""
    own = [{(row.axis, row.bucket): row.candidate_ns for row in c.exposed} for c in comparisons]
    kinds = {(row.axis, row.bucket): row.baseline_ns for one in comparisons for row in one.exposed}
    times = {kind: [ns, *(one.get(kind, 0) for one in own)] for kind, ns in kinds.items()}
    ordered = sorted(times, key=lambda kind: -max(times[kind]))[:MAX_EXPOSED_ROWS]
    if not ordered:
        return []
    title = "exposed communication by axis"
    if any(one.meshes_differ for one in comparisons):
        title += ", of each run's own mesh: they differ"
    return [
        _build_group_row(title, len(comparisons) + 1),
        *(
            _build_text_row(
                f"{bucket} on {name_axis(axis)}",
                [format_milliseconds(ns) for ns in times[axis, bucket]],
            )
            for axis, bucket in ordered
        ),
    ]


def _build_settings_of_many(
    heads: Sequence[Content], comparisons: Sequence[RunComparison]
) -> list[Component]:
    """A row for each setting that differs between the baseline and any other run."""
    # One row for the meshes, which may be inferred in some runs and stated in others.
    names = {"inferred mesh": "mesh"}
    changed = [{names.get(row.name, row.name): row for row in one.settings} for one in comparisons]
    baseline = {name: row.baseline for one in changed for name, row in one.items()}
    if not baseline:
        return []
    rows = []
    for name, before in baseline.items():
        values = [before, *(one[name].candidate if name in one else before for one in changed)]
        rows.append([Cell(name, head=True), *(Cell(value or "unknown") for value in values)])
    table = build_table(["setting", *heads[1:]], rows)
    note = "may explain other differences"
    return [html.Div(build_section("Configuration differences", note, table), className="matrix")]


# How the job scales over the runs.

_WORKS = {
    "": "by tokens",
    "gpu": "the same for each rank (weak scaling)",
    "step": "the same in total (strong scaling)",
}

_NO_WORK = "unknown: analyze each run with a job, or choose what their steps have in common"


def _build_scaling_section(views: Sequence[View], work: str) -> list[Component]:
    """Efficiency against the run with the fewest ranks; nothing for runs of equal layout."""
    # By the names that the dashboard has for the runs.
    reports = [replace(view.report, run=replace(view.report.run, name=view.name)) for view in views]
    if len({(report.run.world_size, report.run.mesh) for report in reports}) == 1:
        return []
    known: Work | None = "gpu" if work == "gpu" else "step" if work == "step" else None
    scaling = build_scaling(reports, known)
    menu = build_menu("work", _WORKS, work if work in _WORKS else "", "", "work of a step")
    heads = [
        "run",
        "ranks",
        "layout",
        "median step",
        "predicted",
        "tokens/s per rank",
        "efficiency",
    ]
    rows = []
    for run in scaling.runs:
        tokens, efficiency = run.tokens_per_s_per_gpu, run.efficiency
        axes = (f"{axis.axis} {axis.size}" for axis in run.mesh or () if axis.size > 1)
        rows.append(
            [
                Cell(run.name, head=True),
                build_number_cell(f"{run.gpus:,}", run.gpus),
                Cell(", ".join(axes) or "unknown"),
                build_time_cell(run.median_ns),
                Cell("") if run.predicted_ns is None else build_time_cell(run.predicted_ns),
                Cell("" if tokens is None else f"{tokens:,.0f}", number=True),
                Cell("" if efficiency is None else format_percent(efficiency), number=True),
            ]
        )
    table = build_table(heads, rows)
    parts: list[Component] = [html.Div(menu, className="choices"), table]
    if scaling.work is not None:
        # The mean steps, times what makes them the same work per rank as the reference's.
        bars, reference = [], scaling.runs[0]
        ids = {view.name: view.run_id for view in views}
        for run in scaling.runs:
            scale = reference.step.step_ns / run.step.step_ns / (run.efficiency or 1)
            step = Split(*(round(ns * scale) for ns in run.step.buckets_ns))
            bars.append(NamedSplit(run.name, step, ids.get(run.name, "")))
        parts += [
            html.P(f"rank time for the work of a step of {scaling.reference}", className="note"),
            build_graph("scaling", draw_splits(bars), "/run/{key}"),
        ]
    note = f"against {scaling.reference}, which has the fewest ranks" if scaling.work else _NO_WORK
    return [build_section("Scaling", f"efficiency {note}", *parts)]


# The entry.

_LOG = logging.getLogger(__name__)


def _build_page(request: PageRequest) -> PageContent:
    chosen, rows = request.address.chosen, request.store.list_runs()
    selection = select_runs(rows, chosen)
    head: list[Component] = [html.H1("Compare"), build_run_pickers(rows, selection, chosen)]
    if not selection.runs:
        # Those that were selected in the list are one click away from here, too.
        head.append(build_pick_bar())
    if len(selection.runs) < 2:
        hint = "Choose two or more finished runs, or mark them in the list of runs."
        return PageContent(html.Div([*head, build_empty_card("Select runs", hint)]))
    try:
        views = [request.load_report(run) for run in selection.runs]
        work = chosen.find_text("work") or ""
        many = len(views) > 2
        parts = build_comparison_of_many(views, work) if many else compare_page(*views)
        return PageContent(html.Div([*head, *parts]))
    except DataError as error:
        return PageContent(build_problem("Compare", "A run cannot be read", str(error)))
    except Exception:  # noqa: BLE001 - a bug met by odd data; other runs may still be compared
        _LOG.exception("the comparison of runs %s failed", [run.id for run in selection.runs])
        return PageContent(build_problem("Compare", "These runs cannot be compared", ODD_DATA))


PAGE = StorePage("Compare", "/compare", _build_page, loads_charts=True)
