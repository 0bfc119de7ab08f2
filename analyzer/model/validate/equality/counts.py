"""Parameters, and the FLOPs and utilization that follow from a published time."""

from __future__ import annotations

from stepsplit.analyzer.model.spec.presets import transformer
from stepsplit.analyzer.model.validate.arithmetic import half_digit
from stepsplit.analyzer.model.validate.gather import equality
from stepsplit.analyzer.model.validate.jobs.llm_foundry import mpt
from stepsplit.analyzer.model.validate.jobs.megatron import sc21_table1
from stepsplit.analyzer.model.validate.records import Published, Record
from stepsplit.analyzer.model.validate.tables import Check, Row
from stepsplit.analyzer.model.work.parameters import active_parameters, total_parameters

QUANTITIES = ("params_total", "params_active")
PRESETS = {"DeepSeek-V3": "deepseek-v3"}


def count_checks(published: Published) -> tuple[Check, ...]:
    sc21 = published.records("megatron_sc21_table1")
    foundry = published.records("llm_foundry_mpt_throughput")
    return (
        equality("SC'21 table 1, parameters", sc21, _sc21),
        equality("llm-foundry, parameters", foundry, _mpt),
        equality("DeepSeek-V3, parameters", published.records("published_scalars"), _scalar),
    )


def _sc21(row: Record) -> tuple[Row, ...]:
    printed, found = row.text("params_B"), total_parameters(sc21_table1(row)[0].job.model)
    return (Row(
        row.table, row.id, "parameters", float(printed), found / 1e9, "billion",
        tolerance=half_digit(printed),
    ),)  # fmt: skip


def _mpt(row: Record) -> tuple[Row, ...]:
    said, found = row.number("num_params"), float(total_parameters(mpt(row)))
    return (Row(row.table, row.id, "parameters", said, found, "parameters"),)


def _scalar(row: Record) -> tuple[Row, ...]:
    """Printed as 671B and 37B; of the active ones the embedding is looked up, not multiplied."""
    what = row.text("quantity")
    if what not in QUANTITIES:
        return ()
    said = row.number("value")
    model = transformer(row.choice("model", PRESETS))
    found = total_parameters(model)
    if what == "params_active":
        found = active_parameters(model) - model.vocab * model.hidden
    return (Row(row.table, row.id, what, said, float(found), "parameters", tolerance=0.5e9),)
