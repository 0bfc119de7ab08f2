"""A training loop of accelerate with gradient accumulation, and its own profiler after ours."""

import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import ProfileKwargs
from tiny import ACCUMULATE, MICRO_BATCH, OPTIONS, OUT, STEPS, data, model, recorded_by, tell
from torch.nn import functional
from torch.utils.data import DataLoader

from stepsplit.collectors.integrations.accelerate import profile_accelerator

THEIRS = sys.argv[2]
"""The folder of accelerate's own traces."""

OVER_DEEPSPEED = sys.argv[3:] == ["deepspeed"]


def deepspeed_plugin() -> DeepSpeedPlugin:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    zero = {"stage": 3, "sub_group_size": 1000}
    return DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": ACCUMULATE,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
    )


accelerator = Accelerator(
    cpu=not OVER_DEEPSPEED,
    gradient_accumulation_steps=ACCUMULATE,
    deepspeed_plugin=deepspeed_plugin() if OVER_DEEPSPEED else None,
    kwargs_handlers=[ProfileKwargs(output_trace_dir=THEIRS)],
)
net = model()
loader = DataLoader(data(), batch_size=MICRO_BATCH)
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
loss = torch.zeros(())


def train() -> None:
    global loss
    for points, classes in loader:
        with accelerator.accumulate(net):
            loss = functional.cross_entropy(net(points), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if sys.argv[3:] == ["within"]:
    OPTIONS["active"] = 2 * STEPS
with recorded_by(profile_accelerator(accelerator, OUT, **OPTIONS)):
    train()
    with accelerator.profile():
        train()
tell(loss.item())
accelerator.end_training()
