"""All waiting that held some rank up, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.split.blame.levels import RankTime
from stepsplit.analyzer.split.calls.waits import BUBBLE
from stepsplit.analyzer.trace import Int64


@dataclass(frozen=True, slots=True)
class Waits:
    """The exposed waits of all ranks, rank by rank and in order of time; columns of one length.

    who and waited_for index the ranks that wait and that are waited for (-1: not here); origin
    numbers the pairs of axis and bucket.
    """

    who: Int64
    waited_for: Int64
    rank: Int64
    owner: Int64
    step: Int64
    bucket: Int64
    origin: Int64
    length_ns: Int64
    end_ns: Int64
    axes: tuple[str | None, ...]
    first: Int64

    @property
    def origins(self) -> int:
        """How many pairs of axis and bucket there can be."""
        return 2 * len(self.axes)

    def by_axis(self, amounts: Sequence[int]) -> Iterator[tuple[str | None, int, int]]:
        """(axis, skew, bubble) of amounts by origin."""
        for i, axis in enumerate(self.axes):
            yield axis, amounts[2 * i], amounts[2 * i + 1]

    @classmethod
    def of(cls, ranks: Sequence[RankTime]) -> Waits:
        """The waits of these ranks."""
        index = {one.rank: i for i, one in enumerate(ranks)}
        axes = tuple(dict.fromkeys(axis for one in ranks for axis in one.axis))
        number = {axis: i for i, axis in enumerate(axes)}
        count = [len(one.window) for one in ranks]
        owner = np.concatenate([one.owner for one in ranks]).astype(np.int64)
        bucket = np.concatenate([one.bucket for one in ranks]).astype(np.int64)
        axis = np.array([number[axis] for one in ranks for axis in one.axis], dtype=np.int64)
        return cls(
            who=np.repeat(np.arange(len(ranks)), count),
            waited_for=np.array([index.get(rank, -1) for rank in owner.tolist()], dtype=np.int64),
            rank=np.repeat([one.rank for one in ranks], count),
            owner=owner,
            step=np.concatenate([one.step[one.window] for one in ranks]),
            bucket=bucket,
            origin=2 * axis + (bucket == BUBBLE),
            length_ns=np.concatenate([one.length_ns for one in ranks]),
            end_ns=np.concatenate([one.end_ns for one in ranks]),
            axes=axes,
            first=np.concatenate(([0], np.cumsum(count))),
        )
