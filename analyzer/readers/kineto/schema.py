"""The schema of Kineto's JSON: entries, their arguments, timestamps."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct, field

from stepsplit.analyzer.trace import Group, Int64

# Types of a trace's JSON: entries, their arguments, and the fields around the array.

Wide = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Narrow = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""Numbers that fit into a column; larger ones are ignored."""

MAX_US = 2**61 // 1000
"""73 years: the sum of a time and a duration up to this fits into 64 bits of ns."""

_Time = Annotated[int, Meta(ge=0, le=MAX_US * 1000)]

_Count = Annotated[int, Meta(ge=-1, le=1 << 20)]

NO_ARGS = Raw(b"{}")

MISSING = Raw(b"null")

_MAX_RANKS = 1 << 20

_OTHER_PHASES = "BEiIstfbenNODPSTFpRcvVaAC(),"

_T = TypeVar("_T")

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for invalid text."""


class Complete(Struct, tag_field="ph", tag="X", gc=False):
    """An event with a start and a duration; args are decoded on demand."""

    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: int | float | Decimal | None = None
    dur: int | float | Decimal = 0
    args: Raw = NO_ARGS


class TrackMetadata(Struct, tag_field="ph", tag="M", gc=False):
    """A name or property of a process or thread; any value may be of any type."""

    name: Raw = MISSING
    pid: Raw = MISSING
    tid: Raw = MISSING
    args: Raw = NO_ARGS


class EntryTimes(Struct, tag_field="ph", tag="X", gc=False):
    """The times of an event, with all digits."""

    ts: Decimal | None = None
    dur: Decimal = Decimal(0)


def _define_other(phase: str) -> type[Struct]:
    return msgspec.defstruct(f"Phase{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)


Entry = Struct
"""An entry of traceEvents: Complete, TrackMetadata, or another phase, which is only counted."""

_OTHERS: Any = functools.reduce(operator.or_, map(_define_other, _OTHER_PHASES))


def get_phase(entry: Entry) -> str:
    """The phase of the entry, such as "X" for a complete event."""
    return str(entry.__struct_config__.tag)


ANY_ENTRY = Complete | TrackMetadata | _OTHERS

ANY_TIMES = EntryTimes | _define_other("M") | _OTHERS


class DeviceArgs(Struct, gc=False):
    """The arguments that identify a launch or a device event, and the launch grid of a kernel."""

    correlation: Wide = -1
    stream: Narrow = -1
    device: Narrow = -1
    collective: Raw = field(default=MISSING, name="Collective name")
    grid: tuple[int, ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether the event names its collective."""
        return self.collective is not MISSING and bytes(self.collective) != b"null"


class Args(Struct, gc=False):
    """The arguments of a communication kernel or op."""

    collective: str | None = field(default=None, name="Collective name")
    in_nelems: Wide = field(default=-1, name="In msg nelems")
    out_nelems: Wide = field(default=-1, name="Out msg nelems")
    group_size: Narrow = field(default=-1, name="Group size")
    dtype: str = ""
    group_name: str = field(default="", name="Process Group Name")
    group_description: str = field(default="", name="Process Group Description")
    group_ranks: str | list[Narrow] = field(default="", name="Process Group Ranks")
    rank_start: Narrow = field(default=-1, name="Global rank start")
    rank_stride: Narrow = field(default=-1, name="Global rank stride")
    seq: Wide = field(default=-1, name="Seq")
    src_rank: Narrow = field(default=-1, name="Src Rank")
    dst_rank: Narrow = field(default=-1, name="Dst Rank")
    dims: list[Any] = field(default=[], name="Input Dims")
    types: list[Any] = field(default=[], name="Input type")
    concrete: list[Any] = field(default=[], name="Concrete Inputs")
    copied_bytes: Wide = field(default=-1, name="bytes")

    @property
    def strided_ranks(self) -> tuple[int, ...]:
        """The ranks of a group given by start and stride because it is too long to list."""
        if self.rank_start < 0 or self.rank_stride <= 0 or not 0 < self.group_size <= _MAX_RANKS:
            return ()
        return tuple(self.rank_start + i * self.rank_stride for i in range(self.group_size))


class SyncArgs(Struct, gc=False):
    """The arguments of a wait of a stream or of the host, as Kineto records it."""

    correlation: Wide = -1
    stream: Narrow = -1
    on_stream: Narrow = field(default=-1, name="wait_on_stream")
    recorded: Wide = field(default=-1, name="wait_on_cuda_event_record_corr_id")


class PgConfig(Struct):
    """A process group in distributedInfo."""

    pg_name: str = ""
    pg_desc: str = ""
    ranks: str | list[Narrow] = []


class DistributedInfo(Struct):
    """Rank and size of the job; the size may be too small, then the groups' ranks extend it."""

    backend: str = ""
    rank: _Count = -1
    world_size: _Count = -1
    pg_config: list[PgConfig] = []

    def __post_init__(self) -> None:
        sizes = [max(group.ranks) + 1 for group in self.groups if group.ranks]
        self.world_size = max([self.world_size, *sizes])

    @property
    def groups(self) -> tuple[Group, ...]:
        """The listed process groups of the rank."""
        return tuple(Group(pg.pg_name, parse_ranks(pg.ranks), pg.pg_desc) for pg in self.pg_config)


