"""What the store keeps of a report: metrics per run and per rank, its headline, its job. No SQL."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from typing import Any

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.ops import compute_element_bytes
from stepsplit.analyzer.regression.compare import MESH_FROM_CALLS
from stepsplit.analyzer.report.headline import compute_mean_split
from stepsplit.analyzer.report.report import Report, Run, count_devices
from stepsplit.analyzer.report.step_rows import (
    StepRow,
    compute_step_median_ns,
    list_full_steps,
    select_full_steps,
)
from stepsplit.analyzer.split.bandwidth import CollectiveRow, StepCallsRow
from stepsplit.dashboard.store.ids import clean_text

# Results of the check command, for the list of runs.


@dataclass(frozen=True, slots=True)
class CheckRow:
    """The last check result of a run: "pass", "regressed" or "inconclusive", and its headline."""

    answer: str
    words: str


# Metrics of a run, to compare over runs, and of each rank.

METRIC_NAMES = (
    "step_ns", "exposed_comm", "skew", "bubble", "idle", "bubble_fraction", "mfu",
    "peak_memory_bytes",
)  # fmt: skip
"""Stored metrics of a run.

exposed_comm, skew, bubble and idle are shares of the step time, 0..1; bubble_fraction is that of
the schedule; peak_memory_bytes is that of the fullest rank.
"""

BUCKET_COLUMNS = tuple(f"{bucket}_ns" for bucket in BUCKETS)
"""The columns of a mean step, of a run and of a rank."""

_MAX_RANK = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank of a run: its median full step, and the mean of its full steps, in ns."""

    rank: int
    host: str | None
    step_ns: int
    mean: Split


@dataclass(frozen=True, slots=True)
class MetricPoint:
    """A metric of one run, for a history over runs."""

    run_id: str
    name: str
    created_unix_ns: int
    value: float
    job: JobFingerprint | None = None


def collect_metrics(report: Report, numbers: Headline) -> dict[str, float | None]:
    median = numbers.median_step
    peaks = [row.peak_allocated_bytes for row in report.memory or ()]
    known = [peak for peak in peaks if peak is not None]
    time_metrics: dict[str, float | None] = {}
    if median is not None:
        time_metrics = {
            "step_ns": median.step_ns,
            "exposed_comm": median.sum_share("collective", "p2p", "skew"),
            "skew": median.sum_share("skew"),
            "bubble": median.sum_share("bubble"),
            "idle": median.sum_share("idle"),
        }
    return {
        **time_metrics,
        "bubble_fraction": numbers.bubble_fraction,
        "mfu": numbers.mfu,
        "peak_memory_bytes": max(known, default=None),
    }


def build_rank_rows(report: Report) -> Iterator[dict[str, Any]]:
    hosts = {rank: host.host for host in report.run.hosts for rank in host.ranks}
    by_rank: dict[int, list[StepRow]] = {}
    for step in select_full_steps(report.steps):
        by_rank.setdefault(step.rank, []).append(step)
    for rank, steps in sorted(by_rank.items()):
        if rank <= _MAX_RANK:
            host = hosts.get(rank)
            named = None if host is None else clean_text(host, 200)
            buckets = zip(BUCKET_COLUMNS, compute_mean_split(steps).buckets_ns, strict=True)
            step_ns = compute_step_median_ns(steps)
            yield {"rank": rank, "host": named, "step_ns": step_ns, **dict(buckets)}


# Headline numbers of a run, for the list of runs.


@dataclass(frozen=True, slots=True)
class MedianStep:
    """The median step of a run, its mean step, and the share of each bucket in the mean step.

    shares are in the order of BUCKETS and add up to one.
    """

    step_ns: int
    mean: Split
    shares: tuple[float, ...]

    def sum_share(self, *buckets: str) -> float:
        """The summed share of the buckets, 0..1."""
        named = zip(BUCKETS, self.shares, strict=True)
        return sum(share for bucket, share in named if bucket in buckets)


@dataclass(frozen=True, slots=True)
class FirstFinding:
    """The finding of a report with the largest estimated saving per step."""

    words: str
    gain_ns: int


@dataclass(frozen=True, slots=True)
class Headline:
    """Headline numbers of a run; steps is the number of steps in median_step, which is None
    without steps.

    bubble_fraction (of the schedule) and mfu are ratios, None if the report has none.
    """

    world_size: int
    mesh: str | None
    backend: str | None
    median_step: MedianStep | None
    steps: int
    warnings: int
    bubble_fraction: float | None = None
    mfu: float | None = None
    first_finding: FirstFinding | None = None


