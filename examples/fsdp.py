"""Sharded data parallelism (FSDP2): each rank holds a share of the weights, gathered for use.

torchrun --standalone --nproc-per-node 2 examples/fsdp.py --zero 3
torchrun --standalone --nproc-per-node 4 examples/fsdp.py --replicas 2
"""

from __future__ import annotations

from dataclasses import replace

import torch
from job import LEARNING_RATE, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, loss_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard


def shard(model: GPT, mesh: DeviceMesh, zero: int = 3, offload: bool = False) -> GPT:
    """Shards each block, the embeddings and the head by themselves, as units of communication.

    ZeRO-2 keeps gathered weights until their backward pass is over, ZeRO-3 frees them after their
    forward; not the head's, which is used last in the forward pass and first in the backward.
    """
    free = zero == 3
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for unit in ([model.embed, model.position], *model.blocks):
        fully_shard(unit, mesh=mesh, reshard_after_forward=free, offload_policy=policy)
    head = [model.norm, model.head]
    fully_shard(head, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def main() -> None:
    parser = command_line(__doc__, "fsdp")
    parser.add_argument("--zero", type=int, choices=(2, 3), default=3, help="ZeRO stage")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the shards (HSDP)")
    parser.add_argument("--offload", action="store_true", help="shards live in host memory")
    options = parser.parse_args()
    device = join()
    replicas = {"dp_replicate": options.replicas} if options.replicas > 1 else {}
    mesh = mesh_of(device, **replicas, dp_shard=-1)
    model = shard(GPT().to(device), mesh, options.zero, options.offload)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def train_step(step: int) -> Tensor:
        read = batch(step, device, torch.distributed.get_rank())
        loss = loss_of(model(read.tokens), read.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    offload = "optimizer, parameters" if options.offload else None
    train(options, mesh, train_step, replace(training_of(mesh, "fsdp2"), offload=offload))


if __name__ == "__main__":
    main()
