"""The job config of a recording, inferred from run.json and the traces, completed by a job.toml."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.config import (
    FRAMEWORKS,
    MOST,
    RANK_ORDER,
    SCHEDULES,
    TWO_STAGES,
    JobConfig,
)
from stepsplit.analyzer.model.config_decode import TomlTable, decode_table
from stepsplit.analyzer.model.config_file import MODEL_KEYS, SAME_FRAMEWORKS, TRAINING_KEYS, job_in
from stepsplit.analyzer.split.pipeline import schedule_named
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.split.strategy_evidence import Strategy, accumulated_microbatches
from stepsplit.collectors.run_spec import Mesh, ModelSpec, RunSpec, Training

# The job config: run.json, then what the steps show, overridden by a job.toml.

NAMES = ("model", "parallel", "training", "hardware")

_WHOLE = ("preset", "file")
"""Keys that define a whole table; inferred values are not merged into such a table."""

_INSTEAD = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_replicate": ("dp",),
    "dp_shard": ("dp",),
    "world_size": ("dp", "dp_replicate", "dp_shard"),
    "gpus": ("dp", "dp_replicate", "dp_shard"),
    "global_batch": ("microbatches",),
    "microbatches": ("global_batch",),
}
"""Alternative keys for the same quantity: a configured one replaces the inferred ones."""

_AXES = ("tp", "pp", "dp", "dp_replicate", "dp_shard", "world_size", "gpus")
"""Keys of which at least one must define the number of ranks."""


def job_of_run(spec: RunSpec | None, found: RunSplit, stated: TomlTable | None = None) -> JobConfig:
    """Infer the job config of a recording; values of a job.toml (`stated`) take precedence.

    spec is the run.json, None if there is none; stated is a complete or partial job.toml.
    Raises UsageError with all missing keys; DataError for an invalid config.
    """
    return job_in(run_table(spec, found, stated))


def run_table(spec: RunSpec | None, found: RunSplit, stated: TomlTable | None = None) -> TomlTable:
    """The job.toml of the recording as a table. Raises UsageError if keys are missing."""
    seen = (
        model_seen(spec),
        parallel_seen(spec, found),
        training_seen(spec, found),
        hardware_seen(spec, found),
    )
    where = "run.json" if stated is None else stated.where
    if stated is not None:
        decode_table(stated, dict.fromkeys(NAMES, dict[str, object]))
    tables = {table.name: _merged(table, stated).values for table in seen}
    _complete(tables, found, stated)
    return TomlTable(where, "", tables)


def _merged(seen: TomlTable, stated: TomlTable | None) -> TomlTable:
    """The configured table, completed by inferred values."""
    if stated is None or seen.name not in stated.values:
        return seen
    own = stated.inner(seen.name)
    if any(key in own.values for key in _WHOLE):
        return own
    replaced = {other for key in own.values for other in _INSTEAD.get(key, ())}
    kept = {key: value for key, value in seen.values.items() if key not in replaced}
    return TomlTable(own.where, seen.name, kept | dict(own.values))


def _complete(
    tables: Mapping[str, Mapping[str, object]], found: RunSplit, stated: TomlTable | None
) -> None:
    """Raises UsageError with the missing keys by table."""
    lacking = [
        f"[{name}] {', '.join(keys)}" for name in NAMES if (keys := _lacks(name, tables, found))
    ]
    if not lacking:
        return
    hint = "add them to a job.toml and pass it with --job"
    if stated is not None:
        hint = f"add them to {stated.where}"
    raise UsageError(f"cannot infer {_listed(lacking)} from the recording; {hint}")


def _lacks(
    name: str, tables: Mapping[str, Mapping[str, object]], found: RunSplit
) -> tuple[str, ...]:
    table = tables[name]
    if any(key in table for key in _WHOLE):
        return ()
    return tuple(key for key in _needed(name, table, found) if key not in table)


def _needed(name: str, table: Mapping[str, object], found: RunSplit) -> tuple[str, ...]:
    match name:
        case "model":
            experts = any(one.name == "ep" for one in found.strategies)
            return (
                "layers", "hidden", "heads", "vocab",
                *(("ffn",) if table.get("gated") else ()),
                *(("experts", "top_k") if experts else ()),
            )  # fmt: skip
        case "parallel":
            return () if any(key in table for key in _AXES) else ("tp", "pp", "dp")
        case "training":
            batch = () if "microbatches" in table else ("global_batch",)
            return ("seq_len", "micro_batch", *batch)
        case "hardware":
            return () if "family" in table else ("preset",)
    return ()


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


# The [hardware] table of a recording: the preset of its device name.

_PRESETS = (
    (r"V100.*SXM.*16GB", "v100-sxm-16gb"),
    (r"V100.*SXM.*32GB", "v100-sxm-32gb"),
    (r"A100.*SXM.*40GB", "a100-sxm-40gb"),
    (r"A100.*SXM.*80GB", "a100-sxm-80gb"),
    (r"A100.*PCIE?.*40GB", "a100-pcie-40gb"),
    (r"A100.*80GB.*PCIE|A100.*PCIE.*80GB", "a100-pcie-80gb"),
    (r"A800.*SXM.*80GB", "a800-sxm-80gb"),
    (r"L40S", "l40s"),
    (r"H100.*PCIE", "h100-pcie"),
    (r"H100 80GB HBM3|H100.*SXM", "h100-sxm"),
    (r"H800 PCIE|H100 NVL", None),
    (r"H800", "h800-sxm"),
    (r"H200 NVL", None),
    (r"GH200 144G", "gh200-144gb"),
    (r"GH200", "gh200"),
    (r"H200", "h200-sxm"),
    (r"H20\b", "h20-sxm"),
    (r"GB200", "gb200"),
    (r"GB300", "gb300"),
    (r"B200", "b200-sxm"),
    (r"B300", "b300-sxm"),
    (r"MI250X", "mi250x"),
    (r"MI300X", "mi300x"),
    (r"MI325X", "mi325x"),
    (r"MI350X", "mi350x"),
    (r"MI355X", "mi355x"),
    (r"^CPU$", "cpu"),
)
"""Patterns of device names as reported by the driver, in order; None: no preset for the device."""


def hardware_seen(spec: RunSpec | None, found: RunSplit) -> TomlTable:
    """The preset of the run's device, and the ranks per node for several hosts."""
    values = {"preset": preset_of(_device(spec, found)), "gpus_per_node": _per_node(found)}
    return seen_table("hardware", values)


