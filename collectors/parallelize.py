"""How the demo model is spread over the ranks: DTensor TP, DDP or FSDP2, and the pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from stepsplit.collectors.gpt import stage_loss
from stepsplit.collectors.recipe import Recipe
from stepsplit.collectors.run_spec import Mesh

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
BUCKET_MIB = 4


def spread(stage: Any, mesh: Mesh, device_mesh: Any) -> Any:
    """The stage as this rank holds it: cut by tp, then sharded or replicated over dp."""
    if mesh.size("tp") > 1:
        _tensor_parallel(stage, device_mesh["tp"])
    if mesh.size("dp_shard") > 1:
        return _fully_sharded(stage, mesh, device_mesh)
    if "dp_replicate" in mesh.axes and mesh.size("tp") == 1:
        group = device_mesh["dp_replicate"].get_group()
        return nn.parallel.DistributedDataParallel(
            stage, process_group=group, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
        )
    return stage


def pipeline(module: Any, recipe: Recipe, mesh: Mesh, device_mesh: Any, device: Any) -> Any:
    """The schedule that runs this rank's stage."""
    group = device_mesh["pp"].get_group()
    stage = PipelineStage(module, group.rank(), mesh.size("pp"), device, group=group)
    return _SCHEDULES[recipe.schedule](stage, recipe.microbatches, loss_fn=stage_loss)


def optimizer(parameters: Iterable[Any]) -> Any:
    """AdamW in one op for each kind of parameter: a fused op takes no mix of DTensor and Tensor."""
    kinds: defaultdict[object, list[Any]] = defaultdict(list)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds[mesh].append(parameter)
    groups = [{"params": kind} for kind in kinds.values()]
    return torch.optim.AdamW(groups, lr=2e-3, weight_decay=0.0, fused=True)


def sync_gradients(parameters: Iterable[Any], mesh: Mesh, device_mesh: Any) -> None:
    """Means the gradients over dp where neither DDP nor FSDP does: DDP knows no DTensor."""
    if mesh.size("tp") == 1 or mesh.size("dp_replicate") == 1 or mesh.size("dp_shard") > 1:
        return
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    flat = _flatten_dense_tensors(gradients)
    distributed.all_reduce(flat, group=device_mesh["dp_replicate"].get_group())
    flat /= mesh.size("dp_replicate")
    torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))


def _tensor_parallel(stage: Any, tp_mesh: Any) -> None:
    for block in stage.blocks:
        plan = {
            "qkv": ColwiseParallel(),
            "proj": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, tp_mesh, plan)


def _fully_sharded(stage: Any, mesh: Mesh, device_mesh: Any) -> Any:
    axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if mesh.size(axis) > 1)
    dp_mesh = device_mesh[axes]
    for block in stage.blocks:
        fully_shard(block, mesh=dp_mesh)
    return fully_shard(stage, mesh=dp_mesh)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
