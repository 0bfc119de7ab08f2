"""A job of four ranks that stops in one of several ways: python hangs.py KIND for each rank.

Each step is: a batch, all_reduce of the pair (tp), all_reduce across pairs (dp), all_reduce of all.
Each rank prints a line when the step with the fault begins, and when the one after it does.
"""

import ctypes
import os
import signal
import sys
import threading
import time

import torch
from torch import distributed

FAULT_STEP, ODD_RANK = 6, 1

# Ranks that share a GPU call their hosts by names of their own (tests/gpu).
on_gpu = "NCCL_HOSTID" in os.environ
device = torch.device("cuda" if on_gpu else "cpu")
kind = sys.argv[1]
distributed.init_process_group("nccl" if on_gpu else "gloo")
rank = distributed.get_rank()
pairs = [distributed.new_group(ranks, group_desc="tp") for ranks in ([0, 1], [2, 3])]
crosses = [distributed.new_group(ranks, group_desc="dp") for ranks in ([0, 2], [1, 3])]
tp, dp = pairs[rank // 2], crosses[rank % 2]
swapped = (1, 2) if kind == "two_groups" else (ODD_RANK,)
weight = torch.nn.Parameter(torch.ones(64, device=device))
optimizer = torch.optim.SGD([weight], lr=0.1)


def load_batch(faulty: bool) -> torch.Tensor:
    if faulty and kind == "loader":
        threading.Event().wait()
    if faulty and kind == "gil":
        # Like a C extension that does not release Python's lock.
        ctypes.PyDLL(None).sleep(600)
    if faulty and kind == "slow":
        compute_slowly(time.monotonic() + 10.0)
    if faulty and kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if faulty and kind == "exception":
        raise ValueError("batch 6 has no labels")
    # gloo sends 1 MiB at a time: only from 8 MiB on a wrong size hangs instead of aborting a rank.
    size = 1 << 21 if kind == "size" else 1000
    return torch.ones(2 * size if faulty and kind == "size" else size, device=device)


def compute_slowly(until: float) -> None:
    while time.monotonic() < until:
        torch.ones(200, 200) @ torch.ones(200, 200)


def exchange(batch: torch.Tensor, faulty: bool) -> None:
    if faulty and kind == "other_group":
        distributed.all_reduce(batch, group=dp)
    elif faulty and kind == "missing_call":
        pass
    elif faulty and kind == "two_groups":
        distributed.all_reduce(batch, group=dp)
        distributed.all_reduce(batch, group=tp)
        return
    else:
        distributed.all_reduce(batch, group=tp)
    if faulty and kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(batch, group=dp)


def train_step(step: int) -> None:
    if step in (FAULT_STEP, FAULT_STEP + 1):
        sys.stdout.write(f"step {step} begins\n")
        sys.stdout.flush()
    faulty = step == FAULT_STEP and rank in swapped
    batch = load_batch(faulty)
    exchange(batch, faulty)
    if faulty and kind == "wrong_order":
        distributed.broadcast(batch, 0)
        distributed.all_reduce(batch)
    else:
        distributed.all_reduce(batch)
        distributed.broadcast(batch, 0)
    weight.grad = torch.ones(64, device=device)
    optimizer.step()
    # The host of a GPU runs ahead: like a training that logs its loss it waits for it here.
    batch[0].item()


# A thread that is not a daemon, as of a prefetcher, keeps a rank alive whose training has raised.
threading.Thread(target=time.sleep, args=(60.0,)).start()
for step in range(1000):
    train_step(step)
    time.sleep(0.02)
