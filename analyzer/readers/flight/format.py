"""What a Flight Recorder dump holds, under the names that each torch since 2.2 has written.

| version       | since about| what changed                                                        |
|---------------|------------|---------------------------------------------------------------------|
| none          | torch 2.2  | a bare list of entries: pg_id, seq_id, time_created_us, no dtypes   |
| 1.x           | torch 2.3  | a dict with version and pg_config, nanoseconds, dtypes              |
| 2.0 to 2.10   | torch 2.5  | process_group is (name, description); collective and p2p seq; JSON  |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.pickles import machine as pickles

_BOM = b"\xef\xbb\xbf"
_ENTRIES = re.compile(r'"entries"\s*:\s*\[\s*')
_BETWEEN = re.compile(r"[\s,]*")
_KEYS = frozenset({"entries", "pg_config", "pg_status"})
_NO_DUMP = "not a Flight Recorder dump"

Int = Annotated[int, Meta(ge=-1, le=1 << 62)]


class RawFrame(Struct):
    """A line of the stack; only pickles have it."""

    name: str = ""
    filename: str = ""
    line: Int = -1


class RawEntry(Struct):
    """An entry, with the old names beside the new. In JSON a time that is not known is 0."""

    profiling_name: str
    process_group: tuple[str, ...] | str | None = None
    pg_name: str = ""
    pg_desc: str = ""
    pg_id: Int = -1
    seq_id: Int = -1
    collective_seq_id: Int = -1
    p2p_seq_id: Int = -1
    is_p2p: bool | None = None
    time_created_ns: Int = -1
    time_created_us: Annotated[int, Meta(ge=-1, le=1 << 52)] = -1
    time_discovered_started_ns: Int | None = None
    time_discovered_completed_ns: Int | None = None
    duration_ms: Annotated[float, Meta(ge=0, le=1 << 40)] | None = None
    timeout_ms: Annotated[int, Meta(ge=-1, le=1 << 40)] = -1
    input_sizes: Any = ()
    output_sizes: Any = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: str = ""
    retired: bool = False
    thread_name: str = ""
    frames: tuple[RawFrame, ...] = ()


class RawStatus(Struct):
    """How far a group came; JSON writes the numbers as text."""

    last_enqueued_collective: Int = -1
    last_started_collective: Int = -1
    last_completed_collective: Int = -1


class RawDump(Struct):
    """The whole dump; its entries are checked one by one, so that an odd one costs only itself."""

    version: str | float = ""
    entries: list[Any] = []
    pg_config: dict[str, Any] = {}
    pg_status: dict[str, Any] = {}


def recognizes(head: bytes) -> bool:
    """Whether the bytes begin as a Flight Recorder dump does, in JSON or as a pickle."""
    if pickles.recognizes(head):
        return any(key in head for key in (b"profiling_name", b"pg_config", b"pg_status"))
    if not head.removeprefix(_BOM).lstrip().startswith((b"{", b"[")) or b'"traceEvents"' in head:
        return False
    if b'"profiling_name"' in head:
        return b'"time_created_ns"' in head or b'"time_created_us"' in head
    return b'"pg_status"' in head or (b'"pg_config"' in head and b'"comm_lib_version"' in head)


def dump_in(text: bytes, where: str) -> tuple[RawDump, bool]:
    """What the file holds, and whether it is cut off. Raises DataError for what is no dump."""
    if pickles.recognizes(text):
        return _checked(pickles.plain_value(text, where), where), False
    try:
        return _checked(msgspec.json.decode(text.removeprefix(_BOM)), where), False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        entries = list(_whole_entries(text.decode("utf-8", "replace")))
        if not entries:
            raise DataError(where, f"{_NO_DUMP} ({error})", RECORD_AGAIN) from None
        return RawDump(entries=entries), True


def _checked(found: object, where: str) -> RawDump:
    """The dump that plain values are; the first dumps were their entries alone."""
    try:
        if isinstance(found, list) and any(map(_is_entry, found)):
            return RawDump(entries=found)
        if isinstance(found, dict) and not _KEYS.isdisjoint(found):
            return msgspec.convert(found, RawDump)
    except msgspec.ValidationError as error:
        raise DataError(where, f"{_NO_DUMP} ({error})", RECORD_AGAIN) from None
    raise DataError(where, _NO_DUMP, "name a file that torch has dumped")


def _is_entry(value: object) -> bool:
    return isinstance(value, dict) and "profiling_name" in value


def _whole_entries(text: str) -> Iterator[object]:
    """The entries of a JSON dump that ends early, up to the last whole one."""
    decode = json.JSONDecoder().raw_decode
    if (begin := _ENTRIES.search(text)) is None:
        return
    at = begin.end()
    while True:
        try:
            entry, at = decode(text, at)
        except (ValueError, RecursionError):
            return
        yield entry
        between = _BETWEEN.match(text, at)
        assert between is not None
        at = between.end()
