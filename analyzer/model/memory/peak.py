"""The moment at which a rank needs the most memory beside its states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory import transient
from stepsplit.analyzer.model.memory.activations import MASK_BYTES, Layers, input_bytes
from stepsplit.analyzer.model.memory.frameworks import coefficients
from stepsplit.analyzer.model.memory.in_flight import chunks_in_flight
from stepsplit.analyzer.model.memory.recompute import StageActivations, stage_activations
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage
from stepsplit.analyzer.model.work.parameters import StageParameters

PEAK = Formula(
    "memory.peak",
    "states + max over {the loss, the last layer's backward pass, the embedding's gradient, the"
    " optimizer step} of (activations in flight + what that moment needs)",
    "Korthikanti et al., arXiv:2205.05198, section 4.2.3",
)
MomentName = Literal["loss", "backward", "embedding", "optimizer"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes beside the states, at one moment of the step."""

    name: MomentName
    activations_bytes: int
    transient_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.activations_bytes + self.transient_bytes


def peak_of(job: Job, stage: Stage, parameters: StageParameters, layers: Layers) -> Moment:
    """The worst moment of one rank of a stage."""
    return max(moments_of(job, stage, parameters, layers), key=lambda moment: moment.total_bytes)


def moments_of(
    job: Job, stage: Stage, parameters: StageParameters, layers: Layers
) -> tuple[Moment, ...]:
    """Every moment that can be the peak, in the order of the step."""
    chunk = stage_activations(job, stage, layers)
    held = _held(job, stage, chunk)
    standing = transient.standing_bytes(job, parameters)
    found = [_backward(job, stage, chunk, held, standing)]
    if stage.head:
        found.insert(0, _loss(job, stage, held, standing))
    if stage.embedding:
        last = held - _held_each(job, stage, chunk)
        found.append(Moment("embedding", last, standing + transient.embedding_bytes(job)))
    found.append(Moment("optimizer", 0, transient.optimizer_bytes(job, parameters)))
    return tuple(found)


def _held(job: Job, stage: Stage, chunk: StageActivations) -> int:
    """Everything in flight when the first backward pass begins."""
    held = chunks_in_flight(job, stage.index) * _held_each(job, stage, chunk)
    if "activations" not in job.recipe.offload:
        return held
    return min(held, 2 * chunk.held_bytes * len(stage.chunks) // max(1, stage.layers))


def _held_each(job: Job, stage: Stage, chunk: StageActivations) -> int:
    """One chunk of one microbatch, with the output it hands on and its embedding's mask."""
    elements = input_bytes(job) // job.recipe.activation_bytes
    beside = 0.0
    if job.layout.pp > 1 and not stage.head:
        beside += elements * coefficients(job.recipe.framework).pipeline_output
    if stage.embedding and job.recipe.dropout:
        beside += elements * MASK_BYTES / len(stage.chunks)
    return chunk.held_bytes + round(beside)


def _loss(job: Job, stage: Stage, held: int, standing: int) -> Moment:
    """The head's backward pass: final norm in and out, logits, and what transient adds."""
    saved, working = transient.logits_bytes(job)
    around = transient.head_bytes(job) + transient.handed_on_bytes(job, stage.index)
    return Moment("loss", held + saved + 2 * input_bytes(job), standing + working + around)


def _backward(job: Job, stage: Stage, chunk: StageActivations, held: int, standing: int) -> Moment:
    """The last layer's backward pass, after it has run forward again where that is asked."""
    needs = transient.layer_backward_bytes(job, stage) + chunk.rerun_bytes
    needs += transient.handed_on_bytes(job, stage.index)
    return Moment("backward", held, standing + needs)
