"""The job config of a recording: from run.json, from the traces, completed by a TOML file."""

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

# The job that a recording is of: what run.json says, what the steps show, what a job.toml adds.

NAMES = ("model", "parallel", "training", "hardware")

_WHOLE = ("preset", "file")
"""Keys that state a table's numbers all at once: what was seen is no part of such a table."""

_INSTEAD = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_replicate": ("dp",),
    "dp_shard": ("dp",),
    "world_size": ("dp", "dp_replicate", "dp_shard"),
    "gpus": ("dp", "dp_replicate", "dp_shard"),
    "global_batch": ("microbatches",),
    "microbatches": ("global_batch",),
}
"""Keys that say the same in other words: a stated one replaces those that were seen."""

_AXES = ("tp", "pp", "dp", "dp_replicate", "dp_shard", "world_size", "gpus")
"""Keys of which one at least says over how many ranks a job runs."""


def job_of_run(spec: RunSpec | None, found: RunSplit, stated: TomlTable | None = None) -> JobConfig:
    """The job of the recording; what the tables of stated say wins over what was seen.

    spec is what run.json says, None where there is none; stated is a job.toml, whole or a part.
    Raises UsageError, one line with all that nobody tells; DataError for a job that cannot be.
    """
    return job_in(run_table(spec, found, stated))


def run_table(spec: RunSpec | None, found: RunSplit, stated: TomlTable | None = None) -> TomlTable:
    """The job.toml of the recording, as a table. Raises UsageError where something is missing."""
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
    """The table of that name with what is stated, and what was seen where nothing is."""
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
    """Raises UsageError that lists, table by table, what is needed and not told."""
    lacking = [
        f"[{name}] {', '.join(keys)}" for name in NAMES if (keys := _lacks(name, tables, found))
    ]
    if not lacking:
        return
    hint = "write them in a job.toml and give it with --job"
    if stated is not None:
        hint = f"write them in {stated.where}"
    raise UsageError(f"the recording does not tell {_listed(lacking)}: {hint}")


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


# The [hardware] table of a recording: the preset that its device's name means.

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
"""What drivers call a device, in the order in which to try; None: no preset is of it."""


def hardware_seen(spec: RunSpec | None, found: RunSplit) -> TomlTable:
    """The preset of the run's device, and over several hosts how many ranks each holds."""
    values = {"preset": preset_of(_device(spec, found)), "gpus_per_node": _per_node(found)}
    return seen_table("hardware", values)


def preset_of(device: str) -> str | None:
    """The preset of a device as its driver names it, None where that may be several."""
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
    """What run.json says of the model's shape; empty where it says nothing."""
    return seen_table("model", known_facts(spec.model if spec else None, MODEL_KEYS))


def known_facts(facts: ModelSpec | Training | None, keys: tuple[str, ...]) -> dict[str, object]:
    """What run.json says under names that are keys of a table too, unknown ones as None."""
    return {} if facts is None else {k: v for k, v in asdict(facts).items() if k in keys}


def seen_table(name: str, values: Mapping[str, object]) -> TomlTable:
    """The table of what is known of the values."""
    return TomlTable("run.json", name, {k: v for k, v in values.items() if v is not None})


# The [parallel] table of a recording.

_ZERO_BUBBLE = "zb-h1"
"""What torch's schedule of that name runs, where no more of the name is told."""

_STAGES = {"fsdp": 3, "hsdp": 3, "zero-2": 2, "zero-1": 1}


def parallel_seen(spec: RunSpec | None, found: RunSplit) -> TomlTable:
    """The axes of the mesh, and how each works, by run.json and by what the steps show.

    Where no mesh is known all ranks are taken for replicas unless a job.toml states axes.
    """
    said = (spec.training if spec else None) or Training()
    mesh, seen = mesh_seen(spec, found), {one.name: one for one in found.strategies}
    values: dict[str, object] = {"cp": 1} if mesh is None else dict(_axes(mesh))
    zero = said.zero if said.zero is not None else _zero(mesh, seen)
    values |= {"zero": zero} | _data(mesh, zero) | _strategies(said, seen, spec, found)
    values |= _pipeline(said, mesh, found)
    return seen_table("parallel", values)


def _axes(mesh: Mesh) -> dict[str, object]:
    """Sizes, and the order of the ranks where it is not the usual one."""
    several = [axis for axis in reversed(mesh.axes) if mesh.size(axis) > 1]
    order = list(dict.fromkeys(axis.split("_")[0] for axis in several))
    rest = [axis for axis in RANK_ORDER if axis not in order]
    usual = order == sorted(order, key=RANK_ORDER.index)
    return {
        **{axis: mesh.size(axis) for axis in ("tp", "pp", "cp")},
        "rank_order": None if usual else "-".join([*order, *rest]),
    }


