"""A job.toml, or configs of other programs, as a JobConfig: decodes the tables, fills in what they
leave out, and checks the whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.config import (
    Framework,
    HardwareConfig,
    JobConfig,
    ModelConfig,
    ParallelConfig,
)
from stepsplit.analyzer.model.config_checks import list_violations
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    decode_keys,
    decode_table,
    list_stated_keys,
    parse_table,
)
from stepsplit.analyzer.model.hardware_config import (
    HARDWARE_KEYS,
    decode_hardware_section,
    list_hardware_kinds,
    list_measured_files,
)
from stepsplit.analyzer.model.job_tables import JobSource, place_keys, read_job_tables
from stepsplit.analyzer.model.key_passes import remove_misplaced_keys, replace_key_aliases
from stepsplit.analyzer.model.layout_table import (
    PARALLEL_KEYS,
    build_layout,
    decode_parallel,
    infer_framework,
)
from stepsplit.analyzer.model.model_table import (
    MODEL_KEYS,
    MODEL_KINDS,
    decode_model,
    describe_assumed,
    find_model_of_name,
    load_model,
)
from stepsplit.analyzer.model.preset_names import list_hardware_names, list_model_names
from stepsplit.analyzer.model.profile import load_framework
from stepsplit.analyzer.model.schedule_names import MAX_STAGE_PAIRS
from stepsplit.analyzer.model.training_table import (
    TRAINING_KEYS,
    complete_training,
    decode_training,
)

_EXAMPLE_HINT = (
    'begin with [model] preset = "llama-3.1-8b", [training] seq_len = 8192, micro_batch = 1,'
    ' global_batch = 64, [hardware] preset = "h100-sxm"; all keys: docs/model.md'
)

JOB_KEYS = {
    "model": (*MODEL_KEYS, "preset"), "parallel": PARALLEL_KEYS, "training": TRAINING_KEYS,
    "hardware": (*HARDWARE_KEYS, "preset"),
}  # fmt: skip
"""The keys of each table."""

_SECTIONS = dict.fromkeys(("model", "parallel", "training", "hardware"), dict[str, object])


def read_job(
    path: str | Path, *more: str | Path, kind: str = "", settings: Sequence[str] = ()
) -> JobConfig:
    """Reads and checks a job config.

    Args:
        path: Path of a job.toml with the tables [model], [parallel], [training] and [hardware], or
            of a config of another program: config.json of Hugging Face, Megatron-LM's arguments, a
            TOML of torchtitan, DeepSpeed's JSON, overrides of a Megatron-Bridge recipe.
        more: Further files of the same job; a later one wins over an earlier one.
        kind: What kind of file path is ("job", "hugging-face", "deepspeed", "torchtitan",
            "megatron-bridge", "megatron"); "" (default): recognized by its content.
        settings: Keys and values that win over all files: "seq_len=8192". Default: none.

    Returns:
        The job, with presets and the framework's defaults filled in.

    Raises:
        DataError: A file is missing, not valid, has invalid keys (all are listed), leaves out what
            a prediction needs, or describes a job that violates a constraint.
        UsageError: The file has no [hardware], or kind or a setting is unknown.

    Examples:
        >>> job = read_job("job.toml")
        >>> job.parallel.world_size
        64
    """
    return decode_tables(read_tables((path, *more), kind, settings))


def read_tables(
    paths: Sequence[str | Path],
    kind: str = "",
    settings: Sequence[str] = (),
    is_planned: bool = False,
) -> JobSource:
    """Reads the files of a job as one table; is_planned: without a layout, which a search chooses.

    Raises as read_job.
    """
    return read_job_tables(paths, kind, settings, JOB_KEYS, is_planned)


def decode_tables(tables: JobSource) -> JobConfig:
    """Decodes and checks the tables of a job. Raises as read_job."""
    return _add_source(decode_job(tables.table), tables)


def _add_source(job: JobConfig, tables: JobSource) -> JobConfig:
    return replace(job, notes=(*tables.notes, *job.notes), unsaid=tables.unsaid)


SEARCHED = (
    "tp", "pp", "cp", "ep", "expert_tp", "dp", "dp_replicate", "dp_shard", "world_size", "gpus",
    "nodes", "sequence_parallel", "schedule", "chunks",
)  # fmt: skip
"""Keys of [parallel] that a search for layouts chooses itself."""


def decode_job_to_plan(tables: JobSource, keep: frozenset[str] = frozenset()) -> JobConfig:
    """Decodes a job config whose layout will be searched, except for the keys in keep.

    The search also tries what the file states. Of a layout that is not valid for the model
    layers_per_stage is left out (unless pp is kept), else all that is not kept. Raises as read_job.
    """
    return _add_source(_decode_to_plan(tables.table, keep), tables)


def _decode_to_plan(table: TomlTable, keep: frozenset[str]) -> JobConfig:
    with suppress(DataError):
        return decode_job(table)
    mistakes = Mistakes()
    table = replace_key_aliases(table, mistakes, JOB_KEYS).table
    mistakes.raise_all()
    layout = table.get_subtable("parallel").values
    if "pp" not in keep and "layers_per_stage" in layout:
        layout = {key: value for key, value in layout.items() if key != "layers_per_stage"}
        table = replace(table, values={**table.values, "parallel": dict(layout)})
        with suppress(DataError):
            return decode_job(table)
    stated = _decode_sections(table)
    kept = {k: v for k, v in layout.items() if k not in SEARCHED or k in keep}
    framework = stated.training.values.get("framework", infer_framework(stated.parallel))
    training = {**table.get_subtable("training").values, "framework": framework}
    return decode_job(
        replace(table, values={**table.values, "parallel": kept, "training": training})
    )


def parse_job(text: str, where: str = "job.toml") -> JobConfig:
    """Parses and checks the text of a job.toml; where is its name in errors. Raises as read_job."""
    return decode_job(parse_table(where, text.encode()))


def list_referenced_files(table: TomlTable) -> tuple[str, ...]:
    """Lists the files that a job's [hardware] names, as written there, wherever the keys were
    typed: what reading the job would open. Raises DataError."""
    # As the job is read, or a key of another table that moves here would be missed.
    placed = place_keys(table, JOB_KEYS)
    normalized = replace_key_aliases(placed, Mistakes(), JOB_KEYS, is_whole=False)
    hardware = normalized.table.get_subtable("hardware")
    file = decode_table(hardware.select("file"), {"file": str}).get("file")
    return (*list_measured_files(hardware), *(() if file is None else (file,)))


def decode_job(table: TomlTable) -> JobConfig:
    """Decodes and checks the tables of a job.

    Raises as read_job: with all invalid keys, else with all violated constraints.
    """
    stated = _decode_sections(table)
    table = stated.table
    model, hardware, training = stated.model, stated.hardware, stated.training
    layout = build_layout(
        stated.parallel, training.values.get("framework"), model.experts is not None
    )
    framework = training.values.get("framework", infer_framework(stated.parallel))
    completed_training = complete_training(training, layout, framework, model, hardware)
    notes = stated.notes
    if (stages := _split_unevenly(model, layout, framework)) is not None:
        layout = replace(layout, layers_per_stage=stages)
        notes += (
            f"parallel: {model.layers} layers on {len(stages)} stages as "
            f"layers_per_stage = {list(stages)}",
        )
    job = JobConfig(model, layout, completed_training, hardware, list_stated_keys(table), notes)
    faults = list_violations(job)
    Mistakes(DataError(table.where, one.problem, one.hint) for one in faults).raise_all()
    return job


def _split_unevenly(
    model: ModelConfig, layout: ParallelConfig, framework: Framework
) -> tuple[int, ...] | None:
    """Layers of each stage where stages do not divide them and the framework asks for as many on
    each: the last ones have one less, as the last one has the head. None if they divide them."""
    stages = layout.model_stages
    each, more = divmod(model.layers, stages)
    is_even = not load_framework(framework).messages.equal_stages or not more
    if layout.layers_per_stage is not None or is_even or not each or stages > MAX_STAGE_PAIRS:
        return None
    return (each + 1,) * more + (each,) * (stages - more)


def decode_layout(table: TomlTable) -> ParallelConfig:
    """Decodes the layout of the tables, not checked against the model. Raises as read_job."""
    stated = _decode_sections(table)
    return build_layout(stated.parallel, stated.training.values.get("framework"))


@dataclass(frozen=True, slots=True)
class _Sections:
    """The decoded tables of a file; parallel and training without defaults filled in. table is the
    file without keys of other programs, notes says what they became."""

    model: ModelConfig
    parallel: TomlTable
    training: TomlTable
    hardware: HardwareConfig
    table: TomlTable
    notes: tuple[str, ...]


def _decode_sections(table: TomlTable) -> _Sections:
    """Raises DataError with all mistakes of all tables, UsageError without [hardware]."""
    if not table.values:
        raise DataError(table.where, "is empty", _EXAMPLE_HINT)
    mistakes, mistakes_by_section = Mistakes(), {name: Mistakes() for name in _SECTIONS}
    normalized = replace_key_aliases(table, mistakes, JOB_KEYS)
    table = remove_misplaced_keys(normalized.table, mistakes, JOB_KEYS)
    tables = decode_keys(table, _SECTIONS, mistakes)
    for name, hint in _REQUIRED_SECTIONS.items():
        if name not in table.values:
            mistakes.append(DataError(table.where, f"[{name}] is missing", hint))
    if not mistakes and "hardware" not in tables:
        hint = 'write [hardware] preset = "h100-sxm" or another'
        raise UsageError(f"{table.where}: [hardware] is missing; {hint}")
    training = decode_training(table.get_subtable("training"), mistakes_by_section["training"])
    seq_len = training.values.get("seq_len", 0)
    hardware = decode_hardware_section(
        table.get_subtable("hardware"), mistakes_by_section["hardware"]
    )
    parallel = decode_parallel(table.get_subtable("parallel"), mistakes_by_section["parallel"])
    notes = normalized.notes
    if "nodes" in parallel.values and not mistakes_by_section["hardware"]:
        gpus, nodes = hardware.gpus_per_node * parallel.values["nodes"], parallel.values["nodes"]
        parallel = replace(parallel, values={"gpus": gpus, **parallel.values})
        if parallel.values["gpus"] != gpus:
            problem = f"{nodes} x hardware.gpus_per_node ({hardware.gpus_per_node}) is not gpus"
            error = parallel.build_error("nodes", problem, "remove one of them")
            mistakes_by_section["parallel"].append(error)
        notes += (f"parallel: nodes = {nodes} as gpus = {gpus}",)
    own, names = table.get_subtable("model"), list_model_names()
    preset = own.values.get("preset")
    base = load_model(preset) if isinstance(preset, str) and preset in names else None
    if preset is None:
        base = find_model_of_name(own, seq_len)
    sections = _Sections(
        model=decode_model(
            own, base, seq_len, mistakes_by_section["model"], {"preset": Literal[names]}
        ),
        parallel=parallel,
        training=training,
        hardware=hardware,
        table=table,
        notes=notes,
    )
    for name in tables:
        mistakes += mistakes_by_section[name]
    mistakes.raise_all()
    return replace(sections, notes=(*notes, *describe_assumed(own, sections.model, base)))


def check_job_keys(table: TomlTable) -> None:
    """Check the keys and values of a job.toml that may be incomplete.

    Raises DataError with all unknown keys and invalid values, but not for missing keys.
    """
    mistakes = Mistakes()
    normalized = replace_key_aliases(table, mistakes, JOB_KEYS, is_whole=False)
    table = remove_misplaced_keys(normalized.table, mistakes, JOB_KEYS)
    tables = decode_keys(table, _SECTIONS, mistakes)
    for name in tables:
        own, found = table.get_subtable(name), Mistakes()
        match name:
            case "parallel":
                decode_parallel(own, found)
            case "training":
                decode_training(own, found)
            case "model":
                decode_keys(own, MODEL_KINDS | {"preset": Literal[list_model_names()]}, found)
            case "hardware":
                kinds = list_hardware_kinds() | {"preset": Literal[list_hardware_names()]}
                decode_keys(own, kinds, found)
        mistakes += [one for one in found if not one.problem.endswith(": missing")]
    mistakes.raise_all()


_REQUIRED_SECTIONS = {
    "model": 'write [model] preset = "llama-3.1-8b" or another, or its sizes',
    "training": "write [training] seq_len, micro_batch and global_batch",
}
