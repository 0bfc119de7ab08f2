"""The JSON report that nccl-tests write beside their table (-J, from 2.17 on) -> its one Sweep."""

from __future__ import annotations

import math
import re

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.communication import dtype_named, op_named
from stepsplit.analyzer.readers.nccl.sweep_nouns import Sweep, SweepRow, Timing
from stepsplit.analyzer.trace import OP_CODE


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


_BEGIN = re.compile(rb'\s*\{\s*"version":\s*\d+,\s*"start_time":\s*"[^"]*",\s*"args":')
_DECODER = msgspec.json.Decoder(_Report)
_OPS = {"SendRecv": "send_recv", "HyperCube": "all_gather"}
MOST_RANKS = 1 << 20


def is_report(head: bytes) -> bool:
    """Whether these are the first bytes of such a report."""
    return _BEGIN.match(head) is not None


def sweep_in(source: str, body: bytes) -> Sweep:
    """The report's table. Raises DataError where the report is cut."""
    try:
        report = _DECODER.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        problem = f"no whole report of nccl-tests ({error})"
        raise DataError(source, problem, "run the test again") from None
    devices = {device.rank: device.device_info for device in report.config.devices}
    nranks = max((rank for rank in devices if rank < MOST_RANKS), default=-1) + 1 or -1
    return Sweep(
        source=source,
        op=_op(report.results[0].experiment_name) if report.results else "",
        nranks=nranks,
        devices=tuple(devices.get(rank, "") for rank in range(nranks)),
        rows=tuple(_row(row) for row in report.results),
        avg_busbw_bytes_per_s=_bytes_per_s(report.average_bus_bandwidth.bandwidth),
    )


def _op(name: str) -> str:
    op = _OPS.get(name, op_named(name))
    return op if op in OP_CODE and op != "unknown" else ""


def _row(row: _Row) -> SweepRow:
    root = row.root.strip()
    return SweepRow(
        message_bytes=row.size,
        count=row.count,
        dtype=dtype_named(row.type),
        redop=row.redop,
        root=int(root) if root.isdecimal() and len(root) < 10 else -1,
        out_of_place=_timing(row.out_of_place),
        in_place=_timing(row.in_place),
    )


def _timing(half: _Half | None) -> Timing | None:
    time_ns = -1 if half is None else _scaled(max(half.time, half.cpu_time, key=_known), 1e3)
    if half is None or time_ns < 0:
        return None
    wrong = -1 if half.nwrong is None else round(half.nwrong)
    return Timing(time_ns, _bytes_per_s(half.alg_bw), _bytes_per_s(half.bus_bw), wrong)


def _bytes_per_s(gigabytes: float | str) -> int:
    return _scaled(gigabytes, 1e9)


def _scaled(value: float | str, factor: float) -> int:
    return round(_known(value) * factor) if _known(value) >= 0 else -1


def _known(value: float | str) -> float:
    """The number; -1 for the text that stands for none."""
    return value if isinstance(value, float) and math.isfinite(value) else -1.0
