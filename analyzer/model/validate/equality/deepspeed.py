"""DeepSpeed's own memory estimators: their formulas, and what they print."""

from __future__ import annotations

from stepsplit.analyzer.model.memory.offload import deepspeed_host_bytes, offload
from stepsplit.analyzer.model.memory.states import States, parameter_bytes, share
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.validate.arithmetic import evaluate, half_digit
from stepsplit.analyzer.model.validate.gather import equality
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row

PARAMETERS, LARGEST, RANKS = 10**12, 10**9, 64


def deepspeed_checks(published: Published) -> tuple[Check, ...]:
    formulas = published.records("deepspeed_estimator_formulas")
    outputs = published.records("deepspeed_estimator_outputs")
    return (
        equality("DeepSpeed estimators, formulas", formulas, _formula),
        equality("DeepSpeed estimators, as printed", outputs, _outputs),
    )


def _formula(row: Record) -> tuple[Row, ...]:
    """Bytes on a GPU for PARAMETERS parameters, LARGEST in the largest layer, over RANKS ranks."""
    symbols = {"P": PARAMETERS, "N": RANKS, "largest": LARGEST}
    said = evaluate(row.text("gpu_bytes"), symbols)
    moved = _moved(row.text("offload"))
    found = _gpu_bytes(row.text("stage"), moved, PARAMETERS, LARGEST, RANKS)
    return (Row(row.table, row.id, "bytes on a GPU", said, float(found), "bytes", tolerance=1.0),)


def _outputs(row: Record) -> tuple[Row, ...]:
    return _gpu(row), _host(row)


def _gpu(row: Record) -> Row:
    """The estimator's "GB" are GiB."""
    ranks = row.count("gpus_per_node") * row.count("nodes")
    found = _gpu_bytes(
        row.text("stage"), _moved(row.text("options")), row.count("total_params"),
        row.count("largest_layer_params"), ranks,
    )  # fmt: skip
    return _printed(row, "per_gpu_GB_as_printed", "on a GPU", found)


def _host(row: Record) -> Row:
    nodes, zero = row.count("nodes"), int(row.text("stage")[-1])
    largest = row.count("largest_layer_params") if row.known("zero_init") else None
    found = deepspeed_host_bytes(
        row.count("total_params"), row.count("gpus_per_node"), nodes, zero,
        _moved(row.text("options")), largest,
    )  # fmt: skip
    return _printed(row, "per_cpu_GB_as_printed", "on the host", found)


def _printed(row: Record, column: str, what: str, found: int) -> Row:
    """The printed counts are rounded to a million parameters: 0.1 % beside the last digit."""
    said = row.number(column)
    open_ = half_digit(row.text(column)) + 1e-3 * said
    return Row(row.table, row.id, what, said, found / 2**30, "GiB", tolerance=open_)


def _moved(options: str) -> frozenset[str]:
    found = {"optimizer"} if "optimizer=cpu" in options else set()
    return frozenset(found | ({"parameters"} if "param" in options else set()))


def _gpu_bytes(stage: str, moved: frozenset[str], count: int, largest: int, ranks: int) -> int:
    recipe = Recipe(
        seq_len=1, micro_batch=1, global_batch=1, dtype="fp16", gradient_dtype="fp16",
        framework="deepspeed", offload=moved,
    )  # fmt: skip
    zero = int(stage[-1])
    states: States = share(count, ranks, parameter_bytes(recipe), recipe, zero)
    gathered = 4 * largest if zero >= 3 else 0
    return offload(states, recipe).states.total_bytes + gathered
