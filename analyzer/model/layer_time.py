"""Compute time of layers: GEMMs, memory traffic, kernel launches, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stepsplit.analyzer.model.comm_ops import (
    count_dense_layer_pairs,
    count_expert_layer_pairs,
    count_kv_width,
    count_query_width,
    is_fused_ring,
    is_gathered_in_fp8,
    is_torch_ring,
)
from stepsplit.analyzer.model.config import Experts, JobConfig, LatentAttention
from stepsplit.analyzer.model.device_speed import (
    ATTENTION,
    UNALIGNED,
    DeviceSpeed,
    compute_fp32_speed,
    is_attention_stated,
    is_head_unaligned,
)
from stepsplit.analyzer.model.elementwise import (
    CLAMPED,
    EAGER,
    UNFUSED,
    find_moved_bytes,
    find_traffic,
    find_unfused_parts,
    time_activation,
    time_elementwise,
    time_routing,
    time_softmax,
)
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.memory_states import count_hidden, has_fp32_experts, is_clamped
from stepsplit.analyzer.model.parameters import (
    Adapter,
    compute_stopped_share,
    divide_ceil,
    is_selective_by_op,
    list_adapters,
)
from stepsplit.analyzer.model.rank_layout import Chunk, count_rerun_layers

# Compute time of one model stage and microbatch on one rank, recomputation included.

LOSS_BYTES = (8.0, 6.0)
"""Bytes moved per logit, forward and backward: the loss reads and writes it in fp32, its backward
in the training dtype."""

UPCAST_LOSS_BYTES = (18.0, 28.0)
"""The same where the logits are cast to fp32 in a kernel of their own (6 bytes), as are the
gradients back, log_softmax reads and writes fp32 (8 bytes), and its backward fills its gradient (4)
and reads it and the result (12); at 0.79 of the rate of fused kernels."""


def compute_chunk_passes(
    job: JobConfig, speed: DeviceSpeed, chunks: tuple[Chunk, ...]
) -> tuple[LayerPass, ...]:
    """Compute time of each chunk, in order."""
    copies = time_sequence_copies(job, speed)
    dense = time_dense_layer(job, speed) + copies * count_dense_layer_pairs(job)
    experts = None
    if job.model.experts is not None:
        experts = time_expert_layer(job, speed, job.model.experts)
        experts += copies * count_expert_layer_pairs(job)
    if is_selective_by_op(job):
        # Time of torchtitan's selective recomputation of one dense layer (SELECTIVE_OPS); of
        # latent attention, half of the GEMMs.
        model, tp = job.model, job.parallel.tp
        width, attention = divide_ceil(model.ffn, tp), list_attention_gemms(job)
        gemms = [Gemm(job.tokens, width, model.hidden)] if model.gated else []
        again_ns = 0.0
        if model.latent is None:
            keys = divide_ceil(model.kv_heads, tp) * model.head_size
            gemms += [Gemm(job.tokens, keys, model.hidden), attention[-1]]
        else:
            again_ns += sum(each.compute_forward_ns(speed) for each in attention) / 2
        again_ns += sum(each.compute_forward_ns(speed) for each in gemms)
        again_ns += time_casts(job, speed, tuple(gemms)).forward_ns
        again_ns += time_elementwise(job, speed, job.tokens * width).forward_ns
        if _is_sequence_copied(job):
            again_ns += count_dense_layer_pairs(job) * _time_gather_copy(job, speed)
        dense += LayerPass(0.0, again_ns, 0.0, formulas=(SELECTIVE_OPS,))
        if experts is not None:
            experts += LayerPass(0.0, (experts.forward_ns - experts.core_ns) / 2, 0.0)
    passes = []
    for chunk in chunks:
        layers = dense * chunk.dense_layers
        if experts is not None:
            layers += experts * chunk.expert_layers
        layers = add_recompute(job, layers, chunk.layers)
        if stopped := chunk.dense_layers * compute_stopped_share(job):
            # Time that the recomputation of one dense layer saves (EARLY_STOP).
            saved_ns = list_mlp_gemms(job, job.model.ffn)[-1].compute_forward_ns(speed)
            if _is_sequence_copied(job):
                saved_ns += _time_scatter_copy(job, speed)
            layers += LayerPass(0.0, -saved_ns, 0.0, formulas=(EARLY_STOP,)) * stopped
        # The embedding scatters its output, the head gathers its input.
        ends = copies * ((chunk.embedding + chunk.head) / 2)
        passes.append(layers + ends + _time_embedding_and_head(job, speed, chunk))
    return tuple(passes)


SEQUENCE_COPIES = Formula(
    "step.sequence_copies",
    "2 b_a T h bytes per gather and per reduce_scatter of the sequence over tp: NCCL concatenates"
    " along the batch, and torch copies that into the order of the sequence (a gather of one"
    " sequence is a view); a GEMM that overlaps its reduce_scatter reads b_a T h of partial sums",
    "PyTorch 2.13, distributed/_functional_collectives.py, all_gather_single and"
    " reduce_scatter_single; _symmetric_memory, _fused_matmul_reduce_scatter_impl",
)


def time_sequence_copies(job: JobConfig, speed: DeviceSpeed) -> LayerPass:
    """Time of the copies around one gather and one reduce_scatter of the sequence
    (SEQUENCE_COPIES); zero with Megatron-LM, whose first dimension is the sequence."""
    if not _is_sequence_copied(job):
        return LayerPass(0.0, 0.0, 0.0)
    copy_ns = _time_gather_copy(job, speed) + _time_scatter_copy(job, speed)
    return LayerPass(copy_ns, copy_ns, 0.0, formulas=(SEQUENCE_COPIES,))


def _is_sequence_copied(job: JobConfig) -> bool:
    """Whether tensor parallelism is torch's, with the sequence as second dimension."""
    layout = job.parallel
    return layout.tp > 1 and layout.sequence_parallel and job.profile.messages.copies_sequence


