"""The numbers of a step for other tools: their names and units, and the points that carry them.

Every sink uses this table. There is no label for the rank: the worst rank is a value.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.ledger import Ledger
from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.report.step_rows import compute_step_median_ns, select_full_steps
from stepsplit.analyzer.watch.records import RankSample, WatchBatch
from stepsplit.analyzer.watch.samples import choose_median_step, split_ranks
from stepsplit.collectors.formats.watch_notes import RankWindow
from stepsplit.collectors.record.log_to import STEP
from stepsplit.collectors.safe_io.safe_text import escape_controls

PREFIX = "stepsplit"


@dataclass(frozen=True, slots=True)
class SinkMetric:
    """A number with its name in every kind of tool.

    Attributes:
        tracker: The name in TensorBoard, W&B and MLflow, with {key} for the value of the label; ""
            if it is only served for Prometheus.
        otlp: The name in OpenTelemetry; "" as above.
        prometheus: The name in Prometheus, where it is known of a watched run; "" if it is not.
        unit: The unit as OpenTelemetry writes it: s, or 1 for a ratio or a number.
        text: What it is.
        label: The name of its label or attribute; "" without one.
        key_names: What stands for some values of the label in the name for trackers.
    """

    tracker: str
    otlp: str
    prometheus: str
    unit: str
    text: str
    label: str = ""
    key_names: Mapping[str, str] = field(default_factory=dict, hash=False)


STEP_TIME = SinkMetric(
    "step_time{key}_s",
    "stepsplit.step.duration",
    "stepsplit_watch_step_seconds",
    "s",
    "Step time: shortest, median and longest, as quantiles 0, 0.5 and 1 over steps and ranks.",
    "quantile",
    {"0": "_min", "0.5": "", "1": "_max"},
)

SHARE = SinkMetric(
    "{key}_share",
    "stepsplit.step.share",
    "stepsplit_watch_share",
    "1",
    "Part of the step in each of the seven buckets, over all sampled ranks; they add up to 1.",
    "bucket",
)

EXPOSED = SinkMetric(
    "exposed_{key}_s",
    "stepsplit.exposed.duration",
    "stepsplit_watch_exposed_seconds",
    "s",
    "Exposed communication in a step by mesh axis, in the mean of the sampled ranks.",
    "axis",
)

LATE = SinkMetric(
    "late_s",
    "stepsplit.late.duration",
    "stepsplit_watch_late_seconds",
    "s",
    "How much later than the lower median of the ranks the worst rank has its last gradient, by"
    " steps without the profiler.",
)

WORST_RANK = SinkMetric(
    "worst_rank",
    "stepsplit.worst_rank",
    "stepsplit_watch_worst_rank",
    "1",
    "The rank that is latest; missing if none is late.",
)

CAUSED_WAIT = SinkMetric(
    "caused_wait_s",
    "stepsplit.caused_wait.duration",
    "stepsplit_watch_caused_wait_seconds",
    "s",
    "How long the other ranks wait in a step for the rank that causes most waits, in their mean.",
)

CAUSED_WAIT_RANK = SinkMetric(
    "caused_wait_rank",
    "stepsplit.caused_wait.rank",
    "stepsplit_watch_caused_wait_rank",
    "1",
    "The rank that causes most waits; missing if none is caused by a rank.",
)

OVERHEAD = SinkMetric(
    "overhead_ratio",
    "stepsplit.overhead.ratio",
    "stepsplit_watch_overhead_ratio",
    "1",
    "Part of the training time that samples have cost since the start of the job.",
)

LEVEL = SinkMetric(
    "",
    "",
    "stepsplit_watch_level_ratio",
    "1",
    "Median step time of the last ten minutes, divided by that of the first hour of this start.",
    "metric",
)

LAST_SAMPLE = SinkMetric(
    "",
    "",
    "stepsplit_watch_last_sample_timestamp_seconds",
    "s",
    "When the newest sample that counts was recorded, in seconds since 1970.",
)

LAST_DATA = SinkMetric(
    "",
    "",
    "stepsplit_watch_last_data_timestamp_seconds",
    "s",
    "When the newest batch of any host was closed, in seconds since 1970.",
)

DROPPED = SinkMetric(
    "",
    "",
    "stepsplit_watch_dropped_total",
    "1",
    "What was given up, by reason.",
    "reason",
)

LEDGER = SinkMetric(
    "ledger_{key}_s",
    "stepsplit.ledger.duration",
    "stepsplit_watch_ledger_seconds",
    "s",
    "What the wall clock of the whole job went to until now, by row, in the mean of the ranks; the"
    " rows add up to it.",
    "row",
)

GPU_HOURS = SinkMetric(
    "gpu_hours_{key}",
    "stepsplit.ledger.gpu_time",
    "stepsplit_watch_ledger_gpu_hours",
    "h",
    "What that cost in GPU hours, by row.",
    "row",
)

GOODPUT = SinkMetric(
    "goodput_ratio",
    "stepsplit.goodput.ratio",
    "stepsplit_watch_goodput_ratio",
    "1",
    "Part of the wall clock in steps that count.",
)

GOODPUT_IS_BOUND = SinkMetric(
    "goodput_is_bound",
    "stepsplit.goodput.is_bound",
    "stepsplit_watch_goodput_is_bound",
    "1",
    "1 if the goodput is the most that it can be, since something of the job is not known, else 0.",
)

METRICS = (
    STEP_TIME, SHARE, EXPOSED, CAUSED_WAIT, CAUSED_WAIT_RANK, LATE, WORST_RANK, OVERHEAD, LEVEL,
    LAST_SAMPLE, LAST_DATA, DROPPED, GOODPUT, GOODPUT_IS_BOUND, LEDGER, GPU_HOURS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value of a metric; key: the value of its label, "" without one."""

    metric: SinkMetric
    value: float
    key: str = ""

    @property
    def name(self) -> str:
        """The name in TensorBoard, W&B and MLflow."""
        key = self.metric.key_names.get(self.key, self.key)
        return f"{PREFIX}/{_NOT_PLAIN.sub('_', self.metric.tracker.replace('{key}', key))}"


