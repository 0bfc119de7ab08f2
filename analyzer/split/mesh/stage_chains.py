"""Which ranks pass messages on as the stages of a pipeline do, and which in a ring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from stepsplit.analyzer.split.mesh.stage_marks import marked_stage
from stepsplit.analyzer.split.mesh.swaps import swaps
from stepsplit.analyzer.trace import OP_CODE, RankTrace

Ranks = tuple[int, ...]
_ONE_WAY = (OP_CODE["send"], OP_CODE["recv"])


@dataclass(frozen=True, slots=True)
class Exchanges:
    """pipelines: ranks of each, first stage first; rings: ranks of each, ascending.

    doubtful: ranks that exchange messages in a way that fits neither, or both.
    """

    pipelines: tuple[Ranks, ...] = ()
    rings: tuple[Ranks, ...] = ()
    doubtful: Ranks = ()


@dataclass(slots=True)
class _Traffic:
    """The messages within one group: with whom, how many of them, and who began by sending."""

    neighbors: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    sent: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    first_is_send: dict[int, bool] = field(default_factory=dict)
    first_peer: dict[int, int] = field(default_factory=dict)


def exchanges(traces: Sequence[RankTrace]) -> Exchanges:
    """What the messages of all ranks tell; ranks in two pipelines are in none."""
    by_rank = {trace.rank: trace for trace in traces}
    pipelines: dict[Ranks, None] = {}
    rings: dict[Ranks, None] = {}
    doubtful: set[int] = set()
    for traffic in _traffic(traces):
        for ranks in _components(traffic.neighbors):
            marked = _marked_order(ranks, by_rank)
            line = _pipeline(ranks, traffic, by_rank) if marked is None else marked
            if line:
                pipelines[line] = None
            elif _is_ring(ranks, traffic) or (marked == () and len(ranks) == 2):
                rings[tuple(sorted(ranks))] = None
            else:
                doubtful |= set(ranks)
    members = [rank for line in pipelines for rank in line]
    if len(set(members)) < len(members):
        return Exchanges(rings=tuple(rings), doubtful=tuple(sorted({*doubtful, *members})))
    return Exchanges(tuple(pipelines), tuple(rings), tuple(sorted(doubtful)))


def _traffic(traces: Sequence[RankTrace]) -> list[_Traffic]:
    """The messages of each group; both ends of a message may have recorded it."""
    found: dict[Ranks, _Traffic] = defaultdict(_Traffic)
    for trace in traces:
        for group_id, op, peer, count in _counts(trace):
            traffic = found[trace.groups[group_id].ranks if group_id >= 0 else ()]
            sends = op == OP_CODE["send"]
            traffic.first_is_send.setdefault(trace.rank, sends)
            traffic.first_peer.setdefault(trace.rank, peer)
            traffic.neighbors[trace.rank].add(peer)
            traffic.neighbors[peer].add(trace.rank)
            ends = (trace.rank, peer) if sends else (peer, trace.rank)
            traffic.sent[ends] = max(traffic.sent[ends], count)
    return list(found.values())


def _counts(trace: RankTrace) -> list[tuple[int, int, int, int]]:
    """(group, op, peer, how many) of the rank's messages, those first that it made first."""
    calls = trace.calls
    known = np.isin(calls.op, _ONE_WAY) & (calls.peer >= 0) & (calls.peer != trace.rank)
    columns = np.stack((calls.group_id[known], calls.op[known], calls.peer[known]), axis=1)
    kinds, first, count = np.unique(columns, axis=0, return_index=True, return_counts=True)
    order = np.argsort(first)
    return [(*kinds[i].tolist(), int(count[i])) for i in order.tolist()]


def _components(neighbors: Mapping[int, set[int]]) -> list[Ranks]:
    """Ranks that exchange messages, each with the next; chains from one end to the other."""
    found, seen = [], set[int]()
    for start in sorted(neighbors, key=lambda rank: (len(neighbors[rank]), rank)):
        if start in seen:
            continue
        ranks, ahead = [], [start]
        while ahead:
            rank = ahead.pop()
            if rank not in seen:
                seen.add(rank)
                ranks.append(rank)
                ahead += sorted(neighbors[rank] - seen, reverse=True)
        found.append(tuple(ranks))
    return found


def _pipeline(ranks: Ranks, traffic: _Traffic, by_rank: Mapping[int, RankTrace]) -> Ranks | None:
    """The ranks as stages, first stage first; None where that is not beyond doubt.

    Two ranks that send both ways may be a ring: some rings too begin with one that sends and one
    that receives. Only what the later of them does in between tells.
    """
    degrees = sorted(len(traffic.neighbors[rank]) for rank in ranks)
    if degrees[-1] > 2:
        return None
    if degrees[0] == 2:
        return _loop(ranks, traffic)
    first, last = traffic.first_is_send.get(ranks[0]), traffic.first_is_send.get(ranks[-1])
    if len(ranks) == 2 and _both_ways(ranks, traffic):
        starter, later = ranks if first else ranks[::-1]
        if {first, last} != {True, False} or swaps(by_rank[later], starter):
            return None
    backward = first is False or (first is None and last is True)
    return ranks[::-1] if backward else ranks


def _marked_order(ranks: Ranks, by_rank: Mapping[int, RankTrace]) -> Ranks | None:
    """The ranks by the stages that their forwards are marked with; () where ranks of one stage
    exchange messages, None where no marks tell."""
    stages = {rank: marked_stage(by_rank[rank].events) for rank in ranks if rank in by_rank}
    numbers = {stage for stage in stages.values() if stage is not None}
    if len(stages) < len(ranks) or None in stages.values():
        return None
    return tuple(sorted(ranks, key=lambda r: stages[r] or 0)) if len(numbers) == len(ranks) else ()


def _both_ways(ranks: Ranks, traffic: _Traffic) -> bool:
    return bool(traffic.sent[ranks[0], ranks[1]] and traffic.sent[ranks[1], ranks[0]])


def _loop(ranks: Ranks, traffic: _Traffic) -> Ranks | None:
    """The stages of an interleaved schedule: one rank alone begins by sending, to the second."""
    starters = [rank for rank in ranks if traffic.first_is_send.get(rank, True)]
    if len(starters) != 1 or len(ranks) != len(traffic.first_is_send.keys() & set(ranks)):
        return None
    line = [starters[0], traffic.first_peer[starters[0]]]
    while len(line) < len(ranks):
        (following,) = traffic.neighbors[line[-1]] - {line[-2]}
        line.append(following)
    two_way = all(traffic.sent[b, a] for a, b in pairwise(line))
    return tuple(line) if two_way else None


def _is_ring(ranks: Ranks, traffic: _Traffic) -> bool:
    """Three ranks or more, each of which sends as much to one neighbor as the other sends it."""
    if len(ranks) < 3 or any(len(traffic.neighbors[rank]) != 2 for rank in ranks):
        return False
    counts = {count for (source, _), count in traffic.sent.items() if source in ranks and count}
    ways = [ends for ends, count in traffic.sent.items() if ends[0] in ranks and count]
    starters = [rank for rank in ranks if traffic.first_is_send.get(rank, False)]
    one_way = len(ways) == len(ranks) == len({source for source, _ in ways})
    return one_way and len(counts) == 1 and len(starters) > 1
