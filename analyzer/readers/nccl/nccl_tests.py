"""Reader of nccl-tests and rccl-tests output: sweeps over message sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.ops import compute_element_bytes, normalize_dtype, parse_op
from stepsplit.analyzer.readers.compression import open_unpacked, read_head
from stepsplit.analyzer.readers.rank_limits import MAX_LISTED_RANKS
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import OP_CODE, Note

# The types that read_sweeps returns.


@dataclass(frozen=True, slots=True)
class Timing:
    """The out-of-place or in-place part of a row.

    Bandwidths are as printed; before 2020 all_gather and reduce_scatter printed busbw twice.

    Attributes:
        time_ns: Time of an operation in ns, as printed.
        algbw_bytes_per_s: Algorithm bandwidth (size / time) in bytes per second; -1 if missing.
        busbw_bytes_per_s: Bus bandwidth in bytes per second; -1 if missing.
        wrong: Number of wrong elements; -1 if not counted.
    """

    time_ns: int
    algbw_bytes_per_s: int
    busbw_bytes_per_s: int
    wrong: int


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One message size of a sweep.

    Attributes:
        message_bytes: Message size in bytes: the full buffer.
        count: Elements per rank.
        dtype: Name of the dtype in torch, such as "float32".
        redop: Reduction as printed, such as "sum" or "none"; "" if missing.
        root: Root rank; -1 if missing.
        out_of_place: Timing with separate input and output buffers; None if missing.
        in_place: Timing with one buffer for both; None if missing.
    """

    message_bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Timing | None
    in_place: Timing | None


@dataclass(frozen=True, slots=True)
class Sweep:
    """One table of nccl-tests: a collective over message sizes.

    Attributes:
        source: The file, as shown to the user.
        op: Item of OPS, printed or inferred from the rows; "" if ambiguous or not printed.
        nranks: Number of ranks; -1 if unknown.
        devices: Device name of each rank, "" if not listed; () if nranks is unknown.
        rows: The message sizes, in the order of the table.
        avg_busbw_bytes_per_s: Mean bus bandwidth printed at the end of the table, in bytes per
            second; -1 if missing, as in a truncated table.
    """

    source: str
    op: str
    nranks: int
    devices: tuple[str, ...]
    rows: tuple[SweepRow, ...]
    avg_busbw_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Sweeps:
    """The tables of a file that have at least one row, in order.

    Attributes:
        source: The file, as shown to the user.
        sweeps: The tables.
        notes: Limitations of the file: inferred or ambiguous ops, truncated rows, a missing end.
    """

    source: str
    sweeps: tuple[Sweep, ...]
    notes: tuple[Note, ...]


# The printed tables: sweeps of one collective over message sizes.

# Times and bandwidths, and "N/A" where a program does not check its results.
_NUMBER = rb"(?:-?\d{1,12}(?:\.\d{1,6})?(?:e[+-]\d\d)?|-?nan|inf|N/A)"

_HALF = rb"\s+".join([rb"(" + _NUMBER + rb")"] * 4)

# Four more columns, which a report of single iterations adds to each part of a row.
_FOUR = rb"(?:\s+" + _NUMBER + rb"){4}"

_END = rb"(?:\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)?\s*$"
"""A row may end with a timestamp (-S)."""

_DTYPE = rb"(?:u?int\d{1,2}|int|char|half|b?float\d{0,2}|double|f8e\dm\d|fp8_e\dm\d)"

_ROW_BEGIN = rb"(?:^|[\s:>|])(\d{1,16})\s+(\d{1,16})\s+(" + _DTYPE + rb")\b"

_BEGUN = re.compile(_ROW_BEGIN)

# 1048576 262144 float sum -1 45.67 22.96 40.18 0 44.12 23.77 41.59 0
_ROW = re.compile(
    _ROW_BEGIN
    + rb"\s+(?:([a-z]{3,12})\s+)?(?:(-?\d{1,6})\s+)?"
    + _HALF
    + rb"(?:" + _FOUR + rb"(?=" + _FOUR + _FOUR + _END + rb"))?"
    + rb"(?:\s+" + _HALF + rb"(?:" + _FOUR + rb")?)?"
    + _END
)  # fmt: skip
"""A report of single iterations adds four columns to each part of a row."""

