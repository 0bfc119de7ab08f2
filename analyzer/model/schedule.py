"""Pipeline schedules: the order of each rank's passes, and the activations in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.schedule_names import (
    MAX_SIMULATED_FORWARDS,
    MAX_STAGE_PAIRS,
    SCHEDULES,
    TWO_STAGES,
    Schedule,
)

# The order of passes of each pipeline rank, and the model stages of its chunks.

ChunkPositions = tuple[tuple[int, ...], ...]
"""For each rank, the positions of its chunks in the model."""


@lru_cache(maxsize=256)
def build_orders(
    schedule: Schedule, stages: int, microbatches: int, chunks: int = 1
) -> tuple[Order, ...]:
    """The passes of each rank, in order.

    chunks is the number of model stages per rank in interleaved; zb-v, dualpipe and dualpipe-v
    always have two. In dualpipe, microbatches counts both directions. A pipeline of one rank runs
    microbatch by microbatch. Raises UsageError if the schedule is not defined for these sizes.
    """
    _check(schedule, stages, microbatches, chunks)
    stages_per_rank = 2 if schedule in TWO_STAGES and stages > 1 else chunks
    if microbatches * stages * stages_per_rank > MAX_SIMULATED_FORWARDS:
        raise UsageError(
            f"{microbatches} microbatches in {stages} x {stages_per_rank} stages are too many "
            f"passes to simulate; at most {MAX_SIMULATED_FORWARDS} forwards are"
        )
    ranks = range(stages)
    return tuple(_build_order(schedule, rank, stages, microbatches, chunks) for rank in ranks)


def list_chunk_positions(schedule: Schedule, stages: int, chunks: int = 1) -> ChunkPositions:
    """Positions of each rank's chunks in the model, in the order of Pass.chunk.

    The two chunks of dualpipe belong to two copies of the model. Raises UsageError for more stages
    than are simulated.
    """
    p = stages
    if p * p * chunks > MAX_STAGE_PAIRS:
        raise UsageError(
            f"{p} ranks x {p * chunks} model stages exceeds {MAX_STAGE_PAIRS}; "
            "a longer pipeline is not simulated"
        )
    if p > 1 and schedule in ("zb-v", "dualpipe-v"):
        return tuple((rank, 2 * p - 1 - rank) for rank in range(p))
    if p > 1 and schedule == "dualpipe":
        return tuple((rank, p - 1 - rank) for rank in range(p))
    return tuple(tuple(range(rank, p * chunks, p)) for rank in range(p))


def _build_order(schedule: Schedule, rank: int, p: int, m: int, chunks: int) -> Order:
    if p == 1:
        # A pipeline of one rank: forward and backward through all chunks, by microbatch.
        forward, backward = range(chunks), range(chunks - 1, -1, -1)
        pattern = " ".join([*(f"F{c}" for c in forward), *(f"B{c}" for c in backward)])
        return expand_phases([(pattern, m)], [range(m)] * chunks)
    match schedule:
        case "naive":
            return expand_phases([("F0 B0", m)], [range(m)])
        case "gpipe":
            # All forwards, then all backwards (Huang et al., GPipe, arXiv:1811.06965, section
            # 2.3).
            return expand_phases([("F0", m), ("B0", m)], [range(m)])
        case "interleaved" if chunks > 1:
            return build_interleaved(rank, p, m, chunks)
        case "1f1b" | "interleaved":
            return build_1f1b(rank, p, m)
        case "zb-h1":
            # 1F1B with weight gradients delayed by one microbatch for each rank before this one.
            # Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.1, figure 3
            # (top).
            return _build_zb_h(p - rank - 1, rank, m)
        case "zb-h2":
            # Twice the warm-up and twice the delay of ZB-H1 (same paper, section 2.2, figure 3).
            return _build_zb_h(2 * (p - rank - 1), 2 * rank, m)
        case "zb-v":
            # The model folded into a V, with both ends on the first rank. Qi et al.,
            # arXiv:2401.10241, section 6, figure 8; as torch.distributed.pipelining's
            # ScheduleZBVZeroBubble.
            full = max(m, 2 * p - 1)
            warm = [("F0", 2 * (p - rank) - 1), ("F1 F0", rank), ("F1 I1 W", p - rank)]
            cool = [("I0 I1", rank), ("I0 W0", p - rank), ("W1", rank), ("W0", rank)]
            return expand_phases([*warm, ("F0 I0 W F1 I1 W", full - p), *cool], [range(m)] * 2)
        case "dualpipe":
            # Two copies of the model, fed from both ends (deepseek-ai/DualPipe, dualpipe.py,
            # step). Chunk 0 is stage rank of the copy fed at rank 0, which takes the first half
            # of the microbatches; chunk 1 is stage p - 1 - rank of the other.
            half = m // 2
            lanes = (range(half), range(half, m))
            near = rank < p // 2
            phases = _list_dualpipe_phases(min(rank, p - 1 - rank), p // 2, half)
            return expand_phases(
                phases
                if near
                else [(words.translate(str.maketrans("01", "10")), n) for words, n in phases],
                lanes,
            )
        case "dualpipe-v":
            # One copy, folded into a V (deepseek-ai/DualPipe, dualpipev.py, step).
            return expand_phases(_list_dualpipe_phases(rank, p, m), (range(m), range(m)))


def _check(schedule: str, p: int, m: int, chunks: int) -> None:
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule {schedule!r} is unknown; write one of {', '.join(SCHEDULES)}")
    if min(p, m, chunks) < 1:
        raise UsageError(f"{p} stages, {m} microbatches, {chunks} chunks: all must be 1 or more")
    if chunks > 1 and p > 1 and schedule != "interleaved" and schedule not in TWO_STAGES:
        raise UsageError(f"{schedule} has 1 chunk per rank, not {chunks}; use interleaved")
    if p > 1 and schedule == "dualpipe" and (p % 2 or m % 2):
        raise UsageError(f"dualpipe needs an even pp and number of microbatches, not {p} and {m}")
    if p > 1 and schedule.startswith("dualpipe") and m < 2 * p:
        raise UsageError(f"{schedule} needs at least 2 pp = {2 * p} microbatches, not {m}")


# Schedules that overlap a forward and a backward: DualPipe and DualPipeV.


def _list_dualpipe_phases(rank: int, p: int, m: int) -> list[Phase]:
    """The eight phases, from the turn of the V (or of the half pipeline) at rank p - 1 outward.

    The rank at the turn runs its first forward and backward one after the other.
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


