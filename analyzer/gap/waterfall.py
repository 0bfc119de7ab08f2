"""From the predicted to the measured step: the parts of the difference, which add up to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stepsplit.analyzer import units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.gap.comm_gap import Call, Key, MeasuredComm, Sizes
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.predict import call_ns
from stepsplit.analyzer.model.prediction import Communication, Prediction, group_axis
from stepsplit.analyzer.ops import MESSAGES
from stepsplit.analyzer.report.build import why_idle
from stepsplit.analyzer.report.report import ComparedStage, Finding, GapRow, Report


@dataclass(frozen=True, slots=True)
class Sides:
    """One stage, measured and predicted, with what is known of why they differ."""

    seen: MeasuredComm
    prediction: Prediction
    price: Price
    report: Report
    stage: ComparedStage

    def gap_ns(self, bucket: str) -> int:
        """Measured - predicted of one bucket."""
        difference = self.stage.measured - self.stage.predicted
        return difference.buckets_ns[BUCKETS.index(bucket)]

    def says(self, bucket: str, more: str, less: str) -> str:
        """more where the bucket is larger than predicted, else less."""
        return more if self.gap_ns(bucket) > 0 else less


def waterfall(sides: Sides) -> tuple[GapRow, ...]:
    """The parts, in the order of the buckets; none of them zero."""
    rows = [
        *_compute(sides),
        *explained_calls(sides.seen, sides.prediction, sides.price, sides.stage),
        GapRow("skew", "skew", None, sides.gap_ns("skew"), _skew_words(sides)),
        *_bubble(sides),
        GapRow("copy", "copy", None, sides.gap_ns("copy"), _copy_words(sides)),
        GapRow("idle", "idle", None, sides.gap_ns("idle"), _idle_words(sides)),
    ]
    for bucket in BUCKETS:
        told, gap = sum(row.ns for row in rows if row.bucket == bucket), sides.gap_ns(bucket)
        assert told == gap, f"the waterfall tells {told} ns of {gap} in {bucket}"
    return tuple(row for row in rows if row.ns)


def _compute(sides: Sides) -> list[GapRow]:
    """What a slow rank loses to its peers, and the rest: kernels or work."""
    gap, rank = sides.gap_ns("compute"), sides.stage.rank
    lost = sum(one.lost_ns for one in sides.report.slow_kernels if one.rank == rank)
    slow = min(lost, max(0, gap))
    words = sides.says(
        "compute",
        "kernels take longer than the model says, or there are more of them",
        "kernels take less than the model says, or there are fewer of them",
    )
    return [
        GapRow("slow_rank", "compute", None, slow, f"rank {rank} is slower than its peers"),
        GapRow("kernels", "compute", None, gap - slow, words),
    ]


def _skew_words(sides: Sides) -> str:
    """Who is most waited for in the step, of all ranks."""
    blamed: dict[tuple[int, str], int] = defaultdict(int)
    for one in sides.seen.found.blame:
        if one.rank is not None and one.step == sides.stage.step and one.skew_ns:
            blamed[one.rank, one.cause] += one.skew_ns
    words = sides.says("skew", "more", "less") + " waiting within the stage than predicted"
    if not blamed:
        return words
    rank, cause = max(blamed, key=lambda key: blamed[key])
    return f"{words}, most for rank {rank} ({cause})"


def _bubble(sides: Sides) -> list[GapRow]:
    """What uneven stages make of the bubble, and the rest; few microbatches the model knows."""
    gap, cause = sides.gap_ns("bubble"), _uneven(sides)
    uneven = 0 if cause is None else min(cause.gain_ns, max(0, gap))
    words = sides.says("bubble", "more", "less") + " waiting for other stages than predicted"
    return [
        GapRow("uneven_stages", "bubble", "pp", uneven, cause.message if cause else ""),
        GapRow("bubble", "bubble", "pp", gap - uneven, words + _grid_words(sides)),
    ]


def _uneven(sides: Sides) -> Finding | None:
    """Stages of unequal compute, where another stage has more than the one that the model takes for
    the slowest: its waiting is not in the predicted bubble."""
    return next(
        (one for one in sides.report.findings
         if one.code == "uneven_stages" and sides.stage.rank not in one.ranks), None,
    )  # fmt: skip


def _grid_words(sides: Sides) -> str:
    grid = sides.report.pipeline
    if grid is None:
        return ""
    told = f"; the pipeline's grid idles {units.percent(grid.bubble_fraction)}"
    if grid.ideal_bubble_fraction is not None:
        told += f", {grid.schedule} itself {units.percent(grid.ideal_bubble_fraction)}"
    return f"{told}, the model's {units.percent(sides.prediction.bubble_fraction)}"


def _copy_words(sides: Sides) -> str:
    if not sides.stage.predicted.copy_ns:
        return "copies that the model does not have"
    return f"copies take {sides.says('copy', 'more', 'less')} than predicted"


def _idle_words(sides: Sides) -> str:
    """With the largest cause in the step, where something idles."""
    found = sides.seen.found
    rank = sides.seen.rank_of(sides.stage)
    window = rank.numbers.index(sides.stage.step)
    causes = found.detail.idle[found.ranks.index(rank)]
    why = why_idle(one for one in causes if one.window == window)
    words = f"nothing runs for {sides.says('idle', 'longer', 'less')} than predicted"
    return f"{words}: {why}" if why else words


# Why communication holds a stage up longer, or shorter, than predicted: axis by axis.


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of what one axis holds a step up longer than predicted, in ns."""

    cause: str
    ns: float
    message: str


