"""What truly happened in a simulated job: every call, kernel and transfer, on one true clock."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.program import Collective, Compute, Copy, Graph, Host, Job, Messages, Synchronize

DeviceWork = Compute | Copy | Collective | Messages
HostWork = Compute | Copy | Collective | Messages | Graph | Host | Synchronize


@dataclass(frozen=True, slots=True)
class Moved:
    """When the data of a collective or a message moved, as one rank saw it.

    last is the global rank that it waited for until start_ns; the rank itself where it waited for
    none.
    """

    start_ns: int
    end_ns: int
    last: int


@dataclass(frozen=True, slots=True)
class Ran:
    """One device event. launch indexes the host's calls; moves has one entry a message.

    seq numbers the collectives of a group from 0 in the order of their calls, -1 for other work.
    """

    work: DeviceWork
    launch: int
    start_ns: int
    end_ns: int
    seq: int
    moves: tuple[Moved, ...]


@dataclass(frozen=True, slots=True)
class HostCall:
    """One thing that the host did; a launch lasts longer while the stream's queue is full."""

    work: HostWork
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A step or an annotation on the host, around its calls [first_call, after_call).

    step is the number of a ProfilerStep, None for an annotation.
    """

    name: str
    step: int | None
    start_ns: int
    end_ns: int
    first_call: int
    after_call: int


@dataclass(frozen=True, slots=True)
class RankRun:
    """One rank: calls in order, device events in the order of their starts, marks by their ends."""

    host: tuple[HostCall, ...]
    device: tuple[Ran, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A job as it ran; ranks has one entry a rank."""

    job: Job
    ranks: tuple[RankRun, ...]
