"""A training of several ranks over NCCL, with a fault in its later steps:

    ranks.py WAY FAULT FOLDER

WAY: ddp, fsdp, tensor, pipeline or graph; FAULT: none, or a word of Faults. Six of the steps with
the fault are recorded in FOLDER/run. Each rank writes FOLDER/rank{rank}.json: the times of its
other steps with the fault and without it, by CUDA events.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from fsdp import shard  # type: ignore[import-not-found]
from job import join, mesh_of  # type: ignore[import-not-found]
from tensor import split  # type: ignore[import-not-found]
from tiny_gpt import GPT, Shape, loss_of  # type: ignore[import-not-found]

from stepsplit.collectors import profile_run

SHAPE = Shape(layers=8, hidden=768, heads=12, vocab=4096, seq_len=512)
SEQUENCES, MICROBATCHES = 16, 4
CLEAN, BEFORE, RECORDED, AFTER = 40, 25, 6, 35
"""Steps without the fault, then with it: unprofiled, recorded, unprofiled."""
SETTLE, TURN = 15, 3
"""Steps that are not timed: at the begin, and where the fault or the recording begins or ends."""
DEVICE_CYCLES, HOST_S = 40_000_000, 0.15
EXTRA_ELEMENTS, GRAPH_WIDTH = 64 * 2**20, 4096


@dataclass
class Faults:
    """What is wrong from step CLEAN on; the training asks at each place where it can go wrong."""

    name: str
    rank: int
    forwards: int = 1
    on: bool = False

    def is_on(self, name: str, rank: int | None = None) -> bool:
        return self.on and self.name == name and rank in (None, self.rank)

    def in_forward(self, buffer: Tensor) -> None:
        """Rank 1's device or host is slow, or all ranks sum a buffer in vain."""
        if self.is_on("extra_all_reduce") and self.forwards == 1:
            distributed.all_reduce(buffer)
        if self.is_on("slow_device", 1):
            torch.cuda._sleep(DEVICE_CYCLES // self.forwards)
        if self.is_on("slow_host", 1):
            time.sleep(HOST_S / self.forwards)

    def before_optimizer(self, buffer: Tensor) -> None:
        """In a pipeline all ranks sum the buffer here: in a forward it would be a deadlock."""
        if self.is_on("extra_all_reduce") and self.forwards > 1:
            distributed.all_reduce(buffer)


def build_step(way: str, faults: Faults, device: torch.device) -> Callable[[], None]:
    """A function that trains one step."""
    tokens = torch.randint(SHAPE.vocab, (SEQUENCES, SHAPE.seq_len), device=device)
    buffer = torch.zeros(EXTRA_ELEMENTS, device=device)
    if way == "pipeline":
        return build_pipeline_step(tokens, faults, buffer)
    if way == "graph":
        return build_graph_step(device)
    model = GPT(SHAPE).to(device).bfloat16()
    model.blocks[0].register_forward_pre_hook(lambda *_: faults.in_forward(buffer))
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fsdp":
        model = shard(model, mesh_of(device, dp_shard=-1))
    else:
        model = split(model, mesh_of(device, tp=-1))

    def train() -> None:
        with loss_parallel() if way == "tensor" else nullcontext():
            loss_of(model(tokens), tokens).backward()

    return add_optimizer(train, model, faults, buffer)


def build_pipeline_step(tokens: Tensor, faults: Faults, buffer: Tensor) -> Callable[[], None]:
    """A function that trains one step of torch's 1F1B, one stage a rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = GPT(SHAPE, rank, ranks).to(tokens.device).bfloat16()
    model.blocks[0].register_forward_pre_hook(lambda *_: faults.in_forward(buffer))
    stage = PipelineStage(model, rank, ranks, tokens.device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def train() -> None:
        wanted = {"target": tokens} if rank == ranks - 1 else {}
        schedule.step(*([tokens] if rank == 0 else []), **wanted)

    return add_optimizer(train, model, faults, buffer)


def build_graph_step(device: torch.device) -> Callable[[], None]:
    """A function that replays one CUDA graph: two products, and an all_reduce in between."""
    weight = torch.randn(GRAPH_WIDTH, GRAPH_WIDTH, device=device)
    optimizer = torch.optim.SGD([torch.nn.Parameter(weight)], lr=0.0)

    def run() -> None:
        product = weight @ weight
        distributed.all_reduce(product)
        torch.mm(product, weight, out=weight)

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()

    def step() -> None:
        graph.replay()
        optimizer.step()

    return step


def add_optimizer(
    train: Callable[[], None], model: nn.Module, faults: Faults, buffer: Tensor
) -> Callable[[], None]:
    """The whole step: forward and backward, then the optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        train()
        faults.before_optimizer(buffer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    way, fault, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    device = join()
    faults = Faults(fault, distributed.get_rank(), MICROBATCHES if way == "pipeline" else 1)
    step = build_step(way, faults, device)
    total = CLEAN + BEFORE + RECORDED + AFTER
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(total + 1)]
    marks[0].record()
    first = CLEAN + BEFORE
    with profile_run(folder / "run", wait=first - 1, warmup=1, active=RECORDED) as run:
        for number in range(total):
            faults.on = number >= CLEAN
            step()
            marks[number + 1].record()
            run.step()
    torch.cuda.synchronize()
    took_ms = [a.elapsed_time(b) for a, b in pairwise(marks)]
    after = first + RECORDED + TURN
    measured = {
        "clean_ms": took_ms[SETTLE : CLEAN - 1],
        "faulty_ms": [*took_ms[CLEAN + TURN : first - TURN], *took_ms[after:]],
    }
    (folder / f"rank{faults.rank}.json").write_text(json.dumps(measured))
    if way == "graph":
        # NCCL's communicator waits for ever for the end of a graph that has captured its calls.
        sys.stdout.flush()
        os._exit(0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
