"""Metrics of a run for budgets, and the baseline file."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import msgspec
from msgspec import Struct

from stepsplit.analyzer.buckets import BUCKETS, COMMUNICATION
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import compute_busbw_factor
from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE
from stepsplit.analyzer.regression.compare import (
    MESH_FROM_CALLS,
    UNKNOWN,
    CallKind,
    find_peak_bytes,
    format_axis,
    format_mesh,
)
from stepsplit.analyzer.report.axis_names import UNKNOWN_AXIS, name_group
from stepsplit.analyzer.report.headline import compute_mean_split
from stepsplit.analyzer.report.io import extract_prediction, has_head
from stepsplit.analyzer.report.report import INCOMPLETE, JOB_MISMATCH, Report, count_devices
from stepsplit.analyzer.report.rl_step import PhaseRow, RlStep
from stepsplit.analyzer.report.roles import RoleJob
from stepsplit.analyzer.report.step_rows import StepRow, list_full_steps, select_full_steps
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.analyzer.split.step_kinds import KindCalls, describe_steps
from stepsplit.collectors.formats.run_spec import AXES, is_role
from stepsplit.collectors.safe_io.safe_text import escape_controls

# The metrics of a run: small enough for a file in git, sufficient to explain a regression.


class Setup(Struct, frozen=True):
    """The configuration of a run; None means unknown.

    Attributes:
        world_size: number of ranks of the job; of the recorded ones if it is unknown.
        ranks: recorded ranks.
        hosts: number of hosts.
        device: device name.
        mesh: mesh as text, such as "pp 2 tp 4".
        backend: communication backend, such as "nccl".
        schedule: pipeline schedule.
        microbatches: microbatches per step.
        torch: torch version.
        nccl: NCCL version.
        driver: driver version.
        mesh_source: origin of the mesh, such as "run.json".
    """

    world_size: int
    ranks: tuple[int, ...]
    hosts: int
    device: str
    mesh: str | None
    backend: str | None
    schedule: str | None
    microbatches: int | None
    torch: str | None
    nccl: str | None
    driver: str | None
    mesh_source: str | None = None


def has_stated_mesh(setup: Setup) -> bool:
    """Whether the job states its mesh, in run.json or in the names of its groups."""
    return setup.mesh is not None and setup.mesh_source not in MESH_FROM_CALLS


class Value(Struct, frozen=True):
    """A metric of one run; shares 0..1, times in ns, sizes in bytes."""

    metric: str
    value: float


class CallMetrics(Struct, frozen=True):
    """The calls of one kind per full step over all recorded ranks, and the medians of one call.

    varies: whether the number differs between steps.
    """

    axis: str
    op: str
    dtype: str | None
    message_bytes: int | None
    calls: int
    varies: bool
    transfer_ns: int
    wait_ns: int

    @property
    def kind(self) -> CallKind:
        return self.axis, self.op, self.dtype, self.message_bytes


def name_calls(runs: Iterable[RunMetrics]) -> Mapping[str, str]:
    """What the calls of each axis of CallMetrics are called on screens.

    Metrics and baselines have calls on no single axis by the description of their groups, so that
    baselines of any version match. The names are those of the runs with groups: a baseline of a
    stated mesh has none. The groups of an older version have no names, and take those of others.
    """
    names: dict[str, dict[str, None]] = defaultdict(dict)
    groups = [group for run in runs for group in run.groups]
    for group in sorted(groups, key=lambda one: not one.name):
        if group.name or format_axis(group) not in names:
            names[format_axis(group)][name_group(group)] = None
    return {UNKNOWN: UNKNOWN_AXIS} | {axis: " + ".join(own) for axis, own in names.items()}


class BucketTime(Struct, frozen=True):
    """The mean time of a bucket per step and rank, in ns; axis None: the whole bucket."""

    bucket: str
    axis: str | None
    mean_ns: int


class CausedWait(Struct, frozen=True):
    """Waits caused by one rank per step, over all ranks; rank None: not caused by a rank."""

    rank: int | None
    cause: str
    axis: str | None
    caused_ns: int


class GroupRanks(Struct, frozen=True):
    """A process group."""

    axis: str | None
    description: str
    ranks: tuple[int, ...]
    name: str = ""


class Doubt(Struct, frozen=True):
    """A warning of the report by which its calls, or the prediction, may be those of another job;
    rank None: of all ranks."""

    code: str
    message: str
    rank: int | None


class KindMetrics(Struct, frozen=True):
    """The complete steps of one kind in a run that has several.

    kind, period, extra, calls and kernels are those of the report; which steps they are is in
    words. step_ns is the median over steps of the median over ranks, buckets_ns the mean split.
    """

    kind: str
    which: str
    steps: int
    period: int | None
    extra: str
    step_ns: float
    buckets_ns: tuple[int, ...]
    calls: tuple[KindCalls, ...]
    kernels: float


class RunMetrics(Struct, frozen=True):
    """The metrics of one run.

    steps is the number of steps over which values are medians; calls is None for reports of older
    versions; predicted are the values of the model, if any; doubts is None in baselines of older
    versions. kinds are the kinds of the complete steps, the headline first, if there are several;
    kernels of the headline per step and rank, 0 if unknown; complete the number of complete steps.
    Of a job of several roles the values are those of the RL step, and roles has the metrics of each
    role; role is its name there.
    """

    name: str
    setup: Setup
    steps: int
    values: tuple[Value, ...]
    calls: tuple[CallMetrics, ...] | None
    times: tuple[BucketTime, ...]
    blame: tuple[CausedWait, ...] = ()
    predicted: tuple[Value, ...] = ()
    groups: tuple[GroupRanks, ...] = ()
    doubts: tuple[Doubt, ...] | None = None
    kinds: tuple[KindMetrics, ...] = ()
    kernels: float = 0.0
    complete: int = 0
    role: str = ""
    roles: tuple[RunMetrics, ...] = ()

    def find_value(self, metric: str) -> float | None:
        """The value of a metric; None if the run does not have it."""
        return next((one.value for one in self.values if one.metric == metric), None)

    def find_prediction(self, metric: str) -> float | None:
        """The value predicted by the model; None if it does not predict the metric."""
        return next((one.value for one in self.predicted if one.metric == metric), None)


def list_mesh_axes(run: RunMetrics) -> list[str]:
    """The axes of the run's mesh, which its setup has as "pp 2 tp 4"."""
    return (run.setup.mesh or "").split()[::2]


