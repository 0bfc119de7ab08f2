"""Trains a small model of the named kind on one or two ranks, recorded with shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stepsplit.collectors import demo_job, profile_run

BATCH, TOKENS, VOCAB, MICROBATCHES = 4, 48, 160, 2
Job = tuple[nn.Module, Callable[[Tensor], Tensor]]
"""A model and the loss of a batch of tokens."""


class Block(nn.Module):
    """A layer of nanoGPT: one GEMM for queries, keys and values, GELU, biases."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norm1(x)).split(c, 2)
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class NanoGpt(nn.Module):
    """The architecture of nanoGPT, whose head is the embedding."""

    def __init__(self, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, hidden), nn.Embedding(64, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_nanogpt() -> Job:
    model = NanoGpt(layers=3, heads=4, hidden=128)
    return model, lambda x: functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


def build_gpt2() -> Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=128, n_layer=3, n_head=4)
    )
    return model, lambda x: model(input_ids=x, labels=x).loss


def build_llama() -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    return model, lambda x: model(input_ids=x, labels=x).loss


def build_autocast_nanogpt() -> Job:
    model, loss = build_nanogpt()

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(x)

    return model, cast


def train(kind: str, out: str) -> None:
    """Three recorded steps of two microbatches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, loss = globals()[f"build_{kind}"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with profile_run(out, wait=1, warmup=1, active=3, record_shapes=True) as run:
        for _ in range(6):
            for _ in range(MICROBATCHES):
                (loss(torch.randint(VOCAB, (BATCH, TOKENS))) / MICROBATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()


def train_demo() -> None:
    """The demo's job with shapes; its arguments are those of the command line."""

    def record_shapes(*args: Any, **options: Any) -> Any:
        return profile_run(*args, **options, record_shapes=True)

    demo_job.profile_run = record_shapes
    demo_job.main()


if __name__ == "__main__":
    if "--parallel" in sys.argv:
        train_demo()
    else:
        train(*sys.argv[1:3])
