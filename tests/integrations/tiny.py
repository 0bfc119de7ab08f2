"""Shared by the trainings of these tests: a model, and data that every rank generates."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import Dataset, TensorDataset

OUT = sys.argv[1] if len(sys.argv) > 1 else "-"
"""The output folder; "-" runs the same training without the recorder."""
OPTIONS = {"wait": 2, "warmup": 1, "active": 3}
"""Steps 3 to 5 are recorded."""
MICRO_BATCH = 4
ACCUMULATE = 2
STEPS = 8


def model() -> nn.Module:
    """A perceptron with the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8))


def data(samples: int = 2 * MICRO_BATCH * ACCUMULATE * STEPS) -> Dataset[tuple[Tensor, ...]]:
    """Points in 32 dimensions, in 8 classes."""
    draw = torch.Generator().manual_seed(1)
    points = torch.randn(samples, 32, generator=draw)
    return TensorDataset(points, points[:, :8].argmax(dim=1))


def recorded_by(recorder: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """The recorder, or an empty context if the training is not recorded."""
    return nullcontext() if OUT == "-" else recorder


def tell(loss: float) -> None:
    """Prints the last loss of this rank, to the bit, in one write."""
    sys.stdout.write(f"rank {distributed.get_rank()} loss {float(loss).hex()}\n")
    sys.stdout.flush()
