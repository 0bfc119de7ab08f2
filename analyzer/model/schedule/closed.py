"""Bubbles of pipelines of equal stages in closed form, with the time of messages."""

from __future__ import annotations

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.schedule.ideal import Times

ONE_AT_A_TIME = Formula(
    "schedule.naive",
    "bubble = m (p-1) (T + 2 Tc), with T = TF + TB + TW",
    "Narayanan et al., SC'21, section 2.2: one microbatch at a time",
)
GPIPE = Formula(
    "schedule.gpipe",
    "bubble = (p-1) (T + 2 Tc)",
    "Narayanan et al., SC'21, section 2.2.1; Tc: the first microbatch there, the last one back",
)
ONE_F_ONE_B = Formula(
    "schedule.1f1b",
    "bubble = (p-1) T + (2 (p-1) (m+p) / p - 2) Tc where p divides m",
    "Narayanan et al., SC'21, section 2.2.1; Tc: Qi et al., arXiv:2401.10241, tables 5 and 9",
)
INTERLEAVED = Formula(
    "schedule.interleaved",
    "bubble = (p-1) T / v + (2 p v - p - 2) Tc where p divides m",
    "Narayanan et al., SC'21, section 2.2.2; Tc: Qi et al., arXiv:2401.10241, tables 5 and 9",
)
ZB_H1 = Formula(
    "schedule.zb-h1",
    "bubble = (p-1) (TF + TB - TW + 4 Tc) where m > p, with m-1 for p-1 TWs below",
    "Qi et al., arXiv:2401.10241, table 2 and appendix H; Tc: tables 5 and 9",
)
ZB_H2 = Formula(
    "schedule.zb-h2",
    "bubble = (p-1) (TF + TB - 2 TW + 2 Tc) where m >= 2p-1, with m-1 TWs below",
    "Qi et al., arXiv:2401.10241, table 2 and appendix H; Tc: tables 5 and 9",
)


def bubble_ns(
    schedule: str,
    stages: int,
    microbatches: int,
    times_ns: Times,
    chunks: int = 1,
    transfer_ns: float = 0.0,
) -> float | None:
    """What the rank that idles longest idles between its own first forward and its own last pass.

    times_ns are the forward, input gradient and weight gradient (TF, TB, TW) of one microbatch in
    all chunks of a rank, transfer_ns (Tc) that of one message, which delays the receiver only and
    is short beside a pass. Weight gradients are no longer than forwards and input gradients.
    None where there is no closed form: the V shapes, DualPipe, unequal groups of interleaved.

    It is the window's hole too, but in zb-h2: there the last rank is through (p-1) times TF + Tc
    later than the first. In interleaved the paper's Tc is p less than what engine.simulate finds
    for Megatron-LM's order, whose longest path has 2 (p v - 1) messages.
    """
    p, m, v = stages, microbatches, chunks
    forward, inputs, weights = times_ns
    whole = sum(times_ns)
    match schedule:
        case "naive":
            return m * (p - 1) * (whole + 2 * transfer_ns)
        case "gpipe":
            return (p - 1) * (whole + 2 * transfer_ns)
        case "1f1b":
            return (p - 1) * whole + _messages_1f1b(p, m) * transfer_ns
        case "interleaved" if m % p == 0:
            return (p - 1) * whole / v + (2 * p * v - p - 2) * transfer_ns
        case "zb-h1":
            messages = 2 * (p - 1) + 2 * max(0, min(m - 2, p - 1))
            filled = min(m - 1, p - 1) * weights
            return (p - 1) * (forward + inputs) - filled + messages * transfer_ns
        case "zb-h2":
            filled = min(m - 1, 2 * (p - 1)) * weights
            return (p - 1) * (forward + inputs + 2 * transfer_ns) - filled
    return None


def bubble_rate(
    schedule: str,
    stages: int,
    microbatches: int,
    times_ns: Times,
    chunks: int = 1,
    transfer_ns: float = 0.0,
) -> float | None:
    """bubble / (bubble + m T), as Qi et al. (arXiv:2401.10241) print it; None as bubble_ns."""
    idle_ns = bubble_ns(schedule, stages, microbatches, times_ns, chunks, transfer_ns)
    if idle_ns is None:
        return None
    return idle_ns / (idle_ns + microbatches * sum(times_ns))


def _messages_1f1b(p: int, m: int) -> int:
    """Messages on the longest path: there and back, and p-1 more each way with each further p
    microbatches; 2 (p-1) (m+p) / p - 2 where p divides m."""
    rounds, rest = divmod(m - 1, p)
    return 2 * (p - 1) + 2 * (rounds * (p - 1) + max(0, rest - 1))
