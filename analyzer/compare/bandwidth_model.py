"""The bus bandwidth that the model expects of a run's links, over sizes."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.compare.gap.wires import wires_of
from stepsplit.analyzer.errors import StepsplitError
from stepsplit.analyzer.model.comm_time import TIMED_OPS, time_of
from stepsplit.analyzer.model.config import Job, span_of
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.report.io import job_of_report
from stepsplit.analyzer.report.report import Report

_POINTS = 40


@dataclass(frozen=True, slots=True)
class ModelledBusbw:
    """busbw over message sizes, and the peak of the slowest link, of one GPU in one direction."""

    message_bytes: tuple[float, ...]
    busbw_bytes_per_s: tuple[float, ...]
    link_bytes_per_s: float


def modelled_busbw(
    report: Report, axis: str, op: str, least_bytes: int, most_bytes: int
) -> ModelledBusbw | None:
    """The model's curve for an op on an axis of the run, by the closed form; None where the report
    holds no job, or the model knows no such op or axis."""
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
        sizes, tuple(_busbw(job, axis, op, each) for each in sizes), wire.bytes_per_s
    )


def _busbw(job: Job, axis: str, op: str, message_bytes: float) -> float:
    span = span_of(job, axis)
    took_ns = time_of(op, message_bytes, span, job.hardware).ns
    return message_bytes / took_ns * 1e9 * busbw_factor(op, span.ranks)
