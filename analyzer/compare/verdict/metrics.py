"""The metrics that a budget may name.

A name may be followed by an axis, and busbw by an axis and an op: exposed_comm.tp,
busbw.dp_replicate.all_reduce. Plain busbw is each axis and op that both sides have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "ns", "bytes", "bytes_per_s", "count"]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
COMMUNICATION = ("collective", "p2p", "skew")
"""The buckets that are exposed communication."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric means. worse is +1 where more is worse, -1 where less is; exact ones are the
    same in each run of the same job; by_axis ones may be asked of one axis."""

    name: str
    words: str
    unit: Unit
    worse: Literal[1, -1] = 1
    exact: bool = False
    by_axis: bool = False


METRICS = (
    Metric("step", "median step", "ns"),
    Metric("exposed_comm", "communication that held ranks up", "share", by_axis=True),
    Metric("compute", "compute", "share"),
    Metric("collective", "collectives that moved data", "share", by_axis=True),
    Metric("p2p", "messages that moved data", "share", by_axis=True),
    Metric("skew", "waits for a rank of the same stage", "share", by_axis=True),
    Metric("bubble", "waits for another pipeline stage", "share", by_axis=True),
    Metric("copy", "copies", "share"),
    Metric("idle", "nothing runs", "share"),
    Metric("overlap", "communication hidden under compute", "share", worse=-1),
    Metric("busbw", "bandwidth of the links, waits left out", "bytes_per_s", worse=-1),
    Metric("bubble_fraction", "bubble of the schedule", "share"),
    Metric("mfu", "model FLOPs utilization", "share", worse=-1),
    Metric("hfu", "hardware FLOPs utilization", "share", worse=-1),
    Metric("peak_memory", "peak memory of the fullest rank", "bytes"),
    Metric("calls", "collectives and messages a step", "count", exact=True, by_axis=True),
    Metric("bytes", "bytes of their messages a step", "bytes", exact=True, by_axis=True),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def meaning_of(name: str) -> Metric:
    """What the name of a judged metric means; judged ones have one."""
    found = metric_named(name)
    assert found is not None, name
    return found


def metric_named(name: str) -> Metric | None:
    """What a name means, its axis and op left out; None where it means nothing."""
    first, *rest = name.split(".")
    metric = BY_NAME.get(first)
    if metric is None or (rest and not (metric.by_axis or first == "busbw")):
        return None
    return metric if len(rest) <= (2 if first == "busbw" else 1) else None
