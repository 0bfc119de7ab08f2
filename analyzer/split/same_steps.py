"""Which steps of different ranks are the same: those whose matched calls are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.arrays import labels_of
from stepsplit.analyzer.split.calls.match import Matched
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import Int64, Note

_NONE = np.iinfo(np.int64).min
"""The number of a call that no rank has numbered yet."""


def agreed(steps: Sequence[Steps], matched: Matched) -> list[Steps]:
    """The steps with one numbering, the first rank's; a rank that shares no call keeps its own."""
    calls = [_calls(own, i, matched) for i, own in enumerate(steps)]
    numbered = {0: steps[0]}
    number_of = np.full(int(matched.key.max(initial=-1)) + 1, _NONE, dtype=np.int64)
    _number(number_of, calls[0], steps[0])
    left = set(range(1, len(steps)))
    while left:
        votes = {i: _votes(calls[i], number_of) for i in sorted(left)}
        known = [i for i in sorted(left) if votes[i]]
        for i in known or sorted(left):
            numbered[i] = _renumbered(steps[i], votes[i])
            _number(number_of, calls[i], numbered[i])
            left.discard(i)
    return [numbered[i] for i in range(len(steps))]


@dataclass(frozen=True, slots=True)
class _Calls:
    """The matched calls of a rank that began in its windows, window by window."""

    key: Int64
    window: Int64


def _calls(steps: Steps, trace: int, matched: Matched) -> _Calls:
    rows = matched.of_trace(trace)
    key, start = matched.key[rows], matched.start_ns[rows]
    starts = np.array([window.start_ns for window in steps.windows], dtype=np.int64)
    ends = np.array([window.end_ns for window in steps.windows], dtype=np.int64)
    window = np.searchsorted(starts, start, side="right") - 1
    inside = np.flatnonzero((window >= 0) & (key >= 0))
    inside = inside[start[inside] < ends[window[inside]]]
    inside = inside[np.argsort(window[inside], kind="stable")]
    return _Calls(key[inside], window[inside])


def _number(number_of: Int64, calls: _Calls, steps: Steps) -> None:
    """Notes for each key of a matched call the number of the step that it began in."""
    number = np.array([window.step for window in steps.windows], dtype=np.int64)
    number_of[calls.key] = number[calls.window]


def _votes(calls: _Calls, number_of: Int64) -> dict[int, int]:
    """{window: the number that most of its calls have on other ranks, of equals the first}."""
    number = number_of[calls.key]
    told = number != _NONE
    label = labels_of(calls.window[told], number[told])
    first, count = np.unique(label, return_index=True, return_counts=True)[1:]
    window = calls.window[told][first]
    best = np.lexsort((first, -count, window))
    best = best[np.flatnonzero(np.diff(window[best], prepend=-1))]
    return dict(zip(window[best].tolist(), number[told][first[best]].tolist(), strict=True))


def _renumbered(steps: Steps, votes: Mapping[int, int]) -> Steps:
    shifts = Counter(vote - steps.windows[window].step for window, vote in votes.items())
    shift = shifts.most_common(1)[0][0] if shifts else 0
    if not shift:
        return steps
    note = Note("steps_renumbered", f"its step numbers are {-shift:+d} off the first rank's")
    moved: tuple[StepWindow, ...] = tuple(replace(w, step=w.step + shift) for w in steps.windows)
    return Steps(moved, (*steps.notes, note))
