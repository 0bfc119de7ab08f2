"""What a recorded run tells: compute by its kind, idle time, transfers, memory."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.compare.job.run_job import job_of_run
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import Job
from stepsplit.analyzer.model.config_table import Table
from stepsplit.analyzer.model.schedule_time import ideal_bubble_fraction
from stepsplit.analyzer.readers.recording import Recording, read_recording
from stepsplit.analyzer.split.kernels import kernel_families
from stepsplit.analyzer.split.run import RankSplit, RunSplit, split_run

PRODUCTS, ATTENTION = "gemm", "attention"
"""Families of kernels, as the built-in rules call them."""


@dataclass(frozen=True, slots=True)
class StageSeen:
    """The median full step of a stage's ranks, and how its compute divides up, in ns.

    products_ns, attention_ns and other_ns add up to split.compute_ns; products_ns is 0 where the
    trace names no kernels. peak_bytes is the most that a rank allocated, None where not measured.
    """

    stage: int
    step_ns: int
    split: Split
    products_ns: float
    attention_ns: float
    other_ns: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """The median time of count calls of one size over a group, its waiting left out."""

    op: str
    ranks: int
    ranks_per_node: int
    message_bytes: int
    count: int
    ns: int


@dataclass(frozen=True, slots=True)
class RunSeen:
    """One recorded run: its job, its stages that are in the recording, its transfers."""

    name: str
    job: Job
    stages: tuple[StageSeen, ...]
    transfers: tuple[Transfer, ...]


def run_seen(place: str, stated: Table | None) -> RunSeen:
    """The run recorded at the place; stated is a RUN.toml for what the recording does not tell.

    Raises DataError, also for a recording without a full step; UsageError where the job is not
    known.
    """
    recording = read_recording([place])
    found = split_run(recording.traces, recording.spec, ideal_bubble_fraction)
    stages = stages_seen(recording, found)
    if not stages:
        raise DataError(place, "no full step in it", "record at least three steps, and without end")
    job = job_of_run(recording.spec, found, stated)
    return RunSeen(recording.name, job, stages, transfers_seen(found))


def stages_seen(recording: Recording, found: RunSplit) -> tuple[StageSeen, ...]:
    """One entry a stage with ranks that have full steps, first stage first."""
    stages: dict[int, list[RankSplit]] = {}
    for rank in found.ranks:
        if any(step.kind == "full" for step in rank.steps):
            stages.setdefault(found.layout.stage(rank.trace.rank), []).append(rank)
    return tuple(_stage(stage, ranks, recording) for stage, ranks in sorted(stages.items()))


def _stage(stage: int, ranks: list[RankSplit], recording: Recording) -> StageSeen:
    steps = [step.split for rank in ranks for step in rank.steps if step.kind == "full"]
    split, shares = median_split(steps), _shares(ranks)
    present = {rank.trace.rank for rank in ranks}
    peaks = [
        record.memory.peak_allocated_bytes
        for record in recording.records
        if record.memory and record.memory.peak_allocated_bytes and record.rank.rank in present
    ]
    return StageSeen(
        stage=stage,
        step_ns=int(median(one.step_ns for one in steps)),
        split=split,
        products_ns=split.compute_ns * shares[0],
        attention_ns=split.compute_ns * shares[1],
        other_ns=split.compute_ns * (1 - shares[0] - shares[1]),
        peak_bytes=max(peaks, default=None),
    )


def median_split(steps: list[Split]) -> Split:
    """The median of each bucket; they need not add up to the median step."""
    columns = np.median([[*one.buckets_ns, one.overlapped_ns] for one in steps], axis=0)
    return Split(*(int(ns) for ns in columns))


def _shares(ranks: list[RankSplit]) -> tuple[float, float]:
    """Which parts of the kernels' time were products and attention."""
    rows = kernel_families([rank.trace for rank in ranks], [rank.windows for rank in ranks])
    total = sum(row.total_ns for row in rows) or 1
    products, attention = (
        sum(row.total_ns for row in rows if row.family == family) / total
        for family in (PRODUCTS, ATTENTION)
    )
    return products, attention


def transfers_seen(found: RunSplit) -> tuple[Transfer, ...]:
    """The calls whose transfer was measured, one row a kind and size."""
    host = {rank.trace.rank: rank.trace.host for rank in found.ranks}
    rows = []
    for one in found.collectives:
        if one.busbw_bytes_per_s is None or one.op == "recv":
            continue
        ranks = found.matched.groups[one.group].ranks
        hosts = [host.get(rank, "") for rank in ranks]
        per_node = len(ranks) // len(set(hosts))
        rows.append(
            Transfer(
                _OPS.get(one.op, one.op), len(ranks), max(1, per_node),
                one.message_bytes, one.count, one.transfer_ns_median,
            )
        )  # fmt: skip
    return tuple(rows)


_OPS = {"send_recv": "send"}
