"""Peak memory of each pipeline stage, by category, with its error band."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import (
    JobConfig,
    StageConfig,
    TrainingConfig,
    first_alike,
    stages_of,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import (
    KEEPS_FP32,
    MASK_BYTES,
    LayersByKind,
    StageActivations,
    States,
    chunks_in_flight,
    coefficients,
    input_bytes,
    layers_of,
    stage_activations,
    states_of,
)
from stepsplit.analyzer.model.parameters import StageParameters, stage_parameters, vocabulary_share
from stepsplit.analyzer.model.prediction import StageMemory
from stepsplit.analyzer.model.schedule import IN_FLIGHT

# The peak memory of every stage of a job, by category.


def memory_of(
    job: JobConfig, calibration: MemoryCalibration | None = None
) -> tuple[StageMemory, ...]:
    """Peak allocated bytes of one rank of every pipeline stage.

    activations and transient are those at the moment of the peak; other is the framework's
    workspaces and the constant of the calibration.
    """
    learned = job.hardware.learned
    own = MemoryCalibration("", learned.activations, learned.constant_bytes)
    used, needs = calibration or own, _needs(job)
    return tuple(
        _stage_memory(states, each, rank, job, used) for rank, (states, each) in enumerate(needs)
    )


def fits(job: JobConfig, memory: tuple[StageMemory, ...]) -> bool:
    """Whether reserved memory and the CUDA context of every stage fit on the device."""
    most = max(reserved_bytes(stage.total_bytes).bytes for stage in memory)
    return most + CONTEXT_BYTES <= job.hardware.memory_bytes


def _needs(job: JobConfig) -> tuple[tuple[States, Needs], ...]:
    """States and needs of each stage; equal stages, the first one apart, are computed once."""
    layers, held = layers_of(job), stage_parameters(job)
    known: dict[tuple[int, bool], tuple[States, Needs]] = {}
    found = []
    for stage, first in zip(stages_of(job), first_alike(job), strict=True):
        alike = first, stage.index > 0
        if alike not in known:
            own = held[stage.index]
            states = offload(states_of(job, own), job.training).states
            known[alike] = states, needs_of(job, stage, own, layers)
        found.append(known[alike])
    return tuple(found)


def _stage_memory(
    states: States, needs: Needs, rank: int, job: JobConfig, used: MemoryCalibration
) -> StageMemory:
    workspace = coefficients(job.training.framework).workspace_bytes
    moment = needs.peak(chunks_in_flight(job, rank))
    in_flight = (IN_FLIGHT,) if job.parallel.pp > 1 else ()
    return StageMemory(
        stage=rank,
        weights_bytes=states.weights_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=round(moment.activations_bytes * used.activations),
        transient_bytes=moment.transient_bytes,
        other_bytes=workspace + used.constant_bytes,
        formulas=(*states.formulas, *needs.formulas, *in_flight, PEAK),
    )


# The moment at which a rank needs the most memory on top of its states.

PEAK = Formula(
    "memory.peak",
    "states + max over {the loss, the last layer's backward pass, the embedding's gradient, the"
    " optimizer step} of (activations in flight + what that moment needs)",
    "Korthikanti et al., arXiv:2205.05198, section 4.2.3",
)

MomentName = Literal["loss", "backward", "embedding", "optimizer"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory on top of the states at one moment of the step, in bytes."""

    name: MomentName
    activations_bytes: int
    transient_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.activations_bytes + self.transient_bytes


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a rank needs on top of its states; equal for all equal ranks.

    each_bytes are the activations of one chunk and microbatch in flight, most_bytes the limit for
    all of them together if they are offloaded. The activations of moments come on top of those in
    flight; idle is the moment without any in flight.
    """

    each_bytes: int
    most_bytes: int | None
    moments: tuple[Moment, ...]
    idle: Moment
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    def at(self, in_flight: int) -> tuple[Moment, ...]:
        """The candidate moments for the peak, in the order of the step."""
        return (*(self._with(moment, in_flight) for moment in self.moments), self.idle)

    def peak(self, in_flight: int) -> Moment:
        """The moment of the peak; which of the passes it is does not depend on in_flight."""
        busy = self._with(max(self.moments, key=_total_bytes), in_flight)
        return max(busy, self.idle, key=_total_bytes)

    def _with(self, moment: Moment, in_flight: int) -> Moment:
        held = in_flight * self.each_bytes
        held = held if self.most_bytes is None else min(held, self.most_bytes)
        return Moment(moment.name, held + moment.activations_bytes, moment.transient_bytes)


def _total_bytes(moment: Moment) -> int:
    return moment.total_bytes


def needs_of(
    job: JobConfig, stage: StageConfig, parameters: StageParameters, layers: LayersByKind
) -> Needs:
    """Needs of a stage, and of all equal ones except the first, which sends no input gradient."""
    chunk = stage_activations(job, stage, layers)
    each, kept = _held_each(job, stage, chunk), count_standing_bytes(job, parameters)
    found, formulas = [_backward(job, stage, chunk, kept.bytes)], [chunk.formula, *kept.formulas]
    if stage.head:
        found.insert(0, _loss(job, stage, kept.bytes))
        formulas.append(LOGITS)
    if stage.embedding:
        found.append(Moment("embedding", -each, kept.bytes + embedding_bytes(job)))
    idle, most = Moment("optimizer", 0, optimizer_bytes(job, parameters)), _most(job, stage, chunk)
    if most is not None:
        formulas.append(OFFLOAD)
    return Needs(each, most, tuple(found), idle, tuple(formulas))


def moments_of(
    job: JobConfig, stage: StageConfig, parameters: StageParameters, layers: LayersByKind
) -> tuple[Moment, ...]:
    """The candidate moments for the peak of one rank, in the order of the step."""
    return needs_of(job, stage, parameters, layers).at(chunks_in_flight(job, stage.index))


def _most(job: JobConfig, stage: StageConfig, chunk: StageActivations) -> int | None:
    """Limit of activations on the GPU: offloaded ones stay for two layers."""
    if "activations" not in job.training.offload:
        return None
    return 2 * chunk.held_bytes * len(stage.chunks) // max(1, stage.layers)


def _held_each(job: JobConfig, stage: StageConfig, chunk: StageActivations) -> int:
    """Saved activations of a chunk and microbatch, with its output and the embedding's mask."""
    elements = input_bytes(job) // job.training.activation_bytes
    beside = 0.0
    if job.parallel.pp > 1 and not stage.head:
        beside += elements * coefficients(job.training.framework).pipeline_output
    if stage.embedding and job.training.dropout:
        beside += elements * MASK_BYTES / len(stage.chunks)
    return chunk.held_bytes + round(beside)


