"""The demo training: a small GPT with tensor, pipeline and data parallelism, recorded."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from stepsplit.collectors.demo.arguments import (
    CALIBRATION,
    FOLLOW_STDIN,
    Command,
    DemoArgs,
    choose_calibration_mesh,
    parse_command,
)
from stepsplit.collectors.formats.run_spec import Mesh, ModelSpec, Training
from stepsplit.collectors.profiler import profile_run

# Run one process per rank:
#
#   torchrun --nproc-per-node 4 -m stepsplit.collectors.demo_job \
#       --out runs/demo --parallel tp=2,pp=2

BLOCKS, BLOCK_BYTES = 16, 16 << 20

WARMUP = 1
"""Warmup steps of the profiler. It records the last steps: the first are not in steady state."""


class Trainer:
    """One rank of the training."""

    def __init__(self, args: DemoArgs, mesh: Mesh, device: Any) -> None:
        self.recipe, self.mesh, self.device = args, mesh, device
        self.rank = distributed.get_rank()
        self.device_mesh = init_device_mesh(device.type, mesh.sizes, mesh_dim_names=mesh.axes)
        stage, stages = mesh.coordinate(self.rank, "pp"), mesh.size("pp")
        self.first, self.last = stage == 0, stage == stages - 1
        # The same initial weights on every rank of the stage.
        torch.manual_seed(stage)
        module = GptStage(args, stage, stages).to(device)
        delay_rank(module, args, self.rank)
        self.module = parallelize_stage(module, mesh, self.device_mesh)
        self.parameters = list(self.module.parameters())
        # One group per mesh: a fused AdamW cannot mix DTensor and Tensor.
        groups: defaultdict[object, list[Any]] = defaultdict(list)
        for parameter in self.parameters:
            groups[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(
                parameter
            )
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups.values()], lr=2e-3, weight_decay=0.0, fused=True
        )
        self.schedule: Any = None
        if stages > 1:
            group = self.device_mesh["pp"].get_group()
            part = PipelineStage(self.module, group.rank(), stages, device, group=group)
            self.schedule = _SCHEDULES[args.schedule](
                part, args.microbatches, loss_fn=compute_stage_loss
            )
        # The text, as indices into the alphabet; the same on every rank.
        pick = random.Random(_TEXT_SEED).choice
        text = " ".join(
            f"{pick(_SUBJECTS)} {pick(_VERBS)} {pick(_SUBJECTS)} {pick(_ADVERBS)}."
            for _ in range(_SENTENCES)
        )
        self.text = torch.tensor([ALPHABET.index(letter) for letter in text])

    def step(self, number: int) -> float | None:
        """Runs one optimizer step; returns the loss if this rank has the last stage."""
        # Each data-parallel rank reads other text, by its index among them.
        shards = self.mesh.size("dp_shard")
        replicas = self.mesh.size("dp_replicate") * shards
        replica = self.mesh.coordinate(self.rank, "dp_replicate") * shards
        replica += self.mesh.coordinate(self.rank, "dp_shard")
        sequences = self.recipe.microbatches * self.recipe.micro_batch
        # Random windows of the text, by a seed of the step and of the rank's data; the targets are
        # shifted by one.
        draw = torch.Generator().manual_seed(number * replicas + replica)
        n_starts = len(self.text) - self.recipe.seq_len - 1
        starts = torch.randint(n_starts, (sequences, 1), generator=draw)
        window = self.text[starts + torch.arange(self.recipe.seq_len + 1)]
        tokens = window[:, :-1].contiguous().to(self.device)
        targets = window[:, 1:].contiguous().to(self.device)
        run_batch = self._run_microbatches if self.schedule is None else self._run_pipeline
        losses = run_batch(tokens, targets)
        sync_gradients(self.parameters, self.mesh, self.device_mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    def _run_pipeline(self, tokens: Any, targets: Any) -> list[Any]:
        losses: list[Any] = []
        inputs = (tokens,) if self.first else ()
        loss_arguments = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*inputs, return_outputs=False, **loss_arguments)
        return [loss.detach() for loss in losses]

    def _run_microbatches(self, tokens: Any, targets: Any) -> list[Any]:
        """Runs the microbatches without a pipeline; only the last one syncs gradients."""
        count, losses = self.recipe.microbatches, []
        for index, (x, y) in enumerate(zip(tokens.chunk(count), targets.chunk(count), strict=True)):
            is_last, sync = index == count - 1, nullcontext()
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(is_last)
            elif isinstance(self.module, nn.parallel.DistributedDataParallel) and not is_last:
                sync = self.module.no_sync()
            with sync:
                loss = compute_stage_loss(self.module(x), y) / count
                loss.backward()
            losses.append(loss.detach() * count)
        return losses


def main() -> None:
    """Trains as given by the command line and the environment of the rank."""
    if os.environ.get(FOLLOW_STDIN):
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    command = parse_command()
    torch.set_num_threads(1)
    # NCCL if each rank has a GPU, else gloo.
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        distributed.init_process_group("gloo")
    try:
        train_for_calibration(command, "before", device)
        losses = train(command, device)
        train_for_calibration(command, "after", device)
    finally:
        distributed.destroy_process_group()
    # Of the ranks with the last stage, and thus with losses, one prints.
    if losses and int(os.environ.get("RANK", "0")) == command.mesh.line(0, "pp")[-1]:
        sys.stdout.write(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} over {len(losses)} steps\n")


def train(command: Command, device: Any) -> list[float]:
    """Trains and returns the losses of the steps; empty on ranks without the last stage."""
    args, mesh = command.args, command.mesh
    if device.type == "cpu":
        # Allocated and freed once: later page faults would make microbatches uneven.
        blocks = [torch.ones(BLOCK_BYTES, dtype=torch.uint8) for _ in range(BLOCKS)]
        del blocks
    trainer = Trainer(args, mesh, device)
    losses: list[float] = []
    with profile_run(
        command.out,
        mesh=mesh,
        model=build_model_spec(args),
        training=build_training(args, mesh),
        wait=max(1, args.steps - args.active - WARMUP),
        warmup=WARMUP,
        active=args.active,
    ) as run:
        for number in range(args.steps):
            loss = trainer.step(number)
            run.step()
            losses += [] if loss is None else [loss]
    return losses


def train_for_calibration(command: Command, when: str, device: Any) -> None:
    """Trains another layout shortly on the same ranks, recorded to a subfolder, if asked for."""
    if command.calibration is not None:
        mesh = choose_calibration_mesh(command.mesh)
        train(Command(command.calibration / when, mesh, CALIBRATION), device)


def build_training(args: DemoArgs, mesh: Mesh) -> Training:
    """The training setup for run.json."""
    replicas = mesh.size("dp_replicate") * mesh.size("dp_shard")
    return Training(
        seq_len=args.seq_len,
        micro_batch=args.micro_batch,
        global_batch=args.micro_batch * args.microbatches * replicas,
        microbatches=args.microbatches,
        dtype="fp32",
        optimizer="adamw",
        schedule=args.schedule if mesh.size("pp") > 1 else None,
        framework="fsdp2" if mesh.size("dp_shard") > 1 else "torch",
        split_vocab=False if mesh.size("tp") > 1 else None,
        root_unit=True if mesh.size("dp_shard") > 1 else None,
        bucket_bytes=BUCKET_MIB << 20 if mesh.size("dp_replicate") > 1 else None,
    )


def delay_rank(module: Any, args: DemoArgs, rank: int) -> None:
    """Delays every forward of the slow rank by its share of slow_ms."""
    if rank != args.slow_rank or args.slow_ms <= 0:
        return
    share_s = args.slow_ms / 1e3 / args.microbatches

    def delay(_: Any, inputs: tuple[Any, ...]) -> None:
        if args.slow_kind == "sleep":
            time.sleep(share_s)
            return
        end, device = time.perf_counter() + share_s, inputs[0].device
        square = torch.ones(2 * (384 if device.type == "cpu" else 4096,), device=device)
        while time.perf_counter() < end:
            # Reading a value back synchronizes host and device, so the time is spent in the GEMM.
            float(torch.mm(square, square)[0, 0])

    module.register_forward_pre_hook(delay)


def _exit_with_parent() -> None:
    """Ends this process when its parent has ended, even if it was killed."""
    # Not sys.stdin: its lock would block the shutdown of the interpreter.
    while os.read(0, 4096):
        pass
    os._exit(1)


# Parallelism of the demo model: DTensor TP, DDP or FSDP2, and the pipeline.

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}

# Less than all gradients of a rank, so that the first reduction of DDP begins in the backward.
BUCKET_MIB = 4


def parallelize_stage(stage: Any, mesh: Mesh, device_mesh: Any) -> Any:
    """Applies tensor parallelism to the stage, then FSDP2 or DDP."""
    if mesh.size("tp") > 1:
        for block in stage.blocks:
            plan = {
                "qkv": ColwiseParallel(),
                "proj": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            parallelize_module(block, device_mesh["tp"], plan)
    if mesh.size("dp_shard") > 1:
        axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if mesh.size(axis) > 1)
        dp_mesh = device_mesh[axes]
        for block in stage.blocks:
            fully_shard(block, mesh=dp_mesh)
        return fully_shard(stage, mesh=dp_mesh)
    if "dp_replicate" in mesh.axes and mesh.size("tp") == 1:
        group = device_mesh["dp_replicate"].get_group()
        return nn.parallel.DistributedDataParallel(
            stage, process_group=group, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
        )
    return stage


def sync_gradients(parameters: Iterable[Any], mesh: Mesh, device_mesh: Any) -> None:
    """Averages gradients over dp if neither DDP nor FSDP does: DDP does not support DTensor."""
    if mesh.size("tp") == 1 or mesh.size("dp_replicate") == 1 or mesh.size("dp_shard") > 1:
        return
    known = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [one.to_local() if isinstance(one, DTensor) else one for one in known]
    flat = _flatten_dense_tensors(gradients)
    distributed.all_reduce(flat, group=device_mesh["dp_replicate"].get_group())
    flat /= mesh.size("dp_replicate")
    torch._foreach_copy_(gradients, list(_unflatten_dense_tensors(flat, gradients)))


# The model of the demo: a small GPT split into pipeline stages, with as few ops as possible.

_FFN = 4  # width of the MLP relative to the hidden size


class GptBlock(nn.Module):  # type: ignore[misc]
    """One transformer layer; input and output are (sequences * seq_len, hidden).

    Linear layers on two dims need half as many ops as on three.
    """

    def __init__(self, args: DemoArgs) -> None:
        super().__init__()
        hidden = args.hidden
        self.seq_len = args.seq_len
        self.head_dim = hidden // args.heads
        self.norm1 = nn.LayerNorm(hidden, bias=False)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.LayerNorm(hidden, bias=False)
        self.up = nn.Linear(hidden, _FFN * hidden, bias=False)
        self.down = nn.Linear(_FFN * hidden, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        x = x + self.proj(self._compute_attention(self.qkv(self.norm1(x))))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))

    def _compute_attention(self, qkv: Any) -> Any:
        # Columns are ordered by head, so that a tensor-parallel shard has whole heads.
        by_head = qkv.view(-1, self.seq_len, qkv.shape[1] // 3 // self.head_dim, 3 * self.head_dim)
        q, k, v = by_head.transpose(1, 2).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(qkv.shape[0], -1)


class GptStage(nn.Module):  # type: ignore[misc]
    """The part of the model in one pipeline stage; the whole model if there is one stage."""

    def __init__(self, args: DemoArgs, stage: int, stages: int) -> None:
        super().__init__()
        hidden, first, last = args.hidden, stage == 0, stage == stages - 1
        layers = args.layers // stages
        self.embed = nn.Embedding(VOCAB, hidden) if first else None
        self.position = nn.Embedding(args.seq_len, hidden) if first else None
        self.blocks = nn.ModuleList(GptBlock(args) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, bias=False) if last else None
        self.head = nn.Linear(hidden, VOCAB, bias=False) if last else None

    def forward(self, x: Any) -> Any:
        if self.embed is not None and self.position is not None:
            x = (self.embed(x) + self.position.weight).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def compute_stage_loss(scores: Any, targets: Any) -> Any:
    """The mean cross entropy of a microbatch, in nats per character."""
    return functional.cross_entropy(scores, targets.flatten())


def build_model_spec(args: DemoArgs) -> ModelSpec:
    """The shape of the whole model for run.json."""
    with torch.device("meta"):
        whole = GptStage(args, 0, 1)
    return ModelSpec(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        kv_heads=args.heads,
        ffn=_FFN * args.hidden,
        gated=False,
        vocab=VOCAB,
        tied=False,
        learned_positions=args.seq_len,
        # nn.LayerNorm without biases has a scale only, as RMSNorm.
        norm="rms",
        biases=False,
        parameters=sum(parameter.numel() for parameter in whole.parameters()),
    )


# The training data: sentences of a small grammar, as characters.

_SUBJECTS = ("the first stage", "the last stage", "a slow rank", "every rank", "the next stage")

_VERBS = ("waits for", "sends a message to", "shares the gradients of", "runs ahead of")

_ADVERBS = ("before the step ends", "in the backward pass", "once a step", "while others compute")

ALPHABET = " .abcdefghijklmnopqrstuvwxyz"

# The 28 letters of ALPHABET, and up to a power of two, which tp divides.
VOCAB = 32

_SENTENCES, _TEXT_SEED = 500, 7


if __name__ == "__main__":
    main()
