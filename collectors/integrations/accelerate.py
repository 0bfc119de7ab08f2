"""The recorder for training loops that use accelerate.

    with profile_accelerator(accelerator, "runs/exp1"):
        for batch in loader:
            with accelerator.accumulate(model): ...

A step is an optimizer step, at which accelerate synchronizes gradients, with all its microbatches.
Accelerate's own profiler (ProfileKwargs) also uses torch's profiler, of which there is one per
process: if it starts within the recorded steps, the recording ends early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Unpack

from stepsplit.collectors.formats.run_spec import Training
from stepsplit.collectors.integrations.calls import call_after_each
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
from stepsplit.collectors.integrations.deepspeed import read_engine_spec


@contextmanager
def profile_accelerator(
    accelerator: Any, out: str | Path, **options: Unpack[Options]
) -> Iterator[None]:
    """Records the training steps within the block to `out`; the options are those of profile_run.

    Enter it after accelerator.prepare(...), so that run.json includes the model.
    """
    run = LazyRecording(out, **options)
    # The classes whose step() a loop calls; with DeepSpeed the step happens in backward.
    import_library("accelerate.utils", "accelerate")
    base = import_library("accelerate.optimizer", "accelerate").AcceleratedOptimizer
    kinds = [base, *(each for each in base.__subclasses__() if "step" in vars(each))]
    with ExitStack() as undo:
        ended = _StepListener(run)
        for kind in kinds:
            undo.enter_context(call_after_each(kind, "step", ended))
        undo.enter_context(run.record_around(lambda: _read_accelerator_spec(accelerator)))
        yield


class _StepListener:
    """Calls the recorder at each step of the first optimizer that stepped."""

    def __init__(self, run: LazyRecording) -> None:
        self._run = run
        self._leader: Any = None

    def __call__(self, optimizer: Any) -> None:
        if not optimizer.gradient_state.sync_gradients:
            return
        # A loop with two optimizers, as of a GAN, has one step for both.
        if self._leader is None:
            self._leader = optimizer
        if optimizer is self._leader:
            self._run.step()


def _read_accelerator_spec(accelerator: Any) -> FrameworkSpec:
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is not None:
        return read_engine_spec(wrapped.engine)
    state, ranks = accelerator.state, count_replicas(accelerator.state)
    loader = next(iter(accelerator._dataloaders), None)
    sequences = getattr(loader, "total_batch_size", None)
    optimizer = next(iter(accelerator._optimizers), None)
    training = Training(
        micro_batch=sequences and sequences // ranks,
        global_batch=sequences and sequences * accelerator.gradient_accumulation_steps,
        microbatches=accelerator.gradient_accumulation_steps,
        dtype=normalize_dtype(accelerator.mixed_precision),
        optimizer=optimizer and normalize_optimizer(type(optimizer.optimizer).__name__),
        framework="fsdp2" if state.distributed_type.name == "FSDP" else "ddp",
        offload=read_sharding(state)[1],
    )
    model = next(iter(accelerator._models), None)
    return FrameworkSpec(read_mesh(state), read_model_spec(model), training)


# Parallelism of an accelerate job (also of transformers' Trainer), from AcceleratorState.

_NOT_DATA = ("tp", "cp", "sp")


def read_mesh(state: Any) -> dict[str, int] | None:
    """{axis: size}, outermost first; None if the state does not define it."""
    mesh = getattr(state, "device_mesh", None)
    if mesh is not None:
        # accelerate's sp shards sequences, as cp does.
        names = ("cp" if name == "sp" else name for name in mesh.mesh_dim_names)
        return dict(zip(names, mesh.shape, strict=True))
    kind, axis = state.distributed_type.name, None
    if kind == "DEEPSPEED":
        axis = choose_data_axis(state.deepspeed_plugin.zero_stage)
    elif kind == "FSDP":
        axis = _find_fsdp_axis(state.fsdp_plugin)
    elif kind == "NO" or kind.startswith("MULTI_"):
        axis = "dp_replicate"
    return None if axis is None else {axis: state.num_processes}


def count_replicas(state: Any) -> int:
    """The number of ranks that read different data."""
    mesh = getattr(state, "device_mesh", None)
    if mesh is None:
        return int(state.num_processes)
    sizes = zip(mesh.mesh_dim_names, mesh.shape, strict=True)
    return math.prod(size for name, size in sizes if name not in _NOT_DATA)


def read_sharding(state: Any) -> tuple[int | None, str | None]:
    """The ZeRO stage, None without DeepSpeed, and the states in host memory, None for none."""
    kind = state.distributed_type.name
    if kind == "DEEPSPEED":
        return read_zero_config(state.deepspeed_plugin.deepspeed_config)
    return None, describe_fsdp_offload(state.fsdp_plugin.cpu_offload) if kind == "FSDP" else None


def infer_framework(state: Any, plain: str) -> str:
    """The training framework: deepspeed, or `plain` otherwise."""
    return "deepspeed" if state.distributed_type.name == "DEEPSPEED" else plain


def _find_fsdp_axis(plugin: Any) -> str | None:
    """The axis of FSDP; None for hybrid FSDP1, whose number of replicas is not known."""
    if getattr(plugin, "fsdp_version", 1) == 2:
        return "dp_shard"
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    name = getattr(strategy, "name", "")
    known = {"FULL_SHARD": "dp_shard", "SHARD_GRAD_OP": "dp_shard", "NO_SHARD": "dp_replicate"}
    return known.get(name)
