"""Pipeline schedules: in which order each rank runs its passes, and what that keeps in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, cast

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import SCHEDULES, TWO_STAGES, Schedule
from stepsplit.analyzer.model.formulas import Formula

# In which order each rank of a pipeline does its passes, and which model stages it holds.

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

    dualpipe's two chunks lie in two copies of a model of so many stages, see dualpipe.
    """
    p = stages
    if p > 1 and schedule in ("zb-v", "dualpipe-v"):
        return tuple((rank, 2 * p - 1 - rank) for rank in range(p))
    if p > 1 and schedule == "dualpipe":
        return tuple((rank, p - 1 - rank) for rank in range(p))
    return tuple(tuple(range(rank, p * chunks, p)) for rank in range(p))


def _order(schedule: Schedule, rank: int, p: int, m: int, chunks: int) -> Order:
    if p == 1:
        return alone(m, chunks)
    match schedule:
        case "naive":
            return naive(m)
        case "gpipe":
            return gpipe(m)
        case "interleaved" if chunks > 1:
            return interleaved(rank, p, m, chunks)
        case "1f1b" | "interleaved":
            return one_forward_one_backward(rank, p, m)
        case "zb-h1":
            return zb_h1(rank, p, m)
        case "zb-h2":
            return zb_h2(rank, p, m)
        case "zb-v":
            return zb_v(rank, p, m)
        case "dualpipe":
            return dualpipe(rank, p, m)
        case "dualpipe-v":
            return dualpipe_v(rank, p, m)


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


# Orders of the schedules that run a forward and a backward at once: DualPipe and DualPipeV.


