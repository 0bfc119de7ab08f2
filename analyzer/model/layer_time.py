"""Compute time of layers: GEMMs, memory traffic, kernel launches, optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import Chunk, Experts, JobConfig, LatentAttention
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import MASTER_BYTES, MOMENTS_BYTES
from stepsplit.analyzer.model.parameters import StageParameters, share

# How long one rank computes one model stage for one microbatch, recomputation included.

LOSS_FORWARD_BYTES = 8

LOSS_BACKWARD_BYTES = 6
"""Bytes moved a logit: the loss reads and writes it in fp32, its backward reads and writes again
in the training dtype."""


def chunk_passes(job: JobConfig, speed: Speed, chunks: tuple[Chunk, ...]) -> tuple[LayerPass, ...]:
    """The compute of each chunk, in order."""
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
    """Every layer between two kept inputs runs its forward again, however far apart they are."""
    match job.training.recompute:
        case "none":
            return layers
        case "selective":
            return layers + LayerPass(0.0, _selected_ns(job, layers), 0.0)
    return layers + LayerPass(0.0, layers.forward_ns, 0.0)


def _selected_ns(job: JobConfig, layers: LayerPass) -> float:
    """Attention's core, of which fused attention keeps nothing; torchtitan's policy repeats every
    second product instead, and what is computed between them."""
    if job.training.framework == "fsdp2":
        return (layers.forward_ns - layers.core_ns) / 2
    return 0.0 if job.training.flash_attention else layers.core_ns


def _ends(job: JobConfig, speed: Speed, chunk: Chunk) -> LayerPass:
    """Embedding before the layers, head and loss behind them."""
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


# How long the host takes to launch a model stage, and how long the device waits for it.

HOST = Formula(
    "step.host",
    "idle = max(0, launches of a pass - its compute and exposed communication); the backward"
    " launches as much as the forward, and what is recomputed again; a CPU that computes launches"
    " nothing meanwhile: all of them are idle",
    "own; constants of the framework, or calibrated",
)

NEAR = 0.7
"""From this share of the device's time on, the host is close enough to hold it up at times."""


def launches(job: JobConfig, layers: int) -> LayerPass:
    """What the host needs to launch one microbatch of so many layers."""
    each = (job.hardware.efficiency.host_ns or traffic_of(job).host_ns) * layers
    again = 0.0 if job.training.recompute in ("none", "selective") else each
    return LayerPass(each, each + again, 0.0)


def waits(device: LayerPass, host: LayerPass, alone: bool = False) -> LayerPass:
    """How long the device idles in a pass, because its host launches more slowly.

    alone: one processor is both, and launches while it computes nothing.
    """
    if alone:
        return host
    backward_ns = device.input_ns + device.weight_ns
    return LayerPass(
        max(0.0, host.forward_ns - device.forward_ns), max(0.0, host.input_ns - backward_ns), 0.0
    )


def host_bound(device: LayerPass, host: LayerPass) -> bool:
    """Whether launching takes nearly as long as computing."""
    computes = device.forward_ns + device.input_ns + device.weight_ns
    return host.forward_ns + host.input_ns > NEAR * computes


# How long one rank computes one layer of one microbatch.

FUSED_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward: it forms the scores again (Dao, 2022)."""

ELEMENTWISE_KERNELS = 6
"""Kernels a layer that only move data: two norms, two residuals, activation, rotation."""


@dataclass(frozen=True, slots=True)
class LayerPass:
    """Compute of one microbatch in ns: forward, gradient of the input, gradient of the weights.

    core_ns and core_backward_ns are attention's core, parts of the forward and of the input
    gradient. formulas gave the times, in addition to KERNEL, which gives all of them.
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
    """A layer with an MLP of the model's own width."""
    products = (*attention_products(job), *mlp_products(job, job.model.ffn))
    mlp_width = share(job.model.ffn, job.parallel.tp)
    return _layer(job, speed, products, job.tokens * mlp_width)


def expert_layer(job: JobConfig, speed: Speed, experts: Experts) -> LayerPass:
    """A mixture-of-experts layer, every expert with its fair share of the tokens."""
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
    """Scores, softmax and weighted values; a causal kernel skips half of a fused one's work."""
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
    """Width of a head's query and value together."""
    latent = job.model.latent
    if latent is None:
        return 2 * job.model.head_size
    return latent.nope + latent.rope + latent.value


