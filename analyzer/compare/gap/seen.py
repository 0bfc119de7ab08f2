"""What ranks sent, and what of it held them up, by the prediction's words for the axes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.compare.measured import (
    UNKNOWN_GROUP,
    MeasuredMessages,
    axes_in_words,
    measured_messages,
)
from stepsplit.analyzer.compare.messages import Call, axis_words
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.report import ComparedStage
from stepsplit.analyzer.split.attribute import overlaps_of
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import COLLECTIVE, P2P
from stepsplit.analyzer.trace import OPS

_BUCKETS = {COLLECTIVE: "collective", P2P: "p2p"}
Key = tuple[str, str]
"""(bucket, axis)"""
Sizes = Mapping[int, int]
"""How many calls there are of each message_bytes, -1 unknown."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A recording, its messages, and the prediction's word for each measured axis and op."""

    found: RunSplit
    messages: Sequence[MeasuredMessages]
    words: Mapping[Call, str]

    @classmethod
    def of(cls, found: RunSplit, prediction: Prediction) -> Seen:
        messages = measured_messages(found)
        return cls(found, messages, axis_words(messages, prediction))

    def sizes(self, stage: ComparedStage) -> dict[Call, Sizes]:
        """What the rank of the stage's step sent in it, by axis and op."""
        sizes: dict[Call, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for one in self.messages:
            if (one.rank, one.step) == (stage.rank, stage.step):
                sizes[self._kind(one.axis, one.op)][one.message_bytes] += one.count
        return {kind: dict(of_kind) for kind, of_kind in sizes.items()}

    def moved_ns(
        self, rank: RankSplit, windows: Sequence[StepWindow]
    ) -> dict[Call, tuple[int, int]]:
        """How long the rank's data moved inside of the windows, and how much of that held the rank
        up, by axis and op."""
        axes, pieces = axes_in_words(self.found, rank), rank.pieces
        rows = overlaps_of(
            rank.trace.rank, rank.trace.calls, axes[:-1], windows, pieces, rank.work.compute
        )
        sums: dict[Call, tuple[int, int]] = {}
        for row in rows:
            kind = self._kind(row.axis or UNKNOWN_GROUP, row.op)
            moved, exposed = sums.get(kind, (0, 0))
            sums[kind] = moved + row.moved_ns, exposed + row.exposed_ns
        return sums

    def exposed_ns(self, stage: ComparedStage) -> dict[Key, int]:
        """What moving data held the stage's step up, each instant once: it adds up to the buckets
        of the step."""
        rank = self.rank_of(stage)
        window, exposed = rank.numbers.index(stage.step), rank.attribution.exposed
        axes, calls = axes_in_words(self.found, rank), rank.trace.calls
        sums: dict[Key, int] = defaultdict(int)
        for row in (exposed.window == window).nonzero()[0].tolist():
            bucket = _BUCKETS.get(int(exposed.bucket[row]))
            if bucket is not None:
                call = exposed.call[row]
                axis, _ = self._kind(axes[calls.group_id[call]], OPS[calls.op[call]])
                sums[bucket, axis] += int(exposed.end_ns[row] - exposed.start_ns[row])
        return dict(sums)

    def rank_of(self, stage: ComparedStage) -> RankSplit:
        """The rank whose step is the stage's."""
        return next(one for one in self.found.ranks if one.trace.rank == stage.rank)

    def _kind(self, axis: str, op: str) -> Call:
        """By the prediction's word for the axis; by its own where the prediction has none."""
        return self.words.get((axis, op), axis), op
