"""Balanced jobs of each strategy, their sizes drawn at random."""

from __future__ import annotations

import random
from dataclasses import replace

from simulator.layers import Work
from simulator.meshes import Fleet, Mesh
from simulator.pipelines import pipeline
from simulator.plans import Pipeline
from simulator.program import Job
from simulator.strategies import context_parallel, ddp, expert_parallel, fsdp, tensor_parallel

_BYTES_PER_NS = 200
_KERNELS = 200


def tp_job(rng: random.Random, seed: int, *, sequence_parallel: bool = False) -> Job:
    """Two to eight ranks of one host that share every layer."""
    fleet = _fleet(rng, (("tp", rng.choice((2, 4, 8))),))
    work = _work(rng, rng.randint(6, 10))
    return tensor_parallel(fleet, replace(work, sequence_parallel=sequence_parallel), seed)


def ddp_job(rng: random.Random, seed: int, *, nodes: int = 1, logs_loss: bool = True) -> Job:
    """Four or eight replicas."""
    fleet = _fleet(rng, (("dp_replicate", rng.choice((4, 8))),), nodes=nodes)
    work = _work(rng, 2 * rng.randint(4, 8), bytes_per_ns=_BYTES_PER_NS // (5 if nodes > 1 else 1))
    return ddp(fleet, replace(work, logs_loss=logs_loss), seed)


def zero_job(rng: random.Random, seed: int) -> Job:
    """Four replicas whose optimizer states are shared out."""
    return ddp(_fleet(rng, (("dp_replicate", 4),)), _work(rng, 8), seed, zero=True)


def fsdp_job(rng: random.Random, seed: int, *, nodes: int = 1) -> Job:
    """Four or eight ranks that share all weights out."""
    fleet = replace(_fleet(rng, (("dp_shard", rng.choice((4, 8))),), nodes=nodes), naming="mesh")
    bytes_per_ns = _BYTES_PER_NS // (5 if nodes > 1 else 1)
    return fsdp(fleet, _work(rng, rng.randint(6, 16), bytes_per_ns=bytes_per_ns), seed)


def cp_job(rng: random.Random, seed: int) -> Job:
    """A ring of two to eight ranks."""
    fleet = _fleet(rng, (("cp", rng.choice((2, 4, 8))),))
    return context_parallel(fleet, _work(rng, 2 * rng.randint(2, 3)), seed)


def ep_job(rng: random.Random, seed: int, *, shared_expert: bool = False) -> Job:
    """Four or eight ranks, each with experts of its own."""
    fleet = _fleet(rng, (("dp_replicate", rng.choice((4, 8))),), ("ep",))
    return expert_parallel(
        fleet, replace(_work(rng, rng.randint(4, 8)), shared_expert=shared_expert), seed
    )


def pp_job(
    rng: random.Random,
    seed: int,
    *,
    schedule: str,
    stages: int = 0,
    nodes: int = 1,
    boxes: bool = True,
    message_bytes: int = 0,
) -> Job:
    """Two or four stages by default; message_bytes is the size of its messages, 0 the usual."""
    stages = stages or rng.choice((2, 4))
    chunks = rng.choice((2, 3)) if schedule == "interleaved" else 1
    how = Pipeline(schedule, stages * rng.choice((2, 3)), chunks, boxes)
    share = 1 / stages if schedule == "naive" else 0.8
    work = _work(rng, rng.randint(1, 2), _passes(how), share=share, bytes_per_ns=40)
    work = replace(work, activation_bytes=message_bytes or work.activation_bytes)
    return pipeline(_fleet(rng, (("pp", stages),), nodes=nodes), work, seed, how)


def _passes(how: Pipeline) -> int:
    """How often a rank's layers are passed in a step, in forwards and backwards."""
    held = {"interleaved": how.chunks, "zb-v": 2, "dualpipe-v": 2}
    return how.microbatches * held.get(how.schedule, 1)


def mesh_job(
    rng: random.Random, seed: int, *, schedule: str = "1f1b", nodes: int = 2, stages: int = 2
) -> Job:
    """tp, pp and dp at once."""
    fleet = _fleet(rng, (("pp", stages), ("dp_replicate", 2), ("tp", 2)), ("mp",), nodes=nodes)
    how = Pipeline(schedule, stages * rng.choice((2, 3)), boxes=rng.random() < 0.5)
    return pipeline(fleet, _work(rng, 2, how.microbatches, share=0.6), seed, how)


def _fleet(
    rng: random.Random, mesh: Mesh, beside: tuple[str, ...] = (), *, nodes: int = 1
) -> Fleet:
    return Fleet(mesh, beside, rng.choice(("megatron", "mesh")), nodes)


def _work(
    rng: random.Random,
    layers: int,
    passes: int = 1,
    *,
    share: float = 1.0,
    bytes_per_ns: int = _BYTES_PER_NS,
) -> Work:
    """Steps of share times 45 to 85 ms of computing; messages and gradients in proportion."""
    layer_ns = round(share * rng.randint(45_000_000, 85_000_000) / (3 * layers * passes))
    return Work(
        layer_ns,
        layers,
        activation_bytes=round(layer_ns * bytes_per_ns * rng.uniform(0.04, 0.1)),
        weight_bytes=round(layer_ns * bytes_per_ns * rng.uniform(0.3, 0.6)),
        kernels=max(1, min(4, _KERNELS // (5 * layers * passes))),
    )
