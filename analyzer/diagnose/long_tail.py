"""The long tail of generation: the time in which an engine decodes for its last sequences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import mul

import numpy as np
from msgspec import Struct

from stepsplit.analyzer.arrays import Intervals
from stepsplit.analyzer.split.rl_phases import DecodeSteps
from stepsplit.analyzer.trace import Int64

LAST_PART = 8
"""The last sequences of a batch are its last eighth, and at least one."""

_SLICES = 16


class DecodedGeneration(Struct, frozen=True):
    """One generation of a rank; times as those of its decode steps.

    Attributes:
        start_ns: The begin of its first decode step.
        tail_start_ns: From here on it decodes for its last sequences; its end if it never does.
        end_ns: The end of its last decode step.
        sequences: The most sequences at a time.
        last: Up to so many sequences are the last ones.
        batch: The mean number of sequences in equal parts of its time.
        filled: The time of decoding times its sequences.
    """

    start_ns: int
    tail_start_ns: int
    end_ns: int
    sequences: int
    last: int
    batch: tuple[float, ...]
    filled: int


def find_generations(steps: DecodeSteps, marks: Intervals, edges: Int64) -> list[DecodedGeneration]:
    """The generations that these decode steps make up.

    The steps within one mark of a generation are one; of those outside, or alone in theirs, all
    that begin between the same two edges.
    """
    begun = np.searchsorted(marks.start_ns, steps.start_ns, side="right")
    ended = np.searchsorted(marks.end_ns, steps.start_ns, side="right")
    inside = np.where(begun > ended, begun, 0) - 1
    alone = np.bincount(inside + 1, minlength=len(marks) + 1)[inside + 1] < 2
    window = np.searchsorted(edges, steps.start_ns, side="right")
    key = np.where((inside >= 0) & ~alone, inside, len(marks) + window)
    grouped: dict[int, list[int]] = defaultdict(list)
    for row, one in enumerate(key.tolist()):
        grouped[one].append(row)
    found = (_describe(steps, rows) for rows in grouped.values())
    return sorted((one for one in found if one.sequences), key=lambda one: one.start_ns)


def _describe(steps: DecodeSteps, rows: Sequence[int]) -> DecodedGeneration:
    start = steps.start_ns[rows]
    # A step lasts until the next one begins: the host may run ahead of its device, or work between.
    end = np.append(start[1:], int(steps.end_ns[rows].max()))
    sequences = steps.sequences[rows]
    most = int(sequences.max())
    last = max(1, most // LAST_PART)
    # A step without a sequence prepares others: it is no part of the tail.
    is_full = (sequences > last) | (sequences == 0)
    full = np.flatnonzero(is_full)
    has_tail = most > last and len(full)
    tail_start = int(end[full[-1]]) if has_tail else int(end[-1])
    duration = end - start
    # As floats, for a name may say so many sequences that the product is no int64.
    filled = np.concatenate(([0.0], np.cumsum(duration * sequences.astype(np.float64))))
    # The sequences times the time before each of the instants that cut it into equal parts; since
    # the start, for Unix ns are no float.
    whole_ns = int(end[-1] - start[0])
    cuts = np.linspace(0, whole_ns, _SLICES + 1)
    reached = np.interp(cuts, np.append(start, end[-1]) - start[0], filled)
    width = max(whole_ns, 1) / _SLICES
    return DecodedGeneration(
        start_ns=int(start[0]),
        tail_start_ns=tail_start,
        end_ns=int(end[-1]),
        sequences=most,
        last=last,
        batch=tuple(round(float(one), 2) for one in np.diff(reached) / width),
        filled=sum(map(mul, duration.tolist(), sequences.tolist())),
    )