def _elementwise(job: JobConfig, speed: Speed, traffic: Traffic, activations: float) -> LayerPass:
    """Norms, residuals with dropout, rotation and activation: bytes read and written."""
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
    """Numbers of queries and keys that rotary positions turn."""
    model, heads = job.model, share(job.model.heads, job.parallel.tp)
    if model.latent is not None:
        return job.tokens * (heads + 1) * model.latent.rope
    return job.tokens * (heads + share(model.kv_heads, job.parallel.tp)) * model.head_size


# The matrix products of one layer and one microbatch on one rank.


@dataclass(frozen=True, slots=True)
class Product:
    """count products (rows x inner) (inner x columns): activations times a weight."""

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
        """The gradient of what went in."""
        return self.count * speed.product_ns(self.rows, self.inner, self.columns)

    def weight_ns(self, speed: Speed) -> float:
        """The gradient of the weight."""
        return self.count * speed.product_ns(self.inner, self.columns, self.rows)


def attention_products(job: JobConfig) -> tuple[Product, ...]:
    """The projections around attention; its core is not among them."""
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
    """What compresses is whole on every rank, which applies it to its own part of the sequence."""
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
    """An MLP of that width, divided over tensor parallelism."""
    width, h = share(ffn, job.parallel.tp), job.model.hidden
    first = (2 if job.model.gated else 1) * width
    return Product(job.tokens, first, h), Product(job.tokens, h, width)


def expert_products(job: JobConfig, experts: Experts) -> tuple[Product, ...]:
    """The router, the shared expert, and the rank's experts with balanced routing."""
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
    """Tokens, counted once an expert, that all experts of one rank get in a microbatch.

    Ranks of tensor parallelism see the same tokens and share them out.
    """
    return job.tokens / job.parallel.tp * experts.top_k * job.parallel.expert_tp


def head_product(job: JobConfig) -> Product:
    """The output layer of a tensor-parallel rank."""
    return Product(job.tokens, share(job.padded_vocab, job.parallel.vocab_split), job.model.hidden)


# What a framework reads and writes beside the arithmetic: its constants, by name.

ACCUMULATE = Formula(
    "step.accumulate",
    "every microbatch but the first adds its gradients to those before: 3 b_g bytes a parameter,"
    " 14 in DeepSpeed's bf16 optimizer, none where the product that makes them adds (Megatron-LM)",
    "arithmetic; Megatron-LM gradient_accumulation_fusion; DeepSpeed bf16_optimizer.py",
)

