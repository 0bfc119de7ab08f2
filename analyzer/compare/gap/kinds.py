"""Calls of one axis and op in a step: how long they take, and how long the model says they do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stepsplit.analyzer import units
from stepsplit.analyzer.compare.gap.price import Price
from stepsplit.analyzer.compare.gap.seen import Seen, Sizes
from stepsplit.analyzer.compare.messages import Call
from stepsplit.analyzer.model.prediction import Communication, Prediction
from stepsplit.analyzer.report.report import ComparedStage

_MOSTLY = 0.5


@dataclass(frozen=True, slots=True)
class CallTimes:
    """The calls of one axis and op of one rank in one step.

    predicted_ns is the model's time for the calls that it predicts, expected_ns its time for those
    that were made, measured_ns how long their data moved. small: expected_ns is mostly latency.
    """

    axis: str
    op: str
    made: Sizes
    predicted: Sizes
    predicted_ns: float
    expected_ns: float
    measured_ns: float
    small: bool

    @property
    def extra_ns(self) -> float:
        """What it costs that the calls are others than predicted: more, or larger."""
        return self.expected_ns - self.predicted_ns

    @property
    def slower_ns(self) -> float:
        """How much longer the calls take than the model says of calls of their sizes."""
        return self.measured_ns - self.expected_ns

    @property
    def extra_words(self) -> str:
        had = _amount(self.predicted) if self.predicted else "none"
        return f"{self.op} on {self.axis}: {_amount(self.made)} where the model has {had}"

    @property
    def slower_words(self) -> str:
        times = self.measured_ns / self.expected_ns if self.expected_ns else 1.0
        long = f"{times:.2f} times as long as the model says"
        if self.small:
            return f"small calls: {self.op} on {self.axis} takes {long}, which is mostly latency"
        return f"{self.op} on {self.axis} takes {long}"


def call_times(
    seen: Seen, prediction: Prediction, price: Price, stage: ComparedStage
) -> list[CallTimes]:
    """A row for each axis and op that the stage's step has or should have."""
    rank, sizes = seen.rank_of(stage), seen.sizes(stage)
    window = rank.windows.windows[rank.numbers.index(stage.step)]
    moved = seen.moved_ns(rank, [window])
    expected: dict[Call, list[Communication]] = defaultdict(list)
    for one in prediction.communication:
        if one.message.stage == stage.stage:
            expected[one.message.axis, one.message.op].append(one)
    kinds = sorted({*sizes, *moved, *expected})
    return [
        _times(kind, sizes.get(kind, {}), expected.get(kind, ()), moved.get(kind, (0, 0))[0], price)
        for kind in kinds
    ]


def _times(
    kind: Call, made: Sizes, predicted: Sequence[Communication], moved_ns: int, price: Price
) -> CallTimes:
    """What the model has at no cost, as the receiving side of a ring, takes no time of its own."""
    predicted_ns = sum(one.time.ns for one in predicted)
    expected_ns = _priced(made, predicted, price) if predicted else float(moved_ns)
    least_ns = _priced({1: sum(made.values())}, predicted, price) if predicted else 0.0
    free = bool(predicted) and not predicted_ns
    sizes: dict[int, int] = defaultdict(int)
    for one in predicted:
        sizes[one.message.message_bytes] += one.message.count
    return CallTimes(
        axis=kind[0],
        op=kind[1],
        made=made,
        predicted=sizes,
        predicted_ns=predicted_ns,
        expected_ns=expected_ns,
        measured_ns=0.0 if free else float(moved_ns),
        small=least_ns > _MOSTLY * expected_ns,
    )


def _priced(made: Sizes, predicted: Sequence[Communication], price: Price) -> float:
    """The model's time for the calls, each like the predicted one that is nearest in size; like the
    mean one where the size is unknown."""
    count = sum(one.message.count for one in predicted)
    mean_ns = sum(one.time.ns for one in predicted) / count
    return sum(
        calls * (mean_ns if size < 0 else price(_nearest(predicted, size), size))
        for size, calls in made.items()
    )


def _nearest(predicted: Sequence[Communication], size: int) -> Communication:
    return min(predicted, key=lambda one: abs(one.message.message_bytes - size))


def _amount(sizes: Sizes) -> str:
    """As "4 calls (12.7 MB)"; without bytes where they are unknown."""
    count = sum(sizes.values())
    told = "1 call" if count == 1 else f"{count} calls"
    if not count or any(size < 0 for size in sizes):
        return told
    return f"{told} ({units.size(sum(size * calls for size, calls in sizes.items()))})"
