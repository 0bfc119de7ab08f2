"""A job and its prediction -> the Candidate that a plan ranks."""

from __future__ import annotations

from collections import Counter

from stepsplit.analyzer.compare.plan.plan import Candidate, Choice
from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.model.spec.job import Job


def candidate_of(job: Job, rates: Rates) -> Candidate:
    """The job as predicted."""
    prediction = predict(job, rates)
    return Candidate(
        choice=choice_of(job),
        microbatches=job.microbatches,
        split=prediction.split,
        exposed_ns=_exposed(prediction),
        peak_bytes=max(stage.total_bytes for stage in prediction.memory),
        mfu=prediction.mfu,
        confidence=prediction.confidence,
    )


def choice_of(job: Job) -> Choice:
    layout, recipe = job.layout, job.recipe
    return Choice(
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        ep=layout.ep,
        expert_tp=layout.expert_tp,
        sequence_parallel=layout.sequence_parallel,
        zero=layout.zero,
        schedule=layout.schedule,
        chunks=layout.chunks,
        layers_per_stage=layout.layers_per_stage,
        micro_batch=recipe.micro_batch,
        recompute=_recompute(job),
    )


def _recompute(job: Job) -> str:
    """As RUN.toml writes it."""
    recipe = job.recipe
    return f"every-{recipe.recompute_every}" if recipe.recompute == "every" else recipe.recompute


def _exposed(prediction: Prediction) -> tuple[tuple[str, int], ...]:
    """What the slowest stage's compute can't hide, by axis; data parallelism under one name."""
    stage = prediction.splits.index(prediction.split)
    found: Counter[str] = Counter()
    for one in prediction.communication:
        if one.message.stage == stage and one.exposed_ns:
            axis = one.message.axis
            found["dp" if axis.startswith("dp") else axis] += one.exposed_ns
    return tuple(found.most_common())
