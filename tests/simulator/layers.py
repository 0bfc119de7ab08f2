"""What every step of every job has: a batch, layers, an optimizer, the frame around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.meshes import Fleet
from simulator.program import (
    MAIN,
    Begin,
    Copy,
    End,
    Host,
    Instruction,
    Job,
    StepBegin,
    StepEnd,
    Synchronize,
)
from simulator.writer import Writer

ATTENTION = ("rms_norm", "gemm_qkv", "gemm_out", "flash_attention")
MLP = ("rms_norm", "silu_and_mul", "gemm_fc1", "gemm_fc2")
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
LENGTHS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""How long each kind of work on a layer takes, in forwards."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does in a step.

    layer_ns is the forward of one layer for one microbatch, of kernels kernels in each half;
    activation_bytes is what a layer hands on, weight_bytes its gradients. logs_loss: each step
    ends with loss.item(), so that the host never runs ahead into the next.
    """

    layer_ns: int
    layers: int
    activation_bytes: int
    weight_bytes: int
    steps: int = 4
    kernels: int = 4
    logs_loss: bool = True
    sequence_parallel: bool = False
    shared_expert: bool = False


Body = Callable[[Writer], None]
"""Writes one step, from the batch to the last weight."""


def job(
    name: str,
    fleet: Fleet,
    work: Work,
    seed: int,
    body: Body,
    schedule: str = "",
    microbatches: int = 0,
) -> Job:
    """The job whose ranks all do body once a step."""
    programs = tuple(_program(Writer(fleet, r, seed), work, body) for r in range(fleet.world_size))
    return Job(
        name,
        programs,
        fleet.groups,
        fleet.mesh,
        fleet.hosts,
        fleet.stage_of,
        schedule=schedule,
        microbatches=microbatches,
    )


def _program(writer: Writer, work: Work, body: Body) -> tuple[Instruction, ...]:
    writer.put(Synchronize())
    for step in range(1, work.steps + 1):
        writer.put(StepBegin(step), Host(60_000, LOADER), Copy(40_000))
        writer.wait(writer.record("copy"))
        body(writer)
        if work.logs_loss:
            writer.put(Synchronize(MAIN, "cudaStreamSynchronize", "aten::item"))
    writer.put(StepEnd())
    return tuple(writer.program)


def layer(writer: Writer, work: Work, kind: str) -> None:
    """One layer of one microbatch: F, B, or its halves I and W. Ranks of a tp group share it and
    add up what each half yields; weight gradients need no communication."""
    shared = "tp" in writer.fleet.axes and kind != "W"
    for names in (ATTENTION, MLP) if kind == "F" else (MLP, ATTENTION):
        if shared and work.sequence_parallel:
            writer.block("tp", "all_gather", work.activation_bytes)
        half(writer, work, names, kind)
        if shared:
            op = "reduce_scatter" if work.sequence_parallel else "all_reduce"
            writer.block("tp", op, work.activation_bytes)


def half(writer: Writer, work: Work, names: tuple[str, ...], kind: str, share: float = 0.5) -> None:
    """The kernels of half a layer, or of another share of it."""
    suffix = "" if kind == "F" else "_bwd"
    named = [name + suffix for name in names[-work.kernels :]]
    writer.kernels(work.layer_ns * share * LENGTHS[kind], named)


def optimizer(writer: Writer, work: Work) -> None:
    """Adam over all weights of the rank."""
    writer.put(Begin("Optimizer.step#AdamW.step"))
    for _ in range(3):
        writer.compute(work.layer_ns * work.layers / 30, "multi_tensor_adam")
    writer.put(End())
