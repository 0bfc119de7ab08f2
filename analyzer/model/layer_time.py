"""Compute time of layers: GEMMs, memory traffic, kernel launches, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepsplit.analyzer.model.comm_ops import (
    count_kv_width,
    count_query_width,
    is_fused_ring,
    is_torch_ring,
)
from stepsplit.analyzer.model.config import (
    Chunk,
    Experts,
    JobConfig,
    LatentAttention,
    count_rerun_layers,
)
from stepsplit.analyzer.model.device_speed import ATTENTION, DeviceSpeed, is_attention_stated
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.parameters import divide_ceil

# Compute time of one model stage and microbatch on one rank, recomputation included.

LOSS_BYTES = (8.0, 6.0)
"""Bytes moved per logit, forward and backward: the loss reads and writes it in fp32, its backward
in the training dtype."""

UPCAST_LOSS_BYTES = (14.0, 14.0)
"""The same where the logits are cast to fp32 in a kernel of their own (6 bytes), as are the
gradients back, and log_softmax and its backward read and write fp32 (8 bytes)."""


def compute_chunk_passes(
    job: JobConfig, speed: DeviceSpeed, chunks: tuple[Chunk, ...]
) -> tuple[LayerPass, ...]:
    """Compute time of each chunk, in order."""
    dense = time_dense_layer(job, speed)
    experts = (
        None if job.model.experts is None else time_expert_layer(job, speed, job.model.experts)
    )
    passes = []
    for chunk in chunks:
        layers = dense * chunk.dense_layers
        if experts is not None:
            layers += experts * chunk.expert_layers
        layers = _add_recompute(job, layers, chunk.layers)
        passes.append(layers + _time_embedding_and_head(job, speed, chunk))
    return tuple(passes)


def _add_recompute(job: JobConfig, layers: LayerPass, count: int) -> LayerPass:
    """Add the recomputation of count layers; every layer runs its forward again, however few inputs
    are saved."""
    match job.training.recompute:
        case "none":
            return layers
        case "selective":
            return layers + LayerPass(0.0, _compute_selective_ns(job, layers), 0.0)
    share = count_rerun_layers(job, count) / count if count else 1.0
    return layers + LayerPass(0.0, layers.forward_ns * share, 0.0)


def _compute_selective_ns(job: JobConfig, layers: LayerPass) -> float:
    """Selective recomputation: attention's core, which costs nothing with fused attention.

    torchtitan's policy repeats every second GEMM instead, and the kernels between them.
    """
    if job.training.framework == "fsdp2":
        return (layers.forward_ns - layers.core_ns) / 2
    return 0.0 if job.training.flash_attention else layers.core_ns


def _time_embedding_and_head(job: JobConfig, speed: DeviceSpeed, chunk: Chunk) -> LayerPass:
    """Embedding before the layers, head and loss after them."""
    zero = LayerPass(0.0, 0.0, 0.0)
    total = zero
    if chunk.embedding:
        copy_ns = speed.compute_memory_ns(
            3 * job.tokens * job.model.hidden * job.training.activation_bytes, 2
        )
        total += LayerPass(copy_ns, 0.0, copy_ns)
    if not chunk.head:
        return total
    total += _time_head(job, speed)
    return total + _time_mtp(job, speed) * chunk.mtp_layers if chunk.mtp_layers else total


MTP = Formula(
    "step.mtp",
    "each module of multi-token prediction: a projection (2h x h), two norms, a layer, and the head"
    " and its loss again",
    "DeepSeek-V3, arXiv:2412.19437, section 2.2",
)


def _time_mtp(job: JobConfig, speed: DeviceSpeed) -> LayerPass:
    """Time of a module of multi-token prediction without its layer."""
    own_tokens = job.tokens / job.parallel.sequence_split
    projection = Gemm(own_tokens, job.model.hidden, 2 * job.model.hidden)
    norms = speed.compute_memory_ns(
        4 * own_tokens * job.model.hidden * job.training.activation_bytes, 2
    )
    linear = _time_linear(speed, (projection,), select_framework_costs(job))
    return _time_head(job, speed) + linear + LayerPass(norms, norms, 0.0, formulas=(MTP,))


def _time_head(job: JobConfig, speed: DeviceSpeed) -> LayerPass:
    gemm, head_speed = build_head_gemm(job), speed.head_speed
    logits = gemm.rows * gemm.columns
    costs = select_framework_costs(job)
    gradients = gemm.parameters * costs.accumulate_bytes
    forward_bytes, backward_bytes = costs.loss_bytes
    return LayerPass(
        gemm.compute_forward_ns(head_speed) + speed.compute_memory_ns(logits * forward_bytes, 4),
        gemm.compute_input_ns(head_speed) + speed.compute_memory_ns(logits * backward_bytes, 2),
        gemm.compute_weight_ns(head_speed) + speed.compute_memory_ns(gradients),
    )


# Launch time of a model stage on the host, and how long the device waits for it.

HOST = Formula(
    "step.host",
    "idle = max(0, launches of a pass - its compute and exposed communication); the backward"
    " launches as much as the forward, plus the recomputation; a CPU cannot launch while it"
    " computes, so all its launches are idle",
    "own; constants of the framework, or calibrated",
)

HOST_BOUND_RATIO = 0.7
"""Launch time over compute time from which a pass counts as host-bound."""


EXPERT_LAUNCHES = 3
"""Kernels of a layer with experts over those of a dense one: router, sorting, permutation."""


EXPERT_LAUNCH = Formula(
    "step.expert_launches",
    "w (1 + n/32) per layer with n experts on the rank forward, twice that backward, in fp8 n/16:"
    " its many small kernels are launched after the host has read the counts of tokens; with CUDA"
    " graphs of layers w n/32, in fp8 n/16; 0 if one CUDA graph replays the step",
    "NVIDIA, Megatron-Core MoE report, arXiv:2603.07685, section 6 (host-bound experts); w: fitted",
)

DOUBLING_EXPERTS = 32
"""Experts of a rank whose own launches take as long as all others of a layer, in 16 bits."""


def compute_expert_wait(job: JobConfig, expert_layers: int) -> LayerPass:
    """Time that one microbatch waits for the launches of experts (EXPERT_LAUNCH)."""
    if job.model.experts is None or job.training.cuda_graph == "step":
        return LayerPass(0.0, 0.0, 0.0)
    local = divide_ceil(job.model.experts.count, job.parallel.ep)
    casts = 2 if job.training.dtype == "fp8" else 1
    launches = local * casts / DOUBLING_EXPERTS
    if job.training.cuda_graph != "layers":
        launches += 1
    wait_ns = job.hardware.efficiency.expert_ns * expert_layers * launches
    formulas = (EXPERT_LAUNCH,) if wait_ns else ()
    return LayerPass(wait_ns, 2 * wait_ns, 0.0, formulas=formulas)


def compute_launch_time(job: JobConfig, layers: int, expert_layers: int = 0) -> LayerPass:
    """Host time to launch one microbatch of a number of layers, some of them with experts.

    CUDA graphs of layers leave the experts to the host, one graph of the step leaves nothing.
    """
    graph = job.training.cuda_graph
    if graph == "step":
        return LayerPass(0.0, 0.0, 0.0)
    experts_launched = (EXPERT_LAUNCHES - 1) * expert_layers
    launched = experts_launched if graph == "layers" else layers + experts_launched
    layer_ns = (job.hardware.efficiency.host_ns or select_framework_costs(job).host_ns) * launched
    recompute_ns = 0.0 if job.training.recompute in ("none", "selective") else layer_ns
    return LayerPass(layer_ns, layer_ns + recompute_ns, 0.0)


def compute_host_wait(device: LayerPass, host: LayerPass, is_cpu: bool = False) -> LayerPass:
    """Device idle time of a pass because the host launches more slowly.

    alone: one processor (a CPU) is both, and does not compute while it launches.
    """
    if is_cpu:
        return host
    backward_ns = device.input_ns + device.weight_ns
    return LayerPass(
        max(0.0, host.forward_ns - device.forward_ns), max(0.0, host.input_ns - backward_ns), 0.0
    )


def is_host_bound(device: LayerPass, host: LayerPass) -> bool:
    """Whether launching takes about as long as computing."""
    compute_ns = device.forward_ns + device.input_ns + device.weight_ns
    return host.forward_ns + host.input_ns > HOST_BOUND_RATIO * compute_ns


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


def time_dense_layer(job: JobConfig, speed: DeviceSpeed) -> LayerPass:
    """Time of a layer with a dense MLP."""
    mlp = list_mlp_gemms(job, job.model.ffn)
    activations = job.tokens * divide_ceil(job.model.ffn, job.parallel.tp)
    again_ns = _time_parts(job, speed, activations)
    if "mlp" in job.training.recompute_parts:
        again_ns += mlp[0].compute_forward_ns(speed)
        again_ns += _time_activation(job, speed, activations)
    gemms = (*list_attention_gemms(job), *mlp)
    return _time_layer(job, speed, gemms, activations) + LayerPass(0.0, again_ns, 0.0)


def time_expert_layer(job: JobConfig, speed: DeviceSpeed, experts: Experts) -> LayerPass:
    """Time of a mixture-of-experts layer with balanced routing."""
    gemms = (*list_attention_gemms(job), *list_expert_gemms(job, experts))
    routed = count_routed_tokens(job, experts)
    activations = routed * divide_ceil(experts.ffn, job.parallel.expert_tp)
    activations += job.tokens * divide_ceil(experts.shared_ffn, job.parallel.tp)
    routing_ns = speed.compute_memory_ns(
        4 * routed * job.model.hidden * job.training.activation_bytes, 4
    )
    layer = _time_layer(job, speed, gemms, activations)
    again_ns = _time_parts(job, speed, activations)
    if "experts" in job.training.recompute_parts:
        experts_again = list_expert_gemms(job, experts)
        again_ns += sum(each.compute_forward_ns(speed) for each in experts_again) + routing_ns
        again_ns += _time_activation(job, speed, activations)
    return layer + LayerPass(routing_ns, routing_ns + again_ns, 0.0)


def _time_parts(job: JobConfig, speed: DeviceSpeed, activations: float) -> float:
    """Time to recompute parts of a layer before its backward pass, apart from its MLP or
    experts."""
    parts, latent, ns = job.training.recompute_parts, job.model.latent, 0.0
    traffic = select_framework_costs(job)
    if "core-attention" in parts:
        ns += _time_attention_core(job, speed, traffic).forward_ns
    if "mla-up" in parts and latent is not None:
        ups = (each for each in list_attention_gemms(job) if each.inner in _list_ranks(latent))
        ns += sum(each.compute_forward_ns(speed) for each in ups)
    if "norms" in parts:
        hidden = job.tokens * job.model.hidden / job.parallel.sequence_split
        norm_bytes = 4 * hidden * job.training.activation_bytes * traffic.elementwise
        ns += speed.compute_memory_ns(norm_bytes, 2)
    if "activation" in parts:
        ns += _time_activation(job, speed, activations)
    return ns


def _list_ranks(latent: LatentAttention) -> tuple[int, ...]:
    return tuple(filter(None, (latent.query_rank, latent.kv_rank)))


def _time_activation(job: JobConfig, speed: DeviceSpeed, activations: float) -> float:
    """Time of the activation function's forward."""
    gates = 2 if job.model.gated else 1
    moved_bytes = (gates + 1) * activations * job.training.activation_bytes
    return speed.compute_memory_ns(moved_bytes * select_framework_costs(job).elementwise, 1)


