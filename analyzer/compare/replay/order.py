"""An order in which every node comes after all that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from stepsplit.analyzer.compare.replay.graph import Needs
from stepsplit.analyzer.trace import Int64


def in_order(before: Int64, needs: Needs, measured_ns: Int64) -> list[int]:
    """The nodes in such an order.

    Clocks that are off by a little can make two ranks wait for each other: there the node that was
    measured first goes first.
    """
    source, target = _edges(before, needs)
    missing = np.bincount(target, minlength=len(before)).tolist()
    by_source = np.argsort(source, kind="stable")
    later = target[by_source].tolist()
    first = np.searchsorted(source[by_source], np.arange(len(before) + 1)).tolist()
    ready = [node for node, count in enumerate(missing) if not count]
    stuck: Iterator[int] | None = None
    order: list[int] = []
    while len(order) < len(missing):
        while not ready:
            stuck = stuck or iter(np.argsort(measured_ns, kind="stable").tolist())
            ready = _freed(next(stuck), missing)
        node = ready.pop()
        order.append(node)
        for after in later[first[node] : first[node + 1]]:
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return order


def _edges(before: Int64, needs: Needs) -> tuple[Int64, Int64]:
    """(what is needed, what needs it)"""
    behind = np.flatnonzero(before >= 0)
    counts = np.fromiter(map(len, needs), dtype=np.int64, count=len(needs))
    needed = np.fromiter(chain.from_iterable(needs), dtype=np.int64, count=int(counts.sum()))
    target = np.repeat(np.arange(len(needs)), counts)
    return np.concatenate((before[behind], needed)), np.concatenate((behind, target))


def _freed(node: int, missing: list[int]) -> list[int]:
    """The node as if it waited for nothing; none where it is done already."""
    if missing[node] <= 0:
        return []
    missing[node] = 0
    return [node]
