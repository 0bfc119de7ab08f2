"""Orders of the schedules that run a forward and a backward at once: DualPipe and DualPipeV."""

from __future__ import annotations

from stepsplit.analyzer.model.schedule.passes import Order, Phase, played


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
