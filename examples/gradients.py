"""Summing gradients by hand, where neither DDP nor FSDP does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor


def sum_gradients(
    parameters: Iterable[Tensor], group: distributed.ProcessGroup, times: float = 1.0
) -> None:
    """Adds up the gradients of all ranks of the group in one all_reduce, and scales the sums."""
    gradients = [own_gradient(each) for each in parameters]
    flat = _flatten_dense_tensors(gradients)
    distributed.all_reduce(flat, group=group)
    flat *= times
    torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))


def own_gradient(parameter: Tensor) -> Tensor:
    """The gradient of what this rank holds of the parameter."""
    if isinstance(parameter, DTensor):
        # That of an embedding cut by vocabulary comes whole.
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        return parameter.grad.to_local()
    return parameter.grad
