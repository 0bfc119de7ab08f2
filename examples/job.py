"""What stands around every strategy: the job that a rank joins, its command line, its batches."""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_gpt import SHAPE
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

MICRO_BATCH = 8
"""Sequences of a microbatch."""
LEARNING_RATE = 3e-3
_SYMBOLS = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens, and for each the one that follows; both (sequences, tokens)."""

    tokens: Tensor
    targets: Tensor

    def microbatches(self) -> list[Batch]:
        """The batch in parts of MICRO_BATCH sequences."""
        parts = zip(self.tokens.split(MICRO_BATCH), self.targets.split(MICRO_BATCH), strict=True)
        return [Batch(tokens, targets) for tokens, targets in parts]


def command_line(purpose: str | None, name: str) -> ArgumentParser:
    """The options that all examples have; each adds its own."""
    parser = ArgumentParser(description=purpose)
    parser.add_argument("--out", type=Path, default=Path("runs", name), help="recording's folder")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps")
    return parser


def join() -> torch.device:
    """Joins the job that torchrun started: over NCCL where each rank has a GPU, else over gloo."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not each_rank_has_gpu():
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    return device


def each_rank_has_gpu() -> bool:
    """Whether this machine has a GPU for each of the ranks that run on it."""
    return torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])


def mesh_of(device: torch.device, **axes: int) -> DeviceMesh:
    """All ranks as a grid, outermost axis first; of sizes that may hold one -1: what is left."""
    known = math.prod(n for n in axes.values() if n > 0)
    sizes = [distributed.get_world_size() // known if n == -1 else n for n in axes.values()]
    return init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(axes))


def batch(step: int, device: torch.device, replica: int = 0, sequences: int = MICRO_BATCH) -> Batch:
    """What a data-parallel replica reads in a step: sequences that count on in steps of 1 to 4.

    Two tokens tell what comes next, so that a model with attention learns it soon.
    """
    draw = torch.Generator().manual_seed(1000 * step + replica)
    start = torch.randint(_SYMBOLS, (sequences, 1), generator=draw)
    stride = torch.randint(1, 5, (sequences, 1), generator=draw)
    text = (start + stride * torch.arange(SHAPE.seq_len + 1)) % _SYMBOLS
    return Batch(text[:, :-1].to(device), text[:, 1:].to(device))
