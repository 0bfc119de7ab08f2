"""Pipelines and rings in the messages between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

import numpy as np
from msgspec import Struct, field

from stepsplit.analyzer.arrays import Intervals, is_inside
from stepsplit.analyzer.split.call_purposes import (
    find_backward_spans,
    find_first_backward_ns,
    find_issue_ns,
)
from stepsplit.analyzer.split.microbatch_marks import parse_marks
from stepsplit.analyzer.split.work import PRODUCT_FAMILIES, collect_work, mask_families
from stepsplit.analyzer.trace import OP_CODE, Int64, RankTrace

Ranks = tuple[int, ...]

_ONE_WAY = (OP_CODE["send"], OP_CODE["recv"])


class Exchanges(Struct, frozen=True):
    """Ranks of each pipeline (first stage first) and of each ring (ascending).

    doubtful: ranks whose messages fit neither pattern, or both.
    """

    pipelines: tuple[Ranks, ...] = ()
    rings: tuple[Ranks, ...] = ()
    doubtful: Ranks = ()


class _Traffic(Struct):
    """The messages within one group: peers, counts, and which ranks start with a send."""

    neighbors: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    first_is_send: dict[int, bool] = field(default_factory=dict)
    first_peer: dict[int, int] = field(default_factory=dict)


def find_exchanges(traces: Sequence[RankTrace]) -> Exchanges:
    """Finds pipelines and rings in the messages of all ranks; ranks in two pipelines are in
    none."""
    by_rank = {trace.rank: trace for trace in traces}
    pipelines: dict[Ranks, None] = {}
    rings: dict[Ranks, None] = {}
    doubtful: set[int] = set()
    groups = _collect_traffic(traces)
    sent = {ends for traffic in groups for ends, count in traffic.sent.items() if count}
    for traffic in groups:
        for ranks in _find_components(traffic.neighbors):
            marked = _order_by_marks(ranks, by_rank)
            swap = marked == () if marked is not None else _only_swap(ranks, by_rank)
            both_ways = (
                swap
                and marked is None
                and all(runs_both_ways(by_rank[a], b) for a, b in (ranks, ranks[::-1]))
            )
            swap = swap and not both_ways
            aside = not marked and _lacks_backward(ranks, sent, by_rank)
            line = None if swap or aside else marked or _order_pipeline(ranks, traffic, by_rank)
            # Each rank of a pipeline that runs both ways has the first stage of one direction.
            line = tuple(sorted(ranks)) if both_ways else line
            if line:
                pipelines[line] = None
            elif (swap and _can_be_ring(ranks, by_rank)) or _is_ring(ranks, traffic):
                rings[tuple(sorted(ranks))] = None
            elif not aside:
                doubtful |= set(ranks)
    members = [rank for line in pipelines for rank in line]
    if len(set(members)) < len(members):
        return Exchanges(rings=tuple(rings), doubtful=tuple(sorted({*doubtful, *members})))
    return Exchanges(tuple(pipelines), tuple(rings), tuple(sorted(doubtful)))


def _collect_traffic(traces: Sequence[RankTrace]) -> list[_Traffic]:
    """The messages of each group; both ends may have recorded a message."""
    by_group: dict[Ranks, _Traffic] = defaultdict(_Traffic)
    for trace in traces:
        for group_id, op, peer, count in _count_messages(trace):
            traffic = by_group[trace.groups[group_id].ranks if group_id >= 0 else ()]
            sends = op == OP_CODE["send"]
            traffic.first_is_send.setdefault(trace.rank, sends)
            traffic.first_peer.setdefault(trace.rank, peer)
            traffic.neighbors[trace.rank].add(peer)
            traffic.neighbors[peer].add(trace.rank)
            ends = (trace.rank, peer) if sends else (peer, trace.rank)
            traffic.sent[ends] = max(traffic.sent[ends], count)
    return list(by_group.values())


def _count_messages(trace: RankTrace) -> list[tuple[int, int, int, int]]:
    """(group, op, peer, count) of the rank's messages, by first occurrence."""
    calls = trace.calls
    known = np.isin(calls.op, _ONE_WAY) & (calls.peer >= 0) & (calls.peer != trace.rank)
    columns = np.stack((calls.group_id[known], calls.op[known], calls.peer[known]), axis=1)
    kinds, first, count = np.unique(columns, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)
    return [(*kinds[i].tolist(), int(count[i])) for i in order.tolist()]