# #       size         count      type   redop    root     time   algbw   busbw #wrong
_HEADING = re.compile(rb"#\s+(?:size|bytes)\s+(?:count|N)\s+type\s.*\b(?:cpu)?time\s+algbw\s+busbw")

# #        (B)    (elements)                               (us)  (GB/s)  (GB/s)
_UNIT = re.compile(rb"#\s+\(B\)\s+\(elements\)\s+\((us|ms)\)")

# #  Rank  0 Group  0 Pid  12 on node0 device  0 [0x1b] NVIDIA H100 80GB HBM3
_RANK = re.compile(rb"#\s+Rank\s+(\d{1,5})\s.*?\bdevice\s+\d+\s+\[[0-9a-fA-Fx:.]+\]\s+(\S.*?)\s*$")

_RUN = re.compile(rb"#\s*nThread\s+\d+\s+nGpus\s+\d")

# # Avg bus bandwidth    : 214.5
_AVERAGE = re.compile(rb"#\s*Avg bus bandwidth\s*:\s*(\d{1,9}(?:\.\d+)?(?:e[+-]\d\d)?)")

_MESSAGE = re.compile(
    rb"(?:\[\d{4}-[\d :.-]{6,40}\] ?)?([\w.-]{1,255}):\d{1,10}:\d{1,10} (?:\([^)\n]{1,80}\) )?"
    rb"\[-?\d{1,5}\] .{0,80}?NCCL [A-Z]{4,7} |NCCL version \d"
)
"""The begin of a message of NCCL's log, with the host."""

_NUMBER_AT_BEGIN = re.compile(rb"^-?\d+(?=[A-Za-z])")

_CELL_END = re.compile(rb"(?:-?[\d.]+(?:e-?\d+)?)?")

_ANY_CELL_END = re.compile(rb"(?:-?[\d.]+(?:e-?\d+)?|A|nan|inf|[a-z]{3,12})?")
"""The end of a row's last cell that stands before a host name, not separated from it."""

_LABEL = re.compile(rb"^ *(?:\[\d{1,5}(?:,\d{1,5})?\](?:<\w{3,6}>:?)?|\d{1,5}:)(?= |$)")
"""The label of a process that launchers put before each line."""

# Not of "# Collective test concluded: all_reduce_perf", which stands after its table.
_PROGRAM = re.compile(rb"(?<!concluded: )\b([a-z_]{2,30})_perf(?:_mpi)?\b")

_PROGRAMS = {"sendrecv": "send_recv", "alltoall": "all_to_all"}

_BYTES = {"uint32": 4, "uint64": 8, "f8e4m3": 1, "f8e5m2": 1}

_TORN = "nccl_tests_torn"

_RUN_AGAIN = "run the test again, with NCCL_DEBUG_FILE if NCCL_DEBUG is set"

_MAX_LINE_BYTES = 4096
"""A longer line is not a table row."""


def is_sweep(head: bytes) -> bool:
    """Whether these first bytes of a file contain a heading or a row of nccl-tests."""
    if is_report(head):
        return True
    lines = [line for line in head.split(b"\n") if len(line) < _MAX_LINE_BYTES]
    return any(kind.search(line) for line in lines for kind in (_RUN, _HEADING, _ROW))


def read_sweeps(source: Source) -> Sweeps:
    """Reads the tables. Raises DataError if the file cannot be opened or a report is truncated."""
    if is_report(read_head(source)):
        return _read_report(source)
    reading = _SweepReader(source.where)
    with open_unpacked(source) as content:
        for line in content.read_lines():
            if len(line) < _MAX_LINE_BYTES:
                reading.take(line)
    return reading.build_sweeps(content.torn)


def read_intact_sweeps(source: Source) -> Sweeps:
    """As read_sweeps; also raises DataError if all rows of the tables are torn or truncated."""
    found = read_sweeps(source)
    torn = next((note for note in found.notes if note.code == _TORN), None)
    if torn is not None and not found.sweeps:
        raise DataError(source.where, f"no whole row of nccl-tests: {torn.message}", _RUN_AGAIN)
    return found


