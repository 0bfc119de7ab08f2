"""One Kineto trace file, or a byte range of it: header, entries and notes on damage."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct
from msgspec.structs import replace

from stepsplit.analyzer import units
from stepsplit.analyzer.arrays import union
from stepsplit.analyzer.ops import parse_op
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, Rules
from stepsplit.analyzer.readers.kineto.calls import build_device_calls
from stepsplit.analyzer.readers.kineto.columns import (
    Rows,
    SortedRows,
    build_rows,
    collect_event_waits,
    sort_rows,
)
from stepsplit.analyzer.readers.kineto.copy_engine import join_copy_engine_calls
from stepsplit.analyzer.readers.kineto.json_stream import (
    ArrayBlocks,
    ByteRange,
    Stream,
    _Range,
    parse_loose_object,
)
from stepsplit.analyzer.readers.kineto.schema import (
    UNDECODABLE,
    DeviceProperties,
    KinetoHeader,
    Track,
    lenient,
)
from stepsplit.analyzer.readers.kineto.timeless import drop_timeless
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.stream_order import clip_overruns
from stepsplit.analyzer.trace import (
    DEVICE_CATEGORIES,
    NO_WAITS,
    UNKNOWN_CATEGORIES,
    Bool,
    CallsWithGroups,
    Category,
    Events,
    EventWaits,
    Int64,
    Lack,
    Lane,
    Note,
)
from stepsplit.collectors.formats.json_decode import replace_surrogates
from stepsplit.collectors.safe_io.regular_file import open_regular

# The trace_view.json of torch_npu and msprof: tracks of an Ascend device, without categories.


# What runs on the device is known from the names of its tracks and tasks, not from categories:
#
# Ascend Hardware    a thread per stream; kernels, copies, and tasks that only synchronize
# Communication      (HCCL in older files) a thread per group with its collectives and messages,
#                    named hcom_OP__GROUP_INDEX_N, and threads with the tasks of each
# Overlap Analysis   the profiler's own sums: Computing, Communication, and what remains

_HARDWARE, _COMMUNICATION = ("Ascend Hardware",), ("Communication", "HCCL")

_HOST, _OVERLAP = ("CANN",), ("Overlap Analysis",)

_COPY = re.compile(r"^(?:MEMCPY|SDMA|PCIE_DMA|DMA)|^acl_memcpy|^Memcpy", re.I)

_CONTROL = re.compile(
    r"^(?:EVENT|NOTIFY|PLACE_?HOLDER|WRITE_(?:VALUE|BACK)|CMO|PROFILING|MODEL_|STREAM|LABEL"
    r"|MAINTENANCE|CALLBACK|HOST_FUNC|END_GRAPH|RDMA|Step Trace|Iteration)|_SQE$",
    re.I,
)
"""Tasks that only synchronize; the work of a stream waits for them, or they mark times."""

_COLLECTIVE = re.compile(r"^h(?:com_|ccl)(?:batch)?([a-z]+)_", re.I)

_DEVICE_COLLECTIVE = re.compile(r"^hcom_|^hccl|^lccl|(?:AicpuKernel|AivKernel)$", re.I)

_OPS = {"receive": "recv", "sendrecv": ""}
"""Names that differ from those of the ops; a batch has none, and is known by its kernel's name."""

_MAX_DEVIATION = 0.02
"""Largest accepted difference to the profiler's own sums, as a share of them."""


UNKNOWN_TRACKS = "ascend_unknown"
"""Code of the note on a trace whose device events cannot be classified: it must not be split."""