# Report -> metrics.

MAX_BLAMED = 8
"""Number of blamed ranks kept per run, worst first."""

GOODPUT = "goodput"

GOODPUT_BOUND = "goodput_bound"
"""Code of a doubt by which a goodput may be lower than it is shown."""

MIXED_STEPS = "steps_mixed"
"""Code of the warning that steps do unequal work and none of the kinds is usual."""

FEW_STEPS = "few_steps"
"""Code of the doubt that a run is too short to leave out its warm-up."""

_ANALYZE_HINT = "analyze the recording again, or leave the run out"


def extract_metrics(report: Report, source: object) -> RunMetrics:
    """Extract the metrics of a run. Raises DataError (naming the source) if it has no step or a
    value is not finite."""
    by_step: dict[int, list[StepRow]] = defaultdict(list)
    for row in select_full_steps(report.steps):
        by_step[row.step].append(row)
    numbers = sorted(by_step)
    # The first step is warm-up; of few steps it counts too, as hardly any would be left.
    steady = numbers[WARMUP:] if len(numbers) >= WARMUP + FEWEST else numbers
    steps = {number: by_step[number] for number in steady}
    if not steps:
        raise DataError(source, "no step to check", "record at least one full step")
    values = compute_values(report, steps)
    bad = [one.metric for one in values if not math.isfinite(one.value)]
    if bad:
        raise DataError(source, f"{bad[0]} is not a finite number", _ANALYZE_HINT)
    run, pipeline = report.run, report.pipeline
    full_steps = list_full_steps(report.steps)
    doubts = [
        Doubt(row.code, row.message, row.rank)
        for row in report.warnings
        if row.code in INCOMPLETE or row.code in (JOB_MISMATCH, MIXED_STEPS)
    ]
    if len(full_steps) < WARMUP + FEWEST:
        count = f"{len(full_steps)} full step{'s' if len(full_steps) > 1 else ''}"
        text = f"{count}: the first counts too, which is left out as warm-up of {WARMUP + FEWEST}"
        doubts.append(Doubt(FEW_STEPS, text, None))
    worst = sorted(report.blame, key=lambda row: -row.caused_ns)[:MAX_BLAMED]
    return RunMetrics(
        name=run.name,
        setup=Setup(
            world_size=count_devices(report),
            ranks=run.ranks,
            hosts=len(run.hosts),
            device=run.device,
            mesh=format_mesh(run.mesh),
            backend=run.backend,
            schedule=None if pipeline is None else pipeline.schedule,
            microbatches=None if pipeline is None else pipeline.microbatches,
            torch=run.torch,
            nccl=run.nccl,
            driver=run.driver,
            mesh_source=run.mesh_source,
        ),
        steps=len(steps),
        values=values,
        calls=_build_call_metrics(report),
        times=tuple(_sum_bucket_times(report)),
        blame=tuple(
            CausedWait(
                b.rank, b.cause, b.axis if b.axis in AXES else None, b.caused_ns // len(full_steps)
            )
            for b in worst
        ),
        predicted=tuple(_list_predicted_values(report)),
        groups=tuple(GroupRanks(g.axis, g.description, g.ranks, g.name) for g in report.groups),
        doubts=tuple(doubts),
        kinds=tuple(_build_kind_metrics(report)),
        # Every rank and step alike; an older report has no kernels.
        kernels=sum(row.count for row in report.kernels) / len(select_full_steps(report.steps)),
        complete=len({row.step for row in report.steps if row.kind != "partial"}),
    )