def _loss(job: JobConfig, stage: StageConfig, standing: int) -> Moment:
    """The head's backward pass: input and output of the final norm, logits, working memory."""
    saved, working = logits_bytes(job)
    around = head_bytes(job) + handed_on_bytes(job, stage.index)
    return Moment("loss", saved + 2 * input_bytes(job), standing + working + around)


def _backward(job: JobConfig, stage: StageConfig, chunk: StageActivations, standing: int) -> Moment:
    """The last layer's backward pass, after its recomputation if there is any."""
    needs = layer_backward_bytes(job, stage) + chunk.rerun_bytes
    needs += handed_on_bytes(job, stage.index)
    return Moment("backward", 0, standing + needs)


# Error band of a predicted peak, and the memory that the allocator reserves for it.

RESERVED = Formula(
    "memory.reserved",
    "reserved = 1.05 (1.03 to 1.09) allocated",
    "SimuMax, docs/b200: max_reserved over max_allocated of 43 Megatron-LM runs",
)

RESERVED_OVER_ALLOCATED = (1.03, 1.05, 1.09)

CALIBRATED = (0.9, 1.1)
"""Error band of a calibrated peak: measured over predicted."""

CONTEXT_BYTES = 1 << 30
"""Outside PyTorch's allocator: the CUDA context and NCCL's buffers, 0.5 to 2 GiB per rank."""


@dataclass(frozen=True, slots=True)
class BytesBand:
    """Bytes with their error band: low_bytes <= bytes <= high_bytes."""

    bytes: int
    low_bytes: int
    high_bytes: int


def reserved_bytes(allocated_bytes: int) -> BytesBand:
    """Estimate the memory that PyTorch's allocator reserves for a number of allocated bytes."""
    low, middle, high = (round(allocated_bytes * ratio) for ratio in RESERVED_OVER_ALLOCATED)
    return BytesBand(middle, low, high)