def dualpipe(rank: int, p: int, m: int) -> Order:
    """Two copies of the model, fed from both ends (deepseek-ai/DualPipe, dualpipe.py, step).

    Chunk 0 is stage rank of the copy fed at rank 0, which takes the first half of the
    microbatches; chunk 1 is stage p - 1 - rank of the other.
    """
    half = m // 2
    lanes = (range(half), range(half, m))
    near = rank < p // 2
    phases = _phases(min(rank, p - 1 - rank), p // 2, half)
    return played(phases if near else [(_swapped(words), n) for words, n in phases], lanes)


def dualpipe_v(rank: int, p: int, m: int) -> Order:
    """One copy, folded into a V (deepseek-ai/DualPipe, dualpipev.py, step)."""
    return played(_phases(rank, p, m), (range(m), range(m)))


def _phases(rank: int, p: int, m: int) -> list[Phase]:
    """The eight steps, from the end of the V (or of the half pipeline) at rank p - 1 outward.

    The rank at the turn does its first forward and backward one after the other.
    """
    outer, inner = p - rank - 1, rank + 1
    steady = m - 2 * p + inner
    first = min(1, steady) if outer == 0 else 0
    turn, odd = divmod(inner, 2)
    return [
        ("F0", 2 * outer),
        ("F0 F1", inner),
        ("I1 W F1", outer),
        ("F0 B1 F1&B0", first),
        ("F0&B1 F1&B0", steady - first),
        ("B1 F1&B0", outer),
        ("B1 B0", turn),
        ("B1 I0", odd),
        ("I1 I0", turn),
        ("W I0", outer),
        ("W", inner),
    ]


def _swapped(words: str) -> str:
    return words.translate(str.maketrans("01", "10"))


# Orders of the schedules that split the backward to fill holes: ZB-H1, ZB-H2 and ZB-V.


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


# How many activations a pipeline rank holds at its peak.

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


# Orders of the schedules that run each backward whole: naive, GPipe, 1F1B and interleaved.


def alone(microbatches: int, chunks: int) -> Order:
    """A pipeline of one rank: forth through all chunks and back, microbatch by microbatch."""
    there, back = range(chunks), range(chunks - 1, -1, -1)
    pattern = " ".join([*(f"F{c}" for c in there), *(f"B{c}" for c in back)])
    return played([(pattern, microbatches)], [range(microbatches)] * chunks)


def naive(microbatches: int) -> Order:
    """One microbatch at a time in the whole pipeline."""
    return played([("F0 B0", microbatches)], [range(microbatches)])


def gpipe(microbatches: int) -> Order:
    """All forwards, then all backwards (Huang et al., GPipe, arXiv:1811.06965, section 2.3)."""
    return played([("F0", microbatches), ("B0", microbatches)], [range(microbatches)])


def one_forward_one_backward(rank: int, p: int, m: int) -> Order:
    """p-rank-1 forwards first, then one of each (Narayanan et al., SC'21, section 2.2.1)."""
    warm = min(p - rank - 1, m)
    return played([("F0", warm), ("F0 B0", m - warm), ("B0", warm)], [range(m)])


def group_size(p: int, m: int) -> int:
    """Microbatches that pass one chunk before the next chunk's turn comes.

    p where it divides m, as Megatron-LM demands; else those of torch.distributed.pipelining's
    Interleaved1F1B: m // p rounds of equal size, one round where m < p. Raises UsageError.
    """
    rounds = max(1, m // p)
    if m % rounds:
        raise UsageError(
            f"interleaved: {m} microbatches do not make {m} // {p} = {rounds} equal rounds; "
            f"use {rounds * p} or {(rounds + 1) * p} microbatches, a multiple of pp = {p}"
        )
    return m // rounds


def interleaved(rank: int, p: int, m: int, chunks: int) -> Order:
    """Groups of microbatches walk through the chunks (Narayanan et al., SC'21, section 2.2.2).

    Warm-up of 2 (p - rank - 1) + (v - 1) g forwards with groups of g, as Megatron-LM's
    schedules.py. Raises UsageError where no groups can be made.
    """
    group, total = group_size(p, m), m * chunks
    warm = min(2 * (p - rank - 1) + (chunks - 1) * group, total)
    walk = [
        (start + i, chunk)
        for start in range(0, m, group)
        for chunk in range(chunks)
        for i in range(group)
    ]
    forwards = [one_pass("F", microbatch, chunk) for microbatch, chunk in walk]
    backwards = [one_pass("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in walk]
    steady = zip(forwards[warm:], backwards, strict=False)
    return (*forwards[:warm], *(one for pair in steady for one in pair), *backwards[total - warm :])


# What a pipeline rank does next: passes, and the patterns that write their order.

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Pass:
    """Work of a rank on one microbatch in one of its chunks.

    kind is F (forward), B (whole backward), I (input gradient) or W (weight gradient, at any time
    after its I). joined passes run at once with the next pass of the rank: both start when both
    can, and both end after the sum of their times (DualPipe's overlapped forward and backward,
    where the overlap hides communication and makes no compute faster).
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    joined: bool = False


@lru_cache(maxsize=1 << 14)
def one_pass(kind: Kind, microbatch: int, chunk: int = 0, joined: bool = False) -> Pass:
    """The same Pass for the same words: ranks share passes, which is faster than more of them."""
    return Pass(kind, microbatch, chunk, joined)


Order = tuple[Pass, ...]
"""What one rank does, first to last."""

Phase = tuple[str, int]
"""A pattern such as "F0 I1 W" and how often it comes: kinds with their chunks, W without one for
the oldest input gradient that waits, and F0&B1 for two passes that run at once."""


def played(phases: Iterable[Phase], lanes: Sequence[range]) -> Order:
    """The order that the patterns write; lanes are the microbatches of each chunk.

    F counts up in its chunk, B and I count up together; what lies beyond the last microbatch of
    the chunk is left out.
    """
    forwards, backwards = [0] * len(lanes), [0] * len(lanes)
    waiting: deque[tuple[int, int]] = deque()
    order: list[Pass] = []
    for kind, chunk, joined in _words(phases):
        if kind == "W":
            chunk, nth = next(w for w in waiting if chunk in (-1, w[0]))
            waiting.remove((chunk, nth))
        else:
            counts = forwards if kind == "F" else backwards
            nth, counts[chunk] = counts[chunk], counts[chunk] + 1
            if kind == "I":
                waiting.append((chunk, nth))
        if nth < len(lanes[chunk]):
            order.append(one_pass(kind, lanes[chunk][nth], chunk, joined))
    return tuple(order)


def _words(phases: Iterable[Phase]) -> Iterator[tuple[Kind, int, bool]]:
    """Kind, chunk (-1: any) and whether it is joined with the next."""
    for pattern, times in phases:
        words = [
            (cast(Kind, part[0]), int(part[1:] or -1), joined)
            for word in pattern.split()
            for part, joined in _parts(word)
        ]
        for _ in range(times):
            yield from words


def _parts(word: str) -> list[tuple[str, bool]]:
    first, *second = word.split("&")
    return [(first, bool(second)), *((part, False) for part in second)]
