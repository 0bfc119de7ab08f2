"""Layouts, and one or two causes planted in each: the jobs of the counterfactual benchmark."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from .jobs import (
    RANKS_PER_HOST,
    Cause,
    ExpertLoad,
    ExtraKernels,
    HostStall,
    Job,
    MoreWork,
    SlowKernel,
    SlowLink,
    SlowRank,
    Throttling,
)
from .kineto import TraceStyle

LAYOUTS = {
    job.name: job
    for job in (
        Job("tp4_pp4", tp=4, pp=4),
        Job("tp4_pp4_dp2", tp=4, pp=4, dp=2, whole_kernels=True),
        Job("tp4_pp4_dp4", tp=4, pp=4, dp=4, whole_kernels=True),
        Job("tp2_pp2_dp8", tp=2, pp=2, dp=8, layer_ns=500_000, whole_kernels=True),
        Job("dp16", dp=16, layers=4, layer_ns=250_000),
        Job("tp8_dp2", tp=8, dp=2),
        Job("fsdp8", dp=8, fsdp=True, microbatches=1, layers=24, layer_ns=400_000),
        Job("fsdp16", dp=16, fsdp=True, microbatches=1, layers=24, layer_ns=400_000),
        Job("ep8_dp16", dp=16, ep=8),
        Job("cp4_dp4_ring", cp=4, dp=4, microbatches=8),
        Job("cp4_dp4_gather", cp=4, dp=4, cp_ring=False, microbatches=8),
        Job("tp8_pp8_dp4", tp=8, pp=8, dp=4, layers=1, layer_ns=900_000, whole_kernels=True),
    )
}

CLEAN = "clean"


@dataclass(frozen=True)
class Planted:
    """A job with causes; without them it is clean."""

    layout: str
    cause: str
    job: Job
    style: TraceStyle


def list_causes(layout: str) -> list[str]:
    """The causes that can be planted in a layout, and CLEAN."""
    job = LAYOUTS[layout]
    causes = ["slow_rank_1.1", "slow_rank_1.3", "host_stall"]
    if job.microbatches > 1:
        causes.append("hidden_host_stall")
    links = _list_link_axes(job)
    causes += [f"slow_link_{axis}" for axis in links]
    causes += [f"slow_links_{axis}" for axis in links if _has_messages(job, axis)]
    causes += ["two_slow_ranks", "throttling"]
    causes += ["extra_kernels_once", "slow_kernel_once", "more_work"]
    if links:
        causes.append("slow_rank_and_link")
    if job.ep > 1:
        causes += ["expert_load_1.1", "expert_load_1.5"]
    if job.world_size // job.pp > RANKS_PER_HOST and job.world_size >= 64:
        causes.append("slow_host")
    return [*causes, CLEAN]


def _list_link_axes(job: Job) -> list[str]:
    """Axes with several groups: a link is only slow compared with others."""
    axes = ["tp", "cp", "pp", "ep", "dp"]
    return [
        axis
        for axis in axes
        if len(job.groups.get(axis, ())) > 1 and len(job.groups[axis][0].ranks) > 1
    ]


def _has_messages(job: Job, axis: str) -> bool:
    """The axis sends messages between pairs of ranks."""
    return axis == "pp" or (axis == "cp" and job.cp_ring)


@dataclass(frozen=True)
class _Script:
    """What differs between training scripts and between versions of the profiler."""

    style: TraceStyle
    end_of_step: str = "item"
    noise: float = 0.005
    messages_on_world: bool = False
    reduce_norm: bool = False
    touching: bool = False


_SCRIPTS = (
    _Script(TraceStyle(events="none")),
    _Script(TraceStyle(), "device", 0.02, messages_on_world=True),
    _Script(TraceStyle(events="cuda_sync"), "none"),
    _Script(TraceStyle("none", sequence=False), "item", 0.02, reduce_norm=True, touching=True),
    _Script(
        TraceStyle(whole_microseconds=True, late_ends_ns=3_000), "device", messages_on_world=True
    ),
    _Script(TraceStyle("none"), "none", 0.02, touching=True),
)


def plant(layout: str, cause: str, seed: int) -> Planted:
    """The job of a layout with a cause; seeds 1 to 6 differ in script and profiler too."""
    script = _SCRIPTS[(seed - 1) % len(_SCRIPTS)]
    runs_ahead = script.end_of_step == "none"
    job = replace(
        LAYOUTS[layout],
        seed=seed,
        noise=script.noise,
        end_of_step=script.end_of_step,
        warmup=2 if runs_ahead else 1,
        steps=4 if runs_ahead else 3,
        messages_on_world=script.messages_on_world,
        reduce_norm=script.reduce_norm,
        touching=script.touching,
        synchronize_microbatches=cause == "host_stall",
    )
    rank = 5 if seed == 1 else random.Random(f"{layout} {seed}").randrange(job.world_size)
    causes = _choose_causes(job, cause, rank)
    return Planted(layout, cause, replace(job, causes=causes), script.style)


def _choose_causes(job: Job, cause: str, rank: int) -> tuple[Cause, ...]:
    if cause == CLEAN:
        return ()
    if cause.startswith("slow_rank_1"):
        return (SlowRank(rank, float(cause.removeprefix("slow_rank_"))),)
    if cause.startswith("expert_load_"):
        return (ExpertLoad(rank, float(cause.removeprefix("expert_load_"))),)
    if cause.endswith("host_stall"):
        return (HostStall(rank),)
    if cause.startswith("slow_links_"):
        return (SlowLink(cause.removeprefix("slow_links_"), rank),)
    if cause.startswith("slow_link_"):
        axis = cause.removeprefix("slow_link_")
        ranks = job.group(axis, rank).ranks
        place = ranks.index(rank)
        neighbor = ranks[place + 1] if place + 1 < len(ranks) else ranks[place - 1]
        return (SlowLink(axis, rank, peer=neighbor if _has_messages(job, axis) else None),)
    if cause == "throttling":
        return (Throttling(rank, 1.05, 1.35),)
    if cause == "more_work":
        return (MoreWork(rank, 1.25, ("first", "second", "all")[job.seed % 3]),)
    if cause.endswith("_once"):
        # A third of the compute of a step, in one of them; at another place for each seed.
        extra_ns = job.microbatches * job.layers * job.layer_ns
        place = ("begin", "middle", "end")[job.seed % 3]
        if cause == "extra_kernels_once":
            return (ExtraKernels(rank, extra_ns, place, job.seed % job.steps),)
        return (SlowKernel(rank, extra_ns, job.seed % job.steps, place),)
    if cause == "two_slow_ranks":
        return (SlowRank(rank, 1.3), SlowRank(_find_peer(job, rank), 1.3))
    if cause == "slow_rank_and_link":  # of the same group in turn with those of another
        axis = _list_link_axes(job)[0]
        other = next(group for group in job.groups[axis] if rank not in group.ranks)
        return (SlowRank(rank, 1.2), SlowLink(axis, rank if job.seed % 2 else other.ranks[0]))
    if cause == "slow_host":
        first = rank // RANKS_PER_HOST * RANKS_PER_HOST
        return tuple(SlowRank(each, 1.15) for each in range(first, first + RANKS_PER_HOST))
    raise ValueError(cause)


def _find_peer(job: Job, rank: int) -> int:
    """A rank of the same stage, in another replica if there is one."""
    ranks = job.group("dp" if job.dp > 1 else "tp", rank).ranks
    return ranks[(ranks.index(rank) + len(ranks) // 2) % len(ranks)]
