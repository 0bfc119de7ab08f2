"""FSDP2 as in its tutorial, on GPT-2 of transformers."""

import torch
from sizes import BATCH
from texts import Texts, gpt2
from torch import distributed
from torch.distributed import fsdp
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

distributed.init_process_group("gloo")
model = gpt2()
model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
for block in model.transformer.h:
    fsdp.fully_shard(block)
fsdp.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
texts = Texts()
for batch in DataLoader(texts, batch_size=BATCH, sampler=DistributedSampler(texts)):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
