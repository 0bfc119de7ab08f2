"""Which stage of the pipeline a rank's own marks say it holds."""

from __future__ import annotations

from stepsplit.analyzer.split.pipeline.marks import marks_in
from stepsplit.analyzer.trace import Events


def marked_stage(events: Events) -> int | None:
    """The first of the stages whose work is marked; None where none is."""
    return min((mark.stage for name in events.names for mark in marks_in(name)), default=None)
