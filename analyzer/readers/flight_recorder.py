"""Reads Flight Recorder dumps, JSON or pickle, of any torch version."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.ops import (
    MAX_CALL_BYTES,
    MAX_DIMS,
    compute_element_bytes,
    compute_message_bytes,
    normalize_dtype,
    parse_op,
    sanitize_bytes,
)
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.pickle import is_pickle, load_plain_value, read_whole
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Call, Group, Note, RankCalls, build_calls

_RANK_IN_NAME = re.compile(r"rank[-_. ]?(\d{1,7})(?!\d)", re.I)

# torch appends the rank to TORCH_NCCL_DEBUG_INFO_TEMP_FILE.
_ENDS_IN_NUMBER = re.compile(r"(?<!\d)(\d{1,7})(?:\.[a-z]\w*){0,8}$", re.I)

_NUMBER = re.compile(r"[0-9]{1,9}")

# nccl:recv 0<-1
_PEER = re.compile(r"\d\s*(?:->|<-)\s*(\d{1,7})\s*$")


class GroupStatus(Struct, frozen=True):
    """The progress of a rank on a process group, in sequence numbers; -1 for none.

    Attributes:
        group_number: The number of the group within the process.
        group_name: Its name in the job, "" if it cannot be inferred.
        last_enqueued: The last collective that was enqueued.
        last_completed: The last collective that completed.
    """

    group_number: int
    group_name: str
    last_enqueued: int
    last_completed: int


class FlightDump(Struct, frozen=True):
    """The Flight Recorder dump of one rank.

    Attributes:
        version: Version of the dump format, "" for the earliest dumps.
        calls: The calls: one row per entry, in order of creation.
        entries: The entries, in order of creation.
        statuses: The progress on each process group.
    """

    version: str
    calls: RankCalls
    entries: tuple[FlightEntry, ...]
    statuses: tuple[GroupStatus, ...]

    @property
    def source(self) -> str:
        return self.calls.source

    @property
    def rank(self) -> int:
        return self.calls.rank

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups in the dump's list, then those named only by entries, without ranks."""
        return self.calls.groups

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.calls.notes


def read_dump(source: Source) -> FlightDump:
    """Reads the dump in the file.

    The rank is the only common member of all groups, else the one in the file name, else -1 with a
    note. Invalid entries are skipped and counted. Raises DataError if the file is not a dump.
    """
    with open_unpacked(source) as content:
        text = read_whole(content, source.where)
    raw, torn = decode_dump(text, source.where)
    entries, n_odd = [], 0
    for raw_entry in raw.entries:
        try:
            entries.append(convert_entry(msgspec.convert(raw_entry, RawEntry)))
        except (msgspec.ValidationError, UnicodeEncodeError):
            n_odd += 1
    entries.sort(key=lambda entry: entry.created_unix_ns)
    # gloo lists a group without a name, to which no entry refers.
    listed_groups = tuple(
        _parse_group(name, config) for name, config in raw.pg_config.items() if name
    )
    # A process lists only its own groups, so the rank may be their only common member.
    members = [set(group.ranks) for group in listed_groups if group.ranks]
    shared = set.intersection(*members) if members else set()
    rank = min(shared) if len(shared) == 1 else find_rank_in_path(source.inner)
    if shared and rank not in shared:
        rank = -1
    return FlightDump(
        version=str(raw.version),
        calls=_build_calls(
            source.where, rank, entries, listed_groups, _list_notes(n_odd, torn, rank)
        ),
        entries=tuple(entries),
        statuses=_build_statuses(raw.pg_status, entries, listed_groups),
    )


def _list_notes(n_odd: int, torn: bool, rank: int) -> tuple[Note, ...]:
    known_rank = None if rank < 0 else rank
    notes = []
    if n_odd:
        notes.append(
            Note("flight_odd", f"{n_odd} invalid entries of the dump are skipped", known_rank)
        )
    if torn:
        notes.append(
            Note("flight_torn", "the dump is cut off: its last entries are missing", known_rank)
        )
    if known_rank is None:
        notes.append(Note("rank_unknown", "neither the dump nor its file name contains the rank"))
    return tuple(notes)


