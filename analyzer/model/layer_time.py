"""Compute time of layers: GEMMs, memory traffic, kernel launches, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import Chunk, Experts, JobConfig, LatentAttention
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import MASTER_BYTES, MOMENTS_BYTES
from stepsplit.analyzer.model.parameters import StageParameters, share

# Compute time of one model stage and microbatch on one rank, recomputation included.

LOSS_FORWARD_BYTES = 8

LOSS_BACKWARD_BYTES = 6
"""Bytes moved per logit: the loss reads and writes it in fp32, its backward in the training
dtype."""


def chunk_passes(job: JobConfig, speed: Speed, chunks: tuple[Chunk, ...]) -> tuple[LayerPass, ...]:
    """Compute time of each chunk, in order."""
    dense = dense_layer(job, speed)
    experts = None if job.model.experts is None else expert_layer(job, speed, job.model.experts)
    found = []
    for chunk in chunks:
        layers = dense * chunk.dense_layers
        if experts is not None:
            layers += experts * chunk.expert_layers
        found.append(_recomputed(job, layers) + _ends(job, speed, chunk))
    return tuple(found)


def _recomputed(job: JobConfig, layers: LayerPass) -> LayerPass:
    """Add the recomputation; every layer runs its forward again, however few inputs are saved."""
    match job.training.recompute:
        case "none":
            return layers
        case "selective":
            return layers + LayerPass(0.0, _selected_ns(job, layers), 0.0)
    return layers + LayerPass(0.0, layers.forward_ns, 0.0)


def _selected_ns(job: JobConfig, layers: LayerPass) -> float:
    """Selective recomputation: attention's core, which costs nothing with fused attention.

    torchtitan's policy repeats every second GEMM instead, and the kernels between them.
    """
    if job.training.framework == "fsdp2":
        return (layers.forward_ns - layers.core_ns) / 2
    return 0.0 if job.training.flash_attention else layers.core_ns


def _ends(job: JobConfig, speed: Speed, chunk: Chunk) -> LayerPass:
    """Embedding before the layers, head and loss after them."""
    nothing = LayerPass(0.0, 0.0, 0.0)
    found = nothing
    if chunk.embedding:
        copied = speed.moved_ns(
            3 * job.tokens * job.model.hidden * job.training.activation_bytes, 2
        )
        found += LayerPass(copied, 0.0, copied)
    return found + (_head(job, speed) if chunk.head else nothing)


def _head(job: JobConfig, speed: Speed) -> LayerPass:
    product, wide = head_product(job), speed.of_head
    logits = product.rows * product.columns
    gradients = product.parameters * traffic_of(job).accumulate_bytes
    return LayerPass(
        product.forward_ns(wide) + speed.moved_ns(logits * LOSS_FORWARD_BYTES, 4),
        product.input_ns(wide) + speed.moved_ns(logits * LOSS_BACKWARD_BYTES, 2),
        product.weight_ns(wide) + speed.moved_ns(gradients),
    )


# Launch time of a model stage on the host, and how long the device waits for it.

HOST = Formula(
    "step.host",
    "idle = max(0, launches of a pass - its compute and exposed communication); the backward"
    " launches as much as the forward, plus the recomputation; a CPU cannot launch while it"
    " computes, so all its launches are idle",
    "own; constants of the framework, or calibrated",
)

NEAR = 0.7
"""Launch time over compute time from which a pass counts as host-bound."""


def launches(job: JobConfig, layers: int) -> LayerPass:
    """Host time to launch one microbatch of a number of layers."""
    each = (job.hardware.efficiency.host_ns or traffic_of(job).host_ns) * layers
    again = 0.0 if job.training.recompute in ("none", "selective") else each
    return LayerPass(each, each + again, 0.0)


def waits(device: LayerPass, host: LayerPass, alone: bool = False) -> LayerPass:
    """Device idle time of a pass because the host launches more slowly.

    alone: one processor (a CPU) is both, and does not compute while it launches.
    """
    if alone:
        return host
    backward_ns = device.input_ns + device.weight_ns
    return LayerPass(
        max(0.0, host.forward_ns - device.forward_ns), max(0.0, host.input_ns - backward_ns), 0.0
    )


def host_bound(device: LayerPass, host: LayerPass) -> bool:
    """Whether launching takes about as long as computing."""
    computes = device.forward_ns + device.input_ns + device.weight_ns
    return host.forward_ns + host.input_ns > NEAR * computes


# Compute time of one layer and microbatch on one rank.

FUSED_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward: it recomputes the scores (Dao, 2022)."""

