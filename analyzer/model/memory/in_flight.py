"""How many microbatches a job's pipeline ranks hold between their two passes."""

from __future__ import annotations

from stepsplit.analyzer.model.schedule.in_flight import in_flight
from stepsplit.analyzer.model.spec.job import Job


def chunks_in_flight(job: Job, rank: int) -> int:
    """Pairs of microbatch and chunk whose activations the rank holds at its peak."""
    layout = job.layout
    return in_flight(layout.schedule, layout.pp, job.microbatches, layout.chunks, rank)