_NOT_PLAIN = re.compile(r"[^\w.-]+")

UNKNOWN_AXIS = "unknown"
"""Stands for communication that is not on a single axis of the mesh."""


@dataclass(frozen=True, slots=True)
class ScalarPoint:
    """The numbers of one step of a run, and when it was."""

    run: str
    step: int
    unix_ns: int
    scalars: tuple[Scalar, ...]

    @property
    def values(self) -> dict[str, float]:
        """Its step and numbers, by their names in trackers."""
        return {STEP: self.step, **{one.name: one.value for one in self.scalars}}


class SinkError(UsageError):
    """A sink cannot be opened or reached, or refuses; the message is one line that names it."""


class Sink(Protocol):
    """A tool that takes points."""

    @property
    def name(self) -> str:
        """What it is and where, for messages."""

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Writes the points. Raises SinkError if they are to be written again later."""

    def close(self) -> None:
        """Ends the connection. Raises SinkError if written points are known to be lost."""


# Points of a recording and of a watch.


def build_report_points(report: Report) -> tuple[ScalarPoint, ...]:
    """The point of a recording: its median step, as of a sample of a watch, at that step's number.

    Step times are over all recorded steps. Raises UsageError if no step is whole.
    """
    full = [row for row in select_full_steps(report.steps) if row.kind == "full"]
    if not full:
        raise UsageError(f"{report.run.name}: no recorded step is whole, so there is no number")
    step = choose_median_step(report.steps)
    durations = [row.step_ns for row in full]
    times = build_step_scalars(min(durations), compute_step_median_ns(full), max(durations))
    t0_ns = int(report.run.t0_unix_ns)
    unix_ns = t0_ns + max(row.start_ns + row.step_ns for row in full if row.step == step)
    # A trace without a clock has no date; trackers need one.
    when_ns = unix_ns if t0_ns else time.time_ns()
    splits = build_split_scalars(split_ranks(report))
    return (ScalarPoint(escape_controls(report.run.name), step, when_ns, (*times, *splits)),)


def build_batch_points(batch: WatchBatch) -> tuple[ScalarPoint, ...]:
    """The points of a batch of a watch: its step times, each sample that counts, and the ledger, by
    step."""
    points = [_build_window_point(batch)] if batch.windows else []
    name = escape_controls(batch.run)
    overhead = () if batch.overhead is None else (Scalar(OVERHEAD, batch.overhead),)
    # A sample without data has no ranks.
    for one in batch.samples:
        if one.ranks:
            scalars = (*build_split_scalars(one.ranks), *overhead)
            points.append(ScalarPoint(name, one.step, one.unix_ns, scalars))
    if (ledger := batch.ledger) is not None:
        steps = [one.last_step or 0 for one in ledger.incarnations]
        points.append(ScalarPoint(name, max(steps), batch.unix_ns, build_ledger_scalars(ledger)))
    return tuple(sorted(points, key=lambda point: point.step))


def _build_window_point(batch: WatchBatch) -> ScalarPoint:
    windows = batch.windows
    times = build_step_scalars(
        min(one.min_step_ns for one in windows),
        find_median_step_ns(windows),
        max(one.max_step_ns for one in windows),
    )
    last = max(windows, key=lambda one: one.last_step)
    late = build_late_scalars(_compute_lateness_ns(windows))
    return ScalarPoint(
        escape_controls(batch.run), last.last_step, last.end_unix_ns, (*times, *late)
    )


def _compute_lateness_ns(windows: Sequence[RankWindow]) -> dict[int, float]:
    """The excess of each rank's local time over the lower median of the ranks, at least 0."""
    steps, sums = Counter[int](), Counter[int]()
    for one in windows:
        if one.local_ns:
            steps[one.rank] += one.steps
            sums[one.rank] += one.steps * one.local_ns
    local_ns = {rank: sums[rank] / steps[rank] for rank in sums}
    usual_ns = median_low(local_ns.values()) if local_ns else 0.0
    return {rank: max(0.0, ns - usual_ns) for rank, ns in local_ns.items()}


