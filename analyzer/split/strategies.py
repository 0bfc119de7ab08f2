"""Detection of parallelism and memory strategies in a recording."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.arrays import inside
from stepsplit.analyzer.split.matching import Matched
from stepsplit.analyzer.split.mesh import RankLayout
from stepsplit.analyzer.split.steps import Steps
from stepsplit.analyzer.split.strategy_evidence import (
    AFTER,
    BACKWARD,
    FORWARD,
    NAMES,
    RankEvidence,
    Strategy,
    axis_named,
    data_strategies,
    once_each,
    seen_of,
    spans_of,
    sums_of,
    wrapped,
)
from stepsplit.analyzer.trace import OP_CODE, Bool, Category, Events, Group, Int64, RankTrace

# Detection from the events of the steps only.


def strategies_of(
    traces: Sequence[RankTrace],
    steps: Sequence[Steps],
    matched: Matched,
    layout: RankLayout,
    schedule: str | None,
) -> tuple[Strategy, ...]:
    """Detects the strategies of all ranks, each once; schedule is None if unknown.

    Ambiguous strategies are omitted; none is inferred from the mesh in run.json.
    """
    found: list[Strategy] = []
    for i, (trace, windows) in enumerate(zip(traces, steps, strict=True)):
        leads = matched.leads[matched.of_trace(i)]
        found += set(_of_rank(seen_of(trace, windows, leads, layout)))
    sends = any(trace.calls.is_message.any() for trace in traces)
    stages = _pipelined(layout, schedule) if sends or schedule else []
    return _once_each([*found, *stages])


def _of_rank(seen: RankEvidence) -> Iterator[Strategy]:
    if not len(seen.passes):
        yield from named_strategies(seen)
        return
    of_model = model_strategies(seen)
    taken = {one.group for one in of_model if one.strategies[0].name != "ep"}
    context = {one.group for one in of_model if one.strategies[0].name == "cp"}
    data = data_strategies(seen, taken)
    yield from (strategy for one in of_model for strategy in one.strategies)
    yield from data.strategies or wrapped(seen, context)
    yield from accumulated(seen, sums_of(seen, data.groups))
    yield from recomputed(seen)
    yield from offloaded(seen)
    yield from precisions(seen)


def _pipelined(layout: RankLayout, schedule: str | None) -> list[Strategy]:
    sizes = dict.fromkeys(len(line) for line in layout.pipelines)
    return [Strategy("pp", "pp", size, schedule or "") for size in sizes]


def _once_each(found: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Sorts in the order of NAMES; if ranks differ only in the detail, the most frequent one is
    kept."""
    counts = Counter(found)
    most: dict[tuple[str, str | None, int | None], Strategy] = {}
    for one in sorted(counts, key=lambda s: (-counts[s], s.detail)):
        most.setdefault((one.name, one.axis, one.size), one)
    return tuple(sorted(most.values(), key=lambda s: (NAMES.index(s.name), s.axis or "", s.detail)))


# Without host ops in the trace: strategies from the axes of groups and their calls only.

_TWICE = 1.5
"""Weights gathered in both passes are gathered about twice as often as gradients are scattered;
less than twice if the weights of the last layer stay gathered."""


def named_strategies(seen: RankEvidence) -> list[Strategy]:
    """Strategies of groups with a known axis, if forward and backward cannot be distinguished."""
    found = [one for group in seen.groups() for one in _of_model(seen, group)]
    sharded = [group for group in seen.groups() if _gathers_twice(seen, group)]
    replicas = [group for group in seen.groups() if _only_sums(seen, group)]
    if sharded:
        return [*found, *(_sharded(seen, group, replicas) for group in sharded)]
    return [*found, *(Strategy("ddp", "dp_replicate", len(group.ranks)) for group in replicas)]


def _of_model(seen: RankEvidence, group: Group) -> list[Strategy]:
    axes, size = seen.layout.axes_of(group), len(group.ranks)
    if axes == {"tp"}:
        return _named_tensor(seen, group)
    if axes == {"ep"} and _count(seen, group, "all_to_all"):
        return [Strategy("ep", "ep", size)]
    if axes == {"cp"} and _count(seen, group, "send", "recv", "send_recv"):
        return [Strategy("cp", "cp", size, "ring")]
    return []


def _named_tensor(seen: RankEvidence, group: Group) -> list[Strategy]:
    size = len(group.ranks)
    if _count(seen, group, "all_gather") and _count(seen, group, "reduce_scatter"):
        return [Strategy("tp", "tp", size), Strategy("sp", "tp", size)]
    return [Strategy("tp", "tp", size)] if _count(seen, group, "all_reduce") else []


