"""Activation checkpointing: blocks keep less than they need for backward and compute it again.

torchrun --standalone --nproc-per-node 2 examples/checkpointing.py --recompute selective
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fsdp import shard
from job import LEARNING_RATE, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
"""What is dear to compute again: selective recomputation keeps these results."""
WAYS: dict[str, Callable[[], Any]] = {
    "full": noop_context_fn,
    "selective": partial(create_selective_checkpoint_contexts, KEPT),
}


class Recomputed(nn.Module):
    """A block whose forward runs once more in backward, all of it or but for what is kept."""

    def __init__(self, block: nn.Module, way: str) -> None:
        super().__init__()
        self.block, self.contexts = block, WAYS[way]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, context_fn=self.contexts)


def main() -> None:
    parser = command_line(__doc__, "checkpointing")
    parser.add_argument("--recompute", choices=("none", *WAYS), default="full")
    options = parser.parse_args()
    device = join()
    mesh = mesh_of(device, dp_shard=-1)
    model = GPT().to(device)
    if options.recompute != "none":
        model.blocks = nn.ModuleList(Recomputed(each, options.recompute) for each in model.blocks)
    shard(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def train_step(step: int) -> Tensor:
        read = batch(step, device, mesh.get_rank())
        loss = loss_of(model(read.tokens), read.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "fsdp2"))


if __name__ == "__main__":
    main()
