"""Reader of NCCL Inspector dumps (JSON lines): the calls of each communicator."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.rank_limits import MAX_LISTED_RANKS
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import OP_CODE, Calls, Group, Note, RankCalls, UInt8

# A record names its communicator in its own header (formats v4.0 to v4.2), or follows a dump_stats
# record that names the communicator of a number of records after it (from v4.3 on).

Float64 = npt.NDArray[np.float64]

MAX_DUR_US = 1 << 43
"""A duration of months is an underflow of an unsigned clock difference."""

MAX_UNIX_US = 1 << 53
"""Damage from there on: the year 2255, up to which a float has each microsecond."""

_OPS = {"SendRecv": "send_recv", "All2All": "all_to_all"}


@dataclass(frozen=True, slots=True)
class CallTimings:
    """Timings of the calls of one RankCalls, one row per call.

    Bandwidths are as written by the Inspector, over the whole execution (including the wait for
    the last rank); nan if missing. Columns of shape (n,).

    Attributes:
        timing: Index into the log's timings.
        algbw_bytes_per_s: Algorithm bandwidth in bytes per second.
        busbw_bytes_per_s: Bus bandwidth in bytes per second.
    """

    timing: UInt8
    algbw_bytes_per_s: Float64
    busbw_bytes_per_s: Float64


@dataclass(frozen=True, slots=True)
class InspectorLog:
    """The calls of one process, by communicator.

    Ranks are local to the communicator: this applies to rank, peer and the ranks of the group (0
    to n-1), and world_size is -1. seq counts the calls of one function on the communicator; all
    sends and receives share one count. issued_ns is the start of a call on the host, which only
    verbose dumps have (else -1); t0_unix_ns is the earliest of them, else the time of the first
    dump.

    Attributes:
        source: The file, as shown to the user.
        format_version: Version of the dump's format; "" if unknown.
        host: Host name; "" if unknown.
        pid: Process id; -1 if unknown.
        timings: Sources of the times: kernel_gpu, kernel_cpu, collective_cpu, or "" if unknown.
        calls: The calls, one entry per communicator and rank.
        measured: Timings of the calls, one entry per entry of calls.
        notes: Limitations of the dump, such as dropped calls.
    """

    source: str
    format_version: str
    host: str
    pid: int
    timings: tuple[str, ...]
    calls: tuple[RankCalls, ...]
    measured: tuple[CallTimings, ...]
    notes: tuple[Note, ...] = ()


def is_inspector_log(head: bytes) -> bool:
    """Whether these first bytes of a file contain a complete Inspector record."""
    if b'"header"' not in head or b'"n_ranks"' not in head:
        return False
    lines = head.split(b"\n")
    texts = split_objects(lines) if head.lstrip().startswith(b"{") else lines
    for text in texts:
        record = decode_record(text) if text.lstrip().startswith(b"{") else None
        if record is not None and record.header is not None:
            # Other JSON has headers too: one of the Inspector has a version, or calls.
            version = record.metadata and record.metadata.inspector_output_format_version
            if record.kind_known or version:
                return True
    return False


def read_inspector(source: Source) -> InspectorLog:
    """Reads the calls of a dump in file order. Raises DataError if there is no complete record."""
    reading = _InspectorReader()
    with open_unpacked(source) as content:
        for text in split_objects(content.read_lines()):
            reading.take(text)
        torn = content.torn
    if not reading.records:
        hint = "check that it is a JSON dump of NCCL's Inspector"
        raise DataError(source.where, "no complete Inspector record found", hint)
    return reading.build_log(source.where, torn)


class _InspectorReader:
    """The data read so far: the columns of each communicator, and the current header."""

    def __init__(self) -> None:
        self.records = 0
        self._odd = self._orphans = self._left = 0
        self._header: Header | None = None
        self._metadata, self._processes = Metadata(), dict[tuple[str, int], str]()
        self._columns: dict[tuple[str, int], _Columns] = {}
        self._dropped: dict[tuple[str, int], int] = {}
        self._timings: dict[str, int] = {}
        self._first_dump_us = 0

    def take(self, text: bytes) -> None:
        """Adds a record; counts invalid ones."""
        record = decode_record(text)
        # Counts the records that a dump_stats record has announced; at -1 one more has come.
        self._left -= 1
        if record is None or not record.kind_known:
            self._odd += 1
            return
        self.records += 1
        if record.header is not None:
            # Sets the communicator of the records that follow without a header.
            metadata = record.metadata or Metadata()
            self._header, self._metadata, self._left = record.header, metadata, 0
            process = (metadata.hostname, metadata.pid)
            self._processes.setdefault(process, metadata.inspector_output_format_version)
            if not self._first_dump_us and 0 < metadata.dump_timestamp_us < MAX_UNIX_US:
                self._first_dump_us = metadata.dump_timestamp_us
            if record.dump_stats is not None:
                self._left = record.dump_stats.records
                self._dropped[record.header.id, record.header.rank] = record.dump_stats.dropped
        perf = record.coll_perf or record.p2p_perf
        if perf is None:
            return
        if self._header is None or (record.header is None and self._left < 0):
            self._orphans += 1
            return
        timing = self._timings.setdefault(perf.timing_source, len(self._timings))
        key = (self._header.id, self._header.rank)
        if key not in self._columns:
            self._columns[key] = _Columns(self._header, self._metadata.hostname)
        self._columns[key].add(perf, self._header.n_ranks, min(timing, 255))

    def build_log(self, source: str, torn: str) -> InspectorLog:
        """Builds the log from all records."""
        starts = [us for c in self._columns.values() if (us := c.first_start_us) >= 0]
        t0_ns = min(starts, default=self._first_dump_us) * 1000
        (host, pid), version = next(iter(self._processes.items()), (("", -1), ""))
        return InspectorLog(
            source=source,
            format_version=version,
            host=host,
            pid=pid,
            timings=tuple(self._timings),
            calls=tuple(c.build_calls(source, t0_ns) for c in self._columns.values()),
            measured=tuple(c.build_timings() for c in self._columns.values()),
            notes=tuple(self.list_notes(torn)),
        )

    def list_notes(self, torn: str) -> Iterator[Note]:
        if torn:
            yield Note(
                "file_cut", f"the Inspector dump is truncated ({torn}); complete records were read"
            )
        if self._odd:
            yield Note("lines_skipped", f"{self._odd} lines are not complete Inspector records")
        if self._orphans:
            problem = "calls have no record that names their communicator; ignored"
            yield Note("calls_skipped", f"{self._orphans} {problem}")
        if dropped := sum(self._dropped.values()):
            problem = "its ring buffer was full"
            yield Note("calls_missing", f"the Inspector dropped {dropped} calls; {problem}")
        if len(self._processes) > 1:
            yield Note("processes_mixed", f"the dump has {len(self._processes)} processes")


class _Columns:
    """The calls of one rank of a communicator, as columns."""

    def __init__(self, header: Header, host: str) -> None:
        self._header, self._host = header, host
        self._op, self._timing = array("B"), array("B")
        self._seq, self._peer = array("q"), array("q")
        self._input, self._message = array("q"), array("q")
        self._start_us, self._dur_ns = array("q"), array("q")
        self._algbw, self._busbw = array("d"), array("d")

    def add(self, perf: Coll | P2p, n_ranks: int, timing: int) -> None:
        """Adds a row."""
        op = _OPS.get(perf.name) or parse_op(perf.name)
        input_bytes, message_bytes = _compute_sizes(op, perf.msg_size_bytes, n_ranks)
        self._op.append(OP_CODE[op])
        self._timing.append(timing)
        self._seq.append(_clamp_unsigned(perf.sn))
        self._peer.append(_clamp_unsigned(perf.peer, bits=31))
        self._input.append(input_bytes)
        self._message.append(message_bytes)
        start_us = 0 if perf.trace is None else perf.trace.start_ts
        self._start_us.append(start_us if 0 < start_us < MAX_UNIX_US else -1)
        dur_us, dur_ns = perf.exec_time_us, -1
        if 0 <= dur_us < MAX_DUR_US:
            # The whole microseconds apart: as one float they would lose nanoseconds.
            dur_ns = int(dur_us) * 1000 + round((dur_us - int(dur_us)) * 1000)
        self._dur_ns.append(dur_ns)
        self._algbw.append(_convert_bandwidth(perf.algobw_gbs))
        self._busbw.append(_convert_bandwidth(perf.busbw_gbs))

    @property
    def first_start_us(self) -> int:
        """The earliest known start; -1 if none is known."""
        return min((us for us in self._start_us if us >= 0), default=-1)

    def build_calls(self, source: str, t0_unix_ns: int) -> RankCalls:
        """The calls, with times relative to t0."""
        header, n = self._header, len(self._op)
        start_us = np.array(self._start_us, dtype=np.int64)
        unknown = np.full(n, -1, dtype=np.int64)
        calls = Calls(
            event=unknown,
            issued_ns=np.where(start_us < 0, -1, start_us * 1000 - t0_unix_ns),
            group_id=np.zeros(n, dtype=np.int32),
            seq=np.array(self._seq, dtype=np.int64),
            op=np.array(self._op, dtype=np.uint8),
            dtype=np.zeros(n, dtype=np.int32),
            peer=np.array(self._peer, dtype=np.int32),
            input_bytes=np.array(self._input, dtype=np.int64),
            message_bytes=np.array(self._message, dtype=np.int64),
            dtypes=("",),
        )
        dur_ns = np.array(self._dur_ns, dtype=np.int64)
        # The group's id is the name of the communicator, and its hash where it has none.
        has_name = header.comm_name not in ("", "unknown")
        ranks = tuple(range(min(header.n_ranks, MAX_LISTED_RANKS)))
        group = Group(header.comm_name if has_name else header.id, ranks, header.id)
        return RankCalls(source, header.rank, -1, self._host, t0_unix_ns, calls, dur_ns, (group,))

    def build_timings(self) -> CallTimings:
        """The timings of the calls."""
        return CallTimings(
            timing=np.array(self._timing, dtype=np.uint8),
            algbw_bytes_per_s=np.array(self._algbw, dtype=np.float64),
            busbw_bytes_per_s=np.array(self._busbw, dtype=np.float64),
        )


def _compute_sizes(op: str, reported_bytes: int, n_ranks: int) -> tuple[int, int]:
    """Input bytes and message bytes (as in nccl-tests) from the size in the dump.

    The dump has the count of the call: one rank's part for all_gather and reduce_scatter. It is not
    defined for all_to_all, so both are -1.
    """
    rank_bytes = _clamp_unsigned(reported_bytes)
    if op == "all_to_all" or rank_bytes < 0:
        return -1, -1
    if op not in ("all_gather", "reduce_scatter"):
        return rank_bytes, rank_bytes
    full = _clamp_unsigned(rank_bytes * n_ranks) if n_ranks > 0 else -1
    return (rank_bytes if op == "all_gather" else full), full


def _clamp_unsigned(value: int, bits: int = 63) -> int:
    """The value; -1 if it is out of range (underflow of an unsigned number)."""
    return value if 0 <= value < 1 << bits else -1


def _convert_bandwidth(gbs: float | str | None) -> float:
    return gbs * 1e9 if isinstance(gbs, float) else math.nan


# The records of an Inspector dump: JSON objects, one per line.

MAX_RECORD_LINES = 4096
"""Maximum number of lines of one record, which may be indented as in NCCL's documentation."""