UNIT_COPIES = Formula(
    "step.fsdp_copies",
    "16 bytes a parameter and microbatch: gathered weights are copied out twice (2 x 4),"
    " gradients copied in and cast to fp32 (8), where they are summed",
    "arithmetic; Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2",
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Constants of a framework.

    elementwise multiplies the bytes of norms, residuals, dropout and activation: 1 where they are
    fused into one read and one write each. accumulate_bytes are moved on average for each
    parameter and microbatch to add its gradient up, unit_bytes to gather a sharded parameter and
    to scatter its gradient. host_ns is what the host needs to launch one layer's forward, a guess:
    some 30 kernels of about 10 us.
    """

    elementwise: float
    accumulate_bytes: float
    unit_bytes: float
    host_ns: float


EAGER = 1.6
"""Operations that are not fused read and write that much more than fused ones. Of 1.4 to 2.2 in
steps of 0.2 the value of least loss on the fitted rows of presets/efficiency.toml."""


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


# How long the optimizer's update takes, and what offloading adds to it.

UPDATE = Formula(
    "step.optimizer",
    "bytes of gradient, master weight and moments read, master and moments written, weight"
    " written, over memory bandwidth: 30 bytes a parameter for Adam",
    "arithmetic over Kingma and Ba, arXiv:1412.6980",
)


def updated_parameters(job: JobConfig, stage: StageParameters) -> float:
    """Parameters that one rank updates: its share where ZeRO spreads the states."""
    return stage.dense / job.parallel.shard_size + stage.experts / job.parallel.expert_shards


def optimizer_ns(job: JobConfig, speed: Speed, stage: StageParameters) -> float:
    """The update of one rank, on the device; nothing where the host does it."""
    if "optimizer" in job.training.offload:
        return 0.0
    count = updated_parameters(job, stage)
    states = MASTER_BYTES + MOMENTS_BYTES[job.training.optimizer]
    written = 0 if job.training.dtype == "fp32" else job.training.weight_bytes
    return speed.moved_ns(count * (2 * states + job.training.gradient_bytes + written), 10)


def offload_ns(job: JobConfig, stage: StageParameters) -> float:
    """Gradients to the host and weights back, over the host's link, once a step.

    Ren et al., ZeRO-Offload, arXiv:2101.06840, section 4.1: both in 16 bit. The host's own update
    is taken to hide behind them.
    """
    if "optimizer" not in job.training.offload:
        return 0.0
    link = job.hardware.host
    moved = updated_parameters(job, stage) * 2 * job.training.weight_bytes
    return moved / (link.bytes_per_s * link.ring) * 1e9


# What a ring of context parallelism computes beside attention: its result comes in pieces.

PIECES = Formula(
    "step.ring_pieces",
    "each of the c-1 further pieces is added to an fp32 sum: 10 bytes a number of the output"
    " forward, of the gradients of queries, keys and values backward, and 2 or 3 more launches",
    "Liu et al., Ring Attention, arXiv:2310.01889, section 3; PyTorch 2.13,"
    " _context_parallel/_attention.py, _SDPAMerger and _templated_ring_attention_backward",
)

MERGED_BYTES = 10
"""A piece is read in 16 bits, the fp32 sum read and written."""

FORWARD_KERNELS = 2

BACKWARD_KERNELS = 3
"""Attention itself, and what adds its results up: one sum forward, backward that of queries and
that of keys and values."""


def comes_in_pieces(job: JobConfig) -> bool:
    """Whether fused attention goes round a ring."""
    layout = job.parallel
    return layout.cp > 1 and layout.context_kind == "ring" and job.training.flash_attention


def time_pieces(job: JobConfig, speed: Speed) -> LayerPass:
    """What the further pieces of one layer's attention take in a ring (PIECES).

    The last rank, for which the others wait, attends to all earlier tokens and so adds whole
    pieces.
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


# How fast one device runs a kernel: a roofline whose two sides add up.

KERNEL = Formula(
    "step.kernel",
    "t = FLOP / (peak e_gemm) + bytes / (memory bandwidth e_mem) + launch;"
    " the sum fits measured steps better than the larger of the two",
    "after Williams et al., Roofline, CACM 2009; constants from the rows that the presets name",
)

BACKWARD_ATTENTION = 0.8
"""Fused attention's backward reaches this share of its forward's rate.
Dao, FlashAttention-2, arXiv:2307.08691, section 4.1."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What the job's kernels reach on its device: FLOP and bytes in a ns."""

    linear_flops_per_ns: float
    head_flops_per_ns: float
    attention_flops_per_ns: float
    bytes_per_ns: float
    launch_ns: float
    tile: int = 0
    multiprocessors: int = 0

    @property
    def of_head(self) -> Speed:
        """The same for the head, whose products fp8 training leaves in bf16."""
        return replace(self, linear_flops_per_ns=self.head_flops_per_ns)

    def product_ns(self, rows: float, columns: float, inner: float, size: int = 2) -> float:
        """One matrix product (rows x inner) (inner x columns) of numbers of size bytes."""
        moved = size * (rows * inner + inner * columns + rows * columns)
        work = 2.0 * rows * columns * inner * _waves(rows, columns, self.tile, self.multiprocessors)
        return work / self.linear_flops_per_ns + moved / self.bytes_per_ns + self.launch_ns

    def moved_ns(self, count_bytes: float, kernels: int = 0) -> float:
        """Kernels that read and write count_bytes in all."""
        return count_bytes / self.bytes_per_ns + kernels * self.launch_ns


def speed_of(job: JobConfig) -> Speed:
    """The rates of the job's device at its dtype. Raises UsageError where no peak is known."""
    hardware, recipe = job.hardware, job.training
    efficiency = hardware.efficiency
    peak = hardware.peak_flops_per_s(recipe.dtype)
    wide = hardware.peak_flops_per_s("bf16" if recipe.dtype == "fp8" else recipe.dtype)
    if peak is None or wide is None:
        known = ", ".join(dtype for dtype, _ in hardware.peaks_flops_per_s)
        raise UsageError(f"{hardware.name} has no peak at {recipe.dtype}; known: {known}")
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
    """How much longer a product takes because its last wave of tiles is not full, a ratio >= 1."""
    if not tile or not multiprocessors:
        return 1.0
    tiles = math.ceil(rows / tile) * math.ceil(columns / tile)
    waves = math.ceil(tiles / multiprocessors)
    return waves * multiprocessors * tile * tile / (rows * columns)
