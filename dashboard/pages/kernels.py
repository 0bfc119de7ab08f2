"""The table of kernels on the page Compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from dash import html

from stepsplit.analyzer.parts.kernel_table import MAX_NAME_CHARACTERS, KernelRow
from stepsplit.analyzer.report.diagnosis_rows import SlowKernel
from stepsplit.analyzer.report.part_rows import name_part
from stepsplit.analyzer.report.step_rows import list_full_steps
from stepsplit.analyzer.units import format_flops, format_gigabytes_per_second, format_microseconds
from stepsplit.dashboard.pages.address import build_page_url
from stepsplit.dashboard.pages.components import View, build_link, build_section
from stepsplit.dashboard.pages.tables import (
    MAX_ROWS,
    Cell,
    Content,
    build_count_cell,
    build_number_cell,
    build_share_cell,
    build_table,
    build_time_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.pages.timeline import MAX_QUERY_LENGTH
from stepsplit.dashboard.pages.timeline_links import build_span_key


def build_kernels(view: View) -> list[html.Section]:
    """One row for each kernel (op of a CPU run) and shape, by time; empty for reports of earlier
    versions."""
    report = view.report
    rows = (view.tables.kernels if view.tables else ()) or report.kernel_table
    if not rows:
        return []
    shown = rows[:MAX_ROWS]
    slow: dict[str, list[SlowKernel]] = defaultdict(list)
    for one in report.slow_kernels:
        slow[one.kernel[:MAX_NAME_CHARACTERS]].append(one)
    spans = _find_longest(view, shown)
    is_rated = any(row.limit for row in shown)
    heads = ["kernel", "family", "part of the model", "calls", "total", "per step", "share", "mean",
             "slow on"]  # fmt: skip
    heads += ["rate", "of peak", "would save"] if is_rated else []
    body = []
    for row, span in zip(shown, spans, strict=True):
        cells = [
            Cell(_build_name(view, row, span)),
            Cell(row.family),
            Cell(", ".join(map(name_part, row.parts))),
            build_count_cell(row.calls),
            build_time_cell(row.total_ns),
            build_time_cell(row.step_ns),
            build_share_cell(row.share),
            build_number_cell(
                format_microseconds(row.total_ns / row.calls), row.total_ns / row.calls, "ns"
            ),
            _build_slow_cell(view, slow.get(row.name, ())),
        ]
        if is_rated:
            # What the kernel reaches of the limit of its device, in the unit of that limit.
            rate = share = saves = Cell(number=True)
            if row.limit == "compute" and row.flops_per_s is not None:
                rate = build_number_cell(f"{format_flops(row.flops_per_s)}/s", row.flops_per_s)
            elif row.limit == "memory" and row.bytes_per_s is not None:
                bandwidth = format_gigabytes_per_second(row.bytes_per_s)
                rate = build_number_cell(bandwidth, row.bytes_per_s)
            if row.peak_share is not None:
                share = build_share_cell(row.peak_share)
            if row.saves_ns is not None:
                saves = build_time_cell(row.saves_ns)
            cells += [rate, share, saves]
        body.append(cells)
    note = (
        "of the full steps of all ranks; per step: mean of a rank; share of the time of all kernels"
    )
    if view.run_id:
        note += "; a name leads to its longest call"
    return [build_section("Kernels", note + format_hidden_rows(rows), build_table(heads, body))]


def _build_name(view: View, row: KernelRow, span: str | None) -> html.Div:
    """The name of a kernel, which leads to its longest call; without one to a search for it."""
    url = None
    if view.run_id and span is not None:
        url = f"{build_page_url(view.run_id, 'timeline')}?{span}"
    elif view.run_id:
        name = row.name[:MAX_QUERY_LENGTH]
        url = build_page_url(view.run_id, "timeline", rank=row.slowest_rank, q=name)
    parts: list[Content] = [html.Span(build_link(row.name, url), className="name", title=row.name)]
    if row.shapes:
        # The shapes say a dtype of less than 32 bits themselves.
        shapes = row.shapes.removesuffix(f" {row.dtype}")
        parts.append(html.Span(f"{shapes} {row.dtype}", className="note"))
    return html.Div(parts)


def _build_slow_cell(view: View, slow: Sequence[SlowKernel]) -> Cell:
    """The ranks on which the kernel is slower than on its peers, the slowest first."""
    if not slow:
        return Cell()
    parts: list[Content] = []
    for one in sorted(slow, key=lambda one: -one.ratio)[:_MOST_SLOW]:
        url = build_page_url(
            view.run_id, "timeline", rank=one.rank, q=one.kernel[:MAX_QUERY_LENGTH]
        )
        link = build_link(f"rank {one.rank}", url if view.run_id else None)
        parts += [", " if parts else "", link, f" {one.ratio:.2f} x"]
    left = len(slow) - _MOST_SLOW
    parts += [f", {left:,} more"] if left > 0 else []
    return Cell(html.Span(parts), value=max(one.ratio for one in slow), unit="ratio")


_MOST_SLOW = 3


_MOST_RANKS = 8
"""Ranks whose slices are read for the longest calls: those of more would take seconds to read."""


def _find_longest(view: View, rows: Sequence[KernelRow]) -> list[str | None]:
    """Where in the timeline the longest call in a full step is, on the rank on which the kernel
    takes most time; None where that is not read or not known."""
    longest: dict[tuple[int, str], str] = {}
    ranks = list(dict.fromkeys(row.slowest_rank for row in rows))[:_MOST_RANKS]
    full = set(list_full_steps(view.report.steps))
    for rank in ranks if view.tables and view.run_id else ():
        own = view.tables.slices.get(rank) if view.tables else None
        steps = [one for one in view.report.steps if one.rank == rank and one.step in full]
        if own is None or not steps:
            continue
        begin = min(one.start_ns for one in steps)
        end = max(one.start_ns + one.step_ns for one in steps)
        within = np.flatnonzero((own.start_ns >= begin) & (own.start_ns < end))
        within = within[np.argsort(own.dur_ns[within], kind="stable")]
        # The last one of each name is the longest. By arrays up to here: a rank has a hundred
        # thousand slices of some hundred names, and a text for each took most of the page's time.
        last = np.full(len(own.names), -1)
        last[own.name[within]] = within
        last = last[last >= 0]
        # By length again, as long names that are cut may be one name.
        for at in last[np.argsort(own.dur_ns[last], kind="stable")].tolist():
            name = own.names[own.name[at]][:MAX_NAME_CHARACTERS]
            key = build_span_key(rank, int(own.start_ns[at]), int(own.dur_ns[at]))
            longest[rank, name] = key
    return [longest.get((row.slowest_rank, row.name)) for row in rows]
