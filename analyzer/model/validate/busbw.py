"""Bus bandwidths that large collectives reach in a node, by ranks and algorithm."""

from __future__ import annotations

from dataclasses import replace

from stepsplit.analyzer.model.comm.time import time_of
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.presets import hardware
from stepsplit.analyzer.model.spec.span import Span
from stepsplit.analyzer.model.validate.fitted import fitted_collectives
from stepsplit.analyzer.model.validate.gather import gathered
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row
from stepsplit.analyzer.ops import busbw_factor

TABLE = "nccl_busbw_by_ranks_and_algo"
GPUS = {"A100": "a100-sxm-80gb", "H100": "h100-sxm", "H200": "h200-sxm", "B200": "b200-sxm",
        "MI300X": "mi300x"}  # fmt: skip


def busbw_checks(published: Published) -> tuple[Check, ...]:
    records = [row for row in published.records(TABLE) if _gpu(row) in GPUS]
    name, fitted = "busbw in a node, from 4 GiB", fitted_collectives()
    return (gathered(name, records, _rows, "mean", (0.05,), fitted),)


def _rows(row: Record) -> tuple[Row, ...]:
    """As NCCL chose, and where it was measured without the switch's own sums (NVLS)."""
    cluster = hardware(GPUS[_gpu(row)])
    rings = replace(cluster, nvls=0.0)
    chosen = rings if "NVLS=0" in row.text("collective") else cluster
    found = [_row(row, row.id, "busbw_default", chosen)]
    if row.known("busbw_nvls_off"):
        found.append(_row(row, f"{row.id}_rings", "busbw_nvls_off", rings))
    return tuple(found)


def _row(row: Record, case: str, column: str, cluster: Hardware) -> Row:
    op, ranks = row.text("collective").split()[0], row.count("ranks")
    message_bytes = int(row.text("system").split()[1].removesuffix("GiB")) * 2**30
    span = Span(ranks, min(ranks, cluster.gpus_per_node))
    bytes_per_s = message_bytes / (time_of(op, message_bytes, span, cluster).ns * 1e-9)
    predicted = busbw_factor(op, ranks) * bytes_per_s / 1e9
    return Row(row.table, case, "busbw", row.number(column), predicted, "GB/s")


def _gpu(row: Record) -> str:
    """The GPU of a system such as 8xH200 8GiB."""
    return row.text("system").split()[0].partition("x")[2]
