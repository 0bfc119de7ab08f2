"""A training that knows nothing of stepsplit, to be recorded from outside:

stepsplit record -- torchrun --standalone --nproc-per-node 2 examples/plain_ddp.py --steps 50
"""

from __future__ import annotations

import time
from argparse import ArgumentParser

import torch
from job import LEARNING_RATE, batch, join
from tiny_gpt import GPT, loss_of
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    parser.add_argument("--step-ms", type=int, default=0, help="a step takes at least so long")
    options = parser.parse_args()
    device, rank = join(), distributed.get_rank()
    model = DistributedDataParallel(GPT().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for step in range(options.steps):
        end = time.monotonic() + options.step_ms / 1e3
        read = batch(step, device, rank)
        loss = loss_of(model(read.tokens), read.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(max(0.0, end - time.monotonic()))
    if rank == 0:
        # All digits: recording must not change one.
        print(f"loss {loss.item()!r}")  # noqa: T201
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
