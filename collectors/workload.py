"""The demo training: a small GPT under TP, PP and DP, recorded. One process a rank:

torchrun --nproc-per-node 4 -m stepsplit.collectors.workload --out runs/demo --parallel tp=2,pp=2
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from stepsplit.collectors.corpus import batch, characters
from stepsplit.collectors.gpt import Stage, model_spec, stage_loss
from stepsplit.collectors.launch import FOLLOW_STDIN
from stepsplit.collectors.parallelize import (
    BUCKET_MIB,
    optimizer,
    pipeline,
    spread,
    sync_gradients,
)
from stepsplit.collectors.profiler import profile_run
from stepsplit.collectors.recipe import Command, Recipe, parse_command
from stepsplit.collectors.run_spec import Mesh, Training

BLOCKS, BLOCK_BYTES = 16, 16 << 20
WARMUP = 1
"""Steps for the profiler to settle in; it records the last ones, for the first are not steady."""


class Trainer:
    """One rank's share of the training."""

    def __init__(self, recipe: Recipe, mesh: Mesh, device: Any) -> None:
        self.recipe, self.mesh, self.device = recipe, mesh, device
        self.rank = distributed.get_rank()
        self.device_mesh = init_device_mesh(device.type, mesh.sizes, mesh_dim_names=mesh.axes)
        stage, stages = mesh.coordinate(self.rank, "pp"), mesh.size("pp")
        self.first, self.last = stage == 0, stage == stages - 1
        # The same start on every rank that shares the stage.
        torch.manual_seed(stage)
        module = Stage(recipe, stage, stages).to(device)
        make_late(module, recipe, self.rank)
        self.module = spread(module, mesh, self.device_mesh)
        self.parameters = list(self.module.parameters())
        self.optimizer = optimizer(self.parameters)
        self.schedule: Any = None
        if stages > 1:
            self.schedule = pipeline(self.module, recipe, mesh, self.device_mesh, device)
        self.text = characters()

    def step(self, number: int) -> float | None:
        """One optimizer step. The loss where this rank holds the last stage."""
        replicas = self.mesh.size("dp_replicate") * self.mesh.size("dp_shard")
        replica = _replica(self.mesh, self.rank)
        sequences = self.recipe.microbatches * self.recipe.micro_batch
        data = batch(self.text, sequences, self.recipe.seq_len, number * replicas + replica)
        tokens, targets = data.tokens.to(self.device), data.targets.to(self.device)
        run = self._accumulated if self.schedule is None else self._pipelined
        losses = run(tokens, targets)
        sync_gradients(self.parameters, self.mesh, self.device_mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    def _pipelined(self, tokens: Any, targets: Any) -> list[Any]:
        losses: list[Any] = []
        inputs = (tokens,) if self.first else ()
        wanted = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*inputs, return_outputs=False, **wanted)
        return [loss.detach() for loss in losses]

    def _accumulated(self, tokens: Any, targets: Any) -> list[Any]:
        """Without a pipeline the microbatches run one after the other; the last one syncs."""
        count, losses = self.recipe.microbatches, []
        for index, (x, y) in enumerate(zip(tokens.chunk(count), targets.chunk(count), strict=True)):
            with _sync_only_if(index == count - 1, self.module):
                loss = stage_loss(self.module(x), y) / count
                loss.backward()
            losses.append(loss.detach() * count)
        return losses


def main() -> None:
    """Trains as the command line and the environment of the rank say."""
    if os.environ.get(FOLLOW_STDIN):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    command = parse_command()
    device = _join_job()
    try:
        losses = train(command, device)
    finally:
        distributed.destroy_process_group()
    if losses and _speaks(command.mesh, int(os.environ.get("RANK", "0"))):
        sys.stdout.write(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} over {len(losses)} steps\n")


def train(command: Command, device: Any) -> list[float]:
    """The losses of the steps; empty on ranks that do not hold the last stage."""
    recipe, mesh = command.recipe, command.mesh
    if device.type == "cpu":
        _touch_memory()
    trainer = Trainer(recipe, mesh, device)
    losses: list[float] = []
    with profile_run(
        command.out,
        mesh=mesh,
        model=model_spec(recipe),
        training=training(recipe, mesh),
        wait=max(1, recipe.steps - recipe.active - WARMUP),
        warmup=WARMUP,
        active=recipe.active,
    ) as run:
        for number in range(recipe.steps):
            loss = trainer.step(number)
            run.step()
            losses += [] if loss is None else [loss]
    return losses


def _touch_memory() -> None:
    """Takes memory once and leaves it to the allocator: page faults make microbatches uneven."""
    blocks = [torch.ones(BLOCK_BYTES, dtype=torch.uint8) for _ in range(BLOCKS)]
    del blocks


def training(recipe: Recipe, mesh: Mesh) -> Training:
    """How a step of this recipe is made."""
    replicas = mesh.size("dp_replicate") * mesh.size("dp_shard")
    return Training(
        seq_len=recipe.seq_len,
        micro_batch=recipe.micro_batch,
        global_batch=recipe.micro_batch * recipe.microbatches * replicas,
        microbatches=recipe.microbatches,
        dtype="fp32",
        optimizer="adamw",
        schedule=recipe.schedule if mesh.size("pp") > 1 else None,
        framework="fsdp2" if mesh.size("dp_shard") > 1 else "torch",
        split_vocab=False if mesh.size("tp") > 1 else None,
        root_unit=True if mesh.size("dp_shard") > 1 else None,
        bucket_bytes=BUCKET_MIB << 20 if mesh.size("dp_replicate") > 1 else None,
    )


def make_late(module: Any, recipe: Recipe, rank: int) -> None:
    """Makes every forward of the slow rank take its share of slow_ms longer."""
    if rank != recipe.slow_rank or recipe.slow_ms <= 0:
        return
    share_s = recipe.slow_ms / 1e3 / recipe.microbatches

    def delay(_: Any, inputs: tuple[Any, ...]) -> None:
        if recipe.slow_kind == "sleep":
            time.sleep(share_s)
        else:
            _compute_for(share_s, inputs[0].device)

    module.register_forward_pre_hook(delay)


def _compute_for(seconds: float, device: Any) -> None:
    end = time.perf_counter() + seconds
    square = torch.ones(2 * (384 if device.type == "cpu" else 4096,), device=device)
    while time.perf_counter() < end:
        # Reading a value back keeps host and device together: the time passes in the product.
        float(torch.mm(square, square)[0, 0])


def _join_job() -> Any:
    """Joins the process group of the environment: NCCL where each rank has a GPU, else gloo."""
    torch.set_num_threads(1)
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
        return device
    distributed.init_process_group("gloo")
    return torch.device("cpu")


def _sync_only_if(last: bool, module: Any) -> Any:
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    elif isinstance(module, nn.parallel.DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


def _replica(mesh: Mesh, rank: int) -> int:
    """Which of the data-parallel replicas the rank belongs to: they read different text."""
    shard = mesh.coordinate(rank, "dp_shard")
    return mesh.coordinate(rank, "dp_replicate") * mesh.size("dp_shard") + shard


def _speaks(mesh: Mesh, rank: int) -> bool:
    return rank == mesh.line(0, "pp")[-1]


def _end_with_parent() -> None:
    """Ends this process when whoever started it is gone, however it went."""
    # Not sys.stdin: its lock would trouble the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
