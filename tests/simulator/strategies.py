"""What the ranks of a job do under each way of parallel training but the pipeline."""

from __future__ import annotations

from simulator.layers import ATTENTION, LENGTHS, MLP, Work, half, job, layer, optimizer
from simulator.meshes import Fleet
from simulator.pipelines import attend_around
from simulator.program import Job
from simulator.writer import Writer

EXPERT = "grouped_gemm"
SIDE = "compute2"
"""The stream of an expert that all tokens share."""


def tensor_parallel(fleet: Fleet, work: Work, seed: int) -> Job:
    """Megatron's layers over an axis tp; with sequence_parallel gathered and scattered."""

    def body(writer: Writer) -> None:
        for kind in "FB":
            for _ in range(work.layers):
                layer(writer, work, kind)
        writer.block("tp", "all_reduce", 8)
        optimizer(writer, work)

    return job("tp_sp" if work.sequence_parallel else "tp", fleet, work, seed, body)


def ddp(fleet: Fleet, work: Work, seed: int, *, zero: bool = False, overlap: bool = True) -> Job:
    """Gradients of two layers are summed while the backward goes on; the optimizer waits for all.

    zero: each rank updates its share and broadcasts it, as ZeroRedundancyOptimizer does. Without
    overlap gradients are summed when the backward is over.
    """

    def body(writer: Writer) -> None:
        for _ in range(work.layers):
            layer(writer, work, "F")
        summed = []
        for _ in range(work.layers // 2):
            _two_backward(writer, work)
            summed += [_sum(writer, work)] if overlap else []
        if not overlap:
            summed = [_sum(writer, work) for _ in range(work.layers // 2)]
        for event in summed:
            writer.wait(event)
        optimizer(writer, work)
        for root in fleet.line(writer.rank, "dp_replicate") if zero else ():
            owned = work.weight_bytes * work.layers // fleet.world_size
            writer.block("dp_replicate", "broadcast", owned, root)

    return job("zero1" if zero else "ddp", fleet, work, seed, body)


def _two_backward(writer: Writer, work: Work) -> None:
    for _ in range(2):
        layer(writer, work, "B")


def _sum(writer: Writer, work: Work) -> str:
    return writer.launch("dp_replicate", "all_reduce", 2 * work.weight_bytes)


def fsdp(fleet: Fleet, work: Work, seed: int) -> Job:
    """Weights are gathered one layer ahead, forth and back; gradients scattered behind."""

    def gather(writer: Writer) -> str:
        return writer.launch("dp_shard", "all_gather", work.weight_bytes)

    def body(writer: Writer) -> None:
        ahead = gather(writer)
        for index in range(work.layers):
            writer.wait(ahead)
            ahead = gather(writer) if index < work.layers - 1 else ahead
            layer(writer, work, "F")
        for index in reversed(range(work.layers)):
            writer.wait(ahead)
            ahead = gather(writer) if index else ahead
            layer(writer, work, "B")
            scattered = writer.launch("dp_shard", "reduce_scatter", 2 * work.weight_bytes)
        writer.wait(scattered)
        optimizer(writer, work)

    return job("fsdp", fleet, work, seed, body)


def context_parallel(fleet: Fleet, work: Work, seed: int) -> Job:
    """Keys and values go around a ring while each rank attends to those that it has."""

    def body(writer: Writer) -> None:
        for _ in range(work.layers):
            attend_around(writer, work, "F")
            half(writer, work, MLP, "F")
        for _ in range(work.layers):
            half(writer, work, MLP, "B")
            attend_around(writer, work, "B")
        for _ in range(work.layers // 2):
            writer.block("cp", "all_reduce", work.weight_bytes)
        optimizer(writer, work)

    return job("cp", fleet, work, seed, body)


def expert_parallel(fleet: Fleet, work: Work, seed: int) -> Job:
    """Tokens go to their experts and come back; an expert that all share runs on a second stream.

    The mesh has an axis dp_replicate, along which the group ep lies beside.
    """

    def body(writer: Writer) -> None:
        for _ in range(work.layers):
            half(writer, work, ATTENTION, "F")
            _experts(writer, work, "F")
        for _ in range(work.layers):
            _experts(writer, work, "B")
            half(writer, work, ATTENTION, "B")
        writer.block("dp_replicate", "all_reduce", work.layers * work.weight_bytes)
        optimizer(writer, work)

    return job("ep", fleet, work, seed, body)


def _experts(writer: Writer, work: Work, kind: str) -> None:
    joined = _shared_expert(writer, work, kind) if work.shared_expert else None
    writer.block("ep", "all_to_all", work.activation_bytes)
    for _ in range(4):
        writer.compute(work.layer_ns / 8 * LENGTHS[kind], EXPERT)
    writer.block("ep", "all_to_all", work.activation_bytes)
    if joined:
        writer.wait(joined)


def _shared_expert(writer: Writer, work: Work, kind: str) -> str:
    writer.wait(writer.record(), SIDE)
    for _ in range(2):
        writer.compute(work.layer_ns / 16 * LENGTHS[kind], "gemm_shared_expert", SIDE)
    return writer.record(SIDE)
