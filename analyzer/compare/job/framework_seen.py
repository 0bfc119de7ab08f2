"""Which of the model's frameworks trains as the run did."""

from __future__ import annotations

from stepsplit.analyzer.model.config import FRAMEWORKS
from stepsplit.analyzer.model.config_file import SAME_FRAMEWORKS
from stepsplit.analyzer.split.run import RunSplit
from stepsplit.collectors.run_spec import Mesh, RunSpec


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