def preset_of(device: str) -> str | None:
    """The preset of a device name as reported by the driver; None if unknown or ambiguous."""
    named = (preset for words, preset in _PRESETS if re.search(words, device.upper()))
    return next(named, None)


def _device(spec: RunSpec | None, found: RunSplit) -> str:
    stated = [host.gpu for host in spec.hosts if host.gpu] if spec else []
    if not all(rank.trace.on_device for rank in found.ranks):
        return "cpu"
    return next(iter(stated), found.ranks[0].trace.device or "")


def _per_node(found: RunSplit) -> int | None:
    hosts = [rank.trace.host for rank in found.ranks]
    return None if len(set(hosts)) == 1 else max(hosts.count(host) for host in hosts)


# The [model] table of a recording.


def model_seen(spec: RunSpec | None) -> TomlTable:
    """The model shape in run.json; empty if it has none."""
    return seen_table("model", known_facts(spec.model if spec else None, MODEL_KEYS))


def known_facts(facts: ModelSpec | Training | None, keys: tuple[str, ...]) -> dict[str, object]:
    """The values in run.json whose names are keys of the table, unknown ones as None."""
    return {} if facts is None else {k: v for k, v in asdict(facts).items() if k in keys}


def seen_table(name: str, values: Mapping[str, object]) -> TomlTable:
    """The table of the known values."""
    return TomlTable("run.json", name, {k: v for k, v in values.items() if v is not None})


# The [parallel] table of a recording.

_ZERO_BUBBLE = "zb-h1"
"""The schedule that torch's "zerobubble" runs, if the name has no more detail."""

_STAGES = {"fsdp": 3, "hsdp": 3, "zero-2": 2, "zero-1": 1}


