"""Kernels far below the limit of their device: slower than the model says for their shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.slow_gemms import FP32, UNALIGNED
from stepsplit.analyzer.diagnose.graph.replay import reduce_work
from stepsplit.analyzer.parts.kernel_work import estimate_work
from stepsplit.analyzer.split.kernel_shapes import find_dtype
from stepsplit.analyzer.split.kernels import KernelWork
from stepsplit.analyzer.trace import Int64

if TYPE_CHECKING:
    from stepsplit.analyzer.parts.device_limits import DeviceLimits

MAX_KERNELS = 2
"""Number of kernels that are findings; the kernel table has all."""

LEAST_RATIO = 1.5
"""How many times as long as by the model a kernel must take: the model's rates are those of large
kernels, and shapes between tiles reach two thirds of them. At 1.2 well-tuned runs would have
findings, at 3 only broken kernels."""


def find_kernels_below_limit(context: CauseContext) -> Iterator[Remedy]:
    """Find the kernels with the most time above the model's for their shapes."""
    ranks = context.split.ranks
    if not all(rank.trace.on_device for rank in ranks):
        return
    from stepsplit.analyzer.parts.device_limits import find_limits  # only for devices: kernel_table

    limits = find_limits(next((rank.trace.device for rank in ranks if rank.trace.device), ""))
    if limits is None:
        return
    took: dict[tuple[KernelWork, str], list[int]] = defaultdict(lambda: [0, 0])
    of_rank = []
    for rank in ranks:
        sums = rank.kernels
        keys = list(zip(sums.work, sums.families, strict=True))
        of_rank.append((sums, keys))
        for key, count, total_ns in zip(keys, sums.count, sums.total_ns, strict=True):
            took[key][0] += total_ns
            took[key][1] += count
    slow = []
    for (one, family), (total_ns, calls) in took.items():
        # These have a finding of their own, with what to change.
        if FP32.pattern.search(one.name) or UNALIGNED.pattern.search(one.name):
            continue
        work = estimate_work(one, family, on_device=True)
        reachable_ns = None if work is None else limits.compute_reachable_ns(one, work, family)
        ratio = total_ns / calls / reachable_ns if reachable_ns else 0.0
        if ratio >= LEAST_RATIO:
            slow.append((total_ns * (1 - 1 / ratio), ratio, (one, family)))
    slow.sort(key=lambda each: -each[0])
    for _, ratio, key in slow[:MAX_KERNELS]:
        rows = {
            index: sums.compute.row[sums.work_id == keys.index(key)]
            for index, (sums, keys) in enumerate(of_rank)
            if key in keys
        }
        yield _build_remedy(context, limits, key, rows, took[key], ratio)


def _build_remedy(
    context: CauseContext,
    limits: DeviceLimits,
    key: tuple[KernelWork, str],
    rows: dict[int, Int64],
    took: list[int],
    ratio: float,
) -> Remedy:
    one, family = key
    empty = np.empty(0, dtype=np.int64)
    spent_ns = context.measure_events([rows.get(i, empty) for i in range(len(context.ranks))])
    cut_ns = np.rint(spent_ns * (1 - 1 / ratio)).astype(np.int64)
    step_ns = context.average_step_ns(spent_ns)
    work = estimate_work(one, family, on_device=True)
    assert work is not None
    peak = limits.find_peak(find_dtype(one), work.limit)
    call_ns = took[0] / took[1]
    amount = work.flops if work.limit == "compute" else work.bytes
    reached = "" if not peak else (
        f", at {units.format_percent(amount / call_ns * 1e9 / peak)} of the peak of"
        f" {'its dtype' if work.limit == 'compute' else 'the memory bandwidth'}"
    )  # fmt: skip
    shapes = (one.shapes or "")[:_NAME_CHARACTERS]
    first = max(rows, key=lambda index: len(rows[index]))
    return replay_remedy(
        context,
        lambda graph: reduce_work(graph, "compute", cut_ns),
        bucket="compute",
        measured_ns=round(step_ns),
        predicted_ns=round(step_ns / ratio),
        rows=np.isin(context.graph.steps.rank, list(rows)) & context.counted,
        message=f"{family} kernel {one.name[:_NAME_CHARACTERS]} of {shapes}:"
        f" {units.format_milliseconds(round(step_ns))} of a step{reached};"
        f" {units.format_milliseconds(round(step_ns / ratio))} at the model's rate for this shape",
        ranks=() if len(rows) == len(context.split.ranks) else tuple(
            context.ranks[sorted(rows)].tolist()
        ),
        events=tuple(context.make_event_ref(first, row) for row in rows[first][:3].tolist()),
        is_doubtful=True,
    )  # fmt: skip


_NAME_CHARACTERS = 60

BELOW_LIMIT = CauseEntry("below_limit", find_kernels_below_limit, basis="inferred")