def _sharded(seen: RankEvidence, group: Group, replicas: list[Group]) -> Strategy:
    axis, size = axis_named(seen.layout.axes_of(group), "dp_shard"), len(group.ranks)
    if replicas:
        return Strategy("hsdp", axis, size, f"{len(replicas[0].ranks)} replicas")
    return Strategy("fsdp", axis, size)


def _only_sums(seen: RankEvidence, group: Group) -> bool:
    """Whether replicas only reduce; other collectives may be the weight updates of zero-1."""
    if seen.layout.axes_of(group) != {"dp_replicate"} or not _count(seen, group, "all_reduce"):
        return False
    return not _count(seen, group, "all_gather", "reduce_scatter", "broadcast", "reduce")


def _gathers_twice(seen: RankEvidence, group: Group) -> bool:
    axes = seen.layout.axes_of(group)
    if "dp_shard" not in axes or not axes <= {"dp_shard", "cp"}:
        return False
    scatters = _count(seen, group, "reduce_scatter")
    return scatters > 0 and _count(seen, group, "all_gather") >= _TWICE * scatters


def _count(seen: RankEvidence, group: Group, *ops: str) -> int:
    """The number of tensor calls of the rank on the group with these ops, over all steps."""
    return int((seen.on(group) & seen.of(*ops) & seen.is_tensor).sum())


# Model parallel strategies: tp, sp, cp, ep.

_LOSS = re.compile(r"XX+\|")

_LOOK_UP = re.compile(r"EX")

_MOST_CALLS = 0.5
"""A pattern must hold for more than this fraction of the calls of a group."""


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """The strategies that a group is used for in the forwards of a rank."""

    group: Group
    strategies: tuple[Strategy, ...]


def model_strategies(seen: RankEvidence) -> list[GroupUsage]:
    """Strategies of groups whose ranks work on the same sample."""
    found = [GroupUsage(group, tuple(_of_group(seen, group))) for group in seen.groups()]
    return [taken for taken in found if taken.strategies]


def _of_group(seen: RankEvidence, group: Group) -> list[Strategy]:
    axes, size = seen.layout.axes_of(group), len(group.ranks)
    if axes == {"tp"}:
        return _inferred_tensor(seen, group)
    if not axes <= {"cp", "ep", "dp_replicate", "dp_shard"}:
        return []
    if "ep" not in axes and (kind := _context_kind(seen, group)) is not None:
        return [Strategy("cp", "cp", size, kind)]
    routes = axes == {"ep"} or (not axes and _routes_tokens(seen, group))
    exchanges = (seen.on(group) & seen.of("all_to_all") & seen.is_tensor).any()
    return [Strategy("ep", "ep", size)] if routes and exchanges else []


