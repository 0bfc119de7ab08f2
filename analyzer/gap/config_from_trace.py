"""The job config of a recording, inferred from run.json and the traces, completed by a job.toml."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.gap.model_from_shapes import NO_SHAPE, ModelShape, infer_model_shape
from stepsplit.analyzer.model.config import RANK_ORDER, JobConfig
from stepsplit.analyzer.model.config_decode import TomlTable, decode_table, format_toml_lines
from stepsplit.analyzer.model.config_file import decode_job
from stepsplit.analyzer.model.config_limits import MAX_NUMBER
from stepsplit.analyzer.model.model_table import MODEL_KEYS
from stepsplit.analyzer.model.preset_names import find_preset
from stepsplit.analyzer.model.profile import (
    infer_framework as infer_unnamed,
    list_framework_aliases,
    list_frameworks,
    load_framework,
)
from stepsplit.analyzer.model.schedule_names import SCHEDULES, TWO_STAGES
from stepsplit.analyzer.model.training_table import TRAINING_KEYS
from stepsplit.analyzer.split.run import RunSplit, find_recorded_device
from stepsplit.analyzer.split.schedule import normalize_schedule
from stepsplit.analyzer.split.strategy import (
    GradientSums,
    Strategy,
    count_accumulated_microbatches,
    find_accumulation,
)
from stepsplit.collectors.formats.run_spec import Mesh, ModelSpec, RunSpec, Training

# The job config: run.json, then what the steps show, overridden by a job.toml.

NAMES = ("model", "parallel", "training", "hardware")

_WHOLE_TABLE_KEYS = ("preset", "file")
"""Keys that define a whole table; inferred values are not merged into such a table."""

REPLACED_KEYS = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_replicate": ("dp",),
    "dp_shard": ("dp",),
    "world_size": ("dp", "dp_replicate", "dp_shard"),
    "gpus": ("dp", "dp_replicate", "dp_shard"),
    "global_batch": ("microbatches",),
    "microbatches": ("global_batch",),
}
"""Alternative keys for the same quantity: a configured one replaces the inferred ones."""

_SIZE_KEYS = ("tp", "pp", "dp", "dp_replicate", "dp_shard", "world_size", "gpus")
"""Keys of which at least one must define the number of ranks."""


def infer_job(
    spec: RunSpec | None, split: RunSplit, job_table: TomlTable | None = None
) -> JobConfig:
    """Infer the job config of a recording; values of a job.toml take precedence.

    spec is the run.json, None if there is none; job_table is a complete or partial job.toml.
    Raises UsageError with all missing keys; DataError for an invalid config.
    """
    return decode_job(build_job_table(spec, split, job_table))


def build_job_table(
    spec: RunSpec | None, split: RunSplit, job_table: TomlTable | None = None
) -> TomlTable:
    """The job.toml of the recording as a table. Raises UsageError if keys are missing."""
    inferred = infer_tables(spec, split)
    where = "run.json" if job_table is None else job_table.where
    if job_table is not None:
        decode_table(job_table, dict.fromkeys(NAMES, dict[str, object]))
    tables = {table.name: _merge_tables(table, job_table).values for table in inferred}
    has_experts = _has_experts(split)
    missing = [
        f"[{name}] {', '.join(keys)}"
        for name in NAMES
        if (keys := list_missing_keys(name, tables[name], has_experts))
    ]
    if missing:
        hint = "analyze --write-job job.toml writes the rest; add them and pass it with --job"
        if job_table is not None:
            hint = f"add them to {job_table.where}"
        listed = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        raise UsageError(f"cannot infer {listed} from the recording; {hint}")
    return TomlTable(where, "", tables)


def infer_tables(spec: RunSpec | None, split: RunSplit) -> tuple[TomlTable, ...]:
    """What run.json and the trace say of [model], [parallel], [training] and [hardware].

    run.json takes precedence over the shapes of the ops.
    """
    parallel = infer_parallel(spec, split)
    vocab = parallel.values.get("split_vocab")
    split_vocab = vocab if isinstance(vocab, bool) else None
    shape = infer_model_shape(split, find_mesh(split), split_vocab)
    # The model in run.json, completed by the shapes of the ops and the activation function.
    activation, names = None, _collect_names(split)
    if shape.heads and not names & {"aten::gelu", "aten::silu"}:  # which are the default ones
        if "aten::relu" in names:
            activation = "relu"
        elif {"aten::pow", "aten::tanh"} <= names:
            activation = "gelu_new"
    recorded = select_known(spec.model if spec else None, MODEL_KEYS)
    inferred = {**select_known(shape, MODEL_KEYS), "activation": activation}
    model = build_table("model", inferred | _drop_unknown(recorded))
    by_sums = {"root_unit": _infer_root_unit(split, model.values)}
    # A single host says nothing of how many ranks a node has room for.
    hosts = [rank.trace.host for rank in split.ranks]
    hardware = {
        "preset": find_preset(find_recorded_device(spec, split)),
        "gpus_per_node": max(map(hosts.count, hosts)) if len(set(hosts)) > 1 else None,
    }
    return (
        model,
        build_table("parallel", by_sums | dict(parallel.values)),
        infer_training(spec, split, shape),
        build_table("hardware", hardware),
    )


def _merge_tables(inferred: TomlTable, job_table: TomlTable | None) -> TomlTable:
    """The configured table, completed by inferred values."""
    if job_table is None or inferred.name not in job_table.values:
        return inferred
    own = job_table.get_subtable(inferred.name)
    if any(key in own.values for key in _WHOLE_TABLE_KEYS):
        return own
    replaced = {other for key in own.values for other in REPLACED_KEYS.get(key, ())}
    remaining = {key: value for key, value in inferred.values.items() if key not in replaced}
    return TomlTable(own.where, inferred.name, remaining | dict(own.values))


def _has_experts(split: RunSplit) -> bool:
    return any(one.name == "ep" for one in split.strategies)


def list_missing_keys(
    name: str, table: Mapping[str, object], has_experts: bool = False
) -> tuple[str, ...]:
    """List the keys that the model needs and the named table of a job.toml lacks.

    has_experts: whether the job has expert parallelism, if the table itself has no experts.
    """
    if any(key in table for key in _WHOLE_TABLE_KEYS):
        return ()
    has_mixture = has_experts or "experts" in table
    required: tuple[str, ...] = ()
    match name:
        case "model":
            required = (
                "layers", "hidden", "heads", "vocab",
                *(("ffn",) if table.get("gated") or has_mixture else ()),
                *(("experts", "top_k") if has_mixture else ()),
            )  # fmt: skip
        case "parallel" if not any(key in table for key in _SIZE_KEYS):
            required = ("tp", "pp", "dp")
        case "training":
            batch = () if "microbatches" in table else ("global_batch",)
            required = ("seq_len", "micro_batch", *batch)
        case "hardware" if not {"family"} & table.keys():
            required = ("preset",)
    return tuple(key for key in required if key not in table)


# A job.toml to fill in: what was inferred, and by name what could not be.

KEY_MEANINGS = {
    "layers": "transformer layers",
    "hidden": "width of the residual stream",
    "heads": "attention heads",
    "vocab": "size of the vocabulary",
    "ffn": "width of the MLP",
    "experts": "experts of a mixture-of-experts layer",
    "top_k": "experts of a token",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel ranks",
    "seq_len": "tokens of a sequence",
    "micro_batch": "sequences of a microbatch of one rank",
    "global_batch": "sequences of a step, all ranks together",
    "preset": 'such as "h100-sxm"',
}

KEY_DEFAULTS = {
    "model": {
        "kv_heads": "as heads",
        "ffn": "4 x hidden",
        "gated": "false",
        "tied": "true unless gated",
        "learned_positions": "0",
        "norm": '"rms" if gated, else "layer"',
        "biases": "true unless gated",
        "qkv_biases": "false",
        "qk_norm": "false",
    },
    "training": {"dtype": '"bf16"', "optimizer": '"adam"'},
}
"""Keys with a default that changes the prediction much, and the default."""

EXPERT_DEFAULTS = {"expert_ffn": "ffn", "shared_ffn": "0", "dense_layers": "0"}
"""Those of a model with experts."""


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job.toml of a recording.

    Attributes:
        text: The file. Keys that could not be inferred are comments, with their meaning.
        missing: Those of them that the model needs, such as "[model] heads, vocab".
        has_shapes: Whether the recording has the input shapes of ops.
    """

    text: str
    missing: tuple[str, ...]
    has_shapes: bool


