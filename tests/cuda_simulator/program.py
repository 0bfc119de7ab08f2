"""What a training process asks of its GPU, in the order of its host threads.

Nothing here has a time of its own but durations; `machine` finds when each instruction runs.
"""

from __future__ import annotations

from dataclasses import dataclass

MAIN_THREAD = 0
AUTOGRAD_THREAD = 1


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: one NCCL communicator."""

    name: str
    description: str
    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One send or receive inside a kernel.

    The n-th send from src to dst on a channel meets the n-th receive of the same three.
    """

    src: int
    dst: int
    channel: str
    transfer_ns: int


@dataclass(frozen=True, slots=True)
class Call:
    """The communication of a kernel.

    A collective has a sequence number and meets the same number of the group's other members; a
    point-to-point kernel has messages instead.
    """

    op: str
    group: Group
    in_nelems: int
    out_nelems: int
    transfer_ns: int = 0
    sequence: int | None = None
    messages: tuple[Message, ...] = ()
    peer: int | None = None
    phase: str = ""
    """The kernels of one phase of a protocol meet each other only."""
    role: str = "meet"
    """meet: data moves from the start of the last member's kernel on. post: the kernel sends and
    does not wait. flag: as post, but it moves no data. receive: it ends this call's transfer after
    all members' posts began."""
    described: bool = True
    """The trace has the call's arguments."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch: of compute (duration_ns) or of communication (call). Without a name it is a stream
    memory operation, which no trace has."""

    name: str
    op: str
    stream: int
    duration_ns: int = 0
    call: Call | None = None
    host_ns: int = 8_000
    thread: int = MAIN_THREAD
    end_jitter_ns: int = 0
    """How much later this member's kernel ends than the data arrived."""
    label: str = ""
    """The recorder's range around the launch, where it annotates calls of libraries."""
    blocks: int = 132
    """The size of its launch grid."""
    copied_bytes: int = 4
    """Of a copy."""
    copies: int = 1
    """So many copies in a row, each with a launch of its own."""
    launches: int = 1
    """So many kernels, from this one on, are launched in its op."""
    batched: bool = False
    """The call that launched the kernel before it launched this one, too."""


@dataclass(frozen=True, slots=True)
class RecordEvent:
    event: int
    stream: int
    thread: int = MAIN_THREAD


@dataclass(frozen=True, slots=True)
class WaitEvent:
    """What is launched on the stream later starts after the event."""

    event: int
    stream: int
    thread: int = MAIN_THREAD


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits until a stream (None: the device) has nothing left to run."""

    stream: int | None = None
    thread: int = MAIN_THREAD
    silent: bool = False
    """The host spins on its memory: the trace shows no call."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """The host is busy and launches nothing."""

    duration_ns: int


@dataclass(frozen=True, slots=True)
class BeginStep:
    number: int


Instruction = Kernel | RecordEvent | WaitEvent | Synchronize | HostWork | BeginStep
