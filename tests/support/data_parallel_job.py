"""Recordings of a data-parallel job whose ranks run given kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from support.builders import GpuTrace

_GRID = {"grid": [8, 1, 1]}


def data_parallel_job(
    kernels: Callable[[int, int], Sequence[tuple[str, float]]], steps: int = 4, ranks: int = 2
) -> list[GpuTrace]:
    """Ranks that run these kernels (name, us) of each (rank, step), and then reduce together:
    10 us after the last one has come, and 10 of optimizer."""
    group = list(range(ranks))
    traces = [GpuTrace(rank, ranks, groups=[("0", "mesh_dp", group)]) for rank in group]
    begin = 0.0
    for step in range(1, steps + 1):
        own = [kernels(rank, step) for rank in group]
        ends = [begin + sum(took for _, took in part) for part in own]
        end = max(ends) + 10
        for trace, part, ready in zip(traces, own, ends, strict=True):
            trace.step(step, begin, end + 10)
            at = begin
            for name, took in part:
                trace.kernel(name, at, at + took, **_GRID)
                at += took
            trace.all_reduce(ready, end).kernel("adam", end, end + 10, **_GRID)
        begin = end + 10
    return traces
