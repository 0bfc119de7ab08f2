"""Rings, trees and links that NCCL builds, and the bandwidths that it found before."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stepsplit.analyzer.readers.nccl.nouns import (
    GraphPattern,
    Link,
    Ring,
    RingNeighbors,
    SystemBandwidth,
    TreeNode,
)

Graph = Ring | RingNeighbors | TreeNode | Link

_RING = re.compile(r"Channel (\d{1,6})(?:/\d{1,6})? : +(\d{1,6}(?: +\d{1,6})*)$")
_NEIGHBORS = re.compile(r"Ring (\d{1,6}) : (-?\d{1,6}) -> (-?\d{1,6}) -> (-?\d{1,6})$")
_TREE = re.compile(r"Tree (\d{1,6}) : (-?\d{1,6}) -> (-?\d{1,6}) -> (-?\d{1,6}(?:/-?\d{1,6})+)$")
_TREES = re.compile(
    r"\[(\d{1,6})\] (-?\d{1,6}(?:/-?\d{1,6})*)->(-?\d{1,6})->(-?\d{1,6}(?:/-?\d{1,6})*)"
)


def ring_in(text: str) -> Ring | None:
    """The ring of a "Channel 00/02 : 0 1 2 3"."""
    match = _RING.match(text)
    return match and Ring(-1, int(match[1]), tuple(int(rank) for rank in match[2].split()))


def neighbors_in(text: str) -> RingNeighbors | None:
    """The neighbors of a "Ring 00 : 3 -> 0 -> 1"."""
    match = _NEIGHBORS.match(text)
    return match and RingNeighbors(-1, *(int(number) for number in match.groups()))


def tree_nodes_in(text: str) -> tuple[TreeNode, ...]:
    """The nodes of a "Tree 0 : -1 -> 0 -> 1/2/-1" or of "Trees [0] 1/2/-1->0->-1 [1] ...".

    Before 2.8 a second direction follows each of them, which says the same; before 2.5 the parent
    comes first. The children are where the slashes are.
    """
    match = _TREE.match(text)
    found = [match.groups()] if match else _TREES.findall(text)
    return tuple(
        _node(int(channel), one, int(rank), other)
        for channel, one, rank, other in found
        if ("/" in one) != ("/" in other)
    )


def _node(channel: int, one: str, rank: int, other: str) -> TreeNode:
    up, down = (other, one) if "/" in one else (one, other)
    children = tuple(int(child) for child in down.split("/") if child.isdecimal())
    return TreeNode(-1, channel, int(up), rank, children)


_LINK = re.compile(
    r"(?:Channel|Ring|CollNet) (\d{1,6})(?:/\d{1,6})? : "
    r"(\d{1,6})(?:\[\w+\])?(?: -> (\d{1,6})(?:\[\w+\])?)?"
    r" (?:\[(send|receive)\] )?via (\S.*)$"
)
_NET = re.compile(r"(.+?)/(\d{1,6})(?:\(\d{1,6}\))?(?:/(.*))?$")


def link_in(text: str) -> Link | None:
    """The connection of a "Channel 00/0 : 1[1] -> 0[0] [send] via NET/IB/0/GDRDMA"."""
    match = _LINK.match(text)
    if match is None:
        return None
    ends = (-1, int(match[2]), int(match[3] or -1), int(match[1]))
    transport, _, detail = match[5].partition("/")
    if match[5] == "direct shared memory":
        transport, detail = "SHM", match[5]
    net = _NET.match(detail) if transport in ("NET", "COLLNET") else None
    if net is None:
        return Link(*ends, transport, detail, match[4] or "")
    flags = net[3] or ""
    return Link(
        *ends, transport, flags, match[4] or "", net[1], int(net[2]), flags.startswith("GDRDMA")
    )


_POINTER = re.compile(r" comm (0x[0-9a-f]+)(?: .*)?$")


@dataclass(frozen=True, slots=True)
class Graphs:
    """Rings, trees or links that one message names; pointer is the communicator's, mostly ""."""

    pointer: str
    graphs: tuple[Graph, ...]


def graphs_in(text: str) -> Graphs | None:
    """What a message that begins with Channel, CollNet, Ring or Tree tells; RCCL adds a pointer."""
    match = _POINTER.search(text)
    text, pointer = (text, "") if match is None else (text[: match.start()], match[1])
    if text.startswith("Tree"):
        found: tuple[Graph | None, ...] = tree_nodes_in(text)
    else:
        found = (link_in(text) or ring_in(text) or neighbors_in(text),)
    whole = tuple(graph for graph in found if graph is not None)
    return Graphs(pointer, whole) if whole else None


_PATTERN = re.compile(
    r"Pattern (\d{1,6}), crossNic (\d{1,6}), nChannels (\d{1,6}), (?:speed|bw) ([\d.]+)/([\d.]+),"
    r"(?: nHops \d{1,6},)? type (\w+)/(\w+), "
)
_SYSTEM = re.compile(
    r"=== System : max(?:Width|Bw) (\d[\d.]*)(?: total(?:Width|Bw) (\d[\d.]*))? ==="
)


def pattern_in(text: str) -> GraphPattern | None:
    """What NCCL's search found for one pattern."""
    match = _PATTERN.match(text)
    if match is None:
        return None
    cross_nic, channels = int(match[2]), int(match[3])
    intra, inter = _gigabytes(match[4]), _gigabytes(match[5])
    return GraphPattern(int(match[1]), cross_nic, channels, intra, inter, match[6], match[7])


def system_in(text: str) -> SystemBandwidth | None:
    """The bandwidths of a "=== System : maxBw 48.0 totalBw 370.8 ==="."""
    match = _SYSTEM.match(text)
    return match and SystemBandwidth(_gigabytes(match[1]), _gigabytes(match[2]))


def _gigabytes(text: str | None) -> int:
    return -1 if text is None else _scaled(text, 1e9)


def _scaled(text: str, factor: float) -> int:
    try:
        return round(float(text) * factor)
    except (ValueError, OverflowError):
        return -1