def _read_report(source: Source) -> Sweeps:
    with open_unpacked(source) as content:
        body = b"".join(iter(lambda: content.read(1 << 20), b""))
        try:
            report = _DECODER.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            problem = f"incomplete nccl-tests report ({error})"
            raise DataError(source.where, problem, "run the test again") from None
        devices = {device.rank: device.device_info for device in report.config.devices}
        nranks = max((rank for rank in devices if rank < MAX_LISTED_RANKS), default=-1) + 1 or -1
        # Of a program whose op is not one of ours, the op stays open.
        name = report.results[0].experiment_name if report.results else ""
        op = _OPS.get(name, parse_op(name))
        sweep = Sweep(
            source=source.where,
            op=op if op in OP_CODE and op != "unknown" else "",
            nranks=nranks,
            devices=tuple(devices.get(rank, "") for rank in range(nranks)),
            rows=tuple(
                SweepRow(
                    message_bytes=row.size,
                    count=row.count,
                    dtype=normalize_dtype(row.type),
                    redop=row.redop,
                    root=_parse_root(row.root.strip()),
                    out_of_place=_build_reported_timing(row.out_of_place),
                    in_place=_build_reported_timing(row.in_place),
                )
                for row in report.results
            ),
            avg_busbw_bytes_per_s=_convert_bandwidth(report.average_bus_bandwidth.bandwidth),
        )
    return Sweeps(source.where, (sweep,) if sweep.rows else (), ())