def _time_layer(
    job: JobConfig, speed: DeviceSpeed, gemms: tuple[Gemm, ...], activations: float
) -> LayerPass:
    traffic = select_framework_costs(job)
    return (
        _time_linear(speed, gemms, traffic)
        + _time_casts(speed, gemms)
        + _time_attention_core(job, speed, traffic)
        + _time_elementwise(job, speed, traffic, activations)
    )


def _time_linear(speed: DeviceSpeed, gemms: tuple[Gemm, ...], traffic: FrameworkCosts) -> LayerPass:
    weights = sum(product.parameters for product in gemms)
    return LayerPass(
        sum(product.compute_forward_ns(speed) for product in gemms),
        sum(product.compute_input_ns(speed) for product in gemms),
        sum(product.compute_weight_ns(speed) for product in gemms)
        + speed.compute_memory_ns(weights * traffic.accumulate_bytes),
        formulas=(ACCUMULATE,),
    )


CASTS = Formula(
    "step.fp8_casts",
    "fp8: 4 bytes per element of each linear layer's input forward, and of its output's gradient"
    " backward: read in 16 bits, written in 8 bits twice, once transposed",
    "NVIDIA, Megatron-Core MoE report, arXiv:2603.07685, section 7",
)

CAST_BYTES = 4


