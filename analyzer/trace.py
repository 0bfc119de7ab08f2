"""The types of a recording: what the readers return and the split consumes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct


class Call(Struct, frozen=True):
    """One row of Calls; the fields are those of its columns."""

    event: int
    op: str
    issued_ns: int = -1
    group_id: int = -1
    seq: int = -1
    dtype: str = ""
    peer: int = -1
    input_bytes: int = -1
    message_bytes: int = -1


def build_calls(rows: Sequence[Call]) -> Calls:
    """Converts rows to columns."""
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


class CallsWithGroups(Struct, frozen=True):
    """The calls of a rank, the process groups they refer to, and the ranks of the largest group
    whose size a call names, which may be of unknown ranks."""

    calls: Calls
    groups: tuple[Group, ...]
    largest: int = 0


Int32 = npt.NDArray[np.int32]

Int64 = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]

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

RANGE_CODE = np.arange(len(OPS))
"""By code of an op that of the op whose name gloo's worker gives to its range: a reduce_scatter
runs as an all_reduce. Of a call that no range is paired with, that is all that is known."""
RANGE_CODE[OP_CODE["reduce_scatter"]] = OP_CODE["all_reduce"]


class Category(IntEnum):
    """The kind of an event in the trace file.

    Members are integers, as in the column category of Events.

    Attributes:
        OTHER: Any kind without a member of its own.
        OP: An operator on the host such as aten::mm.
        ANNOTATION: A range that the host marked: record_function or NVTX.
        RUNTIME: A call of the device's runtime or driver, such as a kernel launch.
        KERNEL: A kernel on a device.
        MEMCPY: A copy on a device.
        MEMSET: A fill of memory on a device.
        GPU_ANNOTATION: A range of the host, at the time at which its kernels ran on the device.
        PYTHON: A Python function on the host.
        SYNC: A wait of a stream or of the host for the device, as Kineto records it.

    Examples:
        >>> from stepsplit.analyzer import Category, read_files
        >>> [file] = read_files("sample_traces/dp4/rank0_trace.json.gz")
        >>> sorted({Category(kind).name for kind in file.content.rows.events.category.tolist()})
        ['ANNOTATION', 'OP', 'OTHER']
    """

    OTHER = 0
    OP = 1
    ANNOTATION = 2
    RUNTIME = 3
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    GPU_ANNOTATION = 7
    PYTHON = 8
    SYNC = 9


DEVICE_CATEGORIES = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)

MAX_NAME_LENGTH = 8_192
"""Names of events are cut here, so that matching them against rules takes bounded time; the longest
in public traces has 5,123 characters."""

MODULE_MARK = "stepsplit::module "
"""Prefix of the ranges that name modules by their path: those of stepsplit's recorder, and on the
device those of kernels that say their module themselves."""

PYTHON_FUNCTION = re.compile(r"\A(?P<file>[^<>]+\.py)\((?P<line>\d+)\): (?P<function>.+)")
"""The name of a Python function's event: its file and line, and the function."""


COMPILES = re.compile(
    r" \(dynamo_timed\)$"
    r"|^(?:dynamo|entire_frame_compile|entire_backward_compile|backend_compile|inductor_compile)$"
)
"""The name of a range in which torch.compile compiles: Dynamo, AOTAutograd or Inductor. The lookup
of compiled code, and the calls of that code, have other names."""


class Lane(Struct, frozen=True):
    """Where an event ran: a host thread, or a stream of a device.

    Attributes:
        pid: Process id in the trace file.
        tid: Thread id in the trace file.
        device: Device number, -1 for the host.
        stream: Stream number, -1 for none.
    """

    pid: str
    tid: str
    device: int
    stream: int


