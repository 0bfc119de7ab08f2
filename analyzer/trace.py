"""The nouns of a recording: what each reader yields and the split consumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Calls as they are found, one by one, whatever the backend -> Calls, in columns.


@dataclass(frozen=True, slots=True)
class Call:
    """One row of Calls before it is a column; the meanings are the columns'."""

    event: int
    op: str
    issued_ns: int = -1
    group_id: int = -1
    seq: int = -1
    dtype: str = ""
    peer: int = -1
    input_bytes: int = -1
    message_bytes: int = -1


def to_calls(rows: Sequence[Call]) -> Calls:
    """The rows as columns."""
    dtypes = tuple(dict.fromkeys(row.dtype for row in rows))
    code = {dtype: i for i, dtype in enumerate(dtypes)}
    return Calls(
        event=np.array([row.event for row in rows], dtype=np.int64),
        issued_ns=np.array([row.issued_ns for row in rows], dtype=np.int64),
        group_id=np.array([row.group_id for row in rows], dtype=np.int32),
        seq=np.array([row.seq for row in rows], dtype=np.int64),
        op=np.array([OP_CODE[row.op] for row in rows], dtype=np.uint8),
        dtype=np.array([code[row.dtype] for row in rows], dtype=np.int32),
        peer=np.array([row.peer for row in rows], dtype=np.int32),
        input_bytes=np.array([row.input_bytes for row in rows], dtype=np.int64),
        message_bytes=np.array([row.message_bytes for row in rows], dtype=np.int64),
        dtypes=dtypes,
    )


@dataclass(frozen=True, slots=True)
class FoundCalls:
    """The calls of a rank, and the groups that they are on."""

    calls: Calls
    groups: tuple[Group, ...]


Int32 = npt.NDArray[np.int32]

Int64 = npt.NDArray[np.int64]

UInt8 = npt.NDArray[np.uint8]

Bool = npt.NDArray[np.bool_]

OPS = (
    "unknown",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
    "send_recv",
)

OP_CODE = {op: code for code, op in enumerate(OPS)}


class Category(IntEnum):
    """What kind of event a trace says an event is."""

    OTHER = 0
    OP = 1
    ANNOTATION = 2
    RUNTIME = 3
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    GPU_ANNOTATION = 7
    PYTHON = 8


DEVICE_CATEGORIES = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)


@dataclass(frozen=True, slots=True)
class Lane:
    """Where events happen: a thread of the host, or a stream of a device (-1: none)."""

    pid: str
    tid: str
    device: int
    stream: int


@dataclass(frozen=True, slots=True)
class Events:
    """Everything with a duration that one rank recorded, sorted by start_ns.

    Columns of one length. Times are ns after the trace's t0; name_id and lane index names and
    lanes; correlation joins a launch with what it launched, -1 for none.
    """

    start_ns: Int64
    dur_ns: Int64
    category: UInt8
    name_id: Int32
    lane: Int32
    correlation: Int64
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.dur_ns

    def name_of(self, row: int) -> str:
        """The event's name."""
        return self.names[int(self.name_id[row])]

    def named(self, prefix: str) -> Bool:
        """Which events have a name that begins so."""
        return self.name_mask(tuple(name.startswith(prefix) for name in self.names))

    def name_mask(self, chosen: tuple[bool, ...]) -> Bool:
        """Which events have a chosen name, one choice a name."""
        return np.asarray(chosen, dtype=np.bool_)[self.name_id]

    def of(self, *categories: Category) -> Bool:
        """Which events are of one of these categories."""
        found = np.zeros(len(self), dtype=np.bool_)
        for category in categories:
            found |= self.category == category
        return found

    @property
    def on_device(self) -> bool:
        """Whether an accelerator recorded any of them."""
        return bool(self.of(*DEVICE_CATEGORIES).any())

    def launches_of(self, rows: Int64) -> Int64:
        """The row of the host's call that launched each of these, by correlation; -1 for none."""
        calls = np.flatnonzero(self.of(Category.RUNTIME) & (self.correlation >= 0))
        if not len(calls):
            return np.full(len(rows), -1, dtype=np.int64)
        calls = calls[np.argsort(self.correlation[calls], kind="stable")]
        wanted = self.correlation[rows]
        at = np.minimum(np.searchsorted(self.correlation[calls], wanted), len(calls) - 1)
        return np.where(self.correlation[calls[at]] == wanted, calls[at], -1)

    def launch_ns(self) -> Int64:
        """When the host launched each event, by correlation; -1 where no launch was recorded."""
        launches = self.launches_of(np.arange(len(self)))
        return np.where(launches >= 0, self.start_ns[launches], -1)