def _time_casts(speed: DeviceSpeed, gemms: tuple[Gemm, ...]) -> LayerPass:
    """Time to cast the operands of the linear layers to fp8 (CASTS)."""
    if speed.operand_bytes > 1:
        return LayerPass(0.0, 0.0, 0.0)
    inputs = sum(each.count * each.rows * each.inner for each in gemms)
    gradients = sum(each.count * each.rows * each.columns for each in gemms)
    return LayerPass(
        speed.compute_memory_ns(CAST_BYTES * inputs, len(gemms)),
        speed.compute_memory_ns(CAST_BYTES * gradients, len(gemms)),
        0.0,
        formulas=(CASTS,),
    )


def _time_attention_core(job: JobConfig, speed: DeviceSpeed, traffic: FrameworkCosts) -> LayerPass:
    """Scores, softmax and weighted values; a fused causal kernel skips half of the work."""
    heads = divide_ceil(job.model.heads, job.parallel.tp)
    scores = float(job.tokens) * job.training.attended_tokens * heads
    work = 2 * scores * _sum_head_widths(job)
    if job.training.flash_attention:
        forward = work / 2 / speed.attention_flops_per_ns + speed.launch_ns
        backward = FUSED_BACKWARD * work / 2 / speed.attention_backward_flops_per_ns
        backward += FUSED_BACKWARD * speed.launch_ns
        formulas = () if is_attention_stated(job) else (ATTENTION,)
        core_pass = LayerPass(forward, backward, 0.0, forward, backward, formulas)
        return core_pass + time_pieces(job, speed) if is_fused_ring(job) else core_pass
    size = job.training.activation_bytes
    softmax = traffic.elementwise * (
        (5 if job.training.dropout else 4) * size + job.training.dropout
    )
    forward = work / speed.attention_flops_per_ns + speed.compute_memory_ns(scores * softmax, 5)
    backward = 2 * work / speed.attention_flops_per_ns + speed.compute_memory_ns(
        scores * (softmax + 2 * size), 6
    )
    return LayerPass(forward, backward, 0.0, forward, backward)


