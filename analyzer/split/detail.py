"""What else a split recording tells: why ranks idle, what computes slowly, where the end hangs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepsplit.analyzer.readers.kernel_rules import Rules
from stepsplit.analyzer.split.compute.contention import Contention, slowdown_under_communication
from stepsplit.analyzer.split.compute.kernels import KernelFamily, kernel_families
from stepsplit.analyzer.split.compute.slow_ranks import SlowKernel, slow_kernels
from stepsplit.analyzer.split.coverage import Coverage, coverage_of
from stepsplit.analyzer.split.critical_path import CriticalPaths, critical_paths, timeline_of
from stepsplit.analyzer.split.idle.causes import IdleCause, idle_causes
from stepsplit.analyzer.split.overlap import Overlap, overlaps_of
from stepsplit.analyzer.split.rank_split import RankSplit, Together
from stepsplit.analyzer.split.stragglers import Lateness, lateness_of
from stepsplit.analyzer.split.variation import Variation, variation_of


@dataclass(frozen=True, slots=True)
class Detail:
    """The detail of a recording; idle and contention have one entry a rank of the split.

    An idle cause's window indexes the steps of its rank; contention is None where the rank's
    recording does not tell it.
    """

    idle: tuple[tuple[IdleCause, ...], ...]
    families: tuple[KernelFamily, ...]
    slow_kernels: tuple[SlowKernel, ...]
    contention: tuple[Contention | None, ...]
    variation: Variation
    paths: CriticalPaths
    lateness: tuple[Lateness, ...]
    overlaps: tuple[Overlap, ...]
    coverage: tuple[Coverage, ...]


def detail_of(ranks: Sequence[RankSplit], together: Together, rules: Rules) -> Detail:
    """The detail of all ranks, at least one."""
    traces = [one.trace for one in ranks]
    windows = [one.windows for one in ranks]
    matched, arrivals, layout = together.matched, together.arrivals, together.layout
    return Detail(
        idle=tuple(idle_causes(one.trace, one.attribution.band) for one in ranks),
        families=kernel_families(traces, windows, rules),
        slow_kernels=slow_kernels(traces, windows, rules),
        contention=tuple(_contention(one, rules) for one in ranks),
        variation=variation_of([step for one in ranks for step in one.steps]),
        paths=critical_paths(
            [
                timeline_of(one.trace, one.attribution, one.numbers, one.axis, one.clock)
                for one in ranks
                if one.steps
            ]
        ),
        lateness=lateness_of(traces, matched, arrivals, layout, [one.steps for one in ranks]),
        overlaps=tuple(row for one in ranks for row in _overlaps(one, together)),
        coverage=coverage_of(traces, matched, layout),
    )


def _contention(one: RankSplit, rules: Rules) -> Contention | None:
    """Of a device: what a CPU's ops take says more of who else had the core."""
    if not one.trace.on_device:
        return None
    return slowdown_under_communication(one.trace, one.windows, one.pieces, rules)


def _overlaps(one: RankSplit, together: Together) -> tuple[Overlap, ...]:
    axes = [together.layout.axis_of(group) for group in one.trace.groups]
    windows, compute = one.windows.counted, one.work.compute
    return overlaps_of(one.trace.rank, one.trace.calls, axes, windows, one.pieces, compute)
