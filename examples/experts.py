"""Expert parallelism: each rank holds some experts, tokens travel to theirs and back.

torchrun --standalone --nproc-per-node 2 examples/experts.py
"""

from __future__ import annotations

from typing import Any

import torch
from gradients import sum_gradients
from job import LEARNING_RATE, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, SHAPE, Shape, loss_of
from torch import Tensor, distributed, nn
from torch.nn import functional

EXPERTS, TOP_K = 4, 2


class Exchange(torch.autograd.Function):
    """The i-th part of rank j's rows becomes the j-th part of rank i's; backward as forward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group, exchanged = group, torch.empty_like(rows)
        distributed.all_to_all_single(exchanged, rows, group=group)
        return exchanged

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Exchange.apply(gradient.contiguous(), ctx.group), None


class Experts(nn.Module):
    """A mixture of MLPs in place of one: each token goes to the TOP_K that its router prefers.

    An expert has room for its fair share of the tokens (Lepikhin et al., GShard, arXiv:2006.16668),
    so that messages are equally long; a token that finds no room is passed by.
    """

    def __init__(self, shape: Shape, group: distributed.ProcessGroup) -> None:
        super().__init__()
        self.group, own = group, EXPERTS // group.size()
        self.router = nn.Linear(shape.hidden, EXPERTS, bias=False)
        # Every rank's own experts differ, while all else starts the same on all ranks.
        draw = torch.Generator().manual_seed(1 + group.rank())
        self.up = _weights(own, shape.hidden, 4 * shape.hidden, draw)
        self.down = _weights(own, 4 * shape.hidden, shape.hidden, draw)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K)
        room = len(tokens) * TOP_K // EXPERTS
        seats = _seats(chosen.flatten(), room)
        copies = tokens.repeat_interleave(TOP_K, dim=0)
        # The last seat is for those that find no room.
        seated = tokens.new_zeros(EXPERTS * room + 1, tokens.shape[1])
        answers = self._ask(seated.index_add(0, seats, copies)[:-1])
        back = functional.pad(answers, (0, 0, 0, 1))[seats].view(len(tokens), TOP_K, -1)
        return (back * weights[..., None]).sum(1).view_as(x)

    def _ask(self, seated: Tensor) -> Tensor:
        """Each expert's answers to its tokens, wherever it lives; rows are ordered by expert."""
        by_rank = Exchange.apply(seated, self.group).unflatten(
            0, (self.group.size(), len(self.up), -1)
        )
        wide = functional.gelu(by_rank.transpose(0, 1).flatten(1, 2) @ self.up)
        answers = (wide @ self.down).unflatten(1, (self.group.size(), -1))
        return Exchange.apply(answers.transpose(0, 1).flatten(0, 2), self.group)


def _weights(experts: int, inputs: int, outputs: int, draw: torch.Generator) -> nn.Parameter:
    bound = inputs**-0.5
    return nn.Parameter((2 * torch.rand(experts, inputs, outputs, generator=draw) - 1) * bound)


def _seats(chosen: Tensor, room: int) -> Tensor:
    """The row of each choice among EXPERTS x room: first come, first served."""
    asked = functional.one_hot(chosen, EXPERTS)
    place = (asked.cumsum(0) * asked).sum(1) - 1
    return torch.where(place < room, chosen * room + place, EXPERTS * room)


def main() -> None:
    options = command_line(__doc__, "experts").parse_args()
    device = join()
    mesh = mesh_of(device, dp_replicate=-1)
    ranks = mesh.size()
    group = distributed.new_group(group_desc="mesh_ep")
    model = GPT()
    for block in model.blocks:
        block.mlp = Experts(SHAPE, group)
    model.to(device)
    own = [weight for block in model.blocks for weight in (block.mlp.up, block.mlp.down)]
    shared = [each for each in model.parameters() if all(each is not weight for weight in own)]
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def train_step(step: int) -> Tensor:
        read = batch(step, device, mesh.get_rank())
        loss = loss_of(model(read.tokens), read.targets)
        # Experts got the gradients of all ranks' tokens: with each loss divided their mean.
        (loss / ranks).backward()
        sum_gradients(shared, mesh.get_group())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "torch"))


if __name__ == "__main__":
    main()
