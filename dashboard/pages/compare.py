"""Compare: two runs, what differs between them by bucket, by axis, by call and by kernel."""

from __future__ import annotations

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.regression.compare import (
    Calls,
    CallsChange,
    Change,
    RunComparison,
    compare_reports,
)
from stepsplit.analyzer.units import (
    gigabytes_per_second,
    memory_size,
    milliseconds,
    percent,
    signed_milliseconds,
    signed_percent,
    size,
)
from stepsplit.dashboard.figures.model import NamedSplit, splits
from stepsplit.dashboard.figures.waterfall import difference
from stepsplit.dashboard.pages.address import page_url
from stepsplit.dashboard.pages.parts import (
    Cell,
    card,
    graph,
    led,
    left_out,
    nothing,
    section,
    table,
    time_cell,
)
from stepsplit.dashboard.pages.view import View

ROWS = 20
_NOISE = {
    True: "within the noise of the steps",
    False: "beyond the noise of the steps",
    None: "too few steps to tell noise",
}


def compare_page(baseline: View, candidate: View) -> list[Component]:
    """The candidate held against the baseline."""
    try:
        found = compare_reports(baseline.report, candidate.report)
    except UsageError as error:
        return [nothing("These two cannot be compared", str(error))]
    bars = [
        NamedSplit("baseline", found.baseline.mean),
        NamedSplit("candidate", found.candidate.mean),
    ]
    return [
        _names(baseline, candidate),
        _cards(found),
        *_settings(found),
        html.Div(
            [
                section("The mean step", "over ranks and full steps",
                        graph("splits", splits(bars))),
                section("What changed", "bucket by bucket, of the mean step",
                        graph("difference", difference(found))),
            ],
            className="columns",
        ),
        html.Div([*_exposed(found), *_kernels(found)], className="columns"),
        *_calls(found),
    ]  # fmt: skip


def _names(baseline: View, candidate: View) -> html.P:
    return html.P(
        [
            "baseline ", html.B(led(baseline.name, page_url(baseline.run_id))),
            "   candidate ", html.B(led(candidate.name, page_url(candidate.run_id))), "   ",
            led("swap", f"/compare?baseline={candidate.run_id}&candidate={baseline.run_id}"),
        ],
        className="subtitle",
    )  # fmt: skip


def _cards(found: RunComparison) -> html.Div:
    one, other = found.baseline, found.candidate
    change = "unknown" if found.ratio is None else signed_percent(found.ratio - 1)
    shown = [
        card("median step", change, _NOISE[found.within_noise]),
        card("baseline", milliseconds(one.median_ns), f"{one.steps} full steps"),
        card("candidate", milliseconds(other.median_ns), f"{other.steps} full steps"),
    ]
    if one.bubble_fraction is not None and other.bubble_fraction is not None:
        was = f"was {percent(one.bubble_fraction)}"
        shown.append(card("bubble_fraction", percent(other.bubble_fraction), was))
    if one.peak_allocated_bytes and other.peak_allocated_bytes:
        was = f"was {memory_size(one.peak_allocated_bytes)}"
        shown.append(card("peak memory", memory_size(other.peak_allocated_bytes), was))
    if one.mfu is not None and other.mfu is not None:
        shown.append(card("MFU", percent(other.mfu), f"was {percent(one.mfu)}"))
    return html.Div(shown, className="cards")


def _settings(found: RunComparison) -> list[html.Section]:
    if not found.settings:
        return []
    rows = [
        [Cell(one.name), Cell(one.baseline or "unknown"), Cell(one.candidate or "unknown")]
        for one in found.settings
    ]
    told = table(("setting", "baseline", "candidate"), rows)
    return [section("Set up otherwise", "what may explain the rest", told)]


def _exposed(found: RunComparison) -> list[html.Section]:
    rows = [
        [Cell(row.axis or "other"), Cell(row.bucket), *_change(row)] for row in found.exposed[:ROWS]
    ]
    if not rows:
        return []
    heads = ("axis", "bucket", "baseline", "candidate", "difference")
    note = "of the mean step" + left_out(found.exposed, ROWS)
    return [section("Communication by axis", note, table(heads, rows))]


def _kernels(found: RunComparison) -> list[html.Section]:
    changed = [row for row in found.kernels if row.baseline_ns != row.candidate_ns]
    if not changed:
        return []
    rows = [
        [Cell(row.family), _count(row.baseline_count), _count(row.candidate_count), *_change(row)]
        for row in changed[:ROWS]
    ]
    heads = ("family", "runs before", "runs after", "baseline", "candidate", "difference")
    note = "a step of a rank" + left_out(changed, ROWS)
    return [section("Kernel families", note, table(heads, rows))]


def _calls(found: RunComparison) -> list[html.Section]:
    changed = [row for row in found.collectives if row.baseline != row.candidate]
    if not changed:
        return []
    heads = ("axis", "op", "size", "run", "a step", "transfer", "wait", "busbw")
    rows = [cells for row in changed[:ROWS] for cells in _call(row)]
    note = "medians of one call; the most changed first" + left_out(changed, ROWS)
    return [section("Collectives and messages", note, table(heads, rows))]


def _call(row: CallsChange) -> list[list[Cell]]:
    bytes_ = "unknown" if row.message_bytes is None else size(row.message_bytes)
    op = row.op if row.dtype is None else f"{row.op} {row.dtype}"
    head = [Cell(row.axis or "other"), Cell(op), Cell(bytes_, number=True)]
    sides = (("baseline", row.baseline), ("candidate", row.candidate))
    return [[*head, Cell(name), *_side(calls)] for name, calls in sides]


def _side(calls: Calls | None) -> list[Cell]:
    if calls is None:
        return [Cell("none", number=True), *(Cell(number=True) for _ in range(3))]
    busbw = calls.busbw_bytes_per_s
    return [
        _count(calls.count),
        time_cell(calls.transfer_ns),
        time_cell(calls.wait_ns),
        Cell("unknown" if busbw is None else gigabytes_per_second(busbw), number=True),
    ]


def _change(row: Change) -> list[Cell]:
    return [
        time_cell(row.baseline_ns),
        time_cell(row.candidate_ns),
        Cell(signed_milliseconds(row.difference_ns), number=True),
    ]


def _count(number: float) -> Cell:
    return Cell(f"{number:,.1f}".removesuffix(".0"), number=True)
