"""Detection of parallelism and memory strategies in a recording."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import is_inside
from stepsplit.analyzer.split.call_purposes import find_spans
from stepsplit.analyzer.split.data_strategies import (
    count_gradient_sums,
    detect_data_strategies,
    detect_wrapped_ddp,
)
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.strategy import NAMES, Strategy, format_axes
from stepsplit.analyzer.split.strategy_evidence import (
    AFTER,
    BACKWARD,
    FORWARD,
    RankEvidence,
    collapse_repeats,
    collect_evidence,
)
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, Events, Group, Int64, RankTrace

# Detection from the events of the steps only.


def detect_strategies(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    matched: MatchedCalls,
    layout: RankLayout,
    schedule: str | None,
) -> tuple[Strategy, ...]:
    """Detects the strategies of all ranks, each once; schedule is None if unknown.

    Ambiguous strategies are omitted; none is inferred from the mesh in run.json.
    """
    strategies: list[Strategy] = []
    for i, (trace, windows) in enumerate(zip(traces, steps, strict=True)):
        leads = matched.leads[matched.slice_trace(i)]
        strategies += set(_detect_rank_strategies(collect_evidence(trace, windows, leads, layout)))
    sends = any(trace.calls.is_message.any() for trace in traces)
    stages = _detect_pipeline(layout, schedule) if sends or schedule else []
    return _remove_duplicates([*strategies, *stages])


def _detect_rank_strategies(evidence: RankEvidence) -> Iterator[Strategy]:
    if not len(evidence.passes):
        yield from infer_named_strategies(evidence)
        return
    usages = detect_model_strategies(evidence)
    taken = {one.group for one in usages if one.strategies[0].name != "ep"}
    context = {one.group for one in usages if one.strategies[0].name == "cp"}
    data = detect_data_strategies(evidence, taken)
    yield from (strategy for one in usages for strategy in one.strategies)
    yield from data.strategies or detect_wrapped_ddp(evidence, context)
    yield from detect_accumulation(evidence, count_gradient_sums(evidence, data.groups))
    yield from detect_recompute(evidence)
    # Detects offload of activations and of the optimizer. Activations are copied out in the
    # forward and back in the backward; gradients are copied out in the backward for weights that
    # return in the forward.
    away, back = (_classify_copies(evidence, way) for way in (r"DtoH", r"HtoD"))
    strategies = []
    if _is_frequent(away, FORWARD, evidence) and _is_frequent(back, BACKWARD, evidence):
        strategies.append(Strategy("offload", detail="activations"))
    returned = _is_frequent(back, FORWARD, evidence) or _is_frequent(back, AFTER, evidence)
    left = _is_frequent(away, BACKWARD, evidence) or _is_frequent(away, AFTER, evidence)
    if returned and left and _is_host_optimizer(evidence):
        strategies.append(Strategy("offload", detail="optimizer"))
    yield from strategies
    # autocast, fp8 GEMMs, mixed precision of sharded weights, loss scaling.
    eight = [Strategy("fp8")] if _EIGHT_BITS in evidence.trace.events.names else []
    yield from [
        *_detect_autocast(evidence),
        *eight,
        *_detect_mixed_precision(evidence),
        *_detect_loss_scaling(evidence),
    ]


def _detect_pipeline(layout: RankLayout, schedule: str | None) -> list[Strategy]:
    sizes = dict.fromkeys(len(line) for line in layout.pipelines)
    return [Strategy("pp", "pp", size, schedule or "") for size in sizes]


def _remove_duplicates(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Sorts in the order of NAMES; if ranks differ only in the detail, the most frequent one is
    kept."""
    counts = Counter(strategies)
    most: dict[tuple[str, str | None, int | None], Strategy] = {}
    for one in sorted(counts, key=lambda s: (-counts[s], s.detail)):
        most.setdefault((one.name, one.axis, one.size), one)
    return tuple(sorted(most.values(), key=lambda s: (NAMES.index(s.name), s.axis or "", s.detail)))


# Without host ops in the trace: strategies from the axes of groups and their calls only.

