"""Corresponding steps of different ranks: those that share matched calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepsplit.analyzer.arrays import collect_intervals, find_interval, group_ids
from stepsplit.analyzer.split.matching import MatchedCalls
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import Int64, Note

_NONE = np.iinfo(np.int64).min
"""Marks a call that has no step number yet."""


def unify_step_numbers(steps: Sequence[Steps], matched: MatchedCalls) -> list[Steps]:
    """Renumbers the steps of all ranks like the first rank's; a rank without shared calls keeps its
    own."""
    calls = [_collect_calls(own, i, matched) for i, own in enumerate(steps)]
    numbered = {0: steps[0]}
    number_of = np.full(int(matched.key.max(initial=-1)) + 1, _NONE, dtype=np.int64)
    _record_numbers(number_of, calls[0], steps[0])
    left = set(range(1, len(steps)))
    while left:
        votes = {i: _count_votes(calls[i], number_of) for i in sorted(left)}
        known = [i for i in sorted(left) if votes[i]]
        for i in known or sorted(left):
            numbered[i] = _shift_numbers(steps[i], votes[i])
            _record_numbers(number_of, calls[i], numbered[i])
            left.discard(i)
    return [numbered[i] for i in range(len(steps))]


class _Calls(Struct, frozen=True):
    """The matched calls of a rank that start in one of its windows, sorted by window."""

    key: Int64
    window: Int64


def _collect_calls(steps: Steps, trace: int, matched: MatchedCalls) -> _Calls:
    rows = matched.slice_trace(trace)
    key, start = matched.key[rows], matched.start_ns[rows]
    window = find_interval(collect_intervals(steps.windows), start)
    inside = np.flatnonzero((window >= 0) & (key >= 0))
    inside = inside[np.argsort(window[inside], kind="stable")]
    return _Calls(key[inside], window[inside])


def _record_numbers(number_of: Int64, calls: _Calls, steps: Steps) -> None:
    """Writes, for each matched call, the number of the step in which it started."""
    number = np.array([window.step for window in steps.windows], dtype=np.int64)
    number_of[calls.key] = number[calls.window]


def _count_votes(calls: _Calls, number_of: Int64) -> dict[int, int]:
    """{window: step number}: the number that most of its calls have on other ranks, the first if
    tied."""
    number = number_of[calls.key]
    known = number != _NONE
    label = group_ids(calls.window[known], number[known])
    first, count = np.unique(label, return_index=True, return_counts=True)[1:]
    window = calls.window[known][first]
    best = np.lexsort((first, -count, window))
    best = best[np.flatnonzero(np.diff(window[best], prepend=-1))]
    return dict(zip(window[best].tolist(), number[known][first[best]].tolist(), strict=True))


def _shift_numbers(steps: Steps, votes: Mapping[int, int]) -> Steps:
    shifts = Counter(vote - steps.windows[window].step for window, vote in votes.items())
    shift = shifts.most_common(1)[0][0] if shifts else 0
    if not shift:
        return steps
    text = f"step numbers differ from the first rank's by {-shift:+d} and were renumbered"
    note = Note("steps_renumbered", text)
    renumbered: tuple[StepWindow, ...] = tuple(
        replace(w, step=w.step + shift) for w in steps.windows
    )
    return replace(steps, windows=renumbered, notes=(*steps.notes, note), shift=shift)
