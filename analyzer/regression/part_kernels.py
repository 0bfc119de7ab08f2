"""Why a part of the model takes another time than in another run, by the kernels that it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepsplit.analyzer.parts.kernel_table import KernelRow
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import select_full_steps

_FUSED = re.compile(r"fused|^triton_|flash|fmha|liger|apex|_layer_norm|_rms_norm", re.IGNORECASE)
"""Names of kernels (CPU runs: ops) that do what several elementwise ones would do."""

_LEAST_COVERED = 0.6
"""Share of a part's compute that the kernels of a report must have, to speak for it: a report has
those with the most time only."""

_LEAST_CHANGE = 1.15
"""Ratio from which a number of kernels or a duration counts as another one."""


def explain_part(part: str, baseline: Report, candidate: Report) -> str:
    """What changed in the kernels of a part, such as "no longer fused: 2 kernels became 12"; "" if
    the reports do not say it."""
    before, own = _list_kernels(part, baseline), _list_kernels(part, candidate)
    if before is None or own is None or part == "other":
        return ""
    counts = [_count_calls(rows) for rows in (before, own)]
    # A step with more microbatches runs more of everything but what it runs once.
    work = _count_products(candidate) / (_count_products(baseline) or 1.0) or 1.0
    work = 1.0 if round(counts[0]) == round(counts[1]) else work
    ratio = counts[1] / counts[0] / work
    was_fused, is_fused = ({row.name for row in rows if _FUSED.search(row.name)} for rows in
                           (before, own))  # fmt: skip
    plural = "" if round(counts[0]) == 1 else "s"
    became = f"{counts[0]:,.0f} kernel{plural} of a step became {counts[1]:,.0f}"
    if was_fused - is_fused and ratio >= _LEAST_CHANGE:
        return f"no longer fused: {became}"
    if is_fused - was_fused and ratio <= 1 / _LEAST_CHANGE:
        return f"now fused: {became}"
    if max(ratio, 1 / ratio) >= _LEAST_CHANGE:
        return became
    if {row.name for row in before} != {row.name for row in own}:
        return "other kernels"
    times = [sum(row.step_ns for row in rows) for rows in (before, own)]
    slower = times[1] / times[0] / work
    if max(slower, 1 / slower) >= _LEAST_CHANGE:
        return f"the same kernels take {slower:.2f} times as long"
    return ""


def _list_kernels(part: str, report: Report) -> Sequence[KernelRow] | None:
    """The kernels that mostly run in the part; None if they are too few of its compute."""
    rows = [row for row in report.kernel_table if row.parts[:1] == (part,) and row.step_ns]
    compute_ns = sum(row.compute_ns for row in report.parts if row.part == part)
    covered_ns = sum(row.step_ns for row in rows)
    return rows if rows and covered_ns >= _LEAST_COVERED * compute_ns else None


def _count_calls(rows: Sequence[KernelRow]) -> float:
    """The kernels of a step of a rank."""
    return sum(row.calls * row.step_ns / row.total_ns for row in rows)


def _count_products(report: Report) -> float:
    """GEMMs and attention of a step of a rank, which fusion leaves as many as they are."""
    steps = len(select_full_steps(report.steps)) or 1
    return sum(row.count for row in report.kernels if row.family in ("gemm", "attention")) / steps