ELEMENTWISE_KERNELS = 6
"""Memory-bound kernels per layer: two norms, two residuals, activation, rotary embedding."""


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Compute time of one microbatch in ns: forward, input gradient, weight gradient.

    core_ns and core_backward_ns are attention's core, parts of forward_ns and input_ns. formulas
    are those used in addition to KERNEL.
    """

    forward_ns: float
    input_ns: float
    weight_ns: float
    core_ns: float = 0.0
    core_backward_ns: float = 0.0
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    def __add__(self, other: LayerPass) -> LayerPass:
        formulas = self.formulas
        if other.formulas and other.formulas != formulas:
            formulas = (*formulas, *(each for each in other.formulas if each not in formulas))
        return LayerPass(
            self.forward_ns + other.forward_ns, self.input_ns + other.input_ns,
            self.weight_ns + other.weight_ns, self.core_ns + other.core_ns,
            self.core_backward_ns + other.core_backward_ns, formulas,
        )  # fmt: skip

    def __mul__(self, times: float) -> LayerPass:
        return LayerPass(
            self.forward_ns * times, self.input_ns * times,
            self.weight_ns * times, self.core_ns * times,
            self.core_backward_ns * times, self.formulas,
        )  # fmt: skip


def dense_layer(job: JobConfig, speed: Speed) -> LayerPass:
    """Time of a layer with a dense MLP."""
    products = (*attention_products(job), *mlp_products(job, job.model.ffn))
    mlp_width = share(job.model.ffn, job.parallel.tp)
    return _layer(job, speed, products, job.tokens * mlp_width)


def expert_layer(job: JobConfig, speed: Speed, experts: Experts) -> LayerPass:
    """Time of a mixture-of-experts layer with balanced routing."""
    products = (*attention_products(job), *expert_products(job, experts))
    routed = routed_tokens(job, experts)
    wide = routed * share(experts.ffn, job.parallel.expert_tp)
    wide += job.tokens * share(experts.shared_ffn, job.parallel.tp)
    moved = speed.moved_ns(4 * routed * job.model.hidden * job.training.activation_bytes, 4)
    return _layer(job, speed, products, wide) + LayerPass(moved, moved, 0.0)


def _layer(
    job: JobConfig, speed: Speed, products: tuple[Product, ...], activations: float
) -> LayerPass:
    traffic = traffic_of(job)
    return (
        _linear(speed, products, traffic)
        + _core(job, speed, traffic)
        + _elementwise(job, speed, traffic, activations)
    )


def _linear(speed: Speed, products: tuple[Product, ...], traffic: Traffic) -> LayerPass:
    weights = sum(product.parameters for product in products)
    return LayerPass(
        sum(product.forward_ns(speed) for product in products),
        sum(product.input_ns(speed) for product in products),
        sum(product.weight_ns(speed) for product in products)
        + speed.moved_ns(weights * traffic.accumulate_bytes),
        formulas=(ACCUMULATE,),
    )


def _core(job: JobConfig, speed: Speed, traffic: Traffic) -> LayerPass:
    """Scores, softmax and weighted values; a fused causal kernel skips half of the work."""
    heads = share(job.model.heads, job.parallel.tp)
    scores = float(job.tokens) * job.training.seq_len * heads
    work = 2 * scores * _head_width(job)
    if job.training.flash_attention:
        forward = work / 2 / speed.attention_flops_per_ns + speed.launch_ns
        backward = forward * FUSED_BACKWARD / BACKWARD_ATTENTION
        whole = LayerPass(forward, backward, 0.0, forward, backward)
        return whole + time_pieces(job, speed) if comes_in_pieces(job) else whole
    size = job.training.activation_bytes
    softmax = traffic.elementwise * (
        (5 if job.training.dropout else 4) * size + job.training.dropout
    )
    forward = work / speed.attention_flops_per_ns + speed.moved_ns(scores * softmax, 5)
    backward = 2 * work / speed.attention_flops_per_ns + speed.moved_ns(
        scores * (softmax + 2 * size), 6
    )
    return LayerPass(forward, backward, 0.0, forward, backward)


def _head_width(job: JobConfig) -> int:
    """Sum of a head's query and value widths."""
    latent = job.model.latent
    if latent is None:
        return 2 * job.model.head_size
    return latent.nope + latent.rope + latent.value


