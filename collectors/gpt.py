"""The model of the demo: a small GPT, cut into pipeline stages, with as few ops as one can."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from stepsplit.collectors.corpus import VOCAB
from stepsplit.collectors.recipe import Recipe
from stepsplit.collectors.run_spec import ModelSpec

_FFN = 4  # the feed-forward layer is this many times as wide as the model


class Block(nn.Module):  # type: ignore[misc]
    """One transformer layer. (sequences * seq_len, hidden) in and out: linear layers on two dims
    take half the ops that they take on three."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        hidden = recipe.hidden
        self.seq_len = recipe.seq_len
        self.head_dim = hidden // recipe.heads
        self.norm1 = nn.LayerNorm(hidden, bias=False)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.LayerNorm(hidden, bias=False)
        self.up = nn.Linear(hidden, _FFN * hidden, bias=False)
        self.down = nn.Linear(_FFN * hidden, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        x = x + self.proj(self._attended(self.qkv(self.norm1(x))))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))

    def _attended(self, qkv: Any) -> Any:
        # Columns are ordered by head, so that a shard of them holds whole heads.
        by_head = qkv.view(-1, self.seq_len, qkv.shape[1] // 3 // self.head_dim, 3 * self.head_dim)
        q, k, v = by_head.transpose(1, 2).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(qkv.shape[0], -1)


class Stage(nn.Module):  # type: ignore[misc]
    """The share of the model that one pipeline stage holds; of one stage, all of it."""

    def __init__(self, recipe: Recipe, stage: int, stages: int) -> None:
        super().__init__()
        hidden, first, last = recipe.hidden, stage == 0, stage == stages - 1
        layers = recipe.layers // stages
        self.embed = nn.Embedding(VOCAB, hidden) if first else None
        self.position = nn.Embedding(recipe.seq_len, hidden) if first else None
        self.blocks = nn.ModuleList(Block(recipe) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, bias=False) if last else None
        self.head = nn.Linear(hidden, VOCAB, bias=False) if last else None

    def forward(self, x: Any) -> Any:
        if self.embed is not None and self.position is not None:
            x = (self.embed(x) + self.position.weight).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def stage_loss(scores: Any, targets: Any) -> Any:
    """The mean cross entropy of a microbatch, in nats a character."""
    return functional.cross_entropy(scores, targets.flatten())


def model_spec(recipe: Recipe) -> ModelSpec:
    """The shape of the whole model, all stages together."""
    with torch.device("meta"):
        whole = Stage(recipe, 0, 1)
    return ModelSpec(
        layers=recipe.layers,
        hidden=recipe.hidden,
        heads=recipe.heads,
        kv_heads=recipe.heads,
        ffn=_FFN * recipe.hidden,
        gated=False,
        vocab=VOCAB,
        tied=False,
        learned_positions=recipe.seq_len,
        norm="rms",
        biases=False,
        parameters=sum(parameter.numel() for parameter in whole.parameters()),
    )
