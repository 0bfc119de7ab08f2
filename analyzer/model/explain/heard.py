"""Which rules of thumb of the field touch on a job's formulas and do not hold as they are said."""

from __future__ import annotations

from collections.abc import Sequence

from stepsplit.analyzer.model.explain.explained import Explained
from stepsplit.analyzer.model.explain.folk import Folk, folk_rules

TOPICS = {
    "parameters.total": "parameters.stage",
    "flops.recompute": "recompute.full",
    "memory.recompute_full": "recompute.full",
    "memory.states_megatron": "memory.states",
    "memory.states_deepspeed": "memory.states",
    "memory.states_fsdp": "memory.states",
    "memory.activations_gpt": "memory.activations",
    "schedule.in_flight": "memory.in_flight",
    "pipeline.bubble_fraction": "pipeline.bubble",
    "comm.tensor": "tp.messages",
    "comm.sequence": "tp.messages",
    "comm.ddp": "dp.messages",
    "comm.zero": "zero.messages",
    "comm.fsdp": "zero.messages",
    "comm.choice": "collective.ring",
    "comm.ring": "collective.ring",
    "comm.tree": "collective.tree",
}
"""What folk.toml calls the formula, where that is not its id."""


def heard(explained: Sequence[Explained]) -> tuple[Folk, ...]:
    """The field's rules about these formulas, without those that are right."""
    topics = {one.formula.id for one in explained}
    topics |= {TOPICS[name] for name in topics if name in TOPICS}
    return tuple(
        folk for folk in folk_rules() if folk.formula in topics and folk.verdict != "right"
    )
