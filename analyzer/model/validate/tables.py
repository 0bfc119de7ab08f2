"""What a validation says: rows of published against predicted, and checks with a bar for them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Literal

Measure = Literal["equality", "mean/max", "mean/p90", "mean", "median"]
WORST = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One published number beside the model's, both in unit.

    tolerance is how far apart they may be to count as equal (what the printed digits leave open).
    fitted: a constant of the model was fitted on this row, which is then not reported.
    """

    table: str
    case: str
    what: str
    published: float
    predicted: float
    unit: str
    tolerance: float = 0.0
    fitted: bool = False

    @property
    def error(self) -> float:
        """predicted / published - 1, a ratio."""
        if self.published == self.predicted:
            return 0.0
        return self.predicted / self.published - 1 if self.published else math.inf

    @property
    def equal(self) -> bool:
        return abs(self.predicted - self.published) <= self.tolerance * (1 + 1e-9) + 1e-12


@dataclass(frozen=True, slots=True)
class Check:
    """Rows that are held to one bar together.

    bar and result are ratios in the order of measure: the share of equal rows, or mean and
    maximum, mean and 90th percentile, mean, median of the absolute errors. A check without rows
    says in note why, and is neither met nor missed; one without a bar is shown and held to nothing.
    baseline is what one fitted utilization for each kind of run reaches on the same rows. left_out
    names records that the model cannot describe, and why.
    """

    name: str
    rows: tuple[Row, ...]
    measure: Measure
    bar: tuple[float, ...]
    result: tuple[float, ...] = ()
    baseline: tuple[float, ...] | None = None
    note: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def skipped(self) -> bool:
        return not self.result

    @property
    def met(self) -> bool:
        """Whether every number of the result is within the bar."""
        pairs = zip(self.result, self.bar, strict=False)
        if self.measure == "equality":
            return all(result >= bar for result, bar in pairs)
        return all(result <= bar for result, bar in pairs)

    @property
    def reported(self) -> tuple[Row, ...]:
        """The rows of the result: those that nothing was fitted on."""
        return tuple(row for row in self.rows if not row.fitted)

    @property
    def worst(self) -> tuple[Row, ...]:
        """The reported rows that are farthest off; of an equality those that are not equal."""
        rows = sorted(self.reported, key=lambda row: -abs(row.error))
        if self.measure == "equality":
            rows = [row for row in rows if not row.equal]
        return tuple(rows[:WORST])


def check(
    name: str,
    rows: Iterable[Row],
    measure: Measure,
    bar: tuple[float, ...],
    baseline: tuple[float, ...] | None = None,
    note: str = "",
) -> Check:
    """The check with its result over the rows that nothing was fitted on."""
    found = tuple(rows)
    reported = [row for row in found if not row.fitted]
    _assert_disjoint(found, reported)
    result = measured(measure, reported) if reported else ()
    return Check(name, found, measure, bar, result, baseline, _nothing(found, result) or note)


def measured(measure: Measure, rows: Collection[Row]) -> tuple[float, ...]:
    """The measure of one or more rows."""
    if measure == "equality":
        return (sum(row.equal for row in rows) / len(rows),)
    off = [abs(row.error) for row in rows]
    match measure:
        case "mean/max":
            return fmean(off), max(off)
        case "mean/p90":
            return fmean(off), percentile_90(off)
        case "mean":
            return (fmean(off),)
    return (median(off),)


def percentile_90(values: list[float]) -> float:
    """Between the two nearest of the sorted values, as numpy's default does."""
    return quantiles(values, n=10, method="inclusive")[8] if len(values) > 1 else values[0]


def marked(rows: Iterable[Row], fitted: Collection[str]) -> tuple[Row, ...]:
    """The rows, with those marked whose case is one of the fitted ones."""
    return tuple(replace(row, fitted=row.case in fitted) for row in rows)


def _assert_disjoint(rows: Iterable[Row], reported: Iterable[Row]) -> None:
    fitted = {row.case for row in rows if row.fitted}
    both = fitted & {row.case for row in reported}
    assert not both, f"fitted on and reported: {sorted(both)}"


def _nothing(rows: tuple[Row, ...], result: tuple[float, ...]) -> str:
    if result:
        return ""
    return "all rows were fitted on" if rows else "no such rows in this folder"