def draft_job(
    spec: RunSpec | None, split: RunSplit, job_table: TomlTable | None = None
) -> JobDraft:
    """Write what can be inferred as a job.toml; values of job_table take precedence."""
    inferred = infer_tables(spec, split)
    tables = {table.name: _merge_tables(table, job_table).values for table in inferred}
    has_experts = _has_experts(split)
    missing = {name: list_missing_keys(name, tables[name], has_experts) for name in NAMES}
    lines = ["# Inferred from a recording. Keys after a # were not: fill in those that are needed."]
    for name in NAMES:
        lines += ["", f"[{name}]", *format_toml_lines(tables[name])]
        lines += (f"# {key} =   # needed: {KEY_MEANINGS[key]}" for key in missing[name])
        defaults = KEY_DEFAULTS.get(name, {})
        if name == "model" and (has_experts or "experts" in tables[name]):
            defaults = defaults | EXPERT_DEFAULTS
        given = {*tables[name], *missing[name]}
        if "preset" in tables[name]:  # it defines the optional keys
            given |= {*KEY_MEANINGS, *KEY_DEFAULTS["model"]}
        lines += (
            f"# {key} =   # not inferred; default {default}"
            for key, default in defaults.items()
            if key not in given
        )
    needed = (f"[{name}] {', '.join(keys)}" for name, keys in missing.items() if keys)
    has_shapes = any(len(rank.trace.shapes) for rank in split.ranks)
    return JobDraft("\n".join(lines) + "\n", tuple(needed), has_shapes)


