"""Validation of collective times: published sweeps and bus bandwidths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stepsplit.analyzer.model.comm_measured import TransferSweep
from stepsplit.analyzer.model.comm_time import time_of
from stepsplit.analyzer.model.config import Hardware, Job, Layout, Recipe, Span, Transformer
from stepsplit.analyzer.model.config_file import hardware, transformer
from stepsplit.analyzer.model.memory_states import layer_activations
from stepsplit.analyzer.ops import busbw_factor
from stepsplit.analyzer.validation.published_runs import fitted_collectives, fitted_memory
from stepsplit.analyzer.validation.tables import (
    Check,
    Published,
    Record,
    Row,
    check,
    gathered,
    marked,
)

# Predicted times of collectives against measured sweeps.

ALPS, SWEEPS = "nccl_allreduce_alps_gh200", "nccl_allreduce_sweeps"

CLUSTERS = {
    "A100": ("a100-sxm-80gb", "ib-hdr-200"),
    "H100": ("h100-sxm", "efa-p5"),
    "H200": ("h200-sxm", "efa-p5"),
    "B200": ("b200-sxm", "efa-p6-b200"),
    "GH200": ("gh200", "slingshot-11"),
}
"""A word of the system's name -> its GPU and its network (ml-engineering's are AWS instances)."""

LARGE_BYTES = 64 * 2**20


def collective_checks(published: Published) -> tuple[Check, ...]:
    rows = [row for row in (*published.records(SWEEPS), *published.records(ALPS)) if _valid(row)]
    large = [row for row in rows if row.count("size_bytes") >= LARGE_BYTES]
    inside = [row for row in large if row.count("nodes") == 1]
    between = [row for row in large if row.count("nodes") > 1]
    left_out = [each for sweep in _sweeps(rows) for each in _left_out(sweep)]
    return (
        check("all_reduce in a node, from 64 MiB", _closed(inside), "mean", (0.05,)),
        check("all_reduce over nodes, from 64 MiB", _closed(between), "median", (0.10,)),
        check("all_reduce in a node, interpolated", left_out, "mean", (0.08,)),
    )


def _valid(row: Record) -> bool:
    """Rows whose results were wrong, or of systems that no preset describes, say nothing."""
    wrong = row.known("wrong_oop") and row.number("wrong_oop") != 0
    return not wrong and row.text("collective") == "all_reduce" and bool(_word(row))


def _word(row: Record) -> str:
    words = [word for word in CLUSTERS if word in row.text("system")]
    return max(words, key=len, default="")


def _closed(rows: Iterable[Record]) -> tuple[Row, ...]:
    """The closed form; a sweep's odd powers of two were fitted on."""
    return marked([_time_row(row) for row in rows], fitted_collectives())


def _time_row(row: Record) -> Row:
    found = time_of("all_reduce", row.count("size_bytes"), _span(row), _cluster(row)).ns
    return Row(row.table, row.id, "time", _time_ns(row), found, "ns")


def _cluster(row: Record) -> Hardware:
    name, link = CLUSTERS[_word(row)]
    return hardware(name, link, _span(row).ranks_per_node)


