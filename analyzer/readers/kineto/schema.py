"""What a trace's JSON holds, as types: its entries, their arguments, what stands around them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, field

NO_ARGS = Raw(b"{}")
_OTHER_PHASES = "BEMiIstfbenNODPSTFpRcvVaAC(),"
_T = TypeVar("_T")


class Complete(Struct, tag_field="ph", tag="X", gc=False):
    """An event with a start and a duration; args stay text until somebody needs them."""

    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: int | float | Decimal | None = None
    dur: int | float | Decimal = 0
    args: Raw = NO_ARGS


def _other(phase: str) -> type[Struct]:
    return msgspec.defstruct(f"Phase{ord(phase)}", [], tag_field="ph", tag=phase, gc=False)


Entry = Struct
"""An entry of traceEvents: Complete, or one of another phase, which is only counted."""
ANY_ENTRY: Any = functools.reduce(operator.or_, map(_other, _OTHER_PHASES), Complete)


class Times(Struct, gc=False):
    """The times of one entry, with every digit."""

    ph: str = ""
    ts: Decimal | None = None
    dur: Decimal = Decimal(0)


class DeviceArgs(Struct, gc=False):
    """The arguments that place a launch or a piece of device work."""

    correlation: int = -1
    stream: int = -1
    device: int = -1
    collective: Raw | None = field(default=None, name="Collective name")


class Args(Struct, gc=False):
    """The arguments of a kernel or an op that communicates."""

    collective: str | None = field(default=None, name="Collective name")
    in_nelems: int = field(default=-1, name="In msg nelems")
    out_nelems: int = field(default=-1, name="Out msg nelems")
    group_size: int = field(default=-1, name="Group size")
    dtype: str = ""
    group_name: str = field(default="", name="Process Group Name")
    group_description: str = field(default="", name="Process Group Description")
    group_ranks: str = field(default="", name="Process Group Ranks")
    seq: int = field(default=-1, name="Seq")
    src_rank: int = field(default=-1, name="Src Rank")
    dst_rank: int = field(default=-1, name="Dst Rank")
    dims: list[Any] = field(default=[], name="Input Dims")
    types: list[Any] = field(default=[], name="Input type")
    concrete: list[Any] = field(default=[], name="Concrete Inputs")


class PgConfig(Struct):
    """A process group as distributedInfo lists it."""

    pg_name: str = ""
    pg_desc: str = ""
    ranks: list[int] = []


class DistributedInfo(Struct):
    """Which rank of what."""

    backend: str = ""
    rank: int = -1
    world_size: int = -1
    pg_config: list[PgConfig] = []


class DeviceProperties(Struct):
    """An accelerator of the host."""

    name: str = ""


class KinetoHeader(Struct, gc=False):
    """What a trace says around its entries."""

    distributed: DistributedInfo = field(default_factory=DistributedInfo, name="distributedInfo")
    devices: list[DeviceProperties] = field(default=[], name="deviceProperties")
    base_ns: int = field(default=0, name="baseTimeNanoseconds")
    host_name: str = ""


_DEVICE_ARGS = msgspec.json.Decoder(DeviceArgs)
_ARGS = msgspec.json.Decoder(Args)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


def device_args(texts: Sequence[Raw]) -> list[DeviceArgs]:
    """Where each event ran; arguments of an odd type are as good as absent."""
    try:
        return [_DEVICE_ARGS.decode(text) for text in texts]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [lenient(text, DeviceArgs) for text in texts]


def comm_args(text: Raw | bytes) -> Args:
    """What an event communicates; those of an odd type are as good as absent."""
    try:
        return _ARGS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return lenient(text, Args)


def lenient(text: Raw | bytes, kind: type[_T]) -> _T:
    """The struct of that kind, each field as far as the text states it in the known form."""
    try:
        stated = _FIELDS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return kind()
    values: dict[str, Any] = {}
    for one in msgspec.structs.fields(kind):  # type: ignore[arg-type]
        if one.encode_name in stated:
            found = _decoded(stated[one.encode_name], one.type)
            if found is not None:
                values[one.name] = found
    return kind(**values)


def _decoded(text: Raw, kind: Any) -> Any:
    """The value of that kind, None where the text is another; structs field by field."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return lenient(text, kind)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
