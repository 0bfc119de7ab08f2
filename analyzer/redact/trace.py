"""Copies a torch.profiler trace block by block, in the memory of a block."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.kineto.block_events import CategoryCodes
from stepsplit.analyzer.readers.kineto.json_stream import ArrayBlocks, Entries, parse_loose_object
from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE, Complete, TrackMetadata
from stepsplit.analyzer.readers.kineto.trace_file import parse_opening
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.redact.fields import (
    ENTRY_FIELDS,
    EVENT_ARGS,
    METADATA_ARGS,
    NAME_FIELDS,
    TRACE_FIELDS,
)
from stepsplit.analyzer.redact.forms import METADATA, OP, Form, Texts, copy_object, copy_value
from stepsplit.analyzer.trace import Category
from stepsplit.collectors.safe_io.atomic_file import SHARED, whole_file


def copy_trace(source: Source, out: Path, texts: Texts) -> None:
    """Writes the packed copy of a trace. Raises DataError if the file is none."""
    with open_unpacked(source) as content:
        opening = parse_opening(content)
        if opening is None:
            raise DataError(source.where, "not a trace", RECORD_AGAIN)
        blocks = ArrayBlocks(content, opening.begin)
        with whole_file(out, SHARED) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
            # A trace is an object with fields before and after its events, or a bare list of them.
            if opening.fields:
                # The fields before are an object that is not closed: one more closes it.
                header = _decode_fields(opening.fields + b'"":0}')
                packed.write(b"{" + _format_fields(header, texts) + b'"traceEvents": [')
            else:
                packed.write(b"[")
            entries, separator = _EntryCopier(texts), b"\n"
            for block in blocks:
                copied = [entries.copy(entry) for entry in _list_entries(block)]
                if copied:
                    packed.write(separator + b",\n".join(map(msgspec.json.encode, copied)))
                    separator = b",\n"
            packed.write(b"\n]")
            if opening.fields:
                tail = _decode_fields(b'{"":0' + blocks.tail) if blocks.whole else {}
                rest = _format_fields(tail, texts)
                packed.write((b"," + rest).removesuffix(b",") + b"}\n")


def _format_fields(values: Mapping[str, Any], texts: Texts) -> bytes:
    """The fields around the entries as JSON, each followed by a comma."""
    return b"".join(
        msgspec.json.encode(key) + b": " + msgspec.json.encode(value) + b","
        for key, value in copy_object(values, TRACE_FIELDS, texts).items()
    )


def _decode_fields(text: bytes) -> dict[str, Any]:
    """The fields of an object, also of slightly invalid JSON; {} if there are none."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except UNDECODABLE:
        return parse_loose_object(text) or {}
    return fields


_ENTRIES = msgspec.json.Decoder(list[dict[str, Raw]])

_FIELDS = msgspec.json.Decoder(dict[str, Raw])

_VALUE = msgspec.json.Decoder()


def _list_entries(block: Entries) -> Iterator[dict[str, Raw]]:
    """The entries of a block with the text of each field; repaired ones by their known fields."""
    if block.text is not None:
        yield from _ENTRIES.decode(block.text)
        return
    for entry in block.entries:
        if isinstance(entry, Complete | TrackMetadata):
            body: dict[str, Raw] = _FIELDS.decode(msgspec.json.encode(entry))
            yield body


def _decode_value(text: Raw | bytes) -> Any:
    """The value; None if it has a text that is not Unicode."""
    try:
        return _VALUE.decode(text)
    except UNDECODABLE:
        return None


def _decode_args(text: Raw) -> Any:
    """The arguments; if a text of theirs is not Unicode, its field alone is None."""
    try:
        return _VALUE.decode(text)
    except UNDECODABLE:
        pass
    try:
        return {key: _decode_value(value) for key, value in _FIELDS.decode(text).items()}
    except UNDECODABLE:
        return None


_NUMERIC = frozenset((b"-", *(str(digit).encode() for digit in range(10))))

_MOST_KEPT = 1 << 16
"""Distinct values of a field of which the copy is remembered."""


class _EntryCopier:
    """Copies entries; a number keeps its text, as a time has more digits than a float."""

    def __init__(self, texts: Texts) -> None:
        self._texts, self._codes = texts, CategoryCodes()
        self._copies: defaultdict[str, dict[bytes, Any]] = defaultdict(dict)

    def copy(self, entry: dict[str, Raw]) -> dict[str, Any]:
        """The entry with the fields that are copied."""
        copied = {
            key: self._copy_field(ENTRY_FIELDS[key], bytes(text))
            for key, text in entry.items()
            if key in ENTRY_FIELDS
        }
        is_metadata = copied.get("ph") == "M"
        if (text := entry.get("name")) is not None:
            category = _decode_value(entry["cat"]) if "cat" in entry else ""
            code = self._codes[category] if isinstance(category, str) else int(Category.OTHER)
            form = METADATA if is_metadata else NAME_FIELDS.get(code, OP)
            copied["name"] = self._copy_field(form, bytes(text))
        if (text := entry.get("args")) is not None:
            fields = METADATA_ARGS if is_metadata else EVENT_ARGS
            copied["args"] = copy_value(_decode_args(text), fields, self._texts)
        return copied

    def _copy_field(self, form: Form, text: bytes) -> Any:
        if text[:1] in _NUMERIC:
            return Raw(text)
        copies = self._copies[form.name]
        if text not in copies:
            if len(copies) > _MOST_KEPT:
                copies.clear()
            copies[text] = copy_value(_decode_value(text), form, self._texts)
        return copies[text]