@dataclass(slots=True)
class _SweepReader:
    """The tables so far, and the heading of the current table.

    A message of NCCL's log that was written in the middle of a row cuts its line: fragment has the
    text before it, which goes on in the next line that is not of the log.
    """

    source: str
    done: list[Sweep] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    torn: int = 0
    joined: int = 0
    fragment: bytes = b""
    hosts: set[bytes] = field(default_factory=set)
    next_program: str = ""
    program: str = ""
    devices: dict[int, str] = field(default_factory=dict)
    rows: list[re.Match[bytes]] = field(default_factory=list)
    unit_ns: int = 0
    counts_wrong: bool = True

    def take(self, line: bytes) -> None:
        """Adds a line of the file."""
        message = _MESSAGE.search(line) if b"NCCL" in line else None
        text = line if message is None else self._cut_message(line, message)
        if message is not None and not text.strip():
            return
        if self.fragment:
            text = _LABEL.sub(b"", text)
            if _BEGUN.match(text.lstrip()):
                self._end_fragment()
        if message is not None:
            self.fragment += text
        elif self.fragment and _ROW.search(self.fragment + text):
            text, self.fragment = self.fragment + text, b""
            self.joined += 1
            self._take_line(text)
        else:
            if self.fragment and _ROW.search(text):
                self._end_fragment()
            self._take_line(text)

    def _cut_message(self, line: bytes, message: re.Match[bytes]) -> bytes:
        """The text before the message of NCCL's log; b"" if the line begins with the message.

        A number that ends the text is not separated from the host name that begins the message.
        """
        before, host = line[: message.start()], message[1]
        if host is None:
            return before
        begins_line = not _LABEL.sub(b"", before).strip()
        cell = _CELL_END if begins_line else _ANY_CELL_END
        ends = [one for one in self.hosts if cell.fullmatch(host.removesuffix(one))]
        known = max(ends, key=len, default=None)
        if known is None and begins_line:
            self.hosts.add(host)
            return b""
        own = known or _NUMBER_AT_BEGIN.sub(b"", host)
        return before + host[: len(host) - len(own)]

    def _end_fragment(self) -> None:
        """Ends a row whose rest is missing."""
        self._take_line(self.fragment)
        self.fragment = b""

    def _take_line(self, line: bytes) -> None:
        """Adds a line that no message cuts."""
        if row := _ROW.search(line):
            if not self.rows:
                self.program, self.next_program = self.next_program, ""
            self.rows.append(row)
        elif average := _AVERAGE.search(line):
            self._close(round(float(average[1]) * 1e9))
        elif device := _RANK.search(line):
            self._close(-1)
            self.devices[int(device[1])] = device[2].decode(errors="replace")
        elif _HEADING.search(line):
            self._close(-1)
            self.counts_wrong = b"#wrong" in line
            self.unit_ns = 0
        elif unit := _UNIT.search(line):
            self.unit_ns = {b"us": 10**3, b"ms": 10**6}[unit[1]]
        elif _RUN.search(line):
            self._close(-1)
            self.devices = {}
        elif program := _PROGRAM.search(line):
            name = program[1].decode()
            self.next_program = _PROGRAMS.get(name, parse_op(name))
        else:
            self.torn += _BEGUN.search(line) is not None

    def _close(self, avg_busbw_bytes_per_s: int) -> None:
        """Ends the current table if it has rows."""
        if not self.rows:
            return
        unit_ns = self.unit_ns or _infer_unit_ns(self.rows)
        rows = tuple(
            SweepRow(
                message_bytes=int(match[1]),
                count=int(match[2]),
                dtype=normalize_dtype(match[3].decode()),
                redop=(match[4] or b"").decode(),
                root=int(match[5] or -1),
                out_of_place=_build_printed_timing(match.groups()[5:9], unit_ns, self.counts_wrong),
                in_place=_build_printed_timing(match.groups()[9:13], unit_ns, self.counts_wrong),
            )
            for match in self.rows
        )
        nranks = max(self.devices) + 1 if self.devices else -1
        # The program that was named before is the table's only if it prints such columns: several
        # programs may write to one file.
        possible = _list_possible_ops(rows, nranks, any(match[5] for match in self.rows))
        op = self.program
        if op not in possible:
            table = f"table {len(self.done) + 1}"
            op = possible[0] if len(possible) == 1 else ""
            if op:
                note = f"{table}: op {op} inferred from columns, sizes and bandwidths"
            else:
                note = f"{table}: the op is ambiguous: {' or '.join(possible) or 'any'}"
            self.notes.append(Note("nccl_tests_op", note))
        devices = tuple(self.devices.get(rank, "") for rank in range(nranks))
        self.done.append(Sweep(self.source, op, nranks, devices, rows, avg_busbw_bytes_per_s))
        self.rows, self.devices, self.program = [], {}, ""

    def build_sweeps(self, torn_end: str) -> Sweeps:
        """All tables; the last one may be incomplete."""
        if self.fragment:
            self._end_fragment()
        self._close(-1)
        if self.joined:
            text = f"{self.joined} rows were torn by NCCL's log; joined again"
            self.notes.append(Note("nccl_tests_joined", text))
        if self.torn:
            self.notes.append(Note(_TORN, f"{self.torn} rows are truncated; ignored"))
        if torn_end:
            self.notes.append(Note("nccl_tests_torn_file", f"the file ends early ({torn_end})"))
        return Sweeps(self.source, tuple(self.done), tuple(self.notes))


def _build_printed_timing(
    cells: tuple[bytes | None, ...], unit_ns: int, counts_wrong: bool
) -> Timing | None:
    time, algbw, busbw, wrong = (_parse_value(cell) for cell in cells)
    # A half that was not run is written as N/A or -1.
    if time < 0:
        return None
    # Older versions print the largest deviation in place of the number of wrong elements.
    is_deviation = not counts_wrong or b"e" in (cells[3] or b"")[:2]
    return Timing(
        time_ns=round(time * unit_ns),
        algbw_bytes_per_s=round(algbw * 1e9) if algbw >= 0 else -1,
        busbw_bytes_per_s=round(busbw * 1e9) if busbw >= 0 else -1,
        wrong=-1 if is_deviation else round(wrong),
    )


def _parse_value(cell: bytes | None) -> float:
    """The number; -1 if there is none."""
    return float(cell) if cell and cell[:1].isdigit() else -1.0