def _span(row: Record) -> Span:
    return Span(row.count("ranks"), row.count("ranks") // row.count("nodes"))


def _time_ns(row: Record) -> float:
    return row.number("time_us_oop" if row.table == ALPS else "time_us") * 1e3


def _sweeps(rows: Iterable[Record]) -> list[list[Record]]:
    """The rows of each sweep inside a node, by size."""
    found: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if row.count("nodes") == 1:
            found.setdefault((row.text("system"), row.text("tool")), []).append(row)
    return [sorted(each, key=lambda row: row.count("size_bytes")) for each in found.values()]


def _left_out(rows: list[Record]) -> list[Row]:
    """Each inner point from the others of its sweep: interpolation fits nothing."""
    points = [(row.count("size_bytes"), _time_ns(row)) for row in rows]
    found = []
    for i, row in enumerate(rows[1:-1], start=1):
        sizes, times = zip(*points[:i], *points[i + 1 :], strict=True)
        span = _span(row)
        sweep = TransferSweep("all_reduce", span.ranks, span.ranks_per_node, sizes, times)
        predicted = sweep.time_of(points[i][0])
        found.append(Row(row.table, row.id, "time", points[i][1], predicted, "ns"))
    return found


# Bus bandwidths that large collectives reach in a node, by ranks and algorithm.

BUSBW_TABLE = "nccl_busbw_by_ranks_and_algo"

GPUS = {"A100": "a100-sxm-80gb", "H100": "h100-sxm", "H200": "h200-sxm", "B200": "b200-sxm",
        "MI300X": "mi300x"}  # fmt: skip


def busbw_checks(published: Published) -> tuple[Check, ...]:
    records = [row for row in published.records(BUSBW_TABLE) if _gpu(row) in GPUS]
    name, fitted = "busbw in a node, from 4 GiB", fitted_collectives()
    return (gathered(name, records, _rows, "mean", (0.05,), fitted),)


def _rows(row: Record) -> tuple[Row, ...]:
    """As NCCL chose, and where it was measured without the switch's own sums (NVLS)."""
    cluster = hardware(GPUS[_gpu(row)])
    rings = replace(cluster, nvls=0.0)
    chosen = rings if "NVLS=0" in row.text("collective") else cluster
    found = [_busbw_row(row, row.id, "busbw_default", chosen)]
    if row.known("busbw_nvls_off"):
        found.append(_busbw_row(row, f"{row.id}_rings", "busbw_nvls_off", rings))
    return tuple(found)


def _busbw_row(row: Record, case: str, column: str, cluster: Hardware) -> Row:
    op, ranks = row.text("collective").split()[0], row.count("ranks")
    message_bytes = int(row.text("system").split()[1].removesuffix("GiB")) * 2**30
    span = Span(ranks, min(ranks, cluster.gpus_per_node))
    bytes_per_s = message_bytes / (time_of(op, message_bytes, span, cluster).ns * 1e-9)
    predicted = busbw_factor(op, ranks) * bytes_per_s / 1e9
    return Row(row.table, case, "busbw", row.number(column), predicted, "GB/s")


def _gpu(row: Record) -> str:
    """The GPU of a system such as 8xH200 8GiB."""
    return row.text("system").split()[0].partition("x")[2]


# What a layer saves in transformers, run eagerly, against measured coefficients.

EAGER_TABLE = "activation_coefficient_measured"

BAR = (0.10,)

NOTE = "norms of queries and keys, which Qwen3 has, are not modelled"

GEMMA = Transformer(
    layers=18, hidden=2048, heads=8, kv_heads=1, head_size=256, ffn=16384, vocab=256000,
    gated=True, norm="rms", biases=False,
)  # fmt: skip
"""config.json of google/gemma-1.1-2b-it."""

PRESETS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "qwen3-8b",
}


def eager_checks(published: Published) -> tuple[Check, ...]:
    records, name = published.records(EAGER_TABLE), "transformers, activations of a layer"
    return (gathered(name, records, _coefficient, "mean", BAR, fitted_memory(), NOTE),)


def _coefficient(row: Record) -> tuple[Row, ...]:
    """Bytes of one decoder layer over 2 b s h."""
    recipe = Recipe(row.count("seq"), micro_batch=1, global_batch=1, framework="huggingface")
    job = Job(_model(row), Layout(), recipe, hardware("h100-sxm"))
    found = layer_activations(job).total_bytes / (2 * job.tokens * job.model.hidden)
    return (Row(row.table, row.id, "coefficient", row.number("coefficient"), found, "x 2bsh"),)


def _model(row: Record) -> Transformer:
    if row.text("model").startswith("google/gemma-1.1-2b"):
        return GEMMA
    return transformer(row.choice("model", PRESETS))
