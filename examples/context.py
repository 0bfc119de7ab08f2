"""Context parallelism: a sequence is cut over the ranks, keys and values pass around a ring.

torchrun --standalone --nproc-per-node 2 examples/context.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from job import LEARNING_RATE, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, SHAPE, loss_of
from torch import Tensor, distributed
from torch.distributed import P2POp
from torch.nn.parallel import DistributedDataParallel


class Ring:
    """The ranks of a group in a circle; as attention, of each rank's tokens to those of all.

    Of 2n parts of the sequence rank r holds the r-th from either end: the last tokens see most
    others, so that all ranks have the same to compute.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        parts = torch.arange(SHAPE.seq_len, device=device).chunk(2 * self.size)
        self.tokens = [torch.cat((parts[r], parts[-1 - r])) for r in range(self.size)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return RingAttention.apply(q, k, v, self)

    def owners(self) -> list[int]:
        """Whose keys and values this rank sees one after the other, its own first."""
        return [(self.rank - hop) % self.size for hop in range(self.size)]

    def scores(self, q: Tensor, k: Tensor, owner: int) -> Tensor:
        """Products of this rank's queries with the owner's keys; -inf for later tokens."""
        later = self.tokens[owner] > self.tokens[self.rank][:, None]
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)

    def pass_on(self, sent: Tensor) -> Callable[[], Tensor]:
        """Sends to the next rank; the result waits for what the one before sends."""
        arriving, (before, after) = torch.empty_like(sent), (self.rank - 1, self.rank + 1)
        works = distributed.batch_isend_irecv([
            P2POp(distributed.isend, sent, group=self.group, group_peer=after % self.size),
            P2POp(distributed.irecv, arriving, group=self.group, group_peer=before % self.size),
        ])  # fmt: skip

        def received() -> Tensor:
            for work in works:
                work.wait()
            return arriving

        return received


class RingAttention(torch.autograd.Function):
    """Attention over a sequence of which no rank ever holds all keys and values.

    Each rank adds up what it attends to part by part (Liu et al., Ring Attention,
    arXiv:2310.01889). While one part is computed, the next one is on its way.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        pair, out = torch.stack((k, v)), torch.zeros_like(q)
        log_sum = torch.full_like(q[..., 0], -torch.inf)
        for owner in ring.owners():
            following = _following(ring, pair, owner)
            scores = ring.scores(q, pair[0], owner)
            total = torch.logaddexp(log_sum, scores.logsumexp(-1))
            seen = (scores - total[..., None]).exp() @ pair[1]
            out, log_sum = out * (log_sum - total).exp()[..., None] + seen, total
            pair = following()
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        ring, pair, scale = ctx.ring, torch.stack((k, v)), q.shape[-1] ** -0.5
        mean = (gradient * out).sum(-1, keepdim=True)
        of_q, of_others = torch.zeros_like(q), torch.zeros_like(pair)
        for owner in ring.owners():
            following = _following(ring, pair, owner)
            weights = (ring.scores(q, pair[0], owner) - log_sum[..., None]).exp()
            of_scores = weights * (gradient @ pair[1].mT - mean) * scale
            of_q += of_scores @ pair[0]
            of_pair = torch.stack((of_scores.mT @ q, weights.mT @ gradient))
            if owner == ring.rank:
                own = of_pair
            else:
                # What earlier ranks added to this part's gradient came along; the last rank
                # sends it home.
                of_others = ring.pass_on(of_others + of_pair)()
            pair = following()
        return of_q, *(own + of_others), None


def _following(ring: Ring, pair: Tensor, owner: int) -> Callable[[], Tensor]:
    """Lets keys and values travel on while they are used; the last part travels no further."""
    return (lambda: pair) if owner == ring.owners()[-1] else ring.pass_on(pair)


def main() -> None:
    options = command_line(__doc__, "context").parse_args()
    device = join()
    mesh = mesh_of(device, cp=-1)
    ring = Ring(mesh.get_group(), device)
    mine = ring.tokens[ring.rank]
    model = GPT().to(device)
    for block in model.blocks:
        block.attention.attend = ring
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def train_step(step: int) -> Tensor:
        read = batch(step, device)
        loss = loss_of(replica(read.tokens[:, mine], mine), read.targets[:, mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "ddp"))


if __name__ == "__main__":
    main()
