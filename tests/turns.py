"""Slow tests that take turns: a fifth of them runs each time, by the seed; all with
STEPSPLIT_EVERY=1."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ground_truth import SEED

_TURNS = 5


def in_turn(names: Iterable[str]) -> tuple[str, ...]:
    """Those whose turn it is, of these names."""
    every = tuple(names)
    return every if os.environ.get("STEPSPLIT_EVERY") else every[SEED % _TURNS :: _TURNS]
