"""Inference of mesh axes from group usage, if neither names nor run.json define them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set

import numpy as np
from msgspec import Struct, field

from stepsplit.analyzer.split.axis_signatures import Counts, Usage
from stepsplit.analyzer.split.call_purposes import (
    DDP_FORWARD,
    CallPurposes,
    classify_parts,
    find_call_purposes,
    find_issue_ns,
)
from stepsplit.analyzer.split.host_steps import count_profiled_steps
from stepsplit.analyzer.split.mesh_groups import (
    RankLine,
    fit_line,
    parse_group_name,
    parse_single_axis,
    remove_lines,
)
from stepsplit.analyzer.split.message_patterns import Exchanges
from stepsplit.analyzer.split.work import PRODUCT_FAMILIES, mask_families
from stepsplit.analyzer.trace import OP_CODE, OPS, Bool, Calls, Group, Int64, RankTrace
from stepsplit.collectors.formats.run_spec import DATA_PARALLEL


class _AxisEvidence(Struct, frozen=True):
    """Shapes of groups that reduce gradients, shapes with an axis, and the smallest stride."""

    summed: Set[frozenset[int]]
    axes: Set[tuple[frozenset[int], str]]
    closest: int


class InferredAxes(Struct, frozen=True):
    """The axis of each group that has one; marked holds the groups whose axis the ranges around
    their calls show.

    spans: the axes of groups that reduce gradients along cp too, lines: the line of their other
    axis.
    """

    axes: Mapping[Group, str]
    marked: Set[Group]
    spans: Mapping[Group, frozenset[str]]
    lines: Mapping[str, RankLine]


def infer_axes(
    traces: Sequence[RankTrace], rings: Collection[tuple[int, ...]], stage: Mapping[int, int]
) -> InferredAxes:
    """The axis of each group without a known name whose usage and ranks are unambiguous.

    A group gets the axis for which all groups of its shape are used. Groups across stages get none:
    embeddings of the first and last stage are reduced like gradients.
    """
    groups = [group for trace in traces for group in trace.groups if len(group.ranks) > 1]
    mesh = [group for group in groups if not parse_group_name(group.description).experts]
    named_axes = {g: axis for g in mesh if (axis := parse_single_axis(g.description)) is not None}
    for trace in traces:
        with_messages = sorted(set(trace.calls.group_id[trace.calls.is_message].tolist()) - {-1})
        on_rings = (trace.groups[i] for i in with_messages if trace.groups[i].ranks in rings)
        named_axes |= dict.fromkeys(on_rings, "cp")
    used = {
        g: u for g, u in measure_usage(traces).items() if g not in named_axes and len(g.ranks) > 1
    }
    unnamed = {g: u for g, u in used.items() if not parse_group_name(g.description).axes}
    axes = _infer_by_shape(unnamed, stage)
    contexts = [*rings, *(g.ranks for g, axis in (axes | named_axes).items() if axis == "cp")]
    spans, rest = _split_context(axes, contexts)
    axes = {g: axis for g, axis in axes.items() if g not in spans} | {
        g: "cp" for g, along in spans.items() if along == {"cp"}
    }
    evidence = _AxisEvidence(
        summed={_compute_shape(group) for group, usage in used.items() if usage.sums_gradients},
        axes={(_compute_shape(group), axis) for group, axis in (axes | named_axes).items()},
        closest=min((_compute_stride(group) for group in [*used, *named_axes]), default=1),
    )
    clear = {group: axis for group, axis in axes.items() if not _is_doubtful(group, axis, evidence)}
    lines: dict[str, set[RankLine | None]] = defaultdict(set)
    for axis, line in [
        *((axis, fit_line(group.ranks)) for group, axis in (named_axes | clear).items()),
        *rest,
    ]:
        lines[axis].add(line)
    one_line = {g: axis for g, axis in clear.items() if axis == "ep" or len(lines[axis]) == 1}
    rings_only = {g: a for g, a in named_axes.items() if not parse_group_name(g.description).axes}
    marked = {g for g, axis in one_line.items() if used[g].find_marked_axis() == axis}
    others = {axis: line for axis, line in rest if line is not None and lines[axis] == {line}}
    several = {
        g: along for g, along in spans.items() if "cp" not in along or along - {"cp"} <= set(others)
    }
    return InferredAxes(one_line | rings_only, marked, several, others)


def _split_context(
    axes: Mapping[Group, str], contexts: Collection[tuple[int, ...]]
) -> tuple[dict[Group, frozenset[str]], list[tuple[str, RankLine | None]]]:
    """The axes of the groups that reduce gradients over whole lines of cp, whose ranks have the
    same weights, and the line that is left of each along its own axis.

    Groups that reduce the gradients of experts have an axis and no line of the mesh.
    """
    spans: dict[Group, frozenset[str]] = {}
    rest: list[tuple[str, RankLine | None]] = []
    for group, axis in axes.items():
        inside = next((ranks for ranks in contexts if set(ranks) <= set(group.ranks)), None)
        if axis in DATA_PARALLEL and _replicates_experts(group, axis, axes):
            spans[group] = frozenset({axis})
        if axis not in DATA_PARALLEL or inside is None:
            continue
        if len(inside) == len(group.ranks):
            spans[group] = frozenset({"cp"})
        elif (context := fit_line(sorted(inside))) is not None:
            spans[group] = frozenset({axis, "cp"})
            offsets = [rank - min(group.ranks) for rank in group.ranks]
            rest.append((axis, fit_line(remove_lines(offsets, [context]))))
    return spans, rest


def find_marked_axes(traces: Sequence[RankTrace]) -> dict[Group, str]:
    """The axis of each group whose axis the ranges around its calls show."""
    marked = {group: usage.find_marked_axis() for group, usage in measure_usage(traces).items()}
    return {group: axis for group, axis in marked.items() if axis and len(group.ranks) > 1}


def find_sharded_groups(traces: Sequence[RankTrace]) -> set[Group]:
    """The groups on which weights are gathered for each use: FSDP issues all their gathers, or
    gathers run in the backward, where an optimizer with sharded states gathers none."""
    found: set[Group] = set()
    for trace in traces:
        calls = trace.calls
        gathers = (calls.op == _GATHER) & (calls.message_bytes != 0)
        purposes = find_call_purposes(trace)
        weights, backward = purposes.weights, purposes.backward
        for group_id in set(calls.group_id[gathers & (weights | backward)].tolist()) - {-1}:
            rows = gathers & (calls.group_id == group_id)
            ranks = trace.groups[group_id].ranks
            same = [i for i, group in enumerate(trace.groups) if group.ranks == ranks]
            scatters = np.isin(calls.group_id, same) & (calls.op == _SCATTER)
            if weights[rows].all() or ((backward & rows).any() and scatters.any()):
                found.add(trace.groups[group_id])
    return found


def infer_lines(
    axes: Mapping[Group, str], traffic: Exchanges, present: Collection[int]
) -> dict[str, RankLine]:
    """The line of each mesh axis from groups and messages; ambiguous ones are dropped.

    A chain counts only if all its ranks are recorded, otherwise it may continue.
    """
    candidates: dict[str, set[RankLine | None]] = defaultdict(set)
    for group, axis in axes.items():
        candidates[axis].add(fit_line(group.ranks))
    for axis, exchanged in (("pp", traffic.pipelines), ("cp", traffic.rings)):
        for ranks in exchanged:
            candidates[axis].add(fit_line(ranks) if set(ranks) <= set(present) else None)
    only = {axis: next(iter(lines)) for axis, lines in candidates.items() if len(lines) == 1}
    return {axis: line for axis, line in only.items() if line is not None and axis != "ep"}


def _infer_by_shape(used: Mapping[Group, Usage], stage: Mapping[int, int]) -> dict[Group, str]:
    """The axes of groups by usage, if all groups of a shape within a stage agree.

    Groups whose calls are marked outweigh the others.
    """
    by_line: dict[RankLine, set[str]] = defaultdict(set)
    marked_by_line: dict[RankLine, set[str]] = defaultdict(set)
    axes: dict[Group, str] = {}
    for group, usage in used.items():
        axis, line = usage.infer_axis(), fit_line(group.ranks)
        if axis == "ep":
            axes[group] = axis
        elif axis is not None and line and len({stage.get(rank) for rank in group.ranks}) == 1:
            axes[group] = axis
            (marked_by_line if usage.find_marked_axis() else by_line)[line].add(axis)
    agreed: dict[RankLine | None, set[str]] = {}
    for line, axes_of_line in (by_line | marked_by_line).items():
        # Ranks along cp reduce gradients too, often on a group of their own.
        own = axes_of_line - {*DATA_PARALLEL} if "cp" in axes_of_line else axes_of_line
        if len(own) == 1:
            agreed[line] = axes_of_line
    return {g: a for g, a in axes.items() if a == "ep" or a in agreed.get(fit_line(g.ranks), ())}


def _is_doubtful(group: Group, axis: str, evidence: _AxisEvidence) -> bool:
    """Whether the ranks of other groups contradict the axis.

    tp has the smallest stride. If a larger group also reduces gradients, this one may gather keys
    and values of attention instead of weights. A group that contains a whole line of another axis
    lies along several axes.
    """
    shape = _compute_shape(group)
    if axis == "ep":
        return False
    if axis == "tp":
        return _compute_stride(group) > evidence.closest
    if axis == "dp_shard" and any(shape < other for other in evidence.summed):
        return True
    return any(other < shape for other, of in evidence.axes if of not in (axis, "ep"))


def _replicates_experts(group: Group, axis: str, axes: Mapping[Group, str]) -> bool:
    """Whether the group has one rank of each of several ep groups, and is part of a group of its
    own axis that contains these whole."""
    ranks = set(group.ranks)
    larger = [g.ranks for g, other in axes.items() if other == axis and ranks < set(g.ranks)]
    experts = [g.ranks for g, other in axes.items() if other == "ep" and ranks & {*g.ranks}]
    alone = len(experts) > 1 and all(len(ranks & {*one}) == 1 for one in experts)
    return alone and any(all({*one} < {*whole} for one in experts) for whole in larger)


def _compute_shape(group: Group) -> frozenset[int]:
    """The offsets from the first rank; the groups of an axis share few shapes."""
    return frozenset(rank - group.ranks[0] for rank in group.ranks)


def _compute_stride(group: Group) -> int:
    line = fit_line(group.ranks)
    return line.stride if line is not None else 1


# Usage of each group in a step: collectives before and after the first backward.

SCALAR_BYTES = 1024
"""Collectives of at most this many bytes reduce a loss, a norm or a flag, not a tensor, unless a
range shows their purpose. test_layout.py and test_strategies.py pass at half and at twice of it."""

_GATHER, _SUM, _SCATTER, _EXCHANGE = (
    OP_CODE[op] for op in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
)


class _GroupCalls(Struct):
    """The calls of a group, over the ranks: per step (early, late, early bytes, hooked), by op
    which are next to attention, which all_to_alls are next to grouped products, sizes of
    all_to_alls, whether FSDP issued each rank's gathers, and bytes reduced late and in all."""

    per_step: list[Counts] = field(default_factory=list)
    attend: dict[int, list[Bool]] = field(default_factory=lambda: defaultdict(list))
    grouped: list[Bool] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)
    sharded: list[bool] = field(default_factory=list)
    activations: bool = False
    experts: bool = False
    late_bytes: int = 0
    summed_bytes: int = 0

    def summarize(self, *, replicated: bool) -> Usage:
        early, late, early_bytes, hooked = np.mean(self.per_step or [np.zeros((4, len(OPS)))], 0)
        return Usage(
            early=early,
            late=late,
            early_bytes=early_bytes,
            hooked=hooked,
            sizes=len(self.sizes),
            sharded=bool(self.sharded) and all(self.sharded),
            activations=self.activations,
            experts=self.experts,
            replicated=replicated,
            late_share=self.late_bytes / max(1, self.summed_bytes),
            exchanges=bool(self.grouped),
            gathers_attend=_compute_share(self.attend[_GATHER]),
            exchanges_attend=_compute_share(self.attend[_EXCHANGE]),
            grouped=_compute_share(self.grouped) or 0.0,
        )