def classify_tracks(
    rows: SortedRows, tracks: Sequence[Track], whole: bool
) -> tuple[SortedRows, tuple[Note, ...]]:
    """The rows with the categories of what ran on the device, and notes.

    The kernels and calls of a whole file are compared with its overlap analysis. If the sums
    differ, the device's events are not classified, and a note of code UNKNOWN_TRACKS says why.
    """
    events = rows.events
    hardware = _find_rows(events, _find_lanes(events, tracks, _HARDWARE))
    calls = _find_rows(events, _find_lanes(events, tracks, _COMMUNICATION, "Communication"))
    copies = hardware & events.match_names(_COPY)
    moves = hardware & events.match_names(_DEVICE_COLLECTIVE)
    kernels = hardware & ~copies & ~moves & ~events.match_names(_CONTROL)
    found = _DeviceEvents(kernels, copies, calls if calls.any() else moves)
    if not (found.kernels | found.calls).any():
        return rows, (Note(UNKNOWN_TRACKS, "an Ascend trace without device activity"),)
    problem = _compare_to_overlap(events, found, tracks) if whole else ""
    if problem:
        return rows, (Note(UNKNOWN_TRACKS, f"an Ascend trace that cannot be read: {problem}"),)
    category = events.category.copy()
    category[found.kernels | found.calls] = Category.KERNEL
    category[found.copies] = Category.MEMCPY
    lanes = _build_lanes(events.lanes, tracks)
    known = dataclasses.replace(events, category=category, lanes=lanes)
    classified = replace(rows, events=known)
    text = "an Ascend trace: launches are unknown, so a step ends with the last kernel that starts"
    notes = [Note("ascend", f"{text} before its mark ends")]
    if found.calls.any():
        text = "the calls of an Ascend trace name no ranks: waits are not separated from transfers"
        notes.append(Note("ascend_calls", text))
    # The rows, with arguments that name the collective of each call.
    added: Int64 = np.flatnonzero(found.calls)
    texts = [_describe_call(classified.events.name_of(row)) for row in added.tolist()]
    place = np.concatenate((classified.noted_row, added))
    order = np.argsort(place, kind="stable")
    args = [*classified.noted_args, *texts]
    noted_args = tuple(args[i] for i in order.tolist())
    return replace(classified, noted_row=place[order], noted_args=noted_args), tuple(notes)


class _DeviceEvents(Struct, frozen=True):
    """Which events are kernels, copies, and collectives or messages of the device."""

    kernels: Bool
    copies: Bool
    calls: Bool


def _find_lanes(
    events: Events, tracks: Sequence[Track], processes: Collection[str], thread: str = ""
) -> Bool:
    """Which lanes belong to a process of these names and a thread whose name contains the text."""
    pids = {track.pid for track in tracks if track.tid is None and track.name in processes}
    names = {(track.pid, track.tid): track.name for track in tracks if track.tid is not None}
    chosen = [
        lane.pid in pids and thread in names.get((lane.pid, lane.tid), thread)
        for lane in events.lanes
    ]
    return np.array(chosen, dtype=np.bool_)


def _find_rows(events: Events, lanes: Bool) -> Bool:
    return np.asarray(lanes[events.lane] & (events.category == Category.OTHER))


def _compare_to_overlap(events: Events, found: _DeviceEvents, tracks: Sequence[Track]) -> str:
    """How the sums differ from the profiler's overlap analysis; "" if they agree or it has none."""
    own = _find_rows(events, _find_lanes(events, tracks, _OVERLAP))
    for name, mask in (("Computing", found.kernels), ("Communication", found.calls)):
        named = own & events.name_mask(tuple(each == name for each in events.names))
        stated_ns, sum_ns = _measure_ns(events, named), _measure_ns(events, mask)
        if own.any() and abs(stated_ns - sum_ns) > _MAX_DEVIATION * max(stated_ns, sum_ns):
            ours, theirs = map(units.format_milliseconds, (sum_ns, stated_ns))
            return f"{name} is {theirs} in its overlap analysis, but {ours} in its device tracks"
    return ""


def _measure_ns(events: Events, mask: Bool) -> int:
    """The time in which at least one of these events runs."""
    busy = union(events.start_ns[mask], events.ends_of(mask))
    return int((busy.end_ns - busy.start_ns).sum())


def _build_lanes(lanes: Sequence[Lane], tracks: Sequence[Track]) -> tuple[Lane, ...]:
    """The lanes, with device and stream for those of the hardware."""
    pids = [track.pid for track in tracks if track.tid is None and track.name in _HARDWARE]
    device = {pid: number for number, pid in enumerate(dict.fromkeys(pids))}
    return tuple(
        replace(lane, device=device[lane.pid], stream=int(lane.tid))
        if lane.pid in device and lane.tid.isdecimal() and len(lane.tid) < 10
        else lane
        for lane in lanes
    )


