"""The pipeline of a job's stages: its window, its bubbles, and its messages' part of them."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.exposed_comm import (
    DATA_AXES,
    ONCE_A_STEP,
    TimedMessage,
    count_last_microbatches,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.prediction import Communication
from stepsplit.analyzer.model.rank_layout import list_rank_chunks, place_group
from stepsplit.analyzer.model.schedule_graph import Costs
from stepsplit.analyzer.model.schedule_time import (
    FRACTION,
    OVERHEAD,
    PipelineTime,
    compute_pipeline_time,
)
from stepsplit.analyzer.model.stage_time import StageTime

NETWORK_SHARE = Formula(
    "pipeline.network_share",
    "a message between stages on different nodes takes 1 + u as long; u: for how much of the"
    " filling and draining of the pipeline gathers of weights or reductions of gradients run over"
    " nodes, too",
    "two streams of data have half of a link each; own",
)


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """The pipeline's time and its messages' part of it.

    transfers_ns is how much shorter the pipeline would be without message time, moving_ns the time
    of each rank's own messages.
    """

    time: PipelineTime
    transfers_ns: float
    moving_ns: tuple[float, ...]
    formulas: tuple[Formula, ...] = ()

    def compute_exposed_ns(self, rank: int) -> int:
        """The part of a rank's bubble that is its own messages; the rest is waiting."""
        return round(min(self.transfers_ns, self.moving_ns[rank], self.time.bubbles_ns[rank]))


def compute_pipeline(
    job: JobConfig, stages: tuple[StageTime, ...], timed: dict[int, tuple[TimedMessage, ...]]
) -> PipelineResult:
    """Time the schedule with the stages' times, with and without its messages."""
    shared = _compute_network_share(job, stages)
    # Both get half of the link for as long as both use it.
    real = time_pipeline(job, stages, compute_transfer_ns(timed) * (1 + shared))
    if job.parallel.pp == 1:
        return PipelineResult(real, 0.0, (0.0,))
    messages_ns = tuple(
        sum(e.time.ns for e in timed[s] if _is_pipeline_message(e)) for s in range(job.parallel.pp)
    )
    transfers_ns = real.makespan_ns - time_pipeline(job, stages, 0.0).makespan_ns
    formulas = (FRACTION, OVERHEAD, *(NETWORK_SHARE,) * bool(shared))
    return PipelineResult(real, transfers_ns, messages_ns, formulas)


def time_pipeline(
    job: JobConfig, stages: tuple[StageTime, ...], transfer_ns: float
) -> PipelineTime:
    """The schedule with the stages' times and messages of this time between them."""
    layout, costs = job.parallel, list_chunk_costs(job, stages)
    if layout.pp == 1:
        return PipelineTime(job.microbatches * sum(map(sum, costs)), (0.0,))
    return compute_pipeline_time(
        layout.schedule, layout.pp, job.microbatches, layout.chunks, costs, transfer_ns
    )


def list_chunk_costs(job: JobConfig, stages: tuple[StageTime, ...]) -> Costs:
    """Forward, input gradient and weight gradient of a microbatch for each model stage, in ns."""
    costs: dict[int, tuple[float, float, float]] = {}
    for stage in stages:
        for chunk, position in enumerate(list_rank_chunks(job, stage.stage.index)):
            cost = stage.compute_chunk_cost(chunk)
            costs[position] = (cost.forward_ns, cost.input_ns, cost.weight_ns)
    return tuple(costs[place] for place in range(job.parallel.model_stages))


def compute_transfer_ns(timed: dict[int, tuple[TimedMessage, ...]]) -> float:
    """The time of one message between pipeline stages."""
    return max(
        (each.call.ns for stage in timed.values() for each in stage if _is_pipeline_message(each)),
        default=0.0,
    )


def _compute_network_share(job: JobConfig, stages: tuple[StageTime, ...]) -> float:
    """For how much of the pipeline's messages collectives of the gradients or weights use the same
    link between nodes (NETWORK_SHARE), 0..1."""
    if job.parallel.pp == 1 or place_group(job, "pp").nodes == 1:
        return 0.0
    last = count_last_microbatches(job)
    busy = 0.0
    for stage in stages:
        overlapped_ns = sum(
            each.time.ns - each.exposed_ns
            for each in stage.communication
            if each.message.axis in DATA_AXES
            and each.message.phase in ONCE_A_STEP
            and place_group(job, each.message.axis).nodes > 1
        )
        busy = max(busy, min(1.0, overlapped_ns / (last * stage.compute_ns)))
    # The schedule waits for messages while it fills and drains, for up to pp microbatches.
    return busy * min(1.0, last / min(job.parallel.pp, job.microbatches))


def list_pipeline_messages(
    timed: tuple[TimedMessage, ...], exposed_ns: int
) -> tuple[Communication, ...]:
    """A stage's pipeline messages; the exposed time is split in proportion to their times."""
    messages = [each for each in timed if _is_pipeline_message(each)]
    total_ns = sum(each.time.ns for each in messages)
    return tuple(
        Communication(each.message, each.time, round(exposed_ns * each.time.ns / total_ns))
        for each in messages
        if total_ns
    )


def _is_pipeline_message(timed: TimedMessage) -> bool:
    return timed.message.strategy == "pp"
