"""Slow links: links that move the same traffic slower than comparable ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import group_ids, group_rows
from stepsplit.analyzer.diagnose.causes.cause import CauseEntry, Remedy, replay_remedy
from stepsplit.analyzer.diagnose.causes.context import CauseContext
from stepsplit.analyzer.diagnose.causes.expert_load import TokenExchanges
from stepsplit.analyzer.diagnose.graph.dependency_graph import DependencyGraph
from stepsplit.analyzer.diagnose.graph.replay import scale_transfers
from stepsplit.analyzer.ops import SYMMETRIC_OPS
from stepsplit.analyzer.significance import run_welch_test
from stepsplit.analyzer.trace import OPS, Float, Int64

_SLOW_RATIO = 1.15
"""A link is slow above this multiple of the transfer time of comparable links. At 1.3 one of 1.25
that costs 2 % of the step is not named; at 1.075 no other is, for the test of chance decides."""

_MIN_CALLS = 4
"""A link of fewer calls is not compared."""

_MIN_STEPS = 3
"""From so many steps on, the calls of a step count as one: what slows one down slows the next."""

_SYMMETRIC = [OPS.index(op) for op in SYMMETRIC_OPS]

_CHANCE = 0.001
"""So often, a link that is as fast as the other passes for slower."""


class _Link(Struct, frozen=True):
    """Calls of one kind between the same ranks: their kernels, steps and transfer times, which are
    those of even exchanges."""

    ranks: tuple[int, ...]
    kernels: Int64
    step: Int64
    took_ns: Int64


def find_slow_links(context: CauseContext) -> Iterator[Remedy]:
    """Find the sets of ranks with slow links; links that share a rank are one finding.

    Compared are links of the same mesh axis with the same op, message size (if unknown: launch
    grid), number of ranks and number of hosts: ranks are placed so that some axes have faster links
    than others. The gain is that of a transfer time as on the other links. Of an exchange of tokens
    the size is the mean of the ranks, and its time counts as if all had that many.
    """
    slow: dict[tuple[int, ...], list[tuple[Int64, Float]]] = defaultdict(list)
    for alike in _collect_links(context):
        for link, ratio in _select_slow_links(alike):
            slow[link.ranks].append((link.kernels, np.full(len(link.kernels), 1 / ratio)))
    # The links by the ranks that they connect, directly or through each other.
    joined: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for link_ranks in slow:
        touching = [ranks for ranks in joined if not set(ranks).isdisjoint(link_ranks)]
        members = [member for ranks in touching for member in joined.pop(ranks)]
        together = {rank for member in (*members, link_ranks) for rank in member}
        joined[tuple(sorted(together))] = [*members, link_ranks]
    for ranks, links in joined.items():
        parts = [part for one in links for part in slow[one]]
        kernels, times = (np.concatenate(side) for side in zip(*parts, strict=True))
        yield _build_remedy(context, ranks, kernels, times)


def _build_remedy(
    context: CauseContext, ranks: tuple[int, ...], kernels: Int64, times: Float
) -> Remedy:
    """The remedy of transfers that take these times as long."""
    took = context.graph.rest_ns[context.graph.kernels.end[kernels]]
    rows = np.isin(context.ranks[context.graph.steps.rank], ranks)
    ratio = float(took.sum() / (took * times).sum())
    count = max(1, int((rows & context.graph.steps.full).sum()))
    matched = context.split.matched
    axis_of = _name_axes(context)
    groups = np.unique(matched.group[context.graph.kernels.row[kernels]]).tolist()
    axes = {axis_of[one] for one in groups}
    on_axis = f" on {axis}" if len(axes) == 1 and (axis := axes.pop()) else ""

    def speed_up(graph: DependencyGraph) -> DependencyGraph:
        return scale_transfers(graph, kernels, times)

    return replay_remedy(
        context,
        speed_up,
        bucket="collective",
        measured_ns=int(took.sum()) // count,
        predicted_ns=int((took * times).sum()) // count,
        rows=rows,
        message=(
            f"slow link between ranks {units.format_number_list(ranks)}{on_axis}: transfers are "
            f"{ratio:.1f}x slower than between other ranks with the same traffic"
        ),
        ranks=ranks,
        events=context.list_longest_calls(kernels),
    )


def _collect_links(context: CauseContext) -> list[list[_Link]]:
    """The links with the same axis, op, message size, number of ranks and number of hosts."""
    kernels, matched, steps = context.graph.kernels, context.split.matched, context.graph.steps
    took, carries = context.graph.rest_ns[kernels.end], _find_carried_rows(context)
    exchanges = TokenExchanges.find(context)
    even, size = took.copy(), matched.message_bytes[carries]
    even[exchanges.kernels] = np.rint(took[exchanges.kernels] / exchanges.imbalance)
    size[exchanges.kernels] = exchanges.mean_bytes
    ranks, link = _number_links(context, carries)
    hosts = {rank.trace.rank: rank.trace.host for rank in context.split.ranks}
    nodes = [len({hosts.get(rank) for rank in of_link}) for of_link in ranks]
    # The halves of a call that send and receive are links of their own.
    op = np.minimum(matched.op[carries], OPS.index("send")).astype(np.int64)
    op += len(OPS) * ~matched.arrives[carries]
    size = np.where(size >= 0, size, _number_grids(context, carries))
    # A barrier moves no data; what a call sends or receives does.
    moves = ((matched.carrier[carries] == carries) | ~matched.arrives[carries]) & (took > 0)
    known = np.flatnonzero((matched.key[carries] >= 0) & moves & (size != -1) & (link >= 0))
    axes = _name_axes(context)
    axis = np.unique([name or "" for name in axes], return_inverse=True)[1][matched.group[carries]]
    order, first = group_rows(group_ids(op[known], size[known], link[known], axis[known]))
    links: dict[tuple[int, ...], list[_Link]] = defaultdict(list)
    for rows in sorted(np.split(known[order], first[1:]), key=lambda rows: rows[:1].tolist()):
        if len(rows):
            number = int(link[rows[0]])
            at = rows[0]
            alike = int(axis[at]), int(op[at]), int(size[at]), len(ranks[number]), nodes[number]
            step = steps.step[kernels.step[rows]]
            links[alike].append(_Link(ranks[number], rows, step, even[rows]))
    return list(links.values())


def _name_axes(context: CauseContext) -> tuple[str | None, ...]:
    """The axis of each group; None for the last one, by which -1, an unknown group, is found."""
    return (*map(context.split.layout.name_group, context.split.matched.groups), None)


def _number_grids(context: CauseContext, rows: Int64) -> Int64:
    """A number below -1 for each op without a size by its kernel and launch grid, which are those
    of its size on whatever ranks; -1 for ops of which ranks pass different sizes."""
    matched, found = context.split.matched, np.full(len(rows), -1, dtype=np.int64)
    wanted = np.isin(matched.op[rows], _SYMMETRIC) & matched.together[rows]
    numbers: dict[tuple[str, str], int] = {}
    for index, rank in enumerate(context.split.ranks):
        own = matched.slice_trace(index)
        here = np.flatnonzero(wanted & (rows >= own.start) & (rows < own.stop))
        trace = rank.trace
        event = trace.calls.event[rows[here] - own.start]
        grids = trace.shapes.find_ids(event)
        for at, row, grid in zip(here.tolist(), event.tolist(), grids.tolist(), strict=True):
            if grid >= 0:
                kind = (trace.events.name_of(row), trace.shapes.texts[grid])
                found[at] = -2 - numbers.setdefault(kind, len(numbers))
    return found


def _find_carried_rows(context: CauseContext) -> Int64:
    """For each kernel the row that determined its end: of several messages the last transfer."""
    kernels, found = context.graph.kernels, context.split
    rows = kernels.row.copy()
    event = np.concatenate([rank.trace.calls.event for rank in found.ranks])
    last = (event[1:] != event[:-1]) | (found.matched.trace[1:] != found.matched.trace[:-1])
    ends = np.append(np.flatnonzero(last) + 1, len(event))
    end = ends[np.searchsorted(ends, rows, side="right")]
    several = (end - rows > 1) & (found.matched.op[rows] >= OPS.index("send"))
    for i in np.flatnonzero(several).tolist():
        rows[i] += int(found.arrivals.moved_ns[rows[i] : end[i]].argmax())
    return rows


def _number_links(context: CauseContext, rows: Int64) -> tuple[tuple[tuple[int, ...], ...], Int64]:
    """(the ranks of each link, the link over which the call of each row moves data), -1 for a call
    that moves none."""
    matched, ranks = context.split.matched, [rank.trace for rank in context.split.ranks]
    numbers: dict[tuple[int, ...], int] = {}
    of_group = [
        numbers.setdefault(group.ranks, len(numbers)) if len(group.ranks) > 1 else -1
        for group in matched.groups
    ]
    link = np.array([*of_group, -1], dtype=np.int64)[matched.group[rows]]
    message = np.flatnonzero(matched.is_message[rows])
    own = np.array([trace.rank for trace in ranks])[matched.trace[rows[message]]]
    peer = np.concatenate([trace.calls.peer for trace in ranks])[rows[message]]
    ends, end = np.unique(
        np.stack((np.minimum(own, peer), np.maximum(own, peer)), axis=1),
        axis=0,
        return_inverse=True,
    )
    of_pair = [numbers.setdefault(pair, len(numbers)) for pair in map(tuple, ends.tolist())]
    link[message] = np.array([*of_pair, -1], dtype=np.int64)[end.ravel()]
    return tuple(numbers), link


def _select_slow_links(links: list[_Link]) -> list[tuple[_Link, float]]:
    """The links slower than the median link, with the ratio of their median transfer times.

    The 25th percentile of a slow link must exceed the 75th percentile of the median link, and the
    difference what chance makes of as many steps.
    """
    known = [link for link in links if len(link.took_ns) >= _MIN_CALLS]
    if len(known) < 2:
        return []
    middle = [float(np.median(link.took_ns)) for link in known]
    usual = int(np.argsort(middle, kind="stable")[(len(known) - 1) // 2])
    most = float(np.percentile(known[usual].took_ns, 75))
    return [
        (link, at / middle[usual])
        for link, at in zip(known, middle, strict=True)
        if at > _SLOW_RATIO * middle[usual]
        and np.percentile(link.took_ns, 25) > most
        and run_welch_test(_list_samples(known[usual]), _list_samples(link)).p < _CHANCE
    ]


def _list_samples(link: _Link) -> list[float]:
    """The logarithm of the transfer times: the median of each step, or of each call if the steps
    are few."""
    times = np.log(link.took_ns)
    steps = np.unique(link.step)
    if len(steps) < _MIN_STEPS:
        return [float(time) for time in times]
    return [float(np.median(times[link.step == step])) for step in steps.tolist()]


SLOW_LINK = CauseEntry(
    "slow_link", find_slow_links, basis="measured", as_set="on slow links", of_peers=True
)
