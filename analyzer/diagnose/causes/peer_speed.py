"""The compute of each rank at the speed of its peers: its work, without what its device adds."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from stepsplit.analyzer.diagnose.causes.expert_load import (
    MORE_COMPUTE,
    compare_sent_tokens,
    explain_by_tokens,
    measure_expert_loads,
)
from stepsplit.analyzer.diagnose.counted_work import WorkLaw
from stepsplit.analyzer.diagnose.graph.replay import ReplayContext
from stepsplit.analyzer.diagnose.slow_devices import find_slow_devices
from stepsplit.analyzer.diagnose.slow_kernels import MIN_RATIO
from stepsplit.analyzer.trace import Float


def measure_peer_speed(context: ReplayContext, law: WorkLaw | None = None) -> Float:
    """For each row of the steps, its compute time at the speed of its peers over the measured one.

    A slow device is known by all its kernels (slow_devices.py), else by some (slow_kernels.py): a
    slowdown of some that all ranks of a stage share counts as work of the stage. Kernels of a rank
    whose experts receive more tokens are larger, though their grids may be equal. law is of the
    counted work, where ranks have different work.
    """
    of_row = context.graph.steps.rank
    tokens = set[int]()
    for rank in {one.rank for one in context.slow_kernels}:
        own = [one for one in context.slow_kernels if one.rank == rank]
        usual_ns = sum(one.lost_ns / (one.ratio - 1) for one in own)
        longer = sum(one.lost_ns for one in own) / usual_ns
        if explain_by_tokens(compare_sent_tokens(context, rank), longer):
            tokens.add(rank)
    if context.slow_kernels:
        load = measure_expert_loads(context)
        tokens |= set(context.ranks[load > 1 + MORE_COMPUTE].tolist())
    lost: dict[int, int] = defaultdict(int)
    slowest: dict[int, float] = defaultdict(lambda: 1.0)
    for one in context.slow_kernels:
        lost[one.rank] += one.lost_ns if one.rank not in tokens else 0
        slowest[one.rank] = max(slowest[one.rank], one.ratio)
    lost_ns = np.array([lost[rank] for rank in context.ranks.tolist()], dtype=np.int64)
    # Kernels that overlap lose more together than the step does: no rank is slower than its
    # slowest kernel.
    least = 1 / np.array([slowest[rank] for rank in context.ranks.tolist()])
    # The mean compute of each rank over the counted steps.
    compute, counted = context.select_bucket_ns("compute"), context.counted
    count = np.bincount(of_row[counted], minlength=len(context.ranks))
    total = np.bincount(of_row[counted], compute[counted], minlength=len(context.ranks))
    share = lost_ns[of_row] / np.maximum(total / np.maximum(count, 1), 1.0)[of_row]
    for stage in np.unique(context.stage).tolist():
        mine = context.stage == stage
        if len(np.unique(of_row[mine])) > 1:
            share[mine] -= share[mine].min()
    ratio = np.clip(1 - share, least[of_row], 1.0)
    for index, pace in find_slow_devices(context.split).items():
        if int(context.ranks[index]) not in tokens:
            ratio[of_row == index] = pace
    # Where ranks have different work, only what exceeds it is the device's.
    if law is not None:
        for index in range(len(context.ranks)):
            mine = of_row == index
            if index in law.slow:
                ratio[mine] = 1 / law.slow[index]
            elif (times := law.bound_times(index, of_row)) > 1:
                beyond = np.minimum(ratio[mine] * times, 1.0)
                ratio[mine] = np.where(beyond <= 1 / MIN_RATIO, beyond, 1.0)
    return ratio