class EventKind(IntEnum):
    """What an event is to the split; FUSED computes and communicates at once."""

    OTHER = 0
    COMPUTE = 1
    FUSED = 2
    COMMUNICATION = 3
    COPY = 4


@dataclass(frozen=True, slots=True)
class EventKinds:
    """The kind of each event of a trace, decided once, by the rules it was read with.

    kind has an EventKind for each event; family indexes families for each name of the events, and
    counts where an event of that name computes.
    """

    kind: UInt8
    family: Int32
    families: tuple[str, ...]

    def of(self, *kinds: EventKind) -> Bool:
        """Which events are of one of these kinds."""
        found = np.zeros(len(self.kind), dtype=np.bool_)
        for kind in kinds:
            found |= self.kind == kind
        return found

    @property
    def computes(self) -> Bool:
        """Which events compute, fused kernels included."""
        return self.of(EventKind.COMPUTE, EventKind.FUSED)

    def family_of(self, name_id: int) -> str:
        """The family of compute of that name."""
        return self.families[int(self.family[name_id])]


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name in the job, its global ranks in group order, its description."""

    name: str
    ranks: tuple[int, ...]
    description: str


@dataclass(frozen=True, slots=True)
class Calls:
    """A row for each collective, send or recv of one rank, sorted by event; -1 is unknown.

    event indexes Events; issued_ns is when the host called it, on the clock of the events; group_id
    indexes the trace's groups; op indexes OPS and dtype dtypes; peer is a global rank. input_bytes
    is what the caller hands in, message_bytes follows nccl-tests (the full buffer).
    """

    event: Int64
    issued_ns: Int64
    group_id: Int32
    seq: Int64
    op: UInt8
    dtype: Int32
    peer: Int32
    input_bytes: Int64
    message_bytes: Int64
    dtypes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.event)

    @property
    def is_message(self) -> Bool:
        """Which rows are sends or receives."""
        return self.op >= OP_CODE["send"]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that the data cannot tell, for the report's warnings."""

    code: str
    message: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank of a recording. host and backend are "" where the trace does not say.

    kinds says what each event is. on_device: an accelerator recorded something; else the host is
    what worked.
    """

    source: Path
    rank: int
    world_size: int
    host: str
    device: str
    backend: str
    t0_unix_ns: int
    events: Events
    calls: Calls
    groups: tuple[Group, ...]
    kinds: EventKinds
    notes: tuple[Note, ...] = ()
    on_device: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_device", self.events.on_device)


@dataclass(frozen=True, slots=True)
class RankCalls:
    """What one rank called, by a log that knows calls but no events.

    calls.event is -1 throughout; calls.issued_ns counts from t0_unix_ns and is -1 where the log
    states no time. dur_ns has a row a call, -1 unknown. rank and world_size are -1 and host is ""
    where the log does not say; source is the file as people see it.
    """

    source: str
    rank: int
    world_size: int
    host: str
    t0_unix_ns: int
    calls: Calls
    dur_ns: Int64
    groups: tuple[Group, ...]
    notes: tuple[Note, ...] = ()


def wall_lead_ns(traces: Sequence[RankTrace]) -> Int64:
    """How much later than the earliest each trace begins, by the ranks' own wall clocks."""
    t0 = min(trace.t0_unix_ns for trace in traces)
    return np.array([trace.t0_unix_ns - t0 for trace in traces], dtype=np.int64)
