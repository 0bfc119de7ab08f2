"""Why communication holds a stage up longer, or shorter, than predicted: axis by axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.compare.gap.kinds import CallTimes, call_times
from stepsplit.analyzer.compare.gap.price import Price
from stepsplit.analyzer.compare.gap.seen import Key, Seen
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.report.report import ComparedStage, GapRow

_MESSAGES = ("send", "recv")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of what one axis holds a step up longer than predicted, in ns."""

    cause: str
    ns: float
    message: str


def explained_calls(
    seen: Seen, prediction: Prediction, price: Price, stage: ComparedStage
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
    return "p2p" if op in _MESSAGES else "collective"
