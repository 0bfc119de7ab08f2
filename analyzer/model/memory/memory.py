"""The peak memory of every stage of a job, by what it is for."""

from __future__ import annotations

from stepsplit.analyzer.model.memory.activations import Layers, layers_of
from stepsplit.analyzer.model.memory.band import CONTEXT_BYTES, reserved_bytes
from stepsplit.analyzer.model.memory.calibrate import NONE, Calibration
from stepsplit.analyzer.model.memory.frameworks import coefficients
from stepsplit.analyzer.model.memory.offload import offload
from stepsplit.analyzer.model.memory.peak import peak_of
from stepsplit.analyzer.model.memory.states import states_of
from stepsplit.analyzer.model.prediction import StageMemory
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage, stages_of
from stepsplit.analyzer.model.work.parameters import StageParameters, stage_parameters


def memory_of(job: Job, calibration: Calibration | None = None) -> tuple[StageMemory, ...]:
    """Peak bytes allocated on one rank of every pp coordinate.

    activations and transient are those of the stage's worst moment (peak.moments_of); other holds
    workspaces, and what the calibration adds.
    """
    used, layers = calibration or NONE, layers_of(job)
    both = zip(stages_of(job), stage_parameters(job), strict=True)
    return tuple(_stage_memory(job, stage, held, layers, used) for stage, held in both)


def fits(job: Job, memory: tuple[StageMemory, ...]) -> bool:
    """Whether every stage's reserved bytes and the context are within the device's memory."""
    most = max(reserved_bytes(stage.total_bytes).bytes for stage in memory)
    return most + CONTEXT_BYTES <= job.hardware.memory_bytes


def _stage_memory(
    job: Job, stage: Stage, parameters: StageParameters, layers: Layers, used: Calibration
) -> StageMemory:
    states = offload(states_of(job, parameters), job.recipe).states
    moment = peak_of(job, stage, parameters, layers)
    workspace = coefficients(job.recipe.framework).workspace_bytes
    return StageMemory(
        stage=stage.index,
        weights_bytes=states.weights_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=round(moment.activations_bytes * used.activations),
        transient_bytes=moment.transient_bytes,
        other_bytes=workspace + used.constant_bytes,
    )
