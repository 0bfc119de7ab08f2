"""Flight Recorder dumps, JSON or pickle, of any torch version."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.ops import (
    MOST_CALL_BYTES,
    dtype_named,
    element_bytes,
    known_bytes,
    message_bytes,
    op_named,
)
from stepsplit.analyzer.readers.compression import unpacked
from stepsplit.analyzer.readers.pickle import plain_value, read_whole, recognizes
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import Call, Group, Note, RankCalls, to_calls

# A rank's Flight Recorder dump, JSON or pickle, of any torch -> its calls and their states.

_SAYS_RANK = re.compile(r"rank[-_. ]?(\d{1,7})(?!\d)", re.I)

_ENDS_IN_NUMBER = re.compile(r"(?<!\d)(\d{1,7})(?:\.[a-z]\w*)*$", re.I)

_NUMBER = re.compile(r"[0-9]{1,9}")

_PEER = re.compile(r"\d\s*(?:->|<-)\s*(\d{1,7})\s*$")


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """How far the rank came on a group, in sequence numbers; -1 for none.

    group_name is "" where neither an entry nor the order of the groups tells it.
    """

    group_number: int
    group_name: str
    last_enqueued: int
    last_started: int
    last_completed: int


@dataclass(frozen=True, slots=True)
class FlightDump:
    """What one rank's recorder held: a row of calls for each entry, in the order of creation.

    version is "" for the first dumps, which state none.
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
        """The groups that the dump lists, then those that only entries name, without ranks."""
        return self.calls.groups

    @property
    def notes(self) -> tuple[Note, ...]:
        return self.calls.notes


def read_dump(source: Source) -> FlightDump:
    """The dump in the file.

    The rank is the one member that all groups share, else what the file's name says, else -1 and a
    note. Odd entries are left out and counted. Raises DataError for what is no dump.
    """
    with unpacked(source) as content:
        text = read_whole(content, source.where)
    found, torn = dump_in(text, source.where)
    entries, odd = _entries(found)
    # gloo lists one group without a name, of which nothing else speaks.
    listed = tuple(_group(name, config) for name, config in found.pg_config.items() if name)
    rank = _rank(source.inner, listed)
    return FlightDump(
        version=str(found.version),
        calls=_calls(source.where, rank, entries, listed, _notes(odd, torn, rank)),
        entries=entries,
        statuses=_statuses(found.pg_status, entries, listed),
    )


def _notes(odd: int, torn: bool, rank: int) -> tuple[Note, ...]:
    stated = None if rank < 0 else rank
    notes = []
    if odd:
        notes.append(Note("flight_odd", f"{odd} odd entries of the dump are left out", stated))
    if torn:
        notes.append(Note("flight_torn", "the dump is cut off: its last entries lack", stated))
    if stated is None:
        notes.append(Note("rank_unknown", "neither the dump nor its file's name tells the rank"))
    return tuple(notes)


def _entries(found: RawDump) -> tuple[tuple[FlightEntry, ...], int]:
    """The entries by creation, and how many were odd."""
    entries = []
    for one in found.entries:
        try:
            entries.append(to_entry(msgspec.convert(one, RawEntry)))
        except (msgspec.ValidationError, UnicodeEncodeError):
            continue
    odd = len(found.entries) - len(entries)
    return tuple(sorted(entries, key=lambda entry: entry.created_unix_ns)), odd


def _group(name: str, config: Any) -> Group:
    """A group of pg_config, whose ranks are a list or the text of one."""
    told = config if isinstance(config, dict) else {"ranks": config}
    ranks, description = told.get("ranks"), told.get("desc")
    if isinstance(ranks, str):
        ranks = [int(rank) for rank in re.findall(r"\d{1,9}", ranks)]
    if not isinstance(ranks, (list, tuple)):
        ranks = ()
    members = tuple(rank for rank in ranks if type(rank) is int and 0 <= rank < 1 << 31)
    return Group(name, members, description if isinstance(description, str) else "")


def _rank(path: PurePosixPath, listed: Sequence[Group]) -> int:
    """The rank: a process lists only groups that it is in, so what they share may be it alone."""
    members = [set(group.ranks) for group in listed if group.ranks]
    shared = set.intersection(*members) if members else set()
    if len(shared) == 1:
        return shared.pop()
    match = (
        _SAYS_RANK.search(path.name)
        or _ENDS_IN_NUMBER.search(path.name)
        or _SAYS_RANK.search(path.parent.name)
    )
    named = int(match[1]) if match else -1
    return named if not shared or named in shared else -1


