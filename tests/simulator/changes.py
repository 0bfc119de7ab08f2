"""What can befall a job: each function returns it with one thing changed, the noise as before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import count, groupby

from simulator.layers import LOADER
from simulator.program import (
    MAIN,
    Collective,
    Compute,
    Copy,
    Graph,
    Host,
    Instruction,
    Job,
    Messages,
    Record,
    StepBegin,
    Synchronize,
    WaitFor,
)

_ITEM = Synchronize(MAIN, "cudaStreamSynchronize", "aten::item")
_CAPTURED = Compute | Collective | Copy | Record | WaitFor

Change = Callable[[Instruction], tuple[Instruction, ...]]


def slowed(job: Job, rank: int, factor: float) -> Job:
    """The rank's compute kernels take so many times as long."""

    def change(done: Instruction) -> tuple[Instruction, ...]:
        if isinstance(done, Compute):
            return (replace(done, dur_ns=round(done.dur_ns * factor)),)
        return (done,)

    return _each(job, rank, change)


def loaded(job: Job, rank: int, every: int, named: str = "") -> Job:
    """The rank runs every so many-th kernel whose name begins so twice: it has more work."""
    met = count(1)

    def change(done: Instruction) -> tuple[Instruction, ...]:
        counts = isinstance(done, Compute) and done.name.startswith(named)
        return (done, done) if counts and next(met) % every == 0 else (done,)

    return _each(job, rank, change)


def copied(job: Job, rank: int, dur_ns: int) -> Job:
    """The rank's batch, for which computing waits, takes so long to copy in every step."""

    def change(done: Instruction) -> tuple[Instruction, ...]:
        return (replace(done, dur_ns=dur_ns),) if isinstance(done, Copy) else (done,)

    return _each(job, rank, change)


def loading(job: Job, rank: int, dur_ns: int) -> Job:
    """The rank's host waits so long for its batch in every step."""

    def change(done: Instruction) -> tuple[Instruction, ...]:
        if isinstance(done, Host) and done.name == LOADER:
            return (replace(done, dur_ns=dur_ns),)
        return (done,)

    return _each(job, rank, change)


def launch_bound(job: Job, rank: int, host_ns: int) -> Job:
    """The rank's host reads a value back after each kernel, then needs host_ns for the next."""

    def change(done: Instruction) -> tuple[Instruction, ...]:
        read = (_ITEM, Host(host_ns, "aten::_local_scalar_dense"))
        return (done, *read) if isinstance(done, Compute) else (done,)

    return _each(job, rank, change)


def stalled(job: Job, rank: int, dur_ns: int, steps: Collection[int], share: float) -> Job:
    """In these steps the rank's host reads a value back and is then busy for dur_ns, where so large
    a share of the step's kernels is launched. Without the read the queue would hide the stall."""
    places = set(_places(job.programs[rank], steps, share))
    at = count()

    def change(done: Instruction) -> tuple[Instruction, ...]:
        return (done, _ITEM, Host(dur_ns, "cudaMalloc")) if next(at) in places else (done,)

    return _each(job, rank, change)


def _places(
    program: tuple[Instruction, ...], steps: Collection[int], share: float
) -> Iterator[int]:
    """The index of the compute kernel behind so large a share of each step's."""
    begins = [at for at, done in enumerate(program) if isinstance(done, StepBegin)]
    for step, (begin, end) in enumerate(zip(begins, [*begins[1:], len(program)], strict=True), 1):
        kernels = [at for at in range(begin, end) if isinstance(program[at], Compute)]
        if step in steps:
            yield kernels[int(len(kernels) * share)]


def slow_group(job: Job, group: str, factor: float) -> Job:
    """The data of a group's collectives take so many times as long."""

    def change(done: Instruction) -> tuple[Instruction, ...]:
        if isinstance(done, Collective) and done.group == group:
            return (replace(done, transfer_ns=round(done.transfer_ns * factor)),)
        return (done,)

    return _all(job, lambda _: change)


def slow_pair(job: Job, ends: Collection[int], factor: float) -> Job:
    """Messages between two ranks take so many times as long, either way."""

    def between(rank: int) -> Change:
        def change(done: Instruction) -> tuple[Instruction, ...]:
            if not isinstance(done, Messages) or rank not in ends:
                return (done,)
            slow = tuple(
                replace(one, transfer_ns=round(one.transfer_ns * factor))
                if one.peer in ends
                else one
                for one in done.messages
            )
            return (replace(done, messages=slow),)

        return change

    return _all(job, between)


def gathering(job: Job, axis_group: Callable[[int], str], named: str, again: Collective) -> Job:
    """Behind each kernel of that name the rank's group gathers something that is not needed, and
    computing waits for it."""

    def behind(rank: int) -> Change:
        met = count()

        def change(done: Instruction) -> tuple[Instruction, ...]:
            if not isinstance(done, Compute) or done.name != named:
                return (done,)
            ready, over = (f"{word} {next(met)}" for word in ("redundant", "gathered"))
            call = replace(again, group=axis_group(rank))
            return (
                done, Record(ready), WaitFor(ready, call.stream), call,
                Record(over, call.stream), WaitFor(over),
            )  # fmt: skip

        return change

    return _all(job, behind)


def graphed(job: Job, at_least: int = 8) -> Job:
    """Runs of so many instructions that a graph can hold are captured and replayed."""

    def captured(program: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for _, run in groupby(program, lambda done: isinstance(done, _CAPTURED)):
            body = tuple(run)
            held = tuple(done for done in body if isinstance(done, _CAPTURED))
            if len(held) < at_least:
                yield from body
            else:
                yield Graph(held)

    return replace(job, programs=tuple(tuple(captured(program)) for program in job.programs))


def _each(job: Job, rank: int, change: Change) -> Job:
    program = _changed(job.programs[rank], change)
    return replace(job, programs=(*job.programs[:rank], program, *job.programs[rank + 1 :]))


def _all(job: Job, change_of: Callable[[int], Change]) -> Job:
    programs = (_changed(own, change_of(rank)) for rank, own in enumerate(job.programs))
    return replace(job, programs=tuple(programs))


def _changed(program: tuple[Instruction, ...], change: Change) -> tuple[Instruction, ...]:
    return tuple(new for done in program for new in change(done))
