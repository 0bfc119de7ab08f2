"""What turns the bandwidth of a collective's algorithm into that of its bus."""

from __future__ import annotations


def busbw_factor(op: str, ranks: int) -> float:
    """busbw / algbw, as nccl-tests define it (doc/PERFORMANCE.md of NVIDIA/nccl-tests)."""
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0
