"""In which order each rank of a pipeline does its passes, and which model stages it holds."""

from __future__ import annotations

from functools import lru_cache

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule import dual, plain, zero_bubble
from stepsplit.analyzer.model.schedule.passes import Order
from stepsplit.analyzer.model.spec.layout import SCHEDULES, TWO_STAGES, Schedule

Places = tuple[tuple[int, ...], ...]
"""For each rank the positions in the model of its chunks."""


@lru_cache(maxsize=256)
def orders(
    schedule: Schedule, stages: int, microbatches: int, chunks: int = 1
) -> tuple[Order, ...]:
    """What each of so many ranks does, first to last.

    chunks counts the model stages of a rank in interleaved; zb-v, dualpipe and dualpipe-v hold two
    whatever it says. A pipeline of one rank runs microbatch by microbatch. microbatches are those
    of both directions in dualpipe. Raises UsageError where the schedule is not defined.
    """
    _check(schedule, stages, microbatches, chunks)
    ranks = range(stages)
    return tuple(_order(schedule, rank, stages, microbatches, chunks) for rank in ranks)


def places(schedule: Schedule, stages: int, chunks: int = 1) -> Places:
    """Positions in the model of each rank's chunks, in the order of Pass.chunk.

    dualpipe's two chunks lie in two copies of a model of so many stages, see dual.dualpipe.
    """
    p = stages
    if p > 1 and schedule in ("zb-v", "dualpipe-v"):
        return tuple((rank, 2 * p - 1 - rank) for rank in range(p))
    if p > 1 and schedule == "dualpipe":
        return tuple((rank, p - 1 - rank) for rank in range(p))
    return tuple(tuple(range(rank, p * chunks, p)) for rank in range(p))


def _order(schedule: Schedule, rank: int, p: int, m: int, chunks: int) -> Order:
    if p == 1:
        return plain.alone(m, chunks)
    match schedule:
        case "naive":
            return plain.naive(m)
        case "gpipe":
            return plain.gpipe(m)
        case "interleaved" if chunks > 1:
            return plain.interleaved(rank, p, m, chunks)
        case "1f1b" | "interleaved":
            return plain.one_forward_one_backward(rank, p, m)
        case "zb-h1":
            return zero_bubble.zb_h1(rank, p, m)
        case "zb-h2":
            return zero_bubble.zb_h2(rank, p, m)
        case "zb-v":
            return zero_bubble.zb_v(rank, p, m)
        case "dualpipe":
            return dual.dualpipe(rank, p, m)
        case "dualpipe-v":
            return dual.dualpipe_v(rank, p, m)


def _check(schedule: str, p: int, m: int, chunks: int) -> None:
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule {schedule!r} is unknown; write one of {', '.join(SCHEDULES)}")
    if min(p, m, chunks) < 1:
        raise UsageError(f"{p} stages, {m} microbatches, {chunks} chunks: each must be 1 or more")
    if chunks > 1 and p > 1 and schedule != "interleaved" and schedule not in TWO_STAGES:
        raise UsageError(f"{schedule} holds 1 chunk a rank, not {chunks}; use interleaved")
    if p > 1 and schedule == "dualpipe" and (p % 2 or m % 2):
        raise UsageError(f"dualpipe halves pp = {p} and microbatches = {m}; make both even")
    if p > 1 and schedule.startswith("dualpipe") and m < 2 * p:
        raise UsageError(f"{schedule} needs 2 pp = {2 * p} microbatches, not {m}; use {2 * p}")