_MIN_GATHER_RATIO = 1.5
"""Weights gathered in both passes are gathered about twice as often as gradients are scattered;
less than twice if the weights of the last layer stay gathered."""


def infer_named_strategies(evidence: RankEvidence) -> list[Strategy]:
    """Strategies of groups with a known axis, if forward and backward cannot be distinguished."""
    strategies = [
        one for group in evidence.list_groups() for one in _infer_by_axis(evidence, group)
    ]
    sharded = [group for group in evidence.list_groups() if _is_gathered_twice(evidence, group)]
    replicas = [group for group in evidence.list_groups() if _is_sum_only(evidence, group)]
    if sharded:
        return [*strategies, *(_build_sharded(evidence, group, replicas) for group in sharded)]
    return [*strategies, *(Strategy("ddp", "dp_replicate", len(group.ranks)) for group in replicas)]


def _infer_by_axis(evidence: RankEvidence, group: Group) -> list[Strategy]:
    axes, size = evidence.layout.find_axes(group), len(group.ranks)
    if axes == {"tp"}:
        return _infer_named_tensor(evidence, group)
    if axes == {"ep"} and _count_calls(evidence, group, "all_to_all"):
        return [Strategy("ep", "ep", size)]
    if axes == {"cp"} and _count_calls(evidence, group, "send", "recv", "send_recv"):
        return [Strategy("cp", "cp", size, "ring")]
    return []


def _infer_named_tensor(evidence: RankEvidence, group: Group) -> list[Strategy]:
    size = len(group.ranks)
    if _count_calls(evidence, group, "all_gather") and _count_calls(
        evidence, group, "reduce_scatter"
    ):
        return [Strategy("tp", "tp", size), Strategy("sp", "tp", size)]
    return [Strategy("tp", "tp", size)] if _count_calls(evidence, group, "all_reduce") else []


def _build_sharded(evidence: RankEvidence, group: Group, replicas: list[Group]) -> Strategy:
    axis, size = format_axes(evidence.layout.find_axes(group), "dp_shard"), len(group.ranks)
    if replicas:
        return Strategy("hsdp", axis, size, f"{len(replicas[0].ranks)} replicas")
    return Strategy("fsdp", axis, size)


def _is_sum_only(evidence: RankEvidence, group: Group) -> bool:
    """Whether replicas only reduce; other collectives may be the weight updates of zero-1."""
    if evidence.layout.find_axes(group) != {"dp_replicate"} or not _count_calls(
        evidence, group, "all_reduce"
    ):
        return False
    return not _count_calls(evidence, group, "all_gather", "reduce_scatter", "broadcast", "reduce")


def _is_gathered_twice(evidence: RankEvidence, group: Group) -> bool:
    axes = evidence.layout.find_axes(group)
    if "dp_shard" not in axes or not axes <= {"dp_shard", "cp"}:
        return False
    scatters = _count_calls(evidence, group, "reduce_scatter")
    return (
        scatters > 0 and _count_calls(evidence, group, "all_gather") >= _MIN_GATHER_RATIO * scatters
    )


def _count_calls(evidence: RankEvidence, group: Group, *ops: str) -> int:
    """The number of tensor calls of the rank on the group with these ops, over all steps."""
    return int((evidence.is_on(group) & evidence.is_op(*ops) & evidence.is_tensor).sum())


# Model parallel strategies: tp, sp, cp, ep.

_LOSS = re.compile(r"(?<!X)XX+\|")

_LOOK_UP = re.compile(r"EX")

_MIN_CALL_SHARE = 0.5
"""A pattern must hold for more than this fraction of the calls of a group."""


class GroupUsage(Struct, frozen=True):
    """The strategies that a group is used for in the forwards of a rank."""

    group: Group
    strategies: tuple[Strategy, ...]


def detect_model_strategies(evidence: RankEvidence) -> list[GroupUsage]:
    """Strategies of groups whose ranks work on the same sample."""
    usages = [
        GroupUsage(group, tuple(_detect_group_strategies(evidence, group)))
        for group in evidence.list_groups()
    ]
    return [taken for taken in usages if taken.strategies]


