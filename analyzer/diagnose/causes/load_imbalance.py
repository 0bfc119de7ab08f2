"""Load imbalance: more work on one rank than on the others of its stage, or on one stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_max, group_min
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.expert_load import (
    MORE_COMPUTE,
    balance_experts,
    compare_sent_tokens,
    explain_by_tokens,
    measure_expert_loads,
)
from stepsplit.analyzer.diagnose.causes.ring_rounds import (
    deal_out_rounds,
    find_ring_segments,
    measure_ring_messages,
)
from stepsplit.analyzer.diagnose.causes.uneven_kernels import measure_uneven_work
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import scale_transfers, scale_work
from stepsplit.analyzer.diagnose.graph.segments import WorkSegments
from stepsplit.analyzer.diagnose.slow_kernels import FALSE_ALARMS
from stepsplit.analyzer.report.report import Settle
from stepsplit.analyzer.split.kernels import KernelWork
from stepsplit.analyzer.split.mesh import STAGE_AXES
from stepsplit.analyzer.trace import Float, Int64

_IMBALANCE_RATIO = 1.02
"""A rank or stage counts as imbalanced above this multiple of the mean work."""

_PART = 0.9
"""Kernels with at most this share of a rank's compute are a part of its work."""

_MIN_STEPS, _MIN_SIGMAS = 2, 3.0
"""With this many steps, more work must exceed its noise by so many standard errors."""


def find_uneven_ranks(context: CauseContext) -> Iterator[Remedy]:
    """Find the ranks with more work than the others of their stage: in most steps, else in some.

    A single rank gets the work of the others, between the same calls; of several, all have the
    same.
    """
    work, of_stage = _measure_work(context)
    found = _find_heavy_ranks(context, work, of_stage)
    heavy: tuple[int, ...] = ()
    if found is not None:
        yield _balance_ranks(context, work, of_stage, found)
        heavy = found[2]
    for one in context.unusual_steps:
        rank = int(context.ranks[one.index])
        if one.equal_work or rank in heavy:
            continue
        work_ns = context.select_bucket_ns("compute")
        counted = one.rows & context.counted
        steps = units.format_number_list(context.list_steps(one.rows))
        more, usual = one.kernels
        trace = context.split.ranks[one.index].trace
        known, kernels = trace.shapes.known_work, "kernels" if trace.on_device else "ops"
        what = f"{kernels} of other {f'{known} or ' if known else ''}names"
        if more > usual:
            what = f"{more:,.0f} {kernels} instead of {usual:,.0f}"
        remedy = replay_remedy(
            context,
            one.restore,
            bucket="skew",
            measured_ns=work_ns[counted].mean(),
            predicted_ns=(work_ns * one.pace)[counted].mean(),
            rows=one.rows,
            message=(
                f"load imbalance: rank {rank} has {units.format_percent(one.ratio - 1)} more "
                f"compute in {int(one.rows.sum())} of {one.steps} steps ({steps}) than in its "
                f"others: {what}"
            ),
            ranks=(rank,),
            events=one.longest,
            names_steps=True,
        )
        # Ranks that all do more in one step, as of an evaluation, wait for each other there.
        yield replace(remedy, as_set="loaded more than their peers")


