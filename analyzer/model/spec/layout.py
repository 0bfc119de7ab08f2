"""How the ranks share the model and the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Schedule = Literal[
    "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"
]
SCHEDULES: tuple[Schedule, ...] = (
    "naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v",
)  # fmt: skip
TWO_STAGES: tuple[Schedule, ...] = ("zb-v", "dualpipe", "dualpipe-v")
"""Schedules that hold two stages on each rank, whatever chunks says."""
ContextKind = Literal["ring", "all-gather", "ulysses"]
Reshard = Literal["default", "always", "never"]
RESHARDS: tuple[Reshard, ...] = ("default", "always", "never")
RANK_ORDER = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes, and how each works.

    dp_replicate ranks hold copies, dp_shard ranks shares (FSDP); both together are HSDP. zero is
    the ZeRO stage: 1 and 2 spread optimizer (and gradients) over all data- and context-parallel
    ranks, 3 is dp_shard. order lists the axes with the fastest varying first. overlap names the
    axes whose communication is hidden behind compute where there is compute to hide behind.
    chunks is the number of stages on a rank (interleaved). scatter_gather: pipeline messages are
    cut over tensor parallelism and put together by the receiver's node. reshard_after_forward is
    what FSDP does with gathered weights: always frees them, never keeps them until the backward
    pass, default is torchtitan's: keeps the last unit, and all of them in a pipeline.
    split_vocab: tensor parallelism cuts embedding and head too. root_unit: FSDP gathers what is in
    no layer as one unit. sum_once: FSDP sums gradients behind the last microbatch alone.
    bucket_bytes is what DDP sums in one call, 0 its default.
    """

    tp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    order: tuple[str, ...] = RANK_ORDER
    sequence_parallel: bool = False
    zero: int = 0
    schedule: Schedule = "1f1b"
    chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    overlap: frozenset[str] = frozenset()
    context_kind: ContextKind = "ring"
    reshard_after_forward: Reshard = "default"
    scatter_gather: bool = False
    split_vocab: bool = True
    root_unit: bool = False
    sum_once: bool = False
    bucket_bytes: int = 0

    @property
    def dp(self) -> int:
        """Ranks that see different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO spreads the states of dense parameters (N); 1 without ZeRO."""
        return 1 if self.zero == 0 else self.cp * (self.dp_shard if self.zero == 3 else self.dp)

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients of dense parameters are summed."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.expert_tp)

    @property
    def expert_shards(self) -> int:
        """Ranks over which ZeRO spreads the states of experts; 1 without ZeRO."""
        if self.zero == 0:
            return 1
        return max(1, self.expert_dp // (self.dp_replicate if self.zero == 3 else 1))

    @property
    def sequence_split(self) -> int:
        """By how much sequence parallelism divides what tensor parallelism leaves whole."""
        return self.tp if self.sequence_parallel else 1

    @property
    def vocab_split(self) -> int:
        """By how much tensor parallelism divides embedding and head."""
        return self.tp if self.split_vocab else 1

    @property
    def stages_per_rank(self) -> int:
        """Model stages that one rank of the pipeline holds."""
        if self.pp > 1 and self.schedule in TWO_STAGES:
            return 2
        return self.chunks