def _detect_group_strategies(evidence: RankEvidence, group: Group) -> list[Strategy]:
    axes, size = evidence.layout.find_axes(group), len(group.ranks)
    if axes == {"tp"}:
        return _detect_tensor(evidence, group)
    if not axes <= {"cp", "ep", "dp_replicate", "dp_shard"}:
        return []
    if "ep" not in axes and (kind := _classify_context(evidence, group)) is not None:
        return [Strategy("cp", "cp", size, kind)]
    routes = axes == {"ep"} or (not axes and _is_token_routing(evidence, group))
    exchanges = (evidence.is_on(group) & evidence.is_op("all_to_all") & evidence.is_tensor).any()
    return [Strategy("ep", "ep", size)] if routes and exchanges else []


def _detect_tensor(evidence: RankEvidence, group: Group) -> list[Strategy]:
    """tp if activations are reduced, and sp if they are gathered and scattered along the sequence.

    A parallel vocabulary reduces between the look-up and the first layer; a parallel loss reduces
    two or more times between the last GEMM and the backward: maximum, sum, and target logit.
    """
    mask, size = evidence.is_on(group), len(group.ranks)
    forward = evidence.count_per_step(mask & evidence.is_tensor)[FORWARD]
    sums, scatters, gathers = (
        bool(forward[OP_CODE[op]]) for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    if not (sums or scatters):
        return []
    strategies = [Strategy("tp", "tp", size)]
    if scatters and gathers:
        strategies.append(Strategy("sp", "tp", size))
    looked_up = evidence.build_sequence(
        mask & evidence.is_tensor & evidence.is_op("all_reduce", "reduce_scatter")
    )
    if _LOOK_UP.search(looked_up):
        strategies.append(Strategy("vocabulary", "tp", size))
    if _LOSS.search(evidence.build_sequence(mask & evidence.is_op("all_reduce"))):
        strategies.append(Strategy("loss", "tp", size))
    return strategies


def _classify_context(evidence: RankEvidence, group: Group) -> str | None:
    """ring, all-gather or ulysses, by the position of the calls relative to attention; else None.

    A ring computes attention before or after each hop. Ulysses exchanges heads before attention and
    sequences after it. Keys and values are gathered after their projections.
    """
    mask = evidence.is_on(group) & ~evidence.shards & evidence.is_tensor
    hops = collapse_repeats(
        evidence.build_sequence(mask & evidence.is_op("send", "recv", "send_recv"))
    )
    if _measure_share(r"(?<=A)X|X(?=A)", hops) > _MIN_CALL_SHARE:
        return "ring"
    swaps = collapse_repeats(evidence.build_sequence(mask & evidence.is_op("all_to_all")))
    if "X" in swaps and not _has_routing(swaps):
        if "AXA" in swaps or ("XA" in swaps and "AX" not in swaps):
            return "ring"
        return "ulysses" if "XAX" in swaps else None
    gathers = collapse_repeats(evidence.build_sequence(mask & evidence.is_op("all_gather")))
    late = evidence.count_per_step(mask)[BACKWARD]
    back = any(late[OP_CODE[op]] for op in ("reduce_scatter", "all_gather", "all_reduce"))
    return "all-gather" if back and _measure_share(r"X(?=A)", gathers) > _MIN_CALL_SHARE else None


def _is_token_routing(evidence: RankEvidence, group: Group) -> bool:
    """Whether all_to_alls surround GEMMs after an expert selection (routing)."""
    mask = evidence.is_on(group) & evidence.is_tensor & evidence.is_op("all_to_all")
    return _has_routing(collapse_repeats(evidence.build_sequence(mask)))


def _has_routing(story: str) -> bool:
    return re.search(r"K[^|LX]*X[^X|]*L[^X|]*X", story) is not None


def _measure_share(pattern: str, story: str) -> float:
    """The fraction of the calls in the string that the pattern matches."""
    return len(re.findall(pattern, story)) / max(1, story.count("X"))


# Precisions in the steps of a rank.

_CASTING = ("aten::linear", "aten::matmul", "aten::conv2d")

_CASTS, _CASTS_BACK = "aten::_to_copy", "ToCopyBackward0"

_EIGHT_BITS = "aten::_scaled_mm"

_UNSCALES, _SCALES = "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_"


def _detect_autocast(evidence: RankEvidence) -> list[Strategy]:
    """Under autocast an op casts its inputs and calls itself: it contains casts, then itself."""
    events = evidence.trace.events
    has_casts = any(_has_nested_casts(events, name) for name in _CASTING)
    return [Strategy("autocast")] if has_casts and _CASTS_BACK in events.names else []


def _has_nested_casts(events: Events, name: str) -> bool:
    rows, casts = _find_rows(events, name), events.start_ns[_find_rows(events, _CASTS)]
    rows = rows[np.argsort(events.lane[rows], kind="stable")]
    start, end, lane = events.start_ns[rows], events.ends_of(rows), events.lane[rows]
    holds_next = (lane[1:] == lane[:-1]) & (start[1:] < end[:-1])
    between = np.searchsorted(casts, start[1:]) - np.searchsorted(casts, start[:-1])
    return bool((holds_next & (between > 0)).any())


def _find_rows(events: Events, name: str) -> Int64:
    """The ops with this name, in order of time."""
    chosen = events.name_mask(tuple(one == name for one in events.names))
    return np.flatnonzero(chosen & events.is_category(Category.OP))


def _detect_mixed_precision(evidence: RankEvidence) -> list[Strategy]:
    """Sharded weights are gathered in one precision and their gradients reduced in another."""
    gathers = _find_dtype(evidence, "all_gather")
    sums = _find_dtype(evidence, "reduce_scatter")
    if gathers is None or sums is None or gathers == sums:
        return []
    text = f"weights gathered in {gathers}, gradients summed in {sums}"
    return [Strategy("mixed precision", detail=text)]


def _find_dtype(evidence: RankEvidence, op: str) -> str | None:
    """The dtype of most FSDP calls of the op."""
    mask = evidence.shards & evidence.is_op(op) & evidence.is_tensor
    kinds = Counter(evidence.trace.calls.dtype[evidence.row[mask]].tolist())
    most = kinds.most_common(1)
    return evidence.trace.calls.dtypes[most[0][0]] if most and most[0][0] >= 0 else None


def _detect_loss_scaling(evidence: RankEvidence) -> list[Strategy]:
    """Gradients are divided by the loss scale and checked for infinity, as in GradScaler."""
    is_scaled = all(len(find_spans(evidence.trace.events, name)) for name in (_UNSCALES, _SCALES))
    return [Strategy("loss scaling")] if is_scaled else []


# Memory saving: gradient accumulation, recomputation, and offload to host memory.

_ONLY_FORWARD = (
    "aten::linear",
    "aten::layer_norm",
    "aten::rms_norm",
    "aten::batch_norm",
    "aten::group_norm",
    "aten::conv2d",
    "aten::scaled_dot_product_attention",
    "aten::gelu",
    "aten::silu",
    "aten::relu",
    "aten::relu_",
    "aten::softmax",
    "aten::dropout",
)
"""Ops that do not occur in a backward: inside one, they recompute activations."""

_WITHIN = {
    "aten::linear": ("aten::mm", "aten::addmm"),
    "aten::scaled_dot_product_attention": ("aten::_scaled_dot_product",),
}
"""Inner ops that do the work of a composite op."""

_MIN_RECOMPUTED = 0.6
"""Minimum recomputed fraction of each op for full recomputation; ops outside the layers, such as
the head, are not recomputed."""

_MIN_COPIES = 4
"""Minimum copies per step to count as tensors; a loss or a batch takes fewer."""


def detect_accumulation(evidence: RankEvidence, sums: int) -> list[Strategy]:
    """Several microbatches per optimizer step without a pipeline that splits the batch.

    sums is the number of backward passes, over all steps, after which gradients are reduced.
    """
    spans = evidence.marks.optimizer
    starts_ns = spans.start_ns[evidence.steps.find_step(spans.start_ns) >= 0]
    # ZeRO-3 updates its groups of weights one after the other.
    updates = len(np.unique(evidence.passes.find_latest(starts_ns)))
    updates = updates or (len(evidence.steps) if evidence.steps.marked else len(evidence.passes))
    count, rest = divmod(len(evidence.passes), updates)
    if count < 2 or rest or any(evidence.trace.rank in line for line in evidence.layout.pipelines):
        return []
    closures = find_spans(evidence.trace.events, "Optimizer.step#")
    begins, ends = np.searchsorted(evidence.passes.start_ns, (closures.start_ns, closures.end_ns))
    if (ends - begins).max(initial=0) > 1:
        # LBFGS evaluates the same batch several times.
        return []
    when = {updates: "gradients summed once", len(evidence.passes): "gradients summed after each"}
    parts = (f"{count} microbatches", when.get(sums, ""))
    return [Strategy("gradient accumulation", detail=", ".join(part for part in parts if part))]


def detect_recompute(evidence: RankEvidence) -> list[Strategy]:
    """Forward ops inside backwards: full if most of every op are repeated, else selective.

    Ops whose results a selective checkpoint saves are called again without computing.
    """
    events, engine = evidence.trace.events, evidence.marks.engine
    ids = [i for i, name in enumerate(events.names) if name in _ONLY_FORWARD]
    rows = np.flatnonzero(np.isin(events.name_id, ids) & events.is_category(Category.OP))
    rows = rows[evidence.steps.find_step(events.start_ns[rows]) >= 0]
    again = is_inside(engine, events.start_ns[rows])
    if not again.any():
        return []
    computes = _is_computing(events, rows, again)
    count = np.bincount(events.name_id[rows], again & computes, len(events.names))
    first = np.bincount(events.name_id[rows], ~again, len(events.names))
    layered = first >= 2 * max(1, len(evidence.passes))
    full = layered.any() and (count[layered] >= _MIN_RECOMPUTED * first[layered]).all()
    return [Strategy("recompute", detail="full" if full else "selective")]


def _is_computing(events: Events, rows: Int64, again: Bool) -> Bool:
    """Whether each op does its work: it contains as many inner ops as the median first call.

    Under a dispatch mode, as used by selective checkpoints, a GEMM that runs contains another one.
    """
    computing = np.ones(len(rows), dtype=np.bool_)
    for name, prefixes in _WITHIN.items():
        own = events.match_prefix(name)[rows]
        within = np.array([one.startswith(prefixes) for one in events.names], dtype=np.bool_)
        starts = events.start_ns[within[events.name_id] & events.is_category(Category.OP)]
        low, high = np.searchsorted(starts, (events.start_ns[rows], events.ends_of(rows)))
        if (own & ~again).any():
            computing &= ~own | (high - low >= np.median((high - low)[own & ~again]))
    return computing


def _is_host_optimizer(evidence: RankEvidence) -> bool:
    """Whether the optimizer launches no kernel."""
    events, spans = evidence.trace.events, evidence.marks.optimizer
    kernels = np.flatnonzero(events.is_category(Category.KERNEL))
    launches = events.find_launches(kernels)
    return len(spans) > 0 and not is_inside(spans, events.start_ns[launches]).any()


def _is_frequent(parts: Int64, part: int, evidence: RankEvidence) -> bool:
    return int((parts == part).sum()) >= _MIN_COPIES * max(1, len(evidence.steps))


def _classify_copies(evidence: RankEvidence, way: str) -> Int64:
    """The part of a step in which each copy to or from the host was launched."""
    events = evidence.trace.events
    chosen = tuple(re.search(way, name) is not None for name in events.names)
    rows = np.flatnonzero(events.is_category(Category.MEMCPY) & events.name_mask(chosen))
    launches = events.find_launches(rows)
    when = events.start_ns[launches[launches >= 0]]
    return evidence.passes.classify_part(when, evidence.steps, np.zeros(len(when), dtype=np.bool_))
