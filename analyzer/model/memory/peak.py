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


@dataclass(frozen=True, slots=True)
class Needs:
    """What every rank that holds the same needs: each_bytes of one chunk of one microbatch in
    flight, of all of them at most_bytes where they are offloaded.

    moments hold as activations what comes to those in flight; idle is when none are.
    """

    each_bytes: int
    most_bytes: int | None
    moments: tuple[Moment, ...]
    idle: Moment

    def at(self, in_flight: int) -> tuple[Moment, ...]:
        """Every moment that can be the peak, in the order of the step."""
        return (*(self._with(moment, in_flight) for moment in self.moments), self.idle)

    def peak(self, in_flight: int) -> Moment:
        """The worst moment; however many are in flight, the same one is the worst of the passes."""
        busy = self._with(max(self.moments, key=_total_bytes), in_flight)
        return max(busy, self.idle, key=_total_bytes)

    def _with(self, moment: Moment, in_flight: int) -> Moment:
        held = in_flight * self.each_bytes
        held = held if self.most_bytes is None else min(held, self.most_bytes)
        return Moment(moment.name, held + moment.activations_bytes, moment.transient_bytes)


def _total_bytes(moment: Moment) -> int:
    return moment.total_bytes


def needs_of(job: Job, stage: Stage, parameters: StageParameters, layers: Layers) -> Needs:
    """The same for all ranks that hold the same, but for the first, which hands nothing back."""
    chunk = stage_activations(job, stage, layers)
    each, standing = _held_each(job, stage, chunk), transient.standing_bytes(job, parameters)
    found = [_backward(job, stage, chunk, standing)]
    if stage.head:
        found.insert(0, _loss(job, stage, standing))
    if stage.embedding:
        found.append(Moment("embedding", -each, standing + transient.embedding_bytes(job)))
    idle = Moment("optimizer", 0, transient.optimizer_bytes(job, parameters))
    return Needs(each, _most(job, stage, chunk), tuple(found), idle)


def moments_of(
    job: Job, stage: Stage, parameters: StageParameters, layers: Layers
) -> tuple[Moment, ...]:
    """Every moment of one rank that can be the peak, in the order of the step."""
    return needs_of(job, stage, parameters, layers).at(chunks_in_flight(job, stage.index))


def _most(job: Job, stage: Stage, chunk: StageActivations) -> int | None:
    """Of offloaded activations those of two layers stay."""
    if "activations" not in job.recipe.offload:
        return None
    return 2 * chunk.held_bytes * len(stage.chunks) // max(1, stage.layers)


def _held_each(job: Job, stage: Stage, chunk: StageActivations) -> int:
    """One chunk of one microbatch, with the output it hands on and its embedding's mask."""
    elements = input_bytes(job) // job.recipe.activation_bytes
    beside = 0.0
    if job.layout.pp > 1 and not stage.head:
        beside += elements * coefficients(job.recipe.framework).pipeline_output
    if stage.embedding and job.recipe.dropout:
        beside += elements * MASK_BYTES / len(stage.chunks)
    return chunk.held_bytes + round(beside)


def _loss(job: Job, stage: Stage, standing: int) -> Moment:
    """The head's backward pass: final norm in and out, logits, and what transient adds."""
    saved, working = transient.logits_bytes(job)
    around = transient.head_bytes(job) + transient.handed_on_bytes(job, stage.index)
    return Moment("loss", saved + 2 * input_bytes(job), standing + working + around)


def _backward(job: Job, stage: Stage, chunk: StageActivations, standing: int) -> Moment:
    """The last layer's backward pass, after it has run forward again where that is asked."""
    needs = transient.layer_backward_bytes(job, stage) + chunk.rerun_bytes
    needs += transient.handed_on_bytes(job, stage.index)
    return Moment("backward", 0, standing + needs)