@dataclass(frozen=True, slots=True)
class Events:
    """All events with a duration that one rank recorded, sorted by start_ns.

    Columns of shape (n,).

    Attributes:
        start_ns: Start in ns after the trace's t0_unix_ns.
        dur_ns: Duration in ns.
        category: A Category per event.
        name_id: Index into names.
        lane: Index into lanes.
        correlation: Joins a launch on the host with the event it launched, and an op with the range
            of its backward, by autograd's sequence number; -1 for none.
        names: The distinct names.
        lanes: The threads and streams.
    """

    start_ns: Int64
    dur_ns: Int64
    category: UInt8
    name_id: Int32
    lane: Int32
    correlation: Int64
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    _launches: LaunchCalls | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Int64:
        return self.start_ns + self.dur_ns

    def ends_of(self, rows: Int64 | Int32 | Bool) -> Int64:
        """The end in ns of the events in these rows, or where the mask is true."""
        ends: Int64 = self.start_ns[rows] + self.dur_ns[rows]
        return ends

    def name_of(self, row: int) -> str:
        """The name of the event in this row."""
        return self.names[int(self.name_id[row])]

    def match_prefix(self, *prefixes: str) -> Bool:
        """Whether each event's name begins with one of the prefixes; shape (n,)."""
        return self.name_mask(_match_prefix(self.names, prefixes))

    def match_names(self, pattern: re.Pattern[str]) -> Bool:
        """Whether the pattern is found in each event's name; shape (n,)."""
        return self.name_mask(_match_pattern(self.names, pattern))

    def name_mask(self, chosen: tuple[bool, ...]) -> Bool:
        """Whether each event's name is chosen; chosen has one item per name, shape (n,)."""
        if not any(chosen):
            return np.zeros(len(self), dtype=np.bool_)
        return np.asarray(chosen, dtype=np.bool_)[self.name_id]

    def is_category(self, *categories: Category) -> Bool:
        """Whether each event is of one of these categories; shape (n,)."""
        category = self.category
        # numpy compares with an int several times as fast as with a member of an enum
        is_chosen: Bool = category == int(categories[0])
        for other in categories[1:]:
            is_chosen |= category == int(other)
        return is_chosen

    @property
    def on_device(self) -> bool:
        """Whether there are events of an accelerator."""
        return bool(self.is_category(*DEVICE_CATEGORIES).any())

    @property
    def launches(self) -> LaunchCalls:
        """What launched each event, found once."""
        launches = self._launches
        if launches is None:
            launches = _find_launches(self)
            object.__setattr__(self, "_launches", launches)
        return launches

    def find_launches(self, rows: Int64) -> Int64:
        """The row of the runtime call that launched each of these rows; -1 for none."""
        return self.launches.call[rows].astype(np.int64)

    def find_launch_ns(self, rows: Int64) -> Int64:
        """The start in ns of the call that launched each of these rows; -1 if none was recorded."""
        launches = self.find_launches(rows)
        return np.where(launches >= 0, self.start_ns[launches], -1)

    def is_launched_before(self, rows: Int64) -> Bool:
        """Whether each of these device events was launched before the recording began.

        The host runs ahead of the device, so work of earlier steps still runs at the begin. Its
        launches have lower correlation numbers than all that were recorded.
        """
        own = self.correlation[rows]
        is_earlier: Bool = (own > 0) & (own < self.launches.first_correlation)
        return is_earlier


# Most ranks of a job have the same names.