def _describe_call(name: str) -> bytes:
    match = _COLLECTIVE.match(name)
    op = "" if match is None else _OPS.get(match[1].lower(), match[1])
    return json.dumps({"Collective name": op} if parse_op(op) != "unknown" else {}).encode()


def read_range(path: Path, byte_range: ByteRange, rules: Rules = BUILT_IN) -> TracePart:
    """Reads the entries that begin in the byte range of the file."""
    with open_regular(path) as file:
        return read_part(_Range(file, byte_range), b"", rules)


# A torch.profiler trace (Kineto, Chrome JSON of any age), or a range of its bytes.


class KinetoFile(Struct, frozen=True):
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
    waits: EventWaits = NO_WAITS


class TracePart(Struct, frozen=True):
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
        return join_parts(opening, [read_part(content, opening.begin, rules)], rules, content.torn)


def read_opening(source: Source) -> TraceOpening | None:
    """Reads the opening of the trace in the file; None if it is other JSON."""
    with open_unpacked(source) as content:
        return parse_opening(content)


def join_parts(
    opening: TraceOpening, parts: list[TracePart], rules: Rules = BUILT_IN, torn: str = ""
) -> KinetoFile:
    """Joins all parts of a trace, in order; torn is the reason why the file ends early.

    Empties the list of parts: their rows need as much memory as the sorted ones.
    """
    is_whole = parts[-1].whole
    tail, rest = _split_tail(parts[-1].tail, opening)
    # Decodes the fields around the entries, ignoring unreadable ones.
    before = opening.fields or b"{"
    whole = before + b'"":0' + (tail.strip() or b"}")
    try:
        _FIELDS.decode(whole)
    except UNDECODABLE:
        whole = _fix_header(whole) or _fix_header(before + b'"":0}') or b"{}"
    header = lenient(whole, KinetoHeader)
    rows = sort_rows([part.rows for part in parts], header.base_ns)
    tracks = [track for part in parts for track in part.rows.tracks]
    parts.clear()
    more: tuple[Note, ...] = ()
    # Whether the names of the tracks are those of a host or device of Ascend.
    names = (*_HARDWARE, *_HOST)
    if any(track.tid is None and track.name in names for track in tracks):
        rows, more = classify_tracks(rows, tracks, is_whole)
        if not header.devices:
            # Which these files do not describe.
            header = replace(header, devices=[DeviceProperties("Ascend NPU")])
    rows, time_notes = drop_timeless(rows, header.base_ns)
    events, order_notes = clip_overruns(rows.events, rows.shapes, rows.find_communication(rules))
    rows, copy_notes = join_copy_engine_calls(replace(rows, events=events))
    events = rows.events
    notes = (*_build_notes(rows, is_whole, torn), *more, *time_notes, *order_notes, *copy_notes)
    if not len(events) and not opening.fields and b'"traceEvents"' in opening.begin:
        text = "a list of traces, as of several ranks: each needs a file of its own"
        notes = (*notes, Note(LISTED_TRACES, text))
    if is_whole and rest:
        what = "the begin of another trace" if b'"traceEvents"' in rest else "more text"
        text = f"{what} follows the end of the trace and is ignored: {len(rest):,} bytes or more"
        notes = (*notes, Note("text_after_trace", text))
    if not rows.on_device:
        return KinetoFile(header, rows, None, notes)
    calls, call_notes = build_device_calls(rows, header.distributed.groups, rules)
    call_notes += _note_launches(rows.events)
    waits = collect_event_waits(rows)
    nothing = np.zeros(0, dtype=np.int64)
    return KinetoFile(
        header,
        replace(rows, noted_row=nothing, noted_args=()),
        calls,
        (*notes, *call_notes),
        waits,
    )


LISTED_TRACES = "listed_traces"
"""The code of the note on a file whose array has traces instead of events."""

_WHITESPACE = b" \t\r\n\x00"


def _split_tail(tail: bytes, opening: TraceOpening) -> tuple[bytes, bytes]:
    """The text behind the array up to the end of the trace, and the text after that."""
    if not opening.fields:
        return b"", tail.strip(_WHITESPACE)
    prefix = '{"":0'
    try:
        _, end = json.JSONDecoder().raw_decode(prefix + tail.decode("latin-1"))
    except (ValueError, RecursionError):
        # The fields behind the array are damaged or missing: nothing says where they end.
        return tail, b""
    end -= len(prefix)
    return tail[:end], tail[end:].strip(_WHITESPACE)


