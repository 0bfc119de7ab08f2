"""Why a part of the model takes another time than in another run, by the kernels that it runs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

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

_LEAST_SHARE = 0.05
"""Share of a part's compute that a kernel must have to count as one that the other run does not
have: a small one may as well be below the last of its report, as each run's noise decides."""


def explain_part(part: str, baseline: Report, candidate: Report, change_ns: int) -> str:
    """What changed in the kernels of a part, such as "no longer fused: 2 kernels became 12"; "" if
    the reports do not say it. change_ns is that of the part's time."""
    before = _list_kernels(part, baseline, candidate)
    own = _list_kernels(part, candidate, baseline)
    if not before or not own or part == "other":
        return ""
    counts = [sum(calls for calls, _ in rows.values()) for rows in (before, own)]
    # A step with more microbatches runs more of everything but what it runs once.
    work = _count_products(candidate) / (_count_products(baseline) or 1.0) or 1.0
    work = 1.0 if round(counts[0]) == round(counts[1]) else work
    ratio = counts[1] / counts[0] / work
    was_fused, is_fused = ({name for name in rows if _FUSED.search(name)} for rows in (before, own))
    plural = "" if round(counts[0]) == 1 else "s"
    became = f"{counts[0]:,.0f} kernel{plural} of a step became {counts[1]:,.0f}"
    if was_fused - is_fused and ratio >= _LEAST_CHANGE:
        return f"no longer fused: {became}"
    if is_fused - was_fused and ratio <= 1 / _LEAST_CHANGE:
        return f"now fused: {became}"
    if max(ratio, 1 / ratio) >= _LEAST_CHANGE:
        return became
    if before.keys() != own.keys():
        return "other kernels"
    times = [sum(ns for _, ns in rows.values()) for rows in (before, own)]
    slower = times[1] / times[0] / work
    # Kernels that got faster do not explain a part that takes longer, which may communicate more.
    if max(slower, 1 / slower) >= _LEAST_CHANGE and (slower > 1) == (change_ns > 0):
        each = "" if work == 1 else " each"
        return f"the same kernels take {slower:.2f} times as long{each}"
    return ""


def _list_kernels(part: str, report: Report, other: Report) -> Mapping[str, tuple[float, float]]:
    """Calls and ns of a part's kernels in a step of a rank, by name; empty if they are too little
    of its compute. Without those of which the other report does not say whether it runs them."""
    known = {_identify(row) for row in other.kernel_table}
    has_all = sum(row.share for row in other.kernel_table) > 1 - 1e-9
    last_ns = min((row.step_ns for row in other.kernel_table), default=0)
    compute_ns = sum(row.compute_ns for row in report.parts if row.part == part)
    kernels: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for row in report.kernel_table:
        # Reports of older versions do not say how much of a kernel is of which part.
        stated = dict(zip(row.parts, zip(row.part_calls, row.part_ns, strict=False), strict=False))
        total_calls, total_ns = stated.get(part, (0, 0))
        # What takes no time, as by a coarse clock, explains none.
        if not (total_calls and total_ns and row.step_ns and row.total_ns):
            continue
        of_step = row.step_ns / row.total_ns
        own_calls, own_ns = total_calls * of_step, total_ns * of_step
        is_only_here = row.step_ns > last_ns and own_ns >= _LEAST_SHARE * compute_ns
        if has_all or is_only_here or _identify(row) in known:
            calls, ns = kernels[row.name]
            kernels[row.name] = calls + own_calls, ns + own_ns
    covered_ns = sum(ns for _, ns in kernels.values())
    return kernels if covered_ns >= _LEAST_COVERED * compute_ns else {}


def _identify(row: KernelRow) -> tuple[str, str | None, str]:
    return row.name, row.shapes, row.dtype


def _count_products(report: Report) -> float:
    """GEMMs and attention of a step of a rank, which fusion leaves as many as they are."""
    steps = len(select_full_steps(report.steps)) or 1
    return sum(row.count for row in report.kernels if row.family in ("gemm", "attention")) / steps
