"""Job: everything that a prediction needs, and what follows from it by division alone."""

from __future__ import annotations

from dataclasses import dataclass

from stepsplit.analyzer.model.spec.hardware import Hardware
from stepsplit.analyzer.model.spec.layout import Layout
from stepsplit.analyzer.model.spec.recipe import Recipe
from stepsplit.analyzer.model.spec.transformer import Transformer

VOCAB_MULTIPLE = 128
"""Megatron-LM pads the vocabulary to a multiple of this times tp."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training step to predict. checks.check refuses one that cannot be."""

    model: Transformer
    layout: Layout
    recipe: Recipe
    hardware: Hardware

    @property
    def microbatches(self) -> int:
        """Microbatches of one rank in a step (m); those of both directions in dualpipe."""
        return self.recipe.global_batch // (self.recipe.micro_batch * self.layout.dp)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank, whole over tensor parallelism (T = s b / c)."""
        return self.recipe.seq_len * self.recipe.micro_batch // self.layout.cp

    @property
    def padded_vocab(self) -> int:
        """The vocabulary as Megatron-LM pads it; other frameworks leave it."""
        if self.recipe.framework != "megatron":
            return self.model.vocab
        multiple = VOCAB_MULTIPLE * self.layout.tp
        return -(-self.model.vocab // multiple) * multiple