def allocated_band(
    job: JobConfig, stage: StageMemory, calibration: MemoryCalibration | None = None
) -> BytesBand:
    """A stage's predicted peak with its error band, from the framework or the calibration."""
    found = coefficients(job.training.framework)
    low, high = CALIBRATED if calibration else (found.low, found.high)
    total = stage.total_bytes
    return BytesBand(total, round(total * low), round(total * high))


# Transient memory: gathered weights, gradients, logits.

GATHERED = Formula(
    "memory.gathered",
    "2 (unit + prefetched unit) gathered, 2 unit of gradients, 4 unit where they are reduced in"
    " fp32; with pipeline stages the whole rank, and its gradients; DeepSpeed 4 largest layer",
    "Zhao et al., PyTorch FSDP, arXiv:2304.11277; torchtitan, arXiv:2410.06511;"
    " DeepSpeed docs, memory.rst",
)

LOGITS = Formula(
    "memory.logits",
    "2TV'/t with a fused loss (its gradient takes their place), else (4 + working) TV'/t;"
    " plus the head's gradient 2V'h/t",
    "Korthikanti et al., arXiv:2205.05198, section 4.3; Hsu et al., Liger Kernel, arXiv:2410.10989",
)

DUMMY = Formula(
    "memory.layer_gradient",
    "2 bytes for each weight of one layer (one buffer per shape) besides the fp32 gradients",
    "Transformer Engine, get_dummy_wgrad",
)


@dataclass(frozen=True, slots=True)
class Standing:
    """Bytes that stay allocated throughout the passes, and their formulas."""

    bytes: int
    formulas: tuple[Formula, ...] = ()


def count_standing_bytes(job: JobConfig, parameters: StageParameters) -> Standing:
    """Count the bytes that stay allocated throughout the passes (GATHERED and DUMMY).

    Under autocast (ddp, huggingface) the 16-bit copies of all weights live as long as the graph,
    and DistributedDataParallel keeps buckets in addition to the gradients.
    """
    if _stays_gathered(job):
        return Standing(_kept_gathered(job, parameters.total), (GATHERED,))
    if job.parallel.zero >= 3:
        return Standing(_gathered(job, parameters.largest_layer), (GATHERED,))
    if job.training.framework == "fsdp2" and job.parallel.zero == 2:
        unit = _unit_gradients(job, parameters.largest_layer)
        return Standing(2 * parameters.total + unit, (GATHERED,))
    if job.training.framework in KEEPS_FP32:
        return Standing(parameters.total * _autocast(job))
    kept = coefficients(job.training.framework).layer_gradient
    if not kept or not _fp32_gradients(job):
        return Standing(0)
    return Standing(round(kept * _one_of_each_shape(job, parameters)), (DUMMY,))


def _autocast(job: JobConfig) -> int:
    return (2 if job.training.dtype != "fp32" else 0) + _buckets(job)


def _buckets(job: JobConfig) -> int:
    """Bytes per gradient in DistributedDataParallel's buckets, a second copy."""
    plain = job.training.framework in KEEPS_FP32 and job.parallel.zero < 2
    return 4 if plain and job.parallel.gradient_ranks > 1 else 0


def _stays_gathered(job: JobConfig) -> bool:
    """Whether weights stay gathered: torchtitan gathers those of a pipeline stage once per step."""
    return job.training.framework == "fsdp2" and job.parallel.zero == 3 and job.parallel.pp > 1


def _kept_gathered(job: JobConfig, parameters: int) -> int:
    """All weights, and the unreduced gradients that microbatches accumulate."""
    sums = job.training.gradient_bytes if job.microbatches > 1 else job.training.weight_bytes
    return parameters * (job.training.weight_bytes + sums)


def _gathered(job: JobConfig, unit: int) -> int:
    """A gathered FSDP unit, the prefetched next one, and the gradients of the first."""
    if job.training.framework == "deepspeed":
        return 2 * 2 * unit
    return 2 * job.training.weight_bytes * unit + _unit_gradients(job, unit)


def _unit_gradients(job: JobConfig, unit: int) -> int:
    reduced = 4 if job.training.framework == "fsdp2" and job.training.gradient_bytes == 4 else 0
    return (job.training.weight_bytes + reduced) * unit


