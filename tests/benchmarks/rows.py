"""Runs -> the rows of the table: the least time, the most memory, and their ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contestants import HTA, JSON, Contestant
from benchmarks.measuring import Run

_Runs = Mapping[str, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Row:
    """One opening of one contestant; seconds of all runs, the ratios by the least of them.

    times_json and times_hta say how often it fits into the time of json.load and HTA; of_floor,
    of_first and of_json how much of the floor's time, the first opening's time, and the JSON's
    bytes it takes. None where that is not to be asked or was not measured. others_cores is of the
    run that took least.
    """

    key: str
    title: str
    seconds: tuple[float, ...]
    peak_bytes: int | None
    own_peak_bytes: int | None
    others_cores: float
    events: int
    times_json: float | None
    times_hta: float | None
    of_floor: float | None
    of_first: float | None
    of_json: float | None

    @property
    def least_seconds(self) -> float:
        return min(self.seconds)


def rows_of(contestants: Sequence[Contestant], runs: _Runs) -> tuple[Row, ...]:
    """A row a contestant, and one for each opening of those that open several times."""
    return tuple(row for one in contestants for row in _rows(one, runs))


def _rows(one: Contestant, runs: _Runs) -> Iterator[Row]:
    own = runs[one.key]
    peak = max(run.peak_bytes for run in own)
    for nth, which in enumerate(one.of_which):
        seconds = _least(own, nth)
        yield Row(
            key=f"{one.key}_{nth + 1}" if which else one.key,
            title=which or one.title,
            seconds=tuple(run.seconds[nth] for run in own),
            peak_bytes=None if nth else peak,
            own_peak_bytes=None if nth else max(run.own_peak_bytes for run in own),
            others_cores=min(own, key=lambda run: run.seconds[nth]).others_cores,
            events=own[0].events,
            times_json=_least(runs[one.json_load]) / seconds,
            times_hta=_least(runs[HTA]) / seconds if _same_as_hta(one, runs) else None,
            of_floor=seconds / _least(runs[one.floor]) if one.floor else None,
            of_first=seconds / _least(own) if nth else None,
            of_json=None if nth else peak / one.json_bytes,
        )


def _same_as_hta(one: Contestant, runs: _Runs) -> bool:
    """Whether HTA was measured, on the file that this contestant opens."""
    return HTA in runs and one.json_load == JSON


def _least(runs: Sequence[Run], nth: int = 0) -> float:
    return min(run.seconds[nth] for run in runs)
