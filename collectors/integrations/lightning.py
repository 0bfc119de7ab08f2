"""The recorder as a callback of Lightning, for both of its package names.

    Trainer(callbacks=[StepsplitCallback("runs/exp1")])

A step ends with the batch that increases trainer.global_step, and includes the batches accumulated
before it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Unpack

from stepsplit.collectors.formats.run_spec import Training
from stepsplit.collectors.integrations.common import (
    FrameworkSpec,
    LazyRecording,
    Options,
    choose_data_axis,
    describe_fsdp_offload,
    import_library,
    normalize_dtype,
    normalize_optimizer,
    read_model_spec,
    read_zero_config,
)


def _import_callback() -> Any:
    """The Callback class of the package that the script has imported; by default `lightning`."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        # The two packages have classes of their own; the Trainer is of the one that is imported.
        if name in sys.modules:
            return sys.modules[name].Callback
    try:
        return import_library("lightning.pytorch", "lightning").Callback
    except ImportError as missing:
        try:
            return import_library("pytorch_lightning", "pytorch-lightning").Callback
        except ImportError:
            raise missing from None


class StepsplitCallback(_import_callback()):  # type: ignore[misc]
    """Records a fit to the folder `out`; the options are those of profile_run."""

    def __init__(self, out: str | Path, **options: Unpack[Options]) -> None:
        super().__init__()
        self._run = LazyRecording(out, **options)
        self._done = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the recording; process groups exist and the sanity check is over."""
        self._done = trainer.global_step
        self._run.begin(lambda: read_trainer_spec(trainer, pl_module))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a step if an optimizer has stepped in this batch."""
        if trainer.global_step != self._done:
            self._done = trainer.global_step
            self._run.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the recording."""
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the recording and keeps the steps recorded so far."""
        self._run.end(failed=True)


# Metadata from Lightning's Trainer.

_FRAMEWORKS = {
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp2",
    "ModelParallelStrategy": "fsdp2",
}

_AXES = {"data_parallel": "dp_shard", "tensor_parallel": "tp"}
"""Dim names of ModelParallelStrategy's mesh, as mesh axes."""


def read_trainer_spec(trainer: Any, module: Any) -> FrameworkSpec:
    """Reads mesh, model and training setup of a running fit."""
    mesh = _read_mesh(trainer)
    training = _read_training(trainer, mesh)
    return FrameworkSpec(mesh, read_model_spec(module), training, trainer.global_step)


def _read_training(trainer: Any, mesh: dict[str, int] | None) -> Training:
    micro_batch = getattr(trainer.train_dataloader, "batch_size", None)
    microbatches = trainer.accumulate_grad_batches
    sequences = None
    if micro_batch is not None and mesh is not None:
        replicas = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        sequences = micro_batch * microbatches * replicas
    strategy = trainer.strategy
    kind = type(strategy).__name__
    zero, offload = None, describe_fsdp_offload(getattr(strategy, "cpu_offload", None))
    if kind == "DeepSpeedStrategy":
        zero, offload = read_zero_config(strategy.config)
    return Training(
        micro_batch=micro_batch,
        global_batch=sequences,
        microbatches=microbatches,
        dtype=normalize_dtype(trainer.precision),
        optimizer=next(
            (normalize_optimizer(type(each).__name__) for each in trainer.optimizers), None
        ),
        framework=_FRAMEWORKS.get(kind, "ddp"),
        zero=zero,
        offload=offload,
    )


def _read_mesh(trainer: Any) -> dict[str, int] | None:
    """{axis: size}, outermost first; None if the strategy does not define it."""
    strategy, ranks = trainer.strategy, trainer.world_size
    kind = type(strategy).__name__
    if kind == "ModelParallelStrategy":
        mesh = strategy.device_mesh
        return {_AXES[dim]: n for dim, n in zip(mesh.mesh_dim_names, mesh.shape, strict=True)}
    if kind == "FSDPStrategy":
        name = strategy.sharding_strategy.name
        if "HYBRID" not in name:
            return {"dp_replicate" if name == "NO_SHARD" else "dp_shard": ranks}
        # Without a mesh, its groups are not known here.
        mesh = strategy.kwargs.get("device_mesh")
        sizes = mesh if isinstance(mesh, tuple) else getattr(mesh, "shape", ())
        return dict(zip(("dp_replicate", "dp_shard"), sizes, strict=True)) if sizes else None
    if kind == "DeepSpeedStrategy":
        return {choose_data_axis(read_zero_config(strategy.config)[0]): ranks}
    return {"dp_replicate": ranks} if kind in ("DDPStrategy", "SingleDeviceStrategy") else None
