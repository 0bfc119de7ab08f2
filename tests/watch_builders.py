"""Batches of watched runs for the tests of the dashboard."""

from __future__ import annotations

import time
from typing import Any

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.watch.records import (
    EventKind,
    RankSample,
    Sample,
    StepWindow,
    WatchBatch,
    WatchEvent,
)

SECOND_NS, MS = 10**9, 10**6
RUN = "night"


def minutes_ago(minutes: float) -> int:
    """A time in ns since 1970, in the past."""
    return time.time_ns() - int(minutes * 60) * SECOND_NS


def batch(**parts: Any) -> WatchBatch:
    """A batch of host a, closed now, of the run night with four ranks."""
    usual = {
        "id": "a-0-1", "run": RUN, "incarnation": 0, "host": "a", "world_size": 4,
        "unix_ns": time.time_ns(), "interval_steps": 200, "budget": 0.005,
    }  # fmt: skip
    return WatchBatch(**{**usual, **parts})


def window(
    rank: int, end_ns: int, median_ns: int = 100 * MS, steps: int = 20, spread_ns: int = MS
) -> StepWindow:
    """Steps that ended at this time, and take the median give or take the spread."""
    return StepWindow(
        rank=rank, first_step=1, last_step=steps, start_unix_ns=end_ns - steps * median_ns,
        end_unix_ns=end_ns, steps=steps, min_step_ns=median_ns - spread_ns,
        median_step_ns=median_ns, max_step_ns=median_ns + spread_ns,
    )  # fmt: skip


def rank_sample(rank: int, wait_ns: int = 0, split: Split | None = None) -> RankSample:
    """A rank's step of 100 ms, by default."""
    usual = Split(compute_ns=70 * MS, collective_ns=20 * MS, skew_ns=6 * MS, idle_ns=4 * MS)
    exposed = {"tp": 12 * MS, "dp": 14 * MS}
    return RankSample(rank=rank, split=split or usual, exposed_ns=exposed, caused_wait_ns=wait_ns)


def sample(step: int, unix_ns: int, *ranks: RankSample, **parts: Any) -> Sample:
    """A sample of two steps."""
    usual = {
        "id": f"0-{step}-a", "step": step, "steps": 2, "unix_ns": unix_ns, "ranks": ranks,
        "cost_ns": 300 * MS,
    }  # fmt: skip
    return Sample(**{**usual, **parts})


def event(kind: EventKind, unix_ns: int, text: str, step: int = 1, **parts: Any) -> WatchEvent:
    """An event of the whole job."""
    return WatchEvent(kind=kind, step=step, unix_ns=unix_ns, text=text, **parts)