def extract_role_metrics(job: RoleJob, reports: Mapping[str, Report], source: object) -> RunMetrics:
    """Extract the metrics of a job of several roles: of its RL step, and of each role by the report
    of that. Raises DataError as `extract_metrics`."""
    roles = tuple(
        msgspec.structs.replace(
            extract_metrics(reports[role.name], f"{source}, {role.name}"),
            name=f"{job.run}: {role.name}",
            role=role.name,
        )
        for role in job.roles
    )
    setups = [one.setup for one in roles]
    counted = [one.step_ns for one in job.steps if one.is_counted]

    def find_common(texts: Sequence[str | None]) -> str | None:
        return ", ".join(dict.fromkeys(one for one in texts if one is not None)) or None

    # Roles of one program have its ranks in common, and those of several have the same numbers: the
    # whole has no numbers of ranks, which are those of each role.
    sizes = {one.program: one.world_size for one in job.roles}
    return RunMetrics(
        name=job.run,
        setup=Setup(
            world_size=sum(sizes.values()),
            ranks=(),
            hosts=max(one.hosts for one in setups),
            device=find_common([one.device for one in setups]) or UNKNOWN,
            mesh=None,
            backend=find_common([one.backend for one in setups]),
            schedule=None,
            microbatches=None,
            torch=find_common([one.torch for one in setups]),
            nccl=find_common([one.nccl for one in setups]),
            driver=find_common([one.driver for one in setups]),
        ),
        steps=len(counted),
        values=(Value("step", float(median(counted))), *_list_phase_values(job.phases)),
        calls=None,
        times=(),
        doubts=tuple(
            Doubt(
                doubt.code,
                f"{one.role}{'' if doubt.rank is None else f'/{doubt.rank}'}: {doubt.message}",
                None,
            )
            for one in roles
            for doubt in one.doubts or ()
            if doubt.code in INCOMPLETE
        ),
        complete=len(counted),
        roles=roles,
    )


