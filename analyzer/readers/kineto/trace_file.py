"""One Kineto trace file, or a byte range of it: header, entries and notes on damage."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Raw

from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.calls import build_device_calls
from stepsplit.analyzer.readers.kineto.columns import Rows, SortedRows, build_rows, sort_rows
from stepsplit.analyzer.readers.kineto.json_stream import (
    ArrayBlocks,
    ByteRange,
    Stream,
    _Range,
    parse_loose_object,
)
from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE, KinetoHeader, lenient
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.trace import CallsWithGroups, Category, Note


def read_range(path: Path, byte_range: ByteRange, rules: Rules = BUILT_IN) -> TracePart:
    """Reads the entries that begin in the byte range of the file."""
    with path.open("rb", buffering=0) as file:
        return read_part(_Range(file, byte_range), b"", rules)


# A torch.profiler trace (Kineto, Chrome JSON of any age), or a range of its bytes.


@dataclass(frozen=True, slots=True)
class KinetoFile:
    """One trace file: its header, its events, and notes on damage.

    header.distributed has the rank and world_size (-1 if unknown), backend ("") and groups (()).
    rows.events are Events, whose times count from rows.t0_unix_ns, Unix time in ns. Without a
    device, rows keep the arguments of the ops: the calls are then built later with the Flight
    Recorder.

    Attributes:
        header: The fields around the events: the rank's job, devices, base_ns and host_name.
        rows: The events, and in rows.counts the numbers of entries read, unreadable (lost) and
            with a negative duration.
        calls: Calls of the device's kernels, with their groups; None without a device.
        notes: Damage found in the file.

    Examples:
        >>> from stepsplit.analyzer import read_files
        >>> [file] = read_files("sample_traces/dp4/rank0_trace.json.gz")
        >>> trace = file.content
        >>> trace.header.distributed.rank, trace.header.distributed.world_size
        (0, 4)
        >>> trace.calls is None  # no device
        True
    """

    header: KinetoHeader
    rows: SortedRows
    calls: CallsWithGroups | None
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class TracePart:
    """The rows of a byte range; whether the array was closed in it, and the text after that."""

    rows: Rows
    whole: bool
    tail: bytes


def is_kineto(head: bytes) -> bool:
    """Whether the first bytes of a file look like a Kineto trace."""
    opening = parse_opening(io.BytesIO(head))
    return opening is not None and (
        bool(opening.fields) or b'"ph"' in opening.begin or not opening.begin.strip(b" \r\n\t]")
    )


def read_kineto(source: Source, rules: Rules = BUILT_IN) -> KinetoFile | None:
    """Reads the trace in the file; None if it is other JSON. Raises DataError."""
    with open_unpacked(source) as content:
        opening = parse_opening(content)
        if opening is None:
            return None
        part = read_part(content, opening.begin, rules)
        return join_parts(opening, [part], rules, content.torn)


def read_opening(source: Source) -> TraceOpening | None:
    """Reads the opening of the trace in the file; None if it is other JSON."""
    with open_unpacked(source) as content:
        return parse_opening(content)


def join_parts(
    opening: TraceOpening, parts: list[TracePart], rules: Rules = BUILT_IN, torn: str = ""
) -> KinetoFile:
    """Joins all parts of a trace, in order; torn is the reason why the file ends early."""
    last = parts[-1]
    header = decode_header(opening.fields, last.tail)
    rows = sort_rows([part.rows for part in parts], header.base_ns)
    notes = _build_notes(rows, last.whole, torn)
    if not rows.on_device:
        return KinetoFile(header, rows, None, notes)
    calls = build_device_calls(rows, header.distributed.groups, rules)
    nothing = np.zeros(0, dtype=np.int64)
    return KinetoFile(header, replace(rows, noted_row=nothing, noted_args=()), calls, notes)


def read_part(stream: Stream, begin: bytes, rules: Rules = BUILT_IN) -> TracePart:
    """Reads the entries of the stream, whose first bytes, begin, were already read."""
    blocks = ArrayBlocks(stream, begin)
    rows = build_rows(blocks, rules)
    return TracePart(rows, blocks.whole, blocks.tail)


def _build_notes(rows: SortedRows, whole: bool, torn: str) -> tuple[Note, ...]:
    """Notes on damage in the file."""
    counts, notes = rows.counts, []
    if not whole:
        why = f" ({torn})" if torn else ""
        text = f"the file is truncated{why}; {counts.entries:,} complete entries were read"
        notes.append(Note("trace_cut_off", text))
    if counts.lost:
        text = f"{counts.lost:,} of {counts.entries + counts.lost:,} entries are damaged; ignored"
        notes.append(Note("entries_damaged", text))
    if counts.negative:
        text = f"{counts.negative:,} events have a negative duration; taken as 0"
        notes.append(Note("negative_durations", text))
    if len(rows.events) and not (rows.events.category != Category.OTHER).any():
        text = "no event has a category of torch.profiler; the trace is not split"
        notes.append(Note("unknown_categories", text))
    return tuple(notes)


# The position of the array of entries in a trace's text, and the fields around it.

MAX_HEADER_BYTES = 64 << 20

_BLOCK_BYTES = 1 << 16

_BOM = b"\xef\xbb\xbf"

_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')

_NUMBERS = msgspec.json.Encoder(decimal_format="number")

_FIELDS = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True)
class TraceOpening:
    """The beginning of a trace.

    fields: the fields before the array as an open JSON object, b"" for a bare list; begin: the
    first text of the array; array_at: the offset of the array in the file.
    """

    fields: bytes
    begin: bytes
    array_at: int


def parse_opening(stream: Stream) -> TraceOpening | None:
    """Finds the begin of the array of entries; None if the text is not a trace."""
    text = stream.read(_BLOCK_BYTES)
    blank = len(text) - len(text.removeprefix(_BOM).lstrip())
    if text[blank : blank + 1] == b"[":
        return TraceOpening(b"", text[blank + 1 :], blank + 1)
    if text[blank : blank + 1] != b"{":
        return None
    searched = 0
    while True:
        for match in _ARRAY.finditer(text, searched):
            if _is_top_level(text[blank : match.start()]):
                return TraceOpening(text[blank : match.start()], text[match.end() :], match.end())
        searched = max(len(text) - 64, 0)
        more = stream.read(max(len(text), _BLOCK_BYTES))
        if not more or len(text) > MAX_HEADER_BYTES:
            return None
        text += more


def _is_top_level(fields: bytes) -> bool:
    """Whether the text after these fields belongs to the outermost object."""
    try:
        _FIELDS.decode(fields + b'"":0}')
    except UNDECODABLE as error:
        return "truncated" not in str(error)
    return True


def decode_header(fields: bytes, tail: bytes) -> KinetoHeader:
    """Decodes the fields around the entries, ignoring unreadable ones."""
    before = fields or b"{"
    whole = before + b'"":0' + (tail.strip() or b"}")
    try:
        _FIELDS.decode(whole)
    except UNDECODABLE:
        whole = _fix_header(whole) or _fix_header(before + b'"":0}') or b"{}"
    return lenient(whole, KinetoHeader)


def _fix_header(text: bytes) -> bytes | None:
    """The object as valid JSON; None if it cannot be fixed."""
    found = parse_loose_object(text)
    try:
        return None if found is None else _NUMBERS.encode(found)
    except ValueError:
        return None
