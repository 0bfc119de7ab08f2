"""What Lightning's Trainer knows of its run."""

from __future__ import annotations

from typing import Any

from stepsplit.collectors.integrations.late_run import Facts
from stepsplit.collectors.integrations.shapes import model_spec
from stepsplit.collectors.integrations.words import data_axis, dtype_word, optimizer_word
from stepsplit.collectors.run_spec import Training

_FRAMEWORKS = {"FSDPStrategy": "fsdp2", "ModelParallelStrategy": "fsdp2"}
_AXES = {"data_parallel": "dp_shard", "tensor_parallel": "tp"}
"""The dims of ModelParallelStrategy's mesh."""


def facts_of(trainer: Any, module: Any) -> Facts:
    """Mesh, model and training of a fit that has begun."""
    mesh = _mesh(trainer)
    return Facts(mesh, model_spec(module), _training(trainer, mesh))


def _training(trainer: Any, mesh: dict[str, int] | None) -> Training:
    micro_batch = getattr(trainer.train_dataloader, "batch_size", None)
    microbatches = trainer.accumulate_grad_batches
    sequences = None
    if micro_batch is not None and mesh is not None:
        sequences = micro_batch * microbatches * _replicas(mesh)
    kind = type(trainer.strategy).__name__
    return Training(
        micro_batch=micro_batch,
        global_batch=sequences,
        microbatches=microbatches,
        dtype=dtype_word(trainer.precision),
        optimizer=next((optimizer_word(type(each).__name__) for each in trainer.optimizers), None),
        framework="deepspeed" if kind == "DeepSpeedStrategy" else _FRAMEWORKS.get(kind, "ddp"),
    )


def _replicas(mesh: dict[str, int]) -> int:
    return mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)


def _mesh(trainer: Any) -> dict[str, int] | None:
    """{axis: size}, outermost first; None of a strategy that leaves it open."""
    strategy, ranks = trainer.strategy, trainer.world_size
    kind = type(strategy).__name__
    if kind == "ModelParallelStrategy":
        mesh = strategy.device_mesh
        return {_AXES[dim]: n for dim, n in zip(mesh.mesh_dim_names, mesh.shape, strict=True)}
    if kind == "FSDPStrategy":
        return _fsdp(strategy, ranks)
    if kind == "DeepSpeedStrategy":
        stage = strategy.config.get("zero_optimization", {}).get("stage", 0)
        return {data_axis(stage): ranks}
    return {"dp_replicate": ranks} if kind in ("DDPStrategy", "SingleDeviceStrategy") else None


def _fsdp(strategy: Any, ranks: int) -> dict[str, int] | None:
    name = strategy.sharding_strategy.name
    if "HYBRID" in name:
        return None
    return {"dp_replicate" if name == "NO_SHARD" else "dp_shard": ranks}
