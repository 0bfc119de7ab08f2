"""The remedy of calls that are not needed: a run without them."""

from __future__ import annotations

import numpy as np

from stepsplit.analyzer.diagnose.causes.cause import Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.graph.replay import remove_calls
from stepsplit.analyzer.trace import Int64


def remove_calls_remedy(context: CauseContext, kernels: Int64, steps: int, message: str) -> Remedy:
    """The remedy of a run without these calls of so many steps."""
    return replay_remedy(
        context,
        lambda graph: remove_calls(graph, kernels),
        bucket="collective",
        measured_ns=int(context.sum_exposed_ns()[kernels].sum()) // steps,
        predicted_ns=0,
        rows=np.isin(context.graph.steps.rank, context.graph.kernels.rank[kernels]),
        message=message,
        events=context.list_longest_calls(kernels),
    )
