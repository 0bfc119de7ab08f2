"""What the axes divide: heads, widths, experts and the sequence."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.fault import Fault, rest_of, uneven
from stepsplit.analyzer.model.spec.job import Job

_AXES = ("tp", "pp", "dp_replicate", "dp_shard", "cp", "ep", "expert_tp", "chunks")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab")


def _sizes(job: Job) -> Fault | None:
    """Every size is at least one."""
    model, layout = job.model, job.layout
    sizes = [(name, getattr(layout, name)) for name in _AXES]
    sizes += [(name, getattr(model, name)) for name in _SIZES]
    small = next(((name, size) for name, size in sizes if size < 1), None)
    return None if small is None else Fault(f"{small[0]} {small[1]} < 1", f"mend {small[0]}")


def _heads(job: Job) -> Fault | None:
    return uneven("heads", job.model.heads, "tp", job.layout.tp)


def _kv_heads(job: Job) -> Fault | None:
    """Each rank of tp holds whole key heads, or several hold copies of one."""
    heads, tp = job.model.kv_heads, job.layout.tp
    groups = uneven("heads", job.model.heads, "kv_heads", heads)
    if groups is not None or job.model.latent is not None:
        return groups
    if tp > heads:
        return uneven("tp", tp, "kv_heads", heads)
    return uneven("kv_heads", heads, "tp", tp)


def _ffn(job: Job) -> Fault | None:
    """The MLP of the layers that have no experts."""
    if job.model.expert_layers == job.model.layers:
        return None
    return uneven("ffn", job.model.ffn, "tp", job.layout.tp)


def _experts(job: Job) -> Fault | None:
    experts, ep = job.model.experts, job.layout.ep
    if experts is None:
        return Fault(f"ep {ep} of a model without experts", "leave ep out") if ep > 1 else None
    if experts.top_k > experts.count:
        return Fault(f"top_k {experts.top_k} > experts {experts.count}", "mend one of them")
    if experts.dense_layers > job.model.layers:
        problem = f"dense_layers {experts.dense_layers} > layers {job.model.layers}"
        return Fault(problem, "mend one of them")
    return uneven("experts", experts.count, "ep", ep)


def _expert_tp(job: Job) -> Fault | None:
    experts, expert_tp = job.model.experts, job.layout.expert_tp
    if experts is not None:
        return uneven("expert ffn", experts.ffn, "expert_tp", expert_tp)
    problem = f"expert_tp {expert_tp} of a model without experts"
    return Fault(problem, "leave expert_tp out") if expert_tp > 1 else None


def _expert_ranks(job: Job) -> Fault | None:
    """Experts are spread over the ranks of one pp coordinate."""
    layout = job.layout
    ranks, over = layout.tp * layout.cp * layout.dp, layout.ep * layout.expert_tp
    if ranks % over == 0:
        return None
    problem = (
        f"tp {layout.tp} x cp {layout.cp} x dp {layout.dp} = {ranks} ranks / "
        f"(ep {layout.ep} x expert_tp {layout.expert_tp}) = {ranks / over:g}"
    )
    return Fault(problem, "mend ep or the axes")


def _sequence(job: Job) -> Fault | None:
    """A rank of cp has its share of the tokens, one of tp its share of those."""
    layout, seq_len = job.layout, job.recipe.seq_len
    if not layout.sequence_parallel:
        return uneven("seq_len", seq_len, "cp", layout.cp)
    over = f"(cp {layout.cp} x tp {layout.tp})"
    mend = "mend seq_len or the axes, or leave sequence_parallel out"
    return rest_of("seq_len", seq_len, over, layout.cp * layout.tp, mend)


def _ulysses(job: Job) -> Fault | None:
    """Ulysses gives each rank of cp whole heads."""
    layout = job.layout
    if layout.cp == 1 or layout.context_kind != "ulysses":
        return None
    over = f"(cp {layout.cp} x tp {layout.tp})"
    return rest_of("heads", job.model.heads, over, layout.cp * layout.tp, 'write context = "ring"')


AXIS_CHECKS = (
    _sizes, _heads, _kv_heads, _ffn, _experts, _expert_tp, _expert_ranks, _sequence, _ulysses,
)  # fmt: skip