def _balance_ranks(
    context: CauseContext,
    work: Float,
    of_stage: Float,
    found: tuple[int, float, tuple[int, ...]],
) -> Remedy:
    steps = context.graph.steps
    rank = context.ranks[steps.rank]
    worst, ratio, heavy = found
    mine = (rank == worst) & context.counted
    # The rows that share their work: ranks of a stage in a step.
    label = group_ids(steps.step, context.stage)
    usual, peers = of_stage, "average rank"
    who = f"ranks {units.format_number_list(heavy)}" if len(heavy) > 1 else f"rank {worst}"
    segments = WorkSegments.measure(context.graph, "compute", measure_uneven_work(context))
    # A part of the work that is mostly between the messages of a ring is dealt out to all of it.
    uneven_ns = segments.spent_ns[mine].sum()
    in_rings = (segments.spent_ns * find_ring_segments(context, segments))[mine].sum()
    of_ring: WorkSegments | None = None
    if 2 * in_rings > uneven_ns:
        every = WorkSegments.measure(context.graph, "compute")
        of_ring = every if uneven_ns < _PART * every.spent_ns[mine].sum() else None
    # A rank with a causal part has twice the work of an even round. What rounds do beside longer
    # messages hardly counts, and which of a ring's messages is the last one is by chance.
    is_rough = of_ring is not None and 2 * measure_ring_messages(context)[mine].sum() > in_rings
    is_one = len(heavy) == 1 and of_ring is None
    if is_one:
        others = context.average_peers(label, work, others=True)
        usual, peers = np.where(rank == worst, others, work), "other ranks"
        ratio = float(work[mine].mean() / max(others[mine].mean(), 1.0))
    more = ("up to " if len(heavy) > 1 else "") + units.format_percent(ratio - 1)
    than = f"the {peers} of {'its' if len(heavy) == 1 else 'their'} stage"
    more_tokens = compare_sent_tokens(context, worst)
    load = float(measure_expert_loads(context)[context.ranks == worst][0]) - 1
    is_sized = explain_by_tokens(more_tokens, ratio - 1)
    by_experts = is_sized or load > MORE_COMPUTE
    if by_experts and not is_sized:
        usual, doubt = of_stage, None
        reason = (
            f"; between dispatch and combine it is {units.format_percent(load)} more than the"
            " average of its group, elsewhere as much: its experts probably receive more tokens (no"
            " counts recorded)"
        )
    elif by_experts:
        usual = of_stage
        doubt = None
        reason = (
            f"; it sends {units.format_percent(more_tokens)} more in all_to_all on ep: its experts "
            "receive more tokens"
        )
    else:
        same_stage = context.ranks[np.unique(steps.rank[context.stage == context.stage[mine][0]])]
        doubt, reason = _describe_doubt(context, (worst,), same_stage.tolist()), ""

    def balance(graph: DependencyGraph) -> DependencyGraph:
        if by_experts:
            return balance_experts(context, graph)
        # Segments are comparable between ranks that made as many calls in the step.
        labels = int(label.max(initial=-1)) + 1
        fewest, most = (limit(label, segments.calls, labels) for limit in (group_min, group_max))
        equal = (fewest == most)[label]
        graph = scale_work(graph, "compute", np.where(equal, 1.0, usual / np.maximum(work, 1)))
        pace = (context.peer_speed * context.work_factor)[:, np.newaxis]
        columns = [
            context.average_peers(label, own, others=is_one) for own in (segments.spent_ns * pace).T
        ]
        target = np.stack(columns, axis=1)
        chosen = equal & (rank == worst) if is_one else equal
        if of_ring is not None:
            # What a rank does not compute in a round holds up none: the others do.
            all_ns = [context.average_peers(label, own) for own in (of_ring.spent_ns * pace).T]
            dealt_ns = deal_out_rounds(context, segments, target, np.stack(all_ns, axis=1))
            spent_ns = segments.spent_ns * pace
            most_ns = [group_max(label, column, labels) for column in spent_ns.T]
            target = spent_ns * dealt_ns / np.maximum(np.stack(most_ns, axis=1)[label], 1)
        return segments.set_work(graph, chosen, target / pace, is_equal=of_ring is not None)

    verb = "have" if len(heavy) > 1 else "has"
    message = f"load imbalance: {who} {verb} {more} more compute than {than}{reason}"
    if doubt:
        verb = "compute" if len(heavy) > 1 else "computes"
        message = f"load imbalance: {who} {verb} {more} longer than {than}: {doubt.text}"
    if is_rough:
        message += "; a rough saving, as messages of the ring take longer than what would hide them"
    remedy = replay_remedy(
        context,
        balance,
        bucket="skew",
        measured_ns=work[mine].mean(),
        predicted_ns=usual[mine].mean(),
        rows=mine,
        message=message,
        ranks=heavy,
        would_settle=doubt.would_settle if doubt else (),
        is_doubtful=doubt is not None or is_rough,
    )
    return replace(remedy, does_more=doubt is None)


