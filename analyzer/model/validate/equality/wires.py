"""Bus bandwidth by nccl-tests' definition, and the volumes that real traces recorded."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.messages import messages_of
from stepsplit.analyzer.model.validate.arithmetic import evaluate
from stepsplit.analyzer.model.validate.gather import equality
from stepsplit.analyzer.model.validate.jobs.ccl_bench import ccl_bench, dense
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row
from stepsplit.analyzer.ops import busbw_factor

OPS = {
    "AllReduce": "all_reduce", "ReduceScatter": "reduce_scatter", "AllGather": "all_gather",
    "Broadcast": "broadcast", "Reduce": "reduce", "AlltoAll": "all_to_all",
}  # fmt: skip
RANKS = (2, 3, 8, 64, 1024)
VOLUMES = {
    "all_reduce": "vol_allreduce_GB",
    "all_gather": "vol_allgather_GB",
    "reduce_scatter": "vol_reducescatter_GB",
}
LEAST_GB = 0.01
"""Summed norms and losses, a few MB a step, differ from version to version of torchtitan."""
OPEN = 1e-3


def wire_checks(published: Published) -> tuple[Check, ...]:
    factors = published.records("nccl_busbw_definitions")
    traces = [row for row in published.records("ccl_bench_training_traces") if dense(row)]
    return (
        equality("nccl-tests, busbw factors", factors, _factors),
        equality("CCL-Bench, dense message volumes", traces, _volumes),
    )


def _factors(row: Record) -> tuple[Row, ...]:
    return tuple(_factor(row, ranks) for ranks in RANKS)


def _factor(row: Record, ranks: int) -> Row:
    said = evaluate(row.text("busbw_factor"), {"n": ranks})
    found = busbw_factor(row.choice("collective", OPS), ranks)
    case = f"{row.id}_{ranks}"
    return Row(row.table, case, "busbw / algbw", said, found, "ratio", tolerance=1e-12)


def _volumes(row: Record) -> tuple[Row, ...]:
    """Input bytes of the first stage's rank in a step, as the traces count them; 0.1 %."""
    sums = dict.fromkeys(VOLUMES, 0)
    for message in messages_of(ccl_bench(row)):
        if message.stage == 0 and message.op in sums:
            sums[message.op] += message.count * message.input_bytes
    return tuple(
        Row(
            row.table, row.id, op, row.number(column), sums[op] / 1e9, "GB",
            tolerance=OPEN * row.number(column),
        )
        for op, column in VOLUMES.items()
        if row.known(column) and row.number(column) > LEAST_GB
    )  # fmt: skip