def explained_calls(
    seen: MeasuredComm, prediction: Prediction, price: Price, stage: ComparedStage
) -> list[GapRow]:
    """Of each axis: other calls than predicted, slower ones, and less of them hidden. The parts of
    a bucket add up to its measured less its predicted time. Of a step that is not full nobody
    knows all calls: an axis is one part."""
    held, expected = seen.exposed_ns(stage), _exposed_by_model(prediction, stage)
    kinds = call_times(seen, prediction, price, stage) if stage.kind == "full" else None
    rows: list[GapRow] = []
    for bucket, axis in sorted({*held, *expected}):
        gap_ns = held.get((bucket, axis), 0) - expected.get((bucket, axis), 0)
        if kinds is None:
            words = "longer" if gap_ns > 0 else "less"
            parts = [_Part("exposed", gap_ns, f"{axis} holds the step up {words} than predicted")]
        else:
            own = [one for one in kinds if (_bucket(one.op), one.axis) == (bucket, axis)]
            parts = _parts(axis, gap_ns, own)
        rows += _rows(bucket, axis, parts)
    return rows


def _parts(axis: str, gap_ns: int, kinds: Sequence[CallTimes]) -> list[_Part]:
    """Of what the calls take longer, as much is exposed as explains the gap, at most all of it; the
    rest of the gap is what compute hides less of them, or more."""
    longer_ns = sum(one.extra_ns + one.slower_ns for one in kinds)
    share = min(1.0, max(0.0, gap_ns / longer_ns)) if longer_ns else 0.0
    parts = []
    for one in kinds:
        slower = "latency" if one.small else "link"
        parts += [
            _Part("calls", one.extra_ns * share, one.extra_words),
            _Part(slower, one.slower_ns * share, one.slower_words),
        ]
    left_ns = gap_ns - longer_ns * share
    words = "less" if left_ns > 0 else "more"
    message = f"{words} of what {axis} sends is hidden than the model says"
    return [*parts, _Part("overlap", left_ns, message)]


def _rows(bucket: str, axis: str, parts: Sequence[_Part]) -> Iterator[GapRow]:
    """The parts in whole ns that add up to what the parts do."""
    sum_ns, told = 0.0, 0
    for part in parts:
        sum_ns += part.ns
        yield GapRow(part.cause, bucket, axis, round(sum_ns) - told, part.message)
        told = round(sum_ns)


def _exposed_by_model(prediction: Prediction, stage: ComparedStage) -> dict[Key, int]:
    """The same of the prediction; what rounding leaves of a bucket is its largest axis's."""
    sums: dict[Key, int] = defaultdict(int)
    for one in prediction.communication:
        if one.message.stage == stage.stage and one.exposed_ns:
            sums[_bucket(one.message.op), one.message.axis] += one.exposed_ns
    for bucket, whole in (
        ("collective", stage.predicted.collective_ns),
        ("p2p", stage.predicted.p2p_ns),
    ):
        own = {key: ns for key, ns in sums.items() if key[0] == bucket}
        if whole != sum(own.values()):
            sums[max(own, key=lambda key: own[key], default=(bucket, "other"))] += whole - sum(
                own.values()
            )
    return dict(sums)


def _bucket(op: str) -> str:
    return "p2p" if op in MESSAGES else "collective"


# Calls of one axis and op in a step: how long they take, and how long the model says they do.

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
    seen: MeasuredComm, prediction: Prediction, price: Price, stage: ComparedStage
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


# What the model says of a call like one that it predicts, but of another size.

Price = Callable[[Communication, int], float]
"""(a predicted message, bytes of one call) -> how long a call like it of that size takes, in ns."""


def price_of(job: JobConfig, rates: Rates) -> Price:
    """The price of the job's calls; of a predicted size it is the prediction's own."""

    def price(like: Communication, message_bytes: int) -> float:
        message = like.message
        each_ns = like.time.ns / message.count
        if message_bytes == message.message_bytes:
            return each_ns
        own = replace(message, axis=group_axis(message.axis))
        there_ns = call_ns(job, own, rates).ns
        here_ns = call_ns(job, replace(own, message_bytes=message_bytes), rates).ns
        times = here_ns / there_ns if there_ns else message_bytes / message.message_bytes
        return each_ns * times

    return price
