"""Peak memory of each pipeline stage, by category, with its error band."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_ops import count_kv_width, count_query_width, is_torch_ring
from stepsplit.analyzer.model.comm_volume import find_reshard_policy, is_kept_gathered
from stepsplit.analyzer.model.config import (
    JobConfig,
    StageConfig,
    TrainingConfig,
    find_equal_stages,
    list_stages,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import (
    FP32_WEIGHT_FRAMEWORKS,
    MASK_BYTES,
    LayersByKind,
    StageActivations,
    States,
    compute_input_bytes,
    compute_layers_by_kind,
    compute_stage_activations,
    compute_states,
    count_chunks_in_flight,
    count_moments_bytes,
    load_coefficients,
    uses_foreach,
)
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    count_stage_parameters,
    count_vocabulary_parameters,
)
from stepsplit.analyzer.model.prediction import StageMemory
from stepsplit.analyzer.model.schedule import IN_FLIGHT

# The peak memory of every stage of a job, by category.


def compute_memory(
    job: JobConfig, calibration: MemoryCalibration | None = None
) -> tuple[StageMemory, ...]:
    """Peak allocated bytes of one rank of every pipeline stage.

    activations and transient are those at the moment of the peak; other is the framework's
    workspaces and the constant of the calibration.
    """
    learned = job.hardware.learned
    job_calibration = MemoryCalibration("", learned.activations, learned.constant_bytes)
    factors, needs = calibration or job_calibration, _compute_states_and_needs(job)
    return tuple(
        _build_stage_memory(states, each, rank, job, factors)
        for rank, (states, each) in enumerate(needs)
    )


def compute_peak_bytes(
    job: JobConfig,
    states: tuple[States, ...] | None = None,
    layers: LayersByKind | None = None,
) -> int:
    """The largest total_bytes of compute_memory, in less time.

    states and layers are those of the job, computed here if the caller does not have them.
    """
    learned, peaks = job.hardware.learned, {}
    for rank, (held, needs) in enumerate(_compute_states_and_needs(job, states, layers)):
        in_flight = count_chunks_in_flight(job, rank)
        if (alike := (id(needs), in_flight)) not in peaks:
            moment = needs.find_peak(in_flight)
            saved_bytes = round(moment.activations_bytes * learned.activations)
            peaks[alike] = held.total_bytes + saved_bytes + moment.transient_bytes
    return max(peaks.values()) + _get_workspace_bytes(job) + learned.constant_bytes


def _get_workspace_bytes(job: JobConfig) -> int:
    return load_coefficients(job.training.framework).workspace_bytes


def list_stage_states(job: JobConfig) -> tuple[States, ...]:
    """Weights, gradients and optimizer states on the device, by stage."""
    params, cache = count_stage_parameters(job), dict[int, States]()
    firsts = find_equal_stages(job)
    for first in {*firsts}:
        cache[first] = apply_offload(compute_states(job, params[first]), job.training).states
    return tuple(cache[first] for first in firsts)


def is_within_memory(job: JobConfig, memory: tuple[StageMemory, ...]) -> bool:
    """Whether reserved memory and the CUDA context of every stage fit on the device."""
    return is_peak_within_memory(job, max(stage.total_bytes for stage in memory))


def is_peak_within_memory(job: JobConfig, peak_bytes: int) -> bool:
    """Whether the reserved memory of a peak and the CUDA context fit on the device."""
    reserved_bytes = estimate_reserved_bytes(peak_bytes).bytes
    return reserved_bytes + CONTEXT_BYTES <= job.hardware.memory_bytes


def _compute_states_and_needs(
    job: JobConfig,
    states: tuple[States, ...] | None = None,
    layers: LayersByKind | None = None,
) -> tuple[tuple[States, MemoryNeeds], ...]:
    """States and needs of each stage; needs of equal stages, the first one apart, are computed
    once."""
    layers, stage_params = layers or compute_layers_by_kind(job), count_stage_parameters(job)
    cache: dict[tuple[int, bool], MemoryNeeds] = {}
    needs = []
    for stage, first in zip(list_stages(job), find_equal_stages(job), strict=True):
        alike = first, stage.index > 0
        if alike not in cache:
            cache[alike] = compute_needs(job, stage, stage_params[stage.index], layers)
        needs.append(cache[alike])
    return tuple(zip(states or list_stage_states(job), needs, strict=True))


def _build_stage_memory(
    states: States, needs: MemoryNeeds, rank: int, job: JobConfig, calibration: MemoryCalibration
) -> StageMemory:
    moment = needs.find_peak(count_chunks_in_flight(job, rank))
    in_flight = (IN_FLIGHT,) if job.parallel.pp > 1 else ()
    return StageMemory(
        stage=rank,
        weights_bytes=states.weights_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=round(moment.activations_bytes * calibration.activations),
        transient_bytes=moment.transient_bytes,
        other_bytes=_get_workspace_bytes(job) + calibration.constant_bytes,
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
class MemoryNeeds:
    """Memory that a rank needs on top of its states; equal for all equal ranks.

    each_bytes are the activations of one chunk and microbatch in flight, most_bytes the limit for
    all of them together if they are offloaded. The activations of moments come on top of those in
    flight; idle is the moment without any in flight.
    """

    chunk_bytes: int
    limit_bytes: int | None
    moments: tuple[Moment, ...]
    idle: Moment
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    def list_moments(self, in_flight: int) -> tuple[Moment, ...]:
        """The candidate moments for the peak, in the order of the step."""
        return (*(self._add_activations(moment, in_flight) for moment in self.moments), self.idle)

    def find_peak(self, in_flight: int) -> Moment:
        """The moment of the peak; which of the passes it is does not depend on in_flight."""
        busy = self._add_activations(max(self.moments, key=_sum_total_bytes), in_flight)
        return max(busy, self.idle, key=_sum_total_bytes)

    def _add_activations(self, moment: Moment, in_flight: int) -> Moment:
        saved_bytes = in_flight * self.chunk_bytes
        saved_bytes = (
            saved_bytes if self.limit_bytes is None else min(saved_bytes, self.limit_bytes)
        )
        return Moment(moment.name, saved_bytes + moment.activations_bytes, moment.transient_bytes)


def _sum_total_bytes(moment: Moment) -> int:
    return moment.total_bytes


def compute_needs(
    job: JobConfig, stage: StageConfig, parameters: StageParameters, layers: LayersByKind
) -> MemoryNeeds:
    """Needs of a stage, and of all equal ones except the first, which sends no input gradient."""
    chunk = compute_stage_activations(job, stage, layers)
    chunk_bytes, persistent = (
        _compute_chunk_bytes(job, stage, chunk),
        count_persistent_bytes(job, parameters),
    )
    moments, formulas = (
        [_build_backward_moment(job, stage, chunk, persistent.bytes)],
        [chunk.formula, *persistent.formulas],
    )
    if stage.head:
        moments.insert(0, _build_loss_moment(job, stage, persistent.bytes))
        formulas.append(LOGITS)
    if stage.embedding:
        moments.append(
            Moment("embedding", -chunk_bytes, persistent.bytes + compute_embedding_bytes(job))
        )
    idle, limit_bytes = (
        Moment("optimizer", 0, compute_optimizer_bytes(job, parameters)),
        _compute_offload_limit(job, stage, chunk),
    )
    if limit_bytes is not None:
        formulas.append(OFFLOAD)
    if is_torch_ring(job):
        formulas.append(RING)
    return MemoryNeeds(chunk_bytes, limit_bytes, tuple(moments), idle, tuple(formulas))


def list_stage_moments(
    job: JobConfig, stage: StageConfig, parameters: StageParameters, layers: LayersByKind
) -> tuple[Moment, ...]:
    """The candidate moments for the peak of one rank, in the order of the step."""
    return compute_needs(job, stage, parameters, layers).list_moments(
        count_chunks_in_flight(job, stage.index)
    )


def _compute_offload_limit(
    job: JobConfig, stage: StageConfig, chunk: StageActivations
) -> int | None:
    """Limit of activations on the GPU: offloaded ones stay for two layers."""
    if "activations" not in job.training.offload:
        return None
    return 2 * chunk.saved_bytes * len(stage.chunks) // max(1, stage.layers)


def _compute_chunk_bytes(job: JobConfig, stage: StageConfig, chunk: StageActivations) -> int:
    """Saved activations of a chunk and microbatch, with its output and the embedding's mask."""
    elements = compute_input_bytes(job) // job.training.activation_bytes
    extra = 0.0
    if job.parallel.pp > 1 and not stage.head:
        extra += elements * load_coefficients(job.training.framework).pipeline_output
    if stage.embedding and job.training.dropout:
        extra += elements * MASK_BYTES / len(stage.chunks)
    return chunk.saved_bytes + round(extra)