def _parse_group(name: str, config: Any) -> Group:
    """A group of pg_config; its ranks are a list, or a text with one."""
    fields = config if isinstance(config, dict) else {"ranks": config}
    ranks, description = fields.get("ranks"), fields.get("desc")
    if isinstance(ranks, str):
        ranks = [int(rank) for rank in re.findall(r"\d{1,9}", ranks)]
    if not isinstance(ranks, (list, tuple)):
        ranks = ()
    members = tuple(rank for rank in ranks if type(rank) is int and 0 <= rank < 1 << 31)
    return Group(name, members, description if isinstance(description, str) else "")


def find_rank_in_path(path: PurePosixPath) -> int:
    """The rank in the name of a dump, or else of its folder; -1 for none."""
    match = (
        _RANK_IN_NAME.search(path.name)
        or _ENDS_IN_NUMBER.search(path.name)
        or _RANK_IN_NAME.search(path.parent.name)
    )
    return int(match[1]) if match else -1


def _build_calls(
    where: str,
    rank: int,
    entries: Sequence[FlightEntry],
    listed: Sequence[Group],
    notes: tuple[Note, ...],
) -> RankCalls:
    """The entries as rows, with the groups of the dump."""
    listed_names = {group.name for group in listed}
    unlisted = {
        e.group_name: e.group_description for e in entries if e.group_name not in listed_names
    }
    groups = (*listed, *(Group(name, (), text) for name, text in unlisted.items() if name))
    positions = {group.name: place for place, group in enumerate(groups)}
    t0_unix_ns = min((e.created_unix_ns for e in entries if e.created_unix_ns >= 0), default=0)
    rows = [_build_call(e, positions.get(e.group_name, -1), groups, t0_unix_ns) for e in entries]
    dur_ns = np.array([entry.dur_ns for entry in entries], dtype=np.int64)
    world_size = next((len(g.ranks) for g in listed if g.ranks and g.is_default), -1)
    return RankCalls(
        where, rank, world_size, "", t0_unix_ns, build_calls(rows), dur_ns, groups, notes
    )


def _build_call(
    entry: FlightEntry, group_id: int, groups: Sequence[Group], t0_unix_ns: int
) -> Call:
    ranks = groups[group_id].ranks if group_id >= 0 else ()
    op = parse_entry_op(entry.name)
    created = entry.created_unix_ns
    peer = _PEER.search(entry.name)
    position = int(peer[1]) if peer else len(ranks)
    return Call(
        event=-1,
        op=op,
        issued_ns=created - t0_unix_ns if created >= 0 else -1,
        group_id=group_id,
        seq=entry.seq,
        dtype=normalize_dtype(entry.dtype),
        peer=ranks[position] if position < len(ranks) else -1,
        input_bytes=entry.input_bytes,
        message_bytes=sanitize_bytes(
            compute_message_bytes(op, entry.input_bytes, entry.output_bytes, len(ranks))
        ),
    )


def _build_statuses(
    raw_statuses: Mapping[str, Any], entries: Sequence[FlightEntry], listed: Sequence[Group]
) -> tuple[GroupStatus, ...]:
    """The status of each group by number; invalid ones are skipped."""
    by_number = {int(key): value for key, value in raw_statuses.items() if _NUMBER.fullmatch(key)}
    names = _name_groups(sorted(by_number), entries, listed)
    statuses = []
    for number, value in sorted(by_number.items(), key=lambda item: item[0]):
        try:
            raw = msgspec.convert(value, RawStatus, strict=False)
        except msgspec.ValidationError:
            continue
        enqueued, completed = raw.last_enqueued_collective, raw.last_completed_collective
        statuses.append(GroupStatus(number, names.get(number, ""), enqueued, completed))
    return tuple(statuses)


def _name_groups(
    numbers: Sequence[int], entries: Sequence[FlightEntry], listed: Sequence[Group]
) -> dict[int, str]:
    """The name of each group number, from the entries or, if all groups have a status, by order.

    Numbers are local to a process and names are global; both increase as groups are created.
    """
    # Entries know both; a group on which nothing was called has a status alone.
    names_in_entries = {entry.group_number: entry.group_name for entry in entries}
    names = [group.name for group in listed]
    if len(names) != len(numbers) or not all(map(_NUMBER.fullmatch, names)):
        return names_in_entries
    in_order = dict(zip(numbers, sorted(names, key=int), strict=True))
    agree = all(in_order.get(number, name) == name for number, name in names_in_entries.items())
    return in_order | names_in_entries if agree else names_in_entries


# Entries of a dump.


