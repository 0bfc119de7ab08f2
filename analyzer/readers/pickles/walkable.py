"""Whether plain nested values can be walked in bounded time, however their parts are shared."""

from __future__ import annotations

from collections.abc import Iterable

from stepsplit.analyzer.errors import DataError

MOST_VALUES = 1 << 26
"""How many values a file may hold, each counted as often as a walk over all would meet it."""
MOST_DEPTH = 64
_CONTAINERS = frozenset({list, tuple, dict})


def too_large(where: object) -> DataError:
    """The error for more than MOST_VALUES."""
    return DataError(where, f"beyond {MOST_VALUES:,} values", "record fewer entries")


def require_walkable(root: object, where: object) -> None:
    """Raises DataError where a walk over all values would not end soon.

    A few hundred bytes of shared lists can stand for more values than could ever be visited, so
    each container is weighed once, after those inside it.
    """
    weights: dict[int, int] = {}
    depths: dict[int, int] = {}
    entered: set[int] = set()
    pending = [root]
    while pending:
        one = pending[-1]
        if id(one) in weights:
            pending.pop()
            continue
        inner = {id(c): c for c in _members(one) if type(c) in _CONTAINERS}
        waiting = [c for place, c in inner.items() if place not in weights]
        if waiting:
            entered.add(id(one))
            if not entered.isdisjoint(map(id, waiting)):
                raise DataError(where, "a pickle that contains itself", "leave it out")
            pending.extend(waiting)
            continue
        entered.discard(id(one))
        weights[id(one)] = _weight(one, weights)
        depths[id(one)] = 1 + max((depths[place] for place in inner), default=0)
        if weights[id(one)] > MOST_VALUES:
            raise too_large(where)
        if depths[id(one)] > MOST_DEPTH:
            raise DataError(where, f"nested deeper than {MOST_DEPTH}", "leave it out")


def _members(one: object) -> Iterable[object]:
    if type(one) is dict:
        return one.values()
    return one if isinstance(one, (list, tuple)) else ()


def _weight(one: object, weights: dict[int, int]) -> int:
    return 1 + sum(weights[id(c)] if type(c) in _CONTAINERS else 1 for c in _members(one))
