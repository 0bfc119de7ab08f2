"""Perfetto's protobuf: tracks, the slices on them and the flows between, as bytes.

The numbers of the fields are those of trace_packet.proto, track_descriptor.proto, track_event.proto
and interned_data.proto in github.com/google/perfetto/tree/main/protos/perfetto/trace. Numbers that
differ from slice to slice have a fixed width (protobuf allows a varint more bytes than it needs),
so that many packets are one matrix of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stepsplit.analyzer.trace import Int64, UInt8

_PACKET, _TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _SEQUENCE_FLAGS, _DESCRIPTOR = (
    1, 8, 10, 11, 12, 13, 60,
)  # fmt: skip
_BEGIN, _END = 1, 2
_CLEARED, _NEEDED = 1, 2
_EXPLICIT = 3
_ONE_SEQUENCE = 1
_TIME_WIDTH, _ID_WIDTH = 8, 4
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Track:
    """A row of the page; a process holds the tracks that name it as their parent."""

    id: int
    name: str
    parent: int = 0
    place: int = 0
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Slices:
    """Intervals on tracks, columns of one length: at no instant two on one track, none empty.

    track is a Track's id, name a place in the list of names, flow the id of the one flow that ends
    at the slice, 0 for none. Times are not negative.
    """

    track: Int64
    name: Int64
    start_ns: Int64
    end_ns: Int64
    flow: Int64


@dataclass(frozen=True, slots=True)
class Origins:
    """Where flows begin, columns of one length: the flow's id, and a row of the slices.

    The slice begins before that ends at which the flow ends.
    """

    flow: Int64
    row: Int64


def head(tracks: Sequence[Track], names: Sequence[str]) -> bytes:
    """The packets that say which tracks there are and what the slices' names mean."""
    texts = [(2, _message((1, i + 1), (2, name))) for i, name in enumerate(names)]
    interned = _packet((_INTERNED, _message(*texts)), (_SEQUENCE_FLAGS, _CLEARED))
    return b"".join([interned, *(_packet((_DESCRIPTOR, _described(t))) for t in tracks)])


def events(slices: Slices, origins: Origins) -> Iterator[bytes]:
    """The packets of all slices.

    Readers sort packets by time and keep the order of those at one time: ends come first, so that
    a slice is over when the next one begins at its end.
    """
    for block in _blocks(np.flatnonzero(slices.flow == 0)):
        yield _rows(_END, slices.end_ns[block], [_varint_field(11, slices.track[block])])
    for block in _blocks(np.flatnonzero(slices.flow)):
        ending = _fixed_field(48, slices.flow[block])
        yield _rows(_END, slices.end_ns[block], [_varint_field(11, slices.track[block]), ending])
    yield from _begins(slices, origins)


def _begins(slices: Slices, origins: Origins) -> Iterator[bytes]:
    """The beginnings, together those of as many flows."""
    count = np.bincount(origins.row, minlength=len(slices.track))
    first = np.cumsum(count) - count
    flow = origins.flow[np.argsort(origins.row, kind="stable")]
    for many in np.unique(count).tolist():
        for block in _blocks(np.flatnonzero(count == many)):
            flows = [_fixed_field(47, flow[first[block] + i]) for i in range(many)]
            named = [_varint_field(10, slices.name[block] + 1)]
            on = [_varint_field(11, slices.track[block])]
            yield _rows(_BEGIN, slices.start_ns[block], named + on + flows)


def _blocks(rows: Int64) -> Iterator[Int64]:
    return (rows[at : at + _BLOCK] for at in range(0, len(rows), _BLOCK))


def _rows(kind: int, at_ns: Int64, columns: Sequence[UInt8]) -> bytes:
    """A packet a row: an event of that kind at those times, made of the columns."""
    event = [_alike(_message((9, kind)), len(at_ns)), *columns]
    size = sum(column.shape[1] for column in event)
    before = _tag(_SEQUENCE, 0) + _varint(_ONE_SEQUENCE) + _tag(_EVENT, 2) + _varint(size)
    after = _message((_SEQUENCE_FLAGS, _NEEDED))
    body = [
        _varint_field(_TIMESTAMP, at_ns, _TIME_WIDTH), _alike(before, len(at_ns)),
        *event, _alike(after, len(at_ns)),
    ]  # fmt: skip
    size = sum(column.shape[1] for column in body)
    opening = _alike(_tag(_PACKET, 2) + _varint(size), len(at_ns))
    return np.hstack([opening, *body]).tobytes()


def _alike(content: bytes, count: int) -> UInt8:
    return np.broadcast_to(np.frombuffer(content, dtype=np.uint8), (count, len(content)))


def _varint_field(number: int, values: Int64, width: int = _ID_WIDTH) -> UInt8:
    digits = (values[:, None] >> (7 * np.arange(width)) & 0x7F).astype(np.uint8)
    digits[:, :-1] |= 0x80
    return np.hstack([_alike(_tag(number, 0), len(values)), digits])


def _fixed_field(number: int, values: Int64) -> UInt8:
    eight = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return np.hstack([_alike(_tag(number, 1), len(values)), eight])


def _described(track: Track) -> bytes:
    """The track's descriptor; a process orders its tracks by their place."""
    if track.pid is None:
        return _message((1, track.id), (2, track.name), (5, track.parent), (12, track.place))
    process = _message((1, track.pid), (6, track.name))
    return _message((1, track.id), (3, process), (11, _EXPLICIT))


def _packet(*content: tuple[int, int | str | bytes]) -> bytes:
    return _message((_PACKET, _message((_SEQUENCE, _ONE_SEQUENCE), *content)))


def _message(*content: tuple[int, int | str | bytes]) -> bytes:
    """The fields (number, value) of a message."""
    return b"".join(_field(number, value) for number, value in content)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _tag(number, 0) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _tag(number, 2) + _varint(len(content)) + content


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
