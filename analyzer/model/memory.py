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

# The peak memory of every stage of a job, by what it is for.


def memory_of(
    job: JobConfig, calibration: MemoryCalibration | None = None
) -> tuple[StageMemory, ...]:
    """Peak bytes allocated on one rank of every pp coordinate.

    activations and transient are those of the stage's worst moment (Needs); other holds
    workspaces, and what the calibration adds.
    """
    learned = job.hardware.learned
    own = MemoryCalibration("", learned.activations, learned.constant_bytes)
    used, needs = calibration or own, _needs(job)
    return tuple(
        _stage_memory(states, each, rank, job, used) for rank, (states, each) in enumerate(needs)
    )


def fits(job: JobConfig, memory: tuple[StageMemory, ...]) -> bool:
    """Whether every stage's reserved bytes and the context are within the device's memory."""
    most = max(reserved_bytes(stage.total_bytes).bytes for stage in memory)
    return most + CONTEXT_BYTES <= job.hardware.memory_bytes


def _needs(job: JobConfig) -> tuple[tuple[States, Needs], ...]:
    """Of each stage; those that hold the same are weighed once, but for the first."""
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


# The moment at which a rank needs the most memory beside its states.

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
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

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


def needs_of(
    job: JobConfig, stage: StageConfig, parameters: StageParameters, layers: LayersByKind
) -> Needs:
    """The same for all ranks that hold the same, but for the first, which hands nothing back."""
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
    """Every moment of one rank that can be the peak, in the order of the step."""
    return needs_of(job, stage, parameters, layers).at(chunks_in_flight(job, stage.index))


def _most(job: JobConfig, stage: StageConfig, chunk: StageActivations) -> int | None:
    """Of offloaded activations those of two layers stay."""
    if "activations" not in job.training.offload:
        return None
    return 2 * chunk.held_bytes * len(stage.chunks) // max(1, stage.layers)


def _held_each(job: JobConfig, stage: StageConfig, chunk: StageActivations) -> int:
    """One chunk of one microbatch, with the output it hands on and its embedding's mask."""
    elements = input_bytes(job) // job.training.activation_bytes
    beside = 0.0
    if job.parallel.pp > 1 and not stage.head:
        beside += elements * coefficients(job.training.framework).pipeline_output
    if stage.embedding and job.training.dropout:
        beside += elements * MASK_BYTES / len(stage.chunks)
    return chunk.held_bytes + round(beside)


def _loss(job: JobConfig, stage: StageConfig, standing: int) -> Moment:
    """The head's backward pass: final norm in and out, logits, and what transient adds."""
    saved, working = logits_bytes(job)
    around = head_bytes(job) + handed_on_bytes(job, stage.index)
    return Moment("loss", saved + 2 * input_bytes(job), standing + working + around)


def _backward(job: JobConfig, stage: StageConfig, chunk: StageActivations, standing: int) -> Moment:
    """The last layer's backward pass, after it has run forward again where that is asked."""
    needs = layer_backward_bytes(job, stage) + chunk.rerun_bytes
    needs += handed_on_bytes(job, stage.index)
    return Moment("backward", 0, standing + needs)


# How sure a predicted peak is, and what the allocator takes from the device for it.

RESERVED = Formula(
    "memory.reserved",
    "reserved = 1.05 (1.03 to 1.09) allocated",
    "SimuMax, docs/b200: max_reserved over max_allocated of 43 Megatron-LM runs",
)

RESERVED_OVER_ALLOCATED = (1.03, 1.05, 1.09)

CALIBRATED = (0.9, 1.1)
"""What a measured peak may be over a calibrated one."""

CONTEXT_BYTES = 1 << 30
"""Outside PyTorch's allocator: the CUDA context and NCCL's buffers, 0.5 to 2 GiB a rank."""


@dataclass(frozen=True, slots=True)
class BytesBand:
    """Bytes with what they may well be instead: low_bytes <= bytes <= high_bytes."""

    bytes: int
    low_bytes: int
    high_bytes: int


def reserved_bytes(allocated_bytes: int) -> BytesBand:
    """What PyTorch's allocator takes from the device to serve so many allocated bytes."""
    low, middle, high = (round(allocated_bytes * ratio) for ratio in RESERVED_OVER_ALLOCATED)
    return BytesBand(middle, low, high)


