"""Jobs to try an analysis on, by name: balanced ones, and ones with a planted cause of waiting."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from simulator.changes import copied, graphed, launch_bound, loaded, loading, slowed, stalled
from simulator.drawn import cp_job, ddp_job, ep_job, fsdp_job, mesh_job, pp_job, tp_job, zero_job
from simulator.program import Cause, Job, Scenario
from simulator.schedules import SCHEDULES
from simulator.strategies import EXPERT

Make = Callable[[random.Random, int], Job]
"""Draws a balanced job, given the seed of its noise."""

Plant = Callable[[random.Random, Job], tuple[Job, Cause]]
"""Plants a cause in a job; says which."""

_OFFSET_NS, _DRIFT_PPM = 200_000_000, 50.0


def _slow(rng: random.Random, job: Job, *, axis: str) -> tuple[Job, Cause]:
    """Any rank computes slowly."""
    rank = _any_rank(rng, job)
    return slowed(job, rank, rng.uniform(1.25, 1.5)), Cause(rank, "compute", axis)


def _slow_stage(rng: random.Random, job: Job, *, rank: int) -> tuple[Job, Cause]:
    """The only rank of a stage computes slowly: without shapes that looks like more layers."""
    return slowed(job, rank, rng.uniform(1.25, 1.5)), Cause(rank, "imbalance", "pp")


def _stall(
    rng: random.Random, job: Job, *, axis: str, steps: tuple[int, ...] = (1, 2, 3, 4)
) -> tuple[Job, Cause]:
    rank, share = _any_rank(rng, job), rng.uniform(0.3, 0.6)
    busy_ns = rng.randint(5_000_000, 15_000_000)
    return stalled(job, rank, busy_ns, steps, share), Cause(rank, "host", axis)


def _loader(rng: random.Random, job: Job, *, axis: str) -> tuple[Job, Cause]:
    rank = _any_rank(rng, job)
    return loading(job, rank, rng.randint(8_000_000, 20_000_000)), Cause(rank, "host", axis)


def _storm(rng: random.Random, job: Job, *, axis: str) -> tuple[Job, Cause]:
    rank = _any_rank(rng, job)
    return launch_bound(job, rank, rng.randint(60_000, 120_000)), Cause(rank, "host", axis)


def _copy(rng: random.Random, job: Job, *, axis: str) -> tuple[Job, Cause]:
    rank = _any_rank(rng, job)
    return copied(job, rank, rng.randint(6_000_000, 15_000_000)), Cause(rank, "copy", axis)


def _more(rng: random.Random, job: Job, *, axis: str, named: str = "") -> tuple[Job, Cause]:
    """A rank has more kernels of that name, a third to a half more."""
    rank = _any_rank(rng, job)
    return loaded(job, rank, rng.choice((2, 3)), named), Cause(rank, "imbalance", axis)


def _any_rank(rng: random.Random, job: Job) -> int:
    return rng.randrange(len(job.programs))


def _graphs(rng: random.Random, seed: int) -> Job:
    return graphed(tp_job(rng, seed))


_BALANCED: dict[str, Make] = {
    "tp": tp_job,
    "tp_sequence_parallel": partial(tp_job, sequence_parallel=True),
    "tp_graphs": _graphs,
    "ddp": ddp_job,
    "ddp_two_hosts": partial(ddp_job, nodes=2),
    "ddp_runs_ahead": partial(ddp_job, logs_loss=False),
    "zero1": zero_job,
    "fsdp": fsdp_job,
    "fsdp_four_hosts": partial(fsdp_job, nodes=4),
    "cp_ring": cp_job,
    "ep": ep_job,
    "ep_two_streams": partial(ep_job, shared_expert=True),
    **{
        f"pp_{schedule.replace('-', '_')}": partial(pp_job, schedule=schedule)
        for schedule in SCHEDULES
    },
    "pp_two_hosts": partial(pp_job, schedule="1f1b", stages=4, nodes=2),
    "pp_without_boxes": partial(pp_job, schedule="1f1b", boxes=False),
    "pp_small_messages": partial(pp_job, schedule="gpipe", message_bytes=4096),
    "tp_pp_dp": mesh_job,
    "tp_pp_dp_gpipe": partial(mesh_job, schedule="gpipe"),
}

_PLANTED: dict[str, tuple[Make, Plant]] = {
    "tp_slow_rank": (tp_job, partial(_slow, axis="tp")),
    "tp_launch_bound": (tp_job, partial(_storm, axis="tp")),
    "ddp_slow_rank": (partial(ddp_job, nodes=2), partial(_slow, axis="dp_replicate")),
    "ddp_host_stall": (ddp_job, partial(_stall, axis="dp_replicate")),
    "ddp_host_stall_once": (ddp_job, partial(_stall, axis="dp_replicate", steps=(3,))),
    "ddp_slow_copy": (ddp_job, partial(_copy, axis="dp_replicate")),
    "fsdp_slow_rank": (partial(fsdp_job, nodes=4), partial(_slow, axis="dp_shard")),
    "fsdp_data_loading": (fsdp_job, partial(_loader, axis="dp_shard")),
    "cp_slow_rank": (cp_job, partial(_slow, axis="cp")),
    "ep_hot_expert": (ep_job, partial(_more, axis="ep", named=EXPERT)),
    "pp_slow_stage": (
        partial(pp_job, schedule="1f1b", stages=4, nodes=2),
        partial(_slow_stage, rank=2),
    ),
    "pp_uneven_layers": (
        partial(pp_job, schedule="1f1b", stages=4),
        partial(_more, axis="pp"),
    ),
    "pp_host_stall": (partial(pp_job, schedule="1f1b", stages=4), partial(_stall, axis="pp")),
    "pp_zb_h1_slow_stage": (
        partial(pp_job, schedule="zb-h1", stages=4),
        partial(_slow_stage, rank=1),
    ),
    "tp_pp_dp_slow_rank": (mesh_job, partial(_slow, axis="tp")),
    "tp_pp_dp_host_stall": (mesh_job, partial(_stall, axis="tp")),
    "tp_pp_dp_slow_rank_of_16": (
        partial(mesh_job, stages=4, nodes=4),
        partial(_slow, axis="tp"),
    ),
}


def _drawn(name: str, make: Make, plant: Plant | None, seed: int) -> Scenario:
    """The scenario of that name for a seed."""
    rng = random.Random(f"{name} {seed}")
    job = balanced = replace(make(rng, seed), name=name)
    cause = None
    if plant is not None:
        job, cause = plant(rng, balanced)
    hosts = list(dict.fromkeys(job.hosts))
    several = len(hosts) > 1
    return Scenario(
        job,
        seed,
        cause,
        balanced if plant else None,
        {host: rng.randint(-_OFFSET_NS, _OFFSET_NS) if several else 0 for host in hosts},
        {host: rng.uniform(-_DRIFT_PPM, _DRIFT_PPM) if several else 0.0 for host in hosts},
    )


SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    **{name: partial(_drawn, name, make, None) for name, make in _BALANCED.items()},
    **{name: partial(_drawn, name, make, plant) for name, (make, plant) in _PLANTED.items()},
}
