"""Which published rows the model's constants were fitted on, by their ids."""

from __future__ import annotations

from stepsplit.analyzer.model.memory.frameworks import coefficients
from stepsplit.analyzer.model.spec.links import efficiency, families
from stepsplit.analyzer.model.spec.recipe import FRAMEWORKS

ALPS_NODES = (1, 4, 16, 64, 256)
SWEEPS = ("1x8 A100 (NVLink3)_nccl-tests", "1x8 B200 p6-b200 (NVLink5)_all_reduce_bench.py")
ALPS_POWERS, SWEEP_POWERS = range(15, 32, 2), range(15, 34, 2)
SINGLE = (
    "busbw/8xH200 8GiB_all_reduce_4",
    "busbw/8xH200 8GiB_all_reduce_5",
    "busbw/8xH200 8GiB_all_reduce_8",
    "busbw/8xH200 8GiB_all_reduce_8_rings",
    "busbw/8xH200 16GiB_all_reduce NVLS=1_8",
    "busbw/8xMI300X 4GiB_all_reduce_8",
)
"""From how many ranks NVLS is used and what it reaches (comm/rates.py, presets/hardware), and the
shares of NVLink 4 and xGMI that rings reach (presets/links.toml)."""


def fitted_step_times() -> frozenset[str]:
    """presets/efficiency.toml."""
    return frozenset(row for family in families() for row in efficiency(family).rows)


def fitted_memory() -> frozenset[str]:
    """presets/frameworks.toml."""
    return frozenset(row for name in FRAMEWORKS for row in coefficients(name).rows)


def fitted_collectives() -> frozenset[str]:
    """comm/rates.py and comm/spread.py: of each sweep the sizes 2^k with odd k from 32 KiB on, and
    what presets/links.toml and presets/hardware name beside them."""
    alps = {f"alps/{nodes}x4_{2**power}" for nodes in ALPS_NODES for power in ALPS_POWERS}
    sweeps = {f"sweep/{sweep}_{2**power}" for sweep in SWEEPS for power in SWEEP_POWERS}
    return frozenset(alps | sweeps | set(SINGLE))
