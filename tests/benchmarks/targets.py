"""What the readers are to reach, and whether they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from benchmarks.contestants import AGAIN, ONE, TWO, TWO_FILES
from benchmarks.rows import Row


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for one ratio of the row of that key."""

    key: str
    what: str
    ratio: Callable[[Row], float | None]
    limit: float
    at_least: bool

    def is_met(self, row: Row) -> bool:
        """Whether it is; what was not measured is not."""
        found = self.ratio(row)
        if found is None:
            return False
        return found >= self.limit if self.at_least else found <= self.limit

    def __str__(self) -> str:
        return f"{self.what} {'>=' if self.at_least else '<='} {self.limit:g}"


TARGETS = (
    Target(ONE, "x HTA", attrgetter("times_hta"), 10, True),
    Target(ONE, "x json.load", attrgetter("times_json"), 4, True),
    Target(ONE, "peak", attrgetter("of_json"), 0.6, False),
    Target(TWO, "x json.load", attrgetter("times_json"), 6, True),
    Target(TWO, "peak", attrgetter("of_json"), 0.9, False),
    Target(TWO_FILES, "x json.load", attrgetter("times_json"), 6, True),
    Target(TWO_FILES, "peak", attrgetter("of_json"), 0.9, False),
    Target(f"{AGAIN}_2", "of first", attrgetter("of_first"), 0.05, False),
)


def targets_of(row: Row) -> tuple[Target, ...]:
    """Those that the row has to meet."""
    return tuple(target for target in TARGETS if target.key == row.key)


def missed(rows: Sequence[Row]) -> tuple[str, ...]:
    """A sentence for each target that is not met."""
    return tuple(
        f"missed: {row.title}: {target}, measured {_figure(target.ratio(row))}"
        for row in rows
        for target in targets_of(row)
        if not target.is_met(row)
    )


def _figure(ratio: float | None) -> str:
    return "nothing" if ratio is None else f"{ratio:.3g}"