def _build_loss_moment(job: JobConfig, stage: StageConfig, persistent_bytes: int) -> Moment:
    """The head's backward pass: input and output of the final norm, logits, working memory."""
    saved, working = compute_logits_bytes(job)
    around = compute_head_bytes(job) + compute_input_gradient_bytes(job, stage.index)
    return Moment("loss", saved + 2 * compute_input_bytes(job), persistent_bytes + working + around)


def _build_backward_moment(
    job: JobConfig, stage: StageConfig, chunk: StageActivations, persistent_bytes: int
) -> Moment:
    """The last layer's backward pass, after its recomputation if there is any."""
    needs = compute_layer_backward_bytes(job, stage) + chunk.recompute_bytes
    needs += compute_input_gradient_bytes(job, stage.index) + _count_ring_bytes(job)
    return Moment("backward", 0, persistent_bytes + needs)


RING = Formula(
    "memory.context_torch",
    "2 c K + 12 K + 4 Q + 2 (Q + K), Q and K elements of a rank's queries and of its keys and"
    " values: all ranks' keys and values, three fp32 copies of their gradients, the queries'"
    " gradients, and those of one piece",
    "PyTorch 2.13, _context_parallel/_attention.py, _templated_ring_attention_backward",
)


def _count_ring_bytes(job: JobConfig) -> int:
    """Memory of the backward of torch's context_parallel (RING)."""
    if not is_torch_ring(job):
        return 0
    cp, size = job.parallel.cp, job.training.activation_bytes
    queries, pairs = count_query_width(job), count_kv_width(job)
    return job.tokens * (size * cp * pairs + 12 * pairs + 4 * queries + size * (queries + pairs))


