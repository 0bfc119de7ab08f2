"""Jobs with one thing wrong, beside the same jobs without it: what fixing it is truly worth."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from simulator.changes import gathering, loading, slow_group, slow_pair, slowed, stalled
from simulator.engine import simulate
from simulator.layers import Work
from simulator.meshes import Fleet, Mesh
from simulator.noise import Noise
from simulator.pipelines import pipeline
from simulator.plans import Pipeline
from simulator.program import Collective, Job, Scenario
from simulator.ran import Run
from simulator.strategies import ddp, fsdp, tensor_parallel
from simulator.truth import truth_of
from simulator.writer import stream_of

_BYTES_PER_NS = 200
_MANY = 64
"""Microbatches of two stages, so many that twice as many gain less than a hundredth."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A job with one thing wrong, and the job as it should be; ranks are those to name, if any.

    times: the job as it should be does so many times the work in a step.
    """

    job: Job
    without: Job
    ranks: tuple[int, ...] = ()
    times: int = 1


Pair = Callable[[random.Random, int], Planted]
_Layout = Callable[[random.Random, int], Job]


def planted(name: str, seed: int) -> Planted:
    """What is planted under that name, for a seed."""
    return PLANTED[name](random.Random(f"{name} {seed}"), seed)


def scenario_of(pair: Planted, seed: int) -> Scenario:
    """The job as it ran, on clocks that agree."""
    still = dict.fromkeys(pair.job.hosts, 0)
    return Scenario(pair.job, seed, None, pair.without, still, dict.fromkeys(pair.job.hosts, 0.0))


def step_ns(run: Run) -> float:
    """The mean full step of all ranks."""
    splits = [s for s in truth_of(run).splits if not s.partial]
    return sum(s.end_ns - s.start_ns for s in splits) / len(splits)


def gain_ns(pair: Planted, run: Run, seed: int) -> float:
    """By how much the mean full step of the job, which ran so, is truly longer than without what
    was planted."""
    without = simulate(pair.without, Noise.of(seed))
    return step_ns(run) - step_ns(without) / pair.times


def _work(rng: random.Random, layers: int, passes: int = 1, bytes_per_ns: int = 200) -> Work:
    layer_ns = round(rng.randint(45_000_000, 85_000_000) / (3 * layers * passes))
    return Work(
        layer_ns,
        layers,
        activation_bytes=round(layer_ns * bytes_per_ns * rng.uniform(0.04, 0.1)),
        weight_bytes=round(layer_ns * bytes_per_ns * rng.uniform(0.3, 0.6)),
        kernels=max(1, min(4, 200 // (5 * layers * passes))),
    )


def _fleet(rng: random.Random, *mesh: tuple[str, int], nodes: int = 1) -> Fleet:
    return Fleet(tuple(mesh), (), rng.choice(("megatron", "mesh")), nodes)


def _ddp(rng: random.Random, seed: int, *, mesh: Mesh, nodes: int = 1, overlap: bool = True) -> Job:
    work = _work(rng, 2 * rng.randint(4, 6), bytes_per_ns=_BYTES_PER_NS // (5 if nodes > 1 else 1))
    return ddp(_fleet(rng, *mesh, nodes=nodes), work, seed, overlap=overlap)


def _fsdp(rng: random.Random, seed: int) -> Job:
    fleet = replace(_fleet(rng, ("dp_shard", 8)), naming="mesh")
    return fsdp(fleet, _work(rng, rng.randint(6, 12)), seed)


def _tp(rng: random.Random, seed: int, *, ranks: int = 4) -> Job:
    return tensor_parallel(_fleet(rng, ("tp", ranks)), _work(rng, rng.randint(6, 10)), seed)


def _pp(
    rng: random.Random,
    seed: int,
    *,
    mesh: Mesh,
    microbatches: int,
    layers: tuple[int, ...] = (),
    times: int = 1,
) -> Job:
    """A pipeline; times: of so many times as many microbatches of the same size."""
    fleet = _fleet(rng, *mesh)
    each = sum(layers) // len(layers) if layers else 2
    work = _work(rng, each, microbatches, bytes_per_ns=40)
    return pipeline(fleet, work, seed, Pipeline("1f1b", microbatches * times), layers)


_TP_DP: Mesh = (("dp_replicate", 4), ("tp", 2))
_PP_TP: Mesh = (("pp", 2), ("tp", 2))
_PP2: Mesh = (("pp", 2),)
_PP4: Mesh = (("pp", 4),)
_tp_dp = partial(_ddp, mesh=_TP_DP)
_pp_tp = partial(_pp, mesh=_PP_TP, microbatches=_MANY)


def _slow_group(rng: random.Random, seed: int, *, layout: _Layout) -> Planted:
    """One tensor-parallel group's link, of several, is slow."""
    job = layout(rng, seed)
    group = rng.choice([g for g in job.groups if g.description in _TP_NAMES])
    return Planted(slow_group(job, group.name, rng.uniform(3, 5)), job, group.ranks)


_TP_NAMES = ("TENSOR_MODEL_PARALLEL_GROUP", "mesh_tp")


def _slow_pair(rng: random.Random, seed: int) -> Planted:
    """The link between two neighboring stages is slow."""
    job = _pp(rng, seed, mesh=_PP4, microbatches=_MANY)
    first = rng.randrange(3)
    ends = (first, first + 1)
    return Planted(slow_pair(job, ends, rng.uniform(8, 12)), job, ends)


