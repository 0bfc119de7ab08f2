"""Checks of a job config: the constraints that it violates, and how to fix them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import LORA_TARGETS, MAX_EXPERTS, JobConfig
from stepsplit.analyzer.model.schedule_names import MAX_STAGE_PAIRS, TWO_STAGES

# The check of a whole job: the first violation, with the numbers and a hint.


def check(job: JobConfig) -> None:
    """Raises UsageError for an invalid job: one line with the numbers and a hint."""
    fault = find_violation(job)
    if fault is not None:
        raise UsageError(f"{fault.problem}; {fault.hint}")


def find_violation(job: JobConfig) -> Violation | None:
    """The first violated constraint, None if the job is valid."""
    for check_one in ALL_CHECKS:
        if (fault := check_one(job)) is not None:
            return fault
    return None


def list_violations(job: JobConfig) -> tuple[Violation, ...]:
    """All violated constraints; a size below 1 alone, for the others would divide by it."""
    if (size := _check_sizes(job)) is not None:
        return (size,)
    found = (check_one(job) for check_one in ALL_CHECKS)
    return tuple(dict.fromkeys(fault for fault in found if fault is not None))


# Constraints of the axes: heads, widths, experts and the sequence must divide.

_AXES = ("tp", "pp", "dp_replicate", "dp_shard", "cp", "ep", "expert_tp", "chunks", "ulysses")

_MODEL_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab")

_get_axes, _get_model_sizes = attrgetter(*_AXES), attrgetter(*_MODEL_SIZES)


def _check_sizes(job: JobConfig) -> Violation | None:
    """Every size is at least one."""
    sizes = (*_get_axes(job.parallel), *_get_model_sizes(job.model))
    if min(sizes) >= 1:
        return None
    name, size = next(one for one in zip((*_AXES, *_MODEL_SIZES), sizes, strict=True) if one[1] < 1)
    return Violation(f"{name} ({size}) must be >= 1", f"fix {name}")


def _check_heads(job: JobConfig) -> Violation | None:
    return check_divisible("heads", job.model.heads, "tp", job.parallel.tp)


def _check_kv_heads(job: JobConfig) -> Violation | None:
    """Each tp rank has whole key-value heads, or several tp ranks replicate one."""
    heads, tp = job.model.kv_heads, job.parallel.tp
    groups = check_divisible("heads", job.model.heads, "kv_heads", heads)
    if groups is not None or job.model.latent is not None:
        return groups
    if tp > heads:
        return check_divisible("tp", tp, "kv_heads", heads)
    return check_divisible("kv_heads", heads, "tp", tp)


def _check_ffn(job: JobConfig) -> Violation | None:
    """Checks the MLP of dense layers; a model with experts in every layer has none."""
    if job.model.expert_layers == job.model.layers:
        return None
    return check_divisible("ffn", job.model.ffn, "tp", job.parallel.tp)


def _check_window(job: JobConfig) -> Violation | None:
    """full_every names the layers without a window; rings have none (TransformerEngine's and
    torch's)."""
    model, layout = job.model, job.parallel
    if model.full_every and not model.window:
        return Violation(f"full_every ({model.full_every}) needs a window", "give window")
    if model.full_every > model.layers:
        problem = f"full_every ({model.full_every}) exceeds layers ({model.layers})"
        return Violation(problem, "leave it out where all layers have the window")
    if 0 < model.window < job.training.seq_len and layout.cp > 1 and layout.context_kind == "ring":
        problem = f"a ring over cp ({layout.cp}) attends without windows"
        return Violation(problem, 'set context = "all-gather" or "ulysses"')
    return None


def _check_experts(job: JobConfig) -> Violation | None:
    experts, ep = job.model.experts, job.parallel.ep
    if experts is None:
        return Violation(f"ep ({ep}) needs a model with experts", "remove ep") if ep > 1 else None
    if experts.count > MAX_EXPERTS:
        return Violation(f"experts ({experts.count}) must be <= {MAX_EXPERTS}", "fix experts")
    if experts.top_k > experts.count:
        problem = f"top_k ({experts.top_k}) exceeds experts ({experts.count})"
        return Violation(problem, "fix one of them")
    if experts.dense_layers > job.model.layers:
        problem = f"dense_layers ({experts.dense_layers}) exceeds layers ({job.model.layers})"
        return Violation(problem, "fix one of them")
    return check_divisible("experts", experts.count, "ep", ep)


def _check_expert_tp(job: JobConfig) -> Violation | None:
    experts, expert_tp = job.model.experts, job.parallel.expert_tp
    if experts is not None:
        return check_divisible("expert ffn", experts.ffn, "expert_tp", expert_tp)
    problem = f"expert_tp ({expert_tp}) needs a model with experts"
    return Violation(problem, "remove expert_tp") if expert_tp > 1 else None


def _check_expert_ranks(job: JobConfig) -> Violation | None:
    """Experts are distributed over the ranks of one pp coordinate."""
    layout = job.parallel
    ranks, expert_ranks = layout.tp * layout.cp * layout.dp, layout.ep * layout.expert_tp
    if ranks % expert_ranks == 0:
        return None
    dividend = _format_product(("tp", layout.tp), ("cp", layout.cp), ("dp", layout.dp))
    divisor = _format_product(("ep", layout.ep), ("expert_tp", layout.expert_tp))
    return Violation(f"{dividend} must be divisible by {divisor}", "fix ep or the axes")


def _check_sequence(job: JobConfig) -> Violation | None:
    """The sequence is split over cp, and with sequence parallelism over tp as well."""
    layout, seq_len = job.parallel, job.training.seq_len
    if not layout.sequence_parallel:
        return check_divisible("seq_len", seq_len, "cp", layout.cp)
    divisor = _format_product(("cp", layout.cp), ("tp", layout.tp))
    hint = "fix seq_len or the axes, or remove sequence_parallel"
    return check_remainder("seq_len", seq_len, divisor, layout.cp * layout.tp, hint)


def _check_ulysses(job: JobConfig) -> Violation | None:
    """Ulysses gives each cp rank, or beside a ring each of its own, whole heads."""
    layout, heads = job.parallel, job.model.heads
    if layout.ulysses > 1:
        if layout.context_kind != "ring":
            problem = (
                f"ulysses ({layout.ulysses}) is a part of a ring, not of {layout.context_kind}"
            )
            return Violation(problem, 'set context = "ring" or remove ulysses')
        inside = check_divisible("cp", layout.cp, "ulysses", layout.ulysses)
        divisor = _format_product(("ulysses", layout.ulysses), ("tp", layout.tp))
        parts = layout.ulysses * layout.tp
        return inside or check_remainder("heads", heads, divisor, parts, "fix ulysses")
    if layout.cp == 1 or layout.context_kind != "ulysses":
        return None
    divisor = _format_product(("cp", layout.cp), ("tp", layout.tp))
    return check_remainder("heads", heads, divisor, layout.cp * layout.tp, 'set context = "ring"')


def _check_recomputed_layers(job: JobConfig) -> Violation | None:
    """No more layers are recomputed or offloaded, or lie between checkpoints, than the model
    has."""
    training, layers = job.training, job.model.layers
    if training.recompute_layers > layers:
        problem = f"recompute_layers ({training.recompute_layers}) exceeds layers ({layers})"
        return Violation(problem, "leave it out to recompute all")
    if training.offload_layers > layers:
        problem = f"offload_layers ({training.offload_layers}) exceeds layers ({layers})"
        return Violation(problem, "leave it out to offload all")
    if training.recompute == "every" and training.recompute_every > layers:
        problem = f"recompute (every-{training.recompute_every}) exceeds layers ({layers})"
        return Violation(problem, f"write every-1 to every-{layers}, or full")
    return None


def _check_recompute(job: JobConfig) -> Violation | None:
    """recompute_layers belongs to full recomputation, offload_layers to offloaded activations,
    early_stop to torch's checkpoint, fp8 storage and scaling to fp8 training, unfused parts to a
    model that is not compiled."""
    training = job.training
    if training.recompute_layers and training.recompute != "full":
        problem = f"recompute_layers ({training.recompute_layers}) needs recompute = full"
        return Violation(problem, 'set recompute = "full"')
    if "parameters" in training.offload and not job.is_fsdp:
        problem = f"offload of parameters needs ZeRO-3, not zero ({job.parallel.zero})"
        return Violation(problem, "set zero = 3, or offload the optimizer alone")
    if training.offload_layers and "activations" not in training.offload:
        problem = f"offload_layers ({training.offload_layers}) needs activations in offload"
        return Violation(problem, 'add "activations" to offload')
    if training.early_stop and not job.profile.defaults.early_stop:
        problem = f"{training.framework} recomputes whole layers, without early_stop"
        return Violation(problem, "remove early_stop")
    if training.fp8_activations and training.dtype != "fp8":
        problem = f"fp8_activations needs dtype fp8, not {training.dtype}"
        return Violation(problem, "remove fp8_activations")
    if training.fp8_scaling != "tensor" and training.dtype != "fp8":
        problem = f"fp8_scaling needs dtype fp8, not {training.dtype}"
        return Violation(problem, "remove fp8_scaling")
    if training.compile and training.unfused:
        problem = f"compile fuses {', '.join(sorted(training.unfused))}"
        return Violation(problem, "remove compile or unfused")
    return None


def _check_adapters(job: JobConfig) -> Violation | None:
    """Some linear layer has an adapter, of fewer parameters: routed experts have none."""
    training, experts, hidden = job.training, job.model.experts, job.model.hidden
    if not training.lora_rank:
        if training.lora_targets == frozenset(LORA_TARGETS):
            return None
        return Violation("lora_targets needs lora_rank", "give the rank of the adapters")
    if training.lora_rank > hidden:
        problem = f"lora_rank ({training.lora_rank}) exceeds hidden ({hidden})"
        return Violation(problem, "give the rank of the adapters, usually 8 to 256")
    if not training.lora_targets:
        return Violation("lora_targets is empty, so that nothing is trained", "name some layers")
    is_routed = job.model.expert_layers == job.model.layers
    if training.lora_targets == {"mlp"} and is_routed and experts and not experts.shared_ffn:
        problem = "lora_targets names mlp, but all layers have routed experts, without adapters"
        return Violation(problem, "name qkv or output too")
    return None


AXIS_CHECKS = (
    _check_sizes,
    _check_heads,
    _check_kv_heads,
    _check_ffn,
    _check_window,
    _check_experts,
    _check_expert_tp,
    _check_expert_ranks,
    _check_sequence,
    _check_ulysses,
)


# Constraints of the batch, the precision and ZeRO.


def _check_global_batch(job: JobConfig) -> Violation | None:
    training, dp = job.training, job.parallel.dp
    batch_multiple = training.micro_batch * dp
    if (
        training.micro_batch >= 1
        and training.global_batch >= 1
        and training.global_batch % batch_multiple == 0
    ):
        return None
    if training.micro_batch < 1:
        return Violation(f"micro_batch ({training.micro_batch}) must be >= 1", "fix micro_batch")
    divisor = _format_product(("micro_batch", training.micro_batch), ("dp", dp))
    problem = f"global_batch ({training.global_batch}) must be divisible by {divisor}"
    return Violation(problem, f"make global_batch a multiple of {batch_multiple}")


def _check_positions(job: JobConfig) -> Violation | None:
    positions, seq_len = job.model.positions, job.training.seq_len
    if positions == 0 or seq_len <= positions:
        return None
    problem = f"seq_len ({seq_len}) exceeds learned_positions ({positions})"
    return Violation(problem, "raise learned_positions")


def _check_dtype(job: JobConfig) -> Violation | None:
    hardware, dtype = job.hardware, job.training.dtype
    if hardware.peak_flops_per_s(dtype) is not None:
        return None
    known = ", ".join(dtype for dtype, _ in hardware.peaks_flops_per_s)
    problem = f"{hardware.name} has no {dtype} peak (available: {known})"
    return Violation(problem, "choose another dtype")


def _check_shards(job: JobConfig) -> Violation | None:
    """dp_shard needs ZeRO-3, or ZeRO-1 in groups of ranks: instances of Megatron-LM's distributed
    optimizer, a process group of ZeroRedundancyOptimizer. ZeRO-3 needs ranks to shard over."""
    layout = job.parallel
    has_groups = layout.zero > 0 and job.profile.messages.shards_in_groups
    if not has_groups and layout.zero != 3 and layout.dp_shard > 1:
        problem = f"dp_shard ({layout.dp_shard}) needs ZeRO-3, but zero = {layout.zero}"
        return Violation(problem, "use dp instead, or set zero = 3")
    if layout.zero == 3 and layout.shard_size == 1 and layout.dp_replicate > 1:
        problem = "ZeRO-3 needs more than one rank to shard over, but dp_shard x cp = 1"
        return Violation(problem, "set dp_shard or zero = 0")
    return None


def _check_zero(job: JobConfig) -> Violation | None:
    """DDP with ZeroRedundancyOptimizer is zero = 1; DDP supports no higher stage."""
    zero, messages = job.parallel.zero, job.profile.messages
    if zero <= messages.max_zero:
        return None
    return Violation(f"{messages.zero_problem}, but zero = {zero}", messages.zero_hint)


BATCH_CHECKS = (
    _check_global_batch,
    _check_positions,
    _check_dtype,
    _check_shards,
    _check_zero,
    _check_recompute,
    _check_adapters,
    _check_recomputed_layers,
)


# Constraints of the pipeline schedule: layers, stages and microbatches.


def _check_chunks(job: JobConfig) -> Violation | None:
    """Only interleaved schedules have a number of chunks; V schedules always have two."""
    layout = job.parallel
    if layout.pp == 1:
        problem = f"chunks ({layout.chunks}) needs pp > 1"
        return Violation(problem, "remove chunks") if layout.chunks > 1 else None
    if layout.schedule in TWO_STAGES:
        problem = f"chunks ({layout.chunks}) must be <= 2 with schedule {layout.schedule}"
        return Violation(problem, "remove chunks") if layout.chunks > 2 else None
    if layout.schedule != "interleaved":
        problem = f"chunks ({layout.chunks}) needs schedule interleaved, not {layout.schedule}"
        return Violation(problem, 'set schedule = "interleaved"') if layout.chunks > 1 else None
    problem = "chunks (1) must be >= 2 with schedule interleaved"
    return Violation(problem, "raise chunks") if layout.chunks == 1 else None


def _check_layers(job: JobConfig) -> Violation | None:
    """Megatron-LM needs equal stages; other frameworks give the first stages one layer more."""
    layout, layers = job.parallel, job.model.layers
    divisor = _format_stage_count(job)
    if layout.layers_per_stage is not None:
        return None
    if layers < job.parallel.model_stages:
        return Violation(f"layers ({layers}) must be >= {divisor}", "fix one of them")
    if not job.profile.messages.equal_stages:
        return None
    return check_remainder(
        "layers", layers, divisor, job.parallel.model_stages, "set layers_per_stage"
    )


def _format_stage_count(job: JobConfig) -> str:
    """The number of model stages as text: "pp (4)" or "pp (4) x chunks (2)"."""
    pp = job.parallel.pp
    if job.parallel.model_stages == pp:
        return f"pp ({pp})"
    return _format_product(("pp", pp), ("chunks", job.parallel.stages_per_rank))


def _check_layers_per_stage(job: JobConfig) -> Violation | None:
    """layers_per_stage has one entry per stage, and they sum to the model's layers."""
    stated = job.parallel.layers_per_stage
    if stated is None:
        return None
    if len(stated) != job.parallel.model_stages:
        stages = job.parallel.model_stages
        problem = f"entries of layers_per_stage ({len(stated)}) must match the stages ({stages})"
        return Violation(problem, "fix layers_per_stage or pp")
    if sum(stated) == job.model.layers:
        return None
    problem = f"sum of layers_per_stage ({sum(stated)}) must equal layers ({job.model.layers})"
    return Violation(problem, "fix one of them")


def _check_interleaved(job: JobConfig) -> Violation | None:
    layout = job.parallel
    if layout.schedule != "interleaved" or layout.pp == 1:
        return None
    hint = "make the microbatches per rank a multiple of pp"
    return check_divisible("microbatches", job.microbatches, "pp", layout.pp, hint)


def _check_dualpipe(job: JobConfig) -> Violation | None:
    """DualPipe feeds half of the microbatches from each end of a pipeline of even length.

    deepseek-ai/DualPipe: dualpipe.py needs an even number of ranks and of microbatches, and at
    least two microbatches per rank; dualpipev.py needs at least two microbatches per rank.
    """
    p, m, schedule = job.parallel.pp, job.microbatches, job.parallel.schedule
    if p == 1 or schedule not in ("dualpipe", "dualpipe-v"):
        return None
    if m < 2 * p:
        problem = f"microbatches ({m}) must be >= 2 x pp ({2 * p}) with schedule {schedule}"
        return Violation(problem, "raise global_batch")
    if schedule == "dualpipe-v":
        return None
    odd = next((name for name, count in (("pp", p), ("microbatches", m)) if count % 2), None)
    if odd is None:
        return None
    count = p if odd == "pp" else m
    return Violation(f"{odd} ({count}) must be even with schedule dualpipe", f"make {odd} even")


def _check_simulated_stages(job: JobConfig) -> Violation | None:
    """The time of a prediction grows with the square of pp, and with chunks."""
    layout = job.parallel
    if layout.pp * layout.model_stages <= MAX_STAGE_PAIRS:
        return None
    problem = f"pp ({layout.pp}) x model stages ({layout.model_stages}) exceeds {MAX_STAGE_PAIRS}"
    return Violation(problem, "a longer pipeline is not simulated; lower pp or chunks")


STAGE_CHECKS = (
    _check_chunks,
    _check_layers,
    _check_layers_per_stage,
    _check_interleaved,
    _check_dualpipe,
    _check_simulated_stages,
)


# A violated constraint, and the checks of divisibility.


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated constraint: the problem with its numbers, and a hint how to fix it."""

    problem: str
    hint: str


def check_divisible(
    what: str, count: int, axis: str, ranks: int, hint: str = ""
) -> Violation | None:
    """The violation if the ranks of an axis do not divide a count."""
    return check_remainder(what, count, f"{axis} ({ranks})", ranks, hint or f"fix {what} or {axis}")


def check_remainder(what: str, count: int, divisor: str, parts: int, hint: str) -> Violation | None:
    """The violation if parts does not divide a count; divisor is its text."""
    if count % parts == 0:
        return None
    return Violation(f"{what} ({count}) must be divisible by {divisor}", hint)


def _format_product(*axes: tuple[str, int]) -> str:
    """The product of some axes as text: "cp (2) x tp (4)"."""
    return " x ".join(f"{name} ({size})" for name, size in axes)


ALL_CHECKS = (*AXIS_CHECKS, *BATCH_CHECKS, *STAGE_CHECKS)
