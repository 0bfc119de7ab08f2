"""What a pipeline rank does next: passes, and the patterns that write their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

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
