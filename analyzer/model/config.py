"""The config of a training job: model, parallel layout, training recipe and hardware."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal, TypeVar, get_args

# What a file may state of a field: read by config_decode.

MOST = 10**18

KEY = "key"
"""Of a field's metadata: its key in a file where that is not the field's name, "" for no key."""


@dataclass(frozen=True, slots=True)
class NumberLimits:
    """The least and the most that a file may state for a number; noun says what of the few it is.

    Without limits a whole number is at least 1, any other number above 0.
    """

    least: int = 1
    most: int = MOST
    noun: str = ""


Natural = Annotated[int, NumberLimits(0)]
"""A whole number that may be 0."""

AsDecimal = Annotated[int, NumberLimits(1, MOST, "")]
"""A whole number that a calibration writes as 128.0."""

# The shape of a decoder transformer, complete.

Norm = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that replaces the MLP of most layers.

    ffn is the width of one expert, shared_ffn the width of what every token passes beside its
    top_k experts (0: nothing). The first dense_layers layers keep the model's own MLP.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: Natural = 0
    dense_layers: Natural = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: the sizes of its compressed projections.

    query_rank 0 means that queries are not compressed. A head's query and key are nope + rope
    wide, its value is value wide.
    """

    query_rank: Natural
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: every size that parameters, FLOPs, activations and messages depend on.

    positions is the number of learned positions (0: rotary or none); vocab is not padded.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    positions: Natural = field(default=0, metadata={KEY: "learned_positions"})
    norm: Norm = "layer"
    biases: bool = True
    qkv_biases: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    name: str = ""

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return 0 if self.experts is None else max(0, self.layers - self.experts.dense_layers)

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one token."""
        return self.kv_heads * self.head_size


# What the job runs on: peaks, memory, links, and how much of them real programs reach.


@dataclass(frozen=True, slots=True)
class Link:
    """What joins a GPU to the others: bytes_per_s of one GPU in one direction, as sold.

    ring is the share of it that large NCCL rings reach (busbw / bytes_per_s); latency_ns is what
    one more step over it costs a small collective.
    """

    name: str
    bytes_per_s: float
    ring: float
    latency_ns: float


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a GPU family's peaks real kernels reach, fitted on published runs.

    gemm, attention (fused, forward) and unfused_attention are shares of the dense peak, memory is
    the share of the memory's bandwidth, launch_ns what each kernel costs beside its work, jitter by
    what ratio a node's step times vary. host_ns is what the host needs to launch a layer's forward,
    0 for the framework's guess. error is how far off step times of 9 of 10 runs were that were not
    fitted on, a ratio. rows name the runs of the fit ("run:..." a user's own, else published),
    frameworks, devices and dtypes what those ran on.
    """

    gemm: float
    attention: float
    unfused_attention: float
    memory: float
    launch_ns: float
    tile: AsDecimal = 0
    jitter: float = 0.02
    host_ns: float = 0.0
    error: float = 0.3
    frameworks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Learned:
    """What runs of one's own taught about memory: a factor on the activations of every stage, and
    bytes that every rank needs beside what is predicted."""

    activations: float = 1.0
    constant_bytes: Annotated[int, NumberLimits(-MOST)] = 0


@dataclass(frozen=True, slots=True)
class HardwareConfig:
    """One kind of accelerator in one kind of cluster.

    peaks_flops_per_s are dense, by dtype. gpus_per_node counts the GPUs that the intra link joins
    (72 on GB200 NVL72). nvls is the busbw of an all-reduce that the switch sums over the link's
    bytes_per_s, 0 where there is none. host is the link to host memory. learned corrects the memory
    of frameworks that own runs were measured with.
    """

    name: str
    family: str
    peaks_flops_per_s: tuple[tuple[str, float], ...] = field(metadata={KEY: "peaks"})
    memory_bytes: int
    memory_bytes_per_s: float
    gpus_per_node: int
    intra: Link
    inter: Link = field(metadata={KEY: "nodes_link"})
    host: Link
    efficiency: Efficiency
    nvls: Annotated[float, NumberLimits(0)] = 0.0
    multiprocessors: int = 0
    learned: Learned = Learned()

    def peak_flops_per_s(self, dtype: str) -> float | None:
        """The dense peak at a dtype, None where the device has none or none is published."""
        return dict(self.peaks_flops_per_s).get(dtype)