# The Inspector prints with %f, which writes inf and nan; JSON has neither.
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


# A call is one of two kinds, with equal fields whose keys begin with the kind: coll_sn, p2p_sn.
# They are written twice, because msgspec renames no inherited field.


def _prefix_fields(kind: str) -> Callable[[str], str]:
    """The JSON key of a field: the kind of call itself for name, else prefixed with it."""
    return lambda field: kind if field == "name" else f"{kind}_{field}"


class _CollTrace(Struct, rename=_prefix_fields("coll")):
    start_ts: int = 0


class _P2pTrace(Struct, rename=_prefix_fields("p2p")):
    start_ts: int = 0


class Coll(Struct, rename=_prefix_fields("coll")):
    name: str
    sn: int = -1
    msg_size_bytes: int = -1
    exec_time_us: int | float = -1
    timing_source: str = ""
    algobw_gbs: float | str | None = None
    busbw_gbs: float | str | None = None
    trace: _CollTrace | None = msgspec.field(default=None, name="event_trace_ts")
    peer: int = -1


class P2p(Struct, rename=_prefix_fields("p2p")):
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


class InspectorRecord(Struct):
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


_DECODER = msgspec.json.Decoder(InspectorRecord)

_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def split_objects(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The texts of possible records: single lines, or the lines between lone braces."""
    open_lines: list[bytes] = []
    for line in lines:
        stripped = line.rstrip()
        # A record begins anew with each brace at the begin of a line, so that a cut one costs no
        # other.
        if stripped.startswith(b"{"):
            if open_lines:
                yield b"\n".join(open_lines)
            open_lines = [line] if stripped == b"{" else []
            if not open_lines:
                yield line
        elif open_lines:
            open_lines.append(line)
            if stripped == b"}" or len(open_lines) >= MAX_RECORD_LINES:
                yield b"\n".join(open_lines)
                open_lines = []
        elif stripped:
            yield line
    if open_lines:
        yield b"\n".join(open_lines)


def decode_record(text: bytes) -> InspectorRecord | None:
    """Decodes a record; None if it is invalid. Bandwidths may be written as inf or nan."""
    try:
        return _DECODER.decode(text)
    except _UNDECODABLE:
        fixed = _NO_NUMBER.sub(b":null", text.decode(errors="replace").encode())
    try:
        return None if fixed == text else _DECODER.decode(fixed)
    except _UNDECODABLE:
        return None
