"""All that is known of a hang while its culprits are looked for."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.hang.hang import Mismatch, Stuck
from stepsplit.analyzer.hang.progress import Called, Progress


@dataclass(frozen=True, slots=True)
class Scene:
    """What is stuck, on what members disagree, and how far each rank with a dump came."""

    stuck: tuple[Stuck, ...]
    mismatches: tuple[Mismatch, ...]
    ranks: tuple[Progress, ...]

    def has_dump(self, rank: int) -> bool:
        """Whether the rank left a dump."""
        return any(one.rank == rank for one in self.ranks)

    def mismatch_of(self, call: Stuck) -> Mismatch | None:
        """What the call's members disagree on."""
        at = call.group, call.seq
        return next((one for one in self.mismatches if (one.group, one.seq) == at), None)

    def oldest_open(self, rank: int) -> Called | None:
        """The first call of the rank that is not done; None where all are, or it left no dump."""
        return next((call for one in self.ranks if one.rank == rank for call in one.open), None)
