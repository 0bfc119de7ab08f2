"""ZeRO-1: DDP means the gradients, but each rank holds the optimizer's states of its share only.

torchrun --standalone --nproc-per-node 2 examples/zero1.py
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, loss_of
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    options = command_line(__doc__, "zero1").parse_args()
    device = join()
    mesh = mesh_of(device, dp_replicate=-1)
    model = DistributedDataParallel(GPT().to(device))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=LEARNING_RATE
    )

    def train_step(step: int) -> Tensor:
        read = batch(step, device, mesh.get_rank())
        loss = loss_of(model(read.tokens), read.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "ddp"))


if __name__ == "__main__":
    main()
