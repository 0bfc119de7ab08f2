"""Measured and predicted communication: counts, bytes, times and bandwidth of each op."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config import JobConfig, span_of
from stepsplit.analyzer.model.prediction import GRADIENT_AXIS, Prediction, group_axis
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.report.io import job_of_report
from stepsplit.analyzer.report.report import ComparedCalls, ComparedStage, Report
from stepsplit.analyzer.split.attribute import overlaps_of
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.strategy_evidence import axis_named, host_steps, issued_in
from stepsplit.analyzer.split.transfers import COLLECTIVE, P2P
from stepsplit.analyzer.trace import OPS, Bool, Group
from stepsplit.collectors.run_spec import DATA_PARALLEL

# The measured communication, by the axis names of the prediction.

_BUCKETS = {COLLECTIVE: "collective", P2P: "p2p"}

Key = tuple[str, str]
"""(bucket, axis)"""

Sizes = Mapping[int, int]
"""Number of calls by message_bytes, -1 for unknown."""


@dataclass(frozen=True, slots=True)
class MeasuredComm:
    """A recording, its messages, and the predicted axis name of each measured axis and op."""

    found: RunSplit
    messages: Sequence[MeasuredMessages]
    words: Mapping[Call, str]

    @classmethod
    def of(cls, found: RunSplit, prediction: Prediction) -> MeasuredComm:
        messages = measured_messages(found)
        return cls(found, messages, axis_words(messages, prediction))

    def sizes(self, stage: ComparedStage) -> dict[Call, Sizes]:
        """The calls in the stage's step by axis, op and size."""
        sizes: dict[Call, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for one in self.messages:
            if (one.rank, one.step) == (stage.rank, stage.step):
                sizes[self._kind(one.axis, one.op)][one.message_bytes] += one.count
        return {kind: dict(of_kind) for kind, of_kind in sizes.items()}

    def moved_ns(
        self, rank: RankSplit, windows: Sequence[StepWindow]
    ) -> dict[Call, tuple[int, int]]:
        """(transfer time, exposed part) of a rank within the windows, by axis and op."""
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
        """Exposed transfers in the stage's step by bucket and axis; they add up to the buckets."""
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
        """The rank of the stage's step."""
        return next(one for one in self.found.ranks if one.trace.rank == stage.rank)

    def _kind(self, axis: str, op: str) -> Call:
        """(axis name of the prediction, else the measured one; op)"""
        return self.words.get((axis, op), axis), op


# Collectives and messages, measured and predicted: counts, sizes, times, exposed times.

_Kind = tuple[int, str, str]
"""(stage, axis, op)"""

_Times = dict[_Kind, tuple[int, int]]


def no_wires(axis: str) -> Wire | None:
    """Every link is unknown."""
    return None


def compared_calls(
    seen: MeasuredComm, prediction: Prediction, wires: Wires = no_wires
) -> tuple[ComparedCalls, ...]:
    """A row for each stage, axis and op of tensors, by the axis names of the prediction."""
    rows = compare_messages(seen.messages, prediction).rows
    measured, predicted = _measured_times(seen), _predicted_times(prediction)
    return tuple(_compared_calls(row, measured, predicted, wires(row.axis)) for row in rows)


def _compared_calls(
    row: MessageRow, measured: _Times, predicted: _Times, wire: Wire | None
) -> ComparedCalls:
    kind = (row.stage, row.axis, row.op)
    (time_ns, exposed_ns), (expected_ns, left_ns) = (
        times.get(kind, (0, 0)) for times in (measured, predicted)
    )
    return ComparedCalls(
        stage=row.stage,
        axis=row.axis,
        op=row.op,
        count=row.measured.count,
        predicted_count=row.predicted.count,
        bytes=row.measured.bytes,
        predicted_bytes=row.predicted.bytes,
        time_ns=time_ns,
        predicted_time_ns=expected_ns,
        exposed_ns=exposed_ns,
        predicted_exposed_ns=left_ns,
        equal=row.equal,
        busbw_bytes_per_s=_busbw_of_calls(row.op, row.measured.bytes, time_ns, wire),
        predicted_busbw_bytes_per_s=_busbw_of_calls(row.op, row.predicted.bytes, expected_ns, wire),
        link_bytes_per_s=wire.bytes_per_s if wire else None,
    )


def _busbw_of_calls(
    op: str, total_bytes: int | None, time_ns: int, wire: Wire | None
) -> float | None:
    """Bus bandwidth of all calls; None if size, time or ranks are unknown."""
    if not total_bytes or not time_ns or wire is None:
        return None
    return total_bytes / (time_ns / 1e9) * busbw_factor(op, wire.ranks)


def _measured_times(seen: MeasuredComm) -> _Times:
    """(transfer time, exposed part) per step of the mean rank, by kind."""
    sums: dict[_Kind, list[int]] = defaultdict(lambda: [0, 0])
    steps: dict[int, int] = defaultdict(int)
    for rank in seen.found.ranks:
        stage, windows = seen.found.layout.stage(rank.trace.rank), rank.windows.counted
        steps[stage] += len(windows)
        for (axis, op), (moved, held) in seen.moved_ns(rank, windows).items():
            total = sums[stage, axis, op]
            total[0] += moved
            total[1] += held
    return {kind: (moved // steps[kind[0]], held // steps[kind[0]])
            for kind, (moved, held) in sums.items()}  # fmt: skip


def _predicted_times(prediction: Prediction) -> _Times:
    sums: dict[_Kind, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in prediction.communication:
        total = sums[one.message.stage, one.message.axis, one.message.op]
        total[0] += one.time.ns
        total[1] += one.exposed_ns
    return {kind: (round(time), round(held)) for kind, (time, held) in sums.items()}


# Measured and predicted messages of a step, compared exactly.

Kind = tuple[int, str, str, bool]
"""(stage, axis, op, whether scalar)"""

Call = tuple[str, str]
"""(axis, op)"""


@dataclass(frozen=True, slots=True)
class Amount:
    """Number of calls of one rank in a step and their total message bytes; None if unknown."""

    count: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class MessageRow:
    """One axis and op of a rank of a stage in a full step, measured and predicted.

    measured is the most frequent amount over the ranks and steps; varies if others occur.
    """

    stage: int
    axis: str
    op: str
    measured: Amount
    predicted: Amount
    varies: bool = False

    @property
    def equal(self) -> bool:
        """Whether calls and bytes are exactly as predicted on all ranks and steps."""
        return self.measured == self.predicted and not self.varies


@dataclass(frozen=True, slots=True)
class MessageComparison:
    """rows are the tensors; scalars the calls of SCALAR_BYTES or less, and barriers."""

    rows: tuple[MessageRow, ...]
    scalars: tuple[MessageRow, ...]

    @property
    def equal(self) -> bool:
        """Whether all tensors are as predicted."""
        return all(row.equal for row in self.rows)


def compare_messages(
    measured: Sequence[MeasuredMessages], prediction: Prediction
) -> MessageComparison:
    """Compare measured and predicted messages, in order of stage, axis and op.

    Stages without a recorded rank are left out.
    """
    stages = {one.stage for one in measured}
    predicted = [c.message for c in prediction.communication if c.message.stage in stages]
    there, here = (
        _predicted_amounts(predicted),
        _measured_amounts(measured, axis_words(measured, prediction)),
    )
    rows = [(kind, _message_row(kind, here, there)) for kind in sorted({*here, *there})]
    return MessageComparison(
        rows=tuple(row for (*_, scalar), row in rows if not scalar),
        scalars=tuple(row for (*_, scalar), row in rows if scalar),
    )


def axis_words(measured: Sequence[MeasuredMessages], prediction: Prediction) -> Mapping[Call, str]:
    """The axis name of the prediction for each measured axis and op."""
    stages = {one.stage for one in measured}
    predicted = {c.message.axis for c in prediction.communication if c.message.stage in stages}
    return _words({(one.axis, one.op) for one in measured}, predicted)


def _message_row(
    kind: Kind, here: Mapping[Kind, Counter[Amount]], there: Mapping[Kind, Amount]
) -> MessageRow:
    seen = here.get(kind, Counter({_NONE: 1}))
    usual = min(seen, key=lambda amount: (-seen[amount], amount.count, amount.bytes or 0))
    stage, axis, op, _ = kind
    return MessageRow(stage, axis, op, usual, there.get(kind, _NONE), len(seen) > 1)


_NONE = Amount(0, 0)


def _predicted_amounts(messages: Iterable[CommOp]) -> dict[Kind, Amount]:
    parts: dict[Kind, list[Amount]] = defaultdict(list)
    for one in messages:
        kind = (one.stage, one.axis, one.op, one.message_bytes <= SCALAR_BYTES)
        parts[kind].append(Amount(one.count, one.count * one.message_bytes))
    return {kind: _sum(amounts) for kind, amounts in parts.items()}


def _measured_amounts(
    messages: Sequence[MeasuredMessages], words: Mapping[Call, str]
) -> dict[Kind, Counter[Amount]]:
    """The number of ranks and steps with each amount, zero amounts included."""
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
    """The axis name of the prediction for each measured axis and op.

    FSDP shards over dp_shard and cp together, and gradients are also reduced over cp. A single data
    axis on both sides is the same one, whatever its name in the mesh.
    """
    data = sorted({axis for axis, _ in measured if _is_data(axis)})
    called = sorted(predicted & {*DATA_PARALLEL, GRADIENT_AXIS})
    words = {call: call[0] for call in measured}
    for axis, op in measured:
        parts = set(axis.split(" x "))
        if axis in data and "dp_shard" in called and "dp_shard" in parts:
            words[axis, op] = "dp_shard"
        elif axis in data and len(data) == len(called) == 1:
            words[axis, op] = called[0]
        elif parts == {"cp"} and op == "all_reduce" and GRADIENT_AXIS in called and not data:
            words[axis, op] = GRADIENT_AXIS
    return words


def _is_data(axis: str) -> bool:
    """Whether it is a data-parallel axis; cp is one only together with another axis."""
    axes = set(axis.split(" x "))
    return axes <= DATA_AXES and axes != {"cp"}


# The messages of each rank in each full step, counted by axis, op and size.

UNKNOWN_GROUP = "group unknown"


@dataclass(frozen=True, slots=True)
class MeasuredMessages:
    """`count` calls of one kind by one rank in the full step in which the host issued them.

    axis is a mesh axis, several as "dp_shard x cp", else the description of the group.
    message_bytes is the size of one call in the convention of nccl-tests, -1 if unknown.
    """

    rank: int
    stage: int
    step: int
    axis: str
    op: str
    message_bytes: int
    count: int


def measured_messages(found: RunSplit) -> tuple[MeasuredMessages, ...]:
    """The messages of every rank and full step, in order of rank, step, axis, op and size.

    A collective or message with several kernels counts once; sends and receives count separately.
    """
    leads = [found.matched.leads[found.matched.of_trace(i)] for i in range(len(found.ranks))]
    return tuple(
        message
        for rank, first in zip(found.ranks, leads, strict=True)
        for message in _of_rank(rank, first, found)
    )


def _of_rank(rank: RankSplit, leads: Bool, found: RunSplit) -> list[MeasuredMessages]:
    trace, steps = rank.trace, host_steps(rank.trace, rank.windows)
    calls, step = trace.calls, issued_in(trace, steps, leads)
    rows, axes = np.flatnonzero(step >= 0), axes_in_words(found, rank)
    columns = (step[rows], calls.group_id[rows], calls.op[rows], calls.message_bytes[rows])
    kinds = Counter(
        (steps.number[at], axes[group], OPS[op], size)
        for at, group, op, size in zip(*(column.tolist() for column in columns), strict=True)
    )
    stage = found.layout.stage(trace.rank)
    return [MeasuredMessages(trace.rank, stage, *kind, kinds[kind]) for kind in sorted(kinds)]


def axes_in_words(found: RunSplit, rank: RankSplit) -> tuple[str, ...]:
    """The axes of each group of the rank, followed (index -1) by the name of unknown groups."""
    return (*(axis_in_words(found, group) for group in rank.trace.groups), UNKNOWN_GROUP)


def axis_in_words(found: RunSplit, group: Group) -> str:
    """The axes of a group, from the layout or the only strategy over as many ranks; if unknown its
    description, or its number of ranks.

    Gradients may be reduced over the ranks of a cp axis that is inferred from attention only.
    """
    layout, axis = found.layout, found.layout.axis_of(group)
    along = {one.axis for one in found.strategies if one.size == len(group.ranks)} - {None}
    told = next(iter(along)) if len(along) == 1 and layout.source != "run.json" else None
    if told is not None and (told == "cp" or (axis is None and layout.mesh is None)):
        return told
    described = group.description or f"{len(group.ranks)} ranks"
    return axis or axis_named(layout.axes_of(group), described)


# The bus bandwidth predicted by the model over message sizes.

_POINTS = 40


@dataclass(frozen=True, slots=True)
class ModelledBusbw:
    """Predicted busbw by message size, and the peak of the slowest link per GPU and direction."""

    message_bytes: tuple[float, ...]
    busbw_bytes_per_s: tuple[float, ...]
    link_bytes_per_s: float


def modelled_busbw(
    report: Report, axis: str, op: str, least_bytes: int, most_bytes: int
) -> ModelledBusbw | None:
    """The model's busbw curve for an op on an axis of the run, by the closed form.

    None if the report has no job config, or the model does not know the op or axis.
    """
    try:
        job = job_of_report(report)
        wire = None if job is None else wires_of(job)(axis)
    except StepsplitError:
        return None
    if job is None or wire is None or op not in TIMED_OPS:
        return None
    least_bytes = max(least_bytes, 1)
    times = (most_bytes / least_bytes) ** (1 / (_POINTS - 1))
    sizes = tuple(least_bytes * times**i for i in range(_POINTS))
    return ModelledBusbw(
        sizes, tuple(_modelled_busbw(job, axis, op, each) for each in sizes), wire.bytes_per_s
    )


def _modelled_busbw(job: JobConfig, axis: str, op: str, message_bytes: float) -> float:
    span = span_of(job, axis)
    took_ns = time_of(op, message_bytes, span, job.hardware).ns
    return message_bytes / took_ns * 1e9 * busbw_factor(op, span.ranks)


# The links of each axis, for comparison with measured bandwidths.


@dataclass(frozen=True, slots=True)
class Wire:
    """The number of ranks of a group on an axis, and the nominal peak of the slowest link between
    them, per GPU and direction."""

    ranks: int
    bytes_per_s: float


Wires = Callable[[str], Wire | None]
"""axis name of the prediction -> its link; None if the axis has no link."""

_KNOWN = ("tp", "cp", "ep", "pp", "dp", "dp_shard", "dp_replicate")


def wires_of(job: JobConfig) -> Wires:
    """The links of the job's hardware by axis."""

    def wire(axis: str) -> Wire | None:
        name = group_axis(axis)
        if name not in _KNOWN:
            return None
        span = span_of(job, name)
        link = job.hardware.inter if span.nodes > 1 else job.hardware.intra
        return Wire(span.ranks, link.bytes_per_s) if span.ranks > 1 else None

    return wire