def build_late_scalars(lateness_ns: Mapping[int, float]) -> tuple[Scalar, ...]:
    """The worst rank and how late it is; nothing if fewer than two ranks are known."""
    # A single rank is late for none.
    if len(lateness_ns) < 2:
        return ()
    worst = max(lateness_ns, key=lambda rank: lateness_ns[rank])
    late = Scalar(LATE, lateness_ns[worst] / 1e9)
    return (late, Scalar(WORST_RANK, worst)) if lateness_ns[worst] else (late,)


def find_median_step_ns(windows: Sequence[RankWindow]) -> int:
    """The median of the medians of the windows, each as often as it has steps."""
    ordered = sorted(windows, key=lambda one: one.median_step_ns)
    half, passed = sum(one.steps for one in ordered) / 2, 0
    for one in ordered:
        passed += one.steps
        if passed >= half:
            break
    return one.median_step_ns


def build_ledger_scalars(ledger: Ledger) -> tuple[Scalar, ...]:
    """Goodput, and each row in seconds and GPU hours."""
    return (
        Scalar(GOODPUT, ledger.goodput),
        Scalar(GOODPUT_IS_BOUND, float(ledger.is_goodput_bound)),
        *(Scalar(LEDGER, row.ns / 1e9, row.kind) for row in ledger.rows),
        *(Scalar(GPU_HOURS, row.gpu_hours, row.kind) for row in ledger.rows),
    )


def build_step_scalars(min_ns: float, median_ns: float, max_ns: float) -> tuple[Scalar, ...]:
    """The shortest, median and longest step."""
    values = {"0": min_ns, "0.5": median_ns, "1": max_ns}
    return tuple(Scalar(STEP_TIME, ns / 1e9, key) for key, ns in values.items())


def build_split_scalars(ranks: Sequence[RankSample]) -> tuple[Scalar, ...]:
    """Shares, exposed communication and caused waits, of the ranks of a sample."""
    sums = {name: sum(getattr(one.split, f"{name}_ns") for one in ranks) for name in BUCKETS}
    exposed: dict[str, int] = {}
    for one in ranks:
        for axis, ns in one.exposed_ns.items():
            exposed[axis] = exposed.get(axis, 0) + ns
    total = sum(sums.values()) or 1
    return (
        *(Scalar(SHARE, sums[name] / total, name) for name in BUCKETS),
        *build_exposed_scalars(exposed, len(ranks)),
        *_build_wait_scalars(ranks),
    )


def build_exposed_scalars(sums_ns: Mapping[str, int], ranks: int) -> tuple[Scalar, ...]:
    """Exposed communication by axis in the mean of so many ranks, of its sums."""
    return tuple(
        Scalar(EXPOSED, ns / ranks / 1e9, escape_controls(axis or UNKNOWN_AXIS))
        for axis, ns in sorted(sums_ns.items())
    )


def _build_wait_scalars(ranks: Sequence[RankSample]) -> tuple[Scalar, ...]:
    most = max(ranks, key=lambda one: one.caused_wait_ns)
    # The waits of all others for this rank, in the mean of those others.
    wait = Scalar(CAUSED_WAIT, most.caused_wait_ns / max(1, len(ranks) - 1) / 1e9)
    return (wait, Scalar(CAUSED_WAIT_RANK, most.rank)) if most.caused_wait_ns else (wait,)