def _sum_head_widths(job: JobConfig) -> int:
    """Sum of a head's query and value widths."""
    latent = job.model.latent
    if latent is None:
        return 2 * job.model.head_size
    return latent.nope + latent.rope + latent.value


def _time_elementwise(
    job: JobConfig, speed: DeviceSpeed, traffic: FrameworkCosts, activations: float
) -> LayerPass:
    """Memory-bound kernels: norms, residuals with dropout, rotary embedding, activation."""
    model, size = job.model, job.training.activation_bytes
    hidden = job.tokens * model.hidden / job.parallel.sequence_split
    rotated = 0 if model.positions else 2 * _count_rotated(job)
    gates = 2 if model.gated else 1
    # A norm and a residual of each half; in a parallel block one sum of three for both halves.
    forward_hidden, backward_hidden = (8, 10) if model.parallel_block else (2 * 5, 2 * 6)
    forward = forward_hidden * hidden + (gates + 1) * activations + rotated
    backward = backward_hidden * hidden + (2 * gates + 1) * activations + rotated
    masks = 2 * hidden * job.training.dropout
    kernels = ELEMENTWISE_KERNELS
    if model.qk_norm:
        normed = _count_rotated(job)
        forward, backward, kernels = forward + 2 * normed, backward + 3 * normed, kernels + 2
    return LayerPass(
        speed.compute_memory_ns((forward * size + masks) * traffic.elementwise, kernels),
        speed.compute_memory_ns((backward * size + masks) * traffic.elementwise, kernels + 2),
        0.0,
    )


