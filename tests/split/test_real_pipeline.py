"""A real job of 4 stages and 2 replicas whose last stage is too heavy, as its owners published it.

The data are a table of operations, no trace: here they are written as the kernels that they were,
on whole microseconds, and messages 20 us shorter, for by the table's times computing resumes up to
so much before the message that it waited for has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, groupby
from math import ceil, floor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.builders import GpuTrace
from support.required import shared_trace

from stepsplit.analyzer import Report, analyze, what_if

Row = dict[str, Any]
RANKS, STAGES, REPLICAS = 8, 4, 2
ROUNDED_US = 20
STEPS = (
    23, 25, 33, 34, 36, 259, 261, 263, 264, 266, 273, 276, 278, 288, 514, 516,
    519, 525, 526, 530, 535, 538, 1010, 1012, 1021, 1023, 1026, 1028, 1029, 1039, 1043, 1048,
)  # fmt: skip
SLOWDOWN = 1.1787
"""The published S of the job: its step over that of a job in which all ranks are alike."""
COMPUTES = ("forward-compute", "backward-compute", "optimizer")
TOWARDS = {
    "forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1,
}  # fmt: skip
COLLECTIVES = {
    "params-all-gather": ("AllGather", "all_gather", "dp"),
    "grads-reduce-scatter": ("ReduceScatter", "reduce_scatter", "dp"),
    "embedding-grads-all-reduce": ("AllReduce", "allreduce", "embd"),
}


def record(folder: Path) -> None:
    rows = pq.read_table(shared_trace("straggler_bytedance") / "trace-ST.parquet").to_pylist()
    ends = {step: max(end_us(row) for row in rows if row["step"] == step) for step in STEPS}
    begins = dict(zip(STEPS, accumulate(ends.values(), initial=0.0), strict=False))
    for rank in range(RANKS):
        trace = GpuTrace(rank, RANKS, groups=groups_of(rank))
        for step in STEPS:
            mine = [row for row in rows if (row["rank"], row["step"]) == (rank, step)]
            trace.step(step, begins[step], begins[step] + ends[step])
            for together in batches(mine):
                write(trace, together, begins[step])
        trace.write(folder)


def end_us(row: Row) -> float:
    return 1e6 * (row["start_ts"] + row["duration"])


def batches(rows: list[Row]) -> Iterator[list[Row]]:
    """The operations in order; messages of one start and duration are one batch, in one kernel."""
    ordered = sorted(rows, key=lambda row: (row["start_ts"], row["duration"], row["optype"]))
    for _, same in groupby(ordered, key=lambda row: (row["start_ts"], row["duration"])):
        together = list(same)
        messages = [row for row in together if row["optype"] in TOWARDS]
        if messages:
            yield messages
        yield from ([row] for row in together if row["optype"] not in TOWARDS)


def groups_of(rank: int) -> list[tuple[str, str, list[int]]]:
    stage, replica = divmod(rank, REPLICAS)
    line = list(range(replica, RANKS, REPLICAS))
    return [
        ("pp", "PIPELINE_MODEL_PARALLEL_GROUP", line),
        ("dp", "DATA_PARALLEL_GROUP", [stage * REPLICAS, stage * REPLICAS + 1]),
        ("embd", "EMBEDDING_GROUP", [line[0], line[-1]]),
    ]


def write(trace: GpuTrace, rows: list[Row], at: float) -> None:
    row, stage = rows[0], trace.rank // REPLICAS
    op, start, end = row["optype"], ceil(at + 1e6 * row["start_ts"]), floor(at + end_us(row))
    if op in COMPUTES:
        trace.kernel(op, start, end)
        if row["mb_id"] != -1:
            trace.gpu_annotation(f"PP:{stage}{op[0].upper()}{row['mb_id']}", start, end)
    elif op in TOWARDS:
        for row in rows:
            peer = trace.rank + TOWARDS[row["optype"]] * REPLICAS
            trace.post(row["optype"].split("-")[1], peer, start, start, group="pp")
        end = max(start, end - ROUNDED_US)
        trace.kernel("ncclDevKernel_SendRecv", start, end, launched=start + 0.001, stream=20)
    elif op in COLLECTIVES:
        kind, name, group = COLLECTIVES[op]
        trace.collective(kind, name, start, end, group=group, nelems=1_000_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("job")
    record(found)
    return found


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return analyze(folder)


def test_every_step_is_conserved_and_every_call_matched(report: Report) -> None:
    assert len(report.steps) == RANKS * len(STEPS)
    assert all(sum(row.split.buckets_ns) == row.step_ns for row in report.steps)
    assert all(row.unmatched == 0 for row in report.coverage)


def test_the_last_stage_is_to_blame_as_published(report: Report) -> None:
    caused: Counter[int] = Counter()
    for row in report.blame:
        if row.rank is not None:
            caused[row.rank // REPLICAS] += row.caused_ns
    assert caused.most_common(1)[0][0] == STAGES - 1
    assert caused[STAGES - 1] > 0.7 * caused.total()


def test_the_slowdown_is_the_published_one_by_a_replay_of_the_timeline_alone(folder: Path) -> None:
    assert what_if(folder).slowdown == pytest.approx(SLOWDOWN, abs=0.005)


def test_the_last_stage_is_the_cause_that_can_be_fixed(report: Report) -> None:
    """Twice the microbatches would gain more: four are few for four stages."""
    uneven = next(one for one in report.findings if one.code == "uneven_stages")
    assert uneven.ranks == (6, 7)
    assert uneven.gain_ns > 0.1 * sum(row.step_ns for row in report.steps) / len(report.steps)
    assert not any(one.code in ("slow_rank", "uneven_ranks") for one in report.findings)


def test_the_first_stages_wait_in_the_bubble_caused_by_the_last_one(report: Report) -> None:
    pipeline = report.pipeline
    assert pipeline is not None
    assert (pipeline.schedule, pipeline.microbatches) == ("1f1b", 4)
    shares = [stage.bubble_fraction for stage in pipeline.stages]
    assert min(shares[:-1]) > 1.2 * shares[-1]
