"""Runs a training script that asks for GPUs on CPUs and gloo: on_cpu.py SCRIPT ARGUMENTS...

The script is not edited: devices by number or named cuda become the CPU, nccl becomes gloo.
"""

import functools
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

CPU = torch.device("cpu")
GPU = re.compile(r"cuda(:\d+)?|cpu:\d+")


def to_cpu(value: Any) -> Any:
    """The CPU for a GPU or a numbered CPU; anything else as it is."""
    named = str(value) if isinstance(value, torch.device) else value
    return CPU if isinstance(named, str) and GPU.fullmatch(named) else value


def replace_devices(owner: Any, name: str, numbers: bool = False) -> None:
    """Wraps a function so that its devices are the CPU; numbers: its first number is a device."""
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        places = [CPU if numbers and type(each) is int else to_cpu(each) for each in args]
        return original(*places, **{key: to_cpu(each) for key, each in kwargs.items()})

    setattr(owner, name, wrapped)


def join_by_gloo(original: Callable[..., None]) -> Callable[..., None]:
    """init_process_group with gloo, whatever is asked for."""

    def join(backend: str = "", *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        original("gloo", *args, **kwargs)

    return join


def pass_over(original: Callable[..., None], **replaced: Any) -> Callable[..., None]:
    """A constructor with these arguments replaced."""
    return lambda *args, **kwargs: original(*args, **(kwargs | replaced))


def patch() -> None:
    """Makes the CPU look like the accelerator of this machine."""
    for owner in (torch.Tensor, torch.nn.Module):
        replace_devices(owner, "to", numbers=True)
    for name in ("rand", "randn", "randint", "zeros", "ones", "arange", "tensor", "empty"):
        replace_devices(torch, name)
    accelerator = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: CPU
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: 8
    accelerator.set_device_index = accelerator.device_index = lambda device: None
    torch.cuda.set_device = lambda device: None
    torch.Tensor.pin_memory = lambda tensor: tensor
    join = join_by_gloo(distributed.init_process_group)
    distributed.init_process_group = distributed.distributed_c10d.init_process_group = join
    loader, wrapper = torch.utils.data.DataLoader, torch.nn.parallel.DistributedDataParallel
    loader.__init__ = pass_over(loader.__init__, pin_memory=False)
    wrapper.__init__ = pass_over(wrapper.__init__, device_ids=None)


if __name__ == "__main__":
    patch()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