def _fp32_gradients(job: JobConfig) -> bool:
    return job.training.gradient_bytes == 4 and job.training.weight_bytes == 2


def _one_of_each_shape(job: JobConfig, parameters: StageParameters) -> int:
    """Weights of one layer with one of its experts, because all experts have the same shapes."""
    layer = parameters.expert_layer or parameters.dense_layer
    found = layer.attention + layer.mlp
    if parameters.expert_layer is not None and job.model.experts is not None:
        found += layer.experts * job.parallel.ep // job.model.experts.count
        found += parameters.dense_layer.mlp if parameters.dense_layers else 0
    return found


def logits_bytes(job: JobConfig) -> tuple[int, int]:
    """Logits of one microbatch saved for the loss's backward, and its working memory."""
    found = coefficients(job.training.framework)
    logits = job.tokens * (vocabulary_share(job) // job.model.hidden)
    if job.training.fused_loss:
        return logits * job.training.weight_bytes, 0
    working = found.logits_working_split if job.parallel.tp > 1 else found.logits_working
    return round(logits * found.logits_saved), round(logits * working)


def head_bytes(job: JobConfig) -> int:
    """Memory around the head's GEMM: gradients of its weight and its input and, with sequence
    parallelism, the gathered input and the reduced gradient."""
    part = input_bytes(job)
    whole = part * job.parallel.sequence_split
    return _vocabulary_bytes(job) + whole + (whole + part if job.parallel.sequence_split > 1 else 0)


def _vocabulary_bytes(job: JobConfig) -> int:
    """Gradient of the head or embedding, with the gathered weight if that is sharded."""
    each = vocabulary_share(job)
    if job.parallel.zero < 3 or _stays_gathered(job):
        return each * job.training.weight_bytes
    return each * job.training.weight_bytes + _unit_gradients(job, each)


def layer_backward_bytes(job: JobConfig, stage: StageConfig) -> int:
    """Peak working memory of one layer's backward pass, on top of saved activations.

    At the MLP's activation function: gradients of the layer's output and of the first GEMMs (that
    of the activated values replaces the values). With sequence parallelism the peak may be at the
    first GEMM: its gathered input and the gradient of that.
    """
    hidden = input_bytes(job)
    width = job.model.ffn / job.parallel.tp
    if stage.expert_layers and job.model.experts is not None:
        experts = job.model.experts
        hidden += hidden * experts.top_k
        width = experts.top_k * experts.ffn / job.parallel.sequence_split / job.parallel.expert_tp
    each = round(job.tokens * width) * job.training.activation_bytes
    gathered = 2 * input_bytes(job) * job.parallel.sequence_split - each
    activation = 2 * each if job.model.gated else each
    return hidden + (max(activation, gathered) if job.parallel.sequence_split > 1 else activation)


def embedding_bytes(job: JobConfig) -> int:
    """Gradient of the embedding table."""
    return _vocabulary_bytes(job)


def handed_on_bytes(job: JobConfig, rank: int) -> int:
    """The input gradient that a stage sends to the stage before it."""
    return input_bytes(job) if job.parallel.pp > 1 and rank > 0 else 0


def optimizer_bytes(job: JobConfig, parameters: StageParameters) -> int:
    """Working memory of the optimizer step."""
    each = coefficients(job.training.framework).optimizer_working
    shared = round(each * parameters.total / job.parallel.shard_size)
    return shared + _buckets(job) * parameters.total


# Memory that offloading moves from the GPU to the host.

OFFLOAD = Formula(
    "memory.offload",
    "optimizer leaves the GPU (DeepSpeed: its gradients too), parameters and activations likewise;"
    " host of one node P max(4g, 16) 1.5 (ZeRO-2), P 18 (g/N) 1.5 (ZeRO-3)",
    "DeepSpeed docs, memory.rst; Ren et al., ZeRO-Offload, arXiv:2101.06840",
)

SLACK = 1.5
"""DeepSpeed's own factor for additional host memory."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """States that stay on the GPU, and the bytes that one rank moves to the host (or its NVMe)."""

    states: States
    moved_bytes: int


def offload(states: States, recipe: TrainingConfig) -> Offloaded:
    """Remove the offloaded states ("optimizer", "parameters") of one rank from the GPU."""
    stays = states
    if "optimizer" in recipe.offload:
        gradients = 0 if recipe.framework == "deepspeed" else stays.gradients_bytes
        stays = replace(stays, optimizer_bytes=0, gradients_bytes=gradients)
    if "parameters" in recipe.offload:
        stays = replace(stays, weights_bytes=0)
    if stays != states:
        stays = replace(stays, formulas=(*states.formulas, OFFLOAD))
    return Offloaded(stays, states.total_bytes - stays.total_bytes)


def deepspeed_host_bytes(
    parameters: int,
    gpus_per_node: int,
    nodes: int,
    zero: int,
    moved: frozenset[str],
    largest_layer: int | None = None,
) -> int:
    """Host memory of one node in bytes, as DeepSpeed's estimator computes it.

    largest_layer is given if zero.Init builds the model in shards (ZeRO-3); otherwise every process
    starts with an fp32 copy of the whole model.
    """
    whole = 4 * gpus_per_node
    if zero < 3:
        need = max(whole, 16) if "optimizer" in moved else whole
        return round(parameters * need * SLACK)
    each = (18 if "parameters" in moved else 16) / nodes if "optimizer" in moved else 0.0
    if largest_layer is None:
        return round(parameters * max(whole, each) * SLACK)
    if "optimizer" not in moved:
        return round(largest_layer * whole * SLACK)
    return round(parameters * each * SLACK)


# Calibration of the memory model on one measured run.

LEAST = 0.5

MOST = 3.0
"""Limits of the factor on the activations; outside of them a constant is fitted instead."""


@dataclass(frozen=True, slots=True)
class MemoryCalibration:
    """Fitted on one run, named by run: a factor on the activations of every stage, and a constant
    added to the predicted bytes of every rank."""

    run: str
    activations: float
    constant_bytes: int


NONE = MemoryCalibration("", 1.0, 0)


def calibrate_memory(
    predicted: tuple[StageMemory, ...], measured_bytes: tuple[int, ...], run: str
) -> MemoryCalibration:
    """Fit the calibration to measured peaks of allocated bytes: one per stage, or only the largest.

    predicted is the memory of the same job without a calibration. One peak gives the factor; one
    per stage gives factor and constant by least squares. If the factor is outside LEAST..MOST,
    something other than activations is missing, and the difference becomes the constant. Raises
    UsageError for any other number of peaks.
    """
    if len(measured_bytes) == 1:
        found = _of_fullest(predicted, measured_bytes[0])
    elif len(measured_bytes) == len(predicted):
        found = _of_stages(predicted, measured_bytes)
    else:
        given, stages = len(measured_bytes), len(predicted)
        raise UsageError(f"{given} measured peaks for {stages} stages; give 1 or {stages}")
    if LEAST <= found[0] <= MOST:
        return MemoryCalibration(run, found[0], round(found[1]))
    above = max(measured_bytes) - max(stage.total_bytes for stage in predicted)
    return MemoryCalibration(run, 1.0, above)


def _of_fullest(predicted: tuple[StageMemory, ...], measured: int) -> tuple[float, float]:
    """The smallest factor with which any stage reaches the measured peak."""
    factors = [
        (measured - stage.total_bytes) / stage.activations_bytes + 1
        for stage in predicted
        if stage.activations_bytes
    ]
    return min(factors, default=0.0), 0.0


def _of_stages(
    predicted: tuple[StageMemory, ...], measured: tuple[int, ...]
) -> tuple[float, float]:
    """Slope and intercept of the memory other than states over the predicted activations."""
    held = [float(stage.activations_bytes) for stage in predicted]
    rest = [
        total - (stage.total_bytes - stage.activations_bytes)
        for stage, total in zip(predicted, measured, strict=True)
    ]
    mean_held, mean_rest = sum(held) / len(held), sum(rest) / len(rest)
    spread = sum((each - mean_held) ** 2 for each in held)
    if spread == 0:
        return (mean_rest / mean_held if mean_held else 0.0), 0.0
    along = sum((h - mean_held) * (r - mean_rest) for h, r in zip(held, rest, strict=True))
    return along / spread, mean_rest - along / spread * mean_held
