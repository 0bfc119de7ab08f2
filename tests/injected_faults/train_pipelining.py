"""python train_pipelining.py [LAYERS]: torch's 1F1B on two stages of GPT-2 of transformers.

The first stage holds LAYERS of the layers.
"""

import sys

import torch
from sizes import BATCH, LAYERS, MICROBATCHES
from texts import Pairs, gpt2
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.utils.data import DataLoader


class First(nn.Module):
    """The embeddings and the first layers."""

    def __init__(self, whole: nn.Module, layers: int) -> None:
        super().__init__()
        body = whole.transformer
        self.tokens, self.positions, self.blocks = body.wte, body.wpe, body.h[:layers]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Last(nn.Module):
    """The other layers and the head."""

    def __init__(self, whole: nn.Module, layers: int) -> None:
        super().__init__()
        self.blocks, self.norm = whole.transformer.h[layers:], whole.transformer.ln_f
        self.head = whole.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


distributed.init_process_group("gloo")
rank = distributed.get_rank()
layers = int(sys.argv[1]) if len(sys.argv) > 1 else LAYERS // 2
part = (First if rank == 0 else Last)(gpt2(), layers).train()
stage = PipelineStage(part, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=compute_loss)
optimizer = torch.optim.AdamW(part.parameters())
for inputs, targets in DataLoader(Pairs(), batch_size=2 * BATCH):
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets)
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