def _time_gather_copy(job: JobConfig, speed: DeviceSpeed) -> float:
    if "tp" in job.parallel.overlap or job.training.micro_batch == 1:
        return 0.0
    size = 1 if is_gathered_in_fp8(job) else job.training.activation_bytes
    return speed.compute_memory_ns(2 * job.tokens * job.model.hidden * size, 1)


def _time_scatter_copy(job: JobConfig, speed: DeviceSpeed) -> float:
    times = 1 if "tp" in job.parallel.overlap else 2
    copied_bytes = times * job.tokens * job.model.hidden * job.training.activation_bytes
    return speed.compute_memory_ns(copied_bytes, 1)


def add_recompute(job: JobConfig, layers: LayerPass, count: int) -> LayerPass:
    """Add the recomputation of count layers; every layer runs its forward again, however few inputs
    are saved. Selective: attention's core, if it is not fused; torchtitan's is of each layer."""
    match job.training.recompute:
        case "none":
            return layers
        case "selective" if is_selective_by_op(job) or job.training.flash_attention:
            return layers
        case "selective":
            return layers + LayerPass(0.0, layers.core_ns, 0.0)
    share = count_rerun_layers(job, count) / count if count else 1.0
    return layers + LayerPass(0.0, layers.forward_ns * share, 0.0)


EARLY_STOP = Formula(
    "step.early_stop",
    "the recomputation of a dense layer ends before the last GEMM of its MLP, and the tensor-"
    "parallel collective after it",
    "PyTorch 2.13, utils/checkpoint.py, early_stop (since 2.1, without reentrant autograd)",
)


SELECTIVE_OPS = Formula(
    "step.selective_ops",
    "a dense layer runs again what is between its GEMMs, and the GEMMs of keys, output and w3: of"
    " q, k, v, o, w1, w3, w2 the 1st, 3rd, 5th and 7th are saved, and nothing needs w2",
    "pytorch/torchtitan, distributed/activation_checkpoint.py, option op",
)