def _zero(mesh: Mesh | None, seen: dict[str, Strategy]) -> int:
    """FSDP that keeps weights until the backward is its ZeRO-2, and shards all the same."""
    if mesh is not None and mesh.size("dp_shard") > 1:
        return 3
    return max((stage for name, stage in _STAGES.items() if name in seen), default=0)


def _data(mesh: Mesh | None, zero: int) -> dict[str, object]:
    """Data parallel ranks; those of one axis as dp, which zero makes the right one."""
    if mesh is None:
        return {}
    copies, shards = mesh.size("dp_replicate"), mesh.size("dp_shard")
    if copies > 1 and shards > 1:
        return {"dp_replicate": copies, "dp_shard": shards}
    return {"dp": copies * shards, "zero": zero if copies * shards * mesh.size("cp") > 1 else 0}


def _strategies(
    said: Training, seen: dict[str, Strategy], spec: RunSpec | None, found: RunSplit
) -> dict[str, object]:
    """How tensor, context, expert and data parallelism work."""
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
    """The schedule where the model knows its name, and the stages of a rank."""
    if mesh is None or mesh.size("pp") == 1:
        return {}
    seen = "" if found.schedule is None else found.schedule.name
    name = schedule_named(said.schedule) if said.schedule else seen
    known = _ZERO_BUBBLE if name == "zerobubble" else name if name in SCHEDULES else None
    chunks = 1 if known in TWO_STAGES else _chunks(found)
    return {"schedule": known, "chunks": chunks if chunks > 1 else None}


def _chunks(found: RunSplit) -> int:
    """The most stages that a rank is seen to run."""
    grids = (grid for rank in found.ranks for grid in rank.grids)
    return max((len({box.stage for box in grid.boxes}) for grid in grids), default=1)


def _strategy_detail(seen: dict[str, Strategy], name: str) -> str:
    return seen[name].detail if name in seen else ""


# The [training] table of a recording.

_BY_EVIDENCE = ("dtype", "recompute", "offload", "framework")
"""Keys whose values run.json states in torch's words, or which only the steps show."""

_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Names of traces and of torch for job.toml's; 8 bits are in no message."""


def training_seen(spec: RunSpec | None, found: RunSplit) -> TomlTable:
    """What run.json says of a step, and where it is silent what the steps show."""
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
    """How many pass a rank in a step; one where its steps show neither pipeline nor more."""
    if found.schedule is not None:
        return found.schedule.microbatches
    counted = accumulated_microbatches(found.strategies)
    if counted is not None:
        return counted
    return 1 if found.strategies and not found.layout.pipelines else None


def _dtype(found: RunSplit) -> str | None:
    """8 bits where they are seen, else the type of most bytes that ranks send."""
    if _detail_of_run(found, "fp8") is not None:
        return "fp8"
    moved: Counter[str] = Counter()
    for one in found.collectives:
        moved[(one.dtype or "").lower()] += one.count * (one.message_bytes or 0)
    names = [_DTYPES[name] for name, _ in moved.most_common() if name in _DTYPES]
    return next(iter(names), None)


def _offload(said: Training, found: RunSplit) -> list[str] | None:
    """The states that live elsewhere; run.json may list several with commas."""
    if said.offload:
        return re.split(r"[,\s]+", said.offload.strip())
    seen = [one.detail for one in found.strategies if one.name == "offload"]
    return seen or None


def _detail_of_run(found: RunSplit, name: str) -> str | None:
    """What is said of the strategy, None where it is not seen."""
    return next((one.detail for one in found.strategies if one.name == name), None)


# Which of the model's frameworks trains as the run did.


def framework_seen(spec: RunSpec | None, found: RunSplit) -> str:
    """run.json's word where the model knows it, else what sends the same messages.

    Loops of one's own in torch are FSDP2 where weights or states are shared out or nothing is
    summed over data, else DDP.
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
    """Whether a loop of one's own sums gradients in one call behind the backward.

    DistributedDataParallel knows neither weights that are cut nor ranks that hold other experts.
    """
    said = (spec.training.framework if spec and spec.training else None) or "torch"
    mesh = mesh_seen(spec, found)
    cut = mesh is not None and mesh.size("tp") > 1
    experts = any(one.name == "ep" for one in found.strategies)
    return said == "torch" and (cut or experts) and framework_seen(spec, found) == "ddp"


def mesh_seen(spec: RunSpec | None, found: RunSplit) -> Mesh | None:
    """The mesh that run.json states or the messages show; of ranks alone, one of one rank."""
    if found.layout.mesh is not None:
        return found.layout.mesh
    alone = max(rank.trace.world_size for rank in found.ranks) == 1
    return Mesh.of({"dp_replicate": 1}) if alone else None
