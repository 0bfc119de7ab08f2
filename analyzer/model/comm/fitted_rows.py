"""The ids of the published all_reduce rows that constants of collective time were fitted on."""

from __future__ import annotations

from collections.abc import Iterable

A100 = "1x8 A100 (NVLink3)_nccl-tests"
B200 = "1x8 B200 p6-b200 (NVLink5)_all_reduce_bench.py"
H200, H200_LARGE = "8xH200 8GiB", "8xH200 16GiB"
MI300X = "8xMI300X 4GiB"
ALPS_NODES = (1, 4, 16, 64, 256)
KIB, MIB, GIB = 2**10, 2**20, 2**30
ALPS_SIZES = tuple(2**power for power in range(15, 32, 2))
"""2^k with odd k, 32 KiB to 2 GiB."""
SWEEP_SIZES = (*ALPS_SIZES, 8 * GIB)


def alps(nodes: Iterable[int], sizes: Iterable[int]) -> tuple[str, ...]:
    """Rows of nccl_allreduce_alps_gh200.csv, four GPUs a node."""
    kept = tuple(sizes)
    return tuple(f"alps/{count}x4_{size}" for count in nodes for size in kept)


def sweep(system: str, sizes: Iterable[int]) -> tuple[str, ...]:
    """Rows of nccl_allreduce_sweeps.csv, by system and tool."""
    return tuple(f"sweep/{system}_{size}" for size in sizes)


def busbw(system: str, *calls: str) -> tuple[str, ...]:
    """Rows of nccl_busbw_by_ranks_and_algo.csv, by collective and ranks."""
    return tuple(f"busbw/{system}_{call}" for call in calls)
