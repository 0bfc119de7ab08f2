"""What offloading moves from the GPU to the host, and how much the host must hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.memory.states import States
from stepsplit.analyzer.model.spec.recipe import Recipe

OFFLOAD = Formula(
    "memory.offload",
    "optimizer leaves the GPU (DeepSpeed: its gradients too), parameters and activations likewise;"
    " host of one node P max(4g, 16) 1.5 (ZeRO-2), P 18 (g/N) 1.5 (ZeRO-3)",
    "DeepSpeed docs, memory.rst; Ren et al., ZeRO-Offload, arXiv:2101.06840",
)
SLACK = 1.5
"""DeepSpeed's own factor for what the host needs beside the states."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """What stays on the GPU, and the bytes that one rank leaves on the host (or its NVMe)."""

    states: States
    moved_bytes: int


def offload(states: States, recipe: Recipe) -> Offloaded:
    """States of one rank after recipe.offload ("optimizer", "parameters") has taken its share."""
    stays = states
    if "optimizer" in recipe.offload:
        gradients = 0 if recipe.framework == "deepspeed" else stays.gradients_bytes
        stays = replace(stays, optimizer_bytes=0, gradients_bytes=gradients)
    if "parameters" in recipe.offload:
        stays = replace(stays, weights_bytes=0)
    return Offloaded(stays, states.total_bytes - stays.total_bytes)


def deepspeed_host_bytes(
    parameters: int,
    gpus_per_node: int,
    nodes: int,
    zero: int,
    moved: frozenset[str],
    largest_layer: int | None = None,
) -> int:
    """Host memory of one node by DeepSpeed's estimator, in bytes.

    largest_layer is given where zero.Init builds the model in shards (ZeRO-3); otherwise every
    process first holds an fp32 copy of the whole.
    """
    whole = 4 * gpus_per_node
    if zero < 3:
        need = max(whole, 16) if "optimizer" in moved else whole
        return round(parameters * need * SLACK)
    each = (18 if "parameters" in moved else 16) / nodes if "optimizer" in moved else 0.0
    if largest_layer is None:
        return round(parameters * max(whole, each) * SLACK)
    if "optimizer" not in moved:
        return round(largest_layer * whole * SLACK)
    return round(parameters * each * SLACK)
