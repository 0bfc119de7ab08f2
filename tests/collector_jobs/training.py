"""The training of all these jobs: a small model, its gradients averaged over the ranks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

STEPS = int(os.environ.get("STEPS", "12"))


class Training:
    """Two ranks, or one without a launcher; the same losses in each run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank = int(os.environ.get("RANK", "0"))
        if "RANK" in os.environ:
            distributed.init_process_group("gloo")
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.model = DistributedDataParallel(model) if "RANK" in os.environ else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.steps, self.loss = 0, 0.0

    def step(self) -> None:
        """One training step."""
        inputs = torch.linspace(-1, 1, 128).reshape(8, 16) * (self.rank + 1 + self.steps % 3)
        loss = self.model(inputs).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps, self.loss = self.steps + 1, loss.item()

    def until(self, step: int) -> None:
        """Steps until so many have been made."""
        while self.steps < step:
            self.step()

    def end(self) -> None:
        """Says the last loss, to the last bit."""
        sys.stdout.write(f"rank {self.rank} loss {self.loss!r} after {self.steps}\n")
        sys.stdout.flush()
        if distributed.is_initialized():
            # A rank that leaves while another still talks is now and then aborted by gloo itself;
            # if the other was killed there is no rank to wait for.
            with suppress(RuntimeError):
                distributed.barrier()
            del self.model, self.optimizer
            distributed.destroy_process_group()


def tell_ops(own: profile, training: Training) -> None:
    """The steps recorded by the user's own profiler, whose trace must be writable."""
    path = Path(os.environ["TMPDIR"]) / f"own{training.rank}.json"
    own.export_chrome_trace(str(path))
    ops = sum(event.name == "aten::linear" for event in own.events())
    sys.stdout.write(f"rank {training.rank} saw {ops} linear, {path.stat().st_size > 1000}\n")
