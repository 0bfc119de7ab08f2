"""The least that a step may take: what spares timing layouts that can't win."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from stepsplit.analyzer.model.comm.context import context_messages
from stepsplit.analyzer.model.comm.experts import expert_messages
from stepsplit.analyzer.model.comm.measured import Rates
from stepsplit.analyzer.model.comm.tensor import tensor_messages
from stepsplit.analyzer.model.predict import call_ns
from stepsplit.analyzer.model.spec.job import Job
from stepsplit.analyzer.model.spec.stages import Chunk, Stage, stages_of
from stepsplit.analyzer.model.spec.transformer import Experts
from stepsplit.analyzer.model.step.chunk import chunk_passes
from stepsplit.analyzer.model.step.host import launches
from stepsplit.analyzer.model.step.speed import speed_of
from stepsplit.analyzer.model.step.split import straggling
from stepsplit.analyzer.model.work.parameters import stage_parameters

_IN_LAYERS = ("forward", "backward", "recompute")
SLACK = 1e-9
"""Sums in another order differ by less."""
_Alike = tuple[object, ...]
"""What of a layout a layer's time hangs on."""


@dataclass(frozen=True, slots=True)
class Layers:
    """What one layer takes for certain, of each kind, in ns; expert_ns is 0 without experts."""

    dense_ns: float
    expert_ns: float

    def of(self, chunk: Chunk) -> float:
        return chunk.dense_layers * self.dense_ns + chunk.expert_layers * self.expert_ns


@dataclass(frozen=True, slots=True)
class Floor:
    """Of the layouts of one job; remembers what a layer takes, which all with the same tp, cp and
    experts share."""

    rates: Rates
    known: dict[_Alike, float] = field(default_factory=dict)

    def step_ns(self, job: Job) -> float:
        """No more than the model says that the job's step takes.

        Without embedding, head, messages between stages, sums of gradients and optimizer: for each
        rank its microbatches, and the first chunks of the ranks before it, which have to be filled
        and drained.
        """
        layers, m = self._layers(job), job.microbatches
        held = [[layers.of(chunk) for chunk in stage.chunks] for stage in stages_of(job)]
        if job.layout.schedule == "dualpipe":
            most = m / 2 * max(map(sum, held))
        elif job.layout.schedule in ("1f1b", "interleaved"):
            before = accumulate((chunks[0] for chunks in held), initial=0.0)
            most = max(m * sum(chunks) + ns for chunks, ns in zip(held, before, strict=False))
        else:
            most = m * max(map(sum, held))
        return most * (1 + straggling(job)) * (1 - SLACK)

    def _layers(self, job: Job) -> Layers:
        experts, layout, recipe = job.model.experts, job.layout, job.recipe
        alike = (
            layout.tp, layout.cp, layout.sequence_parallel, recipe.micro_batch, recipe.recompute,
            recipe.recompute_every, recipe.activation_dtype,
        )  # fmt: skip
        if experts is None:
            return Layers(self._once(alike, lambda: _one_layer(job)), 0.0)
        spread = (*alike, layout.ep, layout.expert_tp)
        return Layers(
            self._once(alike, lambda: _without_experts(_one_layer(job)))
            if experts.dense_layers
            else 0.0,
            self._once(spread, lambda: _all_with_experts(_one_layer(job), experts)),
        )

    def _once(self, alike: _Alike, one: Callable[[], Job]) -> float:
        if alike not in self.known:
            self.known[alike] = _middle_ns(one(), self.rates)
        return self.known[alike]


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


def _without_experts(one: Job) -> Job:
    layout = replace(one.layout, ep=1, expert_tp=1)
    return replace(one, layout=layout, model=replace(one.model, experts=None))


def _all_with_experts(one: Job, experts: Experts) -> Job:
    return replace(one, model=replace(one.model, experts=replace(experts, dense_layers=0)))


def _middle_ns(one: Job, rates: Rates) -> float:
    """What the middle layer takes for certain: compute with what nothing can hide, or the host's
    launching, whichever is longer.

    What compute may hide, it hides the better the more microbatches there are.
    """
    stage = stages_of(one)[1]
    (device,) = chunk_passes(one, speed_of(one), stage.chunks)
    backward_ns = device.input_ns + device.weight_ns
    host = launches(one, 1)
    launched = max(device.forward_ns, host.forward_ns) + max(backward_ns, host.input_ns)
    return max(device.forward_ns + backward_ns + _sent_ns(one, stage, rates), launched)


def _sent_ns(one: Job, stage: Stage, rates: Rates) -> float:
    """The messages inside the layer that nothing hides; a ring of cp hides behind attention."""
    ring = {"cp"} if one.layout.context_kind == "ring" else set()
    shown = {"tp", "ep", "cp"} - one.layout.overlap - ring
    messages = (
        *tensor_messages(one, stage, stage_parameters(one)[stage.index]),
        *context_messages(one, stage),
        *expert_messages(one, stage),
    )
    return sum(
        message.count * call_ns(one, message, rates).ns
        for message in messages
        if message.phase in _IN_LAYERS and message.axis in shown and message.input_bytes
    )
