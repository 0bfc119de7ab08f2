"""A torch.profiler trace (Kineto, Chrome JSON of any age), or a range of its bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import numpy as np

from stepsplit.analyzer.readers.calls import FoundCalls
from stepsplit.analyzer.readers.kineto.blocks import ArrayBlocks, Stream
from stepsplit.analyzer.readers.kineto.columns import Rows, rows_of
from stepsplit.analyzer.readers.kineto.device_calls import calls_of_device
from stepsplit.analyzer.readers.kineto.opening import Opening, header_of, opening_of
from stepsplit.analyzer.readers.kineto.rows import Sorted, in_order
from stepsplit.analyzer.readers.kineto.schema import KinetoHeader
from stepsplit.analyzer.readers.rules import Rules
from stepsplit.analyzer.readers.rules_file import BUILT_IN
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import unpacked
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
    """The rows of a range of a trace's bytes; the text behind the array where it was closed."""

    rows: Rows
    whole: bool
    tail: bytes


def recognizes(head: bytes) -> bool:
    """Whether the bytes that a file begins with are a trace's, as far as they tell."""
    opening = opening_of(io.BytesIO(head))
    return opening is not None and (
        bool(opening.fields) or b'"ph"' in opening.begin or not opening.begin.strip(b" \r\n\t]")
    )


def read_kineto(source: Source, rules: Rules = BUILT_IN) -> KinetoFile | None:
    """The trace in the file; None where its JSON is something else. Raises DataError."""
    with unpacked(source) as content:
        opening = opening_of(content)
        if opening is None:
            return None
        part = part_of(content, opening.begin, rules)
        return joined(opening, [part], rules, content.torn)


def opening_of_file(source: Source) -> Opening | None:
    """How the trace in the file begins; None where its JSON is something else."""
    with unpacked(source) as content:
        return opening_of(content)


def joined(
    opening: Opening, parts: list[Part], rules: Rules = BUILT_IN, torn: str = ""
) -> KinetoFile:
    """The trace of which these are all parts, in their order; torn says why its file ends early."""
    last = parts[-1]
    header = header_of(opening.fields, last.tail)
    rows = in_order([part.rows for part in parts], header.base_ns)
    notes = _notes(rows, last.whole, torn)
    if not rows.on_device:
        return KinetoFile(header, rows, None, notes)
    calls = calls_of_device(rows, header.distributed.groups, rules)
    nothing = np.zeros(0, dtype=np.int64)
    return KinetoFile(header, replace(rows, noted_row=nothing, noted_args=()), calls, notes)


def part_of(stream: Stream, begin: bytes, rules: Rules = BUILT_IN) -> Part:
    """The entries of the stream, of which begin was read before."""
    blocks = ArrayBlocks(stream, begin)
    rows = rows_of(blocks, rules)
    return Part(rows, blocks.whole, blocks.tail)


def _notes(rows: Sorted, whole: bool, torn: str) -> tuple[Note, ...]:
    """What was wrong with the file."""
    counts, notes = rows.counts, []
    if not whole:
        why = f" ({torn})" if torn else ""
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
