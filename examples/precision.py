"""Mixed precision: products in 16 or 8 bits, weights and their gradients in 32.

torchrun --standalone --nproc-per-node 2 examples/precision.py --dtype fp16
"""

from __future__ import annotations

from typing import Any

import torch
from job import LEARNING_RATE, batch, command_line, join, mesh_of
from loop import train, training_of
from tiny_gpt import GPT, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WIDTHS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""What autocast computes in; of fp8 training that is all but the products."""


class Product8(torch.autograd.Function):
    """x @ weight.T in 8 bits: values with 3 bits of mantissa, gradients with 2 and more range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = _product(gradient, weight.T, torch.float8_e5m2)
        of_weight = _product(gradient.T, x.T, torch.float8_e5m2)
        return of_x.to(x.dtype), of_weight.to(weight.dtype)


class Linear8(nn.Module):
    """A linear layer without bias whose products run in 8 bits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return Product8.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b.T, a in this dtype of 8 bits; each is first scaled to the range of its dtype."""
    (a8, scale_a), (b8, scale_b) = _scaled(a, dtype), _scaled(b, torch.float8_e4m3fn)
    return torch._scaled_mm(a8, b8.T, scale_a, scale_b, out_dtype=torch.bfloat16)


def _scaled(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = (values.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-12)
    return (values / scale).to(dtype).contiguous(), scale


def in_8_bits(model: GPT) -> GPT:
    """The model with the products of its blocks in 8 bits."""
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, linear in list(part.named_children()):
                setattr(part, name, Linear8(linear))
    return model


def main() -> None:
    parser = command_line(__doc__, "precision")
    parser.add_argument("--dtype", choices=WIDTHS, default="bf16", help="of matrix products")
    options = parser.parse_args()
    device = join()
    if options.dtype == "fp8" and not _has_fp8(device):
        raise SystemExit("fp8 needs GPUs of Ada, Hopper or later (compute capability 8.9)")
    mesh = mesh_of(device, dp_replicate=-1)
    model = GPT().to(device)
    replica = DistributedDataParallel(in_8_bits(model) if options.dtype == "fp8" else model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    # fp16 has so little range that small gradients vanish: the loss is scaled up, they are down.
    scaler = torch.amp.GradScaler(device.type, enabled=options.dtype == "fp16")

    def train_step(step: int) -> Tensor:
        read = batch(step, device, mesh.get_rank())
        with torch.autocast(device.type, WIDTHS[options.dtype]):
            loss = loss_of(replica(read.tokens), read.targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    train(options, mesh, train_step, training_of(mesh, "ddp", dtype=options.dtype))


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


if __name__ == "__main__":
    main()
