"""python pipelined.py SCHEDULE FOLDER: one rank of a small model under a schedule of torch.

Writes the rank's trace by torch.profiler alone, with the shapes of ops, which name the peers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed.pipelining.schedules as schedules
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage

WIDTH, MICROBATCHES, STEPS = 128, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def compute_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def main(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    chunks = 2 if "Interleaved" in name else 1
    stages = [
        PipelineStage(
            nn.Sequential(Block(), Block()), rank + i * ranks, ranks * chunks, torch.device("cpu")
        )
        for i in range(chunks)
    ]
    schedule = getattr(schedules, name)(
        stages if chunks > 1 else stages[0], MICROBATCHES, loss_fn=compute_loss
    )
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, lr=1e-3)
    batch = torch.randn(MICROBATCHES * 16, WIDTH)
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=STEPS),
        on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"rank{rank}.json")),
        record_shapes=True,
    ) as profiler:
        for _ in range(1 + STEPS):
            optimizer.zero_grad()
            inputs = (batch,) if rank == 0 else ()
            target = {"target": batch, "losses": []} if rank == ranks - 1 else {}
            schedule.step(*inputs, **target)
            optimizer.step()
            profiler.step()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ
    main(sys.argv[1], Path(sys.argv[2]))
