"""Of ranks that wait for each other, those that left their usual order of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from stepsplit.analyzer.diagnose.hang.job_groups import JobGroup
from stepsplit.analyzer.diagnose.hang.progress import Called, Progress

_Kind = tuple[JobGroup, str, int]
"""Group, operation and size."""


_RECENT_CALLS = 64
"""A departure further back than this many calls does not explain a hang."""


_MIN_REPEATS = 2


class OrderBreak(Struct, frozen=True):
    """The first call of a rank that never before followed the call before it.

    usual is the kind of call that always followed one like `before` earlier.
    """

    before: Called
    call: Called
    usual: _Kind


def find_order_break(rank: Progress) -> OrderBreak | None:
    """The rank's first recent departure from its order of calls; None if it has kept to it."""
    calls = [call for call in rank.calls if not call.is_message]
    kinds = list_kinds(calls)
    for at in range(max(1, len(calls) - _RECENT_CALLS), len(calls)):
        usual = find_only_successor(kinds[:at], kinds[at - 1])
        if usual is not None and usual != kinds[at]:
            return OrderBreak(calls[at - 1], calls[at], usual)
    return None


def list_kinds(calls: Iterable[Called]) -> list[_Kind]:
    return [(one.group, one.op, one.message_bytes) for one in calls if not one.is_message]


def find_only_successor(kinds: Sequence[_Kind], kind: _Kind) -> _Kind | None:
    """The kind of call that has followed each earlier call of a kind, if always the same."""
    later = Counter(after for before, after in pairwise(kinds) if before == kind)
    if len(later) != 1:
        return None
    only, count = later.most_common(1)[0]
    return only if count >= _MIN_REPEATS else None