# How one step trains: batch, precision, optimizer, what is recomputed and offloaded.

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]

DTYPES: tuple[Dtype, ...] = get_args(Dtype)

Optimizer = Literal["adam", "adam-8bit", "sgd", "sgd-momentum", "muon", "lion"]

OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)

Recompute = Literal["none", "selective", "full", "every", "sqrt"]

Framework = Literal[
    "zero-paper", "megatron", "deepspeed", "fsdp2", "ddp", "huggingface", "nanotron"
]

FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)

State = Literal["optimizer", "parameters", "activations"]

Target = Literal["cpu", "nvme"]

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """One optimizer step: seq_len in tokens, micro_batch in sequences a microbatch and rank,
    global_batch in sequences a step.

    dtype is that of the matrix products; weights and activations of fp8 training stay in bf16.
    recompute "every" keeps the input of each recompute_every-th layer. gradient_dtype is the one
    in which gradients are reduced, activation_dtype that of what layers hand on.
    """

    seq_len: int
    micro_batch: int
    global_batch: int
    dtype: Dtype = "bf16"
    optimizer: Optimizer = "adam"
    recompute: Recompute = "none"
    recompute_every: int = field(default=1, metadata={KEY: ""})
    framework: Framework = "megatron"
    gradient_dtype: Dtype = "fp32"
    activation_dtype: Dtype = "bf16"
    flash_attention: bool = True
    dropout: bool = False
    fused_loss: bool = True
    offload: frozenset[str] = frozenset()
    offload_to: Target = "cpu"

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the forward pass reads it."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def activation_bytes(self) -> int:
        """Bytes of a number that one layer hands to the next."""
        return BYTES[self.activation_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient where ranks sum it."""
        return BYTES[self.gradient_dtype]


# How the ranks share the model and the batch.

Schedule = Literal[
    "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"
]

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

TWO_STAGES: tuple[Schedule, ...] = ("zb-v", "dualpipe", "dualpipe-v")
"""Schedules that hold two stages on each rank, whatever chunks says."""

ContextKind = Literal["ring", "all-gather", "ulysses"]

Reshard = Literal["default", "always", "never"]

Axis = Literal["tp", "cp", "ep", "dp", "pp"]

RANK_ORDER: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes of the axes, and how each works.

    dp_replicate ranks hold copies, dp_shard ranks shares (FSDP); both together are HSDP. zero is
    the ZeRO stage: 1 and 2 spread optimizer (and gradients) over all data- and context-parallel
    ranks, 3 is dp_shard. rank_order lists the axes with the fastest varying first. overlap names
    the axes whose communication is hidden behind compute where there is compute to hide behind.
    chunks is the number of stages on a rank (interleaved). scatter_gather: pipeline messages are
    cut over tensor parallelism and put together by the receiver's node. reshard_after_forward is
    what FSDP does with gathered weights: always frees them, never keeps them until the backward
    pass, default is torchtitan's: keeps the last unit, and all of them in a pipeline.
    split_vocab: tensor parallelism cuts embedding and head too. root_unit: FSDP gathers what is in
    no layer as one unit. sum_once: FSDP sums gradients behind the last microbatch alone.
    bucket_bytes is what DDP sums in one call, 0 its default.
    """

    tp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    rank_order: tuple[Axis, ...] = RANK_ORDER
    sequence_parallel: bool = False
    zero: Annotated[int, NumberLimits(0, 3, "ZeRO stage")] = 0
    schedule: Schedule = "1f1b"
    chunks: int = 1
    layers_per_stage: tuple[Natural, ...] | None = None
    overlap: frozenset[str] = frozenset()
    context_kind: ContextKind = field(default="ring", metadata={KEY: "context"})
    reshard_after_forward: Reshard = "default"
    scatter_gather: bool = False
    split_vocab: bool = True
    root_unit: bool = False
    sum_once: bool = False
    bucket_bytes: int = 0

    @property
    def dp(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO spreads the states of dense parameters (N); 1 without ZeRO."""
        return 1 if self.zero == 0 else self.cp * (self.dp_shard if self.zero == 3 else self.dp)

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients of dense parameters are summed."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO spreads the states of experts; 1 without ZeRO."""
        if self.zero == 0:
            return 1
        return max(1, self.expert_dp // (self.dp_replicate if self.zero == 3 else 1))

    @property
    def sequence_split(self) -> int:
        """By how much sequence parallelism divides what tensor parallelism leaves whole."""
        return self.tp if self.sequence_parallel else 1

    @property
    def vocab_split(self) -> int:
        """By how much tensor parallelism divides embedding and head."""
        return self.tp if self.split_vocab else 1

    @property
    def stages_per_rank(self) -> int:
        """Model stages that one rank of the pipeline holds."""
        if self.pp > 1 and self.schedule in TWO_STAGES:
            return 2
        return self.chunks


# JobConfig: everything that a prediction needs, and what follows from it by division alone.

VOCAB_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times tp."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """A training step to predict. config_checks.check refuses one that cannot be."""

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    hardware: HardwareConfig

    @property
    def microbatches(self) -> int:
        """Microbatches of one rank in a step (m); those of both directions in dualpipe."""
        return self.training.global_batch // (self.training.micro_batch * self.parallel.dp)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank, whole over tensor parallelism (T = s b / c)."""
        return self.training.seq_len * self.training.micro_batch // self.parallel.cp

    @property
    def padded_vocab(self) -> int:
        """The vocabulary as Megatron-LM pads it; other frameworks leave it."""
        if self.training.framework != "megatron":
            return self.model.vocab
        multiple = VOCAB_MULTIPLE * self.parallel.tp
        return -(-self.model.vocab // multiple) * multiple


# Where the ranks of a group sit: how many of them share a node.


@dataclass(frozen=True, slots=True)
class Span:
    """A group of ranks spread evenly over nodes."""

    ranks: int
    ranks_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def span_of(job: JobConfig, axis: str) -> Span:
    """The group of an axis: tp, cp, ep, dp (all that sum dense gradients, cp included), dp_shard,
    dp_replicate, expert_tp, expert_dp, or pp (the two neighbors that are farthest apart)."""
    ranks, stride = _ranks_and_stride(job.parallel, axis)
    if axis == "pp" and stride * job.parallel.pp > job.hardware.gpus_per_node:
        return Span(ranks, 1)
    on_node = max(1, min(ranks, job.hardware.gpus_per_node // stride))
    return Span(ranks, math.gcd(ranks, on_node))


def _ranks_and_stride(layout: ParallelConfig, axis: str) -> tuple[int, int]:
    if axis == "pp":
        return min(2, layout.pp), _stride(layout, "pp")
    if axis == "expert_tp":
        return layout.expert_tp, 1
    if axis == "ep":
        return layout.ep, layout.expert_tp
    if axis == "expert_dp":
        return layout.expert_dp, layout.ep * layout.expert_tp
    if axis == "dp":
        return layout.gradient_ranks, min(_stride(layout, "cp"), _stride(layout, "dp"))
    if axis == "dp_shard":
        return layout.shard_size, min(_stride(layout, "cp"), _stride(layout, "dp"))
    if axis == "dp_replicate":
        return layout.dp_replicate, _stride(layout, "dp") * layout.dp_shard
    return getattr(layout, axis), _stride(layout, axis)


def _stride(layout: ParallelConfig, axis: str) -> int:
    """Ranks between neighbors along the axis: the product of the faster axes."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    faster = layout.rank_order[: layout.rank_order.index(axis)]
    return math.prod(sizes.get(each, 1) for each in faster)


# Which layers each rank of the pipeline holds.

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One model stage: consecutive layers, with the embedding before or the head behind them."""

    dense_layers: int
    expert_layers: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        return self.dense_layers + self.expert_layers


@dataclass(frozen=True, slots=True)
class StageConfig:
    """What one pp coordinate holds: its chunks, in the model's order."""

    index: int
    chunks: tuple[Chunk, ...]

    @property
    def dense_layers(self) -> int:
        return sum(chunk.dense_layers for chunk in self.chunks)

    @property
    def expert_layers(self) -> int:
        return sum(chunk.expert_layers for chunk in self.chunks)

    @property
    def layers(self) -> int:
        return self.dense_layers + self.expert_layers

    @property
    def embedding(self) -> bool:
        return any(chunk.embedding for chunk in self.chunks)

    @property
    def head(self) -> bool:
        return any(chunk.head for chunk in self.chunks)


def stages_of(job: JobConfig) -> tuple[StageConfig, ...]:
    """The pipeline's ranks, first to last, each with its chunks."""
    return _stages(*_shape(job))


def each_once(job: JobConfig, make: Callable[[StageConfig], _T]) -> tuple[_T, ...]:
    """What make says of each stage, asked once of all that hold the same; it may not look at the
    index."""
    found: list[_T] = []
    for stage, first in zip(stages_of(job), first_alike(job), strict=True):
        found.append(make(stage) if first == stage.index else found[first])
    return tuple(found)


def first_alike(job: JobConfig) -> tuple[int, ...]:
    """For each stage the first that holds the same."""
    return _first_alike(*_shape(job))


def _shape(job: JobConfig) -> tuple[tuple[int, ...], int, Schedule, int, int]:
    layout, dense = job.parallel, job.model.layers - job.model.expert_layers
    return layers_per_chunk(job), dense, layout.schedule, layout.pp, layout.chunks


@lru_cache(maxsize=1024)
def _stages(
    sizes: tuple[int, ...], dense: int, schedule: Schedule, pp: int, chunks: int
) -> tuple[StageConfig, ...]:
    model = _chunks(sizes, dense)
    return tuple(
        StageConfig(rank, tuple(model[i] for i in _of_rank(schedule, pp, chunks, rank)))
        for rank in range(pp)
    )


@lru_cache(maxsize=1024)
def _first_alike(
    sizes: tuple[int, ...], dense: int, schedule: Schedule, pp: int, chunks: int
) -> tuple[int, ...]:
    held = [stage.chunks for stage in _stages(sizes, dense, schedule, pp, chunks)]
    return tuple(held.index(each) for each in held)


def chunks_of_rank(job: JobConfig, rank: int) -> tuple[int, ...]:
    """Positions in the model of the chunks that a pipeline rank holds."""
    return _of_rank(job.parallel.schedule, job.parallel.pp, job.parallel.chunks, rank)


def _of_rank(schedule: Schedule, p: int, chunks: int, rank: int) -> tuple[int, ...]:
    """Interleaved ranks hold every pp-th chunk; zb-v and dualpipe-v fold the model into a V;
    dualpipe runs a second copy of the model from the other end."""
    if p > 1 and schedule in ("zb-v", "dualpipe-v"):
        return rank, 2 * p - 1 - rank
    if p > 1 and schedule == "dualpipe":
        return tuple(sorted((rank, p - 1 - rank)))
    return tuple(rank + p * chunk for chunk in range(chunks))


def chunk_count(job: JobConfig) -> int:
    """Model stages that the layers are cut into (p v; p for dualpipe's two copies)."""
    p, layout = job.parallel.pp, job.parallel
    return p if layout.schedule == "dualpipe" else p * layout.stages_per_rank


def layers_per_chunk(job: JobConfig) -> tuple[int, ...]:
    """Layers of each model stage; the first take the rest where they do not divide."""
    if job.parallel.layers_per_stage is not None:
        return job.parallel.layers_per_stage
    count = chunk_count(job)
    each, rest = divmod(job.model.layers, count)
    return tuple(each + (i < rest) for i in range(count))


def _chunks(sizes: tuple[int, ...], dense: int) -> tuple[Chunk, ...]:
    before, found = 0, []
    for i, layers in enumerate(sizes):
        here = max(0, min(before + layers, dense) - before)
        found.append(Chunk(here, layers - here, i == 0, i == len(sizes) - 1))
        before += layers
    return tuple(found)