def _compute_share(which: Sequence[Bool]) -> float | None:
    return float(np.concatenate(which).mean()) if which else None


def measure_usage(traces: Sequence[RankTrace]) -> dict[Group, Usage]:
    """The usage of groups, from traces that show which calls precede the first backward."""
    found: dict[Group, _GroupCalls] = defaultdict(_GroupCalls)
    for trace in traces:
        purposes, steps = find_call_purposes(trace), max(1, count_profiled_steps(trace))
        size = trace.calls.message_bytes
        parts = classify_parts(trace, (size < 0) | (size > SCALAR_BYTES) | purposes.known)
        for group_id in np.unique(trace.calls.group_id[parts >= 0]).tolist():
            if group_id >= 0:
                rows = np.flatnonzero((parts >= 0) & (trace.calls.group_id == group_id))
                group = found[trace.groups[group_id]]
                _add_calls(group, trace.calls, rows, parts[rows], purposes, steps)
        _add_neighbors(found, trace)
    replicated = _find_replicated_groups(traces)
    every = dict.fromkeys([*replicated, *found])
    return {g: found[g].summarize(replicated=g in replicated) for g in every}


def _add_calls(
    group: _GroupCalls,
    calls: Calls,
    rows: Int64,
    part: Int64,
    purposes: CallPurposes,
    steps: int,
) -> None:
    """Adds the calls of one rank in these rows, which are of so many steps."""
    op, size = calls.op[rows], np.maximum(calls.message_bytes[rows], 0)
    early, hooked = part == 0, purposes.gradients[rows]
    columns = [(early, None), (~early, None), (early, size), (hooked, None)]
    group.per_step.append(np.stack([
        np.bincount(op[mask], None if weights is None else weights[mask], len(OPS)) / steps
        for mask, weights in columns
    ]))  # fmt: skip
    gathers = purposes.weights[rows][op == _GATHER]
    group.sharded.append(bool(len(gathers) and gathers.all()))
    group.activations |= bool((purposes.activations[rows] & np.isin(op, (_SUM, _SCATTER))).any())
    group.experts |= bool((purposes.experts[rows] & (op == _EXCHANGE)).any())
    group.sizes |= set(size[op == OP_CODE["all_to_all"]].tolist())
    sums = op == _SUM
    after = sums & ~early & ~purposes.backward[rows]
    after &= ~np.isin(size, size[sums & early])
    group.late_bytes += int(size[after].sum())
    group.summed_bytes += int(size[sums].sum())


