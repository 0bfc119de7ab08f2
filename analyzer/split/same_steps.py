"""Which steps of different ranks are the same: those whose matched calls are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepsplit.analyzer.split.match import Matched
from stepsplit.analyzer.split.steps import Steps, StepWindow
from stepsplit.analyzer.trace import Note


def agreed(steps: Sequence[Steps], matched: Matched) -> list[Steps]:
    """The steps with one numbering, the first rank's; a rank that shares no call keeps its own."""
    numbered = {0: steps[0]}
    number_of = _numbers(steps[0], 0, matched)
    left = set(range(1, len(steps)))
    while left:
        votes = {i: _votes(steps[i], i, matched, number_of) for i in sorted(left)}
        known = [i for i in sorted(left) if any(votes[i])]
        for i in known or sorted(left):
            numbered[i] = _renumbered(steps[i], votes[i])
            number_of |= _numbers(numbered[i], i, matched)
            left.discard(i)
    return [numbered[i] for i in range(len(steps))]


def _numbers(steps: Steps, trace: int, matched: Matched) -> dict[int, int]:
    """{key of a matched call: the number of the step that it began in}."""
    rows = matched.of_trace(trace)
    key, start = matched.key[rows], matched.start_ns[rows]
    found: dict[int, int] = {}
    for window in steps.windows:
        inside = (start >= window.start_ns) & (start < window.end_ns) & (key >= 0)
        found |= dict.fromkeys(key[inside].tolist(), window.step)
    return found


def _votes(
    steps: Steps, trace: int, matched: Matched, number_of: Mapping[int, int]
) -> list[Counter[int]]:
    rows = matched.of_trace(trace)
    key, start = matched.key[rows], matched.start_ns[rows]
    votes = []
    for window in steps.windows:
        inside = np.flatnonzero((start >= window.start_ns) & (start < window.end_ns) & (key >= 0))
        votes.append(Counter(number_of[k] for k in key[inside].tolist() if k in number_of))
    return votes


def _renumbered(steps: Steps, votes: Sequence[Counter[int]]) -> Steps:
    shifts = Counter(
        vote.most_common(1)[0][0] - window.step
        for window, vote in zip(steps.windows, votes, strict=True)
        if vote
    )
    shift = shifts.most_common(1)[0][0] if shifts else 0
    if not shift:
        return steps
    note = Note("steps_renumbered", f"its step numbers are {-shift:+d} off the first rank's")
    moved: tuple[StepWindow, ...] = tuple(replace(w, step=w.step + shift) for w in steps.windows)
    return Steps(moved, (*steps.notes, note))
