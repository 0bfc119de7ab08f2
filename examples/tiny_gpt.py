"""The model that every example trains: a GPT small enough for a CPU, whole or one stage of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a GPT whose MLP is four times as wide as the model."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    vocab: int = 512
    seq_len: int = 64


SHAPE = Shape()


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token sees itself and those before it; (sequences, heads, tokens, width) in and out."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Multi-head attention; attend may be replaced by another way to compute the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.hidden // shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.attend = causal_attention

    def forward(self, x: Tensor) -> Tensor:
        # The columns of qkv are ordered by head, so that a part of them holds whole heads.
        heads = self.qkv(x).unflatten(-1, (-1, 3 * self.head_width)).transpose(1, 2)
        attended = self.attend(*heads.chunk(3, dim=-1))
        return self.proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Widens each token, and narrows it again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden, bias=False)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens (sequences, tokens) in, scores (sequences, tokens, vocab) out.

    As one of several pipeline stages it holds its share of the blocks, the first one also the
    embeddings, the last one the head; between stages travels (sequences, tokens, hidden).
    """

    def __init__(self, shape: Shape = SHAPE, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.embed = nn.Embedding(shape.vocab, shape.hidden)
            self.position = nn.Embedding(shape.seq_len, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers // stages))
        if self.last:
            self.norm = nn.LayerNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.first:
            if positions is None:
                positions = torch.arange(x.shape[1], device=x.device)
            x = self.embed(x) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of the next token, in nats."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