def _elementwise(job: JobConfig, speed: Speed, traffic: Traffic, activations: float) -> LayerPass:
    """Memory-bound kernels: norms, residuals with dropout, rotary embedding, activation."""
    model, size = job.model, job.training.activation_bytes
    whole = job.tokens * model.hidden / job.parallel.sequence_split
    rotated = 0 if model.positions else 2 * _rotated(job)
    gates = 2 if model.gated else 1
    forward = 2 * 5 * whole + (gates + 1) * activations + rotated
    backward = 2 * 6 * whole + (2 * gates + 1) * activations + rotated
    masks = 2 * whole * job.training.dropout
    kernels = ELEMENTWISE_KERNELS
    return LayerPass(
        speed.moved_ns((forward * size + masks) * traffic.elementwise, kernels),
        speed.moved_ns((backward * size + masks) * traffic.elementwise, kernels + 2),
        0.0,
    )


def _rotated(job: JobConfig) -> float:
    """Elements of queries and keys with rotary embedding."""
    model, heads = job.model, share(job.model.heads, job.parallel.tp)
    if model.latent is not None:
        return job.tokens * (heads + 1) * model.latent.rope
    return job.tokens * (heads + share(model.kv_heads, job.parallel.tp)) * model.head_size


# The GEMMs of one layer and microbatch on one rank.


@dataclass(frozen=True, slots=True)
class Product:
    """count GEMMs (rows x inner) (inner x columns): activations times a weight."""

    rows: float
    columns: int
    inner: int
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * self.columns * self.inner

    def forward_ns(self, speed: Speed) -> float:
        return self.count * speed.product_ns(self.rows, self.columns, self.inner)

    def input_ns(self, speed: Speed) -> float:
        """Time of the input gradient."""
        return self.count * speed.product_ns(self.rows, self.inner, self.columns)

    def weight_ns(self, speed: Speed) -> float:
        """Time of the weight gradient."""
        return self.count * speed.product_ns(self.inner, self.columns, self.rows)


def attention_products(job: JobConfig) -> tuple[Product, ...]:
    """The projections around attention, without its core."""
    model, tokens, tp = job.model, job.tokens, job.parallel.tp
    if model.latent is not None:
        return _latent(job, model.latent)
    queries = share(model.heads, tp) * model.head_size
    pairs = 2 * share(model.kv_heads, tp) * model.head_size
    return (
        Product(tokens, queries + pairs, model.hidden),
        Product(tokens, model.hidden, queries),
    )


def _latent(job: JobConfig, latent: LatentAttention) -> tuple[Product, ...]:
    """MLA: each rank applies the whole compressing weights to its own part of the sequence."""
    tokens, h, heads = job.tokens, job.model.hidden, share(job.model.heads, job.parallel.tp)
    own = tokens / job.parallel.sequence_split
    wide = heads * (latent.nope + latent.rope)
    queries = (
        (Product(own, latent.query_rank, h), Product(tokens, wide, latent.query_rank))
        if latent.query_rank
        else (Product(tokens, wide, h),)
    )
    return (
        *queries,
        Product(own, latent.kv_rank + latent.rope, h),
        Product(tokens, heads * (latent.nope + latent.value), latent.kv_rank),
        Product(tokens, h, heads * latent.value),
    )


def mlp_products(job: JobConfig, ffn: int) -> tuple[Product, ...]:
    """GEMMs of an MLP of width ffn, split over tensor parallelism."""
    width, h = share(ffn, job.parallel.tp), job.model.hidden
    first = (2 if job.model.gated else 1) * width
    return Product(job.tokens, first, h), Product(job.tokens, h, width)


def expert_products(job: JobConfig, experts: Experts) -> tuple[Product, ...]:
    """GEMMs of the router, the shared expert, and the rank's experts with balanced routing."""
    h, local = job.model.hidden, share(experts.count, job.parallel.ep)
    width = share(experts.ffn, job.parallel.expert_tp)
    rows = routed_tokens(job, experts) / local
    shared = mlp_products(job, experts.shared_ffn) if experts.shared_ffn else ()
    return (
        Product(job.tokens / job.parallel.sequence_split, experts.count, h),
        Product(rows, (2 if job.model.gated else 1) * width, h, local),
        Product(rows, h, width, local),
        *shared,
    )


def routed_tokens(job: JobConfig, experts: Experts) -> float:
    """Tokens per microbatch in all experts of one rank, each counted once per expert.

    Tensor-parallel ranks have the same tokens and split them.
    """
    return job.tokens / job.parallel.tp * experts.top_k * job.parallel.expert_tp


def head_product(job: JobConfig) -> Product:
    """GEMM of the output layer of a tensor-parallel rank."""
    return Product(job.tokens, share(job.padded_vocab, job.parallel.vocab_split), job.model.hidden)


# Memory traffic and launch time of each framework.