def build_headline(report: Report) -> Headline:
    """Headline numbers of the report."""
    median_step = None
    if report.steps:
        mean = compute_mean_split(select_full_steps(report.steps))
        shares = tuple(ns / (mean.step_ns or 1) for ns in mean.buckets_ns)
        median_step = MedianStep(compute_step_median_ns(report.steps), mean, shares)
    return Headline(
        world_size=count_devices(report),
        mesh=_format_mesh(report),
        backend=report.run.backend,
        median_step=median_step,
        steps=len(list_full_steps(report.steps)),
        warnings=len(report.warnings),
        bubble_fraction=report.pipeline.bubble_fraction if report.pipeline else None,
        mfu=report.mfu,
        first_finding=next(
            (FirstFinding(one.message, one.gain_ns) for one in report.findings), None
        ),
    )


def _format_mesh(report: Report) -> str | None:
    if report.run.mesh is None:
        return None
    return " ".join(f"{part.axis}{part.size}" for part in report.run.mesh)


# The job of a run, by which runs of one training job are grouped.


@dataclass(frozen=True, slots=True)
class JobFingerprint:
    """Which training job a run is of: a short stable key, and a label for people.

    The key covers the world size, the device, the mesh, the size in elements of the message that
    moves most data (which depends on the width of the model, the sequences and their number), and
    the GEMMs of a step in powers of two (depth of the model, number of microbatches). It does not
    cover hosts, recorded ranks, number and duration of steps, versions, schedule or dtype, and is
    not changed by one more collective, unless that moves more data than all others. The model is
    known by its traffic and its GEMMs alone: models that differ in neither share a key, such as one
    of twice the depth with half the microbatches, and another bucket size of the gradient
    reduction is another job. A job.toml does not change the key, since runs may get one later.
    """

    key: str
    label: str


def read_job(key: str | None, label: str | None) -> JobFingerprint | None:
    """The job of these columns of a run; None if it is unknown."""
    return JobFingerprint(key, label or "") if key else None


MIN_MESSAGE_BYTES = 1024
"""Smaller messages are scalars, such as the loss."""


def compute_job_fingerprint(report: Report) -> JobFingerprint:
    """The job of the report's run."""
    run = report.run
    evidence = (
        count_devices(report),
        run.device,
        _describe_mesh(run),
        _find_main_message(report),
        _estimate_gemms(report),
    )
    key = sha256(repr(evidence).encode()).hexdigest()[:8]
    mesh = " ".join(f"{part.axis}{part.size}" for part in run.mesh or () if part.size > 1)
    device = f"{count_devices(report):,} x {run.device.removeprefix('NVIDIA ')}"
    return JobFingerprint(key, clean_text(" · ".join(filter(None, (mesh, device))), 200))


def _describe_mesh(run: Run) -> tuple[str, ...] | None:
    """The axes of the mesh with their sizes; the sizes alone if the axes are named by the calls,
    since one more call may change the names."""
    if run.mesh is None:
        return () if run.world_size == 1 else None
    stated = run.mesh_source not in MESH_FROM_CALLS
    return tuple(f"{part.axis if stated else ''}{part.size}" for part in run.mesh if part.size > 1)


def _find_main_message(report: Report) -> int | None:
    """The size in elements of the message that moves most data per rank and step; None without
    messages."""
    recorded = set(report.run.ranks)
    members = {group.id: len(recorded & {*group.ranks}) or 1 for group in report.groups}
    volumes: dict[int, float] = defaultdict(float)
    # The calls of which each step has as many: sizes of others depend on the data, as do those of
    # all-to-all. All calls of a report of stepsplit 0.1.0, which does not count them by step.
    steady = [row for row in report.step_calls if row.least == row.most]
    rows: Sequence[StepCallsRow | CollectiveRow] = (
        steady if report.step_calls else report.collectives
    )
    for row in rows:
        if row.op != "all_to_all" and (row.message_bytes or 0) > MIN_MESSAGE_BYTES:
            elements = _count_elements(row.message_bytes or 0, row.dtype)
            # By recorded ranks of the group: a recording of fewer ranks has the same key.
            calls = _count_calls(row) / members.get(row.group, 1)
            # The largest of the rows of a size, not their sum: one more kind of call of the same
            # size leaves the key as it is.
            volumes[elements] = max(volumes[elements], elements * calls)
    return max(volumes, key=lambda elements: (volumes[elements], elements), default=None)


def _count_calls(row: StepCallsRow | CollectiveRow) -> int:
    return row.calls if isinstance(row, StepCallsRow) else row.count


def _count_elements(message_bytes: int, dtype: str | None) -> int:
    """Elements of a message, which another dtype does not change; bytes if it is unknown."""
    size = -1 if dtype is None else compute_element_bytes(dtype)
    return message_bytes // size if size > 0 else message_bytes


def _estimate_gemms(report: Report) -> int | None:
    """The GEMMs of a step and rank, as a rounded logarithm to base 2: kernels that are fused or
    recomputed seldom change it. None if the report has none."""
    steps = {row.rank: 0 for row in report.steps}
    for row in select_full_steps(report.steps):
        steps[row.rank] += 1
    counts = [
        row.count / steps[row.rank]
        for row in report.kernels
        if row.family == "gemm" and row.count > 0 and steps.get(row.rank)
    ]
    return round(math.log2(median(counts))) if counts else None
