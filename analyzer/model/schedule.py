"""What a pipeline schedule costs even when every stage is equally fast."""

from __future__ import annotations


def ideal_bubble_fraction(
    schedule: str, stages: int, microbatches: int, chunks: int = 1
) -> float | None:
    """Holes / window of the schedule with equal stages, a ratio; None for a schedule not modelled.

    (p-1) / (v*m + p-1) for p stages, m microbatches and v chunks a rank: Narayanan et al.,
    Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, SC'21,
    sections 2.2.1 (GPipe and 1F1B, v = 1) and 2.2.2 (interleaved).
    """
    if schedule not in ("gpipe", "1f1b", "interleaved") or stages < 1 or microbatches < 1:
        return None
    return (stages - 1) / (chunks * microbatches + stages - 1)
