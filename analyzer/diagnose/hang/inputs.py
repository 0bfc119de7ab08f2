"""The input of the search for the culprits of a hang."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from stepsplit.analyzer.diagnose.hang.call_order import (
    OrderBreak,
    find_only_successor,
    find_order_break,
    list_kinds,
)
from stepsplit.analyzer.diagnose.hang.job_groups import describe_group
from stepsplit.analyzer.diagnose.hang.progress import Called, Progress
from stepsplit.analyzer.diagnose.hang.result import Mismatch, Stuck, StuckGroup


class HangInputs(Struct, frozen=True):
    """The stuck calls, the mismatches between members, and the progress of each rank.

    guessed: names of the groups whose members are only those that used them.
    """

    stuck: tuple[Stuck, ...]
    mismatches: tuple[Mismatch, ...]
    ranks: tuple[Progress, ...]
    guessed: frozenset[str] = frozenset()

    def has_dump(self, rank: int) -> bool:
        """Whether there is a dump of the rank."""
        return any(one.rank == rank for one in self.ranks)

    def find_mismatch(self, call: Stuck) -> Mismatch | None:
        """The mismatch between the members of a call, if any."""
        at = call.group, call.seq, call.op in ("send", "recv")
        found = (one for one in self.mismatches if (one.group, one.seq, one.is_message) == at)
        return next(found, None)

    def find_order_breaks(self, ranks: Sequence[int]) -> dict[int, OrderBreak]:
        """The departures of some of the ranks from their order of calls; empty if all departed."""
        found = {one.rank: find_order_break(one) for one in self.ranks if one.rank in ranks}
        breaks = {rank: one for rank, one in found.items() if one is not None}
        return breaks if len(breaks) < len(ranks) else {}

    def find_next_group(self, rank: int) -> StuckGroup | None:
        """The group that the rank is to call on next, if it always has after a call as its last."""
        calls = next((one.calls for one in self.ranks if one.rank == rank), ())
        kinds = list_kinds(calls)
        usual = find_only_successor(kinds, kinds[-1]) if kinds else None
        return None if usual is None else describe_group(usual[0])

    def find_oldest_open(self, rank: int) -> Called | None:
        """The rank's first call that is not completed; None if there is none, or no dump."""
        return next((call for one in self.ranks if one.rank == rank for call in one.open), None)
