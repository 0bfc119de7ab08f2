"""Trainings with odd optimizers, each in a fork; says how many steps the agent has counted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import distributed
from torch.amp import GradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, SGD, Optimizer

from stepsplit.collectors.attach.messages import ask_status

Weight = torch.nn.Parameter


class Raising(SGD):
    """Raises in its third step, as one out of memory does."""

    calls = 0

    def step(self, closure: object = None) -> None:
        self.calls += 1
        if self.calls == 3:
            raise MemoryError
        super().step()


def scaler_skips_two_of_8(weight: Weight) -> None:
    optimizer, scaler = SGD([weight], lr=0.1), GradScaler("cpu")
    for step in range(8):
        scaler.scale(weight.sum() * (float("inf") if step in (2, 5) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def two_step_8_times(weight: Weight) -> None:
    both = SGD([weight], lr=0.1), SGD([Weight(torch.ones(2))], lr=0.1)
    for _ in range(8):
        for optimizer in both:
            _step(optimizer, weight)


def one_wraps_another(weight: Weight) -> None:
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    _step(ZeroRedundancyOptimizer([weight], SGD, lr=0.1), weight, 8)


def one_calls_a_closure(weight: Weight) -> None:
    optimizer = LBFGS([weight], max_iter=3)
    for _ in range(8):
        optimizer.step(lambda: _loss(weight))


def one_raises_in_its_third_of_8(weight: Weight) -> None:
    optimizer = Raising([weight], lr=0.1)
    for _ in range(8):
        _try(optimizer, weight)


def one_raises_and_is_replaced(weight: Weight) -> None:
    """Two steps, one that raises, four of another optimizer."""
    optimizer: Optimizer = Raising([weight], lr=0.1)
    for _ in range(3):
        _try(optimizer, weight)
    _step(SGD([weight], lr=0.1), weight, 4)


def compiled_8_times(weight: Weight) -> None:
    optimizer = SGD([weight], lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(8):
        _loss(weight)
        step()


def _step(optimizer: Optimizer, weight: Weight, times: int = 1) -> None:
    for _ in range(times):
        _loss(weight)
        optimizer.step()


def _loss(weight: Weight) -> torch.Tensor:
    loss = weight.pow(2).sum()
    loss.backward()
    return loss


def _try(optimizer: Optimizer, weight: Weight) -> None:
    try:
        _step(optimizer, weight)
    except MemoryError:
        return


def counted(scenario: Callable[[Weight], None]) -> int:
    """The steps counted by the agent of this process, and the resulting weight."""
    weight = Weight(torch.ones(3))
    scenario(weight)
    status = ask_status(os.getpid())
    sys.stderr.write(f"{scenario.__name__} {weight.tolist()}\n")
    return status.steps if status else -1


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if os.fork() == 0:
            sys.stdout.write(f"{name} {counted(globals()[name])}\n")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
