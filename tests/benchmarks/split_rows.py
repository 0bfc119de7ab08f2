"""Runs of the split -> the rows of its table, and what they are to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measuring import Run
from benchmarks.table import in_markdown

OF_READING, GROWTH, NOISE = 1.0, 2.0, 0.1
"""Analysis may take as long as reading, and twice as long for twice the calls, but for noise."""
_HEAD = (
    "calls", "JSON MB", "reading s", "analysis s", "all runs", "of reading", "of half the calls",
    "peak MB, reading", "peak MB", "others' cores", "target",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A recording with so many calls; a value a run, all seconds of a run from one process.

    growth is how many times the analysis takes as long as with half the calls, in the same turn;
    none where half the calls were not measured. largest says whether it is the largest, which is to
    be analyzed no slower than read.
    """

    calls: int
    json_bytes: int
    reading: tuple[float, ...]
    analysis: tuple[float, ...]
    growth: tuple[float, ...]
    reading_peak_bytes: int
    peak_bytes: int
    others_cores: float
    largest: bool

    @property
    def of_reading(self) -> float:
        """The median of the runs."""
        return median(a / r for a, r in zip(self.analysis, self.reading, strict=True))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target of a row, and whether it is met."""

    text: str
    measured: float
    is_met: bool


def rows_of(
    json_bytes: Mapping[int, int], whole: Mapping[int, Sequence[Run]], read: Mapping[int, Run]
) -> tuple[Row, ...]:
    """A row for each number of calls, given the runs of all and one that only reads."""
    return tuple(
        Row(
            calls=calls,
            json_bytes=json_bytes[calls],
            reading=tuple(run.seconds[0] for run in runs),
            analysis=tuple(run.seconds[1] for run in runs),
            growth=_growth(runs, whole.get(calls // 2, ())),
            reading_peak_bytes=read[calls].own_peak_bytes,
            peak_bytes=max(run.own_peak_bytes for run in runs),
            others_cores=max(run.others_cores for run in runs),
            largest=calls == max(whole),
        )
        for calls, runs in whole.items()
    )


def _growth(runs: Sequence[Run], of_half: Sequence[Run]) -> tuple[float, ...]:
    return tuple(run.seconds[1] / half.seconds[1] for run, half in zip(runs, of_half, strict=False))


def verdicts_of(row: Row) -> tuple[Verdict, ...]:
    """What the row is to reach."""
    found = []
    if row.largest:
        met = row.of_reading <= OF_READING
        found.append(Verdict(f"of reading <= {OF_READING:g}", row.of_reading, met))
    if row.growth:
        measured = median(row.growth)
        text = f"of half <= {GROWTH:g} (+{NOISE:.0%} noise)"
        found.append(Verdict(text, measured, measured <= GROWTH * (1 + NOISE)))
    return tuple(found)


def missed(rows: Sequence[Row]) -> tuple[str, ...]:
    """A sentence for each target that is not met."""
    return tuple(
        f"missed: {row.calls:,} calls: {one.text}, measured {one.measured:.3g}"
        for row in rows
        for one in verdicts_of(row)
        if not one.is_met
    )


def table_of(rows: Sequence[Row], judged: bool) -> str:
    """The rows with their targets; met or missed only where they are judged."""
    return in_markdown([_HEAD, *(_cells(row, judged) for row in rows)])


def _cells(row: Row, judged: bool) -> tuple[str, ...]:
    verdicts = [
        f"{one.text}: {'met' if one.is_met else 'MISSED'}" if judged else one.text
        for one in verdicts_of(row)
    ]
    return (
        f"{row.calls:,}",
        f"{row.json_bytes / 1e6:.0f}",
        f"{median(row.reading):.3f}",
        f"{median(row.analysis):.3f}",
        " ".join(f"{seconds:.3f}" for seconds in row.analysis),
        f"{row.of_reading:.2f}",
        f"{median(row.growth):.2f}" if row.growth else "",
        f"{row.reading_peak_bytes / 1e6:.0f}",
        f"{row.peak_bytes / 1e6:.0f}",
        f"{row.others_cores:.1f}",
        "; ".join(verdicts),
    )
