"""DeepSpeed's pipeline engine, of two stages, whose train_batch is a step."""

from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from tiny import MICRO_BATCH, OPTIONS, OUT, STEPS, data, model, recorded_by, tell
from torch import Tensor, nn

from stepsplit.collectors.integrations.deepspeed import profile_engine

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
net = PipelineModule(
    layers=list(model()),
    loss_fn=nn.CrossEntropyLoss(),
    num_stages=2,
    partition_method="uniform",
)
engine, _, _, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.AdamW(net.parameters()),
    config={
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 4,
        "steps_per_print": 1000,
    },
)


def microbatches() -> Iterator[tuple[Tensor, Tensor]]:
    points, classes = data()[:]
    while True:
        yield from zip(points.split(MICRO_BATCH), classes.split(MICRO_BATCH), strict=True)


batches = microbatches()
loss = torch.zeros(())
with recorded_by(profile_engine(engine, OUT, **OPTIONS)):
    for _ in range(STEPS):
        loss = engine.train_batch(batches)
tell(loss.item())
torch.distributed.destroy_process_group()
