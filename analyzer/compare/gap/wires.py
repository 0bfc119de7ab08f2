"""What the ranks along an axis are joined by, to hold bandwidths against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stepsplit.analyzer.model.config import Job, span_of


@dataclass(frozen=True, slots=True)
class Wire:
    """How many ranks a group along an axis has, and the peak of the slowest link between them, of
    one GPU in one direction, as sold."""

    ranks: int
    bytes_per_s: float


Wires = Callable[[str], Wire | None]
"""The wire of an axis, by the prediction's words; None where an axis has none."""
_SUMS = {"dp_cp": "dp"}
_KNOWN = ("tp", "cp", "ep", "pp", "dp", "dp_shard", "dp_replicate")


def wires_of(job: Job) -> Wires:
    """The wires of the job's hardware."""

    def wire(axis: str) -> Wire | None:
        name = _SUMS.get(axis, axis)
        if name not in _KNOWN:
            return None
        span = span_of(job, name)
        link = job.hardware.inter if span.nodes > 1 else job.hardware.intra
        return Wire(span.ranks, link.bytes_per_s) if span.ranks > 1 else None

    return wire


def no_wires(axis: str) -> Wire | None:
    """Nothing is known of any axis."""
    return None