class DeviceProperties(Struct):
    """An accelerator of the host."""

    name: str = ""


class KinetoHeader(Struct, gc=False):
    """The fields of a trace around its entries."""

    distributed: DistributedInfo = field(default_factory=DistributedInfo, name="distributedInfo")
    devices: list[DeviceProperties] = field(default=[], name="deviceProperties")
    base_ns: _Time = field(default=0, name="baseTimeNanoseconds")
    host_name: str = ""


class Track(Struct, frozen=True):
    """The name of a process, or of a thread of it (tid is None for the process itself)."""

    pid: str
    tid: str | None
    name: str


def decode_track(entry: TrackMetadata) -> Track | None:
    """The name that the entry gives; None if it is about something else or not valid."""
    kind = bytes(entry.name)
    if kind not in (b'"process_name"', b'"thread_name"'):
        return None
    try:
        pid, tid = (_PLACE.decode(place) for place in (entry.pid, entry.tid))
        name = _NAMED.decode(entry.args).name
    except UNDECODABLE:
        return None
    return Track(str(pid), str(tid) if kind == b'"thread_name"' else None, name)


class _Named(Struct):
    name: str


_NAMED, _PLACE = msgspec.json.Decoder(_Named), msgspec.json.Decoder(int | str | None)

_DEVICE_ARGS = msgspec.json.Decoder(DeviceArgs)

_ARGS = msgspec.json.Decoder(Args)

_SYNC_ARGS = msgspec.json.Decoder(SyncArgs)

_FIELDS = msgspec.json.Decoder(dict[str, Raw])

_RANKS = msgspec.json.Decoder(tuple[Narrow, ...], strict=False)


def parse_ranks(ranks: str | list[int]) -> tuple[int, ...]:
    """The ranks of "[0, 1]" or [0, 1]; empty if torch has abbreviated a long list with dots."""
    if isinstance(ranks, list):
        return tuple(ranks)
    try:
        return _RANKS.decode(ranks)
    except UNDECODABLE:
        return ()


def decode_device_args(texts: Sequence[Raw]) -> list[DeviceArgs]:
    """Decodes device arguments; arguments of a wrong type are ignored."""
    try:
        return [_DEVICE_ARGS.decode(text) for text in texts]
    except UNDECODABLE:
        return [lenient(text, DeviceArgs) for text in texts]


def decode_comm_args(text: Raw | bytes) -> Args:
    """Decodes communication arguments; arguments of a wrong type are ignored."""
    try:
        return _ARGS.decode(text)
    except UNDECODABLE:
        return lenient(text, Args)


def decode_sync_args(text: Raw | bytes) -> SyncArgs:
    """Decodes the arguments of a wait; arguments of a wrong type are ignored."""
    try:
        return _SYNC_ARGS.decode(text)
    except UNDECODABLE:
        return lenient(text, SyncArgs)


def lenient(text: Raw | bytes, kind: type[_T]) -> _T:
    """Decodes a struct field by field; invalid fields keep their defaults."""
    try:
        known_fields = _FIELDS.decode(text)
    except UNDECODABLE:
        return kind()
    values: dict[str, Any] = {}
    for struct_field in msgspec.structs.fields(kind):  # type: ignore[arg-type]
        if struct_field.encode_name in known_fields:
            value = _decode_value(known_fields[struct_field.encode_name], struct_field.type)
            if value is not None:
                values[struct_field.name] = value
    return kind(**values)


def _decode_value(text: Raw, kind: Any) -> Any:
    """Decodes a value; None if the text has another type; structs are decoded field by field."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return lenient(text, kind)
    try:
        return msgspec.json.decode(text, type=kind)
    except UNDECODABLE:
        return None


# Exact ns from the microseconds in a trace's text.

Microseconds = int | float | Decimal

EXACT_BELOW_US = 2.0**43
"""Below this, microseconds with three decimals survive a round trip through float64."""


def convert_to_ns(microseconds: Sequence[Microseconds]) -> Int64 | None:
    """The times in ns, exactly as in the text; None if these numbers are not precise enough.

    Computed as the integer part plus the rounded fraction: ts * 1000 is off by one from 2**42 us.
    """
    values = np.array(microseconds) if len(microseconds) else np.zeros(0, dtype=np.int64)
    most = MAX_US if values.dtype == np.int64 else EXACT_BELOW_US
    if values.dtype.kind not in "if" or (len(values) and not np.abs(values).max() < most):
        return None
    whole = np.floor(values) if values.dtype.kind == "f" else values
    ns: Int64 = whole.astype(np.int64) * 1000
    return (
        ns if values.dtype.kind == "i" else ns + np.rint((values - whole) * 1000).astype(np.int64)
    )


def convert_decimal_to_ns(microseconds: Decimal) -> int | None:
    """The time in ns, rounded; None if it does not fit into 64 bits."""
    if not (microseconds.is_finite() and -MAX_US < microseconds < MAX_US):
        return None
    return int((microseconds * 1000).to_integral_value())
