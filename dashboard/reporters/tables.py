"""Tables and lines that terminal screens share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from stepsplit.analyzer import units
from stepsplit.dashboard.reporters.console import DIM, Text

if TYPE_CHECKING:
    from stepsplit.analyzer.report.report import MemoryRow, Report, Run

# Lines of the analyze screen: critical path, slow steps, estimated waits, memory.

_MOST_PARTS, _MOST_STEPS = 4, 3

_COMMUNICATION = ("collective", "p2p", "skew", "bubble")


def format_clock_error(report: Report) -> str:
    """The error of the clock alignment between hosts, "" if unknown or a single host."""
    sigmas_ns = [row.sigma_ns for row in report.clocks if row.sigma_ns]
    return f"clock error ±{units.format_microseconds(max(sigmas_ns))}" if sigmas_ns else ""


def format_overlap(report: Report) -> str:
    """The share of the transfer time that is overlapped by compute, over all ranks."""
    moved = sum(row.moved_ns for row in report.overlap)
    hidden = sum(row.hidden_ns for row in report.overlap)
    return f" ({units.format_percent(hidden / moved)} of transfer)" if moved else ""


def format_critical_path(report: Report) -> list[Text]:
    """The largest parts of the critical path of the mean step, and their ranks."""
    from stepsplit.analyzer.report.path_shares import compute_path_shares

    shares = compute_path_shares(report)
    if not shares or len(report.run.ranks) < 2:
        return []
    shown = []
    for one in sorted(shares, key=lambda share: -share.ns)[:_MOST_PARTS]:
        on = f" on {one.axis}" if one.axis and one.bucket in _COMMUNICATION else ""
        most = one.ranks[0][0]
        whose = f"mostly r{most}" if one.ranks[1:] else f"r{most}"
        shown.append(f"{one.bucket}{on} {units.format_percent(one.share)} ({whose})")
    return [Text(f"critical path: {', '.join(shown)}")]


def format_slow_steps(report: Report) -> list[Text]:
    """The steps that took clearly longer than the others, and where the delay began."""
    worst = sorted(report.slow_steps, key=lambda row: -row.excess_ns)[:_MOST_STEPS]
    return [
        Text(
            f"step {row.step} took {units.format_milliseconds(row.excess_ns)} longer: "
            f"rank {row.rank} "
            f"{row.bucket} +{units.format_milliseconds(row.excess_in_bucket_ns)}",
            style="yellow",
        )
        for row in worst
    ]


def format_coverage(report: Report) -> list[Text]:
    """The axes whose waits are estimates because ranks or calls are missing."""
    from stepsplit.analyzer.report.axis_names import name_axis
    from stepsplit.analyzer.report.step_rows import select_full_steps

    partial = [row for row in report.coverage if row.holds != "measured"]
    if not partial or not select_full_steps(report.steps):
        return []
    parts = [
        f"{name_axis(row.axis)} {'estimated' if row.holds == 'estimated' else 'partly estimated'} "
        f"({row.whole} of {row.groups} groups complete)"
        for row in partial
    ]
    text = f"compute, copy and idle are exact; waits: {', '.join(parts)}"
    return [Text(text, style=DIM)]


def format_profiling(run: Run) -> str:
    """Profiled steps against the others, "" if too few steps were timed without the profiler.

    The difference is what was measured. How much of it is the profiler's, and how much noise or
    other load on the machine, a few steps of one run cannot tell."""
    if run.profiling_slowdown is None:
        return ""
    change = units.format_signed_percent(run.profiling_slowdown)
    after = run.slowdown_after_profiling
    steps_after = "" if after is None else f", {units.format_signed_percent(after)} after it"
    return f"{change} against steps without profiler{steps_after}"


_MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations")


def format_memory(rows: Sequence[MemoryRow]) -> str:
    """The memory of the rank that uses most, "" if unknown."""
    largest = max(rows, key=_sum_bytes, default=None)
    if largest is None or not _sum_bytes(largest):
        return ""
    kinds = [(name, getattr(largest, f"{name}_bytes")) for name in _MEMORY_KINDS]
    parts = [f"{name} {units.format_size(size)}" for name, size in kinds if size is not None]
    if largest.peak_allocated_bytes is not None:
        parts.append(f"peak {units.format_gibibytes(largest.peak_allocated_bytes)}")
    return f"memory (largest on r{largest.rank}): {', '.join(parts)}"


def _sum_bytes(row: MemoryRow) -> int:
    return row.peak_allocated_bytes or sum(
        getattr(row, f"{name}_bytes") or 0 for name in _MEMORY_KINDS
    )


# Lists of ranks.

MAX_RANKS = 8


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks as a list of ranges, such as 0-3,7."""
    parts: list[str] = []
    for run in units.group_consecutive(sorted(ranks)):
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    more = f" +{len(parts) - MAX_RANKS}" if len(parts) > MAX_RANKS else ""
    return ",".join(parts[:MAX_RANKS]) + more


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


# Tables without lines.

MOST_STAGES = 6
"""Columns for stages of a pipeline that fit on a screen of 80 characters."""

AXIS_SHORT = {"dp_replicate": "dp repl", "dp_shard": "dp shard"}

_WORDS = ("op", "phase")


def build_table(first: str, *others: str) -> Table:
    """A table without lines. Numbers are right-aligned and never wrapped; text may wrap.

    A last column without a name takes the remaining width.
    """
    table = Table(
        box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False, expand="" in others
    )
    table.add_column(first, no_wrap=True)
    for name in others:
        if name == "":
            table.add_column(name, no_wrap=True, ratio=1)
        elif name in _WORDS:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table
