"""The loop of Megatron-LM's pretrain: its own torch.profiler, or our hook. Megatron is not needed.

With --profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 7.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from loop import Loop
from tiny import OPTIONS, OUT, STEPS, tell
from torch import distributed

from stepsplit.collectors.integrations.calls import profile_calls

START, END = 4, 7
tensorboard_dir = f"{OUT}/tensorboard"


def export(profiler: torch.profiler.profile) -> None:
    folder = Path(f"{tensorboard_dir}/../torch_profile")
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{folder}/rank-{distributed.get_rank()}.json.gz")


def profiler_of_megatron() -> torch.profiler.profile:
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=START - 1, warmup=1, active=END - START, repeat=1),
        on_trace_ready=export,
    )


training = SimpleNamespace(train_step=lambda: loop.train_step())
"""In Megatron-LM the module megatron.training.training."""
if sys.argv[2] == "ours" and OUT != "-":
    training.train_step = profile_calls(training.train_step, OUT, **OPTIONS)

distributed.init_process_group("gloo")
loop = Loop()
prof = profiler_of_megatron() if sys.argv[2] == "theirs" and OUT != "-" else None
if prof is not None:
    prof.start()
loss = torch.zeros(())
for iteration in range(1, STEPS + 1):
    if prof is not None and iteration <= END:
        prof.step()
    loss = training.train_step()
    if prof is not None and iteration == END:
        prof.stop()
tell(loss.item())
distributed.destroy_process_group()
