"""Pages: compute, idle time, memory."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.report.explain import IDLE_MEANING
from stepsplit.analyzer.report.report import IdleRow
from stepsplit.analyzer.report.tables import AllocationRow
from stepsplit.analyzer.split.kernels import KernelFamily
from stepsplit.analyzer.units import format_memory_size, format_milliseconds, format_percent
from stepsplit.dashboard.figures.of_report import MAX_MEMORY_RANKS, collect_memory
from stepsplit.dashboard.figures.run import (
    CATEGORIES,
    MemoryBar,
    MemoryOverTime,
    draw_memory,
    draw_memory_over_time,
)
from stepsplit.dashboard.pages.address import AddressQuery
from stepsplit.dashboard.pages.components import (
    View,
    build_collapsed,
    build_empty_card,
    build_graph,
    build_link,
    build_menu,
    build_section,
    count_summed_steps,
)
from stepsplit.dashboard.pages.kernels import build_kernels
from stepsplit.dashboard.pages.page import RunPage
from stepsplit.dashboard.pages.tables import (
    MAX_ROWS,
    Cell,
    Content,
    DataTable,
    build_count_cell,
    build_memory_cell,
    build_name_cell,
    build_ratio_cell,
    build_share_cell,
    build_table,
    build_time_cell,
    format_hidden_rows,
)
from stepsplit.dashboard.pages.timeline import MAX_QUERY_LENGTH
from stepsplit.dashboard.pages.timeline_links import (
    build_mark_link,
    build_rank_cell,
    build_span_key,
    build_worst_cell,
)

# Compute by kernel family, contention with communication, and slow kernels.


def build_compute(view: View) -> list[html.Section | html.Div]:
    """Kernel families and contention next to each other, with the slow kernels below."""
    columns = [*_build_families(view), *_build_contention(view)]
    top = [html.Div(columns, className="columns")] if columns else []
    return [*top, *_build_slow_kernels(view)]


def _build_families(view: View) -> list[html.Section]:
    report = view.report
    steps = count_summed_steps(report)
    by_family: dict[str, list[KernelFamily]] = defaultdict(list)
    for row in report.kernels:
        if steps[row.rank]:
            by_family[row.family].append(row)
    sums = {name: sum(row.total_ns for row in own) for name, own in by_family.items()}
    total = sum(sums.values())
    if not total:
        return []
    largest, rows = sorted(sums, key=lambda name: -sums[name]), []
    for name in largest:
        most = max(by_family[name], key=lambda row: row.total_ns / steps[row.rank])
        rows.append(
            [
                Cell(name),
                build_worst_cell(view, most.rank, most.total_ns / steps[most.rank]),
                build_share_cell(sums[name] / total),
                build_time_cell(sums[name] / steps.total()),
            ]
        )
    note = "by family, mean over ranks and full steps" + format_hidden_rows(largest)
    heads = ("family", "worst rank", "share of compute", "per step")
    return [build_section("Compute", note, build_table(heads, rows))]


def _build_contention(view: View) -> list[html.Section]:
    report = view.report
    steps = count_summed_steps(report)
    own = [row for row in report.contention if steps[row.rank]]
    if not own:
        return []
    most = sorted(own, key=lambda row: -row.lost_ns / steps[row.rank])
    rows = [
        [
            build_rank_cell(view, row.rank),
            build_count_cell(row.kernels),
            build_ratio_cell(row.ratio),
            build_time_cell(row.lost_ns / steps[row.rank]),
        ]
        for row in most
    ]
    note = "kernels that overlap communication, compared with the same kernels without it"
    heads = ("rank", "kernels compared", "slowdown", "lost per step")
    return [build_section("Contention", note + format_hidden_rows(most), build_table(heads, rows))]


def _build_slow_kernels(view: View) -> list[html.Section]:
    report = view.report
    if not report.slow_kernels:
        return []
    most = sorted(report.slow_kernels, key=lambda row: -row.lost_ns)
    note = "kernels that are slower on a rank than on its peers" + format_hidden_rows(most)
    heads = ("rank", "kernel", "family", "calls", "slowdown", "lost per step")
    rows = [
        [
            build_rank_cell(view, row.rank, q=row.kernel[:MAX_QUERY_LENGTH]),
            build_name_cell(row.kernel),
            Cell(row.family),
            build_count_cell(row.count),
            build_ratio_cell(row.ratio),
            build_time_cell(row.lost_ns),
        ]
        for row in most
    ]
    return [build_section("Slow kernels", note, build_table(heads, rows))]


# GPU idle time by cause, by op and by rank.


def build_idle(view: View) -> list[html.Section]:
    """Idle time by cause, longest first; by op and by rank in collapsed tables."""
    report = view.report
    steps = count_summed_steps(report)
    rows = [row for row in report.idle if steps[row.rank] and row.idle_ns]
    if not rows:
        return []
    parts = [_build_idle_by_cause(view, rows, steps), _build_idle_by_op(rows, steps)]
    if len({row.rank for row in rows}) > 1:
        parts.append(_build_idle_by_rank(view, rows, steps))
    return [build_section("Idle time by cause", "mean over ranks and full steps", *parts)]


def _build_idle_by_cause(view: View, rows: Sequence[IdleRow], steps: Counter[int]) -> DataTable:
    total = _sum_idle_ns(rows)
    by_cause: dict[str, list[IdleRow]] = defaultdict(list)
    for row in rows:
        by_cause[row.cause].append(row)
    largest = sorted(by_cause.items(), key=lambda item: -_sum_idle_ns(item[1]))
    body = []
    for cause, own in largest:
        ops, ranks = Counter[str](), Counter[int]()
        for row in own:
            ranks[row.rank] += row.idle_ns
            if row.op:
                ops[row.op] += row.idle_ns
        op, ns = max(ops.items(), key=lambda item: item[1], default=("", 0))
        worst = max(ranks, key=lambda rank: ranks[rank] / steps[rank])
        meaning = html.Span(IDLE_MEANING.get(cause, ""), className="note")
        body.append(
            [
                Cell(html.Div([_format_cause(cause), " ", meaning])),
                build_name_cell(op),
                build_share_cell(ns / _sum_idle_ns(own)) if op else Cell(number=True),
                build_worst_cell(view, worst, ranks[worst] / steps[worst]),
                build_share_cell(_sum_idle_ns(own) / total),
                build_time_cell(_sum_idle_ns(own) / steps.total()),
            ]
        )
    heads = ("cause", "top op", "share of cause", "worst rank", "share of idle", "per step")
    return build_table(heads, body)


def _build_idle_by_op(rows: Sequence[IdleRow], steps: Counter[int]) -> html.Details:
    """Idle time by cause and op over all ranks."""
    sums, gaps = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in rows:
        key = (row.cause, "smaller ones" if row.op is None else row.op or "unknown")
        sums[key] += row.idle_ns
        gaps[key] += row.count
    body = [
        [
            Cell(_format_cause(cause)),
            build_name_cell(op),
            build_count_cell(gaps[cause, op]),
            build_time_cell(ns),
        ]
        for (cause, op), ns in ((key, ns / steps.total()) for key, ns in sums.most_common(MAX_ROWS))
    ]
    heads = ("cause", "op, call or function", "gaps", "per step")
    return build_collapsed(f"by op{format_hidden_rows(sums)}", build_table(heads, body))


def _build_idle_by_rank(view: View, rows: Sequence[IdleRow], steps: Counter[int]) -> html.Details:
    """Idle time with one row per rank and one column per cause."""
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    for row in rows:
        sums[row.rank][row.cause] += row.idle_ns
    causes = [c for c in IDLE_MEANING if any(own[c] for own in sums.values())]
    most = sorted(sums, key=lambda rank: -sums[rank].total() / steps[rank])
    body = [
        [build_rank_cell(view, rank), build_time_cell(sums[rank].total() / steps[rank])]
        + [build_time_cell(sums[rank][cause] / steps[rank]) for cause in causes]
        for rank in most
    ]
    heads = ("rank", "idle per step", *map(_format_cause, causes))
    return build_collapsed(
        f"by rank, largest first{format_hidden_rows(sums)}", build_table(heads, body)
    )


def _sum_idle_ns(rows: Sequence[IdleRow]) -> int:
    return sum(row.idle_ns for row in rows)


def _format_cause(cause: str) -> str:
    return cause.replace("_", " ")


# Memory of each rank at its peak by category, with the model's prediction and the device limit.


def build_memory_page(view: View, chosen: AddressQuery = AddressQuery()) -> list[Component]:  # noqa: B008
    """The memory page: measured and predicted bars and memory over time, or a hint if there is
    none."""
    report = view.report
    found, over_time = collect_memory(report), _build_memory_over_time(view, chosen)
    bars, limit, predicted = found.bars, found.limit_bytes, found.n_predicted
    if not bars and over_time:
        return over_time
    if not bars:
        hint = (
            "Record with profile_run or stepsplit record to measure the memory of each rank, "
            "or add a job.toml to predict it."
        )
        return [build_empty_card("No memory was recorded", hint)]
    note = "peak of each rank" if len(bars) > predicted else "no rank's memory was recorded"
    note += "; predicted peak of each stage" if predicted else ""
    note += "" if limit is None else f"; device memory: {format_memory_size(limit)}"
    link = build_mark_link(view, "rank={key}")
    figure = build_graph("memory", draw_memory(bars, limit), link)
    note += format_hidden_rows(report.memory or (), MAX_MEMORY_RANKS)
    lacks = []
    if view.tables is not None and report.memory and not view.tables.allocations:
        words = "not recorded: "
        if not len(view.tables.memory.rank):
            words += "memory over time, the moment of the peak and "
        words += "the lines that allocated the peak"
        # Who measured activations asked for memory: only an allocator of CUDA keeps a history.
        if not any(row.activations_bytes for row in report.memory):
            words += "; record --memory has them on CUDA"
        lacks = [html.P(words, className="note")]
    return [
        build_section("Memory", note, figure, *_explain_rest(bars), *lacks),
        *over_time,
        *_build_memory_comparison(view),
        *_build_allocator(view),
    ]


_MOST_PASSES = 256


def _build_memory_over_time(view: View, chosen: AddressQuery) -> list[Component]:
    """Memory of one rank over time, that of the fullest unless another is chosen; [] without a
    recording of memory."""
    if view.tables is None or not len(view.tables.memory.rank):
        return []
    memory, boxes = view.tables.memory, view.tables.boxes
    known = [str(rank) for rank in np.unique(memory.rank).tolist()]
    fullest = str(memory.rank[memory.allocated_bytes.argmax()])
    asked = chosen.find_text("rank")
    rank = int(asked if asked in known else fullest)
    own = memory.rank == rank
    times, sizes = memory.time_ns[own], memory.allocated_bytes[own]
    at = int(sizes.argmax())
    steps = sorted((row.step, row.start_ns, row.step_ns) for row in view.report.steps
                   if row.rank == rank)  # fmt: skip
    step = next((one for one in steps if 0 <= times[at] - one[1] < one[2]), None)
    passes: list[tuple[int, int, int]] = []
    if step is not None:
        of_step = (boxes.rank == rank) & (boxes.step == step[0])
        ends = boxes.start_ns + boxes.dur_ns
        columns = (boxes.start_ns[of_step], ends[of_step], boxes.phase[of_step])
        passes = list(zip(*(column.tolist() for column in columns), strict=True))[:_MOST_PASSES]
    line = MemoryOverTime(
        times, sizes, memory.reserved_bytes[own], [(one[0], one[1]) for one in steps], passes
    )
    words = f"peak of rank {rank}: {format_memory_size(int(sizes[at]))}"
    if step is None:
        words += ", outside of the steps"
    else:
        words += f", {format_milliseconds(int(times[at]) - step[1])} into step {step[0]}"
    edge_ns = 2_000_000
    key = build_span_key(rank, int(times[at]) - edge_ns, 2 * edge_ns)
    moment: Content = words
    if (url := build_mark_link(view, key)) is not None:
        moment = build_link(words, url)
    note = "times of the host, which allocates before the device computes"
    note += "; strip: forward and backward of that step on the device" if passes else ""
    menu = [build_menu("rank", {one: f"rank {one}" for one in known}, str(rank), fullest)]
    controls = html.Div(menu if len(known) > 1 and view.run_id else [], className="choices")
    figure = build_graph("memory-time", draw_memory_over_time(line))
    section = build_section("Memory over time", note, controls, html.P(moment), figure)
    return [section, *_build_allocations(view.tables.allocations, rank, int(sizes[at]))]


_OF_LIBRARY = re.compile(r"^(torch|stepsplit)/|^(<frozen |\?\?:)")
"""Frames that most stacks have; the line of the program is the first other one."""


def _build_allocations(
    allocations: Sequence[AllocationRow], rank: int, peak_bytes: int
) -> list[html.Section]:
    """What lived at the peak by the line of the program that allocated it; [] without stacks."""
    own = [row for row in allocations if row.rank == rank]
    if not own:
        return []
    rows = []
    for row in own:
        line = next((one for one in row.stack if not _OF_LIBRARY.search(one)), None)
        name: Content = line or (row.stack[0] if row.stack else "unknown: before the recording")
        if row.stack:
            frames = html.Ul([html.Li(one) for one in row.stack], className="stack")
            name = html.Details([html.Summary(name), frames])
        rows.append(
            [
                Cell(name), build_memory_cell(row.size_bytes),
                # A damaged snapshot may have stacks and no peak.
                build_share_cell(row.size_bytes / peak_bytes if peak_bytes > 0 else 0.0),
                build_count_cell(row.count),
            ]
        )  # fmt: skip
    rest = peak_bytes - sum(row.size_bytes for row in own)
    note = (
        f"what lived at the peak of rank {rank}, by the line that allocated it; open for its stack"
    )
    note += f"; {format_memory_size(rest)} of smaller ones" if rest > 0 else ""
    heads = ("line", "memory", "share of peak", "allocations")
    return [build_section("Largest allocations", note, build_table(heads, rows))]


_LARGE_REST = 0.1
"""A larger share of a peak that belongs to no category is explained."""


def _explain_rest(bars: Sequence[MemoryBar]) -> list[html.P]:
    """What the memory without a category is, and what shows it."""
    rest = [bar for bar in bars if bar.rest_bytes > _LARGE_REST * bar.total_bytes]
    if not rest:
        return []
    most = max(rest, key=lambda bar: bar.rest_bytes)
    known = {category for bar in rest for category, _ in bar.parts}
    share = format_percent(most.rest_bytes / most.total_bytes)
    words = f"uncategorized, {share} of {most.label}: all that is not {_join(known)}, so "
    words += "temporary buffers, workspaces of libraries and what the allocator rounds up"
    if "activations" not in known:
        words += ", and activations, which a recording with memory (--memory) measures"
    return [html.P(words, className="note")]


def _join(categories: Collection[str]) -> str:
    named = [one for one in CATEGORIES if one in categories]
    return " or ".join(named) if len(named) < 3 else f"{', '.join(named[:-1])} or {named[-1]}"


def _build_memory_comparison(view: View) -> list[html.Section]:
    """Measured memory of the fullest rank of each stage against the prediction, by category."""
    report = view.report
    if report.gap is None or not report.gap.memory:
        return []
    rows = [
        [
            Cell(f"stage {one.stage}"), build_rank_cell(view, one.rank), Cell(one.category),
            build_memory_cell(one.measured_bytes),
            build_memory_cell(one.predicted_bytes),
            build_ratio_cell(one.measured_bytes / one.predicted_bytes)
            if one.predicted_bytes else Cell("unknown", number=True),
        ]
        for one in report.gap.memory
    ]  # fmt: skip
    heads = ("stage", "fullest rank", "category", "measured", "predicted", "measured / predicted")
    return [build_section("Memory against the model", "", build_table(heads, rows))]


def _build_allocator(view: View) -> list[html.Section]:
    """Memory that the allocator reserved beyond the allocated tensors."""
    report = view.report
    own = [
        (row.rank, row.peak_allocated_bytes, row.peak_reserved_bytes)
        for row in report.memory or ()
        if row.peak_reserved_bytes and row.peak_allocated_bytes
    ]
    if not own:
        return []
    rows = [
        [
            build_rank_cell(view, rank),
            *map(build_memory_cell, (used, reserved, reserved - used)),
        ]
        for rank, used, reserved in own
    ]
    heads = ("rank", "peak allocated", "peak reserved", "reserved but unused")
    note = "a large unused reserve may be due to fragmentation"
    return [build_section("Caching allocator", note, build_table(heads, rows))]


# The entries.


def build_compute_page(view: View) -> list[Component]:
    """The compute page: kernels and their families, contention, slow kernels and idle time."""
    shown: list[Component] = [*build_kernels(view), *build_compute(view), *build_idle(view)]
    return shown or [build_empty_card("No compute", "The recording has no kernels and no ops.")]


COMPUTE_PAGE = RunPage(
    "compute", lambda view, _: build_compute_page(view), needs_tables=True, chapter="Compute"
)

MEMORY_PAGE = RunPage(
    "memory", build_memory_page, needs_tables=True,
    chapter="Memory", has_data=lambda report: bool(report.memory or report.prediction),
)  # fmt: skip
