"""Checks of a job config: the first constraint that it violates, with the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import TWO_STAGES, JobConfig, chunk_count

# Whether a job can be: the first thing that cannot, with its arithmetic and hint.


def check(job: JobConfig) -> None:
    """Raises UsageError for a job that cannot be: one line with the arithmetic and the hint."""
    fault = first_fault(job)
    if fault is not None:
        raise UsageError(f"{fault.problem}; {fault.hint}")


def first_fault(job: JobConfig) -> Fault | None:
    """The first thing that cannot be, None where everything can."""
    found = (fault(job) for fault in (*AXIS_CHECKS, *BATCH_CHECKS, *STAGE_CHECKS))
    return next((fault for fault in found if fault is not None), None)


# What the axes divide: heads, widths, experts and the sequence.

_AXES = ("tp", "pp", "dp_replicate", "dp_shard", "cp", "ep", "expert_tp", "chunks")

_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab")


def _sizes(job: JobConfig) -> Fault | None:
    """Every size is at least one."""
    model, layout = job.model, job.parallel
    sizes = [(name, getattr(layout, name)) for name in _AXES]
    sizes += [(name, getattr(model, name)) for name in _SIZES]
    small = next(((name, size) for name, size in sizes if size < 1), None)
    return None if small is None else Fault(f"{small[0]} {small[1]} < 1", f"fix {small[0]}")


def _heads(job: JobConfig) -> Fault | None:
    return uneven("heads", job.model.heads, "tp", job.parallel.tp)


def _kv_heads(job: JobConfig) -> Fault | None:
    """Each rank of tp holds whole key heads, or several hold copies of one."""
    heads, tp = job.model.kv_heads, job.parallel.tp
    groups = uneven("heads", job.model.heads, "kv_heads", heads)
    if groups is not None or job.model.latent is not None:
        return groups
    if tp > heads:
        return uneven("tp", tp, "kv_heads", heads)
    return uneven("kv_heads", heads, "tp", tp)


def _ffn(job: JobConfig) -> Fault | None:
    """The MLP of the layers that have no experts."""
    if job.model.expert_layers == job.model.layers:
        return None
    return uneven("ffn", job.model.ffn, "tp", job.parallel.tp)


def _experts(job: JobConfig) -> Fault | None:
    experts, ep = job.model.experts, job.parallel.ep
    if experts is None:
        return Fault(f"ep {ep} of a model without experts", "leave ep out") if ep > 1 else None
    if experts.top_k > experts.count:
        return Fault(f"top_k {experts.top_k} > experts {experts.count}", "fix one of them")
    if experts.dense_layers > job.model.layers:
        problem = f"dense_layers {experts.dense_layers} > layers {job.model.layers}"
        return Fault(problem, "fix one of them")
    return uneven("experts", experts.count, "ep", ep)


def _expert_tp(job: JobConfig) -> Fault | None:
    experts, expert_tp = job.model.experts, job.parallel.expert_tp
    if experts is not None:
        return uneven("expert ffn", experts.ffn, "expert_tp", expert_tp)
    problem = f"expert_tp {expert_tp} of a model without experts"
    return Fault(problem, "leave expert_tp out") if expert_tp > 1 else None


def _expert_ranks(job: JobConfig) -> Fault | None:
    """Experts are spread over the ranks of one pp coordinate."""
    layout = job.parallel
    ranks, over = layout.tp * layout.cp * layout.dp, layout.ep * layout.expert_tp
    if ranks % over == 0:
        return None
    problem = (
        f"tp {layout.tp} x cp {layout.cp} x dp {layout.dp} = {ranks} ranks / "
        f"(ep {layout.ep} x expert_tp {layout.expert_tp}) = {ranks / over:g}"
    )
    return Fault(problem, "fix ep or the axes")


def _sequence(job: JobConfig) -> Fault | None:
    """A rank of cp has its share of the tokens, one of tp its share of those."""
    layout, seq_len = job.parallel, job.training.seq_len
    if not layout.sequence_parallel:
        return uneven("seq_len", seq_len, "cp", layout.cp)
    over = f"(cp {layout.cp} x tp {layout.tp})"
    hint = "fix seq_len or the axes, or leave sequence_parallel out"
    return rest_of("seq_len", seq_len, over, layout.cp * layout.tp, hint)


def _ulysses(job: JobConfig) -> Fault | None:
    """Ulysses gives each rank of cp whole heads."""
    layout = job.parallel
    if layout.cp == 1 or layout.context_kind != "ulysses":
        return None
    over = f"(cp {layout.cp} x tp {layout.tp})"
    return rest_of("heads", job.model.heads, over, layout.cp * layout.tp, 'write context = "ring"')


AXIS_CHECKS = (
    _sizes, _heads, _kv_heads, _ffn, _experts, _expert_tp, _expert_ranks, _sequence, _ulysses,
)  # fmt: skip


# What the batch, the precision and ZeRO ask for.


def _global_batch(job: JobConfig) -> Fault | None:
    recipe, dp = job.training, job.parallel.dp
    each = recipe.micro_batch * dp
    if recipe.micro_batch >= 1 and recipe.global_batch >= 1 and recipe.global_batch % each == 0:
        return None
    if recipe.micro_batch < 1:
        return Fault(f"micro_batch {recipe.micro_batch} < 1", "fix micro_batch")
    problem = (
        f"global_batch {recipe.global_batch} / (micro_batch {recipe.micro_batch} x dp {dp}) = "
        f"{recipe.global_batch / each:g} microbatches"
    )
    return Fault(problem, f"make global_batch a multiple of {each}")


def _positions(job: JobConfig) -> Fault | None:
    positions, seq_len = job.model.positions, job.training.seq_len
    if positions == 0 or seq_len <= positions:
        return None
    return Fault(f"seq_len {seq_len} > learned_positions {positions}", "raise learned_positions")


def _dtype(job: JobConfig) -> Fault | None:
    hardware, dtype = job.hardware, job.training.dtype
    if hardware.peak_flops_per_s(dtype) is not None:
        return None
    known = ", ".join(dtype for dtype, _ in hardware.peaks_flops_per_s)
    return Fault(f"{hardware.name} has no {dtype} peak, only {known}", "choose another dtype")


def _shards(job: JobConfig) -> Fault | None:
    """dp_shard is of ZeRO 3 alone, and ZeRO 3 needs ranks to shard over."""
    layout = job.parallel
    if layout.zero != 3 and layout.dp_shard > 1:
        problem = f"dp_shard {layout.dp_shard} with zero = {layout.zero}"
        return Fault(problem, "write dp instead, or zero = 3")
    if layout.zero == 3 and layout.shard_size == 1 and layout.dp_replicate > 1:
        return Fault(
            "zero = 3 shards over dp_shard 1 x cp 1 = 1 rank", "write dp_shard or zero = 0"
        )
    return None


def _ddp(job: JobConfig) -> Fault | None:
    """DDP beside ZeroRedundancyOptimizer is zero = 1."""
    if job.training.framework != "ddp" or job.parallel.zero <= 1:
        return None
    problem = f"ddp shards no gradient and no weight, but zero = {job.parallel.zero}"
    return Fault(problem, 'write framework = "fsdp2"')


BATCH_CHECKS = (_global_batch, _positions, _dtype, _shards, _ddp)


# What the pipeline's schedule asks of layers, stages and microbatches.


def _chunks(job: JobConfig) -> Fault | None:
    """Several chunks are of interleaved schedules; V schedules hold two, whatever is said."""
    layout = job.parallel
    if layout.pp == 1:
        problem = f"chunks {layout.chunks} with pp 1"
        return Fault(problem, "leave chunks out") if layout.chunks > 1 else None
    if layout.schedule in TWO_STAGES:
        problem = f"{layout.schedule} holds two stages on a rank, not chunks {layout.chunks}"
        return Fault(problem, "leave chunks out") if layout.chunks > 2 else None
    if layout.schedule != "interleaved":
        problem = f"chunks {layout.chunks} with schedule {layout.schedule}"
        return Fault(problem, 'write schedule = "interleaved"') if layout.chunks > 1 else None
    problem = "interleaved needs several chunks on a rank, not chunks 1"
    return Fault(problem, "write chunks = 2 or more") if layout.chunks == 1 else None


def _layers(job: JobConfig) -> Fault | None:
    """Megatron-LM cuts the layers evenly; other frameworks give the first stages the rest."""
    layout, layers = job.parallel, job.model.layers
    over = f"pp {layout.pp}" if chunk_count(job) == layout.pp else _stages(job)
    if layout.layers_per_stage is not None:
        return None
    if layers < chunk_count(job):
        return Fault(f"layers {layers} < {over} = {chunk_count(job)} stages", "fix one of them")
    if job.training.framework != "megatron":
        return None
    return rest_of("layers", layers, over, chunk_count(job), "give layers_per_stage")


def _stages(job: JobConfig) -> str:
    return f"(pp {job.parallel.pp} x chunks {job.parallel.stages_per_rank})"


def _layers_per_stage(job: JobConfig) -> Fault | None:
    """As many entries as stages, as many layers as the model."""
    stated = job.parallel.layers_per_stage
    if stated is None:
        return None
    if len(stated) != chunk_count(job):
        over = f"pp {job.parallel.pp}" if chunk_count(job) == job.parallel.pp else _stages(job)
        problem = f"layers_per_stage has {len(stated)} entries, but {over} = {chunk_count(job)}"
        return Fault(problem, "give one for each stage")
    if sum(stated) == job.model.layers:
        return None
    total = f"{' + '.join(map(str, stated))} = {sum(stated)}"
    return Fault(f"layers_per_stage {total}, but layers {job.model.layers}", "fix one of them")


def _interleaved(job: JobConfig) -> Fault | None:
    layout = job.parallel
    if layout.schedule != "interleaved" or layout.pp == 1:
        return None
    hint = "make the microbatches of a rank a multiple of pp"
    return uneven("microbatches", job.microbatches, "pp", layout.pp, hint)


def _dualpipe(job: JobConfig) -> Fault | None:
    """DualPipe runs two halves of the microbatches from the two ends of an even pipeline.

    deepseek-ai/DualPipe, dualpipe.py: an even number of ranks, an even number of microbatches, at
    least two for each rank; dualpipev.py: at least two for each rank.
    """
    p, m, schedule = job.parallel.pp, job.microbatches, job.parallel.schedule
    if p == 1 or schedule not in ("dualpipe", "dualpipe-v"):
        return None
    if m < 2 * p:
        return Fault(f"microbatches {m} < 2 x pp {p} of {schedule}", "raise global_batch")
    if schedule == "dualpipe-v":
        return None
    hint = "dualpipe needs an even number"
    return rest_of("pp", p, "2 directions", 2, hint) or rest_of(
        "microbatches", m, "2 directions", 2, hint
    )


STAGE_CHECKS = (_chunks, _layers, _layers_per_stage, _interleaved, _dualpipe)


# What makes a job impossible.


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that cannot be: the arithmetic, and the hint."""

    problem: str
    hint: str


def uneven(what: str, count: int, axis: str, ranks: int, hint: str = "") -> Fault | None:
    """The fault of a count that the axis does not divide."""
    return rest_of(what, count, f"{axis} {ranks}", ranks, hint or f"fix {what} or {axis}")


def rest_of(what: str, count: int, over: str, parts: int, hint: str) -> Fault | None:
    """The fault of a count that does not divide into so many parts; over says what they are."""
    if count % parts == 0:
        return None
    return Fault(f"{what} {count} / {over} = {count / parts:g}", hint)