def _inferred_tensor(seen: RankEvidence, group: Group) -> list[Strategy]:
    """tp if activations are reduced, and sp if they are gathered and scattered along the sequence.

    A parallel vocabulary reduces between the look-up and the first layer; a parallel loss reduces
    two or more times between the last GEMM and the backward: maximum, sum, and target logit.
    """
    mask, size = seen.on(group), len(group.ranks)
    forward = seen.counts(mask & seen.is_tensor)[FORWARD]
    sums, scatters, gathers = (
        bool(forward[OP_CODE[op]]) for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    if not (sums or scatters):
        return []
    found = [Strategy("tp", "tp", size)]
    if scatters and gathers:
        found.append(Strategy("sp", "tp", size))
    looked_up = seen.story(mask & seen.is_tensor & seen.of("all_reduce", "reduce_scatter"))
    if _LOOK_UP.search(looked_up):
        found.append(Strategy("vocabulary", "tp", size))
    if _LOSS.search(seen.story(mask & seen.of("all_reduce"))):
        found.append(Strategy("loss", "tp", size))
    return found


def _context_kind(seen: RankEvidence, group: Group) -> str | None:
    """ring, all-gather or ulysses, by the position of the calls relative to attention; else None.

    A ring computes attention before or after each hop. Ulysses exchanges heads before attention and
    sequences after it. Keys and values are gathered after their projections.
    """
    mask = seen.on(group) & ~seen.shards & seen.is_tensor
    hops = once_each(seen.story(mask & seen.of("send", "recv", "send_recv")))
    if _share(r"(?<=A)X|X(?=A)", hops) > _MOST_CALLS:
        return "ring"
    swaps = once_each(seen.story(mask & seen.of("all_to_all")))
    if "X" in swaps and not _routed(swaps):
        return _kind_of_swaps(swaps)
    gathers = once_each(seen.story(mask & seen.of("all_gather")))
    late = seen.counts(mask)[BACKWARD]
    back = any(late[OP_CODE[op]] for op in ("reduce_scatter", "all_gather", "all_reduce"))
    return "all-gather" if back and _share(r"X(?=A)", gathers) > _MOST_CALLS else None


def _kind_of_swaps(story: str) -> str | None:
    if "AXA" in story or ("XA" in story and "AX" not in story):
        return "ring"
    return "ulysses" if "XAX" in story else None


def _routes_tokens(seen: RankEvidence, group: Group) -> bool:
    """Whether all_to_alls surround GEMMs after an expert selection (routing)."""
    mask = seen.on(group) & seen.is_tensor & seen.of("all_to_all")
    return _routed(once_each(seen.story(mask)))


def _routed(story: str) -> bool:
    return re.search(r"K[^|LX]*X[^X|]*L[^X|]*X", story) is not None


def _share(pattern: str, story: str) -> float:
    """The fraction of the calls in the string that the pattern matches."""
    return len(re.findall(pattern, story)) / max(1, story.count("X"))


# Precisions in the steps of a rank.

_CASTING = ("aten::linear", "aten::matmul", "aten::conv2d")

_CASTS, _CASTS_BACK = "aten::_to_copy", "ToCopyBackward0"

_EIGHT_BITS = "aten::_scaled_mm"

_UNSCALES, _SCALES = "aten::_amp_foreach_non_finite_check_and_unscale_", "aten::_amp_update_scale_"


def precisions(seen: RankEvidence) -> list[Strategy]:
    """autocast, fp8 GEMMs, mixed precision of sharded weights, loss scaling."""
    eight = [Strategy("fp8")] if _EIGHT_BITS in seen.trace.events.names else []
    return [*_autocast(seen), *eight, *_mixed(seen), *_scaled(seen)]


def _autocast(seen: RankEvidence) -> list[Strategy]:
    """Under autocast an op casts its inputs and calls itself: it contains casts, then itself."""
    events = seen.trace.events
    found = any(_casts_itself(events, name) for name in _CASTING)
    return [Strategy("autocast")] if found and _CASTS_BACK in events.names else []


def _casts_itself(events: Events, name: str) -> bool:
    rows, casts = _rows_of(events, name), events.start_ns[_rows_of(events, _CASTS)]
    rows = rows[np.argsort(events.lane[rows], kind="stable")]
    start, end, lane = events.start_ns[rows], events.end_ns[rows], events.lane[rows]
    holds_next = (lane[1:] == lane[:-1]) & (start[1:] < end[:-1])
    between = np.searchsorted(casts, start[1:]) - np.searchsorted(casts, start[:-1])
    return bool((holds_next & (between > 0)).any())


def _rows_of(events: Events, name: str) -> Int64:
    """The ops with this name, in order of time."""
    chosen = events.name_mask(tuple(one == name for one in events.names))
    return np.flatnonzero(chosen & events.of(Category.OP))


def _mixed(seen: RankEvidence) -> list[Strategy]:
    """Sharded weights are gathered in one precision and their gradients reduced in another."""
    gathers = _dtype(seen, "all_gather")
    sums = _dtype(seen, "reduce_scatter")
    if gathers is None or sums is None or gathers == sums:
        return []
    text = f"weights gathered in {gathers}, gradients summed in {sums}"
    return [Strategy("mixed precision", detail=text)]


def _dtype(seen: RankEvidence, op: str) -> str | None:
    """The dtype of most FSDP calls of the op."""
    mask = seen.shards & seen.of(op) & seen.is_tensor
    kinds = Counter(seen.trace.calls.dtype[seen.row[mask]].tolist())
    most = kinds.most_common(1)
    return seen.trace.calls.dtypes[most[0][0]] if most and most[0][0] >= 0 else None


def _scaled(seen: RankEvidence) -> list[Strategy]:
    """Gradients are divided by the loss scale and checked for infinity, as in GradScaler."""
    found = all(len(spans_of(seen.trace.events, name)) for name in (_UNSCALES, _SCALES))
    return [Strategy("loss scaling")] if found else []


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

_MOST_RECOMPUTED = 0.6
"""Minimum recomputed fraction of each op for full recomputation; ops outside the layers, such as
the head, are not recomputed."""

_MANY = 4
"""Minimum copies per step to count as tensors; a loss or a batch takes fewer."""


def accumulated(seen: RankEvidence, sums: int) -> list[Strategy]:
    """Several microbatches per optimizer step without a pipeline that splits the batch.

    sums is the number of backward passes, over all steps, after which gradients are reduced.
    """
    spans = seen.marks.optimizer
    updates = int((seen.steps.at(spans.start_ns) >= 0).sum())
    updates = updates or (len(seen.steps) if seen.steps.marked else len(seen.passes))
    count, rest = divmod(len(seen.passes), updates)
    if count < 2 or rest or any(seen.trace.rank in line for line in seen.layout.pipelines):
        return []
    when = {updates: "gradients summed once", len(seen.passes): "gradients summed after each"}
    parts = (f"{count} microbatches", when.get(sums, ""))
    return [Strategy("gradient accumulation", detail=", ".join(part for part in parts if part))]


def recomputed(seen: RankEvidence) -> list[Strategy]:
    """Forward ops inside backwards: full if most of every op are repeated, else selective.

    Ops whose results a selective checkpoint saves are called again without computing.
    """
    events, engine = seen.trace.events, seen.marks.engine
    ids = [i for i, name in enumerate(events.names) if name in _ONLY_FORWARD]
    rows = np.flatnonzero(np.isin(events.name_id, ids) & events.of(Category.OP))
    rows = rows[seen.steps.at(events.start_ns[rows]) >= 0]
    again = inside(engine, events.start_ns[rows])
    if not again.any():
        return []
    computes = _computes(events, rows, again)
    count = np.bincount(events.name_id[rows], again & computes, len(events.names))
    first = np.bincount(events.name_id[rows], ~again, len(events.names))
    layered = first >= 2 * max(1, len(seen.passes))
    full = layered.any() and (count[layered] >= _MOST_RECOMPUTED * first[layered]).all()
    return [Strategy("recompute", detail="full" if full else "selective")]


def _computes(events: Events, rows: Int64, again: Bool) -> Bool:
    """Whether each op does its work: it contains as many inner ops as the median first call.

    Under a dispatch mode, as used by selective checkpoints, a GEMM that runs contains another one.
    """
    found = np.ones(len(rows), dtype=np.bool_)
    for name, prefixes in _WITHIN.items():
        own = events.named(name)[rows]
        within = np.array([one.startswith(prefixes) for one in events.names], dtype=np.bool_)
        starts = events.start_ns[within[events.name_id] & events.of(Category.OP)]
        low, high = np.searchsorted(starts, (events.start_ns[rows], events.end_ns[rows]))
        if (own & ~again).any():
            found &= ~own | (high - low >= np.median((high - low)[own & ~again]))
    return found


def offloaded(seen: RankEvidence) -> list[Strategy]:
    """Detects offload of activations and of the optimizer.

    Activations are copied out in the forward and back in the backward; gradients are copied out in
    the backward for weights that return in the forward.
    """
    away, back = (_copies(seen, way) for way in (r"DtoH", r"HtoD"))
    found = []
    if _often(away, FORWARD, seen) and _often(back, BACKWARD, seen):
        found.append(Strategy("offload", detail="activations"))
    returned = _often(back, FORWARD, seen) or _often(back, AFTER, seen)
    left = _often(away, BACKWARD, seen) or _often(away, AFTER, seen)
    if returned and left and _host_updates(seen):
        found.append(Strategy("offload", detail="optimizer"))
    return found


def _host_updates(seen: RankEvidence) -> bool:
    """Whether the optimizer launches no kernel."""
    events, spans = seen.trace.events, seen.marks.optimizer
    kernels = np.flatnonzero(events.of(Category.KERNEL))
    launches = events.launches_of(kernels)
    return len(spans) > 0 and not inside(spans, events.start_ns[launches]).any()


def _often(parts: Int64, part: int, seen: RankEvidence) -> bool:
    return int((parts == part).sum()) >= _MANY * max(1, len(seen.steps))


def _copies(seen: RankEvidence, way: str) -> Int64:
    """The part of a step in which each copy to or from the host was launched."""
    events = seen.trace.events
    chosen = tuple(re.search(way, name) is not None for name in events.names)
    rows = np.flatnonzero(events.of(Category.MEMCPY) & events.name_mask(chosen))
    launches = events.launches_of(rows)
    when = events.start_ns[launches[launches >= 0]]
    return seen.passes.part_of(when, seen.steps, np.zeros(len(when), dtype=np.bool_))