# Error band of a predicted peak, and the memory that the allocator reserves for it.

RESERVED = Formula(
    "memory.reserved",
    "reserved = 1.05 (1.03 to 1.09) allocated",
    "SimuMax, docs/b200: max_reserved over max_allocated of 43 Megatron-LM runs",
)

RESERVED_OVER_ALLOCATED = (1.03, 1.05, 1.09)

CALIBRATED_BAND = (0.9, 1.1)
"""Error band of a calibrated peak: measured over predicted."""

CONTEXT_BYTES = 1 << 30
"""Outside PyTorch's allocator: the CUDA context and NCCL's buffers, 0.5 to 2 GiB per rank."""


@dataclass(frozen=True, slots=True)
class BytesBand:
    """Bytes with their error band: low_bytes <= bytes <= high_bytes."""

    bytes: int
    low_bytes: int
    high_bytes: int


def estimate_reserved_bytes(allocated_bytes: int) -> BytesBand:
    """Estimate the memory that PyTorch's allocator reserves for a number of allocated bytes."""
    low, middle, high = (round(allocated_bytes * ratio) for ratio in RESERVED_OVER_ALLOCATED)
    return BytesBand(middle, low, high)


def estimate_allocated_band(
    job: JobConfig, stage: StageMemory, calibration: MemoryCalibration | None = None
) -> BytesBand:
    """A stage's predicted peak with its error band, from the framework or the calibration."""
    known = load_coefficients(job.training.framework)
    low, high = CALIBRATED_BAND if calibration else (known.low, known.high)
    total = stage.total_bytes
    return BytesBand(total, round(total * low), round(total * high))