@lru_cache(maxsize=128)
def _match_prefix(names: tuple[str, ...], prefixes: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(name.startswith(prefixes) for name in names)


@lru_cache(maxsize=128)
def _match_pattern(names: tuple[str, ...], pattern: re.Pattern[str]) -> tuple[bool, ...]:
    return tuple(pattern.search(name) is not None for name in names)


class LaunchCalls(Struct, frozen=True):
    """call has the row of the runtime call that launched each event, -1 for none; of the calls,
    first_correlation is the lowest correlation number above 0, 0 without any."""

    call: Int32
    first_correlation: int


def _find_launches(events: Events) -> LaunchCalls:
    calls = np.flatnonzero(events.is_category(Category.RUNTIME) & (events.correlation >= 0))
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    number = events.correlation[calls]
    call = np.full(len(events), -1, dtype=np.int32)
    if len(calls):
        # The numbers of ops are autograd's.
        launched = np.flatnonzero((events.correlation >= 0) & ~events.is_category(Category.OP))
        wanted = events.correlation[launched]
        at = np.minimum(np.searchsorted(number, wanted), len(calls) - 1)
        call[launched] = np.where(number[at] == wanted, calls[at], -1)
    above = number[number > 0]
    return LaunchCalls(call, int(above[0]) if len(above) else 0)


class EventKind(IntEnum):
    """How the split treats an event; FUSED kernels compute and communicate at once."""

    OTHER = 0
    COMPUTE = 1
    FUSED = 2
    COMMUNICATION = 3
    COPY = 4


@dataclass(frozen=True, slots=True)
class EventKinds:
    """The kind of each event of a trace, classified by the rules with which it was read.

    kind has an EventKind per event. family has an index into families per name of the events; it
    is valid for names of compute events.
    """

    kind: UInt8
    family: Int32
    families: tuple[str, ...]

    def is_kind(self, *kinds: EventKind) -> Bool:
        """Whether each event is of one of these kinds."""
        is_chosen = np.zeros(len(self.kind), dtype=np.bool_)
        for kind in kinds:
            is_chosen |= self.kind == int(kind)
        return is_chosen

    @property
    def computes(self) -> Bool:
        """Whether each event is compute, including fused kernels."""
        return self.is_kind(EventKind.COMPUTE, EventKind.FUSED)

    def find_family(self, name_id: int) -> str:
        """The kernel family of a name."""
        return self.families[int(self.family[name_id])]


KnownWork = Literal["shapes", "grids", ""]
"""What is known of the work of kernels: the shapes of their inputs, or their launch grids alone,
which a persistent kernel has for inputs of any size; "" if neither."""

GRID = "grid "
"""How the text of a launch grid begins, in Shapes."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that a trace recorded, which tell more work from slower work; sorted by event.

    For an op these are the shapes of its inputs (record_shapes), for a kernel those of the op that
    launched it, else its launch grid. An event without a row is of unknown shape.

    Attributes:
        event: Rows of the events, shape (n,).
        text_id: Index of their shapes in texts, shape (n,).
        texts: The distinct shapes, such as "[[8, 128], [128, 512]]" or "grid [64, 1, 1]"; inputs
            of less than 32 bits are named, as in "[[8, 128], [128, 512]] bf16".
    """

    event: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    text_id: Int32 = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.event)

    @property
    def known_work(self) -> KnownWork:
        """What is known of the work of most events with a row."""
        of_grid = np.array([text.startswith(GRID) for text in self.texts], dtype=np.bool_)
        if not len(self):
            return ""
        return "grids" if of_grid[self.text_id].mean() > 1 / 2 else "shapes"

    def find_ids(self, rows: Int64 | Int32) -> Int32:
        """The index of the shapes of each of these events in texts; -1 if unknown."""
        if not len(self):
            return np.full(len(rows), -1, dtype=np.int32)
        at = np.minimum(np.searchsorted(self.event, rows), len(self) - 1)
        return np.where(self.event[at] == rows, self.text_id[at], -1).astype(np.int32)


class Group(Struct, frozen=True):
    """A process group.

    Attributes:
        name: Its name in the job.
        ranks: Its global ranks in group order; () if unknown.
        description: Its description, "" if none.
    """

    name: str
    ranks: tuple[int, ...]
    description: str

    @property
    def is_default(self) -> bool:
        """Whether it is torch's group of all ranks, the first that a job makes."""
        return self.description == "default_pg" or self.name == "0"


class Calls(Struct, frozen=True):
    """The collectives, sends and receives of one rank, sorted by event; -1 is unknown.

    Columns of shape (n,).

    Attributes:
        event: Row of the event that carries out the call.
        issued_ns: When the host issued the call, in ns on the clock of the events.
        group_id: Index into the groups of the trace.
        seq: Sequence number on the group.
        op: Index into OPS.
        dtype: Index into dtypes.
        peer: Global rank of the peer of a send or receive.
        input_bytes: Size of the input buffer in bytes.
        message_bytes: Message size in bytes as nccl-tests defines it: the full buffer.
        dtypes: The distinct dtypes.
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
        """Whether each row is a send or a receive; shape (n,)."""
        return self.op >= OP_CODE["send"]


ALL_STREAMS = HOST = -1
"""In EventWaits: the host waited, or it waited for every stream."""


class EventWaits(Struct, frozen=True):
    """Waits whose event is known, sorted by correlation; columns of shape (n,).

    Everything that was launched on on_stream up to the correlation recorded had ended when the
    wait ended.

    Attributes:
        correlation: Correlation of the runtime call that waits.
        stream: The waiting stream, -1 for the host.
        on_stream: The stream that it waits for, -1 for all.
        recorded: Correlation of the call that recorded the event.
    """

    correlation: Int64
    stream: Int64
    on_stream: Int64
    recorded: Int64

    def __len__(self) -> int:
        return len(self.correlation)


def build_event_waits(rows: Sequence[tuple[int, int, int, int]]) -> EventWaits:
    """Converts rows of (correlation, stream, on_stream, recorded) to sorted columns."""
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    return EventWaits(*table.T)


NO_WAITS = build_event_waits(())


class Lack(StrEnum):
    """What a recording lacks, in the words in which it is said before all else."""

    FILE = "file truncated"
    ENTRIES = "entries damaged"
    RANKS = "ranks missing"
    STEPS = "steps missing"
    NO_DEVICE = "no device events"
    DEVICE_END = "device events end early"
    KERNELS = "kernels lost"
    CLOCK = "clock not aligned"
    MEMORY = "memory history overflowed"


class Note(Struct, frozen=True):
    """A limitation of the data, shown among the warnings of the report.

    Attributes:
        code: Stable identifier such as "rank_guessed".
        message: The text.
        rank: The rank concerned, None for the whole recording.
        lack: What the recording lacks, None if it lacks nothing.
    """

    code: str
    message: str
    rank: int | None = None
    lack: Lack | None = None


UNKNOWN_CATEGORIES = "unknown_categories"
"""Code of the note on a trace without events of torch.profiler's categories."""

