"""What the demo model reads: sentences of a small grammar, as characters."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

_WHO = ("the first stage", "the last stage", "a slow rank", "every rank", "the next stage")
_DOES = ("waits for", "sends a message to", "shares the gradients of", "runs ahead of")
_WHEN = ("before the step ends", "in the backward pass", "once a step", "while others compute")
ALPHABET = " .abcdefghijklmnopqrstuvwxyz"
VOCAB = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's characters: tokens and targets (sequences, seq_len), targets one further on."""

    tokens: Any
    targets: Any


def characters(sentences: int = 500, seed: int = 7) -> Any:
    """The whole text as indices into the alphabet; the same on every rank."""
    pick = random.Random(seed).choice
    text = " ".join(
        f"{pick(_WHO)} {pick(_DOES)} {pick(_WHO)} {pick(_WHEN)}." for _ in range(sentences)
    )
    return torch.tensor([ALPHABET.index(letter) for letter in text])


def batch(text: Any, sequences: int, seq_len: int, seed: int) -> Batch:
    """Random windows of the text: the same seed draws the same windows."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - seq_len - 1, (sequences, 1), generator=draw)
    window = text[starts + torch.arange(seq_len + 1)]
    return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())
