"""The records of an Inspector dump, one by one: JSON objects, a line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import Struct

MOST_LINES = 4096
"""So many lines may one record be spread over, as in the documentation's examples."""
_NO_NUMBER = re.compile(rb":\s*-?(?:inf|nan)\b")


class Header(Struct):
    rank: int
    n_ranks: int
    id: str = ""
    comm_name: str = ""


class Metadata(Struct):
    inspector_output_format_version: str = ""
    dump_timestamp_us: int = 0
    hostname: str = ""
    pid: int = -1


def _with(kind: str) -> Callable[[str], str]:
    """The file's key of a field: the call's kind itself, or a key that begins with it."""
    return lambda field: kind if field == "name" else f"{kind}_{field}"


class _CollTrace(Struct, rename=_with("coll")):
    start_ts: int = 0


class _P2pTrace(Struct, rename=_with("p2p")):
    start_ts: int = 0


class Coll(Struct, rename=_with("coll")):
    name: str
    sn: int = -1
    msg_size_bytes: int = -1
    exec_time_us: int | float = -1
    timing_source: str = ""
    algobw_gbs: float | str | None = None
    busbw_gbs: float | str | None = None
    trace: _CollTrace | None = msgspec.field(default=None, name="event_trace_ts")
    peer: int = -1


class P2p(Struct, rename=_with("p2p")):
    name: str
    sn: int = -1
    msg_size_bytes: int = -1
    exec_time_us: int | float = -1
    timing_source: str = ""
    algobw_gbs: float | str | None = None
    busbw_gbs: float | str | None = None
    trace: _P2pTrace | None = msgspec.field(default=None, name="event_trace_ts")
    peer: int = -1


class DumpStats(Struct):
    coll_records: int = 0
    p2p_records: int = 0
    proxy_records: int = 0
    coll_dropped_total: int = 0
    p2p_dropped_total: int = 0

    @property
    def records(self) -> int:
        return self.coll_records + self.p2p_records + self.proxy_records

    @property
    def dropped(self) -> int:
        return self.coll_dropped_total + self.p2p_dropped_total


class Record(Struct):
    header: Header | None = None
    metadata: Metadata | None = None
    coll_perf: Coll | None = None
    p2p_perf: P2p | None = None
    dump_stats: DumpStats | None = None
    proxy_trace: msgspec.Raw = msgspec.Raw()

    @property
    def kind_known(self) -> bool:
        calls = self.coll_perf or self.p2p_perf or self.dump_stats
        return calls is not None or bool(bytes(self.proxy_trace))


_DECODER = msgspec.json.Decoder(Record)
_ODD = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def objects(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The texts that may be records: lines, or what stands between lone braces."""
    spread: list[bytes] = []
    for line in lines:
        bare = line.rstrip()
        if bare.startswith(b"{"):
            if spread:
                yield b"\n".join(spread)
            spread = [line] if bare == b"{" else []
            if not spread:
                yield line
        elif spread:
            spread.append(line)
            if bare == b"}" or len(spread) >= MOST_LINES:
                yield b"\n".join(spread)
                spread = []
        elif bare:
            yield line
    if spread:
        yield b"\n".join(spread)


def record_of(text: bytes) -> Record | None:
    """The record, None for what is none. Bandwidths of no time were written as inf or nan."""
    try:
        return _DECODER.decode(text)
    except _ODD:
        mended = _NO_NUMBER.sub(b":null", text.decode(errors="replace").encode())
    try:
        return None if mended == text else _DECODER.decode(mended)
    except _ODD:
        return None