def _find_components(neighbors: Mapping[int, set[int]]) -> list[Ranks]:
    """Connected components of ranks that exchange messages; chains are ordered from end to end."""
    components, visited = [], set[int]()
    for start in sorted(neighbors, key=lambda rank: (len(neighbors[rank]), rank)):
        if start in visited:
            continue
        ranks, ahead = [], [start]
        while ahead:
            rank = ahead.pop()
            if rank not in visited:
                visited.add(rank)
                ranks.append(rank)
                ahead += sorted(neighbors[rank] - visited, reverse=True)
        components.append(tuple(ranks))
    return components


def _order_pipeline(
    ranks: Ranks, traffic: _Traffic, by_rank: Mapping[int, RankTrace]
) -> Ranks | None:
    """The ranks in stage order; None if ambiguous.

    Two ranks with messages in both directions may be a ring, since some rings also start with one
    sender and one receiver. Then the compute between the messages of the later rank decides.
    """
    degrees = sorted(len(traffic.neighbors[rank]) for rank in ranks)
    if degrees[-1] > 2:
        return None
    if degrees[0] == 2:
        # The stages of an interleaved schedule: only one rank starts with a send, to the second
        # stage.
        starters = [rank for rank in ranks if traffic.first_is_send.get(rank, True)]
        if len(starters) != 1 or len(ranks) != len(traffic.first_is_send.keys() & set(ranks)):
            return None
        line = [starters[0], traffic.first_peer[starters[0]]]
        while len(line) < len(ranks):
            (following,) = traffic.neighbors[line[-1]] - {line[-2]}
            line.append(following)
        two_way = all(traffic.sent[b, a] for a, b in pairwise(line))
        return tuple(line) if two_way else None
    first, last = traffic.first_is_send.get(ranks[0]), traffic.first_is_send.get(ranks[-1])
    if len(ranks) == 2 and traffic.sent[ranks[0], ranks[1]] and traffic.sent[ranks[1], ranks[0]]:
        starter, later = ranks if first else ranks[::-1]
        if {first, last} != {True, False} or is_ring_exchange(by_rank[later], starter):
            return None
    backward = first is False or (first is None and last is True)
    return ranks[::-1] if backward else ranks


def _lacks_backward(
    ranks: Ranks, sent: Set[tuple[int, int]], by_rank: Mapping[int, RankTrace]
) -> bool:
    """Whether no two of these ranks send each other messages, in any group, though they train.

    Stages return the gradients of what they received. Others pass something on aside, such as
    metrics.
    """
    if any(one in ranks and other in ranks and (other, one) in sent for one, other in sent):
        return False
    return all(len(find_backward_spans(by_rank[rank])) for rank in ranks if rank in by_rank)


def _order_by_marks(ranks: Ranks, by_rank: Mapping[int, RankTrace]) -> Ranks | None:
    """The ranks in the order of their marked stages.

    () if ranks of one stage exchange messages, None without marks.
    """
    # The first stage with marked work in the rank's own annotations; None without marks.
    stages = {
        rank: min(
            (mark.stage for name in by_rank[rank].events.names for mark in parse_marks(name)),
            default=None,
        )
        for rank in ranks
        if rank in by_rank
    }
    numbers = {stage for stage in stages.values() if stage is not None}
    if len(stages) < len(ranks) or None in stages.values():
        return None
    return tuple(sorted(ranks, key=lambda r: stages[r] or 0)) if len(numbers) == len(ranks) else ()


def _is_ring(ranks: Ranks, traffic: _Traffic) -> bool:
    """Three or more ranks, each of which sends to one neighbor as much as it receives from the
    other."""
    if len(ranks) < 3 or any(len(traffic.neighbors[rank]) != 2 for rank in ranks):
        return False
    counts = {count for (source, _), count in traffic.sent.items() if source in ranks and count}
    ways = [ends for ends, count in traffic.sent.items() if ends[0] in ranks and count]
    starters = [rank for rank in ranks if traffic.first_is_send.get(rank, False)]
    one_way = len(ways) == len(ranks) == len({source for source, _ in ways})
    return one_way and len(counts) == 1 and len(starters) > 1


def _can_be_ring(ranks: Ranks, by_rank: Mapping[int, RankTrace]) -> bool:
    """Whether two ranks may pass blocks around within a layer: then its backward does so too.

    Messages in no backward are of a pipeline, without marks of steps one of unknown directions.
    If no backward is known, most of them have to be next to attention, for which a ring passes its
    blocks on: two models that run in opposite directions swap messages as well.
    """
    if len(ranks) != 2:
        return False
    for trace in (by_rank[rank] for rank in ranks if rank in by_rank):
        passes = find_backward_spans(trace)
        when = find_issue_ns(trace)[trace.calls.is_message]
        if len(passes) and not is_inside(passes, when).any():
            return False
        if not len(passes) and not _is_mostly_attention(trace, when):
            return False
    return True