# The [model] table of a recording.


def _drop_unknown(values: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if value is not None}


def select_known(
    spec: ModelSpec | Training | ModelShape | None, keys: tuple[str, ...]
) -> dict[str, object]:
    """The values whose names are keys of the table, unknown ones as None."""
    return {} if spec is None else {k: v for k, v in asdict(spec).items() if k in keys}


def build_table(name: str, values: Mapping[str, object]) -> TomlTable:
    """The table of the known values."""
    return TomlTable("run.json", name, _drop_unknown(values))


# The [parallel] table of a recording.

_ZERO_BUBBLE = "zb-h1"
"""The schedule that torch's "zerobubble" runs, if the name has no more detail."""

_STAGES = {"fsdp": 3, "hsdp": 3, "zero-2": 2, "zero-1": 1}


def infer_parallel(spec: RunSpec | None, split: RunSplit) -> TomlTable:
    """The mesh axes and strategies, from run.json and from the steps.

    If the mesh is unknown all ranks count as replicas unless a job.toml defines axes.
    """
    recorded = (spec.training if spec else None) or Training()
    mesh, strategies = find_mesh(split), {one.name: one for one in split.strategies}
    zero = recorded.zero
    if zero is None:
        # FSDP that keeps weights until the backward (ZeRO-2) shards them as well.
        is_sharded = mesh is not None and mesh.size("dp_shard") > 1
        detected = (stage for name, stage in _STAGES.items() if name in strategies)
        zero = 3 if is_sharded else max(detected, default=0)
    values: dict[str, object] = {"cp": 1, "zero": zero}
    if mesh is not None:
        several = [axis for axis in reversed(mesh.axes) if mesh.size(axis) > 1]
        order = list(dict.fromkeys(axis.split("_")[0] for axis in several))
        rest = [axis for axis in RANK_ORDER if axis not in order]
        is_usual = order == sorted(order, key=RANK_ORDER.index)
        values = {
            **{axis: mesh.size(axis) for axis in ("tp", "pp", "cp")},
            "rank_order": None if is_usual else "-".join([*order, *rest]),
            "zero": zero,
        }
        copies, shards = mesh.size("dp_replicate"), mesh.size("dp_shard")
        if copies > 1 and shards > 1:
            values |= {"dp_replicate": copies, "dp_shard": shards}
        else:
            # A single axis is dp, whose kind follows from the ZeRO stage.
            is_parallel = copies * shards * mesh.size("cp") > 1
            values |= {"dp": copies * shards, "zero": zero if is_parallel else 0}
    values |= _infer_strategies(recorded, strategies, spec, split)
    values |= _infer_pipeline(recorded, mesh, split)
    return build_table("parallel", values)