def allocated_band(
    job: JobConfig, stage: StageMemory, calibration: MemoryCalibration | None = None
) -> BytesBand:
    """A stage's predicted peak with what a measurement may show, by framework or calibration."""
    found = coefficients(job.training.framework)
    low, high = CALIBRATED if calibration else (found.low, found.high)
    total = stage.total_bytes
    return BytesBand(total, round(total * low), round(total * high))


# What a rank holds only while something runs: gathered weights, gradients, logits.

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
    " beside them the head's gradient 2V'h/t",
    "Korthikanti et al., arXiv:2205.05198, section 4.3; Hsu et al., Liger Kernel, arXiv:2410.10989",
)

DUMMY = Formula(
    "memory.layer_gradient",
    "2 bytes for each weight of one layer (one buffer a shape) beside the fp32 gradients",
    "Transformer Engine, get_dummy_wgrad",
)


@dataclass(frozen=True, slots=True)
class Standing:
    """Bytes that stay allocated throughout the passes, and what they are counted by."""

    bytes: int
    formulas: tuple[Formula, ...] = ()


def count_standing_bytes(job: JobConfig, parameters: StageParameters) -> Standing:
    """What stays allocated throughout the passes: see GATHERED and DUMMY.

    Under autocast (ddp, huggingface) every weight's 16-bit copy lives as long as the graph, and
    DistributedDataParallel has buckets beside the gradients.
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
    """Bytes of each gradient that DistributedDataParallel holds a second time."""
    plain = job.training.framework in KEEPS_FP32 and job.parallel.zero < 2
    return 4 if plain and job.parallel.gradient_ranks > 1 else 0


def _stays_gathered(job: JobConfig) -> bool:
    """torchtitan gathers the weights of a pipeline stage once a step."""
    return job.training.framework == "fsdp2" and job.parallel.zero == 3 and job.parallel.pp > 1


def _kept_gathered(job: JobConfig, parameters: int) -> int:
    """All weights, and the gradients that microbatches sum before they are reduced."""
    sums = job.training.gradient_bytes if job.microbatches > 1 else job.training.weight_bytes
    return parameters * (job.training.weight_bytes + sums)


def _gathered(job: JobConfig, unit: int) -> int:
    """A gathered unit, the next one, and the gradients of the first."""
    if job.training.framework == "deepspeed":
        return 2 * 2 * unit
    return 2 * job.training.weight_bytes * unit + _unit_gradients(job, unit)


def _unit_gradients(job: JobConfig, unit: int) -> int:
    reduced = 4 if job.training.framework == "fsdp2" and job.training.gradient_bytes == 4 else 0
    return (job.training.weight_bytes + reduced) * unit


def _fp32_gradients(job: JobConfig) -> bool:
    return job.training.gradient_bytes == 4 and job.training.weight_bytes == 2


def _one_of_each_shape(job: JobConfig, parameters: StageParameters) -> int:
    """Weights of one layer, of one expert in it: the experts of a rank share a shape."""
    layer = parameters.expert_layer or parameters.dense_layer
    found = layer.attention + layer.mlp
    if parameters.expert_layer is not None and job.model.experts is not None:
        found += layer.experts * job.parallel.ep // job.model.experts.count
        found += parameters.dense_layer.mlp if parameters.dense_layers else 0
    return found


def logits_bytes(job: JobConfig) -> tuple[int, int]:
    """The logits of one microbatch kept for the loss's backward pass, and what it needs beside."""
    found = coefficients(job.training.framework)
    logits = job.tokens * (vocabulary_share(job) // job.model.hidden)
    if job.training.fused_loss:
        return logits * job.training.weight_bytes, 0
    working = found.logits_working_split if job.parallel.tp > 1 else found.logits_working
    return round(logits * found.logits_saved), round(logits * working)


def head_bytes(job: JobConfig) -> int:
    """Around the head's product: the gradient of its weight, of its input, and, with sequence
    parallelism, the gathered input and the reduced gradient."""
    part = input_bytes(job)
    whole = part * job.parallel.sequence_split
    return _vocabulary_bytes(job) + whole + (whole + part if job.parallel.sequence_split > 1 else 0)


def _vocabulary_bytes(job: JobConfig) -> int:
    """The gradient of the head or embedding, with the gathered weight where that is sharded."""
    each = vocabulary_share(job)
    if job.parallel.zero < 3 or _stays_gathered(job):
        return each * job.training.weight_bytes
    return each * job.training.weight_bytes + _unit_gradients(job, each)


def layer_backward_bytes(job: JobConfig, stage: StageConfig) -> int:
    """The most that the backward pass of one layer needs beside what it saved.

    At the activation of the MLP: the gradient of the layer's output and of the first products (that
    of the activated values takes the place of the values, which are no longer needed). With
    sequence parallelism, perhaps at the first product: its gathered input and that one's gradient.
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
    """The embedding's own gradient, as wide as the table."""
    return _vocabulary_bytes(job)


def handed_on_bytes(job: JobConfig, rank: int) -> int:
    """The input gradient that a stage still sends to the stage before it."""
    return input_bytes(job) if job.parallel.pp > 1 and rank > 0 else 0


def optimizer_bytes(job: JobConfig, parameters: StageParameters) -> int:
    """What the optimizer step needs beside its states."""
    each = coefficients(job.training.framework).optimizer_working
    shared = round(each * parameters.total / job.parallel.shard_size)
    return shared + _buckets(job) * parameters.total


# What offloading moves from the GPU to the host, and how much the host must hold.

OFFLOAD = Formula(
    "memory.offload",
    "optimizer leaves the GPU (DeepSpeed: its gradients too), parameters and activations likewise;"
    " host of one node P max(4g, 16) 1.5 (ZeRO-2), P 18 (g/N) 1.5 (ZeRO-3)",
    "DeepSpeed docs, memory.rst; Ren et al., ZeRO-Offload, arXiv:2101.06840",
)

SLACK = 1.5
"""DeepSpeed's own factor for what the host needs beside the states."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What stays on the GPU, and the bytes that one rank leaves on the host (or its NVMe)."""

    states: States
    moved_bytes: int


def offload(states: States, recipe: TrainingConfig) -> Offloaded:
    """States of one rank after recipe.offload ("optimizer", "parameters") has taken its share."""
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
    """Host memory of one node by DeepSpeed's estimator, in bytes.

    largest_layer is given where zero.Init builds the model in shards (ZeRO-3); otherwise every
    process first holds an fp32 copy of the whole.
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


# What one measured run teaches about the memory of other runs of its kind.

LEAST, MOST = 0.5, 3.0
"""What a factor on the activations may be; what lies outside is taken for a constant."""


@dataclass(frozen=True, slots=True)
class MemoryCalibration:
    """Learned from one run, which run names: a factor on the activations of every stage, and
    bytes that every rank needs beside what is predicted."""

    run: str
    activations: float
    constant_bytes: int


NONE = MemoryCalibration("", 1.0, 0)


def calibrate_memory(
    predicted: tuple[StageMemory, ...], measured_bytes: tuple[int, ...], run: str
) -> MemoryCalibration:
    """From a measured peak of allocated bytes a stage, or the one of the fullest stage.

    predicted is memory_of the same job without a calibration. One number gives the factor alone; a
    number a stage gives factor and constant by least squares. A factor outside LEAST..MOST says
    that something else than activations is missing: then the difference becomes the constant.
    Raises UsageError where there are neither one number nor as many as stages.
    """
    if len(measured_bytes) == 1:
        found = _of_fullest(predicted, measured_bytes[0])
    elif len(measured_bytes) == len(predicted):
        found = _of_stages(predicted, measured_bytes)
    else:
        given, stages = len(measured_bytes), len(predicted)
        raise UsageError(f"{given} measured peaks for {stages} stages: give 1 or {stages}")
    if LEAST <= found[0] <= MOST:
        return MemoryCalibration(run, found[0], round(found[1]))
    above = max(measured_bytes) - max(stage.total_bytes for stage in predicted)
    return MemoryCalibration(run, 1.0, above)


def _of_fullest(predicted: tuple[StageMemory, ...], measured: int) -> tuple[float, float]:
    """The factor at which the first stage reaches the measured peak."""
    factors = [
        (measured - stage.total_bytes) / stage.activations_bytes + 1
        for stage in predicted
        if stage.activations_bytes
    ]
    return min(factors, default=0.0), 0.0


def _of_stages(
    predicted: tuple[StageMemory, ...], measured: tuple[int, ...]
) -> tuple[float, float]:
    """Slope and intercept of what is not states over the predicted activations."""
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
