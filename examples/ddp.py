"""Data parallelism: each rank trains on its own batches, and all_reduces mean the gradients.

torchrun --standalone --nproc-per-node 2 examples/ddp.py --accumulate 2
"""

from __future__ import annotations

import torch
from job import LEARNING_RATE, MICRO_BATCH, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, loss_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = command_line(__doc__, "ddp")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    options = parser.parse_args()
    device = join()
    mesh = mesh_of(device, dp_replicate=-1)
    model = DistributedDataParallel(GPT().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def train_step(step: int) -> Tensor:
        read = batch(step, device, mesh.get_rank(), options.accumulate * MICRO_BATCH)
        *early, last = read.microbatches()
        with model.no_sync():
            for part in early:
                (loss_of(model(part.tokens), part.targets) / options.accumulate).backward()
        loss = loss_of(model(last.tokens), last.targets)
        (loss / options.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "ddp", options.accumulate))


if __name__ == "__main__":
    main()
