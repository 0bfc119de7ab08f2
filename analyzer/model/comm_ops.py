"""Communication ops of the model: message bytes and wire bytes of each kind of call."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.formulas import Formula
from stepsplit.analyzer.model.parameters import (
    StageParameters,
    compute_stopped_share,
    count_vocabulary_parameters,
    divide_ceil,
    is_selective_by_op,
    list_adapters,
    require_experts,
    select_trained,
)
from stepsplit.analyzer.model.rank_layout import StageConfig, list_rank_chunks, place_group
from stepsplit.analyzer.ops import count_ring_bytes, format_factors

# Tensor parallelism, with and without sequence parallelism.

TENSOR = Formula(
    "comm.tensor",
    "m (4 L + 2) all_reduces of T h bytes, m (6 L + 2) with full recomputation;"
    " per layer and microbatch 8 b s h (t-1)/t elements are sent; parallel blocks have half of the"
    " calls of each layer",
    "Shoeybi et al., arXiv:1909.08053, section 3; Narayanan et al., SC'21, section 3.2;"
    " Almazrouei et al., Falcon, arXiv:2311.16867 (parallel blocks)",
)

SEQUENCE = Formula(
    "comm.sequence",
    "each all_reduce becomes a reduce_scatter of T h and an all_gather of T h/t; Megatron-LM and"
    " nanotron gather the input of column-parallel layers again in the backward pass",
    "Korthikanti et al., arXiv:2205.05198, section 4.2.2; huggingface/nanotron,"
    " tp_recompute_allgather",
)


def is_gathered_again(job: JobConfig) -> bool:
    """Whether the backward gathers the layers' inputs again; else they are kept as gathered, as by
    adapters."""
    return job.profile.messages.gathers_again and not job.training.lora_rank


LOSS = Formula(
    "comm.loss",
    "3 all_reduces of 4 T bytes per microbatch: maximum, target logit, sum over the vocabulary",
    "NVIDIA/Megatron-LM, tensor_parallel/cross_entropy.py; Shoeybi et al., arXiv:1909.08053",
)

LOSS_BYTES = 4
"""The loss is reduced in fp32."""


def list_tp_ops(job: JobConfig, stage: StageConfig, params: StageParameters) -> tuple[CommOp, ...]:
    """Lists the tp calls of one rank of a stage in a step; empty if tp is 1."""
    if job.parallel.tp == 1:
        return ()
    ops = (*_list_loss_ops(job, stage), *_list_adapter_ops(job, stage))
    if not job.parallel.sequence_parallel:
        return (*_list_all_reduces(job, stage), *ops)
    if not job.training.lora_rank:
        ops = (*ops, _make_replicated_all_reduce(job, stage, params))
    return (*_list_sp_ops(job, stage), *ops)


def _list_all_reduces(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    """Without sequence parallelism: each layer pair all_reduces its output and input gradient."""
    pairs, size, tp = _count_product_pairs(job, stage), count_hidden_bytes(job), job.parallel.tp
    counts = {
        "forward": pairs + (stage.embedding and job.parallel.split_vocab),
        "backward": pairs + (stage.head and job.parallel.split_vocab),
        "recompute": _count_recomputed_pairs(job, pairs) - _count_stopped(job, stage),
    }
    return tuple(
        make_all_reduce(site, count_rank_microbatches(job) * counts[site.phase], size, tp)
        for site in (CommSite("tp", "tp", stage.index, phase, (TENSOR,)) for phase in counts)
    )


def _list_sp_ops(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    """With sequence parallelism: each layer pair gathers its input and reduce-scatters its output,
    and the reverse in the backward pass."""
    pairs = _count_product_pairs(job, stage)
    recomputed = _count_recomputed_pairs(job, pairs)
    # torchtitan's selective recomputation saves what reduce_scatters return.
    gathered = pairs if is_selective_by_op(job) else recomputed
    first, last = int(stage.embedding), int(stage.head)
    again = is_gathered_again(job)
    counts = {
        "forward": (pairs, last, pairs + first),
        "backward": (pairs + again * pairs, first + again * last, pairs + last),
        "recompute": (gathered, 0, recomputed - _count_stopped(job, stage)),
    }
    return tuple(
        message
        for phase, (gathers, wide_gathers, scatters) in counts.items()
        for message in _make_gathers_and_scatters(
            job, CommSite("sp", "tp", stage.index, phase, (TENSOR, SEQUENCE)),
            (gathers, wide_gathers, scatters),
        )
    )  # fmt: skip


def _make_gathers_and_scatters(
    job: JobConfig, site: CommSite, counts: tuple[int, int, int]
) -> tuple[CommOp, ...]:
    """The calls of one phase; counts: gathers of the layers, of embedding and head, scatters."""
    tp, size = job.parallel.tp, count_hidden_bytes(job)
    gathers, wide_gathers, scatters = (count_rank_microbatches(job) * each for each in counts)
    scattered = make_reduce_scatter(site, scatters, size, tp)
    if not is_gathered_in_fp8(job):
        return make_all_gather(site, gathers + wide_gathers, size // tp, tp), scattered
    narrow_site = replace(site, formulas=(*site.formulas, FP8_GATHER))
    narrow = make_all_gather(narrow_site, gathers, size // job.training.activation_bytes // tp, tp)
    return narrow, make_all_gather(site, wide_gathers, size // tp, tp), scattered


FP8_GATHER = Formula(
    "comm.fp8_gather",
    "fp8: inputs and output gradients that layers gather over tp are cast before: 1 byte an"
    " element",
    "NVIDIA/TransformerEngine, pytorch/module/layernorm_linear.py; pytorch/torchtitan,"
    " docs/float8.md (scales per tensor)",
)


def is_gathered_in_fp8(job: JobConfig) -> bool:
    """Whether sequence parallelism gathers in 8 bits (FP8_GATHER)."""
    training, kind = job.training, job.profile.messages.fp8_gather
    has_one_scale = kind == "tensor-scaled" and training.fp8_scaling == "tensor"
    return training.dtype == "fp8" and (kind == "always" or has_one_scale)


def _count_product_pairs(job: JobConfig, stage: StageConfig) -> int:
    """Counts pairs of a column- and a row-parallel linear layer: attention and MLP of each layer,
    which are one in a parallel block.

    With sequence parallelism routed tokens are sent to their experts directly (list_ep_ops), so
    only the shared expert of a mixture is such a pair.
    """
    dense = count_dense_layer_pairs(job) * stage.dense_layers
    return dense + count_expert_layer_pairs(job) * stage.expert_layers


def count_dense_layer_pairs(job: JobConfig) -> int:
    """Counts the pairs of a layer with an MLP."""
    return 1 if job.model.parallel_block else 2


def count_expert_layer_pairs(job: JobConfig) -> int:
    """Counts the pairs of a layer with experts."""
    experts = job.model.experts
    has_shared = experts is not None and experts.shared_ffn > 0
    if experts is None or job.model.parallel_block:
        return 1
    return 2 if has_shared or not job.parallel.sequence_parallel else 1


def _count_recomputed_pairs(job: JobConfig, pairs: int) -> int:
    return _scale_rerun(job, pairs) if job.training.recompute in FULL_RECOMPUTE else 0


def _count_stopped(job: JobConfig, stage: StageConfig) -> int:
    """Counts the layers whose recomputation ends before their last collective (early_stop)."""
    return round(compute_stopped_share(job) * stage.dense_layers)


def _list_loss_ops(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    if not (stage.head and job.parallel.split_vocab):
        return ()
    site = CommSite("loss", "tp", stage.index, "forward", (LOSS,))
    return (
        make_all_reduce(
            site, 3 * count_rank_microbatches(job), LOSS_BYTES * job.tokens, job.parallel.tp
        ),
    )


ADAPTED = Formula(
    "comm.adapters",
    "Megatron-LM: a column-parallel layer's adapter gathers T r forward and all_reduces T r"
    " backward, and T h too without sequence parallelism; a row-parallel layer's all_reduces T r"
    " and gathers T h forward, and all_reduces T r backward; with sequence parallelism it gathers"
    " T h there again",
    "NVIDIA-NeMo/Megatron-Bridge, peft/utils.py, ParallelLinearAdapter",
)


def _list_adapter_ops(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    """The calls of Megatron-LM's adapters (ADAPTED)."""
    training, tp = job.training, job.parallel.tp
    if not training.lora_rank or job.profile.model.adapters == "peft":
        return ()
    adapters = list_adapters(job) * stage.dense_layers
    adapters += list_adapters(job, expert=True) * stage.expert_layers
    rows = sum(one.is_row for one in adapters)
    columns, hidden = len(adapters) - rows, count_hidden_bytes(job)
    narrow = job.tokens * training.lora_rank * training.activation_bytes
    runs = count_rank_microbatches(job)
    again = _scale_rerun(job, runs) if training.recompute in FULL_RECOMPUTE else 0
    ops = list[CommOp]()
    for phase, count in (("forward", runs), ("recompute", again)):
        site = CommSite("tp", "tp", stage.index, phase, (ADAPTED,))
        ops.append(make_all_gather(site, count * columns, narrow // tp, tp))
        ops.append(make_all_reduce(site, count * rows, narrow, tp))
        ops.append(make_all_gather(site, count * rows, hidden // tp, tp))
    site = CommSite("tp", "tp", stage.index, "backward", (ADAPTED,))
    ops.append(make_all_reduce(site, runs * (columns + rows), narrow, tp))
    if job.parallel.sequence_parallel:
        return (*ops, make_all_gather(site, runs * rows, hidden // tp, tp))
    return (*ops, make_all_reduce(site, runs * columns, hidden, tp))


def _make_replicated_all_reduce(
    job: JobConfig, stage: StageConfig, params: StageParameters
) -> CommOp:
    """With sequence parallelism, gradients of weights replicated over tp are all_reduced."""
    # Counts learned positions whose gradients are partial: a rank adds only those of its tokens.
    # Megatron-LM adds positions before it splits the sequence, so its gradients are complete.
    whole = not stage.embedding or job.profile.messages.whole_positions
    size = (
        params.replicated + (0 if whole else job.model.positions * job.model.hidden)
    ) * job.training.gradient_bytes
    if job.is_fsdp:
        size //= job.parallel.shard_size
    site = CommSite("sp", "tp", stage.index, "grad_sync", (TENSOR, SEQUENCE))
    return make_all_reduce(site, 1, size, job.parallel.tp)


# Context parallelism: communication around the attention of each layer.

CONTEXT_RING = Formula(
    "comm.context_ring",
    "(c-1) sends of keys and values forward, 2 (c-1) backward (them and their gradients):"
    " 2 T k d/t elements each",
    "Liu et al., Ring Attention, arXiv:2310.01889; NVIDIA/TransformerEngine, context_parallel.py",
)

CONTEXT_TORCH = Formula(
    "comm.context_torch",
    "1 all_gather of keys and values forward and again backward, where c all_to_alls pass their"
    " fp32 gradients on, each to one rank; keys and values of every query head: 2 T a d/t elements",
    "PyTorch 2.13, _context_parallel/_attention.py, _templated_ring_attention_backward;"
    " pytorch/torchtitan, models/llama3, repeat_kv",
)

GATHER = Formula(
    "comm.context_all_gather",
    "all_gather of keys and values forward and again backward (only a rank's own are saved), and"
    " reduce_scatter of their gradients",
    "Grattafiori et al., Llama 3, arXiv:2407.21783, section 3.3.2; NVIDIA/TransformerEngine,"
    " context_parallel.py; PyTorch 2.13, _context_parallel/_attention.py, _AllGatherRotater",
)

ULYSSES = Formula(
    "comm.context_ulysses",
    "4 all_to_alls forward and 4 backward: queries and output T a d/t, keys and values T k d/t",
    "Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509",
)


def list_cp_ops(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    """Lists the cp calls of one rank of a stage in a step; empty if cp is 1.

    Recomputing attention repeats its forward communication.
    """
    if job.parallel.cp == 1:
        return ()
    phases = ["forward", "backward"]
    stored = job.training.recompute == "selective" and not job.training.flash_attention
    if stored or job.training.recompute in FULL_RECOMPUTE:
        phases.append("recompute")
    formula, calls = {
        "ring": (CONTEXT_RING, _list_ring_ops), "all-gather": (GATHER, _list_gather_ops),
        "ulysses": (ULYSSES, _list_ulysses_ops), "torch": (CONTEXT_TORCH, _list_torch_ops),
    }["torch" if is_torch_ring(job) else job.parallel.context_kind]  # fmt: skip
    return tuple(
        message
        for phase in phases
        for message in calls(
            job,
            CommSite("cp", "cp", stage.index, phase, (formula,)),
            _scale_rerun(job, count_rank_microbatches(job) * stage.layers)
            if phase == "recompute"
            else count_rank_microbatches(job) * stage.layers,
        )
    )


def is_fused_ring(job: JobConfig) -> bool:
    """Whether attention is fused and runs as ring attention."""
    return job.parallel.ring > 1 and job.training.flash_attention


def is_torch_ring(job: JobConfig) -> bool:
    """Whether context parallelism is torch's context_parallel (CONTEXT_TORCH)."""
    layout = job.parallel
    return job.profile.messages.torch_ring and layout.ring > 1 and layout.ulysses == 1


def _list_torch_ops(job: JobConfig, site: CommSite, count: int) -> tuple[CommOp, ...]:
    cp, size = job.parallel.cp, _count_kv_bytes(job)
    gathered = make_all_gather(site, count, size, cp)
    if site.phase != "backward":
        return (gathered,)
    gradients = job.tokens * count_kv_width(job) * TORCH_GRADIENT_BYTES
    return gathered, make_permutation(site, count * cp, gradients)


TORCH_GRADIENT_BYTES = 4
"""torch adds the gradients of keys and values up in fp32."""


def _list_ring_ops(job: JobConfig, site: CommSite, count: int) -> tuple[CommOp, ...]:
    hops = (job.parallel.ring - 1) * (2 if site.phase == "backward" else 1)
    size = _count_kv_bytes(job)
    ring = (make_send(site, count * hops, size), make_recv(site, count * hops, size))
    if job.parallel.ulysses == 1:
        return ring
    heads = replace(site, axis="ulysses", formulas=(ULYSSES,))
    return (*ring, *_list_head_exchanges(job, heads, count, job.parallel.ulysses))


def _list_gather_ops(job: JobConfig, site: CommSite, count: int) -> tuple[CommOp, ...]:
    size, cp = _count_kv_bytes(job), job.parallel.cp
    gathered = make_all_gather(site, count, size, cp)
    if site.phase != "backward":
        return (gathered,)
    return gathered, make_reduce_scatter(site, count, size * cp, cp)


def _list_ulysses_ops(job: JobConfig, site: CommSite, count: int) -> tuple[CommOp, ...]:
    return _list_head_exchanges(job, site, count, job.parallel.cp)


def _list_head_exchanges(
    job: JobConfig, site: CommSite, count: int, ranks: int
) -> tuple[CommOp, ...]:
    """Each rank gets all tokens of the group for some heads, with at least one key-value head."""
    model, tp = job.model, job.parallel.tp
    token = job.tokens * job.training.activation_bytes * model.head_size
    wide = token * divide_ceil(model.heads, tp)
    narrow = token * max(divide_ceil(model.kv_heads, tp), ranks)
    return (
        make_all_to_all(site, 2 * count, wide, ranks),
        make_all_to_all(site, 2 * count, narrow, ranks),
    )


def count_query_width(job: JobConfig) -> int:
    """Counts the elements of a token's queries on one rank."""
    latent = job.model.latent
    size = job.model.head_size if latent is None else latent.nope + latent.rope
    return divide_ceil(job.model.heads, job.parallel.tp) * size


def count_kv_width(job: JobConfig) -> int:
    """Counts the elements of a token's keys and values on one rank, as context parallelism moves
    them: MLA's decompressed, with torch those of every query head."""
    model, latent, tp = job.model, job.model.latent, job.parallel.tp
    if latent is not None:
        return divide_ceil(model.heads, tp) * (latent.nope + latent.rope + latent.value)
    heads = model.heads if is_torch_ring(job) else model.kv_heads
    return 2 * divide_ceil(heads, tp) * model.head_size


def _count_kv_bytes(job: JobConfig) -> int:
    return job.tokens * count_kv_width(job) * job.training.activation_bytes


# Expert parallelism: tokens to their experts and back.

EXPERT_ROUTING = Formula(
    "comm.experts",
    "4 all_to_alls per layer and microbatch (dispatch and combine, forward and backward) of"
    " (T/t) top_k h elements; 6 with full recomputation; assumes balanced routing",
    "Lepikhin et al., GShard, arXiv:2006.16668; DeepSeek-V3, arXiv:2412.19437, section 3.2.2",
)


ONCE_PER_RANK = Formula(
    "comm.experts_once",
    "DeepEP and HybridEP send a token once to each of n ranks (over the network: nodes) with any of"
    " its experts: n (1 - (1 - 1/n)^top_k) copies, at most expert_nodes",
    "deepseek-ai/DeepEP; DeepSeek-V3, arXiv:2412.19437, section 3.2.2; expectation of n urns",
)


def list_ep_ops(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    """Lists the calls for the experts of one rank of a stage in a step."""
    if stage.expert_layers == 0:
        return ()
    phases = ["forward", "backward"]
    again = "experts" in job.training.recompute_parts
    if job.training.recompute in FULL_RECOMPUTE or again:
        phases.append("recompute")
    count = count_rank_microbatches(job) * stage.expert_layers
    return tuple(
        message
        for phase in phases
        for message in _list_expert_phase_ops(
            job, stage.index, phase, count if phase != "recompute" else _scale_rerun(job, count)
        )
    )


def _scale_rerun(job: JobConfig, count: int) -> int:
    """The calls of the layers that run their forward pass again."""
    if not job.training.recompute_layers or job.training.recompute != "full":
        return count
    layers = job.model.layers / job.parallel.model_stages
    return round(count * min(1.0, job.training.recompute_layers / layers))


def _list_expert_phase_ops(
    job: JobConfig, stage: int, phase: str, count: int
) -> tuple[CommOp, ...]:
    """Experts sharded by expert_tp gather their group's tokens and reduce-scatter the outputs."""
    # Bytes of a rank's tokens of one microbatch, counted once per copy that is sent.
    token_bytes = job.model.hidden * job.training.activation_bytes
    layout, size, ops = (
        job.parallel,
        round(divide_ceil(job.tokens, job.parallel.tp) * _count_copies(job) * token_bytes),
        [],
    )
    if layout.ep > 1:
        once = () if layout.dispatcher == "all-to-all" else (ONCE_PER_RANK,)
        site = CommSite("ep", "ep", stage, phase, (EXPERT_ROUTING, *once))
        ops.append(make_all_to_all(site, 2 * count, size, layout.ep))
    if layout.expert_tp > 1:
        site = CommSite("expert-tp", "tp", stage, phase, (EXPERT_ROUTING,))
        ops.append(make_all_gather(site, count, size, layout.expert_tp))
        ops.append(make_reduce_scatter(site, count, size * layout.expert_tp, layout.expert_tp))
    return tuple(ops)


def _count_copies(job: JobConfig) -> float:
    """Copies of a token that are sent: one per expert, or one per rank or node with any of them
    (ONCE_PER_RANK)."""
    top_k, layout = require_experts(job.model).top_k, job.parallel
    if layout.dispatcher == "all-to-all":
        return float(top_k)
    nodes = place_group(job, "ep").nodes
    places = nodes if nodes > 1 else layout.ep
    copies = places * (1 - (1 - 1 / places) ** top_k)
    limited = nodes > 1 and layout.expert_nodes
    return min(copies, layout.expert_nodes) if limited else copies


# Pipeline parallelism: messages between stages.

PIPELINE = Formula(
    "comm.pipeline",
    "m sends of T h each way over every boundary between model stages on different ranks"
    " (interleaved: v times as many), T h/t under sequence parallelism or scatter/gather",
    "Narayanan et al., SC'21, arXiv:2104.04473, sections 2.2.2, 3.2 and 4.1",
)

COPIES = Formula(
    "comm.dualpipe",
    "1 all_reduce of the gradients of both chunks with the mirrored rank, which has copies of both",
    "DeepSeek-V3, arXiv:2412.19437, section 3.2.1: two copies of the parameters",
)


@dataclass(frozen=True, slots=True)
class Neighbors:
    """Chunks of a rank that receive from another rank (fed), and that send to one (feeding)."""

    n_receiving: int
    n_sending: int


def list_pp_ops(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    """Lists the sends and receives of one rank of a stage in a step."""
    if job.parallel.pp == 1:
        return ()
    counts = count_neighbors(job, stage.index)
    parts = job.parallel.tp if job.parallel.scatter_gather else job.parallel.sequence_split
    size, count = count_hidden_bytes(job) // parts, count_rank_microbatches(job)
    forward = CommSite("pp", "pp", stage.index, "forward", (PIPELINE,))
    backward = CommSite("pp", "pp", stage.index, "backward", (PIPELINE,))
    return (
        make_recv(forward, count * counts.n_receiving, size),
        make_send(forward, count * counts.n_sending, size),
        make_recv(backward, count * counts.n_sending, size),
        make_send(backward, count * counts.n_receiving, size),
    )


def count_neighbors(job: JobConfig, rank: int) -> Neighbors:
    """Counts the chunks of a rank whose neighboring chunk is on another rank."""
    chunks, last = list_rank_chunks(job, rank), job.parallel.model_stages - 1
    # The two chunks of a dualpipe rank belong to different copies of the model.
    own = () if job.parallel.schedule == "dualpipe" else chunks
    n_receiving = sum(chunk > 0 and chunk - 1 not in own for chunk in chunks)
    return Neighbors(n_receiving, sum(chunk < last and chunk + 1 not in own for chunk in chunks))


def list_dualpipe_ops(
    job: JobConfig, stage: StageConfig, params: StageParameters
) -> tuple[CommOp, ...]:
    """Lists the gradient reduction between dualpipe's two copies of the model."""
    if job.parallel.schedule != "dualpipe" or job.parallel.pp == 1:
        return ()
    size = select_trained(job, params).total * job.training.gradient_bytes
    if job.is_fsdp:
        size //= job.parallel.shard_size
    site = CommSite("dualpipe", "pp", stage.index, "grad_sync", (COPIES,))
    return (make_all_reduce(site, 1, size, 2),)


# Tied embeddings on two pipeline ranks.

TIED = Formula(
    "comm.tied",
    "1 all_reduce of g V'h/t between the first and the last stage",
    "NVIDIA/Megatron-LM, core/distributed/finalize_model_grads.py",
)


def list_tied_embedding_ops(job: JobConfig, stage: StageConfig) -> tuple[CommOp, ...]:
    """Lists the all_reduce of the tied weight's gradients; empty if both uses are on one rank, or
    the weight is frozen."""
    if not job.model.tied or stage.embedding == stage.head or job.training.lora_rank:
        return ()
    size = count_vocabulary_parameters(job) * job.training.gradient_bytes
    if job.is_fsdp:
        size //= job.parallel.shard_size
    return (make_all_reduce(CommSite("tied", "pp", stage.index, "grad_sync", (TIED,)), 1, size, 2),)


# Gradient clipping: the norm over all parameters.

NORM = Formula(
    "comm.norm",
    "1 all_reduce of 4 bytes over each axis whose ranks have different gradients",
    "NVIDIA/Megatron-LM, core/optimizer/clip_grads.py; pytorch/torchtitan, clip_grad_norm_",
)

NORM_BYTES = 4
"""The sum of the squares, in fp32."""


def list_grad_norm_ops(job: JobConfig, stage: int) -> tuple[CommOp, ...]:
    """Lists the all_reduces of the gradient norm, one per axis; empty without clipping.

    Frameworks with one call over several axes (Megatron-LM) send as much.
    """
    if not job.training.clip_gradients:
        return ()
    layout = job.parallel
    sizes = {"tp": layout.tp, "pp": layout.pp}
    if layout.zero:
        sizes[layout.shard_axis] = layout.shard_size
    return tuple(
        make_all_reduce(CommSite("norm", axis, stage, "optimizer", (NORM,)), 1, NORM_BYTES, ranks)
        for axis, ranks in sizes.items()
        if ranks > 1
    )


@dataclass(frozen=True, slots=True)
class CommOp:
    """Equal communication calls of one rank of a pipeline stage in one step.

    Args:
        strategy: Parallelism that needs the calls: "tp", "sp", "cp", "ep", "pp", "fsdp", ...
        op: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or
            "recv".
        axis: Axis of the group.
        stage: Index of the pipeline stage.
        phase: "forward", "backward", "recompute", "grad_sync", "optimizer" or "other".
        count: Number of calls in the step.
        message_bytes: Bytes of one call as nccl-tests counts them: the gathered buffer of an
            all_gather or reduce_scatter.
        input_bytes: Bytes of the input of one call (a trace's In msg nelems).
        wire_bytes: Bytes that the rank sends in one call.
        formulas: Why the calls are needed, the job's variant last. Default: none, as in a
            prediction that was read from a file.

    Examples:
        >>> op = CommOp("ddp", "all_reduce", "dp", 0, "grad_sync", 4, 1024, 1024, 1536)
        >>> op.count * op.wire_bytes
        6144
    """

    strategy: str
    op: str
    axis: str
    stage: int
    phase: str
    count: int
    message_bytes: int
    input_bytes: int
    wire_bytes: int
    formulas: tuple[Formula, ...] = field(default=(), compare=False, repr=False)

    def move_to_stage(self, stage: int) -> CommOp:
        """Returns the op on another stage.

        Args:
            stage: Index of the pipeline stage.
        """
        if self.stage == stage:
            return self
        return CommOp(
            self.strategy, self.op, self.axis, stage, self.phase,
            self.count, self.message_bytes, self.input_bytes, self.wire_bytes, self.formulas,
        )  # fmt: skip


_SENT_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")

WIRE = Formula(
    "comm.wire",
    "; ".join(f"{', '.join(ops)} {sent}" for sent, ops in format_factors(_SENT_OPS, "S"))
    + " (S message bytes: the gathered buffer; ring algorithms, a lower bound for each rank)",
    "NVIDIA/nccl-tests PERFORMANCE.md; Patarasuk and Yuan, J. Parallel Distrib. Comput. 2009",
)

FULL_RECOMPUTE = ("full", "every", "sqrt")
"""Settings that repeat the whole forward pass of every layer, including communication."""


@dataclass(frozen=True, slots=True)
class CommSite:
    """Strategy, axis, stage, phase and formulas of a call; see CommOp."""

    strategy: str
    axis: str
    stage: int
    phase: str
    formulas: tuple[Formula, ...]


def make_all_reduce(site: CommSite, count: int, input_bytes: int, ranks: int) -> CommOp:
    """Makes count all_reduces of a buffer of input_bytes."""
    return _make_ring_op(site, "all_reduce", count, input_bytes, input_bytes, ranks)


def make_all_gather(site: CommSite, count: int, input_bytes: int, ranks: int) -> CommOp:
    """Makes count all_gathers: each rank gives input_bytes and gets those of all."""
    return _make_ring_op(site, "all_gather", count, input_bytes * ranks, input_bytes, ranks)


def make_reduce_scatter(site: CommSite, count: int, input_bytes: int, ranks: int) -> CommOp:
    """Makes count reduce_scatters: each rank gives input_bytes and gets its share of the sum."""
    return _make_ring_op(site, "reduce_scatter", count, input_bytes, input_bytes, ranks)


def make_all_to_all(site: CommSite, count: int, input_bytes: int, ranks: int) -> CommOp:
    """Makes count all_to_alls: each rank distributes input_bytes evenly over all."""
    return _make_ring_op(site, "all_to_all", count, input_bytes, input_bytes, ranks)


def make_permutation(site: CommSite, count: int, input_bytes: int) -> CommOp:
    """Makes count all_to_alls in which each rank sends all of input_bytes to one other."""
    return _make_op(site, "all_to_all", count, input_bytes, input_bytes, input_bytes)


def make_broadcast(site: CommSite, count: int, input_bytes: int) -> CommOp:
    """Makes count broadcasts; in a ring each rank forwards the buffer once."""
    return _make_op(site, "broadcast", count, input_bytes, input_bytes, input_bytes)


def make_send(site: CommSite, count: int, input_bytes: int) -> CommOp:
    """Makes count sends to a neighbor."""
    return _make_op(site, "send", count, input_bytes, input_bytes, input_bytes)


def make_recv(site: CommSite, count: int, input_bytes: int) -> CommOp:
    """Makes count receives from a neighbor; their wire_bytes are 0."""
    return _make_op(site, "recv", count, input_bytes, input_bytes, 0)


def _make_ring_op(
    site: CommSite, op: str, count: int, message_bytes: int, input_bytes: int, ranks: int
) -> CommOp:
    sent = count_ring_bytes(op, ranks, message_bytes)
    return _make_op(site, op, count, message_bytes, input_bytes, sent)


def _make_op(
    site: CommSite, op: str, count: int, message_bytes: int, input_bytes: int, wire_bytes: int
) -> CommOp:
    return CommOp(
        site.strategy, op, site.axis, site.stage, site.phase,
        count, message_bytes, input_bytes, wire_bytes, site.formulas,
    )  # fmt: skip


def count_rank_microbatches(job: JobConfig) -> int:
    """Counts the microbatches of each chunk of a rank: half of them with dualpipe's two copies."""
    halves = job.parallel.schedule == "dualpipe" and job.parallel.pp > 1
    return job.microbatches // 2 if halves else job.microbatches


def count_hidden_bytes(job: JobConfig) -> int:
    """Counts the bytes between two layers for a microbatch, not divided by tp (T h)."""
    return job.tokens * job.model.hidden * job.training.activation_bytes
