"""The constants of compute and of the host, from the stages of recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean

import numpy as np

from stepsplit.analyzer.compare.calibrate.parts import Parts, parts_of
from stepsplit.analyzer.compare.calibrate.seen import RunSeen, StageSeen
from stepsplit.analyzer.model.config import Efficiency
from stepsplit.analyzer.model.step_time import straggling

LEAST_LEFT = 0.2
"""Of a family's time at least this share is its own work, whatever its bytes and launches cost."""
APART = 2.0
"""Launches are told from bytes where their ratio differs by so many times between stages."""
HOST_BOUND = 0.05
"""A device that idles less of its step is not held up by its host."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One stage of one run: what its parts are, and what was measured."""

    parts: Parts
    seen: StageSeen


def efficiency_seen(runs: Sequence[RunSeen], known: Efficiency) -> Efficiency:
    """The constants that explain the measured compute; what no run tells stays as known.

    Each constant is the geometric mean over all stages: least squares on the logarithms. Without
    names of kernels all shares are scaled by one number.
    """
    rows = [_Row(parts, seen) for run in runs for parts, seen in _both(run)]
    if any(row.seen.products_ns <= 0 or row.seen.other_ns <= 0 for row in rows):
        found = _scaled(rows, known)
    else:
        found = _attention(rows, _products(rows, _memory(rows, known)))
    return replace(
        found,
        host_ns=_host_ns(runs, rows) or known.host_ns,
        jitter=_jitter(runs) or known.jitter,
    )


def _both(run: RunSeen) -> list[tuple[Parts, StageSeen]]:
    parts = parts_of(run.job)
    return [(parts[seen.stage], seen) for seen in run.stages]


def _memory(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """memory and, where the stages differ enough, launch_ns, from what is no product."""
    told = _moves_and_launches(rows)
    if told is not None:
        return replace(known, memory=1 / told[0], launch_ns=told[1])
    slow = [
        _left(row.seen.other_ns, row.parts.other_launches * known.launch_ns) / row.parts.other_moves
        for row in rows
    ]
    return replace(known, memory=1 / geometric_mean(slow))


def _moves_and_launches(rows: Sequence[_Row]) -> tuple[float, float] | None:
    """(1 / memory, launch_ns) by least squares of the ratios; None where they are not told."""
    ratios = [row.parts.other_launches / row.parts.other_moves for row in rows]
    if max(ratios) < APART * min(ratios):
        return None
    left = np.array(
        [
            (
                row.parts.other_moves / row.seen.other_ns,
                row.parts.other_launches / row.seen.other_ns,
            )
            for row in rows
        ]
    )
    moves, launch_ns = np.linalg.lstsq(left, np.ones(len(rows)), rcond=None)[0].tolist()
    return (moves, launch_ns) if moves > 0 and launch_ns > 0 else None


def _products(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    slow = [_left(row.seen.products_ns, _beside(row, known)) / row.parts.products for row in rows]
    return replace(known, gemm=1 / geometric_mean(slow))


def _beside(row: _Row, known: Efficiency) -> float:
    """What bytes and launches of the products take."""
    moves = row.parts.product_moves / known.memory
    return moves + row.parts.product_launches * known.launch_ns


def _attention(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """The share that attention reaches, by whichever kind of kernel; of none seen as known."""
    slow = [
        row.seen.attention_ns / row.parts.core
        for row in rows
        if row.seen.attention_ns > 0 and row.parts.core > 0
    ]
    if not slow:
        return known
    share = 1 / geometric_mean(slow)
    return replace(known, attention=share, unfused_attention=share)


def _scaled(rows: Sequence[_Row], known: Efficiency) -> Efficiency:
    """All constants by one number, so that the sum is as measured."""
    times = geometric_mean([row.seen.split.compute_ns / _predicted(row, known) for row in rows])
    return replace(
        known,
        gemm=known.gemm / times,
        attention=known.attention / times,
        unfused_attention=known.unfused_attention / times,
        memory=known.memory / times,
        launch_ns=known.launch_ns * times,
    )


def _predicted(row: _Row, known: Efficiency) -> float:
    parts = row.parts
    moves = (parts.product_moves + parts.other_moves) / known.memory
    starts = (parts.product_launches + parts.other_launches) * known.launch_ns
    return parts.products / known.gemm + parts.core / known.attention + moves + starts


def _left(whole_ns: float, taken_ns: float) -> float:
    return max(whole_ns - taken_ns, LEAST_LEFT * whole_ns)


def _jitter(runs: Sequence[RunSeen]) -> float:
    """By what ratio step times vary, 0 where no run waited for others of its stage."""
    each = []
    for run in runs:
        unit = replace(run.job.hardware.efficiency, jitter=1.0)
        job = replace(run.job, hardware=replace(run.job.hardware, efficiency=unit))
        times = straggling(job)
        skews = [one.split.skew_ns / (one.step_ns - one.split.skew_ns) for one in run.stages]
        each += [skew / times for skew in skews] if times else []
    return fmean(each) if each else 0.0


def _host_ns(runs: Sequence[RunSeen], rows: Sequence[_Row]) -> float:
    """What launching a layer's forward takes, 0 where nothing waits for it.

    A CPU that computes idles for all of it, a device for what its work does not hide.
    """
    alone = runs[0].job.hardware.family == "cpu"
    each = []
    for row in rows:
        split, host = row.seen.split, row.parts.host
        if host <= 0 or split.idle_ns <= (0.0 if alone else HOST_BOUND * row.seen.step_ns):
            continue
        hidden = 0 if alone else split.compute_ns + split.exposed_comm_ns
        each.append((split.idle_ns + hidden) / host)
    return fmean(each) if each else 0.0
