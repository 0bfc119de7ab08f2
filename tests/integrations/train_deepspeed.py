"""A training loop with a DeepSpeed engine at a ZeRO stage, whose inner optimizer steps often."""

import sys

import deepspeed
import torch
from tiny import ACCUMULATE, MICRO_BATCH, OPTIONS, OUT, data, model, recorded_by, tell
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from stepsplit.collectors.integrations.deepspeed import profile_engine

# DeepSpeed would compile its own shared-memory all_reduce first, for two minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
net = model()
engine, _, _, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters()),
    config={
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": int(sys.argv[2]),
            # Groups of so few parameters that the inner optimizer steps several times a step.
            "sub_group_size": 1000,
            # No parameter is small enough to keep: each is gathered for every use.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        "steps_per_print": 1000,
    },
)
loss = torch.zeros(())
texts = data()
loader = DataLoader(texts, batch_size=MICRO_BATCH, sampler=DistributedSampler(texts))
with recorded_by(profile_engine(engine, OUT, **OPTIONS)):
    for points, classes in loader:
        loss = functional.cross_entropy(engine(points.bfloat16()).float(), classes)
        engine.backward(loss)
        engine.step()
tell(loss.item())
torch.distributed.destroy_process_group()