def _count_rotated(job: JobConfig) -> float:
    """Elements of queries and keys with rotary embedding."""
    model, heads = job.model, divide_ceil(job.model.heads, job.parallel.tp)
    if model.latent is not None:
        return job.tokens * (heads + 1) * model.latent.rope
    return job.tokens * (heads + divide_ceil(model.kv_heads, job.parallel.tp)) * model.head_size


# The GEMMs of one layer and microbatch on one rank.


@dataclass(frozen=True, slots=True)
class Gemm:
    """count GEMMs (rows x inner) (inner x columns): activations times a weight.

    Several are one grouped GEMM, whose tiles fill the device together.
    """

    rows: float
    columns: int
    inner: int
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * self.columns * self.inner

    def compute_forward_ns(self, speed: DeviceSpeed) -> float:
        return speed.compute_gemm_ns(self.rows, self.columns, self.inner, self.count)

    def compute_input_ns(self, speed: DeviceSpeed) -> float:
        """Time of the input gradient."""
        return speed.compute_gemm_ns(self.rows, self.inner, self.columns, self.count)

    def compute_weight_ns(self, speed: DeviceSpeed) -> float:
        """Time of the weight gradient."""
        size = speed.weight_gradient_bytes
        return speed.compute_gemm_ns(self.inner, self.columns, self.rows, self.count, size)


def list_attention_gemms(job: JobConfig) -> tuple[Gemm, ...]:
    """The projections around attention, without its core."""
    model, tokens, tp = job.model, job.tokens, job.parallel.tp
    if model.latent is not None:
        return _list_latent_gemms(job, model.latent)
    queries = divide_ceil(model.heads, tp) * model.head_size
    keys_values = 2 * divide_ceil(model.kv_heads, tp) * model.head_size
    return (
        Gemm(tokens, queries + keys_values, model.hidden),
        Gemm(tokens, model.hidden, queries),
    )


def _list_latent_gemms(job: JobConfig, latent: LatentAttention) -> tuple[Gemm, ...]:
    """MLA: each rank applies the whole compressing weights to its own part of the sequence."""
    tokens, h, heads = job.tokens, job.model.hidden, divide_ceil(job.model.heads, job.parallel.tp)
    own_tokens = tokens / job.parallel.sequence_split
    query_width = heads * (latent.nope + latent.rope)
    queries = (
        (Gemm(own_tokens, latent.query_rank, h), Gemm(tokens, query_width, latent.query_rank))
        if latent.query_rank
        else (Gemm(tokens, query_width, h),)
    )
    return (
        *queries,
        Gemm(own_tokens, latent.kv_rank + latent.rope, h),
        Gemm(tokens, heads * (latent.nope + latent.value), latent.kv_rank),
        Gemm(tokens, h, heads * latent.value),
    )


def list_mlp_gemms(job: JobConfig, ffn: int) -> tuple[Gemm, ...]:
    """GEMMs of an MLP of width ffn, split over tensor parallelism."""
    width, h = divide_ceil(ffn, job.parallel.tp), job.model.hidden
    first = (2 if job.model.gated else 1) * width
    return Gemm(job.tokens, first, h), Gemm(job.tokens, h, width)