class Frame(Struct, frozen=True):
    """A frame of a Python stack.

    Attributes:
        function: Name of the function.
        file: Path of the source file.
        line: Line number, -1 if unknown.
    """

    function: str
    file: str
    line: int


class FlightEntry(Struct, frozen=True):
    """A collective, send or receive as issued by the host; -1 and "" are unknown.

    Attributes:
        group_name: Name of the process group.
        group_description: Description of the process group.
        group_number: Number of the group within the process.
        seq: Sequence number on the group.
        name: Name of the call such as "nccl:all_reduce".
        created_unix_ns: When the host issued the call.
        dtype: Dtype of the first input.
        input_bytes: Size of the inputs in bytes.
        output_bytes: Size of the outputs in bytes.
        state: "scheduled", "started" or "completed"; with gloo always "scheduled".
        is_p2p: Whether it is a send or receive.
        started_unix_ns: When the watchdog observed the start, possibly much later.
        completed_unix_ns: When the watchdog observed the end, possibly much later.
        dur_ns: Duration on the device if torch measured it, else as the watchdog observed it.
        retired: Whether the watchdog has finished with the call.
        timeout_ns: Timeout of the call.
        thread_name: Name of the thread that issued the call.
        stack: The Python stack, innermost frame first.
    """

    group_name: str
    group_description: str
    group_number: int
    seq: int
    name: str
    created_unix_ns: int
    dtype: str
    input_bytes: int
    output_bytes: int
    state: str
    is_p2p: bool
    started_unix_ns: int
    completed_unix_ns: int
    dur_ns: int
    retired: bool
    timeout_ns: int
    thread_name: str
    stack: tuple[Frame, ...]


def convert_entry(raw: RawEntry) -> FlightEntry:
    """Converts an entry of any torch version."""
    name, description = _find_group(raw)
    is_p2p = (
        parse_entry_op(raw.profiling_name) in ("send", "recv") if raw.is_p2p is None else raw.is_p2p
    )
    seq = raw.p2p_seq_id if is_p2p else raw.collective_seq_id
    created_us = raw.time_created_us
    started_ns = raw.time_discovered_started_ns or -1
    completed_ns = raw.time_discovered_completed_ns or -1
    dur_ns = completed_ns - started_ns if completed_ns > started_ns > 0 else -1
    if raw.duration_ms is not None:
        # As measured by events on the device; the watchdog observes both ends late.
        dur_ns = round(raw.duration_ms * 1e6)
    return FlightEntry(
        group_name=name,
        group_description=description,
        group_number=raw.pg_id,
        seq=raw.seq_id if seq < 0 else seq,
        name=raw.profiling_name,
        created_unix_ns=raw.time_created_ns if created_us < 0 else created_us * 1000,
        dtype=raw.input_dtypes[0] if raw.input_dtypes else "",
        input_bytes=_compute_bytes(raw.input_sizes, raw.input_dtypes),
        output_bytes=_compute_bytes(raw.output_sizes, raw.output_dtypes or raw.input_dtypes),
        state=raw.state,
        is_p2p=is_p2p,
        started_unix_ns=started_ns,
        completed_unix_ns=completed_ns,
        dur_ns=dur_ns,
        retired=raw.retired,
        timeout_ns=raw.timeout_ms * 1_000_000 if raw.timeout_ms >= 0 else -1,
        thread_name=raw.thread_name,
        stack=tuple(_make_frame(one.name, one.filename, one.line) for one in raw.frames),
    )


def _find_group(raw: RawEntry) -> tuple[str, str]:
    """The group's name and description; the name is its number in dumps without names."""
    match raw.process_group:
        case str(name):
            return name, raw.pg_desc
        case (name, description, *_):
            return name, description
        case (name,):
            return name, raw.pg_desc
    return raw.pg_name or (str(raw.pg_id) if raw.pg_id >= 0 else ""), raw.pg_desc


def parse_entry_op(name: str) -> str:
    """The op in a name such as "nccl:all_reduce" or "nccl:recv 0<-1"."""
    return parse_op(name.partition(":")[2] or name)


@lru_cache(maxsize=4096)
def _make_frame(function: str, file: str, line: int) -> Frame:
    """A frame; equal frames share one object."""
    return Frame(function, file, line)


