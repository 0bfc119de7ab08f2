"""Scaling of a job over several runs: efficiency per GPU, and the buckets that cost it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.regression.compare import build_side
from stepsplit.analyzer.report.report import AxisSize, Report, count_devices

SCHEMA = "stepsplit.scaling/1"

Work = Literal["tokens", "gpu", "step"]
"""What the runs have in common: "tokens" are known of each (by a job.toml), "gpu": each GPU does
the same work in a step (weak scaling), "step": all GPUs together do (strong scaling)."""


class BucketCost(msgspec.Struct, frozen=True):
    """GPU time that a bucket adds to the same work.

    Attributes:
        bucket: One of the seven buckets.
        share: Of the reference's GPU time for this work; negative where the bucket takes less.
    """

    bucket: str
    share: float


class ScalingRun(msgspec.Struct, frozen=True):
    """A run among those of a scaling.

    Attributes:
        name: The name of the run.
        gpus: The ranks of the job.
        mesh: Mesh axes, outermost first; None if unknown.
        step: The mean step of a rank.
        median_ns: The median step.
        tokens_per_s_per_gpu: By the mean step; None without a job.
        efficiency: Work per GPU and time over that of the reference; None if the work is unknown.
        costs: The buckets, by which GPU time for the same work grows over the reference's: they add
            up to 1 / efficiency - 1. Empty if the work is unknown.
        predicted_ns: The model's step; None without a job.
        peak_allocated_bytes: Of the fullest rank; None if unknown.
    """

    name: str
    gpus: int
    mesh: tuple[AxisSize, ...] | None
    step: Split
    median_ns: int
    tokens_per_s_per_gpu: float | None
    efficiency: float | None
    costs: tuple[BucketCost, ...]
    predicted_ns: int | None
    peak_allocated_bytes: int | None


class Scaling(msgspec.Struct, frozen=True):
    """Several runs of one job, fewest GPUs first.

    Attributes:
        schema: The version of the JSON, "stepsplit.scaling/1".
        work: How the work of a step is known; None if it is not.
        reference: The run that the others are measured against: the one with the fewest GPUs.
        runs: The runs; those with as many GPUs are in the order given.
    """

    schema: str
    work: Work | None
    reference: str
    runs: tuple[ScalingRun, ...]


def build_scaling(reports: Sequence[Report], work: Work | None = None) -> Scaling:
    """Compares the cost of the same work in several runs of a job.

    Efficiency is measured on the mean step, so that the buckets account for all of what is lost.

    Args:
        reports: Two runs or more.
        work: What the runs have in common; None: tokens, where each run has a job.

    Raises:
        UsageError: A run has no full step, or "tokens" are asked for and a run has no job.
    """
    ordered = sorted(reports, key=count_devices)
    sides = [build_side(report) for report in ordered]
    tokens = [_count_tokens(report) for report in ordered]
    if work is None and all(tokens):
        work = "tokens"
    if work == "tokens" and not all(tokens):
        unknown = ordered[tokens.index(None)].run.name
        raise UsageError(f"{unknown}: no job, so the tokens of its step are unknown; give --work")
    amounts = tokens
    if work == "gpu":
        amounts = [float(count_devices(report)) for report in ordered]
    elif work != "tokens":
        amounts = [1.0 if work == "step" else None] * len(ordered)
    first, base, unit = ordered[0], sides[0], amounts[0]
    runs = []
    for report, side, amount in zip(ordered, sides, amounts, strict=True):
        # 1 / efficiency - 1, by bucket; empty if the work is unknown.
        costs: tuple[BucketCost, ...] = ()
        if amount is not None and unit is not None:
            scale = (count_devices(report) / amount) / (count_devices(first) / unit)
            buckets = zip(BUCKETS, side.mean.buckets_ns, base.mean.buckets_ns, strict=True)
            costs = tuple(
                BucketCost(bucket, (own_ns * scale - base_ns) / base.mean.step_ns)
                for bucket, own_ns, base_ns in buckets
            )
        predicted = report.prediction
        runs.append(
            ScalingRun(
                name=report.run.name,
                gpus=count_devices(report),
                mesh=report.run.mesh,
                step=side.mean,
                median_ns=side.median_ns,
                tokens_per_s_per_gpu=side.tokens_per_s,
                efficiency=1 / (1 + sum(cost.share for cost in costs)) if costs else None,
                costs=costs,
                predicted_ns=None if predicted is None else predicted.split.step_ns,
                peak_allocated_bytes=side.peak_allocated_bytes,
            )
        )
    return Scaling(SCHEMA, work, first.run.name, tuple(runs))


def scaling_to_json(scaling: Scaling) -> bytes:
    """The scaling as JSON text."""
    return msgspec.json.format(msgspec.json.encode(scaling), indent=1) + b"\n"


def _count_tokens(report: Report) -> float | None:
    """The tokens of a step of all GPUs."""
    predicted = report.prediction
    if predicted is None:
        return None
    per_gpu = predicted.tokens_per_s_per_gpu * predicted.split.step_ns / 1e9
    return per_gpu * count_devices(report) or None
