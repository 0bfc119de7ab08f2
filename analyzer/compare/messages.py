"""The messages of a step as measured beside those that the model predicts: exact, no tolerance."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stepsplit.analyzer.compare.measured import MeasuredMessages
from stepsplit.analyzer.model.comm_ops import Message
from stepsplit.analyzer.model.prediction import Prediction
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES

_DATA = ("dp_replicate", "dp_shard")
_SUMS_TOO = "dp_cp"
"""The prediction's word for all ranks that sum gradients, where those of cp are among them."""
Kind = tuple[int, str, str, bool]
"""(stage, axis, op, whether scalar)"""
Call = tuple[str, str]
"""(axis, op)"""


@dataclass(frozen=True, slots=True)
class Amount:
    """Calls of one rank in a step, and the message bytes of all of them; None is unknown."""

    count: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One axis and op of a rank of a stage in a full step, measured and predicted.

    measured is what most ranks and steps of the stage have; varies says that not all do.
    """

    stage: int
    axis: str
    op: str
    measured: Amount
    predicted: Amount
    varies: bool = False

    @property
    def equal(self) -> bool:
        """Whether the model is right to the call and to the byte, on all ranks and steps."""
        return self.measured == self.predicted and not self.varies


@dataclass(frozen=True, slots=True)
class MessageComparison:
    """rows hold the tensors; scalars what is of SCALAR_BYTES or less, sends and receives too, and
    barriers."""

    rows: tuple[MessageRow, ...]
    scalars: tuple[MessageRow, ...]

    @property
    def equal(self) -> bool:
        """Whether all tensors are as predicted."""
        return all(row.equal for row in self.rows)


def compare_messages(
    measured: Sequence[MeasuredMessages], prediction: Prediction
) -> MessageComparison:
    """Measured and predicted messages side by side, in order of stage, axis and op.

    Stages of which no rank is in the recording are left out.
    """
    stages = {one.stage for one in measured}
    predicted = [c.message for c in prediction.communication if c.message.stage in stages]
    there, here = _predicted(predicted), _measured(measured, axis_words(measured, prediction))
    rows = [(kind, _row(kind, here, there)) for kind in sorted({*here, *there})]
    return MessageComparison(
        rows=tuple(row for (*_, scalar), row in rows if not scalar),
        scalars=tuple(row for (*_, scalar), row in rows if scalar),
    )


def axis_words(measured: Sequence[MeasuredMessages], prediction: Prediction) -> Mapping[Call, str]:
    """The prediction's word for the axis of each measured axis and op."""
    stages = {one.stage for one in measured}
    predicted = {c.message.axis for c in prediction.communication if c.message.stage in stages}
    return _words({(one.axis, one.op) for one in measured}, predicted)


def _row(
    kind: Kind, here: Mapping[Kind, Counter[Amount]], there: Mapping[Kind, Amount]
) -> MessageRow:
    seen = here.get(kind, Counter({_NONE: 1}))
    usual = min(seen, key=lambda amount: (-seen[amount], amount.count, amount.bytes or 0))
    stage, axis, op, _ = kind
    return MessageRow(stage, axis, op, usual, there.get(kind, _NONE), len(seen) > 1)


_NONE = Amount(0, 0)


def _predicted(messages: Iterable[Message]) -> dict[Kind, Amount]:
    parts: dict[Kind, list[Amount]] = defaultdict(list)
    for one in messages:
        kind = (one.stage, one.axis, one.op, one.message_bytes <= SCALAR_BYTES)
        parts[kind].append(Amount(one.count, one.count * one.message_bytes))
    return {kind: _sum(amounts) for kind, amounts in parts.items()}


def _measured(
    messages: Sequence[MeasuredMessages], words: Mapping[Call, str]
) -> dict[Kind, Counter[Amount]]:
    """How many ranks and steps have each amount; a rank that lacks a kind in a step has none."""
    parts: dict[tuple[Kind, int, int], list[Amount]] = defaultdict(list)
    for one in messages:
        kind = (one.stage, words[one.axis, one.op], one.op, one.op == "barrier" or _is_scalar(one))
        size = one.message_bytes if one.op != "barrier" else 0
        parts[kind, one.rank, one.step].append(_times(one.count, size))
    everywhere = {(one.stage, one.rank, one.step) for one in messages}
    found: dict[Kind, Counter[Amount]] = defaultdict(Counter)
    for kind in {kind for kind, _, _ in parts}:
        for _, rank, step in (at for at in everywhere if at[0] == kind[0]):
            found[kind][_sum(parts.get((kind, rank, step), []))] += 1
    return found


def _is_scalar(one: MeasuredMessages) -> bool:
    return 0 <= one.message_bytes <= SCALAR_BYTES


def _times(count: int, message_bytes: int) -> Amount:
    return Amount(count, count * message_bytes if message_bytes >= 0 else None)


def _sum(amounts: Sequence[Amount]) -> Amount:
    sizes = [amount.bytes for amount in amounts]
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    return Amount(sum(amount.count for amount in amounts), total)


def _words(measured: set[Call], predicted: set[str]) -> dict[Call, str]:
    """The prediction's word for each measured axis and op.

    FSDP shards over dp_shard and cp together, and gradients are summed over cp too. One data axis
    on either side is the same one, whatever the mesh calls it.
    """
    data = sorted({axis for axis, _ in measured if _is_data(axis)})
    called = sorted(predicted & {*_DATA, _SUMS_TOO})
    words = {call: call[0] for call in measured}
    for axis, op in measured:
        parts = set(axis.split(" x "))
        if axis in data and "dp_shard" in called and "dp_shard" in parts:
            words[axis, op] = "dp_shard"
        elif axis in data and len(data) == len(called) == 1:
            words[axis, op] = called[0]
        elif parts == {"cp"} and op == "all_reduce" and _SUMS_TOO in called and not data:
            words[axis, op] = _SUMS_TOO
    return words


def _is_data(axis: str) -> bool:
    """Whether ranks along it see different data; cp belongs to them where it is beside another."""
    axes = set(axis.split(" x "))
    return axes <= {*_DATA, "cp"} and axes != {"cp"}
