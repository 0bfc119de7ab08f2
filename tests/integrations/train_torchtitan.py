"""torchtitan's loop around its profiler, or around ours in its place."""

import sys

import torch
from loop import Loop
from tiny import OUT, STEPS, tell
from torch import distributed
from torchtitan.tools.profiler import Profiler

from stepsplit.collectors.integrations.torchtitan import StepsplitProfiler

distributed.init_process_group("gloo")
kind = Profiler if sys.argv[2] == "theirs" else StepsplitProfiler
config = kind.Config(
    enable_profiling=OUT != "-",
    profile_freq=6,
    profiler_warmup=1,
    profiler_active=3,
    profiler_repeat=1,
)
loop = Loop()
loss = torch.zeros(())
# As in torchtitan's Trainer.train, whose loop needs a GPU.
with config.build(global_step=0, base_folder=OUT) as profiler:
    for _ in range(STEPS):
        loss = loop.train_step()
        profiler.step()
tell(loss.item())
del loop
distributed.destroy_process_group()