def _calls(
    where: str,
    rank: int,
    entries: Sequence[FlightEntry],
    listed: Sequence[Group],
    notes: tuple[Note, ...],
) -> RankCalls:
    """The rows of the entries, on the dump's own groups."""
    known = {group.name for group in listed}
    named = {e.group_name: e.group_description for e in entries if e.group_name not in known}
    groups = (*listed, *(Group(name, (), text) for name, text in named.items() if name))
    places = {group.name: place for place, group in enumerate(groups)}
    t0_unix_ns = min((e.created_unix_ns for e in entries if e.created_unix_ns >= 0), default=0)
    rows = [_call(e, places.get(e.group_name, -1), groups, t0_unix_ns) for e in entries]
    dur_ns = np.array([entry.dur_ns for entry in entries], dtype=np.int64)
    world_size = next((len(g.ranks) for g in listed if g.ranks and _is_default(g)), -1)
    return RankCalls(where, rank, world_size, "", t0_unix_ns, to_calls(rows), dur_ns, groups, notes)


def _is_default(group: Group) -> bool:
    return group.description == "default_pg" or group.name == "0"


def _call(entry: FlightEntry, group_id: int, groups: Sequence[Group], t0_unix_ns: int) -> Call:
    ranks = groups[group_id].ranks if group_id >= 0 else ()
    op = op_of(entry.name)
    created = entry.created_unix_ns
    peer = _PEER.search(entry.name)
    place = int(peer[1]) if peer else len(ranks)
    return Call(
        event=-1,
        op=op,
        issued_ns=created - t0_unix_ns if created >= 0 else -1,
        group_id=group_id,
        seq=entry.seq,
        dtype=dtype_named(entry.dtype),
        peer=ranks[place] if place < len(ranks) else -1,
        input_bytes=entry.input_bytes,
        message_bytes=_whole_bytes(op, entry, len(ranks)),
    )


def _whole_bytes(op: str, entry: FlightEntry, group_size: int) -> int:
    return known_bytes(message_bytes(op, entry.input_bytes, entry.output_bytes, group_size))


def _statuses(
    told: Mapping[str, Any], entries: Sequence[FlightEntry], listed: Sequence[Group]
) -> tuple[GroupStatus, ...]:
    """The groups' statuses by number; an odd one is left out."""
    by_number = {int(key): value for key, value in told.items() if _NUMBER.fullmatch(key)}
    names = _names(sorted(by_number), entries, listed)
    found = []
    for number, value in sorted(by_number.items(), key=lambda item: item[0]):
        try:
            raw = msgspec.convert(value, RawStatus, strict=False)
        except msgspec.ValidationError:
            continue
        found.append(GroupStatus(
            number, names.get(number, ""), raw.last_enqueued_collective,
            raw.last_started_collective, raw.last_completed_collective,
        ))  # fmt: skip
    return tuple(found)


def _names(
    numbers: Sequence[int], entries: Sequence[FlightEntry], listed: Sequence[Group]
) -> dict[int, str]:
    """Each group number's name, by the entries; by order where every listed group has a status.

    Numbers are a process's own and names the job's, and both count up as groups are made.
    """
    seen = {entry.group_number: entry.group_name for entry in entries}
    names = [group.name for group in listed]
    if len(names) != len(numbers) or not all(map(_NUMBER.fullmatch, names)):
        return seen
    in_order = dict(zip(numbers, sorted(names, key=int), strict=True))
    agree = all(in_order.get(number, name) == name for number, name in seen.items())
    return in_order | seen if agree else seen


# One entry of a Flight Recorder dump: a collective or message as the host called it.

_MOST_DIMS = 64


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of code that a stack goes through."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One collective or message as the host called it; -1 and "" are unknown.

    created_unix_ns is the time of the call; started and completed are when the watchdog noticed,
    maybe much later. dur_ns is the device's own where torch timed it, else what the watchdog saw.
    state is "scheduled", "started" or "completed"; gloo's stays "scheduled", and there as with NCCL
    retired tells that nobody waits for the call any more. The stack is innermost first.
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


