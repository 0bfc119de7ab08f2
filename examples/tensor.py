"""Tensor parallelism: every layer is cut over the ranks, vocabulary and loss too.

torchrun --standalone --nproc-per-node 2 examples/tensor.py --sequence-parallel
"""

from __future__ import annotations

import torch
from gradients import sum_gradients
from job import LEARNING_RATE, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, loss_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)


def split(model: GPT, mesh: DeviceMesh, sequence_parallel: bool = False) -> GPT:
    """Cuts a stage over the mesh: the first product of a pair by columns, the second by rows.

    Between pairs a rank has all tokens, or under sequence parallelism only its part of them.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "attention.qkv": ColwiseParallel(input_layouts=between),
        "attention.proj": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(input_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return parallelize_module(model, mesh, _plan_of_vocabulary(model, between))


def _plan_of_vocabulary(model: GPT, between: Placement) -> dict[str, object]:
    plan: dict[str, object] = {}
    if model.first:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.first and between.is_shard():
        plan["position"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True
        )
    if model.last:
        # Scores stay cut by vocabulary: loss_parallel sums what the loss needs of them.
        plan["head"] = ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    return plan


def main() -> None:
    parser = command_line(__doc__, "tensor")
    parser.add_argument("--sequence-parallel", action="store_true", help="norms are cut by token")
    options = parser.parse_args()
    device = join()
    mesh = mesh_of(device, tp=-1)
    model = split(GPT().to(device), mesh, options.sequence_parallel)
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    # One fused update takes no mix of what is cut and what is whole.
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, foreach=False)

    def train_step(step: int) -> Tensor:
        read = batch(step, device)
        with loss_parallel():
            loss = loss_of(model(read.tokens), read.targets)
            loss.backward()
        if options.sequence_parallel:
            # Each rank saw its part of the tokens only.
            sum_gradients(whole, mesh.get_group())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "torch"))


if __name__ == "__main__":
    main()