# Schedules that split the backward to fill bubbles: ZB-H1, ZB-H2 and ZB-V.


def _build_zb_h(warm: int, lag: int, m: int) -> Order:
    """warm forwards first; weight gradients are delayed by lag while microbatches remain."""
    full = max(m, warm + lag + 1)
    phases = [("F0", warm), ("F0 I0", lag), ("F0 I0 W0", full - warm - lag)]
    return expand_phases([*phases, ("I0 W0", warm), ("W0", lag)], [range(m)])


# Activations in flight on a pipeline rank.

IN_FLIGHT = Formula(
    "schedule.in_flight",
    "1f1b min(m, p-r); interleaved min(m v, 2 (p-r-1) + (v-1) p + 1) chunks; gpipe m; naive 1; "
    "zb-h1 min(m, p); zb-h2 min(m, 2p-1); zb-v min(2p, 2m, m+1+r) chunks; dualpipe p+1; "
    "dualpipe-v 2p+1 chunks",
    "Narayanan et al., SC'21, section 2.2; Korthikanti et al., arXiv:2205.05198, section 4.2.3; "
    "Qi et al., arXiv:2401.10241, table 2; deepseek-ai/DualPipe README",
)


def count_in_flight(
    schedule: Schedule, stages: int, microbatches: int, chunks: int = 1, rank: int = 0
) -> int:
    """Peak number of (microbatch, chunk) activations in flight on a rank.

    The layers of one activation are those of one chunk: 1/v of the rank's layers in interleaved,
    half of them in zb-v and dualpipe-v, one stage of one copy of the model in dualpipe, all of them
    in the others. An activation lives from the start of its forward to the end of its backward, or
    of its weight gradient if the backward is split. A pipeline of one rank has one microbatch in
    flight, in all chunks. Raises UsageError if interleaved cannot form equal groups.
    """
    p, m, v, remaining = stages, microbatches, chunks, stages - rank
    if p == 1:
        return v
    match schedule:
        case "naive":
            return 1
        case "gpipe":
            return m
        case "interleaved" if v > 1:
            return min(m * v, 2 * (remaining - 1) + (v - 1) * compute_group_size(p, m) + 1)
        case "1f1b" | "interleaved":
            return min(m, remaining)
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


# Schedules with whole backwards: naive, GPipe, 1F1B and interleaved.