def _compute_bytes(sizes: Any, dtypes: Sequence[str]) -> int:
    """The size of tensors of these shapes; a single shape may come without an outer list."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return -1
    shapes = [sizes] if all(isinstance(dim, int) for dim in sizes) else sizes
    # Some versions write one dtype for all tensors of a call.
    kinds = dtypes if len(dtypes) == len(shapes) else [*dtypes[:1]] * len(shapes)
    widths = [compute_element_bytes(kind) for kind in kinds]
    counts = [_count_elements(shape) for shape in shapes]
    if not widths or min(widths + counts) < 0:
        return -1
    return sanitize_bytes(sum(c * width for c, width in zip(counts, widths, strict=True)))


def _count_elements(shape: Any) -> int:
    """The number of elements of a shape; -1 if it is not a shape."""
    if not isinstance(shape, (list, tuple)) or len(shape) > MAX_DIMS:
        return -1
    is_shape = all(isinstance(dim, int) and 0 <= dim <= MAX_CALL_BYTES for dim in shape)
    return math.prod(shape) if is_shape else -1


# The fields of a dump, under the names of all torch versions since 2.2.
#
# none (torch 2.2): a bare list of entries; pg_id, seq_id, time_created_us, no dtypes
# 1.x (torch 2.3): a dict with version and pg_config; nanoseconds, dtypes
# 2.0 to 2.10 (torch 2.5): process_group is (name, description); collective and p2p seq; JSON

_BOM = b"\xef\xbb\xbf"

_ENTRIES = re.compile(r'"entries"\s*:\s*\[\s*')

_BETWEEN = re.compile(r"[\s,]*")

_KEYS = frozenset({"entries", "pg_config", "pg_status"})

_NO_DUMP = "not a Flight Recorder dump"

Int = Annotated[int, Meta(ge=-1, le=1 << 62)]


class RawFrame(Struct):
    """A frame of the stack; only in pickles."""

    name: str = ""
    filename: str = ""
    line: Int = -1


class RawEntry(Struct):
    """An entry, with old and new field names. In JSON an unknown time is 0."""

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
    """The progress on a group; in JSON the numbers are texts."""

    last_enqueued_collective: Int = -1
    last_completed_collective: Int = -1


class RawDump(Struct):
    """The dump; entries are validated one by one, so that an invalid one loses only itself."""

    version: str | float = ""
    entries: list[Any] = []
    pg_config: dict[str, Any] = {}
    pg_status: dict[str, Any] = {}


def is_flight_dump(head: bytes) -> bool:
    """Whether the bytes are the beginning of a Flight Recorder dump, JSON or pickle."""
    if is_pickle(head):
        return any(key in head for key in (b"profiling_name", b"pg_config", b"pg_status"))
    # A trace of Kineto may contain the key of an entry in the arguments of its events.
    if not head.removeprefix(_BOM).lstrip().startswith((b"{", b"[")) or b'"traceEvents"' in head:
        return False
    if b'"profiling_name"' in head:
        return b'"time_created_ns"' in head or b'"time_created_us"' in head
    return b'"pg_status"' in head or (b'"pg_config"' in head and b'"comm_lib_version"' in head)


def decode_dump(text: bytes, where: str) -> tuple[RawDump, bool]:
    """The content of the file, and whether it is cut off. Raises DataError if it is not a dump."""
    if is_pickle(text):
        return _validate_dump(load_plain_value(text, where), where), False
    try:
        return _validate_dump(msgspec.json.decode(text.removeprefix(_BOM)), where), False
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        entries = list(_decode_whole_entries(text.decode("utf-8", "replace")))
        if not entries:
            raise DataError(where, f"{_NO_DUMP} ({error})", RECORD_AGAIN) from None
        return RawDump(entries=entries), True


def _validate_dump(value: object, where: str) -> RawDump:
    """Converts plain values to a dump; the earliest dumps are a list of entries."""
    try:
        if isinstance(value, list) and any(
            isinstance(one, dict) and "profiling_name" in one for one in value
        ):
            return RawDump(entries=value)
        if isinstance(value, dict) and not _KEYS.isdisjoint(value):
            return msgspec.convert(value, RawDump)
    except msgspec.ValidationError as error:
        raise DataError(where, f"{_NO_DUMP} ({error})", RECORD_AGAIN) from None
    raise DataError(where, _NO_DUMP, "name a Flight Recorder dump of torch")


def _decode_whole_entries(text: str) -> Iterator[object]:
    """The entries of a truncated JSON dump, up to the last complete one."""
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