def _infer_strategies(
    recorded: Training, strategies: dict[str, Strategy], spec: RunSpec | None, split: RunSplit
) -> dict[str, object]:
    """The options of tensor, context, expert and data parallelism."""
    # Only FSDP sums whole gradients first, or keeps weights gathered from ZeRO-2 on.
    messages = load_framework(infer_framework(spec, split)).messages
    fsdp = messages.weights_sharded_from == 2
    # A custom loop reduces gradients in one call after the backward where DistributedDataParallel
    # could not be used: it supports neither tensor-parallel weights nor expert parallelism.
    loop, mesh = recorded.framework or _CUSTOM_LOOP, find_mesh(split)
    is_split = (mesh is not None and mesh.size("tp") > 1) or "ep" in strategies
    by_hand = loop == _CUSTOM_LOOP and is_split and messages.wraps_replicas == "always"
    accumulation = find_accumulation(strategies.values())
    summed_once = fsdp and accumulation is not None and accumulation.sums is GradientSums.ONCE
    split_vocab = recorded.split_vocab
    if split_vocab is None and "tp" in strategies:
        split_vocab = "vocabulary" in strategies or "loss" in strategies
    return {
        "sequence_parallel": True if "sp" in strategies else None,
        "split_vocab": split_vocab,
        "context": strategies["cp"].detail or None if "cp" in strategies else None,
        "ep": strategies["ep"].size if "ep" in strategies else None,
        "reshard_after_forward": "never" if fsdp and "zero-2" in strategies else None,
        "root_unit": recorded.root_unit,
        "sum_once": True if summed_once else None,
        "bucket_bytes": MAX_NUMBER if by_hand else recorded.bucket_bytes,
        "overlap": [] if by_hand else None,
    }


def _infer_root_unit(split: RunSplit, model: Mapping[str, object]) -> bool | None:
    """Whether FSDP sums the gradients outside of the layers as one unit, by the number of sums: one
    more than the layers have, or two; a tied embedding is one unit in any case."""
    layers = model.get("layers")
    if not isinstance(layers, int) or model.get("tied") is not False or split.layout.pipelines:
        return None
    sums = Counter[int | None]()
    for row in split.step_calls:
        group = split.matched.groups[row.group] if row.group >= 0 else None
        if row.op == "reduce_scatter" and group and split.layout.find_axis(group) == "dp_shard":
            sums[row.message_bytes] += row.calls
    of_layers = max(sums.values(), default=0)
    return True if of_layers and (sums.total() - of_layers) * layers == of_layers else None


def _infer_pipeline(recorded: Training, mesh: Mesh | None, split: RunSplit) -> dict[str, object]:
    """The schedule if the model knows its name, and the stages per rank."""
    if mesh is None or mesh.size("pp") == 1:
        return {}
    detected = "" if split.schedule is None else split.schedule.name
    name = normalize_schedule(recorded.schedule) if recorded.schedule else detected
    known = _ZERO_BUBBLE if name == "zerobubble" else name if name in SCHEDULES else None
    chunks = 1
    if known not in TWO_STAGES:
        # The largest number of stages on a rank in the recording.
        grids = (grid for rank in split.ranks for grid in rank.grids)
        chunks = max((len({box.stage for box in grid.slots}) for grid in grids), default=1)
    return {"schedule": known, "chunks": chunks if chunks > 1 else None}


# The [training] table of a recording.

_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "lion": "lion", "muon": "muon"}
"""Optimizers by torch's name of their class; SGD may have a momentum."""

_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#(?:Fused)?(?P<name>\w+)\.step")

_INFERRED_KEYS = ("dtype", "recompute", "offload", "framework")
"""Keys with torch's names in run.json, or inferred from the steps only."""

