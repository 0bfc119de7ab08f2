"""The least that a step may take: what spares timing layouts that can't win."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.predict import stage_times, timed_messages
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.step.host import launches
from stepsplit.analyzer.model.step.split import straggling
from stepsplit.analyzer.model.work.parameters import stage_parameters

_INSIDE = frozenset({"tp", "ep"})
"""Axes that hide behind nothing unless overlap names them; a ring of cp hides behind attention."""
_IN_LAYERS = ("forward", "backward", "recompute")
SLACK = 1e-9
"""Sums in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Remembers what a layer takes, which all layouts with the same tp, cp and experts share."""

    rates: Rates
    known: dict[Job, float] = field(default_factory=dict)

    def step_ns(self, job: Job) -> float:
        """No more than the model says that the job's step takes.

        Every layer as the cheapest does, without embedding, head, messages between stages, sums of
        gradients and optimizer: m microbatches on the rank with most layers, or on all ranks as if
        each held as few as the one with fewest, which the pipeline has to fill and drain.
        """
        layout, m = job.layout, job.microbatches
        each_ns, layers = self._layer_ns(job), job.model.layers
        most = m * -(-layers // layout.pp)
        if layout.pp > 1 and layout.schedule in ("1f1b", "interleaved"):
            fewest = layers // (layout.pp * layout.chunks)
            most = max(most, fewest * (m * layout.chunks + layout.pp - 1))
        return most * each_ns * (1 + straggling(job)) * (1 - SLACK)

    def _layer_ns(self, job: Job) -> float:
        one = _one_layer(job)
        if one not in self.known:
            self.known[one] = min(_middle_ns(each, self.rates) for each in _kinds(one))
        return self.known[one]


def _one_layer(job: Job) -> Job:
    """Three layers in three stages, one microbatch: the middle one has nothing but its layer.

    As few data-parallel ranks as its experts are spread over.
    """
    spread = job.layout.ep * job.layout.expert_tp
    dp = spread // math.gcd(spread, job.layout.tp * job.layout.cp)
    layout = replace(
        job.layout, pp=3, dp_replicate=dp, dp_shard=1, zero=0, schedule="1f1b", chunks=1,
        layers_per_stage=None,
    )  # fmt: skip
    recipe = replace(job.recipe, global_batch=job.recipe.micro_batch * dp)
    return replace(job, layout=layout, recipe=recipe, model=replace(job.model, layers=3))


def _kinds(one: Job) -> list[Job]:
    """A layer with experts, and where some layers have none, one without."""
    experts = one.model.experts
    if experts is None:
        return [one]
    found = [replace(one, model=replace(one.model, experts=replace(experts, dense_layers=0)))]
    if experts.dense_layers:
        layout = replace(one.layout, ep=1, expert_tp=1)
        found.append(replace(one, layout=layout, model=replace(one.model, experts=None)))
    return found


def _middle_ns(one: Job, rates: Rates) -> float:
    """What the middle layer takes for certain: compute with what nothing can hide, or the host's
    launching, whichever is longer.

    What compute may hide, it hides the better the more microbatches there are.
    """
    stage = stage_times(one, stage_parameters(one), timed_messages(one, rates))[1]
    sent = sum(
        each.exposed_ns
        for each in stage.communication
        if each.message.phase in _IN_LAYERS and each.message.axis in _INSIDE - one.layout.overlap
    )
    host, device = launches(one, 1), stage.passes[0]
    backward_ns = device.input_ns + device.weight_ns
    launched = max(device.forward_ns, host.forward_ns) + max(backward_ns, host.input_ns)
    return max(stage.compute_ns + sent, launched)
