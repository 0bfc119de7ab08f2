"""The shape of a decoder transformer, complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Norm = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that replaces the MLP of most layers.

    ffn is the width of one expert, shared_ffn the width of what every token passes beside its
    top_k experts (0: nothing). The first dense_layers layers keep the model's own MLP.
    """

    count: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention: the sizes of its compressed projections.

    query_rank 0 means that queries are not compressed. A head's query and key are nope + rope
    wide, its value is value wide.
    """

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder: every size that parameters, FLOPs, activations and messages depend on.

    positions is the number of learned positions (0: rotary or none); vocab is not padded.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    gated: bool = False
    tied: bool = True
    positions: int = 0
    norm: Norm = "layer"
    biases: bool = True
    qkv_biases: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    name: str = ""

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return 0 if self.experts is None else max(0, self.layers - self.experts.dense_layers)

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one token."""
        return self.kv_heads * self.head_size