_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""dtype names of traces and torch -> names in job.toml; fp8 never appears in messages."""


def infer_training(
    spec: RunSpec | None, split: RunSplit, shape: ModelShape = NO_SHAPE
) -> TomlTable:
    """The training settings in run.json, completed by those inferred from the trace."""
    recorded = (spec.training if spec else None) or Training()
    names = _collect_names(split)
    # The optimizer whose steps torch's ranges mark, if it is the only one.
    steps = {step["name"].lower() for name in names if (step := _OPTIMIZER_STEP.match(name))}
    optimizer = _OPTIMIZERS.get(steps.pop()) if len(steps) == 1 else None
    # Adam is one kernel, or several by these ops; clipping uses lists of tensors too, but neither.
    is_fused = None
    if any(name.startswith("aten::_fused_adam") for name in names):
        is_fused = True
    elif {"aten::_foreach_lerp_", "aten::_foreach_addcdiv_"} <= names:
        is_fused = False
    offload = [one.detail for one in split.strategies if one.name == "offload"]
    if recorded.offload:
        offload = re.split(r"[,\s]+", recorded.offload.strip())
    if split.schedule is not None:
        microbatches: int | None = split.schedule.microbatches
    else:
        # One if the steps show neither a pipeline nor gradient accumulation; a pipeline without a
        # known schedule has an unknown number.
        microbatches = count_accumulated_microbatches(split.strategies)
        if microbatches is None and split.strategies and not split.layout.pipelines:
            microbatches = 1
    recorded_values = select_known(recorded, TRAINING_KEYS)
    values = {
        **{key: value for key, value in recorded_values.items() if key not in _INFERRED_KEYS},
        "seq_len": recorded.seq_len or shape.seq_len,
        "micro_batch": recorded.micro_batch or shape.micro_batch,
        "microbatches": recorded.microbatches or shape.microbatches or microbatches,
        "dtype": _DTYPES.get(recorded.dtype or "", recorded.dtype) or _infer_dtype(split, shape),
        "optimizer": recorded.optimizer or optimizer,
        "fused_optimizer": is_fused,
        "recompute": recorded.recompute or _find_detail(split, "recompute"),
        "offload": offload or None,
        "lora_rank": shape.lora_rank,
        "lora_targets": shape.lora_targets,
        "framework": infer_framework(spec, split),
    }
    if values["global_batch"] is not None:
        values["microbatches"] = None
    return build_table("training", values)


def _infer_dtype(split: RunSplit, shape: ModelShape) -> str | None:
    """fp8 if detected, else the dtype of the GEMMs, else that of most communicated bytes."""
    if _find_detail(split, "fp8") is not None:
        return "fp8"
    if shape.dtype is not None:
        return shape.dtype
    moved: Counter[str] = Counter()
    for one in split.collectives:
        moved[(one.dtype or "").lower()] += one.count * (one.message_bytes or 0)
    names = [_DTYPES[name] for name, _ in moved.most_common() if name in _DTYPES]
    return next(iter(names), None)


def _collect_names(split: RunSplit) -> set[str]:
    """The names of the events of all ranks."""
    return {name for rank in split.ranks for name in rank.trace.events.names}


def _find_detail(split: RunSplit, name: str) -> str | None:
    """The detail of a detected strategy; None if not detected."""
    return next((one.detail for one in split.strategies if one.name == name), None)


# The framework of the run, among those that the model knows.


def infer_framework(spec: RunSpec | None, split: RunSplit) -> str:
    """The framework in run.json if the model knows it, else one with the same messages.

    Custom training loops in torch count as FSDP2 if weights or optimizer states are sharded or
    there is no data parallelism, else as DDP.
    """
    recorded = (spec.training.framework if spec and spec.training else None) or ""
    known = list_framework_aliases().get(recorded.lower(), recorded.lower())
    if known in list_frameworks():
        return known
    mesh = find_mesh(split)
    is_replicated = (
        mesh is not None and mesh.size("dp_replicate") > 1 and mesh.size("dp_shard") == 1
    )
    return infer_unnamed("torch-replicas" if is_replicated else "torch")


_CUSTOM_LOOP = "torch"
"""What collectors record of a training loop of one's own."""


def find_mesh(split: RunSplit) -> Mesh | None:
    """The mesh from run.json or inferred from messages; for a single rank a mesh of size 1."""
    if split.layout.mesh is not None:
        return split.layout.mesh
    single_rank = max(rank.trace.world_size for rank in split.ranks) == 1
    return Mesh.of({"dp_replicate": 1}) if single_rank else None
