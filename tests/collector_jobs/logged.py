"""torchrun logged.py FOLDER STEPS SINK...: trains and records with log_to; W&B has a run of the
script on rank 0 if WANDB_MODE is set. Prints the last loss of rank 0."""

from __future__ import annotations

import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from stepsplit.collectors import profile_run


def main(folder: str, steps: int, sinks: list[str]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    own = None
    if rank == 0 and "WANDB_MODE" in os.environ:
        import wandb

        own = wandb.init(project="own", settings=wandb.Settings(silent=True, console="off"))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(rank)
    loss = torch.zeros(())
    with profile_run(folder, active=3, log_to=sinks or None) as run:
        for step in range(steps):
            loss = model(torch.randn(64, 128, generator=batches)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if own is not None:
                own.log({"loss": loss.item()}, step=step)
            run.step()
    if rank == 0:
        sys.stdout.write(f"{loss.item().hex()}\n")
    if own is not None:
        own.finish()
    distributed.barrier()
    del model, optimizer
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
