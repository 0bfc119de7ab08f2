"""What a layer saves in transformers, run eagerly, against measured coefficients."""

from __future__ import annotations

from stepsplit.analyzer.model.memory.activations import layer_activations
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.presets import hardware, transformer
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.spec.transformer import Transformer
from stepsplit.analyzer.model.validate.fitted import fitted_memory
from stepsplit.analyzer.model.validate.gather import gathered
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row

TABLE = "activation_coefficient_measured"
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
    records, name = published.records(TABLE), "transformers, activations of a layer"
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
