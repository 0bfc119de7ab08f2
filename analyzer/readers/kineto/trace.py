"""A torch.profiler trace (Kineto, Chrome JSON of any age), or a range of its bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.readers.calls import FoundCalls
from stepsplit.analyzer.readers.kineto.blocks import ArrayBlocks
from stepsplit.analyzer.readers.kineto.columns import Rows, rows_of
from stepsplit.analyzer.readers.kineto.device_calls import calls_of_device
from stepsplit.analyzer.readers.kineto.opening import Opening, header_of, opening_of
from stepsplit.analyzer.readers.kineto.rows import Sorted, in_order
from stepsplit.analyzer.readers.kineto.schema import KinetoHeader
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import Unpacked, unpacked
from stepsplit.analyzer.trace import Category, Note


@dataclass(frozen=True, slots=True)
class KinetoFile:
    """One trace file: what it says of the run, its events, and what was wrong with it.

    calls are those of a device's kernels; None where there is no device, for then rows keep the
    arguments of the ops, and what they called only a recorder beside the trace can tell.
    """

    header: KinetoHeader
    rows: Sorted
    calls: FoundCalls | None
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a range of a trace's bytes; the text behind the array where it was closed.

    torn says why the file ended early, "" where it did not.
    """

    rows: Rows
    whole: bool
    tail: bytes
    torn: str


def recognizes(head: bytes) -> bool:
    """Whether the bytes that a file begins with are a trace's, as far as they tell."""
    opening = opening_of(io.BytesIO(head))
    return opening is not None and (
        bool(opening.fields) or b'"ph"' in opening.begin or not opening.begin.strip(b" \r\n\t]")
    )


def read_kineto(source: Source) -> KinetoFile | None:
    """The trace in the file; None where its JSON is something else. Raises DataError."""
    with unpacked(source) as content:
        opening = opening_of(content)
        return None if opening is None else joined(opening, [_part(content, opening.begin)])


def opening_of_file(source: Source) -> Opening | None:
    """How the trace in the file begins; None where its JSON is something else."""
    with unpacked(source) as content:
        return opening_of(content)


def joined(opening: Opening, parts: list[Part]) -> KinetoFile:
    """The trace of which these are all parts, in their order."""
    last = parts[-1]
    header = header_of(opening.fields, last.tail)
    rows = in_order([part.rows for part in parts], header.base_ns)
    notes = _notes(rows, last)
    if not rows.on_device:
        return KinetoFile(header, rows, None, notes)
    calls = calls_of_device(rows, header.distributed.groups)
    nothing = np.zeros(0, dtype=np.int64)
    return KinetoFile(header, replace(rows, noted_row=nothing, noted_args=()), calls, notes)


def _part(content: Unpacked, begin: bytes) -> Part:
    blocks = ArrayBlocks(content, begin)
    rows = rows_of(blocks)
    return Part(rows, blocks.whole, blocks.tail, content.torn)


def _notes(rows: Sorted, last: Part) -> tuple[Note, ...]:
    """What was wrong with the file."""
    counts, notes = rows.counts, []
    if not last.whole:
        why = f" ({last.torn})" if last.torn else ""
        text = f"the file is cut off{why}: {counts.entries:,} whole entries were read before it"
        notes.append(Note("trace_cut_off", text))
    if counts.lost:
        text = f"{counts.lost:,} of {counts.entries + counts.lost:,} entries are damaged, left out"
        notes.append(Note("entries_damaged", text))
    if counts.negative:
        text = f"{counts.negative:,} events state a negative duration, taken as 0"
        notes.append(Note("negative_durations", text))
    if len(rows.events) and not (rows.events.category != Category.OTHER).any():
        text = "no event is of a category that torch.profiler writes: nothing of it is split"
        notes.append(Note("unknown_categories", text))
    return tuple(notes)
