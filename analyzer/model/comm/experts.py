"""What expert parallelism sends: tokens to their experts and back."""

from __future__ import annotations

from stepsplit.analyzer.model.comm.calls import (
    FULL_RECOMPUTE,
    Place,
    all_gather,
    all_to_all,
    reduce_scatter,
    rounds,
)
from stepsplit.analyzer.model.formula import Formula
from stepsplit.analyzer.model.prediction import Message
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Stage
from stepsplit.analyzer.model.work.weights import of_experts, share

EXPERTS = Formula(
    "comm.experts",
    "4 all_to_alls a layer and microbatch (dispatch and combine, forward and backward) of"
    " (T/t) top_k h numbers; 6 with full recomputation; routing taken as balanced",
    "Lepikhin et al., GShard, arXiv:2006.16668; DeepSeek-V3, arXiv:2412.19437, section 3.2.2",
)


def expert_messages(job: Job, stage: Stage) -> tuple[Message, ...]:
    """The calls around the experts of one rank of a stage in a step."""
    if stage.expert_layers == 0:
        return ()
    phases = ["forward", "backward"]
    if job.recipe.recompute in FULL_RECOMPUTE:
        phases.append("recompute")
    count = rounds(job) * stage.expert_layers
    return tuple(
        message for phase in phases for message in _of_phase(job, stage.index, phase, count)
    )


def _of_phase(job: Job, stage: int, phase: str, count: int) -> tuple[Message, ...]:
    """Experts cut by expert_tp gather the tokens of their group and scatter the sums."""
    layout, size, found = job.layout, _routed_bytes(job), []
    if layout.ep > 1:
        found.append(all_to_all(Place("ep", "ep", stage, phase), 2 * count, size, layout.ep))
    if layout.expert_tp > 1:
        place = Place("expert-tp", "tp", stage, phase)
        found.append(all_gather(place, count, size, layout.expert_tp))
        found.append(reduce_scatter(place, count, size * layout.expert_tp, layout.expert_tp))
    return tuple(found)


def _routed_bytes(job: Job) -> int:
    """A rank's tokens of one microbatch, each once for every expert that it goes to."""
    tokens = share(job.tokens, job.layout.tp) * of_experts(job.model).top_k
    return tokens * job.model.hidden * job.recipe.activation_bytes
