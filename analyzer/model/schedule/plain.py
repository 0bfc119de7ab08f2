"""Orders of the schedules that run each backward whole: naive, GPipe, 1F1B and interleaved."""

from __future__ import annotations

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule.passes import Order, one_pass, played


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
