"""How many activations a pipeline rank holds at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.schedule.passes import Pass
from stepsplit.analyzer.model.schedule.plain import group_size
from stepsplit.analyzer.model.spec.layout import Schedule

IN_FLIGHT = Formula(
    "schedule.in_flight",
    "1f1b min(m, p-r); interleaved min(m v, 2 (p-r-1) + (v-1) p + 1) chunks; gpipe m; naive 1; "
    "zb-h1 min(m, p); zb-h2 min(m, 2p-1); zb-v min(2p, 2m, m+1+r) chunks; dualpipe p+1; "
    "dualpipe-v 2p+1 chunks",
    "Narayanan et al., SC'21, section 2.2; Korthikanti et al., arXiv:2205.05198, section 4.2.3; "
    "Qi et al., arXiv:2401.10241, table 2; deepseek-ai/DualPipe README",
)


def in_flight(
    schedule: Schedule, stages: int, microbatches: int, chunks: int = 1, rank: int = 0
) -> int:
    """Activations of a microbatch in a chunk that rank holds at its peak.

    Each is worth the layers of one chunk of that rank: a v-th of the rank's layers in interleaved,
    half of them in zb-v and dualpipe-v; in dualpipe those of one stage of one copy of the model,
    all of the rank's elsewhere. An activation lives from the start of its forward to the end of
    its backward, or of its weight gradient where that is split off. A pipeline of one rank holds
    one microbatch, in all chunks. Raises UsageError where interleaved groups cannot be made.
    """
    p, m, v, left = stages, microbatches, chunks, stages - rank
    if p == 1:
        return v
    match schedule:
        case "naive":
            return 1
        case "gpipe":
            return m
        case "interleaved" if v > 1:
            return min(m * v, 2 * (left - 1) + (v - 1) * group_size(p, m) + 1)
        case "1f1b" | "interleaved":
            return min(m, left)
        case "zb-h1":
            return min(m, p)
        case "zb-h2":
            return min(m, 2 * p - 1)
        case "zb-v":
            return min(2 * p, 2 * m, m + 1 + rank)
        case "dualpipe":
            return p + 1
        case "dualpipe-v":
            return 2 * p + 1


def peak(order: Iterable[Pass]) -> int:
    """The same, counted in the order of a rank's passes: no times can change it."""
    changes = ({"F": 1, "I": 0}.get(one.kind, -1) for one in order)
    return max(accumulate(changes), default=0)
