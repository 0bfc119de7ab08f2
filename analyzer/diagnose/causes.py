"""Bottlenecks of a run: the gain of fixing each is estimated by a replay, largest gain first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace as replace_fields
from statistics import median
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_mean
from stepsplit.analyzer.diagnose.comm_causes import (
    TokenExchanges,
    find_extra_reductions,
    find_lost_overlap,
    find_redundant_gathers,
    find_slow_links,
    find_small_collectives,
)
from stepsplit.analyzer.diagnose.gemm_causes import find_slow_gemms
from stepsplit.analyzer.diagnose.graph.dependency_graph import WORK, DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import (
    Float,
    Remedy,
    ReplayContext,
    build_context,
    scale_transfers,
    scale_work,
)
from stepsplit.analyzer.diagnose.host_causes import find_host_causes
from stepsplit.analyzer.diagnose.launch_order import find_launch_order_causes
from stepsplit.analyzer.diagnose.slow_kernels import SlowRank, sum_slow_ranks
from stepsplit.analyzer.model.schedule_time import compute_ideal_bubble_fraction
from stepsplit.analyzer.report.build import compute_profiling_slowdown
from stepsplit.analyzer.report.diagnosis_rows import SlowKernel
from stepsplit.analyzer.report.report import MIN_GAIN_SHARE, SCHEDULE_NAMES, EventRef, Finding
from stepsplit.analyzer.significance import SIGMA_OF_MAD
from stepsplit.analyzer.split.kernels import KernelWork, collect_compute, find_kernel_work
from stepsplit.analyzer.split.mesh import STAGE_AXES
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.trace import OP_CODE, Bool, Int64, Note
from stepsplit.collectors.formats.rank_record import RankRecord

# The bottlenecks of a run, largest gain first.

MAX_FINDINGS = 5

MAX_REPLAYED_CALLS, MAX_REPLAYED_CALLS_AT_ONCE = 1_500_000, 20_000_000
"""Upper limits of a replay, node by node and, of many ranks, by whole levels: a million calls take
about 60 s and 13 s."""


class Causes(Struct, frozen=True):
    """The bottlenecks of a recording, largest gain first; notes list analyses that were skipped."""

    findings: tuple[Finding, ...]
    notes: tuple[Note, ...] = ()


def find_causes(
    split: RunSplit,
    graph: DependencyGraph,
    origin_ns: int,
    records: Sequence[RankRecord],
    slow_kernels: Sequence[SlowKernel],
) -> Causes:
    """Find the bottlenecks of a recording.

    A gain is the reduction of the mean full step if that one cause were fixed, estimated by a
    replay of the recording without it. Gains are not additive.

    Args:
        split: the split recording.
        graph: its dependency graph.
        origin_ns: the report's t0 on the common clock.
        records: what each rank recorded about its own device (clocks, throttling).
        slow_kernels: the kernels that are slower on one rank than on its peers.
    """
    if not len(graph.steps.step):
        return Causes(())
    calls = sum(len(rank.trace.calls) for rank in split.ranks)
    if calls > (MAX_REPLAYED_CALLS_AT_ONCE if graph.levels.is_wide else MAX_REPLAYED_CALLS):
        text = (
            f"bottlenecks not analyzed: {calls:,} calls are too many to replay; record fewer steps"
        )
        return Causes((), (Note("not_replayed", text),))
    context = build_context(split, graph, slow_kernels, origin_ns, records)
    return Causes(_select_causes(context) if context.mean_ns > 0 else ())


def _select_causes(context: ReplayContext) -> tuple[Finding, ...]:
    host = find_host_causes(context)
    # A finding for each straggler; its gain is that of this rank alone at its peers' speed.
    pace = compute_peer_speed_ratio(context)
    slow = {context.ranks[index] for index in context.graph.steps.rank[pace < 1].tolist()}
    stragglers = [_build_straggler_remedy(context, int(rank), pace) for rank in sorted(slow)]
    stragglers += find_intermittent_stragglers(context, stragglers)
    of_ranks = [*stragglers, *host.ranks, *find_slow_links(context)]
    found = unmask(context, of_ranks)
    causes = [
        *found.findings,
        *find_load_imbalance(context),
        *host.common,
        *find_slow_gemms(context),
        *find_lost_overlap(context),
        *find_launch_order_causes(context),
        *find_few_microbatches(context),
        *find_redundant_gathers(context),
        *find_extra_reductions(context),
        *find_small_collectives(context),
    ]
    causes = [_leave_out_profiler(context, cause) for cause in _drop_explained(causes)]
    worth = [cause for cause in causes if cause.gain_ns >= MIN_GAIN_SHARE * context.mean_ns]
    ranked = sorted(worth, key=lambda cause: _rank_finding(context, cause, found.hidden))
    return tuple(ranked[:MAX_FINDINGS])


def _rank_finding(
    context: ReplayContext, finding: Finding, hidden: Sequence[Finding]
) -> tuple[bool, bool, int]:
    """The largest gain first, and last what gains nothing before another cause is fixed. In a CPU
    run host_bound comes after all: it is the time that the same processor spends between ops, most
    of which cannot be removed."""
    on_device = context.split.ranks[0].trace.on_device
    between_ops = finding.code == "host_bound" and not on_device
    return between_ops, any(finding is one for one in hidden), -finding.gain_ns


_SLOWED_BY_PROFILER = ("host_stall", "host_bound")
"""Time of the host between kernels, to which the profiler adds its own for each op and launch."""


def _leave_out_profiler(context: ReplayContext, finding: Finding) -> Finding:
    """The finding without what the profiler itself costs a step: it ends with the recording.

    On a CPU that is left: there the profiler slows the work as much as what is between.
    """
    if finding.code not in _SLOWED_BY_PROFILER or not context.split.ranks[0].trace.on_device:
        return finding
    slowdown = compute_profiling_slowdown(context.records) or 0.0
    if slowdown <= 0:
        return finding
    own_ns = round(context.mean_ns * slowdown / (1 + slowdown))
    return replace(
        finding,
        gain_ns=max(0, finding.gain_ns - own_ns),
        message=f"{finding.message}; the saving leaves out {units.format_milliseconds(own_ns)} of "
        "the profiler's own",
    )


def _drop_explained(causes: list[Finding]) -> list[Finding]:
    """Without lost overlap where small buckets cost more: they are why the reduction is exposed."""
    small_ns = max((one.gain_ns for one in causes if one.code == "small_collectives"), default=0)
    return [one for one in causes if one.code != "no_overlap" or one.gain_ns > small_ns]


# Causes that mask each other: of two equally slow ranks, fixing one alone gains nothing.

_MASKED = 1.1
"""Causes mask each other if fixing all gains more than this multiple of fixing each alone."""

_MAX_MEMBERS = 16
"""Only this many causes of one kind, those that cost most, are tried as a set."""

_MAX_MASKS = 3
"""Only so many causes, those that gain most, are tried as what masks another."""

_SET_NAMES = {
    "slow_rank": "stragglers",
    "host_stall": "host-bound",
    "data_loading": "waiting for their data loaders",
    "allocation": "allocating memory",
    "gc_pause": "stopped by garbage collection",
    "slow_copy": "slowed by memory copies",
    "slow_link": "on slow links",
}


class Unmasked(Struct, frozen=True):
    """The findings of single ranks and links. hidden are those among them that gain next to nothing
    alone; their gain is what they save once the largest cause is fixed."""

    findings: tuple[Finding, ...]
    hidden: tuple[Finding, ...] = ()


def unmask(context: ReplayContext, remedies: Sequence[Remedy]) -> Unmasked:
    """The findings of single ranks and links, those that mask each other as sets.

    Causes of one kind whose joint gain exceeds the sum of their own gains are one finding, also if
    that shows only once the largest cause is fixed. A cause that the largest one masks says what it
    gains once that one is fixed.
    """
    joined = [one for alike in _group_by_code(remedies) for one in _join_masked(context, alike)]
    joined.sort(key=lambda remedy: -remedy.finding.gain_ns)
    if not joined:
        return Unmasked(())
    if joined[0].finding.gain_ns < MIN_GAIN_SHARE * context.mean_ns:
        return Unmasked(tuple(one.finding for one in _join_masked(context, joined)))
    top, *others = joined
    others = _join_behind(context, top, others)
    joined = [top, *others]
    behind = [_find_behind_any(context, joined[:_MAX_MASKS], remedy) for remedy in others]
    hidden = [
        new for new, old in zip(behind, others, strict=True) if new.gain_ns > old.finding.gain_ns
    ]
    return Unmasked((top.finding, *behind), tuple(hidden))


def _group_by_code(remedies: Sequence[Remedy]) -> list[list[Remedy]]:
    by_code: dict[str, list[Remedy]] = defaultdict(list)
    for remedy in remedies:
        by_code[remedy.finding.code].append(remedy)
    return list(by_code.values())


def _join_masked(context: ReplayContext, remedies: Sequence[Remedy]) -> list[Remedy]:
    """The remedies, those that mask each other as one."""
    members = sorted(remedies, key=_estimate_cost_ns, reverse=True)[:_MAX_MEMBERS]
    if len(members) < 2:
        return list(remedies)
    gain = context.compute_gain_ns(_apply_all(context.graph, members))
    return _join_members(context, remedies, members, gain)


def _join_members(
    context: ReplayContext, remedies: Sequence[Remedy], members: list[Remedy], gain: int
) -> list[Remedy]:
    """The remedies; these members of them, which gain so much together, as one without those that
    add next to nothing, if they mask each other."""
    alone = sum(max(one.finding.gain_ns, 0) for one in members)
    least = MIN_GAIN_SHARE * context.mean_ns
    if gain <= _MASKED * alone or gain < least:
        return list(remedies)
    for one in reversed(members):
        others = [member for member in members if member is not one]
        if not others:
            break
        without = context.compute_gain_ns(_apply_all(context.graph, others))
        if without >= gain - least / 2:
            members, gain = others, without
    rest = [one for one in remedies if not any(one is member for member in members)]
    return [_join_remedies(context, members, gain) if len(members) > 1 else members[0], *rest]


def _estimate_cost_ns(remedy: Remedy) -> int:
    finding = remedy.finding
    return (finding.measured_ns or 0) - (finding.predicted_ns or 0)


def _apply_all(graph: DependencyGraph, remedies: Sequence[Remedy]) -> DependencyGraph:
    for remedy in remedies:
        graph = remedy.change(graph)
    return graph


def _join_remedies(context: ReplayContext, members: Sequence[Remedy], gain_ns: int) -> Remedy:
    """One remedy for causes that mask each other; the first of them costs most."""
    findings = [member.finding for member in members]
    first = findings[0]
    ranks = tuple(sorted({rank for one in findings for rank in one.ranks}))
    alone = units.format_milliseconds(max(one.gain_ns for one in findings))
    kinds = " and ".join(dict.fromkeys(_SET_NAMES[one.code] for one in findings))
    finding = replace(
        first,
        gain_ns=gain_ns,
        ranks=ranks,
        steps=tuple(sorted({step for one in findings for step in one.steps})),
        message=(
            f"ranks {units.format_number_list(ranks)}{_describe_host(context, ranks)} are {kinds} "
            f"and mask each other (fixing one of {len(findings)} saves at most {alone}): "
            f"{first.message}"
        ),
    )
    return Remedy(finding, lambda graph: _apply_all(graph, members))


def _describe_host(context: ReplayContext, ranks: Sequence[int]) -> str:
    """The host of these ranks, if it is one of several; whether it has other ranks."""
    host_of = {one.trace.rank: one.trace.host for one in context.split.ranks}
    hosts = {host_of.get(rank) for rank in ranks}
    if len(hosts) > 1 or hosts >= set(host_of.values()):
        return ""
    (host,) = hosts
    others = [rank for rank, at in host_of.items() if at == host and rank not in ranks]
    return f" (on host {host})" if others else f" (all of host {host})"


def _join_behind(context: ReplayContext, top: Remedy, others: Sequence[Remedy]) -> list[Remedy]:
    """The other causes; those of a kind that mask each other once the largest is fixed, as one."""
    groups = _group_by_code(others)
    if all(len(alike) < 2 for alike in groups):
        return list(others)
    fixed = context.replay_with(top.change(context.graph))
    joined = [one for alike in groups for one in _join_if_fixed(context, fixed, alike)]
    return sorted(joined, key=lambda remedy: -remedy.finding.gain_ns)


def _join_if_fixed(
    context: ReplayContext, fixed: ReplayContext, alike: Sequence[Remedy]
) -> list[Remedy]:
    """The causes of one kind, those that mask each other in the fixed context as one."""
    ordered = sorted(alike, key=_estimate_cost_ns, reverse=True)
    members, rest = ordered[:_MAX_MEMBERS], ordered[_MAX_MEMBERS:]
    if len(members) < 2:
        return list(alike)
    together = fixed.compute_gain_ns(_apply_all(fixed.graph, members))
    if together < MIN_GAIN_SHARE * context.mean_ns:
        return list(alike)
    there = {id(one.change): one for one in members}
    measured = [_measure_gain(fixed, one) for one in members]
    joined = _join_members(fixed, measured, measured, together)
    kept = [there.get(id(one.change)) or _measure_gain(context, one) for one in joined]
    return [*kept, *rest]


def _measure_gain(context: ReplayContext, remedy: Remedy) -> Remedy:
    gain_ns = context.compute_gain_ns(remedy.change(context.graph))
    return Remedy(replace(remedy.finding, gain_ns=gain_ns), remedy.change)


def _find_behind_any(context: ReplayContext, masks: Sequence[Remedy], remedy: Remedy) -> Finding:
    """The finding behind the largest cause; if that does not mask it and it gains next to nothing
    alone, behind the next ones. A cause of one rank gains at most what it costs that rank."""
    least = MIN_GAIN_SHARE * context.mean_ns
    if len(remedy.finding.ranks) == 1 and _estimate_cost_ns(remedy) < least / 2:
        return remedy.finding
    for mask in masks:
        if mask is remedy or mask.finding.gain_ns < least:
            continue
        found = _find_behind(context, mask, remedy)
        if found is not remedy.finding or remedy.finding.gain_ns >= least:
            return found
    return remedy.finding


def _find_behind(context: ReplayContext, top: Remedy, remedy: Remedy) -> Finding:
    """The finding; if the largest cause masks it, with what it gains once that one is fixed, which
    is its gain if it gains next to nothing alone."""
    finding = remedy.finding
    gain = context.compute_gain_ns(remedy.change(top.change(context.graph))) - top.finding.gain_ns
    least = MIN_GAIN_SHARE * context.mean_ns
    if gain < least or gain <= _MASKED * max(finding.gain_ns, 0):
        return finding
    once = _describe_fixed(top.finding.ranks)
    if finding.gain_ns >= least:
        then = f"{units.format_milliseconds(gain)} {once}"
        return replace(finding, message=f"{finding.message}; saves {then}")
    alone = units.format_milliseconds(max(finding.gain_ns, 0))
    text = f"{finding.message}; saves {alone} alone, the rest {once}"
    return replace(finding, gain_ns=gain, message=text)


def _describe_fixed(ranks: Sequence[int]) -> str:
    """When these ranks are fixed, or, without ranks, what costs all of them."""
    match ranks:
        case []:
            return "once the largest bottleneck is fixed"
        case [rank]:
            return f"once rank {rank} is fixed"
    return f"once ranks {units.format_number_list(ranks)} are fixed"


# The bubble of the pipeline schedule, compared with twice as many microbatches.


def find_few_microbatches(context: ReplayContext) -> list[Finding]:
    """Estimate the gain of twice as many microbatches of the same size for the same work.

    The busy time of the pipeline stays the same; only the ideal bubble fraction changes.
    """
    schedule, holes = context.split.schedule, context.split.stage_bubbles
    now = schedule.ideal_bubble_fraction if schedule else None
    if schedule is None or now is None or not holes:
        return []
    stages = len(context.split.layout.pipelines[0])
    then = compute_ideal_bubble_fraction(
        schedule.name, stages, 2 * schedule.microbatches, schedule.chunks, schedule.times_ns
    )
    if then is None or then >= now:
        return []
    busy_ns = float(np.mean([hole.window_ns - hole.bubble_ns for hole in holes]))
    costs, would_cost = (busy_ns * idle / (1 - idle) for idle in (now, then))
    return [
        Finding(
            code="few_microbatches",
            bucket="bubble",
            gain_ns=round(costs - would_cost),
            measured_ns=round(costs),
            predicted_ns=round(would_cost),
            ranks=(),
            steps=context.list_steps(context.counted),
            events=(),
            message=(
                f"{SCHEDULE_NAMES.get(schedule.name, schedule.name)} bubble is "
                f"{units.format_percent(now)} of the pipeline window with "
                f"{schedule.microbatches} microbatches; {2 * schedule.microbatches} would reduce "
                f"it to {units.format_percent(then)}"
            ),
        )
    ]


# Load imbalance: between the ranks of a stage, and between the stages.

_IMBALANCE_RATIO = 1.02
"""A rank or stage counts as imbalanced above this multiple of the mean work."""

_MIN_STEPS, _MIN_SIGMAS = 3, 3.0
"""With this many steps, more work must exceed its noise by so many standard errors."""


def find_load_imbalance(context: ReplayContext) -> list[Finding]:
    """Find load imbalance between stages and between the ranks of a stage.

    Compute is scaled to the speed of the peers, so that a slow device does not count as more work.
    """
    steps = context.graph.steps
    work = context.select_bucket_ns("compute") * compute_peer_speed_ratio(context)
    of_stage = group_mean(group_ids(steps.step, context.stage), work)
    stages = group_mean(group_ids(steps.step), of_stage)
    findings = [_find_rank_imbalance(context, work, of_stage)]
    if len(np.unique(context.stage)) > 1:
        findings.append(_find_stage_imbalance(context, of_stage, stages))
    return [one for one in findings if one is not None]


def _find_stage_imbalance(context: ReplayContext, of_stage: Float, mean: Float) -> Finding | None:
    found = _find_heavy(context, context.stage, of_stage / np.maximum(mean, 1))
    if found is None:
        return None
    stage, ratio, _ = found
    mine = (context.stage == stage) & context.counted
    ranks = tuple(context.ranks[np.unique(context.graph.steps.rank[mine])].tolist())
    times = mean / np.maximum(of_stage, 1)
    # Scale the communication within a stage with its number of layers.
    graph = scale_work(context.graph, "compute", times)
    kernels = context.find_kernels(lambda axes: bool(axes) and axes <= STAGE_AXES)
    changed = scale_transfers(graph, kernels, times[graph.kernels.step[kernels]])
    doubt = _describe_doubt(context, ranks, context.ranks.tolist())
    return Finding(
        code="uneven_stages",
        bucket="bubble",
        gain_ns=context.compute_gain_ns(changed),
        measured_ns=int(of_stage[mine].mean()),
        predicted_ns=int(mean[mine].mean()),
        ranks=ranks,
        steps=context.list_steps(mine),
        events=(),
        message=(
            f"pipeline imbalance: stage {stage} has {units.format_percent(ratio - 1)} more compute "
            f"than average; move layers off it{doubt}"
        ),
    )


def _describe_doubt(context: ReplayContext, ranks: Sequence[int], peers: Sequence[int]) -> str:
    """The doubt that these ranks may be slower instead.

    It is "" if more kernels, or kernels of other shapes where these are recorded, explain most of
    what they compute longer than their peers.
    """
    split = context.split
    known = any(len(rank.trace.shapes) for rank in split.ranks if rank.trace.rank in ranks)
    work = _list_work(split) if known else _list_families(split)
    own = _average_work([one for one in work if one.rank in ranks], len(ranks))
    others = [one for one in work if one.rank in peers and one.rank not in ranks]
    usual = _average_work(others, len(peers) - len(ranks))
    longer_ns = sum(total for _, total in own.values()) - sum(total for _, total in usual.values())
    more_ns = sum(
        max(count - usual.get(kind, (0.0, 0.0))[0], 0.0) / count * total
        for kind, (count, total) in own.items()
    )
    if 2 * more_ns > longer_ns:
        return ""
    devices = "its device is" if len(ranks) == 1 else "its devices are"
    why = "as many kernels of equal shapes" if known else "no shapes recorded"
    return f", unless {devices} slower ({why})"


class _Work(NamedTuple):
    """The runs of one kind of kernel on one rank."""

    rank: int
    kind: KernelWork | str
    runs: int
    total_ns: int


def _list_families(split: RunSplit) -> list[_Work]:
    return [_Work(one.rank, one.family, one.count, one.total_ns) for one in split.detail.families]


def _list_work(split: RunSplit) -> list[_Work]:
    """The runs of each kernel of each shape."""
    rows = []
    for rank in split.ranks:
        compute = collect_compute(rank.trace, rank.windows)
        kinds, kind = find_kernel_work(rank.trace, compute.row)
        count = np.bincount(kind, minlength=len(kinds)).tolist()
        total = np.bincount(kind, compute.took_ns, minlength=len(kinds)).tolist()
        rows += [_Work(rank.trace.rank, *one) for one in zip(kinds, count, total, strict=True)]
    return rows


def _average_work(rows: Sequence[_Work], ranks: int) -> dict[KernelWork | str, tuple[float, float]]:
    """(number of kernels, their time in ns) of each kind, a rank."""
    sums: dict[KernelWork | str, tuple[float, float]] = {}
    for one in rows:
        count, total = sums.get(one.kind, (0.0, 0.0))
        sums[one.kind] = (count + one.runs / ranks, total + one.total_ns / ranks)
    return sums


def _find_rank_imbalance(context: ReplayContext, work: Float, of_stage: Float) -> Finding | None:
    """A single rank with more work gets that of the others of its stage; several are balanced."""
    steps = context.graph.steps
    rank = context.ranks[steps.rank]
    found = _find_heavy(context, rank, work / np.maximum(of_stage, 1))
    if found is None:
        return None
    worst, ratio, heavy = found
    mine = (rank == worst) & context.counted
    usual, peers = of_stage, "average rank"
    who = f"ranks {units.format_number_list(heavy)} have up to"
    if len(heavy) == 1:
        who = f"rank {worst} has"
        label = group_ids(steps.step, context.stage)
        count = np.bincount(label)[label]
        others = (of_stage * count - work) / np.maximum(count - 1, 1)
        usual, peers = np.where(rank == worst, others, work), "other ranks"
        ratio = float(work[mine].mean() / max(others[mine].mean(), 1.0))
    experts = _describe_expert_load(context, worst)
    if experts:
        usual, changed = of_stage, balance_experts(context)
    else:
        changed = scale_work(context.graph, "compute", usual / np.maximum(work, 1))
    same_stage = context.ranks[np.unique(steps.rank[context.stage == context.stage[mine][0]])]
    return Finding(
        code="uneven_ranks",
        bucket="skew",
        gain_ns=context.compute_gain_ns(changed),
        measured_ns=int(work[mine].mean()),
        predicted_ns=int(usual[mine].mean()),
        ranks=heavy,
        steps=context.list_steps(mine),
        events=(),
        message=(
            f"load imbalance: {who} {units.format_percent(ratio - 1)} more compute than the "
            f"{peers} of {'its' if len(heavy) == 1 else 'their'} stage"
            + (experts or _describe_doubt(context, (worst,), same_stage.tolist()))
        ),
    )


def _describe_expert_load(context: ReplayContext, rank: int) -> str:
    """How much more a rank sends in the all_to_alls of its expert parallel group than the others.

    What each rank sends to the experts is alike; what it returns is what its experts received.
    """
    split, sent = context.split, {}
    groups = [
        number
        for number, group in enumerate(split.matched.groups)
        if rank in group.ranks and "ep" in split.layout.find_axes(group)
    ]
    for index, one in enumerate(split.ranks):
        own = split.matched.slice_trace(index)
        rows = np.isin(split.matched.group[own], groups)
        rows &= split.matched.op[own] == OP_CODE["all_to_all"]
        sizes = one.trace.calls.input_bytes[split.matched.call[own][rows]]
        if len(sizes) and (sizes >= 0).all():
            sent[one.trace.rank] = float(sizes.mean())
    others = [size for other, size in sent.items() if other != rank]
    more = sent[rank] / max(sum(others) / len(others), 1.0) - 1 if rank in sent and others else 0.0
    if more <= _IMBALANCE_RATIO - 1:
        return ""
    return (
        f"; it sends {units.format_percent(more)} more in all_to_all on ep: its experts receive "
        "more tokens"
    )


# Expert load: the tokens of an expert parallel group, evenly on its ranks.


def balance_experts(context: ReplayContext) -> DependencyGraph:
    """The graph with as many tokens for the experts of each rank of an expert parallel group.

    Compute between the all_to_all that brings tokens and the one that returns them is that of the
    average rank of the group. Both last as long as the rank with most bytes needs, so they shorten
    by its bytes over those of the average rank.
    """
    exchanges = TokenExchanges.find(context)
    graph = scale_transfers(context.graph, exchanges.kernels, 1 / exchanges.imbalance)
    changed, column = graph.work_ns.copy(order="K"), WORK.index("compute")
    nodes = exchanges.list_expert_nodes(context)
    row = graph.step[nodes]
    total = np.bincount(row, changed[nodes, column], minlength=len(graph.steps.step))
    busy = np.flatnonzero(total > 0)
    group = exchanges.list_groups(len(context.ranks))[graph.steps.rank[busy]]
    factor = np.ones(len(total))
    factor[busy] = group_mean(group_ids(group, graph.steps.step[busy]), total[busy]) / total[busy]
    changed[nodes, column] = np.rint(changed[nodes, column] * factor[row])
    return replace_fields(graph, work_ns=changed)


def _find_heavy(
    context: ReplayContext, labels: Int64, ratio: Float
) -> tuple[int, float, tuple[int, ...]] | None:
    """(the label with the most work on average, its ratio to the mean, all labels with more work
    than the mean); None if balanced, up to the noise between steps."""
    rows = context.counted
    numbers, place = np.unique(labels[rows], return_inverse=True)
    count = np.bincount(place)
    mean = np.bincount(place, ratio[rows]) / count
    sigma = np.sqrt(np.bincount(place, (ratio[rows] - mean[place]) ** 2) / count)
    steps = len(np.unique(context.graph.steps.step[rows]))
    noise = _MIN_SIGMAS * sigma / np.sqrt(steps - 1) if steps >= _MIN_STEPS else 0 * sigma
    heavy = mean > np.maximum(_IMBALANCE_RATIO, 1 + noise)
    if not heavy.any():
        return None
    most = int(np.where(heavy, mean, 0.0).argmax())
    return int(numbers[most]), float(mean[most]), tuple(numbers[heavy].tolist())


# Stragglers: ranks whose device runs the same kernels slower than its peers.


def compute_peer_speed_ratio(context: ReplayContext) -> Float:
    """For each row, its compute time at the speed of its peers as a ratio of the measured time.

    A slowdown shared by all ranks of a stage counts as work of the stage, not as slow devices.
    """
    lost: dict[int, int] = defaultdict(int)
    for one in context.slow_kernels:
        lost[one.rank] += one.lost_ns
    lost_ns = np.array([lost[rank] for rank in context.ranks.tolist()], dtype=np.int64)
    share = lost_ns[context.graph.steps.rank] / _compute_rank_mean_ns(context)
    for stage in np.unique(context.stage).tolist():
        mine = context.stage == stage
        if len(np.unique(context.graph.steps.rank[mine])) > 1:
            share[mine] -= share[mine].min()
    return np.clip(1 - share, 0.0, 1.0)


def _compute_rank_mean_ns(context: ReplayContext) -> Float:
    """For each row, the mean compute of its rank over the full steps, in ns."""
    compute, steps = context.select_bucket_ns("compute"), context.graph.steps
    counted = context.counted
    count = np.bincount(steps.rank[counted], minlength=len(context.ranks))
    total = np.bincount(steps.rank[counted], compute[counted], minlength=len(context.ranks))
    return np.maximum(total / np.maximum(count, 1), 1.0)[steps.rank]


_FAMILY_NAMES = {"gemm": "GEMM"}


def _build_straggler_remedy(context: ReplayContext, rank: int, pace: Float) -> Remedy:
    mine = context.ranks[context.graph.steps.rank] == rank
    rows = [one for one in sum_slow_ranks(context.slow_kernels) if one.rank == rank]
    doubt = "" if rows[0].same_work else ", unless its inputs are larger (no shapes recorded)"
    return _build_speed_up(
        context,
        rank,
        np.where(mine, pace, 1.0),
        mine,
        _list_slowest_kernels(context, rank, rows[0]),
        f"rank {rank} is a straggler: its {_FAMILY_NAMES.get(rows[0].family, rows[0].family)} "
        f"kernels are {rows[0].ratio:.2f}x slower than on its peers{doubt}",
    )


def _build_speed_up(
    context: ReplayContext,
    rank: int,
    pace: Float,
    slow: Bool,
    events: tuple[EventRef, ...],
    message: str,
) -> Remedy:
    """The remedy for a rank whose compute takes longer than it should in its slow steps.

    pace is the time that it should take over that it takes, pace and slow have an element for each
    rank and step.
    """

    def speed_up(graph: DependencyGraph) -> DependencyGraph:
        return scale_work(graph, "compute", pace)

    compute_ns, counted = context.select_bucket_ns("compute"), slow & context.counted
    # The rank's SM clock compared with the median rank and its throttle reasons; "" if normal.
    clocks = {
        one.rank.rank: clock
        for one in context.records
        if (clock := _read_sm_clock_mhz(one)) is not None
    }
    words = []
    if rank in clocks and clocks[rank] < _LOW_CLOCK_RATIO * median(clocks.values()):
        usual = median(clocks.values())
        words.append(f"SM clock {clocks[rank]:,.0f} MHz (median rank: {usual:,.0f} MHz)")
    bits = 0
    for record in context.records:
        if record.rank.rank == rank:
            for state in record.gpu:
                bits |= state.throttle_reasons or 0
    reasons = [name for bit, name in _THROTTLE_REASONS if bits & bit]
    if reasons:
        words.append(f"throttled: {', '.join(reasons)}")
    notes = [one.gpu_note for one in context.records if one.rank.rank == rank and one.gpu_note]
    if notes:
        words.append(notes[0] if rank in clocks else f"SM clock unknown: {notes[0]}")
    gpu_state = "; ".join(words)
    finding = Finding(
        code="slow_rank",
        bucket="compute",
        gain_ns=context.compute_gain_ns(speed_up(context.graph)),
        measured_ns=int(compute_ns[counted].mean()),
        predicted_ns=int((compute_ns * pace)[counted].mean()),
        ranks=(rank,),
        steps=context.list_steps(slow),
        events=events,
        message=message + (f"; {gpu_state}" if gpu_state else ""),
    )
    return Remedy(finding, speed_up)


_SLOW_STEP_RATIO, _SLOW_STEP_SIGMAS = 0.05, 6.0
"""In a slow step a rank's compute exceeds its usual one by this fraction, and by so many standard
deviations of all ranks and steps."""


def find_intermittent_stragglers(context: ReplayContext, known: Sequence[Remedy]) -> list[Remedy]:
    """A finding for each GPU that takes longer for as many kernels in fewer than half of its steps,
    such as one that is throttled now and then; known ones are slow in most steps."""
    beyond = _measure_beyond_usual(context)
    steps = beyond.shape[1]
    if len(beyond) < 2 or steps < _MIN_STEPS or not context.split.ranks[0].trace.on_device:
        return []
    sigma = SIGMA_OF_MAD * float(np.nanmedian(np.abs(beyond)))
    slow = beyond > max(_SLOW_STEP_RATIO, _SLOW_STEP_SIGMAS * sigma)
    named = {rank for one in known for rank in one.finding.ranks}
    found = []
    for index in np.flatnonzero(slow.any(axis=1)).tolist():
        is_new = int(context.ranks[index]) not in named and 2 * int(slow[index].sum()) < steps
        if is_new and _has_equal_work(context, index, slow[index]):
            found.append(_build_intermittent_remedy(context, index, beyond[index], slow[index]))
    return found


def _number_counted_steps(context: ReplayContext) -> tuple[Int64, Int64]:
    """(the rows that count, the place of the step of each among all steps)."""
    rows = np.flatnonzero(context.counted)
    return rows, np.unique(context.graph.steps.step[rows], return_inverse=True)[1]


def _measure_beyond_usual(context: ReplayContext) -> Float:
    """By how much each rank's compute exceeds that of its median step in each step, as a fraction,
    without what the median rank has in the same step; shape (ranks, steps), nan if not counted."""
    rows, place = _number_counted_steps(context)
    compute = np.full((len(context.ranks), int(place.max(initial=-1)) + 1), np.nan)
    compute[context.graph.steps.rank[rows], place] = context.select_bucket_ns("compute")[rows]
    compute = np.where(compute > 0, compute, np.nan)
    if np.isnan(compute).all(axis=1).any() or np.isnan(compute).all(axis=0).any():
        return np.zeros((0, 0))
    beyond = compute / np.nanmedian(compute, axis=1, keepdims=True) - 1
    # Of two ranks, the one that exceeds its usual step by less.
    return np.asarray(beyond - np.nanquantile(beyond, 0.5, axis=0, method="lower"))


def _has_equal_work(context: ReplayContext, index: int, slow: Bool) -> bool:
    """Whether a rank runs in these steps no more kernels than in its others, nor other ones, by
    name and, where they are recorded, shapes."""
    rank = context.split.ranks[index]
    compute = collect_compute(rank.trace, rank.windows)
    if len(compute.steps) != len(slow):
        return False
    place = np.searchsorted(compute.steps, compute.step)
    count = np.bincount(place, minlength=len(slow))
    _, kind = find_kernel_work(rank.trace, compute.row)
    is_new = ~np.isin(kind[slow[place]], kind[~slow[place]])
    more = count[slow].max() / max(float(np.median(count[~slow])), 1.0)
    return bool(more <= _IMBALANCE_RATIO and is_new.mean() <= _IMBALANCE_RATIO - 1)


def _build_intermittent_remedy(
    context: ReplayContext, index: int, beyond: Float, slow: Bool
) -> Remedy:
    rank, steps = int(context.ranks[index]), context.graph.steps
    rows, place = _number_counted_steps(context)
    mine = (steps.rank[rows] == index) & slow[place]
    pace = np.ones(len(steps.rank))
    pace[rows[mine]] = 1 / (1 + beyond[place[mine]])
    compute_ns = context.select_bucket_ns("compute")[rows[mine]]
    ratio = float(compute_ns.sum() / (compute_ns * pace[rows[mine]]).sum())
    known = len(context.split.ranks[index].trace.shapes) > 0
    doubt = "" if known else ", unless its inputs are larger there (no shapes recorded)"
    return _build_speed_up(
        context,
        rank,
        pace,
        pace < 1,
        (),
        f"rank {rank} is a straggler in {int(slow.sum())} of {len(slow)} steps: as many "
        f"kernels take {ratio:.2f}x as long there as in its other steps{doubt}",
    )


def _list_slowest_kernels(
    context: ReplayContext, rank: int, slow: SlowRank
) -> tuple[EventRef, ...]:
    index = int(np.flatnonzero(context.ranks == rank)[0])
    events = context.split.ranks[index].trace.events
    rows = np.flatnonzero(events.match_prefix(slow.kernel))
    longest = rows[np.argsort(-events.dur_ns[rows], kind="stable")][:3]
    return tuple(context.make_event_ref(index, row) for row in longest.tolist())


# The state of a straggler's GPU during the recording: SM clock and throttling.

_LOW_CLOCK_RATIO = 0.97
"""A clock below this fraction of the median rank's clock is reported."""

_THROTTLE_REASONS = (
    (0x0004, "power cap"),
    (0x0008, "hardware slowdown"),
    (0x0010, "sync boost"),
    (0x0020, "thermal slowdown by software"),
    (0x0040, "thermal slowdown by hardware"),
    (0x0080, "power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h) that slow a busy device down."""


def _read_sm_clock_mhz(record: RankRecord) -> float | None:
    read = [state.sm_clock_mhz for state in record.gpu if state.sm_clock_mhz is not None]
    return median(read) if read else None
