"""A rank's Flight Recorder dump, JSON or pickle, of any torch -> its calls and their states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from stepsplit.analyzer.readers.calls import Call, to_calls
from stepsplit.analyzer.readers.communication import dtype_named, known_bytes, message_bytes
from stepsplit.analyzer.readers.flight.entries import (
    FlightEntry,
    Frame,
    op_of,
    to_entry,
)
from stepsplit.analyzer.readers.flight.format import (
    RawDump,
    RawEntry,
    RawStatus,
    dump_in,
    recognizes,
)
from stepsplit.analyzer.readers.pickles import machine as pickles
from stepsplit.analyzer.readers.sources import DiskFile, Source
from stepsplit.analyzer.readers.unpack import unpacked
from stepsplit.analyzer.trace import Group, Note, RankCalls

__all__ = [
    "FlightDump",
    "FlightEntry",
    "Frame",
    "GroupStatus",
    "read_dump",
    "read_flight",
    "recognizes",
]

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


def read_flight(path: Path) -> tuple[FlightEntry, ...]:
    """The collectives of the dump, in the order of their calls; sends and receives are left out."""
    return tuple(entry for entry in read_dump(DiskFile(path)).entries if not entry.is_p2p)


def read_dump(source: Source) -> FlightDump:
    """The dump in the file.

    The rank is the one member that all groups share, else what the file's name says, else -1 and a
    note. Odd entries are left out and counted. Raises DataError for what is no dump.
    """
    with unpacked(source) as content:
        text = pickles.read_whole(content, source.where)
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
