"""Which published rows the model's constants were fitted on, by their ids."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.fitted_rows import H200, H200_LARGE, MI300X, busbw
from stepsplit.analyzer.model.comm.rates import fitted_rows
from stepsplit.analyzer.model.comm.spread import ROWS
from stepsplit.analyzer.model.memory.frameworks import coefficients
from stepsplit.analyzer.model.spec.links import efficiency, families
from stepsplit.analyzer.model.spec.recipe import FRAMEWORKS

PRESET_ROWS = (
    *busbw(H200, "all_reduce_8", "all_reduce_8_rings"),
    *busbw(H200_LARGE, "all_reduce NVLS=1_8"),
    *busbw(MI300X, "all_reduce_8"),
)
"""What NVLS reaches (presets/hardware), and the shares of NVLink 4 and xGMI that rings reach
(presets/links.toml); the rest of both is from rows of comm/spread.py."""


def fitted_step_times() -> frozenset[str]:
    """presets/efficiency.toml."""
    return frozenset(row for family in families() for row in efficiency(family).rows)


def fitted_memory() -> frozenset[str]:
    """presets/frameworks.toml."""
    return frozenset(row for name in FRAMEWORKS for row in coefficients(name).rows)


def fitted_collectives() -> frozenset[str]:
    """comm/rates.py, comm/spread.py, presets/links.toml and presets/hardware."""
    return fitted_rows().union(ROWS, PRESET_ROWS)
