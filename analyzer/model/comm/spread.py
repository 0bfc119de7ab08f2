"""How far measured collectives lie from the closed form, by size and by nodes."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.comm.fitted_rows import (
    A100,
    ALPS_NODES,
    ALPS_SIZES,
    B200,
    KIB,
    MIB,
    SWEEP_SIZES,
    alps,
    sweep,
)
from stepsplit.analyzer.model.spec.span import Span

ROWS = (
    *alps(ALPS_NODES, ALPS_SIZES),
    *sweep(A100, SWEEP_SIZES),
    *sweep(B200, SWEEP_SIZES),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Up to a size: measured time / predicted time, its 5th and 95th percentile over ROWS.

    Each way at least 12 to 20 %, also where the rows ask for less: they are of three clusters.
    """

    until_bytes: float
    low: float
    high: float


INTRA = (Spread(MIB, 0.7, 1.4), Spread(64 * MIB, 0.75, 1.4), Spread(float("inf"), 0.87, 1.15))
"""Within a node. From 64 MiB on it covers the B200 switch at 8 GiB (740 to 839 GB/s)."""
INTER = (
    Spread(4 * KIB, 0.7, 1.25), Spread(2 * MIB, 0.8, 5.5), Spread(32 * MIB, 0.85, 1.9),
    Spread(float("inf"), 0.85, 1.15),
)  # fmt: skip
"""2 to 64 nodes, all of one fabric. From 4 KiB to 2 MiB it leaves its eager protocol, which NCCL's
constants do not know: measured times are 2 to 5 times those predicted."""
FAR = (Spread(4 * KIB, 0.8, 1.25), Spread(32 * MIB, 0.8, 5.8), Spread(float("inf"), 0.8, 1.9))
"""More than 64 nodes: how busy the fabric is decides."""
FAR_NODES = 64

SWITCH = 2.0
"""So close to the size at which NCCL changes algorithm, either one may run."""


def spread_of(message_bytes: float, span: Span) -> tuple[float, float]:
    """(low, high): what to multiply a predicted time by. The other ops are taken as all_reduce."""
    classes = FAR if span.nodes > FAR_NODES else INTER if span.nodes > 1 else INTRA
    spread = next(each for each in classes if message_bytes < each.until_bytes)
    return spread.low, spread.high