_GROUPED = re.compile(r"grouped|group_?gemm|GroupProblemShape|moe|expert", re.IGNORECASE)
"""Products of experts by the names of their kernels or ops."""


def _add_neighbors(found: Mapping[Group, _GroupCalls], trace: RankTrace) -> None:
    """Adds which all_gathers and all_to_alls of a rank are next to attention, or to experts, in the
    order in which its host issued them: keys and values are gathered before it, heads exchanged
    before and after it."""
    calls, events = trace.calls, trace.events
    moves = np.isin(calls.op, (_GATHER, _EXCHANGE)) & (calls.group_id >= 0)
    size = calls.message_bytes
    rows = np.flatnonzero(moves & ((size < 0) | (size > SCALAR_BYTES)))

    def find_issued_ns(event: Int64) -> Int64:
        return events.find_launch_ns(event) if trace.on_device else events.start_ns[event]

    called = find_issued_ns(calls.event[rows]) if trace.on_device else find_issue_ns(trace)[rows]
    rows, called = rows[called >= 0], called[called >= 0]
    if not len(rows):
        return
    work = np.flatnonzero(mask_families(trace, PRODUCT_FAMILIES))
    issued = find_issued_ns(work)
    work, issued = work[issued >= 0], issued[issued >= 0]
    if not len(work):
        return
    # The kernels of a graph have one launch; among them the order on the device counts.
    event = np.concatenate((work, calls.event[rows]))
    order = np.lexsort((events.start_ns[event], np.concatenate((issued, called))))
    before_call = np.cumsum(order < len(work))
    after = np.empty(len(event), dtype=np.int64)
    after[order] = before_call
    after = after[len(work) :]
    work = work[order[order < len(work)]]
    attends = mask_families(trace, {"attention"})[work]
    groups = (mask_families(trace, {"moe"}) | events.match_names(_GROUPED))[work]
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(work) - 1)
    exchanges = calls.op[rows] == _EXCHANGE
    near_attention = attends[after] | (exchanges & attends[before])
    near_experts = groups[after] | groups[before]
    for group_id in np.unique(calls.group_id[rows]).tolist():
        here = calls.group_id[rows] == group_id
        group = found[trace.groups[group_id]]
        for op in (_GATHER, _EXCHANGE):
            mine = here & (calls.op[rows] == op)
            if mine.any() and attends.any():
                group.attend[op].append(near_attention[mine])
        if (here & exchanges).any():
            group.grouped.append(near_experts[here & exchanges])


def _find_replicated_groups(traces: Sequence[RankTrace]) -> dict[Group, None]:
    """The groups on which DistributedDataParallel reduces gradients.

    It reduces in the backward. Where it is used and all all_reduces after the start of a backward
    are on one group, it is that group, whatever else is reduced there: also calls of a loop or a
    module in the forward, and gradients of any size.
    """
    found: dict[Group, None] = {}
    for trace in traces:
        if any(name.startswith(DDP_FORWARD) for name in trace.events.names):
            parts = classify_parts(trace, np.ones(len(trace.calls.op), dtype=np.bool_))
            sums = (parts == 1) & (trace.calls.op == _SUM)
            groups = np.unique(trace.calls.group_id[sums]).tolist()
            if len(groups) == 1 and groups[0] >= 0:
                found[trace.groups[groups[0]]] = None
    return found
