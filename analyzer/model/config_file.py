"""Job configs in TOML: reads tables, presets and framework defaults into a JobConfig."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from stepsplit.analyzer import units
from stepsplit.analyzer.errors import DataError, UsageError
from stepsplit.analyzer.model.config import (
    RANK_ORDER,
    Axis,
    Experts,
    Framework,
    HardwareConfig,
    JobConfig,
    LatentAttention,
    ModelConfig,
    ParallelConfig,
    Recompute,
    RecomputePart,
    State,
    Target,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_checks import list_violations
from stepsplit.analyzer.model.config_decode import (
    Mistakes,
    TomlTable,
    collect_kinds,
    decode_keys,
    decode_section,
    format_toml_keys,
    list_stated_keys,
    parse_table,
    replace_aliases,
    select_fields,
)
from stepsplit.analyzer.model.config_limits import KEY, Natural
from stepsplit.analyzer.model.framework_defaults import choose_weight_dtype, framework_defaults
from stepsplit.analyzer.model.hardware_config import (
    HARDWARE_KEYS,
    decode_hardware,
    list_hardware_kinds,
    load_hardware,
    read_hardware_file,
)
from stepsplit.analyzer.model.job_tables import JobSource, read_job_tables
from stepsplit.analyzer.model.key_aliases import VALUE_ALIASES
from stepsplit.analyzer.model.key_passes import remove_misplaced_keys, replace_key_aliases
from stepsplit.analyzer.model.parameters import count_parameters
from stepsplit.analyzer.model.preset_names import (
    MODELS,
    list_hardware_names,
    list_model_names,
    normalize_model_name,
    read_preset,
)
from stepsplit.analyzer.model.profile import (
    infer_framework as infer_unnamed,
    list_framework_aliases,
    list_frameworks,
    load_framework,
)
from stepsplit.analyzer.model.schedule_names import MAX_STAGE_PAIRS

# job.toml -> JobConfig.

_EXAMPLE_HINT = (
    'begin with [model] preset = "llama-3.1-8b", [training] seq_len = 8192, micro_batch = 1,'
    ' global_batch = 64, [hardware] preset = "h100-sxm"; all keys: docs/model.md'
)

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
    training = _decode_training(table.get_subtable("training"), mistakes_by_section["training"])
    seq_len = training.values.get("seq_len", 0)
    hardware = _decode_hardware_section(
        table.get_subtable("hardware"), mistakes_by_section["hardware"]
    )
    parallel = _decode_parallel(table.get_subtable("parallel"), mistakes_by_section["parallel"])
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
        base = _find_model_of_name(own, seq_len)
    sections = _Sections(
        model=_decode_model(
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
    return replace(sections, notes=(*notes, *_describe_assumed(own, sections.model, base)))


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
                _decode_parallel(own, found)
            case "training":
                _decode_training(own, found)
            case "model":
                decode_keys(own, _MODEL_KINDS | {"preset": Literal[list_model_names()]}, found)
            case "hardware":
                kinds = list_hardware_kinds() | {"preset": Literal[list_hardware_names()]}
                decode_keys(own, kinds, found)
        mistakes += [one for one in found if not one.problem.endswith(": missing")]
    mistakes.raise_all()


_REQUIRED_SECTIONS = {
    "model": 'write [model] preset = "llama-3.1-8b" or another, or its sizes',
    "training": "write [training] seq_len, micro_batch and global_batch",
}


def _decode_hardware_section(table: TomlTable, mistakes: Mistakes) -> HardwareConfig:
    """Decodes the hardware of the table, of its file, or of the preset of either."""
    file, extra_kinds = None, {"preset": Literal[list_hardware_names()]}
    with mistakes.collect():
        file = read_hardware_file(table)
    if file is None:
        return decode_hardware(table, _find_hardware_preset(table), mistakes, extra_kinds)
    if "file" in file.values:
        hint = "name that file in the job.toml"
        mistakes.append(file.build_error("file", "must not name another file", hint))
    if "preset" in table.values:
        hint = "remove one of them"
        mistakes.append(
            table.build_error("preset", "stands beside file, which describes the device", hint)
        )
    known = decode_hardware(file, _find_hardware_preset(file), mistakes, extra_kinds)
    return decode_hardware(table, known, mistakes, extra_kinds)


def _find_hardware_preset(table: TomlTable) -> HardwareConfig | None:
    preset = table.values.get("preset")
    return (
        load_hardware(preset)
        if isinstance(preset, str) and preset in list_hardware_names()
        else None
    )


# A [model] table -> ModelConfig.

_SAME_SIZE = 0.02
"""Largest difference in parameters from those of the preset of the same name."""


def _find_model_of_name(table: TomlTable, seq_len: int) -> ModelConfig | None:
    """The preset of the model's name if the model states all that one by numbers must, all that it
    states is so in the preset, and what makes layers of another kind is not left to the preset."""
    name, mistakes = table.values.get("name"), Mistakes()
    preset = normalize_model_name(name) if isinstance(name, str) else ""
    if preset not in list_model_names() or not {*_REQUIRED_MODEL_KEYS} <= table.values.keys():
        return None
    known = load_model(preset)
    plain = replace(known, experts=None, latent=None, mtp_layers=0)
    model = _decode_model(table, plain, seq_len, mistakes, {})
    return plain if not mistakes and replace(model, name=known.name) == known else None


def _describe_assumed(
    table: TomlTable, model: ModelConfig, base: ModelConfig | None
) -> tuple[str, ...]:
    """What is taken for keys that a model by numbers leaves out and that change its parameters, and
    whether it has others than the preset of its name. base: what the rest is taken from."""
    if "preset" in table.values:
        return ()
    named = {one.metadata.get(KEY, one.name): one.name for one in fields(ModelConfig)}
    keys = ["gated", "tied"]
    if base is not None:
        usual = _decode_model(table, None, 0, Mistakes(), {})
        keys += ["kv_heads", "ffn"]
        keys += [k for k, one in named.items() if getattr(usual, one) != getattr(model, one)]
    left_out = [key for key in dict.fromkeys(keys) if key not in table.values]
    taken = format_toml_keys({key: getattr(model, named[key]) for key in left_out})
    if base is not None:
        return (f"model: {taken} as in {base.name}, which has its sizes",) if left_out else ()
    preset, count = normalize_model_name(model.name), count_parameters(model)
    known = count_parameters(load_model(preset)) if preset in list_model_names() else count
    if abs(count / known - 1) <= _SAME_SIZE:
        return (f"model: {taken} (not stated)",) if left_out else ()
    counts = f"{units.format_count(count)} parameters, but {preset} has {units.format_count(known)}"
    if not left_out:
        return (f'model as {counts}; write preset = "{preset}" or another name',)
    verb = "are" if len(left_out) > 1 else "is"
    return (
        f"model as {counts}: {', '.join(left_out)} {verb} not stated (taken: {taken}); "
        f'write preset = "{preset}" or state {"them" if len(left_out) > 1 else "it"}',
    )


_EXPERT_KEYS = {
    field.name: {"count": "experts", "ffn": "expert_ffn"}.get(field.name, field.name)
    for field in fields(Experts)
}
"""Keys of the experts in [model], for files without [model.experts], by field."""

_MODEL_KINDS: dict[str, Any] = {
    **collect_kinds(ModelConfig),
    **{key: collect_kinds(Experts)[name] for name, key in _EXPERT_KEYS.items()},
    "experts": dict[str, object] | int,
    "learned_positions": bool | Natural,
}

MODEL_KEYS = tuple(_MODEL_KINDS)

_REQUIRED_MODEL_KEYS = ("layers", "hidden", "heads", "vocab")


def _decode_model(
    table: TomlTable,
    base: ModelConfig | None,
    seq_len: int,
    mistakes: Mistakes,
    extra_kinds: Mapping[str, Any],
) -> ModelConfig:
    """Decodes the model of the table; missing or invalid keys are taken from base.

    Without a base, layers, hidden, heads and vocab are required, and ffn for a gated model. The
    defaults are then kv_heads = heads, head_size = hidden / heads, ffn = 4 hidden; gated models
    have RMS norms, no biases and an untied head, others layer norms, biases and a tied head.
    learned_positions = true means seq_len positions. extra_kinds are the types of further keys.
    """
    gated = table.values.get("gated") is True
    required = (
        (*_REQUIRED_MODEL_KEYS, *(("ffn",) if gated else ()))
        if "preset" not in table.values
        else ()
    )
    required = required if base is None else ()
    stated = decode_keys(table, {**_MODEL_KINDS, **extra_kinds}, mistakes, required)
    if isinstance(positions := stated.get("learned_positions"), bool):
        stated["learned_positions"] = seq_len if positions else 0
    known = base or _build_default_model(table, stated, mistakes)
    sizes = {k: v for k, v in stated.items() if k not in ("experts", "latent")}
    model = replace(known, **select_fields(ModelConfig, sizes))
    if base is None and "preset" in table.values:
        return model
    rank = {"query_rank": 0} if known.latent is None else {}
    latent = decode_section(table, "latent", LatentAttention, known.latent, mistakes, **rank)
    return replace(
        model, experts=_decode_experts(table, stated, model, known.ffn, mistakes), latent=latent
    )


def _build_default_model(
    table: TomlTable, stated: Mapping[str, Any], mistakes: Mistakes
) -> ModelConfig:
    """Builds the default model of a table without a preset."""
    hidden, heads, gated = stated.get("hidden", 1), stated.get("heads", 1), stated.get("gated")
    # A size that is missing is said once, without what follows from it.
    if hidden % heads and {"hidden", "heads"} <= stated.keys() and "head_size" not in stated:
        problem = f"hidden ({hidden}) must be divisible by heads ({heads})"
        mistakes.append(table.build_error("heads", problem, "fix one of them or give head_size"))
    return ModelConfig(
        layers=1,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=4 * hidden,
        vocab=1,
        tied=not gated,
        norm="rms" if gated else "layer",
        biases=not gated,
    )


def _decode_experts(
    table: TomlTable, stated: Mapping[str, Any], model: ModelConfig, ffn: int, mistakes: Mistakes
) -> Experts | None:
    """Decodes [model.experts], or experts = 8 with top_k and the other keys in [model].

    The default width of an expert is that of the model's MLP.
    """
    base = model.experts
    if isinstance(stated.get("experts"), dict):
        width = {"ffn": ffn} if base is None else {}
        return decode_section(table, "experts", Experts, base, mistakes, **width)
    sizes = {name: stated[key] for name, key in _EXPERT_KEYS.items() if key in stated}
    if base is not None:
        return replace(base, **sizes)
    if "experts" not in table.values:
        for name in sizes:
            problem = "needs a model with experts"
            mistakes.append(table.build_error(_EXPERT_KEYS[name], problem, "give experts"))
        return None
    if "top_k" not in table.values:
        mistakes.append(table.build_error("top_k", "missing", "give top_k"))
    return Experts(**{"count": 1, "top_k": 1, "ffn": model.ffn, **sizes})


# A [parallel] table -> ParallelConfig.

_PARALLEL_KINDS: Mapping[str, Any] = {
    **collect_kinds(ParallelConfig),
    "rank_order": str,
    "overlap": bool | Axis | frozenset[Axis],
    **dict.fromkeys(("dp", "world_size", "gpus", "nodes"), int),
}

PARALLEL_KEYS = tuple(_PARALLEL_KINDS)


def _decode_parallel(table: TomlTable, mistakes: Mistakes) -> TomlTable:
    """Decodes the table's values; rank_order as a tuple of axes."""
    stated = decode_keys(replace_aliases(table, VALUE_ALIASES), _PARALLEL_KINDS, mistakes)
    axes = [key for key in ("dp", "dp_replicate", "dp_shard") if key in stated]
    if "dp" in axes and len(axes) > 1:
        hint = "give either dp, or dp_replicate and dp_shard"
        mistakes.append(table.build_error("dp", f"cannot be combined with {axes[1]}", hint))
    order = tuple(stated.get("rank_order", "-".join(RANK_ORDER)).split("-"))
    if sorted({*order, "ep"}) != sorted(RANK_ORDER) or len(set(order)) < len(order):
        hint = f'write "{"-".join(RANK_ORDER)}" in the order of the ranks, fastest-varying first'
        problem = f"{'-'.join(order)!r} is not a valid order of the axes"
        mistakes.append(table.build_error("rank_order", problem, hint))
    return replace(table, values={**stated, "rank_order": order})