def _straggler(rng: random.Random, seed: int, *, layout: _Layout) -> Planted:
    job = layout(rng, seed)
    rank = rng.randrange(len(job.programs))
    return Planted(slowed(job, rank, rng.uniform(1.25, 1.5)), job, (rank,))


def _uneven(rng: random.Random, seed: int, *, mesh: Mesh, layers: tuple[int, ...]) -> Planted:
    """One stage has more layers than the others, of as many in all."""
    stages = dict(mesh)["pp"]
    heavy = rng.randrange(stages)
    odd = sorted(layers)
    order = (*odd[:-1][:heavy], odd[-1], *odd[:-1][heavy:])
    even = (sum(layers) // stages,) * stages
    made = [
        _pp(random.Random(seed), seed, mesh=mesh, microbatches=16, layers=each)
        for each in (order, even)
    ]
    return Planted(made[0], made[1])


def _no_overlap(rng: random.Random, seed: int, *, mesh: Mesh, nodes: int = 1) -> Planted:
    state = rng.getstate()
    made = []
    for overlap in (False, True):
        rng.setstate(state)
        made.append(_ddp(rng, seed, mesh=mesh, nodes=nodes, overlap=overlap))
    return Planted(made[0], made[1])


def _stall(rng: random.Random, seed: int, *, layout: _Layout) -> Planted:
    job = layout(rng, seed)
    rank = rng.randrange(len(job.programs))
    busy_ns = rng.randint(5_000_000, 15_000_000)
    share = rng.uniform(0.3, 0.6)
    return Planted(stalled(job, rank, busy_ns, (1, 2, 3, 4), share), job, (rank,))


def _load(rng: random.Random, seed: int, *, layout: _Layout) -> Planted:
    job = layout(rng, seed)
    for rank in range(len(job.programs)):
        job = loading(job, rank, 0)
    rank = rng.randrange(len(job.programs))
    return Planted(loading(job, rank, rng.randint(5_000_000, 15_000_000)), job, (rank,))


def _few(rng: random.Random, seed: int, *, mesh: Mesh, microbatches: int) -> Planted:
    made = [
        _pp(random.Random(seed), seed, mesh=mesh, microbatches=microbatches, times=times)
        for times in (1, 2)
    ]
    return Planted(made[0], made[1], times=2)


def _gathers(
    rng: random.Random, seed: int, *, layout: _Layout, axis: str, named: str = "flash_attention"
) -> Planted:
    job = layout(rng, seed)
    group = {
        rank: g.name for g in job.groups[1:] for rank in g.ranks if _along(g.description, axis)
    }
    size = rng.randint(60_000_000, 120_000_000)
    call = Collective("", "all_gather", size, 15_000 + size // _BYTES_PER_NS, stream_of(axis))
    return Planted(gathering(job, group.__getitem__, named, call), job)


def _along(description: str, axis: str) -> bool:
    megatron = "TENSOR_MODEL" if axis == "tp" else "DATA_PARALLEL"
    return description == f"mesh_{axis}" or description.startswith(megatron)


def _nothing(rng: random.Random, seed: int, *, layout: _Layout) -> Planted:
    job = layout(rng, seed)
    return Planted(job, job)


_ddp8 = partial(_ddp, mesh=(("dp_replicate", 8),))

PLANTED: dict[str, Pair] = {
    "slow_link tp_dp": partial(_slow_group, layout=_tp_dp),
    "slow_link pp_tp": partial(_slow_group, layout=_pp_tp),
    "slow_link pp4": _slow_pair,
    "slow_rank tp_dp": partial(_straggler, layout=_tp_dp),
    "slow_rank fsdp": partial(_straggler, layout=_fsdp),
    "slow_rank pp_tp": partial(_straggler, layout=_pp_tp),
    "uneven_stages pp2": partial(_uneven, mesh=_PP2, layers=(2, 4)),
    "uneven_stages pp4": partial(_uneven, mesh=_PP4, layers=(2, 2, 2, 6)),
    "uneven_stages pp_tp": partial(_uneven, mesh=_PP_TP, layers=(2, 4)),
    "no_overlap ddp": partial(_no_overlap, mesh=(("dp_replicate", 8),)),
    "no_overlap two_hosts": partial(_no_overlap, mesh=(("dp_replicate", 4),), nodes=2),
    "no_overlap tp_dp": partial(_no_overlap, mesh=_TP_DP),
    "allocation tp_dp": partial(_stall, layout=_tp_dp),
    "allocation fsdp": partial(_stall, layout=_fsdp),
    "allocation pp_tp": partial(_stall, layout=_pp_tp),
    "data_loading tp_dp": partial(_load, layout=_tp_dp),
    "data_loading fsdp": partial(_load, layout=_fsdp),
    "data_loading pp_tp": partial(_load, layout=_pp_tp),
    "few_microbatches pp2": partial(_few, mesh=_PP2, microbatches=4),
    "few_microbatches pp4": partial(_few, mesh=_PP4, microbatches=8),
    "few_microbatches pp_tp": partial(_few, mesh=_PP_TP, microbatches=4),
    "redundant_calls ddp": partial(_gathers, layout=_ddp8, axis="dp_replicate"),
    "redundant_calls tp": partial(_gathers, layout=_tp, axis="tp"),
    "redundant_calls fsdp": partial(_gathers, layout=_fsdp, axis="dp_shard"),
    "nothing tp_dp": partial(_nothing, layout=_tp_dp),
    "nothing fsdp": partial(_nothing, layout=_fsdp),
    "nothing pp_tp": partial(_nothing, layout=_pp_tp),
}
"""By what is wrong and the layout; the first word is the code of the finding."""
