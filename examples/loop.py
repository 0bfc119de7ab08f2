"""The loop of every example: train a step, tell the recorder."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from job import MICRO_BATCH
from tiny_gpt import GPT, SHAPE
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh

from stepsplit.collectors import ModelSpec, Training, profile_run

SETTLE = 3
"""Steps that are not recorded: the first ones set up groups, buckets and schedules."""
RECORDED = 4


def train(
    options: Namespace,
    mesh: DeviceMesh,
    train_step: Callable[[int], Tensor | None],
    training: Training,
) -> None:
    """Trains and records; train_step returns the loss on ranks that know it."""
    losses: list[Tensor] = []
    with profile_run(
        options.out,
        mesh=mesh,
        model=_model(),
        training=training,
        wait=SETTLE - 1,
        warmup=1,
        active=RECORDED,
    ) as run:
        for step in range(options.steps):
            loss = train_step(step)
            run.step()
            losses += [] if loss is None else [loss.detach()]
    if losses and _speaks(mesh):
        first, last = losses[0].item(), losses[-1].item()
        print(f"loss {first:.3f} -> {last:.3f} in {len(losses)} steps")  # noqa: T201
    distributed.destroy_process_group()


def training_of(
    mesh: DeviceMesh,
    framework: str,
    microbatches: int = 1,
    schedule: str | None = None,
    dtype: str = "fp32",
) -> Training:
    """How the examples make a step: MICRO_BATCH sequences a microbatch and replica."""
    replicas = size(mesh, "dp_replicate") * size(mesh, "dp_shard")
    return Training(
        seq_len=SHAPE.seq_len,
        micro_batch=MICRO_BATCH,
        global_batch=MICRO_BATCH * microbatches * replicas,
        microbatches=microbatches,
        dtype=dtype,
        optimizer="adam",
        schedule=schedule,
        framework=framework,
    )


def size(mesh: DeviceMesh, axis: str) -> int:
    """Ranks along the axis; 1 for one that the mesh does not have."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)).get(axis, 1)


def _model() -> ModelSpec:
    return ModelSpec(
        layers=SHAPE.layers,
        hidden=SHAPE.hidden,
        heads=SHAPE.heads,
        kv_heads=SHAPE.heads,
        ffn=4 * SHAPE.hidden,
        gated=False,
        vocab=SHAPE.vocab,
        tied=False,
        learned_positions=SHAPE.seq_len,
        norm="layer",
        biases=False,
        parameters=sum(each.numel() for each in GPT().parameters()),
    )


def _speaks(mesh: DeviceMesh) -> bool:
    """One rank of each pipeline stage; of those only the last stage has a loss."""
    place = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
    return all(at == 0 for axis, at in place if axis != "pp")
