"""A Perfetto trace as its page takes it: packets by time, slices opened and closed, flows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = 1, 2
Fields = dict[int, list[Any]]


@dataclass(frozen=True)
class Slice:
    process: str
    track: str
    name: str
    start_ns: int
    end_ns: int


@dataclass
class PerfettoFile:
    """The slices in order of their ends, and the flows from one to another."""

    slices: list[Slice] = field(default_factory=list)
    flows: list[tuple[Slice, Slice]] = field(default_factory=list)
    empty_tracks: list[tuple[str, str]] = field(default_factory=list)


def read(content: bytes) -> PerfettoFile:
    """What the trace shows; asserts that a track holds one slice at a time and a flow two ends."""
    packets = [message(packet) for packet in message(content)[1]]
    names = {
        message(name)[1][0]: message(name)[2][0].decode()
        for packet in packets
        for interned in packet[12]
        for name in message(interned)[2]
    }
    tracks = [message(track) for packet in packets for track in packet[60]]
    process = {t[1][0]: message(t[3][0])[6][0].decode() for t in tracks if t[3]}
    named = {t[1][0]: (process[t[5][0]], t[2][0].decode()) for t in tracks if t[5]}
    assert len(process) + len(named) == len({t[1][0] for t in tracks})
    return _played(packets, names, named)


def _played(
    packets: list[Fields], names: dict[int, str], tracks: dict[int, tuple[str, str]]
) -> PerfettoFile:
    found = PerfettoFile()
    open_on: dict[int, tuple[str, int, list[int]]] = {}
    begun: dict[int, tuple[int, int]] = {}
    whole: dict[tuple[int, int], Slice] = {}
    joined: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for packet in sorted((p for p in packets if p[11]), key=lambda p: p[8][0]):
        event, at = message(packet[11][0]), packet[8][0]
        track = event[11][0]
        if event[9][0] == BEGIN:
            assert track not in open_on, f"two slices at once on {tracks[track]} at {at}"
            open_on[track] = (names[event[10][0]], at, event[47])
            assert not begun.keys() & set(event[47])
            begun |= dict.fromkeys(event[47], (track, at))
            continue
        assert event[9][0] == END
        name, start, _ = open_on.pop(track)
        whole[track, start] = Slice(*tracks[track], name, start, at)
        joined += [(begun.pop(flow), (track, start)) for flow in event[48]]
    assert not open_on
    assert not begun
    found.slices = list(whole.values())
    found.flows = [(whole[one], whole[other]) for one, other in joined]
    used = {(one.process, one.track) for one in found.slices}
    found.empty_tracks = [track for track in tracks.values() if track not in used]
    return found


def message(content: bytes) -> Fields:
    """The values of each field of a protobuf message."""
    values: Fields = defaultdict(list)
    for number, value in _fields(content):
        values[number].append(value)
    return values


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        if tag & 7 == 0:
            value, at = _varint(content, at)
            yield tag >> 3, value
        elif tag & 7 == 1:
            yield tag >> 3, int.from_bytes(content[at : at + 8], "little")
            at += 8
        else:
            assert tag & 7 == 2
            length, at = _varint(content, at)
            assert at + length <= len(content)
            yield tag >> 3, content[at : at + length]
            at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