def list_expert_gemms(job: JobConfig, experts: Experts) -> tuple[Gemm, ...]:
    """GEMMs of the router, the shared expert, and the rank's experts with balanced routing."""
    h, local = job.model.hidden, divide_ceil(experts.count, job.parallel.ep)
    width = divide_ceil(experts.ffn, job.parallel.expert_tp)
    rows = count_routed_tokens(job, experts) / local
    shared = list_mlp_gemms(job, experts.shared_ffn) if experts.shared_ffn else ()
    return (
        Gemm(job.tokens / job.parallel.sequence_split, experts.count, h),
        Gemm(rows, (2 if job.model.gated else 1) * width, h, local),
        Gemm(rows, h, width, local),
        *shared,
    )


def count_routed_tokens(job: JobConfig, experts: Experts) -> float:
    """Tokens per microbatch in all experts of one rank, each counted once per expert.

    Tensor-parallel ranks have the same tokens and split them.
    """
    return job.tokens / job.parallel.tp * experts.top_k * job.parallel.expert_tp


def build_head_gemm(job: JobConfig) -> Gemm:
    """GEMM of the output layer of a tensor-parallel rank."""
    return Gemm(
        job.tokens, divide_ceil(job.padded_vocab, job.parallel.vocab_split), job.model.hidden
    )


# Memory traffic and launch time of each framework.

ACCUMULATE = Formula(
    "step.accumulate",
    "every microbatch but the first accumulates its gradients: 3 b_g bytes per parameter,"
    " 14 in DeepSpeed's bf16 optimizer; in Megatron-LM the GEMM itself reads and writes the sum:"
    " half of what that adds to the 2 bytes written anyway, b_g - 1, for the rest overlaps,"
    " and on A100 all of it",
    "arithmetic; Megatron-LM gradient_accumulation_fusion; DeepSpeed bf16_optimizer.py",
)

UNIT_COPIES = Formula(
    "step.fsdp_copies",
    "16 bytes per parameter and microbatch: gathered weights are copied out twice (2 x 4),"
    " gradients copied in and cast to fp32 (8), in which they are summed",
    "arithmetic; Zhao et al., PyTorch FSDP, arXiv:2304.11277, section 3.2",
)


AUTOCAST = Formula(
    "step.autocast",
    "12 bytes per parameter and microbatch: autocast reads each fp32 weight and writes it in 16"
    " bits forward, and each gradient the other way backward",
    "arithmetic; torch.autocast, which caches a weight's cast until the end of its block",
)

AUTOCAST_BYTES = 12.0


@dataclass(frozen=True, slots=True)
class FrameworkCosts:
    """Constants of a framework.

    elementwise multiplies the bytes of norms, residuals, dropout and activation: 1 if each is fused
    into one read and one write. accumulate_bytes are moved per parameter and microbatch for
    gradient accumulation, unit_bytes for the copies around FSDP's collectives, or by autocast.
    host_ns is the host's launch time of one layer's forward, an estimate (about 30 kernels of 10
    us). loss_bytes are moved per logit, forward and backward.
    """

    elementwise: float
    accumulate_bytes: float
    unit_bytes: float
    host_ns: float
    loss_bytes: tuple[float, float] = LOSS_BYTES


EAGER_TRAFFIC = 1.75
"""Memory traffic of unfused operations over fused ones (fitted on Megatron-LM of 2020)."""

SHARDED_TRAFFIC = 2.4
"""The same for models under FSDP, which also cast each gathered weight (fitted on llm-foundry)."""

UPCAST_TRAFFIC = 3.0
"""The same for Llama's layers, whose norms and rotary embedding are cast to fp32 and back, each
step in a kernel of its own: counted in elements, 36 h + 5 f + 10 (a + k) d instead of
10 h + 3 f + 2 (a + k) d forward."""

