"""Where in the model a run's time goes: its parts, and its kernels."""

from __future__ import annotations

from msgspec import Struct

from stepsplit.analyzer.parts.kernel_table import KernelRow, build_kernel_table
from stepsplit.analyzer.parts.part_times import RankParts, compute_part_times
from stepsplit.analyzer.split.run import RunSplit


class Breakdown(Struct, frozen=True):
    """The parts of each rank, in the order of the split, and the kernels of all, longest first."""

    parts: tuple[RankParts, ...] = ()
    kernels: tuple[KernelRow, ...] = ()


def break_down(split: RunSplit) -> Breakdown:
    """Find where in the model the time of a split recording goes."""
    parts = compute_part_times(split)
    return Breakdown(parts, build_kernel_table(split, parts))