def add_allocated_band(job: JobConfig, stage: StageMemory) -> StageMemory:
    """The memory of a stage with the error band of its peak."""
    band = estimate_allocated_band(job, stage)
    return replace(stage, total_bytes_low=band.low_bytes, total_bytes_high=band.high_bytes)


# Transient memory: gathered weights, gradients, logits.

GATHERED = Formula(
    "memory.gathered",
    "2 (unit + prefetched unit) gathered, all units if none is freed before its backward, 2 unit of"
    " gradients, 4 unit where they are reduced in fp32; with pipeline stages the gradients of the"
    " whole rank, and its weights unless they are freed after each forward pass; DeepSpeed"
    " 4 largest layer",
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
class PersistentBytes:
    """Bytes that stay allocated throughout the passes, and their formulas."""

    bytes: int
    formulas: tuple[Formula, ...] = ()


def count_persistent_bytes(job: JobConfig, parameters: StageParameters) -> PersistentBytes:
    """Count the bytes that stay allocated throughout the passes (GATHERED and DUMMY).

    Under autocast (ddp, huggingface) the 16-bit copies of all weights live as long as the graph,
    and DistributedDataParallel keeps buckets in addition to the gradients.
    """
    if _is_gathered_once(job):
        gathered = job.training.weight_bytes * parameters.total
        return PersistentBytes(gathered + _count_sum_bytes(job, parameters.total), (GATHERED,))
    if _sums_unreduced(job):
        unit = _count_gathered_unit_bytes(job, parameters.largest_layer)
        return PersistentBytes(unit + _count_sum_bytes(job, parameters.total), (GATHERED,))
    if job.is_fsdp and find_reshard_policy(job) == "never":
        unit = _count_unit_gradient_bytes(job, parameters.largest_layer)
        gathered = job.training.weight_bytes * parameters.total
        return PersistentBytes(gathered + unit, (GATHERED,))
    if job.parallel.zero >= 3:
        return PersistentBytes(
            _count_gathered_unit_bytes(job, parameters.largest_layer), (GATHERED,)
        )
    if job.training.framework in FP32_WEIGHT_FRAMEWORKS:
        return PersistentBytes(parameters.total * _count_autocast_bytes(job))
    layer_copies = load_coefficients(job.training.framework).layer_gradient
    if not layer_copies or not _has_fp32_gradients(job):
        return PersistentBytes(0)
    return PersistentBytes(round(layer_copies * _count_distinct_weights(job, parameters)), (DUMMY,))


def _count_autocast_bytes(job: JobConfig) -> int:
    return (2 if job.training.dtype != "fp32" else 0) + _count_bucket_bytes(job)


def _count_bucket_bytes(job: JobConfig) -> int:
    """Bytes per gradient in DistributedDataParallel's buckets, a second copy."""
    plain = job.training.framework in FP32_WEIGHT_FRAMEWORKS and job.parallel.zero < 2
    return 4 if plain and job.parallel.gradient_ranks > 1 else 0


def _is_gathered_once(job: JobConfig) -> bool:
    """Whether weights stay gathered: torchtitan gathers those of a pipeline stage once per step,
    unless they are freed after every forward pass."""
    return _sums_unreduced(job) and is_kept_gathered(job)


def _sums_unreduced(job: JobConfig) -> bool:
    """Whether microbatches add up whole gradients, which a pipeline of FSDP2 reduces once."""
    return job.training.framework == "fsdp2" and job.parallel.zero == 3 and job.parallel.pp > 1


def _count_sum_bytes(job: JobConfig, parameters: int) -> int:
    """The unreduced gradients that microbatches accumulate."""
    sums = job.training.gradient_bytes if job.microbatches > 1 else job.training.weight_bytes
    return parameters * sums


def _count_gathered_unit_bytes(job: JobConfig, unit: int) -> int:
    """A gathered FSDP unit, the prefetched next one, and the gradients of the first."""
    if job.training.framework == "deepspeed":
        return 2 * 2 * unit
    return 2 * job.training.weight_bytes * unit + _count_unit_gradient_bytes(job, unit)


def _count_unit_gradient_bytes(job: JobConfig, unit: int) -> int:
    reduced = 4 if job.training.framework == "fsdp2" and job.training.gradient_bytes == 4 else 0
    return (job.training.weight_bytes + reduced) * unit


def _has_fp32_gradients(job: JobConfig) -> bool:
    return job.training.gradient_bytes == 4 and job.training.weight_bytes == 2


def _count_distinct_weights(job: JobConfig, parameters: StageParameters) -> int:
    """Weights of one layer with one of its experts, because all experts have the same shapes."""
    layer = parameters.expert_layer or parameters.dense_layer
    count = layer.attention + layer.mlp
    if parameters.expert_layer is not None and job.model.experts is not None:
        count += layer.experts * job.parallel.ep // job.model.experts.count
        count += parameters.dense_layer.mlp if parameters.dense_layers else 0
    return count


def compute_logits_bytes(job: JobConfig) -> tuple[int, int]:
    """Logits of one microbatch saved for the loss's backward, and its working memory."""
    known = load_coefficients(job.training.framework)
    logits = job.tokens * (count_vocabulary_parameters(job) // job.model.hidden)
    if job.training.fused_loss:
        return logits * job.training.weight_bytes, 0
    working = known.logits_working_split if job.parallel.tp > 1 else known.logits_working
    return round(logits * known.logits_saved), round(logits * working)


def compute_head_bytes(job: JobConfig) -> int:
    """Memory around the head's GEMM: gradients of its weight and its input and, with sequence
    parallelism, the gathered input and the reduced gradient."""
    own = compute_input_bytes(job)
    whole = own * job.parallel.sequence_split
    return (
        _compute_vocabulary_bytes(job)
        + whole
        + (whole + own if job.parallel.sequence_split > 1 else 0)
    )


def _compute_vocabulary_bytes(job: JobConfig) -> int:
    """Gradient of the head or embedding, with the gathered weight if that is sharded."""
    parameters = count_vocabulary_parameters(job)
    if job.parallel.zero < 3 or _is_gathered_once(job):
        return parameters * job.training.weight_bytes
    return parameters * job.training.weight_bytes + _count_unit_gradient_bytes(job, parameters)


def compute_layer_backward_bytes(job: JobConfig, stage: StageConfig) -> int:
    """Peak working memory of one layer's backward pass, on top of saved activations.

    At the MLP's activation function: gradients of the layer's output and of the first GEMMs (that
    of the activated values replaces the values). With sequence parallelism the peak may be at the
    first GEMM: its gathered input and the gradient of that.
    """
    hidden = compute_input_bytes(job)
    width = job.model.ffn / job.parallel.tp
    if stage.expert_layers and job.model.experts is not None:
        experts = job.model.experts
        hidden += hidden * experts.top_k
        width = experts.top_k * experts.ffn / job.parallel.sequence_split / job.parallel.expert_tp
    width_bytes = round(job.tokens * width) * job.training.activation_bytes
    gathered = 2 * compute_input_bytes(job) * job.parallel.sequence_split - width_bytes
    activation = 2 * width_bytes if job.model.gated else width_bytes
    return hidden + (max(activation, gathered) if job.parallel.sequence_split > 1 else activation)


def compute_embedding_bytes(job: JobConfig) -> int:
    """Gradient of the embedding table."""
    return _compute_vocabulary_bytes(job)


def compute_input_gradient_bytes(job: JobConfig, rank: int) -> int:
    """The input gradient that a stage sends to the stage before it."""
    return compute_input_bytes(job) if job.parallel.pp > 1 and rank > 0 else 0


def compute_optimizer_bytes(job: JobConfig, parameters: StageParameters) -> int:
    """Working memory of the optimizer step: lists of tensors need the root of a moment."""
    working_bytes = 0
    if uses_foreach(job.training):
        each_bytes = count_moments_bytes(job.training) / 2
        working_bytes = round(each_bytes * parameters.total / job.parallel.shard_size)
    return working_bytes + _count_bucket_bytes(job) * parameters.total


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
    offloaded_bytes: int


def apply_offload(states: States, training: TrainingConfig) -> Offloaded:
    """Remove the offloaded states ("optimizer", "parameters") of one rank from the GPU."""
    remaining = states
    if "optimizer" in training.offload:
        gradients = 0 if training.framework == "deepspeed" else remaining.gradients_bytes
        remaining = replace(remaining, optimizer_bytes=0, gradients_bytes=gradients)
    if "parameters" in training.offload:
        remaining = replace(remaining, weights_bytes=0)
    if remaining != states:
        remaining = replace(remaining, formulas=(*states.formulas, OFFLOAD))
    return Offloaded(remaining, states.total_bytes - remaining.total_bytes)


def estimate_deepspeed_host_bytes(
    parameters: int,
    gpus_per_node: int,
    nodes: int,
    zero: int,
    offloaded: frozenset[str],
    largest_layer: int | None = None,
) -> int:
    """Host memory of one node in bytes, as DeepSpeed's estimator computes it.

    largest_layer is given if zero.Init builds the model in shards (ZeRO-3); otherwise every process
    starts with an fp32 copy of the whole model.
    """
    fp32_bytes = 4 * gpus_per_node
    if zero < 3:
        host_bytes = max(fp32_bytes, 16) if "optimizer" in offloaded else fp32_bytes
        return round(parameters * host_bytes * SLACK)
    sharded_bytes = (
        (18 if "parameters" in offloaded else 16) / nodes if "optimizer" in offloaded else 0.0
    )
    if largest_layer is None:
        return round(parameters * max(fp32_bytes, sharded_bytes) * SLACK)
    if "optimizer" not in offloaded:
        return round(largest_layer * fp32_bytes * SLACK)
    return round(parameters * sharded_bytes * SLACK)


# Calibration of the memory model on one measured run.

MIN_FACTOR = 0.5

MAX_FACTOR = 3.0
"""Limits of the factor on the activations; outside of them a constant is fitted instead."""


@dataclass(frozen=True, slots=True)
class MemoryCalibration:
    """Fitted on one run, named by run: a factor on the activations of every stage, and a constant
    added to the predicted bytes of every rank."""

    run: str
    activations: float
    constant_bytes: int


NO_CALIBRATION = MemoryCalibration("", 1.0, 0)


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
        fitted = _fit_fullest_stage(predicted, measured_bytes[0])
    elif len(measured_bytes) == len(predicted):
        fitted = _fit_stages(predicted, measured_bytes)
    else:
        given, stages = len(measured_bytes), len(predicted)
        raise UsageError(f"{given} measured peaks for {stages} stages; give 1 or {stages}")
    if MIN_FACTOR <= fitted[0] <= MAX_FACTOR:
        return MemoryCalibration(run, fitted[0], round(fitted[1]))
    above = max(measured_bytes) - max(stage.total_bytes for stage in predicted)
    return MemoryCalibration(run, 1.0, above)


def _fit_fullest_stage(predicted: tuple[StageMemory, ...], measured: int) -> tuple[float, float]:
    """The smallest factor with which any stage reaches the measured peak."""
    factors = [
        (measured - stage.total_bytes) / stage.activations_bytes + 1
        for stage in predicted
        if stage.activations_bytes
    ]
    return min(factors, default=0.0), 0.0


def _fit_stages(
    predicted: tuple[StageMemory, ...], measured: tuple[int, ...]
) -> tuple[float, float]:
    """Slope and intercept of the memory other than states over the predicted activations."""
    activations = [float(stage.activations_bytes) for stage in predicted]
    other_bytes = [
        total - (stage.total_bytes - stage.activations_bytes)
        for stage, total in zip(predicted, measured, strict=True)
    ]
    mean_activations, mean_rest = (
        sum(activations) / len(activations),
        sum(other_bytes) / len(other_bytes),
    )
    variance = sum((each - mean_activations) ** 2 for each in activations)
    if variance == 0:
        return (mean_rest / mean_activations if mean_activations else 0.0), 0.0
    covariance = sum(
        (h - mean_activations) * (r - mean_rest)
        for h, r in zip(activations, other_bytes, strict=True)
    )
    return covariance / variance, mean_rest - covariance / variance * mean_activations
