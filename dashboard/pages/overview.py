"""Page: overview of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.report.axis_names import name_axis
from stepsplit.analyzer.report.explain import list_unexplained_buckets
from stepsplit.analyzer.report.headline import (
    compute_mean_step_ns,
    describe_lacks,
    round_parts,
    sum_exposed_by_phase,
)
from stepsplit.analyzer.report.kind_rows import describe_other_steps
from stepsplit.analyzer.report.path_shares import compute_path_shares
from stepsplit.analyzer.report.report import (
    JOB_MISMATCH,
    NO_MODEL,
    Finding,
    Gap,
    GroupRow,
    Report,
    find_world_size,
    format_world_size,
)
from stepsplit.analyzer.report.same_calls import SameCalls, merge_groups
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.analyzer.units import (
    choose_part_unit_ns,
    format_calls,
    format_milliseconds,
    format_milliseconds_range,
    format_parts,
    format_percent,
    format_signed_percent,
    group_consecutive,
)
from stepsplit.dashboard.figures.communication import RankGroup
from stepsplit.dashboard.figures.of_report import (
    estimate_total_ns,
    list_busy_ranks,
    list_rank_columns,
)
from stepsplit.dashboard.figures.rank_groups import RankGrouping, list_report_groupings
from stepsplit.dashboard.figures.run import (
    MAX_RANK_BARS,
    draw_busy_grid,
    draw_critical_path,
    draw_predicted_and_measured,
    draw_split_by_group,
    draw_split_by_rank,
    draw_split_by_step,
    draw_waterfall,
)
from stepsplit.dashboard.pages.address import build_page_url
from stepsplit.dashboard.pages.components import (
    COLOR,
    View,
    build_cards,
    build_collapsed,
    build_graph,
    build_link,
    build_section,
    format_subtitle,
)
from stepsplit.dashboard.pages.page import RunPage
from stepsplit.dashboard.pages.run_actions import build_job_button
from stepsplit.dashboard.pages.tables import (
    Cell,
    Content,
    DataTable,
    build_count_cell,
    build_name_cell,
    build_number_cell,
    build_rate_cell,
    build_share_cell,
    build_size_cell,
    build_table,
    build_time_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.pages.timeline_links import (
    build_event_url,
    build_evidence_url,
    build_mark_link,
    build_rank_cell,
)

# Overview: headline numbers, model comparison, bottlenecks, time split by rank and by step.


def build_overview(view: View) -> list[Component]:
    """The overview page of a run."""
    report, exposed = view.report, build_exposed_table(view.report)
    # The column of the model comparison is the longer one, if there is a model.
    short = report.gap is None
    summary = report.summary
    lacks = describe_lacks(summary.lacks if summary else ())
    others = describe_other_steps(report.step_kinds)
    return [
        html.P(format_subtitle(report), className="subtitle"),
        *([html.P(lacks, className="mismatch")] if lacks else []),
        build_cards(report),
        *([html.P(others, className="note")] if others else []),
        html.Div(
            [
                html.Div([*build_findings(view), *([] if short else exposed)]),
                html.Div([*build_model_comparison(view), *(exposed if short else [])]),
            ],
            className="columns",
        ),
        *_build_splits(view),
        *build_critical_path(view),
        *build_coverage(report),
        *build_warnings(report),
    ]


def build_model_comparison(view: View) -> list[html.Section]:
    """Predicted against measured step, with the differences in between; a hint without a model."""
    gap = view.report.gap
    if gap is None:
        messages = (one.message for one in view.report.warnings if one.code == NO_MODEL)
        text = next(messages, "This report has no prediction to compare with.")
        # The rest is how to state it on the command line.
        text = text.partition("; analyze --")[0]
        first = "Describe the job, or add" if view.offers_job else "Add"
        hint = f"{first} a job.toml next to the traces, and analyze the recording again."
        if view.is_role:
            hint = "A role of a job is not compared with a model: no job.toml of the run is used."
            hint += " Upload the folder of the role by itself, with a job.toml next to its traces."
        words: list[Component] = [html.P(text), html.P(hint, className="note")]
        if view.offers_job:
            words.append(html.P(build_job_button(view.run_id, view.name)))
        return [build_section("Model comparison", "not available", *words)]
    shown = gap.shown
    measured, predicted = shown.measured.step_ns, shown.predicted.step_ns
    stage = f" of stage {gap.stage}" if len(gap.stages) > 1 else ""
    difference = format_signed_percent(measured / predicted - 1) if predicted else "?"
    note = (
        f"median step{stage}, step {shown.step} of rank {shown.rank}: "
        f"measured {format_milliseconds(measured)} ({difference}), "
        f"predicted {format_milliseconds(predicted)} "
        f"(range {format_milliseconds_range(gap.low_ns, gap.high_ns)}, confidence {gap.confidence})"
    )
    if gap.bound_ns is not None:
        note += f", bound {format_milliseconds(gap.bound_ns)} ({gap.bound_resource})"
    figures = (
        build_graph("sides", draw_predicted_and_measured(gap)),
        build_graph("waterfall", draw_waterfall(gap)),
    )
    parts = (*build_mismatch(view.report), *figures, *build_caveats(view.report, gap))
    return [build_section("Model comparison", note, *parts)]


def build_mismatch(report: Report) -> list[html.P]:
    """Why the job cannot be that of the recording; empty if it can."""
    messages = (one.message for one in report.warnings if one.code == JOB_MISMATCH)
    return [html.P(one, className="mismatch") for one in messages]


_MOST_TIMES = 3.0
"""A model that is off by this factor says little about the step, whatever the reason."""


def build_caveats(report: Report, gap: Gap) -> list[html.P]:
    """The other caveats of the comparison with the model; first by how many times it is off."""
    mismatches = {one.message for one in report.warnings if one.code == JOB_MISMATCH}
    notes = [one for one in gap.notes if one not in mismatches]
    measured, predicted = gap.shown.measured, gap.shown.predicted
    shorter_ns, longer_ns = sorted((measured.step_ns, predicted.step_ns))
    is_off = shorter_ns and longer_ns >= _MOST_TIMES * shorter_ns
    # A mismatch and a guess of the device's speed say so already.
    if is_off and not mismatches and not any(" times the " in one for one in notes):
        times = f"{longer_ns / shorter_ns:.1f} times"
        if measured.step_ns > predicted.step_ns:
            idle = format_percent(measured.idle_ns / measured.step_ns)
            words = f"the measured step is {times} the predicted one, and {idle} of it is idle"
        else:
            words = f"the predicted step is {times} the measured one"
        notes.insert(0, f"{words}: what the model says of its parts does not hold for this run")
    return [html.P(f"caveat: {one}", className="note") for one in notes]


def _build_splits(view: View) -> list[Component]:
    """The time split by rank and by step; of many ranks by group, and where they differ."""
    report = view.report
    click_hint = "; click a bar to open its timeline" if view.run_id else ""
    many = len(report.run.ranks) > MAX_RANK_BARS
    groupings = list_report_groupings(report) if many else ()
    # By stage or host, else by the first mesh axis with few enough groups.
    grouping = next((one for one in groupings if len(one.groups) <= MAX_RANK_BARS), None)
    if grouping is None:
        link = build_mark_link(view, "rank={number}")
        graph = build_graph("by-rank", draw_split_by_rank(report), link)
        note = f"mean of the rank's full steps{click_hint}"
        first = build_section("By rank", note, graph)
    else:
        link = build_mark_link(view, f"group={grouping.by}&show={{x}}")
        graph = build_graph("by-group", draw_split_by_group(report, grouping.groups), link)
        first = build_section(
            f"By {grouping.by}", f"mean over ranks and full steps{click_hint}", graph
        )
    link = build_mark_link(view, "step={number}")
    steps = build_graph("by-step", draw_split_by_step(report), link)
    note = f"mean over ranks; pale steps are left out of the mean step{click_hint}"
    columns = html.Div([first, build_section("By step", note, steps)], className="columns")
    return [columns, _build_busy_ranks(view, groupings)] if many else [columns]


def _build_busy_ranks(view: View, groupings: Sequence[RankGrouping]) -> html.Section:
    """How much longer each rank is busy than usual, as a grid by host and as a table."""
    report, by = view.report, {one.by: one.groups for one in groupings}
    ranks = list_busy_ranks(report, by.get("stage", (RankGroup("", report.run.ranks),)))
    columns = list_rank_columns(report, groupings)
    column_of = {rank: one.label for one in columns for rank in one.ranks}
    rows = [
        [
            build_rank_cell(view, one.rank),
            Cell(column_of.get(one.rank, "")),
            build_time_cell(one.excess_ns),
            *map(build_time_cell, one.split.buckets_ns),
        ]
        for one in ranks[:MAX_ROWS]
    ]
    heads = ("rank", "host" if "host" in by else "ranks", "longer by", *BUCKETS)
    whose = "its stage" if "stage" in by else "the job"
    note = f"busy (all but skew and bubble) longer than the median rank of {whose}, per step"
    note += format_hidden_rows(ranks, MAX_ROWS)
    on = "rank of the host" if "host" in by else "rank of these"
    grid = draw_busy_grid(columns, on, {one.rank: one.excess_ns for one in ranks})
    graph = build_graph("busy-ranks", grid, build_mark_link(view, "rank={custom}"))
    return build_section("Ranks", note, graph, build_table(heads, rows))


# The tables of a run's page; each is an empty list if the report has no rows for it.

MAX_ROWS = 100

MAX_OPEN_FINDINGS = 5


def build_findings(view: View) -> list[html.Section]:
    """Bottlenecks in the order of the report, each with a link to the timeline."""
    report = view.report
    if not report.findings:
        empty = html.P("No fix is known that would save 1 % of the step.")
        return [build_section("Top bottlenecks", "", empty, *_build_unexplained(report))]
    step_ns = compute_mean_step_ns(report.steps)
    items = [_build_finding(finding, step_ns, view) for finding in report.findings[:MAX_ROWS]]
    note = "estimated saving per step (not additive)"
    shown: list[Component] = [html.Ol(items[:MAX_OPEN_FINDINGS], className="findings")]
    if items[MAX_OPEN_FINDINGS:]:
        rest = html.Ol(items[MAX_OPEN_FINDINGS:], className="findings")
        shown.append(build_collapsed(f"{len(items) - MAX_OPEN_FINDINGS:,} smaller", rest))
    return [build_section("Top bottlenecks", note, *shown, *_build_unexplained(report))]


def _build_unexplained(report: Report) -> list[Component]:
    """The large buckets without a finding, each with its largest part."""
    items = [
        html.Li(
            [
                html.B(f"{one.bucket} {format_percent(one.share)}"),
                html.Span(f" of the step{f': {one.part}' if one.part else ''}"),
            ],
            style={"borderLeftColor": COLOR[one.bucket]},
        )
        for one in list_unexplained_buckets(report)
    ]
    if not items:
        return []
    head = html.P("Other large parts of the step", className="note")
    return [head, html.Ul(items, className="findings")]


def _build_finding(finding: Finding, step_ns: int, view: View) -> html.Li:
    share = f" ({format_percent(finding.gain_ns / step_ns)})" if step_ns else ""
    gain = html.Span(f"{format_milliseconds(finding.gain_ns)}{share}", className="gain")
    words: list[Content] = [gain, html.Span(finding.message)]
    if finding.basis is not None:
        words += [" ", html.Span(finding.basis.describe(), className="note")]
    where = build_evidence_url(view.report, finding, view.run_id) if view.run_id else None
    if where is not None:
        words += [" ", html.Span(build_link("open in timeline", where), className="note")]
    mark = {"borderLeftColor": COLOR.get(finding.bucket, COLOR["idle"])}
    return html.Li(words, style=mark)


def build_warnings(report: Report) -> list[html.Details]:
    """Warnings about the recording and its analysis."""
    # The comparison with the model says itself why there is none.
    shown_here = [one for one in report.warnings if one.code != NO_MODEL]
    if not shown_here:
        return []
    items = [
        html.Li(("" if one.rank is None else f"rank {one.rank}: ") + one.message)
        for one in shown_here
    ]
    count = len(items)
    head = html.Summary(f"{count:,} warning{'' if count == 1 else 's'}")
    shown = html.Details(
        [head, html.Ul(items[:MAX_ROWS])], className="card warnings", open=count <= 3
    )
    return [shown]


def build_exposed_table(report: Report) -> list[html.Section]:
    """Exposed communication and bubble by axis and phase: mean over ranks and full steps."""
    full = select_full_steps(report.steps)
    sums = sum_exposed_by_phase(full, report.exposed)
    if not sums:
        return []
    largest = sorted(sums.items(), key=lambda item: -item[1].total())
    # Rounded together and in the order of the buckets, with the compute before them: so a column
    # adds up to its bucket as the terminal and the bars show it.
    unit_ns = choose_part_unit_ns(compute_mean_step_ns(report.steps))
    places = [(part, kind) for part in _EXPOSED for kind, _ in largest]
    parts_ns = [sums[kind][part] for part, kind in places]
    compute_ns = sum(row.compute_ns for row in full)
    counts = round_parts([compute_ns, *parts_ns], unit_ns * len(full))[1:]
    shown = dict(zip(places, counts, strict=True))
    rows = [
        [
            Cell(name_axis(axis)),
            Cell(phase),
            *(
                build_number_cell(
                    format_parts(shown[part, (axis, phase)], unit_ns), own[part] / len(full), "ns"
                )
                for part in _EXPOSED
            ),
        ]
        for (axis, phase), own in largest
    ]
    note = "mean over ranks and full steps"
    heads = ("axis", "phase", "transfer", "skew", "bubble")
    return [
        build_section("Exposed communication by axis and phase", note, build_table(heads, rows))
    ]


_EXPOSED = ("transfer", "skew", "bubble")
"""The columns, in the order of BUCKETS."""


def build_blame_table(view: View) -> list[html.Section]:
    """Waiting time caused by each rank."""
    report = view.report
    # Waits are blamed in the steps that are full on any rank, on all ranks that have them.
    full = select_full_steps(report.steps)
    numbers = {row.step for row in full}
    windows = sum(row.step in numbers for row in report.steps)
    if not report.blame or not windows:
        return []
    # A column that says "other" in each row says nothing.
    has_axes = any(row.axis for row in report.blame)
    rows = [
        [
            build_rank_cell(view, row.rank, step=row.steps[len(row.steps) // 2]),
            Cell(row.cause),
            Cell(name_axis(row.axis) if has_axes else ""),
            build_time_cell(row.caused_skew_ns / windows),
            build_time_cell(row.caused_bubble_ns / windows),
            build_time_cell(row.caused_ns / windows),
        ]
        for row in report.blame
    ]
    note = "waiting time caused per step, mean over ranks and full steps"
    if windows > len(full):
        note += ", with the ranks on which such a step is partial"
    note += format_hidden_rows(report.blame)
    heads = ("rank", "cause", "axis", "skew", "bubble", "caused per step")
    return [build_section("Blame", note, build_table(heads, rows))]


def build_collective_table(report: Report) -> list[html.Section]:
    """One row per op and size on an axis, by total time, largest first; and one for each group."""
    if not report.collectives:
        return []
    kinds = sorted(merge_groups(report), key=_sum_total_ns, reverse=True)
    groups = {group.id: group for group in report.groups}
    table = _build_collective_rows(kinds, groups)
    note = "medians; busbw over the transfer part only"
    note += format_hidden_rows(kinds)
    parts: list[Component] = [table]
    if len(kinds) < len(report.collectives):
        by_group = [
            one
            for kind in kinds
            for one in sorted(kind.split_groups(), key=_sum_total_ns, reverse=True)
        ]
        single = _build_collective_rows(by_group, groups)
        parts.append(build_collapsed(f"by group{format_hidden_rows(by_group)}", single))
    return [build_section("Collectives and messages", note, *parts)]


def _sum_total_ns(kind: SameCalls) -> int:
    return sum(map(estimate_total_ns, kind.rows))


def _build_collective_rows(kinds: Sequence[SameCalls], groups: Mapping[int, GroupRow]) -> DataTable:
    heads = ("axis", "groups", "op", "size", "calls/step", "transfer", "wait", "busbw")
    return build_table(heads, [_build_collective_row(kind, groups) for kind in kinds])


def _build_collective_row(kind: SameCalls, groups: Mapping[int, GroupRow]) -> list[Cell]:
    first, calls = kind.rows[0], median(kind.per_step)
    return [
        Cell(kind.axis),
        Cell(_format_groups(kind, groups)),
        Cell(first.op if first.dtype is None else f"{first.op} {first.dtype}"),
        build_size_cell(first.message_bytes),
        build_number_cell(format_calls(calls), calls),
        _build_range_cell([row.transfer_ns_median for row in kind.rows], build_time_cell),
        _build_range_cell([row.wait_ns_median for row in kind.rows], build_time_cell),
        _build_range_cell(kind.busbw_bytes_per_s, build_rate_cell),
    ]


def _build_range_cell(values: Sequence[float], build: Callable[[float], Cell]) -> Cell:
    """The median, with the lowest and the highest value below it where they differ as text."""
    if not values:
        return Cell("unknown", number=True)
    middle, low, high = (build(one) for one in (median(values), min(values), max(values)))
    if low.content == high.content:
        return middle
    spread = html.Div(f"{low.content} to {high.content}", className="note")
    return replace(middle, content=html.Div([middle.content, spread]))


def _format_groups(kind: SameCalls, groups: Mapping[int, GroupRow]) -> str:
    """The members of the only group, else how many groups there are of how many ranks."""
    group = groups.get(kind.rows[0].group)
    if group is None:
        return "unknown"
    if len(kind.rows) > 1:
        sizes = {len(groups[row.group].ranks) for row in kind.rows if row.group in groups}
        return f"{len(kind.rows):,} of {' or '.join(f'{one:,}' for one in sorted(sizes))} ranks"
    ranks = ", ".join(str(rank) for rank in group.ranks[:8])
    more = f" and {len(group.ranks) - 8:,} more" if len(group.ranks) > 8 else ""
    return f"{group.description or group.id}: {ranks}{more}"


# The critical path, and slow steps.

MAX_SLOW_STEPS = 8


def build_critical_path(view: View) -> list[html.Section]:
    """The critical path of the average step, and one sentence per slow step."""
    report = view.report
    shown = [*_build_path(view), *_build_path_kernels(view), *_build_slow_steps(view)]
    notes = []
    last = Counter(one.last_rank for one in report.path_steps)
    if last and len(report.run.ranks) > 1:
        rank, often = last.most_common(1)[0]
        notes.append(f"rank {rank} finishes last in {often:,} of {last.total():,} steps")
    if report.path_steps:
        path_ns = sum(part.ns for part in report.critical_path) / len(report.path_steps)
        step_ns = compute_mean_step_ns(report.steps)
        if path_ns >= 1.02 * step_ns:
            notes.append(
                f"longer than a rank's mean step ({format_milliseconds(step_ns)}), as ranks do"
                " not begin and end their steps together"
            )
    return [build_section("Critical path", "; ".join(notes), *shown)] if shown else []


def _build_path(view: View) -> list[Component]:
    """Empty for a single rank: its critical path equals its split."""
    report = view.report
    shares = compute_path_shares(report) if len(report.run.ranks) > 1 else ()
    if not shares:
        return []
    largest = sorted(shares, key=lambda one: -one.ns)
    rows = [
        [
            Cell(one.label),
            Cell(one.ranks_text),
            build_share_cell(one.share),
            build_time_cell(one.ns),
        ]
        for one in largest
    ]
    heads = ("bucket", "mostly on", "share of path", "per step")
    middle = report.path_steps[len(report.path_steps) // 2].step if report.path_steps else ""
    link = build_mark_link(view, f"step={middle}&rank={{key}}")
    graph = build_graph("critical-path", draw_critical_path(report), link)
    return [graph, build_table(heads, rows)]


def _build_path_kernels(view: View) -> list[Component]:
    """The kernels with the most time on the path, each with a link to the longest of them."""
    report = view.report
    total = sum(part.ns for part in report.critical_path)
    if len(report.run.ranks) < 2 or not report.path_kernels:
        return []
    rows = [
        [
            build_name_cell(one.kernel),
            Cell(f"rank {one.rank}" + (f", stream {one.stream}" if one.stream is not None else "")),
            build_share_cell(one.ns / total),
            build_time_cell(one.ns // len(report.path_steps)),
            Cell(build_link("longest", build_event_url(one, view.run_id) if view.run_id else None)),
        ]
        for one in report.path_kernels
    ]
    heads = ("kernel on the path", "of", "share of path", "per step", "in the timeline")
    return [build_table(heads, rows)]


def _build_slow_steps(view: View) -> list[Component]:
    report = view.report
    if not report.slow_steps:
        return []
    worst = sorted(report.slow_steps, key=lambda one: -one.excess_ns)[:MAX_SLOW_STEPS]
    n_hidden = len(report.slow_steps) - len(worst)
    items = []
    for slow in worst:
        where = build_page_url(view.run_id, "timeline", step=slow.step, rank=slow.rank)
        link = build_link(f"step {slow.step}", where if view.run_id else None)
        took = f"{format_milliseconds(slow.step_ns)} (+{format_milliseconds(slow.excess_ns)}"
        cause = f"rank {slow.rank} {slow.bucket} +{format_milliseconds(slow.excess_in_bucket_ns)}"
        items.append(html.Li([link, f" took {took} over the median), mainly {cause}"]))
    items += [html.Li(f"{n_hidden:,} more are in report.json")] if n_hidden else []
    note = ""
    run = next((one for one in report.step_times if one.rank is None), None)
    if run is not None:
        usual = format_milliseconds(run.median_ns)
        note = f"median step on its slowest rank: {usual} ({run.steps:,} steps)"
    head = [html.H3("Slow steps"), html.Span(note, className="note")]
    return [html.Div([*head, html.Ul(items)], className="slow-steps")]


# Measurement coverage: which waits are measured and which are estimates.

MAX_RANGES = 12

_WAITS = {"measured": "measured", "partly": "partly estimated", "estimated": "estimated"}


def build_coverage(report: Report) -> list[html.Section]:
    """How completely waits are measured on each axis; empty if all of them are."""
    run, missing = report.run, ""
    absent = sorted(set(range(find_world_size(report) or 0)) - set(run.ranks))
    if absent:
        spans = group_consecutive(absent)
        named = ", ".join(
            f"{span[0]} to {span[-1]}" if len(span) > 2 else ", ".join(map(str, span))
            for span in spans[:MAX_RANGES]
        )
        left = sum(len(span) for span in spans[MAX_RANGES:])
        named += f" and {left:,} more" if left else ""
        missing = (
            f"{len(absent):,} of {format_world_size(report)} ranks were not recorded: {named}."
        )
    if not missing and all(one.holds == "measured" for one in report.coverage):
        return []
    parts: list[html.P | DataTable] = [html.P(missing)] if missing else []
    if report.coverage:
        heads = ("axis", "waits", "groups", "complete", "one rank only", "calls", "unmatched")
        rows = [
            [
                Cell(name_axis(one.axis)),
                Cell(_WAITS[one.holds]),
                build_count_cell(one.groups),
                build_count_cell(one.whole),
                build_count_cell(one.alone),
                build_count_cell(one.calls),
                build_count_cell(one.unmatched),
            ]
            for one in report.coverage
        ]
        parts.append(build_table(heads, rows))
    note = "compute, copy, idle and the step time are measured even if ranks are missing"
    return [build_section("Coverage", note, *parts)]


PAGE = RunPage("overview", lambda view, _: build_overview(view), chapter="", loads_charts=True)