def _build_kind_metrics(report: Report) -> Iterator[KindMetrics]:
    for kind in report.step_kinds:
        rows = [row for row in report.steps if row.step in kind.steps and row.kind != "partial"]
        by_step: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_step[row.step].append(row.step_ns)
        yield KindMetrics(
            kind=kind.kind,
            which=describe_steps(kind.steps, kind.period),
            steps=kind.count,
            period=kind.period,
            extra=kind.extra,
            step_ns=float(median(median(own) for own in by_step.values())),
            buckets_ns=compute_mean_split(rows).buckets_ns,
            calls=kind.calls,
            kernels=kind.kernels,
        )


def _build_call_metrics(report: Report) -> tuple[CallMetrics, ...] | None:
    """The calls by axis, op, dtype and size; None if the report has no calls per step."""
    if report.collectives and not report.step_calls:
        return None
    axes = {group.id: format_axis(group) for group in report.groups}
    counts: dict[CallKind, list[int]] = defaultdict(lambda: [0, 0])
    for row in report.step_calls:
        kind = (axes.get(row.group, UNKNOWN), row.op, row.dtype, row.message_bytes)
        counts[kind][0] += row.calls
        counts[kind][1] += row.most - row.least
    timed: dict[CallKind, list[CollectiveRow]] = defaultdict(list)
    for one in report.collectives:
        kind = (axes.get(one.group, UNKNOWN), one.op, one.dtype, one.message_bytes)
        timed[kind].append(one)
    found = []
    for kind, (calls, varies) in sorted(counts.items(), key=lambda item: repr(item[0])):
        # The medians over groups; calls that are not matched have no times.
        transfer_ns = [row.transfer_ns_median for row in timed[kind]] or [0]
        wait_ns = [row.wait_ns_median for row in timed[kind]] or [0]
        took = int(median(transfer_ns)), int(median(wait_ns))
        found.append(CallMetrics(*kind, calls, varies > 0, *took))
    return tuple(found)


