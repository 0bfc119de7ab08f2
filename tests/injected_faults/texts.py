"""Random tokens to train on, and the configuration of a small GPT-2."""

from __future__ import annotations

import torch
from sizes import BATCH, HEADS, LAYERS, STEPS, TOKENS, VOCABULARY, WIDTH
from torch import Tensor
from torch.utils.data import Dataset

SAMPLES = 2 * BATCH * STEPS


class Texts(Dataset[dict[str, Tensor]]):
    """Samples as causal language models of transformers take them."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Pairs(Texts):
    """Samples as (inputs, targets)."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.tokens[index], self.tokens[index]


def gpt2() -> torch.nn.Module:
    """GPT-2 of transformers, with the same weights on every rank."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
        )
    )
