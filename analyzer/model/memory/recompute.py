"""What recomputation leaves of a stage's activations, and what it needs while it runs again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory.activations import Layers, input_bytes, layers_of
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage

FULL = Formula(
    "memory.recompute_full",
    "2sbh a layer in flight (2sbh/t with sequence parallelism) + all of one layer",
    "Korthikanti et al., arXiv:2205.05198, table 2; Chen et al., arXiv:1604.06174",
)
EVERY = Formula(
    "memory.recompute_every",
    "c A_input + (l/c) A_layer for c inputs kept of l layers, least at c = sqrt(l A_layer/A_input)",
    "Narayanan et al., SC'21, arXiv:2104.04473, section 3.5",
)


@dataclass(frozen=True, slots=True)
class StageActivations:
    """held_bytes of one microbatch in one chunk between its two passes; rerun_bytes while the
    backward pass of one group of layers runs it forward again."""

    held_bytes: int
    rerun_bytes: int


def stage_activations(job: Job, stage: Stage, layers: Layers | None = None) -> StageActivations:
    """Activations of one chunk of the stage (the mean of its chunks) by the job's recomputation.

    layers are layers_of(job), where the caller has them.
    """
    layers = layers or layers_of(job)
    count, chunks = max(1, stage.layers), len(stage.chunks)
    whole = _all_layers(stage, layers)
    if job.recipe.recompute in ("none", "selective"):
        return StageActivations(whole // chunks, 0)
    kept = inputs_kept(job, count / chunks, whole / count)
    rerun = _largest_layer(stage, layers) * math.ceil(count / chunks / kept)
    return StageActivations(round(kept * input_bytes(job)), rerun)


def inputs_kept(job: Job, layers: float, layer_bytes: float) -> float:
    """Layer inputs kept of one chunk of so many layers: all, every k-th, or the best number."""
    match job.recipe.recompute:
        case "every":
            return math.ceil(layers / job.recipe.recompute_every)
        case "sqrt":
            best = math.sqrt(layers * layer_bytes / input_bytes(job))
            return min(layers, max(1, round(best)))
    return layers


def _all_layers(stage: Stage, layers: Layers) -> int:
    experts = layers.expert.total_bytes * stage.expert_layers if layers.expert else 0
    return layers.dense.total_bytes * stage.dense_layers + experts


def _largest_layer(stage: Stage, layers: Layers) -> int:
    dense = layers.dense.total_bytes if stage.dense_layers else 0
    expert = layers.expert.total_bytes if layers.expert and stage.expert_layers else 0
    return max(dense, expert)
