"""The peak memory of every stage of a job, by what it is for."""

from __future__ import annotations

from stepsplit.analyzer.model.memory.activations import layers_of
from stepsplit.analyzer.model.memory.band import CONTEXT_BYTES, reserved_bytes
from stepsplit.analyzer.model.memory.calibrate import Calibration
from stepsplit.analyzer.model.memory.frameworks import coefficients
from stepsplit.analyzer.model.memory.in_flight import chunks_in_flight
from stepsplit.analyzer.model.memory.offload import offload
from stepsplit.analyzer.model.memory.peak import Moment, Needs, needs_of
from stepsplit.analyzer.model.memory.states import States, states_of
from stepsplit.analyzer.model.prediction import StageMemory
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import first_alike, stages_of
from stepsplit.analyzer.model.work.parameters import stage_parameters


def memory_of(job: Job, calibration: Calibration | None = None) -> tuple[StageMemory, ...]:
    """Peak bytes allocated on one rank of every pp coordinate.

    activations and transient are those of the stage's worst moment (peak.Needs); other holds
    workspaces, and what the calibration adds.
    """
    learned = job.hardware.learned
    own = Calibration("", learned.activations, learned.constant_bytes)
    used, needs = calibration or own, _needs(job)
    return tuple(
        _stage_memory(states, each.peak(chunks_in_flight(job, rank)), rank, job, used)
        for rank, (states, each) in enumerate(needs)
    )


def fits(job: Job, memory: tuple[StageMemory, ...]) -> bool:
    """Whether every stage's reserved bytes and the context are within the device's memory."""
    most = max(reserved_bytes(stage.total_bytes).bytes for stage in memory)
    return most + CONTEXT_BYTES <= job.hardware.memory_bytes


def _needs(job: Job) -> tuple[tuple[States, Needs], ...]:
    """Of each stage; those that hold the same are weighed once, but for the first."""
    layers, held = layers_of(job), stage_parameters(job)
    known: dict[tuple[int, bool], tuple[States, Needs]] = {}
    found = []
    for stage, first in zip(stages_of(job), first_alike(job), strict=True):
        alike = first, stage.index > 0
        if alike not in known:
            own = held[stage.index]
            states = offload(states_of(job, own), job.recipe).states
            known[alike] = states, needs_of(job, stage, own, layers)
        found.append(known[alike])
    return tuple(found)


def _stage_memory(
    states: States, moment: Moment, rank: int, job: Job, used: Calibration
) -> StageMemory:
    workspace = coefficients(job.recipe.framework).workspace_bytes
    return StageMemory(
        stage=rank,
        weights_bytes=states.weights_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=round(moment.activations_bytes * used.activations),
        transient_bytes=moment.transient_bytes,
        other_bytes=workspace + used.constant_bytes,
    )