def _time_embedding_and_head(job: JobConfig, speed: DeviceSpeed, chunk: Chunk) -> LayerPass:
    """Embedding before the layers, head and loss after them."""
    zero = LayerPass(0.0, 0.0, 0.0)
    total = zero
    if chunk.embedding:
        copy_ns = speed.compute_memory_ns(
            3 * job.tokens * job.model.hidden * job.training.activation_bytes, 2
        )
        total += LayerPass(copy_ns, 0.0, 0.0 if job.training.lora_rank else copy_ns)
    if not chunk.head:
        return total
    total += time_head(job, speed)
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
    linear = time_linear(job, speed, (projection,))
    return time_head(job, speed) + linear + LayerPass(norms, norms, 0.0, formulas=(MTP,))


def time_head(job: JobConfig, speed: DeviceSpeed) -> LayerPass:
    gemm, head_speed = build_head_gemm(job), speed.head_speed
    logits = gemm.rows * gemm.columns
    gradients = gemm.parameters * count_accumulate_bytes(job)
    forward_bytes, backward_bytes = select_loss_bytes(job)
    formulas = (UNALIGNED,) if is_head_unaligned(job) else ()
    weight_ns = gemm.compute_weight_ns(head_speed) + speed.compute_memory_ns(gradients)
    return LayerPass(
        gemm.compute_forward_ns(head_speed) + speed.compute_memory_ns(logits * forward_bytes, 4),
        gemm.compute_input_ns(head_speed) + speed.compute_memory_ns(logits * backward_bytes, 2),
        0.0 if job.training.lora_rank else weight_ns,
        formulas=formulas,
    )


def select_loss_bytes(job: JobConfig) -> tuple[float, float]:
    """Bytes that the loss moves per logit, forward and backward, as the framework runs it."""
    is_upcast = {
        "never": False,
        "unfused": not job.training.fused_loss,
        "transformers": job.runs_transformers,
    }[job.profile.times.upcasts_loss]
    return UPCAST_LOSS_BYTES if is_upcast and not job.training.compile else LOSS_BYTES


# Compute time of one layer and microbatch on one rank.