ACCUMULATE = Formula(
    "step.accumulate",
    "every microbatch but the first accumulates its gradients: 3 b_g bytes per parameter,"
    " 14 in DeepSpeed's bf16 optimizer, 0 if the GEMM itself accumulates (Megatron-LM)",
    "arithmetic; Megatron-LM gradient_accumulation_fusion; DeepSpeed bf16_optimizer.py",
)

UNIT_COPIES = Formula(
    "step.fsdp_copies",
    "16 bytes per parameter and microbatch: gathered weights are copied out twice (2 x 4),"
    " gradients copied in and cast to fp32 (8), in which they are summed",
    "arithmetic; Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Constants of a framework.

    elementwise multiplies the bytes of norms, residuals, dropout and activation: 1 if each is fused
    into one read and one write. accumulate_bytes are moved per parameter and microbatch for
    gradient accumulation, unit_bytes for the copies around FSDP's collectives. host_ns is the
    host's launch time of one layer's forward, an estimate (about 30 kernels of 10 us).
    """

    elementwise: float
    accumulate_bytes: float
    unit_bytes: float
    host_ns: float


EAGER = 1.6
"""Memory traffic of unfused operations over fused ones: the value from 1.4 to 2.2, in steps of 0.2,
with the least loss on the fitted rows of presets/efficiency.toml."""


def traffic_of(job: JobConfig) -> Traffic:
    """The constants of the job's framework."""
    later = (job.microbatches - 1) / job.microbatches
    match job.training.framework:
        case "megatron" | "nanotron":
            return Traffic(1.0, 0.0, 0.0, 250e3)
        case "deepspeed" | "zero-paper":
            return Traffic(1.0, 14.0 * later, 0.0, 400e3)
        case "fsdp2" if job.parallel.sum_once:
            added = 3.0 * job.training.gradient_bytes * later
            return Traffic(EAGER, added, 8.0 + 8.0 / job.microbatches, 400e3)
        case "fsdp2":
            return Traffic(EAGER, 0.0, 16.0, 400e3)
        case "ddp" | "huggingface":
            return Traffic(EAGER, 3.0 * job.training.gradient_bytes * later, 0.0, 400e3)


# Time of the optimizer step, and of offloading.

UPDATE = Formula(
    "step.optimizer",
    "bytes of gradient, master weight and moments read, master and moments written, weight"
    " written, over memory bandwidth: 30 bytes per parameter for Adam",
    "arithmetic over Kingma and Ba, arXiv:1412.6980",
)


def updated_parameters(job: JobConfig, stage: StageParameters) -> float:
    """Parameters that one rank updates: its shard if ZeRO shards the optimizer states."""
    return stage.dense / job.parallel.shard_size + stage.experts / job.parallel.expert_shards


def optimizer_ns(job: JobConfig, speed: Speed, stage: StageParameters) -> float:
    """Time of the optimizer step on the device; 0 if it is offloaded to the host."""
    if "optimizer" in job.training.offload:
        return 0.0
    count = updated_parameters(job, stage)
    states = MASTER_BYTES + MOMENTS_BYTES[job.training.optimizer]
    written = 0 if job.training.dtype == "fp32" else job.training.weight_bytes
    return speed.moved_ns(count * (2 * states + job.training.gradient_bytes + written), 10)


def offload_ns(job: JobConfig, stage: StageParameters) -> float:
    """Time to copy gradients to the host and weights back, once per step.

    Ren et al., ZeRO-Offload, arXiv:2101.06840, section 4.1: both in 16 bit. The host's update is
    assumed to overlap them.
    """
    if "optimizer" not in job.training.offload:
        return 0.0
    link = job.hardware.host
    moved = updated_parameters(job, stage) * 2 * job.training.weight_bytes
    return moved / (link.bytes_per_s * link.ring) * 1e9


# Ring attention computes its result in pieces, which it has to merge.

PIECES = Formula(
    "step.ring_pieces",
    "each of the c-1 further pieces is added to an fp32 sum: 10 bytes per element of the output"
    " forward, of the gradients of queries, keys and values backward, and 2 or 3 more launches",
    "Liu et al., Ring Attention, arXiv:2310.01889, section 3; PyTorch 2.13,"
    " _context_parallel/_attention.py, _SDPAMerger and _templated_ring_attention_backward",
)

MERGED_BYTES = 10
"""Bytes per element: a piece is read in 16 bits, the fp32 sum is read and written."""

FORWARD_KERNELS = 2

BACKWARD_KERNELS = 3
"""Kernels per piece: attention itself, and one sum in the forward, or two in the backward (queries;
keys and values)."""


def comes_in_pieces(job: JobConfig) -> bool:
    """Whether attention is fused and runs as ring attention."""
    layout = job.parallel
    return layout.cp > 1 and layout.context_kind == "ring" and job.training.flash_attention


def time_pieces(job: JobConfig, speed: Speed) -> LayerPass:
    """Time to merge the further pieces of one layer's ring attention (PIECES).

    Counted for the last rank, which attends to all earlier tokens and merges whole pieces; the
    others wait for it.
    """
    layout, model = job.parallel, job.model
    latent, heads = model.latent, share(model.heads, layout.tp)
    query = model.head_size if latent is None else latent.nope + latent.rope
    value = model.head_size if latent is None else latent.value
    pairs = heads if latent is not None else share(model.kv_heads, layout.tp)
    each = MERGED_BYTES * job.tokens
    forward = speed.moved_ns(each * heads * value, FORWARD_KERNELS)
    backward = speed.moved_ns(each * (heads * query + pairs * (query + value)), BACKWARD_KERNELS)
    turns = layout.cp - 1
    return LayerPass(turns * forward, turns * backward, 0.0, formulas=(PIECES,))


# Kernel time on one device: a roofline with the sum of its two sides.

KERNEL = Formula(
    "step.kernel",
    "t = FLOP / (peak e_gemm) + bytes / (memory bandwidth e_mem) + launch;"
    " the sum fits measured steps better than the larger of the two",
    "after Williams et al., Roofline, CACM 2009; constants from the rows that the presets name",
)

BACKWARD_ATTENTION = 0.8
"""Rate of fused attention's backward over that of its forward.
Dao, FlashAttention-2, arXiv:2307.08691, section 4.1."""


@dataclass(frozen=True, slots=True)
class Speed:
    """FLOP/s and memory bandwidth that the job's kernels reach, per ns."""

    linear_flops_per_ns: float
    head_flops_per_ns: float
    attention_flops_per_ns: float
    bytes_per_ns: float
    launch_ns: float
    tile: int = 0
    multiprocessors: int = 0

    @property
    def of_head(self) -> Speed:
        """Speed of the head, whose GEMMs stay in bf16 with fp8 training."""
        return replace(self, linear_flops_per_ns=self.head_flops_per_ns)

    def product_ns(self, rows: float, columns: float, inner: float, size: int = 2) -> float:
        """Time of one GEMM (rows x inner) (inner x columns) with size bytes per element."""
        moved = size * (rows * inner + inner * columns + rows * columns)
        work = 2.0 * rows * columns * inner * _waves(rows, columns, self.tile, self.multiprocessors)
        return work / self.linear_flops_per_ns + moved / self.bytes_per_ns + self.launch_ns

    def moved_ns(self, count_bytes: float, kernels: int = 0) -> float:
        """Time of a number of kernels that read and write count_bytes in total."""
        return count_bytes / self.bytes_per_ns + kernels * self.launch_ns


def speed_of(job: JobConfig) -> Speed:
    """Speed of the job's device at its dtype. Raises UsageError if its peak is unknown."""
    hardware, recipe = job.hardware, job.training
    efficiency = hardware.efficiency
    peak = hardware.peak_flops_per_s(recipe.dtype)
    wide = hardware.peak_flops_per_s("bf16" if recipe.dtype == "fp8" else recipe.dtype)
    if peak is None or wide is None:
        known = ", ".join(dtype for dtype, _ in hardware.peaks_flops_per_s)
        raise UsageError(f"{hardware.name} has no peak FLOP/s at {recipe.dtype}; known: {known}")
    fused = efficiency.attention if recipe.flash_attention else efficiency.unfused_attention
    return Speed(
        linear_flops_per_ns=peak * efficiency.gemm / 1e9,
        head_flops_per_ns=wide * efficiency.gemm / 1e9,
        attention_flops_per_ns=wide * fused / 1e9,
        bytes_per_ns=hardware.memory_bytes_per_s * efficiency.memory / 1e9,
        launch_ns=efficiency.launch_ns,
        tile=efficiency.tile,
        multiprocessors=hardware.multiprocessors,
    )


def _waves(rows: float, columns: float, tile: int, multiprocessors: int) -> float:
    """Slowdown of a GEMM because its last wave of tiles is not full, a ratio >= 1."""
    if not tile or not multiprocessors:
        return 1.0
    tiles = math.ceil(rows / tile) * math.ceil(columns / tile)
    waves = math.ceil(tiles / multiprocessors)
    return waves * multiprocessors * tile * tile / (rows * columns)
