"""Why a rank idles, in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from stepsplit.analyzer import units
from stepsplit.analyzer.split.idle import IdleCause

IDLE_MEANING = {
    "data_loading": "waiting for the next batch",
    "allocation": "allocating memory",
    "synchronize": "launching late after waiting for the device",
    "launch_bound": "launching too slowly",
    "python": "Python between ops",
    "launch_latency": "the device's own latency",
    "dependency": "waiting for another stream",
    "late_start": "work that was launched in time and started late",
    "other": "what the host does between computing",
    "unknown": "what the trace does not tell",
}
_MOST_LETTERS = 60


def why_idle(causes: Iterable[IdleCause]) -> str:
    """The largest cause of all, the op that has most of it, and its part of the idle time; "" where
    nothing idled."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for one in causes:
        sums[one.cause][one.op or ""] += one.idle_ns
    total = sum(ops.total() for ops in sums.values())
    if not total:
        return ""
    cause = max(sums, key=lambda name: sums[name].total())
    op = sums[cause].most_common(1)[0][0]
    named = f" ({_short(op)})" if op else ""
    return f"{IDLE_MEANING[cause]}{named} is {units.percent(sums[cause].total() / total)} of it"


def _short(op: str) -> str:
    op = op.removeprefix("autograd::engine::evaluate_function: ")
    return op if len(op) <= _MOST_LETTERS else op[: _MOST_LETTERS - 3] + "..."
