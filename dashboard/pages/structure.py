"""The page Structure: where in the model a step's time goes, by layer and part."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.parts.part import NO_LAYER, PartKind, PartPhase
from stepsplit.analyzer.report.headline import round_shares
from stepsplit.analyzer.report.part_rows import LEAST_EXCESS, PartRow, describe_evidence, name_part
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.analyzer.units import format_milliseconds, format_percent
from stepsplit.dashboard.figures.structure import Place, draw_part_grid
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url
from stepsplit.dashboard.pages.components import (
    View,
    build_empty_card,
    build_graph,
    build_link,
    build_menu,
    build_section,
)
from stepsplit.dashboard.pages.page import RunPage
from stepsplit.dashboard.pages.tables import (
    Cell,
    build_number_cell,
    build_share_change_cell,
    build_table,
    build_time_cell,
    build_time_change_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.pages.timeline_links import build_rank_cell

_TIMES: dict[str, Callable[[PartRow], int]] = {
    "all": lambda row: row.total_ns,
    "compute": lambda row: row.compute_ns,
    "exposed": lambda row: row.exposed_ns,
    "idle": lambda row: row.idle_ns,
}
"""What of a part's time is shown."""

_PHASES = ("all", *(phase.label for phase in PartPhase))


def build_structure_page(view: View, chosen: AddressQuery) -> list[Component]:
    """The layers by their parts, the parts with shares that add up, and the ranks of a chosen one;
    beside the model where a job is known."""
    report = view.report
    if report.part_evidence is None or report.part_evidence.evidence == "none":
        hint = (
            "The recording does not say where in the model its kernels belong. Record with"
            " --modules, which names the model's modules in one step."
        )
        return [build_empty_card("No parts of the model", hint)]
    return [
        _build_grid(view, chosen),
        *_build_ranks(view, chosen),
        _build_parts(view),
        *_build_beside_model(report),
    ]


def _build_grid(view: View, chosen: AddressQuery) -> html.Section:
    report, evidence = view.report, view.report.part_evidence
    phase, time = chosen.find_text("phase") or "all", chosen.find_text("time") or "all"
    phase, time = phase if phase in _PHASES else "all", time if time in _TIMES else "all"
    sums = Counter[Place]()
    for row in report.parts:
        if phase in ("all", row.phase):
            sums[row.layer, row.part] += _TIMES[time](row)
    step_ns = sum(row.total_ns for row in report.parts)
    kept = {place: ns for place, ns in sums.items() if ns > 0}
    parts = [kind.label for kind in PartKind if any(part == kind.label for _, part in kept)]
    words = "mean full step of a rank"
    if evidence is not None:
        words += f"; {describe_evidence(evidence)}"
    share = sum(kept.values()) / step_ns if step_ns else 0.0
    shown = f"{format_milliseconds(sum(kept.values()))}, {format_percent(share)} of the step"
    link = None
    if view.run_id:
        query = {key: own for key, own in (("phase", phase), ("time", time)) if own != "all"}
        url = build_page_url(view.run_id, "structure", **query)
        link = f"{url}{'&' if query else '?'}{{custom}}"
        words += "; a cell leads to its ranks"
    menus = [
        build_menu("phase", {one: one for one in _PHASES}, phase, "all", "pass"),
        build_menu("time", {one: one for one in _TIMES}, time, "all", "time"),
    ]
    graph = build_graph("part-grid", draw_part_grid(kept, parts, step_ns), link)
    # A file has no server that would answer a choice.
    choices = [html.Div(menus, className="choices")] if view.run_id else []
    return build_section(
        "Model structure", words, *choices, html.P(f"shown: {shown}", className="note"), graph
    )


