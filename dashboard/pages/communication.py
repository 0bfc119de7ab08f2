"""Pages: collectives, stragglers, pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import quote

import numpy as np
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.arrays import select_rows
from stepsplit.analyzer.report.axis_names import name_axis, name_groups
from stepsplit.analyzer.report.diagnosis_rows import Lateness
from stepsplit.analyzer.report.report import SCHEDULE_NAMES, Pipeline, Report, describe_ideal_bubble
from stepsplit.analyzer.report.step_rows import list_full_steps
from stepsplit.analyzer.report.waits import sum_waits_by_owner, sum_waits_by_root
from stepsplit.analyzer.split.overlap import sum_overlaps
from stepsplit.analyzer.units import format_microbatches, format_milliseconds, format_percent
from stepsplit.dashboard.figures.communication import (
    RankGroup,
    draw_bandwidth,
    draw_wait_against_transfer,
    draw_waits_matrix,
    find_label_start,
)
from stepsplit.dashboard.figures.of_report import (
    choose_grid,
    collect_bandwidth,
    list_drawn_steps,
    list_median_calls,
)
from stepsplit.dashboard.figures.rank_groups import list_rank_groupings, list_rank_locations
from stepsplit.dashboard.figures.run import draw_pipeline, draw_stage_bubbles
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.components import (
    View,
    build_card,
    build_collapsed,
    build_empty_card,
    build_graph,
    build_menu,
    build_section,
    count_summed_steps,
)
from stepsplit.dashboard.pages.overview import (
    build_blame_table,
    build_collective_table,
    build_exposed_table,
)
from stepsplit.dashboard.pages.page import RunPage
from stepsplit.dashboard.pages.schedule_change import (
    build_change_section,
    build_verdict,
    measure_pipeline,
)
from stepsplit.dashboard.pages.tables import (
    MAX_ROWS,
    Cell,
    build_count_cell,
    build_share_cell,
    build_table,
    build_time_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.pages.timeline_links import (
    build_mark_link,
    build_rank_cell,
    build_span_key,
)

# Collectives: bus bandwidth, waits between ranks, and a table of all kinds of calls.


def build_collectives_page(view: View, chosen: AddressQuery) -> list[Component]:
    """The collectives page; sections without data in the recording are left out."""
    report = view.report
    if not report.collectives:
        hint = "The recording has no collectives and no messages: was it a single-process job?"
        return [build_empty_card("No communication", hint)]
    names = name_groups(report)
    largest = list_median_calls(report)
    calls = [call for call, _ in largest]
    note = "median call of the slowest group"
    link = build_mark_link(view, "{key}")
    longest = _find_longest_waits(view)
    keys = [longest.get((row.op, names[row.group]), "") for _, row in largest]
    figure = build_graph("wait-transfer", draw_wait_against_transfer(calls, keys), link)
    times = [build_section("Wait and transfer time", note, figure)]
    # The figures of the two columns have about the same height then.
    is_tall = len(report.run.ranks) > _FEW_RANKS
    return [
        html.Div(
            [
                html.Div([*_build_bandwidth(view, longest), *(times if is_tall else [])]),
                html.Div([*_build_waits_matrix(view, chosen), *([] if is_tall else times)]),
            ],
            className="columns",
        ),
        *build_exposed_table(report),
        *build_collective_table(report),
        *build_stragglers(view),
        *build_overlap(report),
        *build_blame_table(view),
    ]


def _find_longest_waits(view: View) -> dict[tuple[str, str], str]:
    """By op and the name of its axis, where in the timeline its longest wait in a full step is."""
    if view.tables is None or not view.run_id:
        return {}
    waits = view.tables.waits
    left = np.isin(waits.step, list_full_steps(view.report.steps))
    found: dict[tuple[str, str], str] = {}
    # One pass over all waits for each kind: there are many waits, of few kinds.
    while left.any():
        one = int(left.argmax())
        own = left & (waits.op == waits.op[one]) & (waits.axis == waits.axis[one])
        at = int(np.where(own, waits.dur_ns, -1).argmax())
        rank, owner = int(waits.rank[at]), int(waits.owner[at])
        both = f"&open={rank},{owner}" if owner >= 0 else ""
        span = build_span_key(rank, int(waits.start_ns[at]), int(waits.dur_ns[at])) + both
        found[str(waits.op[one]), name_axis(str(waits.axis[one]))] = span
        left &= ~own
    return found


def _build_bandwidth(view: View, longest: Mapping[tuple[str, str], str]) -> list[html.Section]:
    points, curves = collect_bandwidth(view.report)
    if not points:
        return []
    model = "dotted: model" if curves else "no model to compare with"
    note = f"over the transfer part only, without waiting for stragglers; {model}"
    links = {curve.axis: curve.link_bytes_per_s for curve in curves}
    if any(one.busbw_bytes_per_s > links.get(one.axis, math.inf) for one in points):
        note += "; dots above the dashed line are faster than the link that the job describes"
    return [
        build_section(
            "Bus bandwidth",
            note,
            build_graph(
                "bandwidth",
                draw_bandwidth(points, curves, longest),
                build_mark_link(view, "{key}"),
            ),
        )
    ]


def _build_waits_matrix(view: View, chosen: AddressQuery) -> list[html.Section]:
    if view.tables is None:
        return []
    steps = list_full_steps(view.report.steps)
    waits = select_rows(view.tables.waits, np.isin(view.tables.waits.step, steps))
    if not (waits.owner >= 0).any():
        return []
    ranks = view.report.run.ranks
    direct = chosen.find_text("waits") == "direct"
    sums = (sum_waits_by_owner if direct else sum_waits_by_root)(waits, max(ranks) + 1)
    located = list_rank_locations(view.report, view.tables)
    groupings = {one.by: one for one in list_rank_groupings(view.report, located)}
    # The finest grouping that is readable: by rank, tensor-parallel group, host or stage.
    known = [by for by in ("tp", "host", "stage") if by in groupings]
    fitting = [by for by in known if len(groupings[by].groups) <= _GROUPED_FROM]
    default = "rank"
    if len(ranks) > _GROUPED_FROM and known:
        default = fitting[0] if fitting else known[-1]
    by = chosen.find_text("group") or default
    by = by if by in groupings or by == "rank" else default
    if by in groupings:
        groups = groupings[by].groups
    else:
        # By rank: those with most waiting, in order of their numbers.
        total = sums.sum(axis=0) + sums.sum(axis=1)
        most = sorted(ranks, key=lambda rank: -total[rank])[:_MAX_MATRIX_RANKS]
        groups = tuple(RankGroup(f"rank {rank}", (rank,)) for rank in sorted(most))
    menus = [
        build_menu("group", {one: one for one in ("rank", *groupings)}, by, default),
        build_menu("waits", _WAITED_FOR, "direct" if direct else "root", "root"),
    ]
    choices = [html.Div(menus, className="choices")] if view.run_id else []
    note = "mean over full steps and the ranks of a row; a colored column is what others wait for"
    kind = quote(find_label_start(groups))
    shown = f"show={kind}{{y}},{kind}{{x}}" + ("" if by == "rank" else f"&group={by}")
    link = build_mark_link(view, shown)
    figure = build_graph("waits", draw_waits_matrix(sums, groups, len(steps)), link)
    return [build_section("Waits between ranks", note, *choices, figure)]


_WAITED_FOR = {"root": "for the rank at the end of the chain", "direct": "for the next rank"}

_FEW_RANKS, _GROUPED_FROM, _MAX_MATRIX_RANKS = 12, 32, 128
"""Ranks of a small matrix, most rows before ranks are grouped, and most ranks that are drawn."""


# Stragglers (ranks that arrive last), and overlapped communication.

_HEADS = (
    "rank",
    "axis",
    "status",
    "calls",
    "arrived last",
    "expected",
    "delay (median)",
    "delay (sum)",
)


def build_stragglers(view: View) -> list[html.Section]:
    """Stragglers, then other late ranks; messages collapsed, as the schedule decides who waits."""
    late = sorted(
        (one for one in view.report.lateness if one.last),
        key=lambda one: (not one.straggler, -one.late_ns_total),
    )
    calls = [one for one in late if not one.message]
    messages = [one for one in late if one.message]
    parts: list[Component] = []
    if calls:
        rows = [_build_late_row(view, one) for one in calls[:MAX_ROWS]]
        parts.append(build_table(_HEADS, rows))
    if messages:
        label = "messages (the schedule decides which end waits)"
        rows = [_build_late_row(view, one) for one in messages[:MAX_ROWS]]
        parts.append(
            build_collapsed(label + format_hidden_rows(messages), build_table(_HEADS, rows))
        )
    note = "a straggler arrives last more often than expected by chance, by a significant delay"
    if not calls:
        note = "no late arrivals at collectives"
    elif not any(one.straggler for one in calls):
        note = "no straggler: no rank is significantly later than its peers"
    note += format_hidden_rows(calls)
    return [build_section("Stragglers", note, *parts)] if parts else []


def _build_late_row(view: View, lateness: Lateness) -> list[Cell]:
    pill = html.Span("straggler", className="pill failed") if lateness.straggler else ""
    return [
        build_rank_cell(view, lateness.rank),
        Cell(name_axis(lateness.axis)),
        Cell(pill),
        build_count_cell(lateness.calls),
        build_share_cell(lateness.last_fraction),
        build_share_cell(1 / lateness.members),
        build_time_cell(lateness.late_ns_median),
        build_time_cell(lateness.late_ns_total),
    ]


def build_overlap(report: Report) -> list[html.Section]:
    """Overlapped and exposed transfer time by axis and op."""
    steps = count_summed_steps(report).total()
    own = [one for one in report.overlap if one.rank is not None]
    kinds = [one for one in sum_overlaps(own) if one.moved_ns]
    if not kinds or not steps:
        return []
    rows = [
        [
            Cell(name_axis(one.axis)),
            Cell(one.op),
            build_time_cell(one.moved_ns / steps),
            build_time_cell(one.hidden_ns / steps),
            build_time_cell(one.exposed_ns / steps),
            build_share_cell(one.efficiency),
        ]
        for one in kinds
    ]
    heads = ("axis", "op", "transfer per step", "overlapped", "exposed", "efficiency")
    note = "mean over ranks and full steps; efficiency is overlapped / transfer time"
    note += format_hidden_rows(kinds)
    return [build_section("Overlapped communication", note, build_table(heads, rows))]


# Pipeline: measured and ideal microbatch grid, and the bubble of each stage.


def build_pipeline_page(view: View, chosen: AddressQuery) -> list[Component]:
    """The pipeline page: the grid of one step, or why there is none."""
    pipeline_report = view.report.pipeline
    if pipeline_report is None:
        no_grid = [one.message for one in view.report.warnings if one.code == "no_grid"]
        if no_grid and no_grid[0]:
            return [build_empty_card("No microbatch grid", no_grid[0])]
        hint = "One pipeline stage was detected in this recording."
        return [build_empty_card("No pipeline", hint)]
    note = "from first forward to last backward; medians over full steps"
    bubble, ideal = pipeline_report.bubble_fraction, pipeline_report.ideal_bubble_fraction
    if ideal is not None:
        which = "" if ideal < bubble else "of all stages, "
        note += f"; dashed: {which}{describe_ideal_bubble(bubble, ideal)}"
    link = build_mark_link(view, "group=stage&show=stage {x}")
    bubbles = build_graph("stage-bubbles", draw_stage_bubbles(pipeline_report), link)
    measured = None if view.tables is None else measure_pipeline(view.report, view.tables.boxes)
    return [
        build_verdict(pipeline_report, measured),
        _build_cards(pipeline_report),
        *_build_grid(view, chosen),
        *([] if measured is None else build_change_section(view, measured, chosen)),
        build_section("Bubble by stage", note, bubbles),
    ]


def _build_cards(pipeline_report: Pipeline) -> html.Div:
    measured, ideal = pipeline_report.bubble_fraction, pipeline_report.ideal_bubble_fraction
    schedule = pipeline_report.schedule or "unknown"
    shown = [
        build_card(
            "schedule",
            SCHEDULE_NAMES.get(schedule, schedule),
            f"{format_microbatches(pipeline_report.microbatches)}/step",
        ),
        build_card("stages", str(len(pipeline_report.stages)), "of the model"),
        build_card(
            "pipeline bubble",
            format_percent(measured),
            "idle / window; "
            + ("ideal unknown" if ideal is None else describe_ideal_bubble(measured, ideal)),
        ),
        build_card(
            "bubble overhead",
            format_percent(pipeline_report.bubble_overhead),
            "idle / useful time, measured",
        ),
    ]
    return html.Div(shown, className="cards")


def _build_grid(view: View, chosen: AddressQuery) -> list[Component]:
    if view.tables is None or not len(view.tables.boxes.step):
        return []
    steps = list_drawn_steps(view.report, view.tables.boxes)
    default_step = steps[len(steps) // 2]
    asked = chosen.parse_int("step")
    step = asked if asked in steps else default_step
    grid = choose_grid(view.report, view.tables.boxes, step)
    words = {str(n): f"step {n}" for n in steps}
    menu = [build_menu("step", words, str(step), str(default_step))] if view.run_id else []
    measured = grid.measured
    columns = (measured.rank, measured.start_ns, measured.dur_ns)
    spans = zip(*(column.tolist() for column in columns), strict=True)
    keys = [build_span_key(*span) for span in spans] if view.run_id else None
    drawn_grid = draw_pipeline(measured, grid.ideal, keys)
    figure = build_graph("pipeline", drawn_grid, build_mark_link(view, "{key}"))
    note = f"step {step} took {format_milliseconds(grid.measured_ns)}"
    if grid.ideal_ns is None:
        note += "; no ideal grid for this schedule"
    elif grid.ideal is None:
        note += "; no ideal grid: stages of equal length would not be faster"
    else:
        ideal_ms = format_milliseconds(grid.ideal_ns)
        note += " from first forward to last backward; "
        note += f"{ideal_ms} with equal stages and free communication"
    return [build_section("Microbatches", note, *menu, figure)]


# The entries.

PIPELINE_PAGE = RunPage(
    "pipeline", build_pipeline_page, needs_tables=True,
    chapter="Pipeline", has_data=lambda report: report.pipeline is not None,
)  # fmt: skip

COLLECTIVES_PAGE = RunPage(
    "collectives",
    build_collectives_page,
    needs_tables=True,
    chapter="Communication",
    loads_charts=True,
)
