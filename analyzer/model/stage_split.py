"""The predicted Split of each pipeline stage."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.model.comm_ops import count_rank_microbatches
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.pipeline import PipelineResult
from stepsplit.analyzer.model.stage_time import StageTime
from stepsplit.analyzer.model.stragglers import Skew


def compute_splits(
    job: JobConfig, stages: tuple[StageTime, ...], pipeline: PipelineResult, skew: Skew
) -> tuple[Split, ...]:
    """One Split per stage. All stages end the step together, so faster ones wait (bubble)."""
    splits = tuple(
        _build_split(job, stage, pipeline.compute_exposed_ns(stage.stage.index), bubble_ns)
        for stage, bubble_ns in zip(stages, pipeline.time.bubbles_ns, strict=True)
    )
    step_ns = max(split.step_ns for split in splits)
    skew_ns = round(skew.share * step_ns)
    # Each stage waits for the slowest one at the end of the step, which is bubble.
    return tuple(
        replace(split, skew_ns=skew_ns, bubble_ns=split.bubble_ns + step_ns - split.step_ns)
        for split in splits
    )


def _build_split(
    job: JobConfig, stage: StageTime, pipeline_comm_ns: int, bubble_ns: float
) -> Split:
    m, communication = count_rank_microbatches(job), stage.communication
    sent_ns = sum(each.exposed_ns for each in communication if each.message.op == "send")
    return Split(
        compute_ns=round(m * stage.compute_ns + stage.optimizer_ns),
        collective_ns=sum(each.exposed_ns for each in communication) - sent_ns,
        p2p_ns=pipeline_comm_ns + sent_ns,
        bubble_ns=round(bubble_ns) - pipeline_comm_ns,
        copy_ns=round(stage.offload_ns),
        idle_ns=round(m * stage.idle_ns - stage.idle_overlapped_ns + stage.host_update_ns),
        overlapped_ns=sum(round(each.time.ns) - each.exposed_ns for each in communication),
    )
