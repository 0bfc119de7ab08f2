"""Steps of a tiny model under DistributedDataParallel, for frameworks that leave the loop open."""

from __future__ import annotations

import torch
from tiny import MICRO_BATCH, data, model
from torch import Tensor, distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Loop:
    """A training of which train_step makes one step; begin after init_process_group."""

    def __init__(self) -> None:
        self._net = DistributedDataParallel(model())
        self._optimizer = torch.optim.AdamW(self._net.parameters())
        self._points, self._classes = data()[:]
        self._next = distributed.get_rank()

    def train_step(self) -> Tensor:
        """One step on this rank's next batch; its loss."""
        batch = slice(self._next * MICRO_BATCH, (self._next + 1) * MICRO_BATCH)
        self._next += distributed.get_world_size()
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._net(self._points[batch]), self._classes[batch])
        loss.backward()
        self._optimizer.step()
        return loss.detach()
