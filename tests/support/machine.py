"""How fast this machine is at the moment: others use it too, and one is not like another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

_USUAL_S = 0.006
"""What _making() takes of the processor's time where the limits were set: a thousand predictions
took 1.0 s there, and take 170 times as long as it wherever both were timed."""


@dataclass(frozen=True)
class _Made:
    one: int
    other: float
    name: str


def usual_seconds(pieces: Iterable[Callable[[], object]]) -> float:
    """The processor's time that all pieces take, as on the usual machine.

    Each piece is timed beside a fixed piece of work: what else runs slows both.
    """
    return sum(_took(piece) / slowness() for piece in pieces)


def slowness() -> float:
    """How many times as slow the machine is right now as it usually is, 1 at least."""
    return max(1.0, min(_took(_making) for _ in range(2)) / _USUAL_S)


def _took(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _making() -> int:
    """Small objects in tables, as Python programs make them."""
    made = {n: replace(_Made(n, n * 0.5, "made"), other=n * 2.0) for n in range(4_000)}
    return sum(len({one.name: one.other}) for one in made.values())