COMPILED_TRAFFIC = 1.3
"""The same with torch.compile: its norms read and write at 0.8 of the rate of fused kernels
forward, 0.4 backward (cudnn-frontend's norm benchmark on H200 and GB200)."""


def select_framework_costs(job: JobConfig) -> FrameworkCosts:
    """The constants of the job's framework."""
    later_share = (job.microbatches - 1) / job.microbatches
    accumulate_bytes = 3.0 * job.training.gradient_bytes * later_share
    match job.training.framework:
        case "megatron" | "nanotron":
            return FrameworkCosts(1.0, 0.0, 0.0, 250e3)
        case "deepspeed" | "zero-paper":
            return FrameworkCosts(1.0, 14.0 * later_share, 0.0, 400e3)
        case "fsdp2" if job.parallel.sum_once:
            return FrameworkCosts(
                _find_sharded_traffic(job), accumulate_bytes, 8.0 + 8.0 / job.microbatches, 400e3
            )
        case "fsdp2":
            return FrameworkCosts(_find_sharded_traffic(job), 0.0, 16.0, 400e3)
        case "ddp":
            return FrameworkCosts(EAGER_TRAFFIC, accumulate_bytes, 0.0, 400e3)
        case "huggingface":
            casts = 0.0 if job.training.dtype == "fp32" else AUTOCAST_BYTES
            traffic = UPCAST_TRAFFIC if job.model.norm == "rms" else EAGER_TRAFFIC
            return FrameworkCosts(traffic, accumulate_bytes, casts, 400e3, UPCAST_LOSS_BYTES)


def _find_sharded_traffic(job: JobConfig) -> float:
    if job.training.compile:
        return COMPILED_TRAFFIC
    if not job.is_fsdp:
        return EAGER_TRAFFIC
    return UPCAST_TRAFFIC if job.model.norm == "rms" else SHARDED_TRAFFIC


# Ring attention computes its result in pieces, which it has to merge.

PIECES = Formula(
    "step.ring_pieces",
    "each of the c-1 further pieces is added to an fp32 sum: 10 bytes per element of the output"
    " forward (torch without compile: 38), of the gradients of queries, keys and values backward,"
    " and 2 or 3 more launches",
    "Liu et al., Ring Attention, arXiv:2310.01889, section 3; PyTorch 2.13,"
    " _context_parallel/_attention.py, _SDPAMerger and _templated_ring_attention_backward",
)

MERGED_BYTES = 10
"""Bytes per element: a piece is read in 16 bits, the fp32 sum is read and written."""

EAGER_MERGED_BYTES = 38
"""The same where each operation of torch's merge is a kernel: cast to fp32 (6), difference (12),
product with the weight (8), sum (12)."""

FORWARD_KERNELS = 2

BACKWARD_KERNELS = 3
"""Kernels per piece: attention itself, and one sum in the forward, or two in the backward (queries;
keys and values)."""


def time_pieces(job: JobConfig, speed: DeviceSpeed) -> LayerPass:
    """Time to merge the further pieces of one layer's ring attention (PIECES).

    Counted for the last rank, which attends to all earlier tokens and merges whole pieces; the
    others wait for it.
    """
    model, latent = job.model, job.model.latent
    value = model.head_size if latent is None else latent.value
    output = divide_ceil(model.heads, job.parallel.tp) * value
    is_eager = is_torch_ring(job) and not job.training.compile
    merged_bytes = EAGER_MERGED_BYTES if is_eager else MERGED_BYTES
    gradients = count_query_width(job) + count_kv_width(job)
    forward = speed.compute_memory_ns(merged_bytes * job.tokens * output, FORWARD_KERNELS)
    backward = speed.compute_memory_ns(MERGED_BYTES * job.tokens * gradients, BACKWARD_KERNELS)
    turns = job.parallel.ring - 1
    return LayerPass(turns * forward, turns * backward, 0.0, formulas=(PIECES,))
