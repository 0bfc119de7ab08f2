"""What each rank's host does, one instruction after another: the simulator's input.

A kernel instruction only queues work on a stream; the host goes on as soon as the launch is made.
Nothing here says when anything happens: that is for the engine to find out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAIN, COMM = "compute", "comm"
"""The usual streams: of computing, and of communication."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Queues a kernel that computes for dur_ns once it runs."""

    dur_ns: int
    name: str = "gemm"
    stream: str = MAIN


@dataclass(frozen=True, slots=True)
class Copy:
    """Queues a memcpy (or a memset) of dur_ns."""

    dur_ns: int
    stream: str = "copy"
    kind: str = "Memcpy HtoD"


@dataclass(frozen=True, slots=True)
class Collective:
    """Queues one collective kernel of a group.

    transfer_ns is how long its data takes on free links. op is a name of DEFINITIONS (all_reduce,
    all_gather, reduce_scatter, all_to_all, broadcast, reduce); root is a global rank where one is
    needed. message_bytes counts as nccl-tests do.
    """

    group: str
    op: str
    message_bytes: int
    transfer_ns: int
    stream: str = COMM
    root: int = -1


@dataclass(frozen=True, slots=True)
class Message:
    """One send to, or receive from, the global rank peer, within a batch."""

    op: str
    peer: int
    message_bytes: int
    transfer_ns: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Queues one kernel that carries out a batch of messages of a group, a single one included."""

    group: str
    messages: tuple[Message, ...]
    stream: str = COMM


@dataclass(frozen=True, slots=True)
class Record:
    """Marks this place of a stream, as cudaEventRecord does; names are unique within a rank."""

    event: str
    stream: str = MAIN


@dataclass(frozen=True, slots=True)
class WaitFor:
    """What is queued on the stream from here on starts only after the event was reached."""

    event: str
    stream: str = MAIN


@dataclass(frozen=True, slots=True)
class Host:
    """The host itself is busy for dur_ns and launches nothing; name is what the trace shows of it.

    Names that traces know: "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
    "cudaMalloc", "aten::item", or any op.
    """

    dur_ns: int
    name: str = "aten::empty"


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits until a stream (None: the whole device) has done all that is queued on it.

    call is the runtime call of the trace; op the op around it, such as aten::item, or "".
    """

    stream: str | None = None
    call: str = "cudaDeviceSynchronize"
    op: str = ""


@dataclass(frozen=True, slots=True)
class StepBegin:
    """A ProfilerStep begins on the host; the one before ends."""

    step: int


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The last ProfilerStep ends."""


@dataclass(frozen=True, slots=True)
class Begin:
    """An annotation begins: on the host, and on the device around what is launched within it.

    Boxes of a pipeline are named as torch's schedules do: PP:<stage><F|B|I|W><microbatch>.
    """

    name: str


@dataclass(frozen=True, slots=True)
class End:
    """The innermost annotation ends."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured graph that is replayed: its kernels run in order on their streams, one launch."""

    body: tuple[Compute | Collective | Copy | Record | WaitFor, ...]


Instruction = (
    Compute | Copy | Collective | Messages | Record | WaitFor | Host | Synchronize
    | StepBegin | StepEnd | Begin | End | Graph
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A process group: its name in the job, its global ranks in order, its description."""

    name: str
    ranks: tuple[int, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """A whole training job. mesh holds (axis, size), outermost first; hosts one name a rank.

    stage_of is each rank's pp coordinate, all 0 without a pipeline. launch_ns is what one launch
    costs the host, queue_depth how many kernels a stream's queue may hold before launches block.
    """

    name: str
    programs: tuple[tuple[Instruction, ...], ...]
    groups: tuple[ProcessGroup, ...]
    mesh: tuple[tuple[str, int], ...]
    hosts: tuple[str, ...]
    stage_of: tuple[int, ...]
    launch_ns: int = 4_000
    queue_depth: int = 1024
    schedule: str = ""
    microbatches: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    """Why others wait, as planted: the rank, and the word of DEFINITIONS for its cause.

    compute, host, copy, imbalance, transfer. axis is the axis on which others wait for it first.
    """

    rank: int
    cause: str
    axis: str | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job, what was planted in it, and the same job without that (the counterfactual).

    offset_ns and drift_ppm are of each host's clock against true time, by the host's name.
    """

    job: Job
    seed: int
    cause: Cause | None = None
    without: Job | None = None
    offset_ns: dict[str, int] = field(default_factory=dict)
    drift_ppm: dict[str, float] = field(default_factory=dict)