def _is_mostly_attention(trace: RankTrace, when: Int64) -> bool:
    """Whether the product launched before or after each of most instants is attention."""
    events = trace.events
    work = np.flatnonzero(mask_families(trace, PRODUCT_FAMILIES))
    issued = events.find_launch_ns(work) if trace.on_device else events.start_ns[work]
    order = np.argsort(issued, kind="stable")
    attends = mask_families(trace, {"attention"})[work[order]]
    if not len(order):
        return False
    after = np.searchsorted(issued[order], when)
    near = attends[np.minimum(after, len(order) - 1)] | attends[np.maximum(after - 1, 0)]
    return bool(2 * near.sum() > len(when))


def _only_swap(ranks: Ranks, by_rank: Mapping[int, RankTrace]) -> bool:
    """Whether two recorded ranks only swap, instead of handing work on as stages do."""
    return len(ranks) == 2 and all(
        rank in by_rank and _sends_what_it_receives(by_rank[rank], peer)
        for rank, peer in (ranks, ranks[::-1])
    )


def runs_both_ways(trace: RankTrace, peer: int) -> bool:
    """Whether the rank hands microbatches of both directions on to its peer (DualPipe): it swaps
    messages between its forwards and backwards, and none within a backward.

    A ring passes blocks on within each layer, and their gradients within the backward of that.
    """
    return _sends_what_it_receives(trace, peer) and _lie_between_passes(trace)


def _lie_between_passes(trace: RankTrace) -> bool:
    # Without marks, the next step of a pipeline looks like its other direction.
    if not trace.events.match_prefix("ProfilerStep#").any():
        return False
    when = find_issue_ns(trace)[trace.calls.is_message]
    passes = find_backward_spans(trace)
    if not len(passes) or is_inside(passes, when).any():
        return False
    first = find_first_backward_ns(trace, when)
    # Before the first backward of a step; and after it, with another one to come in the step.
    after = np.searchsorted(passes.start_ns, when)
    following = passes.start_ns[np.minimum(after, len(passes) - 1)]
    same_step = (after < len(passes)) & (find_first_backward_ns(trace, following) == first)
    return bool(((first >= 0) & (when < first)).any() and ((when > first) & same_step).any())


# Distinguishing a ring of two ranks from a pipeline of two stages.

MIN_SHARE = 0.8
"""In a ring, at least this fraction of the compute between messages follows a send; the last stage
of a pipeline computes between receive and send. test_layout.py passes at 0.4 and at 1 too."""


def is_ring_exchange(trace: RankTrace, peer: int) -> bool:
    """Whether nearly all compute between messages with the peer follows a send, as in a ring.

    Each round of a ring starts with an exchange. The last stage of a pipeline computes forward and
    backward between receive and send. Also true without any compute.
    """
    calls, events = trace.calls, trace.events
    rows = np.flatnonzero(calls.is_message & (calls.peer == peer))
    sends = calls.op[rows] == OP_CODE["send"]
    event = calls.event[rows]
    when = np.where(sends, events.start_ns[event], events.ends_of(event))
    order = np.lexsort((~sends, when))
    when, sends = when[order], sends[order]
    worked = np.diff(_sum_compute_until(collect_work(trace).compute, when))
    after_sending = sends[:-1] & ~sends[1:]
    return bool(worked[after_sending].sum() >= MIN_SHARE * worked.sum())


def _sends_what_it_receives(trace: RankTrace, peer: int) -> bool:
    """Whether the rank sends the peer as much as it receives wherever it stops computing.

    A stage of a pipeline only sends at first, or computes between what it receives and sends.
    """
    calls, starts = trace.calls, trace.events.start_ns
    rows = np.flatnonzero(calls.is_message & (calls.peer == peer))
    if not len(rows):
        return False
    rows = rows[np.argsort(starts[calls.event[rows]], kind="stable")]
    worked = np.diff(_sum_compute_until(collect_work(trace).compute, starts[calls.event[rows]]))
    sign = np.where(calls.op[rows] == OP_CODE["send"], 1, -1)
    first = np.concatenate(([0], np.flatnonzero(worked) + 1))
    more_sent = np.add.reduceat(sign * calls.message_bytes[rows], first)
    return bool(worked.any() and not more_sent.any())


def _sum_compute_until(compute: Intervals, when: Int64) -> Int64:
    """The cumulative compute before each instant in ns."""
    done = np.concatenate(([0], np.cumsum(compute.end_ns - compute.start_ns)))
    last = np.searchsorted(compute.start_ns, when, side="right")
    if not len(compute.start_ns):
        return np.zeros(len(when), dtype=np.int64)
    running = np.clip(compute.end_ns[np.maximum(last - 1, 0)] - when, 0, None)
    return done[last] - np.where(last > 0, running, 0)
