"""Tensor, pipeline and data parallelism at once: layers cut, stages in a row, replicas of both.

torchrun --standalone --nproc-per-node 8 examples/three_d.py
"""

from __future__ import annotations

import torch
from gradients import sum_gradients
from job import LEARNING_RATE, MICRO_BATCH, batch, command_line, join, mesh_of
from loop import train, training_of
from pipeline import Pipeline
from tensor import split
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel

MICROBATCHES = 4


def main() -> None:
    options = command_line(__doc__, "three_d").parse_args()
    device = join()
    mesh = mesh_of(device, pp=2, dp_replicate=-1, tp=2)
    replicas = mesh["dp_replicate"]
    pipeline = Pipeline(
        "1f1b", MICROBATCHES, mesh["pp"], device, prepare=lambda stage: split(stage, mesh["tp"])
    )
    weights = list(pipeline.modules.parameters())
    optimizer = torch.optim.Adam(weights, lr=LEARNING_RATE, foreach=False)

    def train_step(step: int) -> Tensor | None:
        sequences = MICROBATCHES * MICRO_BATCH
        read = batch(step, device, replicas.get_local_rank(), sequences)
        with loss_parallel():
            loss = pipeline.run(read.tokens, read.targets)
        # By hand, for DDP knows no weights that are cut.
        sum_gradients(weights, replicas.get_group(), times=1 / replicas.size())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "torch", MICROBATCHES, "1f1b"))


if __name__ == "__main__":
    main()
