"""torchrun watched.py STEPS: trains a small model with DDP and prints the last loss of rank 0."""

from __future__ import annotations

import sys
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def main(steps: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(rank)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.randn(64, 128, generator=batches)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        sys.stdout.write(f"{loss.item().hex()}\n")
    # A rank that leaves while another still talks is now and then aborted by gloo itself.
    distributed.barrier()
    del model, optimizer
    distributed.destroy_process_group()
    # Its threads end in the background, and abort a process that ends before them.
    time.sleep(0.5)


if __name__ == "__main__":
    main(int(sys.argv[1]))