def to_entry(raw: RawEntry) -> FlightEntry:
    """The entry under the names of today."""
    name, description = _group_of(raw)
    is_p2p = op_of(raw.profiling_name) in ("send", "recv") if raw.is_p2p is None else raw.is_p2p
    seq = raw.p2p_seq_id if is_p2p else raw.collective_seq_id
    created_us = raw.time_created_us
    started, completed = raw.time_discovered_started_ns, raw.time_discovered_completed_ns
    return FlightEntry(
        group_name=name,
        group_description=description,
        group_number=raw.pg_id,
        seq=raw.seq_id if seq < 0 else seq,
        name=raw.profiling_name,
        created_unix_ns=raw.time_created_ns if created_us < 0 else created_us * 1000,
        dtype=raw.input_dtypes[0] if raw.input_dtypes else "",
        input_bytes=_bytes(raw.input_sizes, raw.input_dtypes),
        output_bytes=_bytes(raw.output_sizes, raw.output_dtypes or raw.input_dtypes),
        state=raw.state,
        is_p2p=is_p2p,
        started_unix_ns=started or -1,
        completed_unix_ns=completed or -1,
        dur_ns=_dur_ns(raw.duration_ms, started or -1, completed or -1),
        retired=raw.retired,
        timeout_ns=raw.timeout_ms * 1_000_000 if raw.timeout_ms >= 0 else -1,
        thread_name=raw.thread_name,
        stack=tuple(_frame(one.name, one.filename, one.line) for one in raw.frames),
    )


def _group_of(raw: RawEntry) -> tuple[str, str]:
    """The group's name and description; a dump without names has the group's number."""
    match raw.process_group:
        case str(name):
            return name, raw.pg_desc
        case (name, description, *_):
            return name, description
        case (name,):
            return name, raw.pg_desc
    return raw.pg_name or (str(raw.pg_id) if raw.pg_id >= 0 else ""), raw.pg_desc


def op_of(name: str) -> str:
    """The op of a name such as "nccl:all_reduce" or "nccl:recv 0<-1"."""
    return op_named(name.partition(":")[2] or name)


def _dur_ns(duration_ms: float | None, started_ns: int, completed_ns: int) -> int:
    if duration_ms is not None:
        return round(duration_ms * 1e6)
    return completed_ns - started_ns if completed_ns > started_ns > 0 else -1


@lru_cache(maxsize=4096)
def _frame(function: str, file: str, line: int) -> Frame:
    """The frame, one object for all the stacks that go through it."""
    return Frame(function, file, line)


def _bytes(sizes: Any, dtypes: Sequence[str]) -> int:
    """The size of tensors of these shapes; one tensor's shape may come without a list around it."""
    if not isinstance(sizes, (list, tuple)) or not sizes:
        return -1
    shapes = [sizes] if all(isinstance(dim, int) for dim in sizes) else sizes
    kinds = dtypes if len(dtypes) == len(shapes) else [*dtypes[:1]] * len(shapes)
    widths = [element_bytes(kind) for kind in kinds]
    counts = [_elements(shape) for shape in shapes]
    if not widths or min(widths + counts) < 0:
        return -1
    return known_bytes(sum(c * width for c, width in zip(counts, widths, strict=True)))


def _elements(shape: Any) -> int:
    """The elements of a tensor; -1 for what is no shape."""
    if not isinstance(shape, (list, tuple)) or len(shape) > _MOST_DIMS:
        return -1
    whole = all(isinstance(dim, int) and 0 <= dim <= MOST_CALL_BYTES for dim in shape)
    return math.prod(shape) if whole else -1


# What a Flight Recorder dump holds, under the names that each torch since 2.2 has written.
#
# | version       | since about| what changed
# | |---------------|------------|----------------------------------------------------------------
# -----| | none          | torch 2.2  | a bare list of entries: pg_id, seq_id, time_created_us, no
# dtypes   | | 1.x           | torch 2.3  | a dict with version and pg_config, nanoseconds, dtypes
# | | 2.0 to 2.10   | torch 2.5  | process_group is (name, description); collective and p2p seq;
# JSON  |

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


def is_flight_dump(head: bytes) -> bool:
    """Whether the bytes begin as a Flight Recorder dump does, in JSON or as a pickle."""
    if recognizes(head):
        return any(key in head for key in (b"profiling_name", b"pg_config", b"pg_status"))
    if not head.removeprefix(_BOM).lstrip().startswith((b"{", b"[")) or b'"traceEvents"' in head:
        return False
    if b'"profiling_name"' in head:
        return b'"time_created_ns"' in head or b'"time_created_us"' in head
    return b'"pg_status"' in head or (b'"pg_config"' in head and b'"comm_lib_version"' in head)


def dump_in(text: bytes, where: str) -> tuple[RawDump, bool]:
    """What the file holds, and whether it is cut off. Raises DataError for what is no dump."""
    if recognizes(text):
        return _checked(plain_value(text, where), where), False
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