_EARLY_NS = 20_000
"""A kernel that starts so long before its launch was timed by another clock; in public traces none
starts before its launch, and times are rounded to microseconds at most."""


def _note_launches(events: Events) -> tuple[Note, ...]:
    """Notes on kernels that start before their launch, and on launches of several processes."""
    notes = []
    device = np.flatnonzero(events.is_category(*DEVICE_CATEGORIES))
    launch = events.find_launches(device)
    device, launch = device[launch >= 0], launch[launch >= 0]
    early_ns = events.start_ns[launch] - events.start_ns[device]
    is_early = early_ns > _EARLY_NS
    if is_early.any():
        most = units.format_milliseconds(int(early_ns.max()))
        text = (
            f"{int(is_early.sum()):,} of {len(device):,} kernels and copies start before their"
            f" launch, by up to {most}: the clocks of host and device differ, so that steps and"
            " causes of idle time are uncertain"
        )
        notes.append(Note("kernels_before_launch", text))
    # Of all calls: those of two processes may have the same correlations.
    calls = events.is_category(Category.RUNTIME) & (events.correlation >= 0)
    lanes = np.flatnonzero(np.bincount(events.lane[calls], minlength=len(events.lanes)))
    pids = list(dict.fromkeys(events.lanes[lane].pid for lane in lanes.tolist()))
    if len(pids) > 1:
        text = (
            f"{len(pids):,} processes made the runtime calls of the file ({', '.join(pids[:8])}),"
            " which is split as one rank: merged ranks need a file each"
        )
        notes.append(Note("several_processes", text))
    return tuple(notes)


def read_part(stream: Stream, begin: bytes, rules: Rules = BUILT_IN) -> TracePart:
    """Reads the entries of the stream, whose first bytes, begin, were already read."""
    blocks = ArrayBlocks(stream, begin, scan=True)
    rows = build_rows(blocks, rules)
    return TracePart(rows, blocks.whole, blocks.tail)


def _build_notes(rows: SortedRows, whole: bool, torn: str) -> tuple[Note, ...]:
    """Notes on damage in the file."""
    counts, notes = rows.counts, []
    if not whole:
        why = f" ({torn})" if torn else ""
        text = f"the file is truncated{why}; {counts.entries:,} complete entries were read"
        notes.append(Note("trace_cut_off", text, lack=Lack.FILE))
    if counts.lost:
        text = f"{counts.lost:,} of {counts.entries + counts.lost:,} entries are damaged; ignored"
        notes.append(Note("entries_damaged", text, lack=Lack.ENTRIES))
    if counts.negative:
        text = f"{counts.negative:,} events have a negative duration; taken as 0"
        notes.append(Note("negative_durations", text))
    if len(rows.events) and not (rows.events.category != Category.OTHER).any():
        text = f"none of {len(rows.events):,} events has a category of torch.profiler"
        notes.append(Note(UNKNOWN_CATEGORIES, text))
    return tuple(notes)


# The position of the array of entries in a trace's text, and the fields around it.

MAX_HEADER_BYTES = 64 << 20
"""Of the fields before the entries; a text with more is no trace. Chosen, not measured."""

_BLOCK_BYTES = 1 << 16
"""Read first, then as much again until the entries begin; chosen, not measured."""

_BOM = b"\xef\xbb\xbf"

_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')

_NUMBERS = msgspec.json.Encoder(decimal_format="number")

_FIELDS = msgspec.json.Decoder(dict[str, Raw])


class TraceOpening(Struct, frozen=True):
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


def _fix_header(text: bytes) -> bytes | None:
    """The object as valid JSON; None if it cannot be fixed."""
    found = parse_loose_object(text)
    try:
        return None if found is None else _NUMBERS.encode(_replace_surrogates(found))
    except (ValueError, RecursionError):
        return None


def _replace_surrogates(value: Any) -> Any:
    """The value without texts that UTF-8 cannot encode, for which a header would be lost."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, dict):
        return {replace_surrogates(key): _replace_surrogates(each) for key, each in value.items()}
    return [_replace_surrogates(each) for each in value] if isinstance(value, list) else value
