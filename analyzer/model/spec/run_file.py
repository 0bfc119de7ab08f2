"""RUN.toml -> Job."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.spec import presets
from stepsplit.analyzer.model.spec.checks import first_fault
from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.hardware_file import hardware_file
from stepsplit.analyzer.model.spec.hardware_table import HARDWARE_KEYS, hardware_of
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.layout_table import framework_of, layout_of
from stepsplit.analyzer.model.spec.model_table import MODEL_KEYS, transformer_of
from stepsplit.analyzer.model.spec.recipe import FRAMEWORKS
from stepsplit.analyzer.model.spec.recipe_table import recipe_of
from stepsplit.analyzer.model.spec.table import Table, either, near, read_table, table_of
from stepsplit.analyzer.model.spec.transformer import Transformer

SAME_FRAMEWORKS = {
    "megatron-lm": "megatron", "megatron-core": "megatron", "torchtitan": "fsdp2", "fsdp": "fsdp2",
    "fsdp1": "fsdp2", "hf": "huggingface", "transformers": "huggingface",
}  # fmt: skip
"""Other words for what trains the same way here."""


def read_job(path: str | Path) -> Job:
    """The job that the file states, checked. Raises DataError, which names the key and the mend;
    UsageError where no hardware is named."""
    return job_in(read_table(path))


def job_of(text: str, where: str = "RUN.toml") -> Job:
    """The job of a RUN.toml's text, checked; where names it in errors. Raises as read_job."""
    return job_in(table_of(where, text.encode()))


def job_in(table: Table) -> Job:
    """The job that the tables state, checked. Raises as read_job."""
    table.knows("model", "parallel", "training", "hardware")
    table.needs("model", "training")
    if "hardware" not in table.values:
        raise UsageError(f'{table.where}: on what? write [hardware] preset = "h100-sxm" or another')
    nothing = Table(table.where, "parallel", {})
    parallel, training = table.table("parallel", nothing), table.table("training", nothing)
    stated = training.same(SAME_FRAMEWORKS).one_of("framework", FRAMEWORKS, None)
    model = _model(table.table("model", nothing), training.count("seq_len", 0))
    layout = layout_of(parallel, stated, model.experts is not None)
    framework = stated or framework_of(parallel)
    hardware = _hardware(table.table("hardware", nothing))
    recipe = recipe_of(training, layout, framework, model, hardware)
    job = Job(model, layout, recipe, hardware)
    fault = first_fault(job)
    if fault is not None:
        raise DataError(table.where, fault.problem, fault.mend)
    return job


def layout_in(table: Table) -> Layout:
    """The layout that the tables state, whatever else they do. Raises DataError."""
    nothing = Table(table.where, "parallel", {})
    training = table.table("training", nothing).same(SAME_FRAMEWORKS)
    return layout_of(
        table.table("parallel", nothing), training.one_of("framework", FRAMEWORKS, None)
    )


def _model(table: Table, seq_len: int) -> Transformer:
    table.knows("preset", *MODEL_KEYS)
    preset = table.text("preset", None)
    try:
        base = None if preset is None else presets.transformer(preset)
    except UsageError:
        raise _unknown(table, preset, presets.model_names()) from None
    return transformer_of(table, base, seq_len)


def _hardware(table: Table) -> Hardware:
    file = hardware_file(table)
    if file is None:
        return _of_preset(table)
    table.knows(*HARDWARE_KEYS)
    if "file" in file.values:
        raise file.error("file", "names another in turn", "name that one in the RUN.toml")
    return hardware_of(table, _of_preset(file))


def _of_preset(table: Table) -> Hardware:
    table.knows("preset", *HARDWARE_KEYS)
    preset = table.text("preset", None)
    try:
        base = None if preset is None else presets.hardware(preset)
    except UsageError:
        raise _unknown(table, preset, presets.hardware_names()) from None
    return hardware_of(table, base)


def _unknown(table: Table, preset: str | None, names: tuple[str, ...]) -> DataError:
    mend = f"write {either(near(str(preset), names))}"
    return table.error("preset", f"{preset!r} is unknown", mend)