def build_layout(
    table: TomlTable, framework: Framework | None, experts: bool = False
) -> ParallelConfig:
    """Builds the layout of the decoded table; an axis without a key has one rank.

    dp stands for dp_shard if zero is 3 (implied by fsdp2 and by dp_shard > 1), else for
    dp_replicate. Without any of them, dp is inferred from world_size (or gpus). experts: whether
    the model has experts. Raises DataError.
    """
    stated = table.values
    zero = _infer_zero(stated, framework)
    replicate, shard = _infer_data_parallel(table, zero)
    # Without a framework experts are those of the one without ZeRO-3, whatever zero is.
    usual = load_framework(framework or infer_unnamed("replicated")).defaults
    tp, ep, cp = (stated.get(key, 1) for key in ("tp", "ep", "cp"))
    is_divisible = tp * cp * replicate * shard % (ep * tp) == 0
    defaults = {
        "schedule": "1f1b" if stated.get("chunks", 1) == 1 else "interleaved",
        "expert_tp": tp if experts and usual.expert_tp and is_divisible else 1,
    }
    resolved = {
        "zero": zero,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "overlap": _infer_overlap(stated, framework or infer_framework(table)),
    }
    layout = ParallelConfig(**{**defaults, **select_fields(ParallelConfig, stated), **resolved})
    for key in ("world_size", "gpus"):
        if stated.get(key, layout.world_size) != layout.world_size:
            sizes = f"tp ({layout.tp}) x pp ({layout.pp}) x dp ({layout.dp}) x cp ({layout.cp})"
            problem = f"does not match {sizes} = {layout.world_size}"
            raise _build_size_error(table, key, problem)
    return layout


