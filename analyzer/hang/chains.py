"""Who waits for whom, followed to the end: the ranks at which the chains of waits stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.hang.hang import Stuck

_Edges = Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Ranks that wait for nobody but one another, through calls (their places), and who is held."""

    ranks: tuple[int, ...]
    calls: tuple[int, ...]
    held: tuple[int, ...]


def chain_ends(stuck: Sequence[Stuck]) -> tuple[ChainEnd, ...]:
    """Where the chains stop. Nodes are ranks, and calls as ~place."""
    edges = _edges(stuck)
    back = _reversed(edges)
    ends = []
    for part in _components(edges, back):
        if any(other not in part for node in part for other in edges[node]):
            continue
        above = _reach(part, back) - part
        ranks = tuple(sorted(node for node in part if node >= 0))
        calls = tuple(sorted(~node for node in part if node < 0))
        if ranks and (above or calls):
            ends.append(ChainEnd(ranks, calls, tuple(sorted(n for n in above if n >= 0))))
    return tuple(sorted(ends, key=lambda end: (-len(end.held), end.ranks)))


def _edges(stuck: Sequence[Stuck]) -> dict[int, list[int]]:
    edges: dict[int, list[int]] = {}
    for place, call in enumerate(stuck):
        if call.waits_for:
            edges[~place] = list(call.waits_for)
            for rank in call.waiting:
                edges.setdefault(rank, []).append(~place)
    for others in list(edges.values()):
        for other in others:
            edges.setdefault(other, [])
    return edges


def _reversed(edges: _Edges) -> dict[int, list[int]]:
    back: dict[int, list[int]] = {node: [] for node in edges}
    for node, others in edges.items():
        for other in others:
            back[other].append(node)
    return back


def _reach(nodes: Iterable[int], edges: _Edges) -> set[int]:
    """The nodes, and all to which edges lead from them."""
    found, todo = set(nodes), list(nodes)
    while todo:
        new = set(edges[todo.pop()]) - found
        found |= new
        todo += new
    return found


def _components(edges: _Edges, back: _Edges) -> list[set[int]]:
    """The strongly connected parts: Kosaraju's two passes."""
    parts: list[set[int]] = []
    placed: set[int] = set()
    for node in reversed(_finished(edges)):
        if node in placed:
            continue
        part, todo = {node}, [node]
        placed.add(node)
        while todo:
            new = set(back[todo.pop()]) - placed
            part |= new
            placed |= new
            todo += new
        parts.append(part)
    return parts


def _finished(edges: _Edges) -> list[int]:
    """The nodes in the order in which a depth-first walk leaves them."""
    order: list[int] = []
    seen: set[int] = set()
    for root in edges:
        todo = [(root, False)]
        while todo:
            node, leaving = todo.pop()
            if leaving:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                todo.append((node, True))
                todo += [(other, False) for other in edges[node] if other not in seen]
    return order