def _sum_bucket_times(report: Report) -> Iterator[BucketTime]:
    rows = select_full_steps(report.steps)
    mean = compute_mean_split(rows)
    for bucket, ns in zip(BUCKETS, mean.buckets_ns, strict=True):
        yield BucketTime(bucket, None, ns)
    full = {(row.rank, row.step) for row in rows}
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for row in report.exposed:
        if row.axis in AXES and (row.rank, row.step) in full:
            for bucket in (*EXPOSED, "bubble"):
                sums[bucket, row.axis] += getattr(row, f"{bucket}_ns")
    for (bucket, axis), ns in sorted(sums.items()):
        if ns:
            yield BucketTime(bucket, axis, ns // len(rows))


def _list_predicted_values(report: Report) -> Iterator[Value]:
    """The metrics predicted by the model."""
    prediction = extract_prediction(report)
    if prediction is None:
        return
    split = prediction.split
    whole = split.step_ns or 1
    yield Value("step", float(split.step_ns))
    yield Value("exposed_comm", split.exposed_comm_ns / whole)
    for bucket, ns in zip(BUCKETS, split.buckets_ns, strict=True):
        yield Value(bucket, ns / whole)
    yield Value("bubble_fraction", prediction.bubble_fraction)
    yield Value("peak_memory", float(max(stage.total_bytes for stage in prediction.memory)))
    utilizations = (("mfu", prediction.mfu), ("hfu", prediction.hfu))
    yield from (Value(name, value) for name, value in utilizations if value is not None)


# Report -> values of its metrics: medians over the steady steps of the run.

WARMUP, FEWEST = 1, 3
"""Number of full steps dropped at the start of a run, if at least the second number remain."""

_ByStep = Mapping[int, list[StepRow]]

_WAITS = tuple(bucket.label for bucket in COMMUNICATION)


def compute_values(report: Report, steps: _ByStep) -> tuple[Value, ...]:
    """All metrics of the report."""
    values = [
        *_compute_time_values(steps),
        *_compute_axis_values(report, steps),
        *_compute_busbw_values(report),
        *_compute_values_per_unit(report, steps),
    ]
    # Calls and message bytes per full step over all recorded ranks.
    axes = {group.id: group.axis for group in report.groups}
    counts: dict[str, int] = defaultdict(int)
    for call in report.step_calls:
        axis = axes.get(call.group)
        for suffix in ("", f".{axis}") if axis else ("",):
            counts[f"calls{suffix}"] += call.calls
            counts[f"bytes{suffix}"] += call.calls * (call.message_bytes or 0)
    values += (Value(name, float(count)) for name, count in sorted(counts.items()))
    # The time of each part of the model in the mean step, where anything shows it.
    parts: dict[str, int] = defaultdict(int)
    if report.part_evidence is not None and report.part_evidence.evidence != "none":
        for part in report.parts:
            parts[f"{PART}.{part.part}"] += part.total_ns
    values += (Value(name, float(ns)) for name, ns in sorted(parts.items()))
    complete = [row.step_ns for row in report.steps if row.kind != "partial"]
    if isinstance(report.rl_step, RlStep):
        values += _list_phase_values(report.rl_step.phases)
    others = {
        "mean_step": fmean(complete) if complete else None,
        "bubble_fraction": report.pipeline.bubble_fraction if report.pipeline else None,
        "mfu": report.mfu,
        "hfu": report.hfu,
        "peak_memory": find_peak_bytes(report),
    }
    known = [Value(name, float(value)) for name, value in others.items() if value is not None]
    return (*values, *known)


def _list_phase_values(phases: Sequence[PhaseRow]) -> Iterator[Value]:
    """The time of each phase of the RL step without waits for other ranks, of the role that has
    most of it: in that of a role that waits lies the phase of another one."""
    most: dict[str, int] = {}
    for row in phases:
        if row.is_known:
            own_ns = row.time.window_ns - row.time.wait_ns
            most[row.phase] = max(most.get(row.phase, 0), own_ns)
    for phase, ns in sorted(most.items()):
        yield Value(f"{PHASE}.{phase}", float(ns))


def _compute_time_values(steps: _ByStep) -> Iterator[Value]:
    every = list(steps.values())
    yield Value("step", float(median(median(row.step_ns for row in rows) for rows in every)))
    yield Value("exposed_comm", median(_compute_share(rows, EXPOSED) for rows in every))
    for bucket in BUCKETS:
        yield Value(bucket, median(_compute_share(rows, (bucket,)) for rows in every))
    overlaps = []
    for rows in every:
        hidden = sum(row.overlapped_ns for row in rows)
        moved = hidden + sum(row.collective_ns + row.p2p_ns for row in rows)
        if moved:
            overlaps.append(hidden / moved)
    if overlaps:
        yield Value("overlap", median(overlaps))


def _compute_values_per_unit(report: Report, steps: _ByStep) -> Iterator[Value]:
    """The step over the tokens and over the samples of the mean rank, of steps in which all ranks
    counted them."""
    for unit, name in (("tokens", "step_per_token"), ("samples", "step_per_sample")):
        counts = {(row.rank, row.step): getattr(row, unit) for row in report.step_work or ()}
        values = []
        for number, rows in steps.items():
            of_ranks = [counts.get((row.rank, number)) for row in rows]
            known = [one for one in of_ranks if one is not None]
            if len(known) == len(rows) and any(known):
                values.append(median(row.step_ns for row in rows) / fmean(known))
        if values:
            yield Value(name, median(values))


def _compute_share(rows: Sequence[StepRow], buckets: Sequence[str]) -> float:
    whole = sum(row.step_ns for row in rows)
    part = sum(int(getattr(row, f"{name}_ns")) for row in rows for name in buckets)
    return part / (whole or 1)


def _compute_axis_values(report: Report, steps: _ByStep) -> Iterator[Value]:
    """The shares of waits and transfers on each axis that has any."""
    whole = {number: sum(row.step_ns for row in rows) or 1 for number, rows in steps.items()}
    ranks = {number: {row.rank for row in rows} for number, rows in steps.items()}
    sums: dict[str, dict[int, int]] = defaultdict(lambda: dict.fromkeys(whole, 0))
    for row in report.exposed:
        if row.axis not in AXES or row.rank not in ranks.get(row.step, ()):
            continue
        for bucket in _WAITS:
            names = (bucket, "exposed_comm") if bucket in EXPOSED else (bucket,)
            for name in names:
                sums[f"{name}.{row.axis}"][row.step] += getattr(row, f"{bucket}_ns")
    for name, of_step in sorted(sums.items()):
        if any(of_step.values()):
            yield Value(name, median(ns / whole[number] for number, ns in of_step.items()))


def _compute_busbw_values(report: Report) -> Iterator[Value]:
    """Bus bandwidth by axis and op: total data / total transfer time."""
    groups = {group.id: group for group in report.groups}
    same: dict[str, list[CollectiveRow]] = defaultdict(list)
    for row in report.collectives:
        group = groups.get(row.group)
        if group is not None and group.axis is not None and row.busbw_bytes_per_s is not None:
            same[f"busbw.{group.axis}.{row.op}"].append(row)
    for name, rows in sorted(same.items()):
        taken_s = sum(row.count * row.transfer_ns_median for row in rows) / 1e9
        moved = sum(
            row.count
            * (row.message_bytes or 0)
            * compute_busbw_factor(row.op, len(groups[row.group].ranks))
            for row in rows
        )
        yield Value(name, moved / taken_s)


# The metrics for budgets.
#
# A name may have an axis as suffix, busbw an axis and an op, and part has that of a part:
# exposed_comm.tp, busbw.dp_replicate.all_reduce, part.attention. Plain busbw means each axis and op
# that both sides have.

Unit = Literal["share", "ns", "bytes", "bytes_per_s", "count"]

PART = "part"

PHASE = "phase"

EXPOSED = ("collective", "p2p", "skew")
"""The buckets that are exposed communication."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. worse: +1 if larger values are worse, -1 if smaller ones are; exact: equal in all
    runs of the same job; by_axis: also available per axis; is_short: a time of microseconds, and
    shown in them; of_job: a share of all of a job, which is no sample of anything."""

    name: str
    description: str
    unit: Unit
    worse: Literal[1, -1] = 1
    exact: bool = False
    by_axis: bool = False
    is_short: bool = False
    of_job: bool = False


METRICS = (
    Metric("step", "median step", "ns"),
    Metric("mean_step", "mean of all complete steps, of every kind", "ns"),
    Metric("exposed_comm", "exposed communication", "share", by_axis=True),
    Metric("compute", "compute", "share"),
    Metric("collective", "exposed collective transfers", "share", by_axis=True),
    Metric("p2p", "exposed message transfers", "share", by_axis=True),
    Metric("skew", "waits for a rank of the same stage", "share", by_axis=True),
    Metric("bubble", "waits for another pipeline stage", "share", by_axis=True),
    Metric("copy", "memory copies", "share"),
    Metric("idle", "idle time", "share"),
    Metric("overlap", "overlapped communication", "share", worse=-1),
    Metric("busbw", "bus bandwidth, without waits", "bytes_per_s", worse=-1),
    Metric("bubble_fraction", "pipeline bubble", "share"),
    Metric("mfu", "model FLOPs utilization", "share", worse=-1),
    Metric("hfu", "hardware FLOPs utilization", "share", worse=-1),
    Metric("peak_memory", "peak memory of the fullest rank", "bytes"),
    Metric(
        GOODPUT, "wall clock of a watched job in steps that count", "share", worse=-1, of_job=True
    ),
    Metric("calls", "collectives and messages per step", "count", exact=True, by_axis=True),
    Metric("bytes", "message bytes per step", "bytes", exact=True, by_axis=True),
    Metric("step_per_token", "step per token of the mean rank, where counted", "ns", is_short=True),
    Metric(
        "step_per_sample", "step per sample of the mean rank, where counted", "ns", is_short=True
    ),
    Metric(PART, "a part of the model in the mean step", "ns", by_axis=True),
    Metric(PHASE, "a phase of the mean RL step, without waits", "ns", by_axis=True),
)

BY_NAME = {metric.name: metric for metric in METRICS}


KIND_METRIC = "step.other"
"""The step of another kind than the headline's, in a result; of several "step.other_2" and on."""


def require_metric(name: str) -> Metric:
    """The metric of a checked name, which must exist."""
    own = split_role(name)[1]
    found = find_metric("step" if own.startswith(KIND_METRIC) else own)
    assert found is not None, name
    return found


def split_role(name: str) -> tuple[str, str]:
    """The role of a metric such as "trainer/step", "" for none, and the metric itself."""
    role, slash, own = name.rpartition("/")
    # "/step" names a role without a name, which is none.
    return (role, own) if role or not slash else ("", name)


def find_metric(name: str) -> Metric | None:
    """The metric of a name without its role, axis and op; None if the name is invalid."""
    role, name = split_role(name)
    if role and not is_role(role):
        return None
    first, *rest = name.split(".")
    metric = BY_NAME.get(first)
    if metric is None or (rest and not (metric.by_axis or first == "busbw")):
        return None
    return metric if len(rest) <= (2 if first == "busbw" else 1) else None


# The baseline file: schema "stepsplit.baseline/1", the metrics of each run.

SCHEMA = "stepsplit.baseline/1"

_HEAD = re.compile(rb'\A\s*\{\s*"schema"\s*:\s*"stepsplit\.baseline/')

_HINT = "write it again with stepsplit baseline"


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The baseline runs, with which candidates are compared."""

    schema: str = SCHEMA
    runs: tuple[RunMetrics, ...]


def to_json(runs: Sequence[RunMetrics]) -> bytes:
    """The runs as JSON text, one value per line for readable diffs.

    Groups are omitted, except one of each axis if the mesh is inferred from the calls or unknown,
    and one of each description that has another name.
    """
    bodies = []
    for run in runs:
        kept = [
            group
            for group in reversed(run.groups)
            if not has_stated_mesh(run.setup) or name_group(group) != format_axis(group)
        ]
        examples = tuple({format_axis(group): group for group in kept}.values())
        fields = []
        for name in run.__struct_fields__:
            value = examples if name == "groups" else getattr(run, name)
            if name in ("role", "roles") and not value:
                continue
            text = msgspec.json.encode(value)
            if isinstance(value, tuple) and value:
                text = b"[\n  " + b",\n  ".join(map(msgspec.json.encode, value)) + b"\n ]"
            fields.append(b' "%s": %s' % (name.encode(), text))
        bodies.append(b"{\n" + b",\n".join(fields) + b"\n}")
    body = b",\n".join(bodies)
    return b'{"schema": "%s", "runs": [\n%s\n]}\n' % (SCHEMA.encode(), body)


def is_baseline(path: Path) -> bool:
    """Whether the file is a baseline, of any schema version."""
    return has_head(path, _HEAD)


def read_baseline(path: Path) -> tuple[RunMetrics, ...]:
    """Read the runs of a baseline file. Raises DataError."""
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except OSError as error:
        raise DataError(path, error.strerror or "unreadable", "pass a baseline file") from None
    except UNDECODABLE as error:
        raise DataError(path, f"not a stepsplit baseline ({error})", _HINT) from None
    if baseline.schema != SCHEMA:
        raise DataError(path, f"schema {baseline.schema} instead of {SCHEMA}", _HINT)
    if not baseline.runs:
        raise DataError(path, "contains no run", _HINT)
    for run in baseline.runs:
        names = [one.role for one in run.roles]
        is_nested = bool(run.role) or any(one.roles for one in run.roles)
        if is_nested or len({*names}) < len(names) or not all(map(is_role, names)):
            raise DataError(path, f"the roles of {escape_controls(run.name)} are no roles", _HINT)
    return baseline.runs
