"""The [parallel] table of a recording."""

from __future__ import annotations

from stepsplit.analyzer.compare.job.framework_seen import (
    framework_seen,
    mesh_seen,
    summed_by_hand,
)
from stepsplit.analyzer.model.config import RANK_ORDER, SCHEDULES, TWO_STAGES
from stepsplit.analyzer.model.config_table import MOST, Table
from stepsplit.analyzer.split.pipeline import schedule_named
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.analyzer.split.strategy_evidence import Strategy
from stepsplit.collectors.run_spec import Mesh, RunSpec, Training

_ZERO_BUBBLE = "zb-h1"
"""What torch's schedule of that name runs, where no more of the name is told."""
_STAGES = {"fsdp": 3, "hsdp": 3, "zero-2": 2, "zero-1": 1}


def parallel_seen(spec: RunSpec | None, found: RunSplit) -> Table:
    """The axes of the mesh, and how each works, by run.json and by what the steps show.

    Where no mesh is known all ranks are taken for replicas unless a RUN.toml states axes.
    """
    said = (spec.training if spec else None) or Training()
    mesh, seen = mesh_seen(spec, found), {one.name: one for one in found.strategies}
    values: dict[str, object] = {"cp": 1} if mesh is None else dict(_axes(mesh))
    zero = said.zero if said.zero is not None else _zero(mesh, seen)
    values |= {"zero": zero} | _data(mesh, zero) | _strategies(said, seen, spec, found)
    values |= _pipeline(said, mesh, found)
    return Table("run.json", "parallel", {k: v for k, v in values.items() if v is not None})


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
    once = fsdp and "summed once" in _detail(seen, "gradient accumulation")
    return {
        "sequence_parallel": True if "sp" in seen else None,
        "split_vocab": said.split_vocab if said.split_vocab is not None else _vocabulary(seen),
        "context": _detail(seen, "cp") or None,
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


def _detail(seen: dict[str, Strategy], name: str) -> str:
    return seen[name].detail if name in seen else ""