def build_1f1b(rank: int, p: int, m: int) -> Order:
    """p-rank-1 forwards first, then one of each (Narayanan et al., SC'21, section 2.2.1)."""
    warm = min(p - rank - 1, m)
    return expand_phases([("F0", warm), ("F0 B0", m - warm), ("B0", warm)], [range(m)])


def compute_group_size(p: int, m: int) -> int:
    """Microbatches that run in one chunk before the next chunk's turn.

    p if it divides m, as Megatron-LM requires; else as in torch.distributed.pipelining's
    Interleaved1F1B: m // p rounds of equal size, one round if m < p. Raises UsageError.
    """
    rounds = max(1, m // p)
    if m % rounds:
        raise UsageError(
            f"interleaved: can't split {m} microbatches into {m} // {p} = {rounds} equal rounds; "
            f"use {rounds * p} or {(rounds + 1) * p} microbatches, a multiple of pp = {p}"
        )
    return m // rounds


def build_interleaved(rank: int, p: int, m: int, chunks: int) -> Order:
    """Groups of microbatches walk through the chunks (Narayanan et al., SC'21, section 2.2.2).

    Warm-up of 2 (p - rank - 1) + (v - 1) g forwards with groups of g, as in Megatron-LM's
    schedules.py. Raises UsageError if it cannot form equal groups.
    """
    group, total = compute_group_size(p, m), m * chunks
    warm = min(2 * (p - rank - 1) + (chunks - 1) * group, total)
    sequence = [
        (start + i, chunk)
        for start in range(0, m, group)
        for chunk in range(chunks)
        for i in range(group)
    ]
    forwards = [share_pass("F", microbatch, chunk) for microbatch, chunk in sequence]
    backwards = [share_pass("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in sequence]
    steady = zip(forwards[warm:], backwards, strict=False)
    return (*forwards[:warm], *(one for pair in steady for one in pair), *backwards[total - warm :])


# Passes, and the patterns that describe their order.

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Pass:
    """Work of a rank on one microbatch in one of its chunks.

    kind is F (forward), B (whole backward), I (input gradient) or W (weight gradient, at any time
    after its I). A joined pass overlaps the next pass of the rank: both start when both can, and
    both end after the sum of their times (DualPipe's overlapped forward and backward, which hides
    communication but makes no compute faster).
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    joined: bool = False


@lru_cache(maxsize=1 << 14)
def share_pass(kind: Kind, microbatch: int, chunk: int = 0, joined: bool = False) -> Pass:
    """A cached Pass: ranks share equal passes, which is faster than creating more."""
    return Pass(kind, microbatch, chunk, joined)


Order = tuple[Pass, ...]
"""The passes of one rank, first to last."""

Phase = tuple[str, int]
"""A pattern such as "F0 I1 W" and its number of repeats: kinds with their chunks, W without a chunk
for the oldest pending input gradient, and F0&B1 for two passes that overlap."""


def expand_phases(phases: Iterable[Phase], microbatches: Sequence[range]) -> Order:
    """Expand patterns to an order; lanes are the microbatches of each chunk.

    F counts up in its chunk, B and I count up together; passes beyond the last microbatch of the
    chunk are dropped.
    """
    forwards, backwards = [0] * len(microbatches), [0] * len(microbatches)
    waiting: deque[tuple[int, int]] = deque()
    order: list[Pass] = []
    for kind, chunk, joined in _parse_patterns(phases):
        if kind == "W":
            chunk, nth = next(w for w in waiting if chunk in (-1, w[0]))
            waiting.remove((chunk, nth))
        else:
            counts = forwards if kind == "F" else backwards
            nth, counts[chunk] = counts[chunk], counts[chunk] + 1
            if kind == "I":
                waiting.append((chunk, nth))
        if nth < len(microbatches[chunk]):
            order.append(share_pass(kind, microbatches[chunk][nth], chunk, joined))
    return tuple(order)


def _parse_patterns(phases: Iterable[Phase]) -> Iterator[tuple[Kind, int, bool]]:
    """Kind, chunk (-1: any) and whether the pass overlaps the next."""
    for pattern, repeats in phases:
        # F0&B1 is one word of two passes, the first of which overlaps the second.
        words = [word.split("&") for word in pattern.split()]
        passes = [
            (cast(Kind, part[0]), int(part[1:] or -1), number == 0 and len(parts) > 1)
            for parts in words
            for number, part in enumerate(parts)
        ]
        for _ in range(repeats):
            yield from passes
