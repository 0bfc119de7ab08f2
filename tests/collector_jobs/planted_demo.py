"""python planted_demo.py PLANT [ARGUMENT ...]: a rank of the demo training with a mistake in it.

PLANT is "nothing", "extra_all_reduce" (one more in each layer's forward) or "halved_bucket".
"""

from __future__ import annotations

import sys

import torch
from torch import distributed

from stepsplit.collectors import demo_job


def nothing() -> None:
    """The demo as it is."""


def extra_all_reduce() -> None:
    """Every layer reduces an unused value, like a forgotten debugging metric."""

    class Summed(demo_job.GptBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            distributed.all_reduce(x.detach().clone())
            return super().forward(x)

    demo_job.GptBlock = Summed


def halved_bucket() -> None:
    """DDP gets buckets of half the size."""
    demo_job.BUCKET_MIB //= 2


if __name__ == "__main__":
    plant, *sys.argv[1:] = sys.argv[1:]
    {"nothing": nothing, "extra_all_reduce": extra_all_reduce, "halved_bucket": halved_bucket}[
        plant
    ]()
    demo_job.main()
