"""python experts.py FOLDER [LATE_RANK]: trains a layer of experts whose tokens a library moves.

The library is a stand-in of deep_ep with its interface (Buffer.dispatch and combine, as
deepseek-ai/DeepEP has them), which sends the tokens by gloo's all_to_all.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

from stepsplit.collectors import profile_run

TOKENS, HIDDEN = 256, 128


class Buffer:
    """What a training uses of deep_ep.Buffer: each rank has one expert."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.group_size = group, group.size()

    def dispatch(
        self, x: torch.Tensor, handle: Any = None, num_tokens_per_rank: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        assert num_tokens_per_rank is not None
        received = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        handle = (num_tokens_per_rank.tolist(), received.tolist())
        return self._move(x, *handle), None, None, handle[1], handle, None

    def combine(self, x: torch.Tensor, handle: tuple[list[int], list[int]]) -> tuple[Any, ...]:
        return self._move(x, handle[1], handle[0]), None, None

    def _move(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        moved = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(moved, x.contiguous(), received, sent, group=self.group)
        return moved


class Dispatch(torch.autograd.Function):
    """The backward of a dispatch is a combine, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: Buffer, counts: torch.Tensor) -> torch.Tensor:
        tokens, *_, handle, _ = buffer.dispatch(x, num_tokens_per_rank=counts)
        ctx.buffer, ctx.handle = buffer, handle
        return tokens

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.buffer.combine(gradient, ctx.handle)[0], None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: Buffer, counts: torch.Tensor) -> torch.Tensor:
        ctx.buffer, ctx.counts = buffer, counts
        return buffer.combine(x, (counts.tolist(), counts.tolist()))[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.buffer.dispatch(gradient, num_tokens_per_rank=ctx.counts)[0], None, None


def main(folder: str, late_rank: int) -> None:
    sys.modules["deep_ep"] = types.ModuleType("deep_ep")
    sys.modules["deep_ep"].Buffer = Buffer  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(ranks)), group_desc="tokens")
    buffer = Buffer(group)
    torch.manual_seed(rank)
    expert, weight = (
        (torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5).requires_grad_() for _ in range(2)
    )
    optimizer = torch.optim.SGD([expert, weight], lr=0.01)
    counts = torch.full((ranks,), TOKENS // ranks, dtype=torch.int64)
    with profile_run(folder, wait=2, active=4) as run:
        for _ in range(8):
            x = torch.randn(TOKENS, HIDDEN)
            for _ in range(6 if rank == late_rank else 1):
                for _ in range(40):
                    x = (x @ weight).tanh()
            for _ in range(2):
                tokens = Dispatch.apply(x, buffer, counts)
                x = Combine.apply((tokens @ expert).tanh(), buffer, counts)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2] if len(sys.argv) > 2 else os.environ.get("LATE_RANK", -1)))
