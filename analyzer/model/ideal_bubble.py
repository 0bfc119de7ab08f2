"""Ideal bubble of a schedule: with equal stages and no communication, in the window of all ranks.

Most schedules have a closed form. The modules that simulate the others are imported by what needs
them: they take longer to import than a short recording to split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepsplit.analyzer.errors import UsageError

if TYPE_CHECKING:
    from stepsplit.analyzer.model.schedule_time import Times


def compute_ideal_bubble_fraction(
    schedule: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    times_ns: Times | None = None,
) -> float | None:
    """Bubble / window of the schedule with equal stages and no communication, a ratio.

    stages is the number of pipeline ranks (p), chunks the number of stages on each (v);
    microbatches (m) counts both directions in dualpipe. The window is from the first forward to the
    last backward of all ranks: of a schedule that splits the backward, by a simulation of its order
    with times_ns. None if the schedule is not modelled, or if it splits the backward and times_ns
    is unknown.
    """
    if min(stages, microbatches, chunks) < 1:
        return None
    passes = _count_bubble_passes(schedule, stages, microbatches, chunks)
    if passes is not None:
        return passes / (chunks * microbatches + passes)
    from stepsplit.analyzer.model.schedule import list_chunk_positions
    from stepsplit.analyzer.model.schedule_names import SCHEDULES
    from stepsplit.analyzer.model.schedule_time import compute_pipeline_time

    known = next((one for one in SCHEDULES if one == schedule), None)
    if known is None or times_ns is None or sum(times_ns) <= 0:
        return None
    try:
        model_stages = 1 + max(map(max, list_chunk_positions(known, stages, chunks)))
        costs = (times_ns,) * model_stages
        return compute_pipeline_time(known, stages, microbatches, chunks, costs).bubble_fraction
    except UsageError:
        return None


def _count_bubble_passes(schedule: str, p: int, m: int, v: int) -> int | None:
    """A rank's bubble in forward-backward passes of one stage; None for other schedules.

    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, SC'21: sections 2.2.1 (GPipe and 1F1B: p-1) and 2.2.2 (interleaved: p-1 passes of
    a stage that is v times smaller). Fewer microbatches than ranks leave a bubble in each further
    round of chunks. naive runs one microbatch at a time: each rank works 1/p of the time.
    """
    match schedule:
        case "naive":
            return (p - 1) * v * m
        case "gpipe" | "1f1b":
            return p - 1
        case "interleaved":
            return p - 1 + (v - 1) * max(0, p - m)
    return None
