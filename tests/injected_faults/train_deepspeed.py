"""A DeepSpeed engine with ZeRO-2 on GPT-2 of transformers."""

import deepspeed
import torch
from sizes import BATCH
from texts import Texts, gpt2
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

# DeepSpeed would compile its own shared-memory all_reduce first, for two minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
model = gpt2()
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
        "steps_per_print": 1000,
    },
)
texts = Texts()
for batch in DataLoader(texts, batch_size=BATCH, sampler=DistributedSampler(texts)):
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
torch.distributed.destroy_process_group()
