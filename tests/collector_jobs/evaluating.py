"""torchrun evaluating.py FOLDER STEPS EVERY FORWARDS GATHERS FIRST: trains two ranks, evaluates in
every EVERYth step with so many forwards and all_gathers of a metric, and records STEPS steps after
the first FIRST ones."""

from __future__ import annotations

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from stepsplit.collectors import profile_run


def main(folder: str, steps: int, every: int, forwards: int, gathers: int, first: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with profile_run(folder, wait=first, warmup=1, active=steps) as run:
        for step in range(steps + first + 2):
            loss = model(torch.randn(128, 512)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % every == 0:
                with torch.profiler.record_function("evaluate"), torch.no_grad():
                    for _ in range(forwards):
                        loss = model.module(torch.randn(128, 512)).pow(2).mean()
                    for _ in range(gathers):
                        distributed.all_gather([torch.zeros(1), torch.zeros(1)], loss.reshape(1))
            run.step()
    distributed.barrier()
    del model, optimizer
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