FUSED_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward: it recomputes the scores (Dao, 2022)."""


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
        again_ns += time_activation(job, speed, activations)
    gemms = (*list_attention_gemms(job), *mlp)
    layer = _time_layer(job, speed, gemms, activations) + LayerPass(0.0, again_ns, 0.0)
    return layer + _time_adapters(job, speed, list_adapters(job))


def time_expert_layer(job: JobConfig, speed: DeviceSpeed, experts: Experts) -> LayerPass:
    """Time of a mixture-of-experts layer with balanced routing."""
    gemms, routed = list_expert_gemms(job, experts), count_routed_tokens(job, experts)
    wide = LayerPass(0.0, 0.0, 0.0)
    if has_fp32_experts(job):
        fp32_speed = compute_fp32_speed(job, speed)
        wide = replace(time_linear(job, fp32_speed, gemms[1:3]), formulas=(EXPERTS_FP32,))
        gemms = (gemms[0], *gemms[3:])
    activations = routed * divide_ceil(experts.ffn, job.parallel.expert_tp)
    shared = job.tokens * divide_ceil(experts.shared_ffn, job.parallel.tp)
    routing = time_routing(job, speed, routed)
    gemms = (*list_attention_gemms(job), *gemms)
    layer = wide + _time_layer(job, speed, gemms, shared, activations)
    again_ns = _time_parts(job, speed, activations + shared)
    if "experts" in job.training.recompute_parts:
        experts_again = list_expert_gemms(job, experts)
        again_ns += sum(each.compute_forward_ns(speed) for each in experts_again)
        again_ns += routing.forward_ns + time_activation(job, speed, activations + shared)
    layer += LayerPass(routing.forward_ns, routing.backward_ns + again_ns, 0.0)
    return layer + _time_adapters(job, speed, list_adapters(job, expert=True))


def _time_parts(job: JobConfig, speed: DeviceSpeed, activations: float) -> float:
    """Time to recompute parts of a layer before its backward pass, apart from its MLP or
    experts."""
    parts, latent, ns = job.training.recompute_parts, job.model.latent, 0.0
    if "core-attention" in parts:
        ns += time_attention_core(job, speed).forward_ns
    if "mla-up" in parts and latent is not None:
        # What expands the compressed queries, keys and values.
        ranks = {latent.query_rank, latent.kv_rank} - {0}
        ups = (each for each in list_attention_gemms(job) if each.inner in ranks)
        ns += sum(each.compute_forward_ns(speed) for each in ups)
    if "norms" in parts:
        norm_bytes = 4 * count_hidden(job) * job.training.activation_bytes
        ns += speed.compute_memory_ns(norm_bytes * find_traffic(job), 2)
    if "activation" in parts:
        ns += time_activation(job, speed, activations)
    return ns


def _time_layer(
    job: JobConfig,
    speed: DeviceSpeed,
    gemms: tuple[Gemm, ...],
    activations: float,
    routed_activations: float = 0.0,
) -> LayerPass:
    elementwise = time_elementwise(job, speed, activations, routed_activations)
    formulas = (EAGER,) if find_moved_bytes(job) is not None else ()
    if not formulas and find_unfused_parts(job):
        formulas = (CLAMPED,) if is_clamped(job) else (UNFUSED,)
    return (
        time_linear(job, speed, gemms)
        + time_casts(job, speed, gemms)
        + time_attention_core(job, speed)
        + LayerPass(elementwise.forward_ns, elementwise.backward_ns, 0.0, formulas=formulas)
    )


EXPERTS_FP32 = Formula(
    "step.experts_fp32",
    "2 FLOPs per weight and token at the fp32 peak, outside of the tensor cores: autocast does not"
    " cast the operands of torch's grouped_mm; models loaded in bf16 do not have it",
    "transformers 5, integrations/moe.py; own recordings on an H200",
)


def time_linear(job: JobConfig, speed: DeviceSpeed, gemms: tuple[Gemm, ...]) -> LayerPass:
    """Time of linear layers and of the sums of their gradients, if they have any."""
    passes = _time_gemms(speed, gemms)
    if job.training.lora_rank:
        return replace(passes, weight_ns=0.0)
    weights = sum(product.parameters for product in gemms)
    sums_ns = speed.compute_memory_ns(weights * count_accumulate_bytes(job))
    return passes + LayerPass(0.0, 0.0, sums_ns, formulas=(ACCUMULATE,))


def _time_gemms(speed: DeviceSpeed, gemms: tuple[Gemm, ...]) -> LayerPass:
    return LayerPass(
        sum(product.compute_forward_ns(speed) for product in gemms),
        sum(product.compute_input_ns(speed) for product in gemms),
        sum(product.compute_weight_ns(speed) for product in gemms),
    )


LORA = Formula(
    "step.lora",
    "of a frozen weight no gradient; each adapter two GEMMs of its rank, and 10 bytes per element"
    " of its output forward (scaled, added), 4 backward (scaled), and 6 per element of its input"
    " (added to the input's gradient)",
    "Hu et al., LoRA, arXiv:2106.09685, section 4; huggingface/peft, tuners/lora/layer.py",
)

LORA_OUTPUT_BYTES, LORA_GRADIENT_BYTES, LORA_INPUT_BYTES = 10, 4, 6
"""Per element, as in LORA."""


def _time_adapters(job: JobConfig, speed: DeviceSpeed, adapters: tuple[Adapter, ...]) -> LayerPass:
    """Time of the adapters of a layer, in 16 bits (LORA)."""
    rank, narrow, total = job.training.lora_rank, speed.head_speed, LayerPass(0.0, 0.0, 0.0)
    for one in adapters:
        matrices = one.list_matrices(rank)
        total += _time_gemms(narrow, tuple(Gemm(job.tokens, *shape) for shape in matrices))
        outputs, inputs = job.tokens * one.outputs, job.tokens * one.count * one.inputs
        forward_bytes = LORA_OUTPUT_BYTES * outputs
        backward_bytes = LORA_GRADIENT_BYTES * outputs + LORA_INPUT_BYTES * inputs
        total += LayerPass(
            speed.compute_memory_ns(forward_bytes, 2), speed.compute_memory_ns(backward_bytes, 2),
            0.0, formulas=(LORA,),
        )  # fmt: skip
    return total


CASTS = Formula(
    "step.fp8_casts",
    "fp8: 4 bytes per element of each linear layer's input forward, and of its output's gradient"
    " backward: read in 16 bits, written in 8 bits twice, once transposed; nvfp4: the time of 8 and"
    " 11 bytes, for Hadamard transforms and stochastic rounding",
    "NVIDIA, Megatron-Core MoE report, arXiv:2603.07685, section 7; pytorch/ao, nvfp4_training:"
    " 28,672 columns are read at 1.56 and 1.10 TB/s on GB200",
)

CAST_BYTES = {"fp8": (4.0, 4.0), "nvfp4": (8.0, 11.0)}
"""Bytes of a memory-bound kernel that takes as long as the cast of an element, forward and
backward."""


def time_casts(job: JobConfig, speed: DeviceSpeed, gemms: tuple[Gemm, ...]) -> LayerPass:
    """Time to cast the operands of the linear layers to 8 or 4 bits (CASTS)."""
    forward_bytes, backward_bytes = CAST_BYTES.get(job.training.dtype, (0.0, 0.0))
    if not forward_bytes:
        return LayerPass(0.0, 0.0, 0.0)
    inputs = sum(each.count * each.rows * each.inner for each in gemms)
    gradients = sum(each.count * each.rows * each.columns for each in gemms)
    return LayerPass(
        speed.compute_memory_ns(forward_bytes * inputs, len(gemms)),
        speed.compute_memory_ns(backward_bytes * gradients, len(gemms)),
        0.0,
        formulas=(CASTS,),
    )


def time_attention_core(job: JobConfig, speed: DeviceSpeed) -> LayerPass:
    """Scores, softmax and weighted values; a fused causal kernel skips half of the work, and what
    is outside of a window."""
    heads = divide_ceil(job.model.heads, job.parallel.tp)
    tokens = job.training.attended_tokens
    is_fused = job.training.flash_attention
    keys = job.model.count_attended_keys(tokens) if is_fused else tokens
    scores = float(job.tokens) * keys * heads
    latent, width = job.model.latent, job.model.head_size
    # A head's query and value widths.
    widths = 2 * width if latent is None else latent.nope + latent.rope + latent.value
    work = 2 * scores * widths
    if is_fused:
        forward = work / 2 / speed.attention_flops_per_ns + speed.launch_ns
        backward = FUSED_BACKWARD * work / 2 / speed.attention_backward_flops_per_ns
        backward += FUSED_BACKWARD * speed.launch_ns
        formulas = () if is_attention_stated(job) else (ATTENTION,)
        core_pass = LayerPass(forward, backward, 0.0, forward, backward, formulas)
        return core_pass + time_pieces(job, speed) if is_fused_ring(job) else core_pass
    softmax = time_softmax(job, speed, scores)
    forward = work / speed.attention_flops_per_ns + softmax.forward_ns
    backward = 2 * work / speed.attention_flops_per_ns + softmax.backward_ns
    return LayerPass(forward, backward, 0.0, forward, backward)


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


ACCUMULATE = Formula(
    "step.accumulate",
    "every microbatch but the first accumulates its gradients: 3 b_g bytes per parameter,"
    " 14 in DeepSpeed's bf16 optimizer; in Megatron-LM the GEMM itself reads and writes the sum:"
    " half of what that adds to the 2 bytes written anyway, b_g - 1, for the rest overlaps,"
    " and on A100 all of it",
    "arithmetic; Megatron-LM gradient_accumulation_fusion; DeepSpeed bf16_optimizer.py",
)


def count_accumulate_bytes(job: JobConfig) -> float:
    """Bytes moved per parameter and microbatch to accumulate gradients (ACCUMULATE)."""
    costs, m = job.profile.times, job.microbatches
    adds_in_reduction = costs.accumulation == "reduction" and not job.parallel.sum_once
    if costs.accumulation in ("gemm", "free") or adds_in_reduction:
        return 0.0
    each_bytes = costs.accumulate_bytes or 3.0 * job.training.gradient_bytes
    return each_bytes * ((m - 1) / m)


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

FORWARD_KERNELS, BACKWARD_KERNELS = 2, 3
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