def find_uneven_stages(context: CauseContext) -> Iterator[Remedy]:
    """Find the pipeline stage with more work than the average one."""
    if len(np.unique(context.stage)) < 2:
        return
    work, of_stage = _measure_work(context)
    # What single ranks have in addition is no work of their stage.
    uneven = _find_heavy_ranks(context, work, of_stage)
    if uneven is not None:
        label = group_ids(context.graph.steps.step, context.stage)
        even = context.compared & ~np.isin(context.ranks[context.graph.steps.rank], uneven[2])
        count = np.bincount(label, even)
        of_stage = (np.bincount(label, np.where(even, work, 0)) / np.maximum(count, 1))[label]
    mean = context.average_peers(group_ids(context.graph.steps.step), of_stage)
    found = _find_heavy(context, context.stage, of_stage / np.maximum(mean, 1))
    if found is None:
        return
    stage, ratio, _ = found
    mine = (context.stage == stage) & context.counted
    ranks = tuple(context.ranks[np.unique(context.graph.steps.rank[mine])].tolist())
    times = mean / np.maximum(of_stage, 1)
    doubt = _describe_doubt(context, ranks, context.ranks.tolist())

    def balance(graph: DependencyGraph) -> DependencyGraph:
        # Communication within a stage is that of its layers: as many bytes on all of them, or as
        # many calls if the size of some is unknown.
        kernels = context.find_kernels(lambda axes: bool(axes) and axes <= STAGE_AXES)
        row, table = graph.kernels.step[kernels], context.split.matched
        sent = table.message_bytes[graph.kernels.row[kernels]]
        sent = np.ones_like(sent) if (sent < 0).any() else np.maximum(sent, 1)
        of_rank = np.zeros(len(mean))
        np.add.at(of_rank, row[row >= 0], sent[row >= 0])
        step = context.graph.steps.step
        own = context.average_peers(group_ids(step, context.stage), of_rank)
        ratio = context.average_peers(group_ids(step), own) / np.maximum(own, 1)
        return scale_transfers(scale_work(graph, "compute", times), kernels, ratio[row])

    remedy = replay_remedy(
        context,
        balance,
        bucket="bubble",
        measured_ns=of_stage[mine].mean(),
        predicted_ns=mean[mine].mean(),
        rows=mine,
        message=(
            f"pipeline imbalance: stage {stage} computes {units.format_percent(ratio - 1)} longer "
            f"than average: {doubt.text}"
            if doubt
            else f"pipeline imbalance: stage {stage} has {units.format_percent(ratio - 1)} more "
            "compute than average; move layers off it"
        ),
        ranks=ranks,
        would_settle=doubt.would_settle if doubt else (),
        is_doubtful=doubt is not None,
    )
    yield replace(remedy, does_more=doubt is None)


def _measure_work(context: CauseContext) -> tuple[Float, Float]:
    """(the compute of each row, the mean of the ranks of its stage in the same step), at the speed
    of the peers, so that a slow device does not count as more work, and at equal counted work,
    which has a cause of its own (uneven_work.py)."""
    work = context.select_bucket_ns("compute") * context.peer_speed * context.work_factor
    return work, context.average_peers(group_ids(context.graph.steps.step, context.stage), work)


def _find_heavy_ranks(
    context: CauseContext, work: Float, of_stage: Float
) -> tuple[int, float, tuple[int, ...]] | None:
    """What _find_heavy says of the ranks, compared with the mean rank of their stage."""
    ratio = work / np.maximum(of_stage, 1)
    return _find_heavy(context, context.ranks[context.graph.steps.rank], ratio)


