"""The file of one rank as torch.profiler writes it: JSON text -> KinetoFile."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.files import RECORD_AGAIN

EMPTY_ARGS = Raw(b"{}")


class TraceEvent(Struct, gc=False):
    """One entry of traceEvents; args stay text until somebody needs them."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: int | float | None = None
    dur: int | float = 0
    args: Raw = EMPTY_ARGS


class DecimalTimes(Struct, gc=False):
    """The times of one entry, with every digit."""

    ph: str = ""
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)


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
    name: str = ""


class KinetoFile(Struct):
    """What a trace file says; traceEvents is UNSET where the JSON is something else."""

    traceEvents: list[TraceEvent] | UnsetType = UNSET
    distributedInfo: Raw = EMPTY_ARGS
    deviceProperties: Raw = Raw(b"[]")
    baseTimeNanoseconds: int = 0
    host_name: str = ""

    @property
    def distributed(self) -> DistributedInfo:
        """Which rank of what, each part as far as the file says it in the known form."""
        parts = _decoded(self.distributedInfo, dict[str, Raw]) or {}
        info = DistributedInfo()
        for part in msgspec.structs.fields(DistributedInfo):
            value = _decoded(parts.get(part.name, EMPTY_ARGS), part.type)
            if value is not None:
                setattr(info, part.name, value)
        return info

    @property
    def devices(self) -> list[DeviceProperties]:
        """The accelerators of the host."""
        return _decoded(self.deviceProperties, list[DeviceProperties]) or []


class _Times(Struct):
    traceEvents: list[DecimalTimes]


class Args(Struct, gc=False):
    """The arguments of an event that the split needs."""

    correlation: int = -1
    stream: int = -1
    device: int = -1
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


_FILE = msgspec.json.Decoder(KinetoFile)
_BARE = msgspec.json.Decoder(list[TraceEvent])
_ARGS = msgspec.json.Decoder(Args)
_NO_ARGS = Args()


def parse(path: Path, text: bytes) -> KinetoFile:
    """The trace in the text; its traceEvents are UNSET where it is another kind of JSON.

    Raises DataError where the text is torn or the entries are not a trace's.
    """
    try:
        if text.lstrip()[:1] == b"[":
            return KinetoFile(traceEvents=_BARE.decode(text))
        return _FILE.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(path, f"not a whole trace ({error})", RECORD_AGAIN) from None


def decimal_times(text: bytes) -> list[DecimalTimes]:
    """The times of all entries with every digit, for traces whose microseconds outgrow a float."""
    if text.lstrip()[:1] == b"[":
        return msgspec.json.decode(text, type=list[DecimalTimes])
    return msgspec.json.decode(text, type=_Times).traceEvents


def _decoded(text: Raw, kind: Any) -> Any:
    """The value of that kind, None where the text is another."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError:
        return None


def args_of(event: TraceEvent) -> Args:
    """The event's arguments; those of an odd type are as good as absent."""
    try:
        return _ARGS.decode(event.args)
    except msgspec.DecodeError:
        return _lenient(event)


def _lenient(event: TraceEvent) -> Args:
    try:
        found = msgspec.json.decode(event.args, type=dict[str, Any])
    except msgspec.DecodeError:
        return _NO_ARGS
    kept = Args()
    for info in msgspec.structs.fields(Args):
        value = found.get(info.encode_name)
        if isinstance(value, int if info.type is int else str):
            setattr(kept, info.name, value)
    return kept