def parallel_seen(spec: RunSpec | None, found: RunSplit) -> TomlTable:
    """The mesh axes and strategies, from run.json and from the steps.

    If the mesh is unknown all ranks count as replicas unless a job.toml defines axes.
    """
    said = (spec.training if spec else None) or Training()
    mesh, seen = mesh_seen(spec, found), {one.name: one for one in found.strategies}
    values: dict[str, object] = {"cp": 1} if mesh is None else dict(_axes(mesh))
    zero = said.zero if said.zero is not None else _zero(mesh, seen)
    values |= {"zero": zero} | _data(mesh, zero) | _strategies(said, seen, spec, found)
    values |= _pipeline(said, mesh, found)
    return seen_table("parallel", values)


def _axes(mesh: Mesh) -> dict[str, object]:
    """Axis sizes, and the rank order if it is not the default."""
    several = [axis for axis in reversed(mesh.axes) if mesh.size(axis) > 1]
    order = list(dict.fromkeys(axis.split("_")[0] for axis in several))
    rest = [axis for axis in RANK_ORDER if axis not in order]
    usual = order == sorted(order, key=RANK_ORDER.index)
    return {
        **{axis: mesh.size(axis) for axis in ("tp", "pp", "cp")},
        "rank_order": None if usual else "-".join([*order, *rest]),
    }


def _zero(mesh: Mesh | None, seen: dict[str, Strategy]) -> int:
    """The ZeRO stage; FSDP that keeps weights until the backward (ZeRO-2) shards them as well."""
    if mesh is not None and mesh.size("dp_shard") > 1:
        return 3
    return max((stage for name, stage in _STAGES.items() if name in seen), default=0)


def _data(mesh: Mesh | None, zero: int) -> dict[str, object]:
    """Data-parallel sizes; a single axis as dp, whose kind follows from the ZeRO stage."""
    if mesh is None:
        return {}
    copies, shards = mesh.size("dp_replicate"), mesh.size("dp_shard")
    if copies > 1 and shards > 1:
        return {"dp_replicate": copies, "dp_shard": shards}
    return {"dp": copies * shards, "zero": zero if copies * shards * mesh.size("cp") > 1 else 0}


def _strategies(
    said: Training, seen: dict[str, Strategy], spec: RunSpec | None, found: RunSplit
) -> dict[str, object]:
    """The options of tensor, context, expert and data parallelism."""
    fsdp = framework_seen(spec, found) == "fsdp2"
    by_hand = summed_by_hand(spec, found)
    once = fsdp and "summed once" in _strategy_detail(seen, "gradient accumulation")
    return {
        "sequence_parallel": True if "sp" in seen else None,
        "split_vocab": said.split_vocab if said.split_vocab is not None else _vocabulary(seen),
        "context": _strategy_detail(seen, "cp") or None,
        "ep": seen["ep"].size if "ep" in seen else None,
        "reshard_after_forward": "never" if fsdp and "zero-2" in seen else None,
        "root_unit": said.root_unit,
        "sum_once": True if once else None,
        "bucket_bytes": MOST if by_hand else said.bucket_bytes,
        "overlap": [] if by_hand else None,
    }


def _vocabulary(seen: dict[str, Strategy]) -> bool | None:
    if "tp" not in seen:
        return None
    return "vocabulary" in seen or "loss" in seen


def _pipeline(said: Training, mesh: Mesh | None, found: RunSplit) -> dict[str, object]:
    """The schedule if the model knows its name, and the stages per rank."""
    if mesh is None or mesh.size("pp") == 1:
        return {}
    seen = "" if found.schedule is None else found.schedule.name
    name = schedule_named(said.schedule) if said.schedule else seen
    known = _ZERO_BUBBLE if name == "zerobubble" else name if name in SCHEDULES else None
    chunks = 1 if known in TWO_STAGES else _chunks(found)
    return {"schedule": known, "chunks": chunks if chunks > 1 else None}


def _chunks(found: RunSplit) -> int:
    """The largest number of stages on a rank in the recording."""
    grids = (grid for rank in found.ranks for grid in rank.grids)
    return max((len({box.stage for box in grid.boxes}) for grid in grids), default=1)


