"""What ranks compute, which do so slower than their peers, and what communication costs it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from dash import html

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.split.kernels import KernelFamily
from stepsplit.analyzer.split.lateness import SlowKernel
from stepsplit.dashboard.pages.averages import summed_steps
from stepsplit.dashboard.pages.parts import (
    Cell,
    count_cell,
    left_out,
    name_cell,
    section,
    share_cell,
    table,
    time_cell,
    worst_cell,
)

FAMILIES, SLOW, CONTENDED = 12, 12, 8


def compute(report: Report) -> list[html.Section | html.Div]:
    """The families beside contention, and under them the slow kernels."""
    beside = [*_families(report), *_contention(report)]
    top = [html.Div(beside, className="columns")] if beside else []
    return [*top, *_slow_kernels(report)]


def _families(report: Report) -> list[html.Section]:
    steps = summed_steps(report)
    by_family: dict[str, list[KernelFamily]] = defaultdict(list)
    for row in report.kernels:
        if steps[row.rank]:
            by_family[row.family].append(row)
    total = sum(row.total_ns for own in by_family.values() for row in own)
    if not total:
        return []
    largest = sorted(by_family.items(), key=lambda item: -_sum(item[1]))
    rows = [_family(name, own, steps, total) for name, own in largest[:FAMILIES]]
    note = "by family, mean over ranks and full steps" + left_out(largest, FAMILIES)
    heads = ("family", "most on", "of compute", "a step")
    return [section("Compute", note, table(heads, rows))]


def _family(name: str, rows: Sequence[KernelFamily], steps: Counter[int], total: int) -> list[Cell]:
    most = max(rows, key=lambda row: row.total_ns / steps[row.rank])
    return [
        Cell(name),
        worst_cell(most.rank, most.total_ns / steps[most.rank]),
        share_cell(_sum(rows) / total),
        time_cell(_sum(rows) / steps.total()),
    ]


def _sum(rows: Sequence[KernelFamily]) -> int:
    return sum(row.total_ns for row in rows)


def _contention(report: Report) -> list[html.Section]:
    steps = summed_steps(report)
    own = [row for row in report.contention if steps[row.rank]]
    if not own:
        return []
    most = sorted(own, key=lambda row: -row.lost_ns / steps[row.rank])
    rows = [
        [
            Cell(f"rank {row.rank}"),
            count_cell(row.kernels),
            _times(row.ratio),
            time_cell(row.lost_ns / steps[row.rank]),
        ]
        for row in most[:CONTENDED]
    ]
    note = "kernels under moving data, against the same ones without"
    heads = ("rank", "kernels compared", "times as long", "lost a step")
    return [section("Contention", note + left_out(most, CONTENDED), table(heads, rows))]


def _slow_kernels(report: Report) -> list[html.Section]:
    if not report.slow_kernels:
        return []
    most = sorted(report.slow_kernels, key=lambda row: -row.lost_ns)
    note = "the same kernels take a rank longer than its peers" + left_out(most, SLOW)
    heads = ("rank", "kernel", "family", "runs", "times as long", "lost a step")
    rows = [_slow_kernel(row) for row in most[:SLOW]]
    return [section("Slow kernels", note, table(heads, rows))]


def _slow_kernel(row: SlowKernel) -> list[Cell]:
    return [
        Cell(f"rank {row.rank}"),
        name_cell(row.kernel),
        Cell(row.family),
        count_cell(row.count),
        _times(row.ratio),
        time_cell(row.lost_ns),
    ]


def _times(ratio: float) -> Cell:
    return Cell(f"{ratio:.2f} x", number=True)