RANKS_MISSING = "ranks_missing"
"""Code of the note on the ranks that are certainly missing from a recording."""

WORLD_SIZE_UNKNOWN = "world_size_unknown"
"""Code of the note on a recording that does not say how many ranks the job has."""


class ProbedClock(Struct, frozen=True):
    """The offset of a host's clock from rank 0's, from datagrams; exact to within_ns either way."""

    offset_ns: int
    within_ns: int


class RankTrace(Struct, frozen=True, dict=True):
    """The trace of one rank.

    Attributes:
        source: The file.
        rank: Global rank.
        world_size: Number of ranks of the job.
        host: Host name, "" if unknown.
        device: Name of the accelerator, "" if unknown.
        backend: Communication backend such as "nccl", "" if unknown.
        t0_unix_ns: Unix time in ns from which the times of the events count.
        events: The events.
        calls: The collectives, sends and receives.
        groups: The process groups of the calls.
        kinds: The kind of each event.
        notes: Limitations of the trace.
        device_stopped_step: The step in which the profiler stopped to record the device, as its
            buffers were full; None if it did not.
        end_step: The first step that the recorder did not record as a whole, because the job ended
            in it; None if unknown.
        shapes: The input shapes or launch grids of the events, where they were recorded.
        waits: The waits for events that the trace identifies.
        visible_devices: Number of accelerators that the process saw on its node, 0 if unknown.
        probed_clock: How far its host's clock is from that of rank 0's host, if that was probed.
        role: What the rank does in a job of several roles, "" if it is of none.
        states_size: Whether the trace says the number of ranks; otherwise world_size is the least
            that its rank and its groups allow.
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
    device_stopped_step: int | None = None
    end_step: int | None = None
    shapes: Shapes = Shapes()
    waits: EventWaits = NO_WAITS
    visible_devices: int = 0
    probed_clock: ProbedClock | None = None
    role: str = ""
    states_size: bool = True

    @cached_property
    def on_device(self) -> bool:
        """Whether there are events of an accelerator; otherwise it is a CPU run."""
        return self.events.on_device


class RankCalls(Struct, frozen=True):
    """The calls of one rank from a log that contains calls but no events.

    Attributes:
        source: The file, as shown to the user.
        rank: Global rank, -1 if unknown.
        world_size: Number of ranks of the job, -1 if unknown.
        host: Host name, "" if unknown.
        t0_unix_ns: Unix time in ns from which calls.issued_ns counts.
        calls: The calls; calls.event is always -1, calls.issued_ns is -1 if there are no times.
        dur_ns: Duration of each call in ns, -1 if unknown.
        groups: The process groups of the calls.
        notes: Limitations of the log.
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


def find_earlier_calls(trace: RankTrace) -> Bool:
    """Which calls are of steps before the recording: their launches, and with them their group and
    size, were not recorded."""
    return trace.events.is_launched_before(trace.calls.event)


def find_timeless(events: Events) -> Bool:
    """Which events ran on a device at an unknown time: the reader left them without a category,
    and no other such event has a correlation."""
    timeless: Bool = (events.correlation >= 0) & (events.category == int(Category.OTHER))
    return timeless


def compute_start_offsets_ns(traces: Sequence[RankTrace]) -> Int64:
    """For each trace, its start after the earliest trace in ns, by the ranks' wall clocks."""
    t0 = min(trace.t0_unix_ns for trace in traces)
    return np.array([trace.t0_unix_ns - t0 for trace in traces], dtype=np.int64)
