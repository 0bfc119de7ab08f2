"""A rank's Flight Recorder dump (JSON only: a pickle may run code when it is read)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.readers.communication import element_bytes
from stepsplit.analyzer.readers.files import RECORD_AGAIN, read_text


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One collective as the host called it. created_unix_ns is the time of the call."""

    group_name: str
    group_description: str
    group_number: int
    seq: int
    name: str
    created_unix_ns: int
    dtype: str
    input_bytes: int
    output_bytes: int


class _Entry(Struct):
    process_group: tuple[str, str]
    time_created_ns: int
    profiling_name: str
    pg_id: int = 0
    collective_seq_id: int = -1
    is_p2p: bool = False
    input_sizes: list[list[int]] = []
    output_sizes: list[list[int]] = []
    input_dtypes: list[str] = []


class _Dump(Struct):
    entries: list[_Entry] = []


def read_flight(path: Path) -> tuple[FlightEntry, ...]:
    """The collectives of the dump, in the order of their calls; sends and receives are left out."""
    try:
        dump = msgspec.json.decode(read_text(path), type=_Dump)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"not a Flight Recorder dump ({error})", RECORD_AGAIN) from None
    found = (_entry(entry) for entry in dump.entries if not entry.is_p2p)
    return tuple(sorted(found, key=lambda entry: entry.created_unix_ns))


def _entry(entry: _Entry) -> FlightEntry:
    dtype = entry.input_dtypes[0] if entry.input_dtypes else ""
    name, description = entry.process_group
    return FlightEntry(
        group_name=name,
        group_description=description,
        group_number=entry.pg_id,
        seq=entry.collective_seq_id,
        name=entry.profiling_name,
        created_unix_ns=entry.time_created_ns,
        dtype=dtype,
        input_bytes=_bytes(entry.input_sizes, dtype),
        output_bytes=_bytes(entry.output_sizes, dtype),
    )


def _bytes(sizes: list[list[int]], dtype: str) -> int:
    width = element_bytes(dtype)
    return sum(math.prod(size) for size in sizes) * width if width > 0 and sizes else -1
