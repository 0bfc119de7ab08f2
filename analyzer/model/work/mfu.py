"""How much of the GPUs' peak a step uses."""

from __future__ import annotations

from stepsplit.analyzer.model.formula import Formula

MFU = Formula(
    "flops.mfu",
    "model FLOPs / (step time x ranks x dense peak); hfu with the FLOPs that recomputation adds",
    "Chowdhery et al., PaLM, arXiv:2204.02311, section 4.1; Korthikanti et al., arXiv:2205.05198",
)


def mfu(
    flops: float, step_ns: float, world_size: int, peak_flops_per_s: float | None
) -> float | None:
    """The ratio of a step's flops to what the ranks' dense peak allows in step_ns; hfu likewise.

    None where no peak is known or the step took no time.
    """
    if peak_flops_per_s is None or peak_flops_per_s <= 0 or step_ns <= 0:
        return None
    return flops / (step_ns * 1e-9 * world_size * peak_flops_per_s)