def _infer_unit_ns(rows: Sequence[re.Match[bytes]]) -> int:
    """The unit of the time column, inferred from the bandwidths."""
    for match in reversed(rows):
        time, algbw = _parse_value(match[6]), _parse_value(match[7])
        # From the last rows, which are the largest: a rounded bandwidth of a small one says little.
        if time > 0 and algbw >= 0.1:
            return 10**6 if int(match[1]) / algbw > 30 * time * 10**3 else 10**3
    return 10**3


def _list_possible_ops(rows: Sequence[SweepRow], nranks: int, has_root: bool) -> tuple[str, ...]:
    """The ops that print such rows, by the columns in use and the size of count.

    If count is the full message, the op does not gather or scatter. Only all_gather has printed
    equal bandwidths for a gathered message. In versions where every op prints a root, send_recv
    prints a redop too, which it does not use.
    """
    # The largest row: counts of small ones are rounded up, and ops then look alike.
    row = max(rows, key=lambda row: row.message_bytes)
    rank_bytes = row.count * _BYTES.get(row.dtype, compute_element_bytes(row.dtype))
    timing = row.out_of_place
    equal = timing is not None and timing.algbw_bytes_per_s == timing.busbw_bytes_per_s > 0
    reduces, rooted = row.redop not in ("", "none"), row.root >= 0
    # Ops that print a redop and equal bandwidths; all_reduce does so only with two ranks.
    sums = (
        (("send_recv",) if nranks > 2 else ("all_reduce", "send_recv"))
        if equal and has_root
        else ("all_reduce",)
    )
    full_message_ops = ("reduce",) if reduces and rooted else sums if reduces else (
        ("broadcast",) if rooted else ("send_recv",)
    )  # fmt: skip
    shard_ops = () if reduces and rooted else ("reduce_scatter",) if reduces else (
        ("scatter", "gather") if rooted else ("all_gather", "all_to_all")
    )  # fmt: skip
    if rank_bytes <= 0 or nranks == 1:
        return full_message_ops + shard_ops
    if rank_bytes == row.message_bytes:
        return full_message_ops
    return ("all_gather",) if equal and not reduces and not rooted else shard_ops


# The JSON report of nccl-tests (-J, from 2.17 on), which has one Sweep.


class _Half(Struct):
    alg_bw: float | str
    bus_bw: float | str
    nwrong: float | None
    time: float | str = -1.0
    cpu_time: float | str = -1.0


class _Row(Struct):
    size: int
    count: int
    type: str
    redop: str
    root: str
    out_of_place: _Half | None = None
    in_place: _Half | None = None
    experiment_name: str = ""


class _Device(Struct):
    rank: int
    device_info: str


class _Config(Struct):
    devices: list[_Device]


class _Average(Struct):
    bandwidth: float | str


class _Report(Struct):
    config: _Config
    results: list[_Row]
    average_bus_bandwidth: _Average


_REPORT_BEGIN = re.compile(rb'\A\s*\{\s*"version":\s*\d+,\s*"start_time":\s*"[^"]*",\s*"args":')

_DECODER = msgspec.json.Decoder(_Report)

_OPS = {"SendRecv": "send_recv", "HyperCube": "all_gather"}


def is_report(head: bytes) -> bool:
    """Whether these are the first bytes of a JSON report."""
    return _REPORT_BEGIN.match(head) is not None


def _parse_root(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else -1


def _build_reported_timing(half: _Half | None) -> Timing | None:
    time_ns = (
        -1 if half is None else _scale(max(half.time, half.cpu_time, key=_finite_or_minus_one), 1e3)
    )
    if half is None or time_ns < 0:
        return None
    wrong = -1 if half.nwrong is None else round(half.nwrong)
    return Timing(time_ns, _convert_bandwidth(half.alg_bw), _convert_bandwidth(half.bus_bw), wrong)


def _convert_bandwidth(gigabytes: float | str) -> int:
    return _scale(gigabytes, 1e9)


def _scale(value: float | str, factor: float) -> int:
    return round(_finite_or_minus_one(value) * factor) if _finite_or_minus_one(value) >= 0 else -1


def _finite_or_minus_one(value: float | str) -> float:
    """The number; -1 for a text in place of a number."""
    return value if isinstance(value, float) and math.isfinite(value) else -1.0