def _build_parts(view: View) -> html.Section:
    """A row per part; shares are rounded together, so that they add up."""
    by_part: dict[str, list[PartRow]] = defaultdict(list)
    for row in view.report.parts:
        by_part[row.part].append(row)
    largest = sorted(by_part, key=lambda part: -sum(row.total_ns for row in by_part[part]))
    totals = [sum(row.total_ns for row in by_part[part]) for part in largest]
    columns: dict[str, list[int]] = {}
    for phase in PartPhase:
        columns["outside of passes" if phase is PartPhase.OTHER else phase.label] = [
            sum(row.total_ns for row in by_part[part] if row.phase == phase.label)
            for part in largest
        ]
    for bucket in ("compute", "exposed", "bubble", "copy", "idle"):
        columns[bucket] = [
            sum(getattr(row, f"{bucket}_ns") for row in by_part[part]) for part in largest
        ]
    columns = {name: values for name, values in columns.items() if any(values)}
    body = [
        [
            Cell(name_part(part)),
            build_time_cell(total),
            build_number_cell(format_percent(share), share, "ratio"),
            *(build_time_cell(values[place]) for values in columns.values()),
            _build_slowest(view, by_part[part], sum(totals)),
        ]
        for place, (part, total, share) in enumerate(
            zip(largest, totals, round_shares(totals), strict=True)
        )
    ]
    heads = ("part", "per step", "share", *columns, "slowest rank")
    parts: list[Component] = [build_table(heads, body)]
    if view.run_id:
        words = "the kernels of these parts against the device's limits"
        parts.append(html.P(build_link(words, build_page_url(view.run_id, "compute"))))
    return build_section("Parts", "mean over ranks and full steps; shares add up", *parts)


def _build_slowest(view: View, rows: Sequence[PartRow], step_ns: int) -> Cell:
    """The rank that computes a part of a layer longest, if that is noticeably above the median."""
    most = max(rows, key=lambda row: row.slowest_compute_ns - row.median_compute_ns)
    above_ns = most.slowest_compute_ns - most.median_compute_ns
    if most.ranks == 1 or above_ns < LEAST_EXCESS * step_ns:
        return Cell()
    where = "" if most.layer is None else f" in layer {most.layer}"
    rank = build_rank_cell(view, most.slowest_rank).content
    words = f"{where}, {format_milliseconds(above_ns)} above the median"
    return build_number_cell(html.Span([rank, words]), above_ns, "ns")


def _build_ranks(view: View, chosen: AddressQuery) -> list[html.Section]:
    """The chosen part of a layer on each rank, longest first."""
    layer, part = chosen.parse_int("layer"), chosen.find_text("part")
    kind = next((kind for kind in PartKind if kind.label == part), None)
    if kind is None:
        return []
    where = name_part(kind.label) if layer is None else f"Layer {layer}, {name_part(kind.label)}"
    title = f"{where}, by rank"
    if view.tables is None:
        return [build_empty_card(title, "The tables of this run were deleted; the report is kept.")]
    own, full = view.tables.parts, select_full_steps(view.report.steps)
    steps = Counter(row.rank for row in full)
    rows = (own.part == int(kind)) & (own.layer == (NO_LAYER if layer is None else layer))
    phase = next((one for one in PartPhase if one.label == chosen.find_text("phase")), None)
    if phase is not None:
        rows &= own.phase == int(phase)
    counted = {(row.rank, row.step) for row in full}
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    for at in np.flatnonzero(rows).tolist():
        rank = int(own.rank[at])
        if (rank, int(own.step[at])) in counted:
            sums[rank][BUCKETS[own.bucket[at]]] += int(own.ns[at])
    shown = [bucket for bucket in BUCKETS if any(one[bucket] for one in sums.values())]
    longest = sorted(sums, key=lambda rank: -sums[rank].total() / steps[rank])
    body = [
        [
            build_rank_cell(view, rank),
            build_time_cell(sums[rank].total() / steps[rank]),
            *(build_time_cell(sums[rank][bucket] / steps[rank]) for bucket in shown),
        ]
        for rank in longest
    ]
    of_phase = "" if phase is None else f"{phase.label}, "
    note = f"{of_phase}mean full step{format_hidden_rows(longest)}"
    return [build_section(title, note, build_table(("rank", "per step", *shown), body))]


_GUESS = "the model has residuals and rotary embeddings in norm, modules may have them in attention"


def _build_beside_model(report: Report) -> list[html.Section]:
    """The compute of each part beside the model's; empty without a job."""
    if report.gap is None or not report.gap.parts:
        return []
    body = []
    for row in report.gap.parts:
        ratio = row.measured_ns / row.predicted_ns - 1 if row.predicted_ns else None
        body.append(
            [
                Cell(name_part(row.part)),
                build_time_cell(row.measured_ns),
                build_time_cell(row.predicted_ns),
                build_time_change_cell(row.measured_ns - row.predicted_ns),
                Cell(number=True) if ratio is None else build_share_change_cell(ratio),
            ]
        )
    heads = ("part", "measured", "model", "difference", "of the model")
    note = f"compute, mean over ranks; confidence {report.gap.confidence}; {_GUESS}"
    return [build_section("Compared with the model", note, build_table(heads, body))]


PAGE = RunPage("structure", build_structure_page, needs_tables=True, chapter="Model structure")
