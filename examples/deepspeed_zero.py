"""DeepSpeed's ZeRO: optimizer states, gradients and weights spread over the ranks, one by one.

DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py --zero 3
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace

import torch
from job import LEARNING_RATE, MICRO_BATCH, batch, command_line, each_rank_has_gpu, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, Block, loss_of
from torch import Tensor

if not each_rank_has_gpu():
    os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed


def config(options: Namespace) -> dict[str, object]:
    """DeepSpeed's own settings of this run."""
    zero: dict[str, object] = {"stage": options.zero}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": each_rank_has_gpu()}
    if options.zero == 3:
        # DeepSpeed's defaults are for billions of weights: it would gather all of these at once,
        # and keep them.
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": options.accumulate,
        "zero_optimization": zero,
        # DeepSpeed clips gradients by default, unlike PyTorch.
        "gradient_clipping": 0.0,
        # torch's Adam, where DeepSpeed would compile one of its own.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def main() -> None:
    parser = command_line(__doc__, "deepspeed_zero")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=1, help="ZeRO stage")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    parser.add_argument("--offload", action="store_true", help="the optimizer runs in host memory")
    options = parser.parse_args()
    device = join()
    deepspeed.init_distributed()
    axis = "dp_shard" if options.zero == 3 else "dp_replicate"
    mesh = mesh_of(device, **{axis: -1})
    model = GPT().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    if options.zero == 3:
        # A block is gathered as one; DeepSpeed would gather each of its products by itself.
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(options))

    def train_step(step: int) -> Tensor:
        read = batch(step, device, mesh.get_rank(), options.accumulate * MICRO_BATCH)
        for part in read.microbatches():
            loss = loss_of(engine(part.tokens), part.targets)
            engine.backward(loss)
            # DeepSpeed steps with the last microbatch alone.
            engine.step()
        return loss

    training = training_of(mesh, "deepspeed", options.accumulate)
    offload = "optimizer" if options.offload else None
    train(options, mesh, train_step, replace(training, zero=options.zero, offload=offload))


if __name__ == "__main__":
    main()
