"""Orders of the schedules that split the backward to fill holes: ZB-H1, ZB-H2 and ZB-V."""

from __future__ import annotations

from stepsplit.analyzer.model.schedule.passes import Order, played


def zb_h1(rank: int, p: int, m: int) -> Order:
    """As 1F1B, with weight gradients that lag by one microbatch for each rank before this one.

    Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.1, figure 3 (top).
    """
    return _lagging(p - rank - 1, rank, m)


def zb_h2(rank: int, p: int, m: int) -> Order:
    """Twice the warm-up and twice the lag of ZB-H1 (same paper, section 2.2, figure 3)."""
    return _lagging(2 * (p - rank - 1), 2 * rank, m)


def _lagging(warm: int, lag: int, m: int) -> Order:
    """warm forwards ahead; weight gradients that lag as long as there are further microbatches."""
    full = max(m, warm + lag + 1)
    phases = [("F0", warm), ("F0 I0", lag), ("F0 I0 W0", full - warm - lag)]
    return played([*phases, ("I0 W0", warm), ("W0", lag)], [range(m)])


def zb_v(rank: int, p: int, m: int) -> Order:
    """The model folded into a V, with both ends on the first rank.

    Qi et al., arXiv:2401.10241, section 6, figure 8; as torch.distributed.pipelining's
    ScheduleZBVZeroBubble.
    """
    full = max(m, 2 * p - 1)
    warm = [("F0", 2 * (p - rank) - 1), ("F1 F0", rank), ("F1 I1 W", p - rank)]
    cool = [("I0 I1", rank), ("I0 W0", p - rank), ("W1", rank), ("W0", rank)]
    return played([*warm, ("F0 I0 W F1 I1 W", full - p), *cool], [range(m)] * 2)
