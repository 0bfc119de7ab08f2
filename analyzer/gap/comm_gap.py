"""Measured and predicted communication: counts, bytes, times and bandwidth of each op."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.buckets import TRANSFERS, Bucket
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.prediction import GRADIENT_AXIS, Prediction, group_axis
from stepsplit.analyzer.model.rank_layout import place_group
from stepsplit.analyzer.ops import compute_busbw_factor
from stepsplit.analyzer.report.io import extract_job
from stepsplit.analyzer.report.report import ComparedCalls, ComparedStage, Report
from stepsplit.analyzer.split.issue_steps import build_host_steps, find_issue_step
from stepsplit.analyzer.split.mesh import DATA_AXES
from stepsplit.analyzer.split.mesh_inference import SCALAR_BYTES
from stepsplit.analyzer.split.overlap import compute_overlaps
from stepsplit.analyzer.split.run import RankSplit, RunSplit
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.trace import OPS
from stepsplit.collectors.formats.run_spec import DATA_PARALLEL

# The measured communication, by the axis names of the prediction.

_BUCKETS = {bucket: bucket.label for bucket in TRANSFERS}

Key = tuple[str, str]
"""(bucket, axis)"""

Sizes = Mapping[int, int]
"""Number of calls by message_bytes, -1 for unknown."""


@dataclass(frozen=True, slots=True)
class MeasuredComm:
    """A recording, its messages, and the predicted axis name of each measured axis and op."""

    split: RunSplit
    messages: Sequence[MeasuredMessages]
    axis_names: Mapping[Call, str]

    @classmethod
    def build(cls, split: RunSplit, prediction: Prediction) -> MeasuredComm:
        messages = collect_messages(split)
        return cls(split, messages, match_axis_names(messages, prediction))

    def count_sizes(self, stage: ComparedStage) -> dict[Call, Sizes]:
        """The calls in the stage's step by axis, op and size."""
        sizes: dict[Call, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for one in self.messages:
            if (one.rank, one.step) == (stage.rank, stage.step):
                sizes[self._identify_call(one.axis, one.op)][one.message_bytes] += one.count
        return {kind: dict(of_kind) for kind, of_kind in sizes.items()}

    def sum_moved_ns(
        self, rank: RankSplit, windows: Sequence[StepWindow]
    ) -> dict[Call, tuple[int, int]]:
        """(transfer time, exposed part) of a rank within the windows, by axis and op."""
        axes = list_group_names(self.split, rank)[:-1]
        rows = compute_overlaps(
            rank.trace.rank, rank.trace.calls, axes, windows,
            rank.pieces, rank.held, rank.work.compute,
        )  # fmt: skip
        sums: dict[Call, tuple[int, int]] = {}
        for row in rows:
            kind = self._identify_call(row.axis or UNKNOWN_GROUP, row.op)
            moved, exposed = sums.get(kind, (0, 0))
            sums[kind] = moved + row.moved_ns, exposed + row.exposed_ns
        return sums

    def sum_exposed_ns(self, stage: ComparedStage) -> dict[Key, int]:
        """Exposed transfers in the stage's step by bucket and axis; they add up to the buckets."""
        rank = self.find_rank(stage)
        window, exposed = rank.numbers.index(stage.step), rank.attribution.exposed
        axes, calls = list_group_names(self.split, rank), rank.trace.calls
        sums: dict[Key, int] = defaultdict(int)
        for row in (exposed.window == window).nonzero()[0].tolist():
            bucket = _BUCKETS.get(Bucket(exposed.bucket[row]))
            if bucket is not None:
                call = exposed.call[row]
                axis, _ = self._identify_call(axes[calls.group_id[call]], OPS[calls.op[call]])
                sums[bucket, axis] += int(exposed.end_ns[row] - exposed.start_ns[row])
        return dict(sums)

    def find_rank(self, stage: ComparedStage) -> RankSplit:
        """The rank of the stage's step."""
        return next(one for one in self.split.ranks if one.trace.rank == stage.rank)

    def _identify_call(self, axis: str, op: str) -> Call:
        """(axis name of the prediction, else the measured one; op)"""
        return self.axis_names.get((axis, op), axis), op


# Collectives and messages, measured and predicted: counts, sizes, times, exposed times.

_Kind = tuple[int, str, str]
"""(stage, axis, op)"""


def ignore_links(axis: str) -> AxisLink | None:
    """Every link is unknown."""
    return None


def compare_calls(
    comm: MeasuredComm, prediction: Prediction, links: LinkOfAxis = ignore_links
) -> tuple[ComparedCalls, ...]:
    """A row for each stage, axis and op of tensors, by the axis names of the prediction."""
    predicted: dict[_Kind, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in prediction.communication:
        times = predicted[one.message.stage, one.message.axis, one.message.op]
        times[0] += one.time.ns
        times[1] += one.exposed_ns
    # (transfer time, exposed part) of all ranks and steps of a stage.
    measured: dict[_Kind, list[int]] = defaultdict(lambda: [0, 0])
    steps: dict[int, int] = defaultdict(int)
    for rank in comm.split.ranks:
        stage, windows = comm.split.layout.find_stage(rank.trace.rank), rank.windows.counted
        steps[stage] += len(windows)
        for (axis, op), (moved, exposed) in comm.sum_moved_ns(rank, windows).items():
            measured[stage, axis, op][0] += moved
            measured[stage, axis, op][1] += exposed
    compared = []
    for row in compare_messages(comm.messages, prediction).rows:
        kind, link = (row.stage, row.axis, row.op), links(row.axis)
        time_ns, exposed_ns = (ns // max(steps[row.stage], 1) for ns in measured[kind])
        predicted_ns, predicted_exposed_ns = map(round, predicted[kind])
        compared.append(
            ComparedCalls(
                stage=row.stage,
                axis=row.axis,
                op=row.op,
                count=row.measured.count,
                predicted_count=row.predicted.count,
                bytes=row.measured.bytes,
                predicted_bytes=row.predicted.bytes,
                time_ns=time_ns,
                predicted_time_ns=predicted_ns,
                exposed_ns=exposed_ns,
                predicted_exposed_ns=predicted_exposed_ns,
                equal=row.equal,
                busbw_bytes_per_s=_compute_busbw(row.op, row.measured.bytes, time_ns, link),
                predicted_busbw_bytes_per_s=_compute_busbw(
                    row.op, row.predicted.bytes, predicted_ns, link
                ),
                link_bytes_per_s=link.bytes_per_s if link else None,
            )
        )
    return tuple(compared)


def _compute_busbw(
    op: str, total_bytes: int | None, time_ns: int, link: AxisLink | None
) -> float | None:
    """Bus bandwidth of all calls; None if size, time or ranks are unknown."""
    if not total_bytes or not time_ns or link is None:
        return None
    return total_bytes / (time_ns / 1e9) * compute_busbw_factor(op, link.ranks)


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
    parts: dict[Kind, list[Amount]] = defaultdict(list)
    for message in (one.message for one in prediction.communication):
        if message.stage in stages:
            is_scalar = message.message_bytes <= SCALAR_BYTES
            kind = (message.stage, message.axis, message.op, is_scalar)
            parts[kind].append(Amount(message.count, message.count * message.message_bytes))
    predicted = {kind: _sum(amounts) for kind, amounts in parts.items()}
    # The number of ranks and steps with each amount; one without such calls has an amount of zero.
    axis_names = match_axis_names(measured, prediction)
    found: dict[tuple[Kind, int, int], list[Amount]] = defaultdict(list)
    for one in measured:
        kind = (
            one.stage,
            axis_names[one.axis, one.op],
            one.op,
            one.op == "barrier" or (0 <= one.message_bytes <= SCALAR_BYTES),
        )
        size = one.message_bytes if one.op != "barrier" else 0
        total_bytes = one.count * size if size >= 0 else None
        found[kind, one.rank, one.step].append(Amount(one.count, total_bytes))
    everywhere = {(one.stage, one.rank, one.step) for one in measured}
    counts: dict[Kind, Counter[Amount]] = defaultdict(Counter)
    for kind in {kind for kind, _, _ in found}:
        for _, rank, step in (at for at in everywhere if at[0] == kind[0]):
            counts[kind][_sum(found.get((kind, rank, step), []))] += 1

    rows: list[MessageRow] = []
    scalars: list[MessageRow] = []
    for kind in sorted({*counts, *predicted}):
        amounts = counts.get(kind, Counter({_NONE: 1}))
        usual = min(amounts, key=lambda one: (-amounts[one], one.count, one.bytes or 0))
        stage, axis, op, is_scalar = kind
        row = MessageRow(stage, axis, op, usual, predicted.get(kind, _NONE), len(amounts) > 1)
        (scalars if is_scalar else rows).append(row)
    return MessageComparison(rows=tuple(rows), scalars=tuple(scalars))


_NONE = Amount(0, 0)


def match_axis_names(
    measured: Sequence[MeasuredMessages], prediction: Prediction
) -> Mapping[Call, str]:
    """The axis name of the prediction for each measured axis and op.

    FSDP shards over dp_shard and cp together, and gradients are also reduced over cp. A single data
    axis on both sides is the same one, whatever its name in the mesh.
    """
    stages = {one.stage for one in measured}
    predicted = {c.message.axis for c in prediction.communication if c.message.stage in stages}
    names = {(one.axis, one.op): one.axis for one in measured}
    data = set()
    for axis, _ in names:
        parts = set(axis.split(" x "))
        if parts <= DATA_AXES and parts != {"cp"}:  # which is one only together with another axis
            data.add(axis)
    data_names = sorted(predicted & {*DATA_PARALLEL, GRADIENT_AXIS})
    for axis, op in names:
        parts = set(axis.split(" x "))
        if axis in data and "dp_shard" in data_names and "dp_shard" in parts:
            names[axis, op] = "dp_shard"
        elif axis in data and len(data) == len(data_names) == 1:
            names[axis, op] = data_names[0]
        elif parts == {"cp"} and op == "all_reduce" and GRADIENT_AXIS in data_names and not data:
            names[axis, op] = GRADIENT_AXIS
    return names


def _sum(amounts: Sequence[Amount]) -> Amount:
    sizes = [amount.bytes for amount in amounts]
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    return Amount(sum(amount.count for amount in amounts), total)


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


def collect_messages(split: RunSplit) -> tuple[MeasuredMessages, ...]:
    """The messages of every rank and full step, in order of rank, step, axis, op and size.

    A collective or message with several kernels counts once; sends and receives count separately.
    """
    messages = []
    for i, rank in enumerate(split.ranks):
        trace, steps = rank.trace, build_host_steps(rank.trace, rank.windows)
        leads = split.matched.counts[split.matched.slice_trace(i)]
        calls, step = trace.calls, find_issue_step(trace, steps, leads)
        rows, axes = np.flatnonzero(step >= 0), list_group_names(split, rank)
        columns = (step[rows], calls.group_id[rows], calls.op[rows], calls.message_bytes[rows])
        kinds = Counter(
            (steps.number[at], axes[group], OPS[op], size)
            for at, group, op, size in zip(*(column.tolist() for column in columns), strict=True)
        )
        stage = split.layout.find_stage(trace.rank)
        messages += [
            MeasuredMessages(trace.rank, stage, *kind, count)
            for kind, count in sorted(kinds.items())
        ]
    return tuple(messages)


def list_group_names(split: RunSplit, rank: RankSplit) -> tuple[str, ...]:
    """The axes of each group of the rank, from the layout or the only strategy over as many ranks,
    else the group's description or number of ranks; followed (index -1) by the name of unknown
    groups."""
    layout, names = split.layout, []
    for group in rank.trace.groups:
        axis = layout.find_axis(group)
        along = {one.axis for one in split.strategies if one.size == len(group.ranks)} - {None}
        inferred = next(iter(along)) if len(along) == 1 and not layout.is_stated else None
        # Gradients may be reduced over the ranks of a cp axis that is inferred from attention only.
        if inferred is not None and (inferred == "cp" or (axis is None and layout.mesh is None)):
            names.append(inferred)
            continue
        names.append(layout.name_group(group) or f"{len(group.ranks)} ranks")
    return (*names, UNKNOWN_GROUP)


# The bus bandwidth predicted by the model over message sizes.

_POINTS = 40


@dataclass(frozen=True, slots=True)
class ModeledBusbw:
    """Predicted busbw by message size, and the peak of the slowest link per GPU and direction."""

    message_bytes: tuple[float, ...]
    busbw_bytes_per_s: tuple[float, ...]
    link_bytes_per_s: float


def model_busbw(
    report: Report, axis: str, op: str, min_bytes: int, max_bytes: int
) -> ModeledBusbw | None:
    """The model's busbw curve for an op on an axis of the run, by the closed form.

    None if the report has no job config, or the model does not know the op or axis.
    """
    try:
        job = extract_job(report)
        link = None if job is None else build_link_lookup(job)(axis)
    except StepsplitError:
        return None
    if job is None or link is None or op not in TIMED_OPS:
        return None
    min_bytes = max(min_bytes, 1)
    times = (max_bytes / min_bytes) ** (1 / (_POINTS - 1))
    sizes = tuple(min_bytes * times**i for i in range(_POINTS))
    span = place_group(job, axis)
    factor = compute_busbw_factor(op, span.ranks)
    busbw = (size / time_of(op, size, span, job.hardware).ns * 1e9 * factor for size in sizes)
    return ModeledBusbw(sizes, tuple(busbw), link.bytes_per_s)


# The links of each axis, for comparison with measured bandwidths.


@dataclass(frozen=True, slots=True)
class AxisLink:
    """The number of ranks of a group on an axis, and the nominal peak of the slowest link between
    them, per GPU and direction."""

    ranks: int
    bytes_per_s: float


LinkOfAxis = Callable[[str], AxisLink | None]
"""axis name of the prediction -> its link; None if the axis has no link."""

_LINK_AXES = ("tp", "cp", "ep", "pp", "dp", "dp_shard", "dp_replicate")


def build_link_lookup(job: JobConfig) -> LinkOfAxis:
    """The links of the job's hardware by axis."""

    def find_link(axis: str) -> AxisLink | None:
        name = group_axis(axis)
        if name not in _LINK_AXES:
            return None
        span = place_group(job, name)
        link = job.hardware.inter if span.nodes > 1 else job.hardware.intra
        return AxisLink(span.ranks, link.bytes_per_s) if span.ranks > 1 else None

    return find_link