def infer_framework(table: TomlTable) -> Framework:
    """Infers the framework of a job that names none."""
    return infer_unnamed("sharded" if _infer_zero(table.values, None) == 3 else "replicated")


def list_framework_keys(table: TomlTable, framework: Framework) -> dict[str, str]:
    """The keys of [training] that a job of this framework must state: its name, unless a job with
    the decoded [parallel] would be taken to run it anyway."""
    is_inferred = load_framework(infer_framework(table)) is load_framework(framework)
    return {} if is_inferred else {"framework": framework}


def _infer_zero(stated: Mapping[str, Any], framework: Framework | None) -> int:
    default = 0 if framework is None else load_framework(framework).defaults.zero
    if "dp_replicate" in stated:
        default = 0
    return int(stated.get("zero", 3 if stated.get("dp_shard", 1) > 1 else default))


def _infer_data_parallel(table: TomlTable, zero: int) -> tuple[int, int]:
    """Infers dp_replicate and dp_shard."""
    stated = table.values
    replicas, has_world = stated.get("dp_replicate", 1), {"world_size", "gpus"} & stated.keys()
    if zero == 3 and "dp_shard" not in stated and replicas > 1 and has_world:
        # The ranks of each replica are those that are left.
        return replicas, max(1, _count_remaining_ranks(table) // replicas)
    if "dp_replicate" in stated or "dp_shard" in stated:
        return stated.get("dp_replicate", 1), stated.get("dp_shard", 1)
    dp = stated["dp"] if "dp" in stated else _count_remaining_ranks(table)
    return (1, dp) if zero == 3 else (dp, 1)


def _count_remaining_ranks(table: TomlTable) -> int:
    """Data-parallel ranks by world_size and the other axes; 1 without world_size."""
    stated = table.values
    key = next((key for key in ("world_size", "gpus") if key in stated), None)
    if key is None:
        return 1
    world, tp, pp, cp = (stated.get(k, 1) for k in (key, "tp", "pp", "cp"))
    if world % (tp * pp * cp):
        product = f"tp ({tp}) x pp ({pp}) x cp ({cp})"
        raise _build_size_error(table, key, f"is not divisible by {product}")
    return int(world // (tp * pp * cp))


def _build_size_error(table: TomlTable, key: str, problem: str) -> DataError:
    """Names the key that was typed: gpus may be those of nodes."""
    count = table.values[key]
    if key == "gpus" and "nodes" in table.values:
        key, count = "nodes", f"as gpus = {count}"
    return table.build_error(key, f"{count} {problem}", f"fix the axes or {key}")


def _infer_overlap(stated: Mapping[str, Any], framework: Framework) -> frozenset[str]:
    """The axes whose communication overlaps with compute: all, none, or those listed."""
    overlap = stated.get("overlap", ["dp"] if load_framework(framework).defaults.overlap else [])
    if isinstance(overlap, bool):
        return frozenset(RANK_ORDER if overlap else ())
    return frozenset({overlap} if isinstance(overlap, str) else overlap)


# A [training] table -> TrainingConfig.

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full", "sqrt")

STATES: tuple[State, ...] = get_args(State)

_TRAINING_KINDS: Mapping[str, Any] = {
    **collect_kinds(TrainingConfig),
    "microbatches": int,
    "recompute": str | frozenset[RecomputePart],
    "offload": Target | frozenset[State],
}

TRAINING_KEYS = tuple(_TRAINING_KINDS)

JOB_KEYS = {
    "model": (*MODEL_KEYS, "preset"), "parallel": PARALLEL_KEYS, "training": TRAINING_KEYS,
    "hardware": (*HARDWARE_KEYS, "preset"),
}  # fmt: skip
"""The keys of each table."""


def _decode_training(table: TomlTable, mistakes: Mistakes) -> TomlTable:
    """Decodes the table's values; recompute = "every-4" and offload = "cpu" become fields."""
    needed = ("seq_len", "micro_batch")
    aliases = {**VALUE_ALIASES, "framework": list_framework_aliases()}
    kinds = {**_TRAINING_KINDS, "framework": Literal[list_frameworks()]}
    stated = decode_keys(replace_aliases(table, aliases), kinds, mistakes, needed)
    if not {"global_batch", "microbatches"} & table.values.keys():
        hint = "give global_batch (sequences per step, all ranks) or microbatches (per rank)"
        mistakes.append(table.build_error("global_batch", "missing", hint))
    recompute = stated.get("recompute", "none")
    if isinstance(recompute, frozenset):
        stated |= {"recompute": "none", "recompute_parts": recompute}
    elif match := re.fullmatch(r"every-0*([1-9]\d{0,17})", recompute, re.ASCII):
        stated |= {"recompute": "every", "recompute_every": int(match[1])}
    elif recompute not in RECOMPUTES:
        hint = f"write {', '.join(RECOMPUTES)} or every-4"
        mistakes.append(table.build_error("recompute", f"{recompute!r} is unknown", hint))
    if isinstance(stated.get("offload"), str):
        stated |= {"offload": frozenset({"optimizer"}), "offload_to": stated["offload"]}
    return replace(table, values=stated)


def complete_training(
    table: TomlTable,
    layout: ParallelConfig,
    framework: Framework,
    model: ModelConfig,
    hardware: HardwareConfig,
) -> TrainingConfig:
    """Completes the decoded table with the framework's defaults. Raises DataError."""
    stated = table.values
    dtype = stated.get("dtype", "bf16")
    defaults = framework_defaults(framework, dtype, layout, model, hardware)
    if (
        not stated.get("master_weights", True)
        and not load_framework(framework).memory.copies_weights
    ):
        # torch's optimizers make moments in the dtype of the weights, as autograd does gradients.
        defaults |= {"gradient_dtype": choose_weight_dtype(dtype), "moments_dtype": "bf16"}
    resolved = {"framework": framework, "global_batch": _infer_global_batch(table, layout.dp)}
    return TrainingConfig(**{**defaults, **select_fields(TrainingConfig, stated), **resolved})


def _infer_global_batch(table: TomlTable, dp: int) -> int:
    """The key global_batch, or microbatches x micro_batch x dp."""
    stated = table.values
    if "microbatches" not in stated:
        return int(stated["global_batch"])
    microbatches, micro_batch = stated["microbatches"], stated["micro_batch"]
    product = int(microbatches * micro_batch * dp)
    if stated.get("global_batch", product) != product:
        problem = (
            f"{stated['global_batch']} does not match microbatches ({microbatches}) x "
            f"micro_batch ({micro_batch}) x dp ({dp}) = {product}"
        )
        raise table.build_error("global_batch", problem, "remove one of them")
    return product


# Models by name.


@lru_cache(maxsize=256)
def load_model(name: str) -> ModelConfig:
    """Loads a model preset by name. Raises UsageError, which suggests similar names."""
    table, mistakes = read_preset(MODELS, "model", name), Mistakes()
    extra_kinds = {"source": str, "parameters": int}
    model = _decode_model(table, None, 0, mistakes, extra_kinds)
    mistakes.raise_all()
    return replace(model, name=name)