def _find_heavy(
    context: CauseContext, labels: Int64, ratio: Float
) -> tuple[int, float, tuple[int, ...]] | None:
    """(the label with the most work on average, its ratio to the mean, all labels with more work
    than the mean); None if balanced, up to the noise between steps."""
    rows = context.counted
    numbers, place = np.unique(labels[rows], return_inverse=True)
    mean = np.bincount(place, ratio[rows]) / np.bincount(place)
    # The noise of few full steps is that of all.
    if len(np.unique(context.graph.steps.step[rows])) < _MIN_STEPS:
        rows = np.isin(labels, numbers) & (ratio > 0)
    if not rows.any():
        return None
    place, spread = np.searchsorted(numbers, labels[rows]), ratio[rows]
    count = np.maximum(np.bincount(place, minlength=len(numbers)), 1)
    middle = np.bincount(place, spread, minlength=len(numbers)) / count
    squares = np.bincount(place, (spread - middle[place]) ** 2, minlength=len(numbers))
    sigma = np.sqrt(squares / count)
    # Few steps that agree by chance are as noisy as those of the others.
    sigma = np.maximum(sigma, np.sqrt(np.mean(sigma**2)))
    steps, full = (
        len(np.unique(context.graph.steps.step[some])) for some in (rows, context.counted)
    )
    sigmas = max(_MIN_SIGMAS, NormalDist().inv_cdf(1 - FALSE_ALARMS / len(numbers)))
    sigmas *= 1 + 1 / max(int(rows.sum()) - len(numbers), 1)
    if steps >= _MIN_STEPS:
        noise = sigmas * sigma * np.sqrt(steps / (steps - 1) / full)
    else:
        noise = np.zeros(len(numbers))
    heavy = mean > np.maximum(_IMBALANCE_RATIO, 1 + noise)
    if not heavy.any():
        return None
    most = int(np.where(heavy, mean, 0.0).argmax())
    return int(numbers[most]), float(mean[most]), tuple(numbers[heavy].tolist())


class _Doubt(NamedTuple):
    """That ranks have more work or are slower, and what would settle which."""

    text: str
    would_settle: tuple[Settle, ...]


def _describe_doubt(
    context: CauseContext, ranks: Sequence[int], peers: Sequence[int]
) -> _Doubt | None:
    """That these ranks may have more work, or be slower.

    It is None if more kernels, or kernels of other shapes where these are recorded, explain most of
    what they compute longer than their peers.
    """
    split = context.split
    of_ranks = (one.trace.shapes.known_work for one in split.ranks if one.trace.rank in ranks)
    known = next(filter(None, of_ranks), "")
    if known:
        work = []
        for rank in split.ranks:
            sums = rank.kernels
            kinds = zip(sums.work, sums.count, sums.total_ns, strict=True)
            work += [_Work(rank.trace.rank, *one) for one in kinds]
    else:
        families = split.detail.families
        work = [_Work(one.rank, one.family, one.count, one.total_ns) for one in families]
    own = _average_work([one for one in work if one.rank in ranks], len(ranks))
    others = [one for one in work if one.rank in peers and one.rank not in ranks]
    usual = _average_work(others, len(peers) - len(ranks))
    longer_ns = sum(total for _, total in own.values()) - sum(total for _, total in usual.values())
    more_ns = sum(
        max(count - usual.get(kind, (0.0, 0.0))[0], 0.0) / count * total
        for kind, (count, total) in own.items()
    )
    if 2 * more_ns > longer_ns:
        return None
    device = "a slower device" if len(ranks) == 1 else "slower devices"
    why = f"as many kernels of equal {known}, too few to tell" if known else "no shapes recorded"
    needs: tuple[Settle, ...] = () if known == "shapes" else ("shapes",)
    needs = (*needs, *(("more_steps",) if known else ()))
    return _Doubt(f"more work, or {device} ({why})", needs)


class _Work(NamedTuple):
    """The runs of one kind of kernel on one rank."""

    rank: int
    kind: KernelWork | str
    runs: int
    total_ns: int


def _average_work(rows: Sequence[_Work], ranks: int) -> dict[KernelWork | str, tuple[float, float]]:
    """(number of kernels, their time in ns) of each kind, a rank."""
    sums: dict[KernelWork | str, tuple[float, float]] = {}
    for one in rows:
        count, total = sums.get(one.kind, (0.0, 0.0))
        sums[one.kind] = (count + one.runs / ranks, total + one.total_ns / ranks)
    return sums


UNEVEN_RANKS = CauseEntry("uneven_ranks", find_uneven_ranks, basis="measured", of_peers=True)
UNEVEN_STAGES = CauseEntry("uneven_stages", find_uneven_stages, basis="measured", of_peers=True)
