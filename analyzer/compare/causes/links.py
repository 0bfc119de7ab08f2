"""Links that move the same data more slowly than others of their kind."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer import units
from stepsplit.analyzer.compare.causes.scene import Float, Scene
from stepsplit.analyzer.compare.replay.edits import moved_faster
from stepsplit.analyzer.report.report import Finding
from stepsplit.analyzer.trace import OPS, Int64

_SLOW = 1.15
"""From so many times the time of others on, a link is slow."""
_LEAST_COUNT = 4


@dataclass(frozen=True, slots=True)
class _Link:
    """Calls of one kind between the same ranks: kernels, and how long their data took."""

    ranks: tuple[int, ...]
    kernels: Int64
    took_ns: Int64


def slow_links(scene: Scene) -> list[Finding]:
    """A finding for each set of ranks between which data moves slowly, as if it moved as fast as
    between others: of as many ranks on as many hosts, by the same op, of the same size."""
    slow: dict[tuple[int, ...], list[tuple[Int64, Float]]] = defaultdict(list)
    for alike in _alike(scene).values():
        for link, ratio in _slower(alike):
            slow[link.ranks].append((link.kernels, np.full(len(link.kernels), 1 / ratio)))
    return [_finding(scene, ranks, parts) for ranks, parts in slow.items()]


def _alike(scene: Scene) -> dict[tuple[int, ...], list[_Link]]:
    """The links by what they carry: op, size, how many ranks and hosts."""
    kernels, matched = scene.graph.kernels, scene.found.matched
    took = scene.graph.rest_ns[kernels.end]
    links: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    hosts = {rank.trace.rank: rank.trace.host for rank in scene.found.ranks}
    carries = _carries(scene)
    known = (matched.key[carries] >= 0) & (took > 0) & (matched.message_bytes[carries] >= 0)
    for i in np.flatnonzero(known).tolist():
        row = int(carries[i])
        ranks = _ends(scene, i, row)
        if len(ranks) > 1:
            op = min(int(matched.op[row]), OPS.index("send"))
            nodes = len({hosts.get(rank) for rank in ranks})
            links[op, int(matched.message_bytes[row]), len(ranks), nodes][ranks].append(i)
    return {
        kind: [_Link(ranks, np.array(rows), took[rows]) for ranks, rows in of_kind.items()]
        for kind, of_kind in links.items()
    }


def _carries(scene: Scene) -> Int64:
    """For each kernel the row that its end waited for: of several messages the last to move."""
    kernels, found = scene.graph.kernels, scene.found
    rows = kernels.row.copy()
    for i in np.flatnonzero(found.matched.op[rows] >= OPS.index("send")).tolist():
        event = found.ranks[int(kernels.rank[i])].trace.calls.event
        call = int(kernels.call[i])
        count = int(np.searchsorted(event[call:], event[call], side="right"))
        rows[i] += int(found.arrivals.moved_ns[rows[i] : rows[i] + count].argmax())
    return rows


def _ends(scene: Scene, kernel: int, row: int) -> tuple[int, ...]:
    """The ranks between which a call moves data."""
    matched, found = scene.found.matched, scene.found
    if matched.op[row] < OPS.index("send"):
        group = int(matched.group[row])
        return matched.groups[group].ranks if group >= 0 else ()
    trace = found.ranks[int(scene.graph.kernels.rank[kernel])].trace
    peer = int(trace.calls.peer[int(matched.call[row])])
    return tuple(sorted((trace.rank, peer)))


def _slower(links: list[_Link]) -> list[tuple[_Link, float]]:
    """The links that are slower than the usual one, all but their fastest calls than its most."""
    known = [link for link in links if len(link.took_ns) >= _LEAST_COUNT]
    if len(known) < 2:
        return []
    middle = [float(np.median(link.took_ns)) for link in known]
    usual = int(np.argsort(middle, kind="stable")[(len(known) - 1) // 2])
    most = float(np.percentile(known[usual].took_ns, 75))
    return [
        (link, at / middle[usual])
        for link, at in zip(known, middle, strict=True)
        if at > _SLOW * middle[usual] and np.percentile(link.took_ns, 25) > most
    ]


def _finding(scene: Scene, ranks: tuple[int, ...], parts: list[tuple[Int64, Float]]) -> Finding:
    kernels, times = (np.concatenate(side) for side in zip(*parts, strict=True))
    took = scene.graph.rest_ns[scene.graph.kernels.end[kernels]]
    rows = np.isin(scene.ranks[scene.graph.steps.rank], ranks)
    ratio = float(took.sum() / (took * times).sum())
    count = max(1, int((rows & scene.graph.steps.full).sum()))
    return Finding(
        code="slow_link",
        bucket="collective",
        gain_ns=scene.gain_ns(moved_faster(scene.graph, kernels, times)),
        measured_ns=int(took.sum()) // count,
        predicted_ns=int((took * times).sum()) // count,
        ranks=ranks,
        steps=scene.steps_of(rows),
        events=scene.calls(kernels),
        message=(
            f"data moves {ratio:.1f} times as slowly between ranks {units.listed(ranks)} as "
            "between others that send the same"
        ),
    )
