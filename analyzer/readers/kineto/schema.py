"""The schema of Kineto's JSON: entries, their arguments, timestamps."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct, field

from stepsplit.analyzer.readers.rank_limits import MAX_LISTED_RANKS
from stepsplit.analyzer.trace import Bool, Group, Int64, UInt8

# Types of a trace's JSON: entries, their arguments, and the fields around the array.

Wide = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Narrow = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""Numbers that fit into a column; larger ones are ignored."""

MAX_US = 2**61 // 1000
"""73 years: the sum of a time and a duration up to this fits into 64 bits of ns."""

_Time = Annotated[int, Meta(ge=0, le=MAX_US * 1000)]

_Count = Annotated[int, Meta(ge=-1, le=1 << 20)]

NO_ARGS = Raw(b"{}")

MISSING, _ZERO = Raw(b"null"), Raw(b"0")

_OTHER_PHASES = "BEiIstfbenNODPSTFpRcvVaAC(),"

_T = TypeVar("_T")

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for invalid text."""


class Complete(Struct, tag_field="ph", tag="X", gc=False):
    """An event with a start and a duration, as written; args are decoded on demand."""

    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: Raw = MISSING
    dur: Raw = _ZERO
    args: Raw = NO_ARGS


class TrackMetadata(Struct, tag_field="ph", tag="M", gc=False):
    """A name or property of a process or thread; any value may be of any type."""

    name: Raw = MISSING
    pid: Raw = MISSING
    tid: Raw = MISSING
    args: Raw = NO_ARGS


def _define_other(phase: str) -> type[Struct]:
    return msgspec.defstruct(f"Phase{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)


Entry = Struct
"""An entry of traceEvents: Complete, TrackMetadata, or another phase, which is only counted."""

_OTHERS: Any = functools.reduce(operator.or_, map(_define_other, _OTHER_PHASES))


def get_phase(entry: Entry) -> str:
    """The phase of the entry, such as "X" for a complete event."""
    return str(entry.__struct_config__.tag)


ANY_ENTRY = Complete | TrackMetadata | _OTHERS


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
        return bytes(self.collective) != b"null"


class OpArgs(Struct, gc=False):
    """The argument that is read of each op.

    Autograd numbers the nodes of its graph: the op that creates one, and the range of the backward
    that runs it, have its number.
    """

    sequence: Wide = field(default=-1, name="Sequence number")


class ModuleArgs(Struct, gc=False):
    """The module of a kernel of a CUDA graph, as torch.cuda's annotations of graphs state it, which
    torchtitan writes into its traces."""

    path: str = field(default="", name="module_fqn")


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
        if (
            self.rank_start < 0
            or self.rank_stride <= 0
            or not 0 < self.group_size <= MAX_LISTED_RANKS
        ):
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

_OP_ARGS = msgspec.json.Decoder(OpArgs)
_MODULE_ARGS = msgspec.json.Decoder(ModuleArgs)

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
    return _decode_all(_DEVICE_ARGS, texts, DeviceArgs)


def decode_op_args(texts: Sequence[Raw]) -> list[OpArgs]:
    """Decodes the arguments of ops; arguments of a wrong type are ignored."""
    return _decode_all(_OP_ARGS, texts, OpArgs)


def decode_module_args(texts: Sequence[Raw]) -> list[ModuleArgs]:
    """Decodes the modules of kernels; arguments of a wrong type are ignored."""
    return _decode_all(_MODULE_ARGS, texts, ModuleArgs)


def _decode_all(
    decoder: msgspec.json.Decoder[_T], texts: Sequence[Raw], kind: type[_T]
) -> list[_T]:
    try:
        return [decoder.decode(text) for text in texts]
    except UNDECODABLE:
        return [lenient(text, kind) for text in texts]


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
#
# As floats they would be inexact: from 2**43 us (100 days; a clock that counts from 1970 has 2**50)
# the third decimal is lost. As Decimals they take ten times as long as read here, all at once.

_POINT, _SEPARATOR, _ZERO_DIGIT = b".,0"

_MOST_DECIMALS, _MOST_DIGITS = 15, 16
"""Digits that are read at once: both parts fit into 64 bits."""

_LAST_BYTES = np.tri(_MOST_DIGITS + 1, _MOST_DIGITS, -1, dtype=np.uint8)[:, ::-1] * np.uint8(255)

_OF_LENGTH = np.ascontiguousarray(_LAST_BYTES).view("<u8").astype(np.uint64)
"""Masks of the last digits of each count, in two words as the digits."""

_NS_OF_DECIMALS = 10 ** np.maximum(3 - np.arange(_MOST_DECIMALS + 1), 0)

_BELOW_NS = 10 ** np.maximum(np.arange(_MOST_DECIMALS + 1) - 3, 0)
"""By the number of decimals of a microsecond: what the last is worth in ns, and how many of it are
one ns."""


def read_microseconds(texts: Sequence[Raw]) -> tuple[Int64, Bool]:
    """The times in ns, rounded half to even, of microseconds as written in JSON.

    Returns:
        The times, and which of the texts are numbers whose ns fit into 64 bits; the others are 0.
    """
    ns, is_known = np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts), dtype=np.bool_)
    # The digits before the first number are none of it.
    joined = b"".join((b"0" * _MOST_DIGITS, b",".join(texts), b","))
    text = np.frombuffer(joined, dtype=np.uint8)
    end = np.flatnonzero(text == _SEPARATOR)
    if len(texts) and len(end) == len(texts):
        begin = np.concatenate(([_MOST_DIGITS], end[:-1] + 1))
        point = np.flatnonzero(text == _POINT)
        if len(point) != len(end) or not ((begin <= point) & (point < end)).all():
            # A number without a point ends where its point would be.
            at, point = point, end.copy()
            point[np.searchsorted(end, at)] = at
        whole, is_known = _read_digits(text, begin, point)
        is_known &= whole < MAX_US
        ns = whole * 1000
        rows = np.flatnonzero(point + 1 < end)
        decimals, are_digits = _read_digits(text, point[rows] + 1, end[rows])
        count = end[rows] - point[rows] - 1
        is_known[rows] &= are_digits & (count <= _MOST_DECIMALS)
        ns[rows] += _round_to_ns(decimals, np.minimum(count, _MOST_DECIMALS), ns[rows])
    # What is left is rare: signs, exponents, numbers as texts, and what is no number.
    for row in np.flatnonzero(~is_known).tolist():
        exact = _convert_exactly(texts[row])
        ns[row], is_known[row] = exact or 0, exact is not None
    return ns, is_known


def _read_digits(text: UInt8, begin: Int64, end: Int64) -> tuple[Int64, Bool]:
    """The numbers that the text between these places is, and where it is nothing but digits, at
    least one and not more than are read at once. As many bytes precede each end.

    Two words of eight digits each are added up within the word, in pairs, fours and eights: a
    matrix of digits takes four times as long.
    """
    length = end - begin
    ending = np.lib.stride_tricks.sliding_window_view(text, _MOST_DIGITS)
    digits = ending[end - _MOST_DIGITS].view("<u8") ^ np.uint64(0x3030303030303030)
    digits &= _OF_LENGTH.take(length, axis=0, mode="clip")
    # Above 9 if this sets the highest bit of its byte, or if that is set already.
    above = (digits + np.uint64(0x7676767676767676) | digits) & np.uint64(0x8080808080808080)
    is_number = (above[:, 0] | above[:, 1] == 0) & (length > 0) & (length <= _MOST_DIGITS)
    # The first digit is in the lowest byte.
    pairs = digits * np.uint64(10) + (digits >> np.uint64(8))
    in_two, two_later = np.uint64(0x000000FF000000FF), np.uint64(16)
    eights = (pairs & in_two) * np.uint64((1_000_000 << 32) + 100)
    eights += (pairs >> two_later & in_two) * np.uint64((10_000 << 32) + 1)
    eights >>= np.uint64(32)
    upper, lower = eights.astype(np.int64).T
    return upper * 10**8 + lower, is_number


def _round_to_ns(decimals: Int64, count: Int64, whole_ns: Int64) -> Int64:
    """So many decimals of microseconds in ns, rounded half to even together with the whole ones."""
    if not (count > 3).any():
        exact: Int64 = decimals * _NS_OF_DECIMALS[count]
        return exact
    ns, rest = np.divmod(decimals * _NS_OF_DECIMALS[count], _BELOW_NS[count])
    is_odd = (whole_ns + ns) % 2 == 1
    twice = 2 * rest
    rounded: Int64 = ns + ((twice > _BELOW_NS[count]) | ((twice == _BELOW_NS[count]) & is_odd))
    return rounded


def _convert_exactly(text: Raw) -> int | None:
    """The time in ns of any number or number in a text; None for others, and beyond 64 bits."""
    try:
        value = json.loads(bytes(text), parse_float=Decimal, parse_int=Decimal)
        microseconds = Decimal(value) if isinstance(value, Decimal | str) else Decimal("NaN")
        is_known = microseconds.is_finite() and -MAX_US < microseconds < MAX_US
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return int((microseconds * 1000).to_integral_value()) if is_known else None
