"""Runs for the gate's tests, their facts laid down by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from stepsplit.analyzer import CheckResult, Setup, check_runs
from stepsplit.analyzer.regression.metrics import (
    BucketTime,
    CallMetrics,
    CausedWait,
    Doubt,
    GroupRanks,
    RunMetrics,
    Value,
    to_json,
)

MS = 1_000_000
SETUP = Setup(
    world_size=4, ranks=(0, 1, 2, 3), hosts=1, device="NVIDIA H100", mesh="dp_replicate 2 tp 2",
    backend="nccl", schedule=None, microbatches=None, torch="2.13.0", nccl="2.30.7",
    driver="580.65.06",
)  # fmt: skip
GROUPS = (
    GroupRanks("tp", "mesh_tp", (0, 1)),
    GroupRanks("tp", "mesh_tp", (2, 3)),
    GroupRanks("dp_replicate", "mesh_dp", (0, 2)),
    GroupRanks("dp_replicate", "mesh_dp", (1, 3)),
)
CALLS = (
    CallMetrics("tp", "all_reduce", "bfloat16", 4_000_000, 64, False, 400_000, 20_000),
    CallMetrics("dp_replicate", "all_reduce", "float32", 25_000_000, 16, False, 900_000, 50_000),
)
TIMES = (
    BucketTime("compute", None, 80 * MS),
    BucketTime("collective", None, 12 * MS),
    BucketTime("collective", "tp", 9 * MS),
    BucketTime("collective", "dp_replicate", 3 * MS),
    BucketTime("skew", None, 4 * MS),
    BucketTime("skew", "tp", 3 * MS),
    BucketTime("skew", "dp_replicate", 1 * MS),
)
BLAME = (CausedWait(1, "compute", "tp", 2 * MS), CausedWait(2, "host", "dp_replicate", 1 * MS))


def run(
    name: str,
    values: Mapping[str, float],
    *,
    setup: Setup = SETUP,
    calls: Sequence[CallMetrics] | None = CALLS,
    times: Sequence[BucketTime] = TIMES,
    blame: Sequence[CausedWait] = BLAME,
    predicted: Mapping[str, float] | None = None,
    doubts: Sequence[Doubt] | None = (),
) -> RunMetrics:
    """A run with these values of its metrics, else as usual."""
    return RunMetrics(
        name=name,
        setup=setup,
        steps=4,
        values=_values(values),
        calls=None if calls is None else tuple(calls),
        times=tuple(times),
        blame=tuple(blame),
        predicted=_values(predicted or {}),
        groups=GROUPS,
        doubts=None if doubts is None else tuple(doubts),
    )


def runs(name: str, metric: str, values: Sequence[float], **others: object) -> list[RunMetrics]:
    """A run for each value of the metric."""
    return [run(f"{name}{i}", {metric: value}, **others) for i, value in enumerate(values)]  # type: ignore[arg-type]


def _values(values: Mapping[str, float]) -> tuple[Value, ...]:
    return tuple(Value(metric, value) for metric, value in values.items())


def check(
    candidate: Sequence[RunMetrics],
    baseline: Sequence[RunMetrics],
    *rules: str,
    across_setups: bool = False,
) -> CheckResult:
    """The verdict on runs that lie in files, as stepsplit baseline writes them."""
    with TemporaryDirectory() as folder:
        places = []
        for name, side in (("candidate", candidate), ("baseline", baseline)):
            places.append([Path(folder) / f"{name}.json"] if side else [])
            for place in places[-1]:
                place.write_bytes(to_json(side))
        return check_runs(*places, budgets=rules, across_setups=across_setups)
