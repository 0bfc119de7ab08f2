"""The conventions by which people count a step's FLOPs, and the closed forms of those for GPT."""

from __future__ import annotations

from typing import Literal

from stepsplit.analyzer.model.formula import Formula

Convention = Literal["C1", "C2", "C3", "C4", "C5", "C6"]
SECONDS_PER_DAY = 86_400

_KORTHIKANTI = "Korthikanti et al., arXiv:2205.05198, appendix A"
_SC21 = "Narayanan et al., SC'21, arXiv:2104.04473"
_PALM = "Chowdhery et al., PaLM, arXiv:2204.02311, appendix B; mosaicml/llm-foundry benchmarking"

CONVENTIONS: dict[Convention, Formula] = {
    "C1": Formula("flops.C1", "72 B L s h^2 (1 + s/(6h) + V/(12 h L))", f"{_KORTHIKANTI}, eq. 7"),
    "C2": Formula("flops.C2", "72 B L s h^2 (1 + s/(3h) + V/(12 h L))", f"{_KORTHIKANTI}, eq. 8"),
    "C3": Formula("flops.C3", "96 B L s h^2 (1 + s/(6h) + V/(16 h L))", f"{_SC21}, eq. 3"),
    "C4": Formula("flops.C4", "(6 N + 12 L a d s) B s, N all parameters", _PALM),
    "C5": Formula(
        "flops.C5",
        "72 B L s h^2 (1 + s/(12h) + V/(12 h L)): attention halved, for it is causal",
        "NVIDIA/Megatron-LM, num_floating_point_operations since 2026; Dao, arXiv:2307.08691",
    ),
    "C6": Formula(
        "flops.C6", "(6 N_active + 12 L a d s) B s: of the experts, top_k", f"{_PALM}; {_SC21}"
    ),
}
"""As written for GPT with full attention; other shapes are counted product by product."""

DAYS = Formula("flops.days", "T F / (B s n X)", f"{_SC21}, eq. 3 over eq. 4's n X")


def korthikanti_flops(layers: int, hidden: int, seq: int, vocab: int, batch: int) -> int:
    """C1 of a GPT step in closed form (Korthikanti et al., eq. 7): no recomputation."""
    per_token = 72 * layers * hidden**2 + 12 * layers * hidden * seq + 6 * hidden * vocab
    return batch * seq * per_token


def korthikanti_selective_flops(layers: int, hidden: int, seq: int, vocab: int, batch: int) -> int:
    """C2 of a GPT step in closed form (Korthikanti et al., eq. 8)."""
    per_token = 72 * layers * hidden**2 + 24 * layers * hidden * seq + 6 * hidden * vocab
    return batch * seq * per_token


def sc21_flops(layers: int, hidden: int, seq: int, vocab: int, batch: int) -> int:
    """C3 of a GPT step in closed form (Narayanan et al., eq. 3): all layers recomputed."""
    per_token = 96 * layers * hidden**2 + 16 * layers * hidden * seq + 6 * hidden * vocab
    return batch * seq * per_token


def training_days(
    tokens: float, flops_per_token: float, world_size: int, flops_per_s: float
) -> float:
    """Days to train on tokens when each of world_size GPUs reaches flops_per_s."""
    return tokens * flops_per_token / (world_size * flops_per_s) / SECONDS_PER_DAY


def sc21_days(tokens: float, parameters: float, world_size: int, flops_per_s: float) -> float:
    """Days by 8 T P / (n X) (Narayanan et al., eq. 4), 2 to 3 % low: it leaves attention out."""
    return training_days(tokens, 8 * parameters, world_size, flops_per_s)