def _strategy_detail(seen: dict[str, Strategy], name: str) -> str:
    return seen[name].detail if name in seen else ""


# The [training] table of a recording.

_BY_EVIDENCE = ("dtype", "recompute", "offload", "framework")
"""Keys with torch's names in run.json, or inferred from the steps only."""

_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""dtype names of traces and torch -> names in job.toml; fp8 never appears in messages."""


def training_seen(spec: RunSpec | None, found: RunSplit) -> TomlTable:
    """The training settings in run.json, completed by those inferred from the steps."""
    said = (spec.training if spec else None) or Training()
    values = {
        **{k: v for k, v in known_facts(said, TRAINING_KEYS).items() if k not in _BY_EVIDENCE},
        "microbatches": said.microbatches or _microbatches(found),
        "dtype": _DTYPES.get(said.dtype or "", said.dtype) or _dtype(found),
        "recompute": said.recompute or _detail_of_run(found, "recompute"),
        "offload": _offload(said, found),
        "framework": framework_seen(spec, found),
    }
    if values["global_batch"] is not None:
        values["microbatches"] = None
    return seen_table("training", values)


def _microbatches(found: RunSplit) -> int | None:
    """Microbatches per step; 1 if the steps show neither a pipeline nor gradient accumulation."""
    if found.schedule is not None:
        return found.schedule.microbatches
    counted = accumulated_microbatches(found.strategies)
    if counted is not None:
        return counted
    return 1 if found.strategies and not found.layout.pipelines else None


def _dtype(found: RunSplit) -> str | None:
    """fp8 if detected, else the dtype of most communicated bytes."""
    if _detail_of_run(found, "fp8") is not None:
        return "fp8"
    moved: Counter[str] = Counter()
    for one in found.collectives:
        moved[(one.dtype or "").lower()] += one.count * (one.message_bytes or 0)
    names = [_DTYPES[name] for name, _ in moved.most_common() if name in _DTYPES]
    return next(iter(names), None)


def _offload(said: Training, found: RunSplit) -> list[str] | None:
    """The offloaded states; run.json may list several separated by commas."""
    if said.offload:
        return re.split(r"[,\s]+", said.offload.strip())
    seen = [one.detail for one in found.strategies if one.name == "offload"]
    return seen or None


def _detail_of_run(found: RunSplit, name: str) -> str | None:
    """The detail of a detected strategy; None if not detected."""
    return next((one.detail for one in found.strategies if one.name == name), None)


# The framework of the run, among those that the model knows.


def framework_seen(spec: RunSpec | None, found: RunSplit) -> str:
    """The framework in run.json if the model knows it, else one with the same messages.

    Custom training loops in torch count as FSDP2 if weights or optimizer states are sharded or
    there is no data parallelism, else as DDP.
    """
    said = (spec.training.framework if spec and spec.training else None) or ""
    known = SAME_FRAMEWORKS.get(said.lower(), said.lower())
    if known in FRAMEWORKS:
        return known
    mesh = mesh_seen(spec, found)
    if mesh is None:
        return "fsdp2"
    return "ddp" if mesh.size("dp_replicate") > 1 and mesh.size("dp_shard") == 1 else "fsdp2"


def summed_by_hand(spec: RunSpec | None, found: RunSplit) -> bool:
    """Whether a custom loop reduces gradients in one call after the backward.

    DistributedDataParallel supports neither tensor-parallel weights nor expert parallelism.
    """
    said = (spec.training.framework if spec and spec.training else None) or "torch"
    mesh = mesh_seen(spec, found)
    cut = mesh is not None and mesh.size("tp") > 1
    experts = any(one.name == "ep" for one in found.strategies)
    return said == "torch" and (cut or experts) and framework_seen(spec, found) == "ddp"


def mesh_seen(spec: RunSpec | None, found: RunSplit) -> Mesh | None:
    """The mesh from run.json or inferred from messages; for a single rank a mesh of size 1."""
    if found.layout.mesh is not None:
        return found.layout.mesh
    alone = max(rank.trace.world_size for rank in found.ranks) == 1
    return Mesh.of({"dp_replicate": 1}) if alone else None
