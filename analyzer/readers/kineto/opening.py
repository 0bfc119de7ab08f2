"""Where the array of entries begins in a trace's text, and what stands around it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from stepsplit.analyzer.readers.kineto.blocks import Stream
from stepsplit.analyzer.readers.kineto.loose import loose_object
from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE, KinetoHeader, lenient

MOST_HEADER_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_NUMBERS = msgspec.json.Encoder(decimal_format="number")
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True)
class Opening:
    """A trace's text up to its array: the fields before it, an open JSON object or b"" for a bare
    list; the first of the array's text; and how many bytes of the file lie before the array.
    """

    fields: bytes
    begin: bytes
    array_at: int


def opening_of(stream: Stream) -> Opening | None:
    """Where the array of entries begins; None where the text is no trace."""
    text = stream.read(_BLOCK_BYTES)
    blank = len(text) - len(text.removeprefix(_BOM).lstrip())
    if text[blank : blank + 1] == b"[":
        return Opening(b"", text[blank + 1 :], blank + 1)
    if text[blank : blank + 1] != b"{":
        return None
    searched = 0
    while True:
        for match in _ARRAY.finditer(text, searched):
            if _at_top(text[blank : match.start()]):
                return Opening(text[blank : match.start()], text[match.end() :], match.end())
        searched = max(len(text) - 64, 0)
        more = stream.read(max(len(text), _BLOCK_BYTES))
        if not more or len(text) > MOST_HEADER_BYTES:
            return None
        text += more


def _at_top(fields: bytes) -> bool:
    """Whether what follows these fields is of the outermost object."""
    try:
        _FIELDS.decode(fields + b'"":0}')
    except UNDECODABLE as error:
        return "truncated" not in str(error)
    return True


def header_of(fields: bytes, tail: bytes) -> KinetoHeader:
    """What the trace says around its entries, as far as it can be read."""
    before = fields or b"{"
    whole = before + b'"":0' + (tail.strip() or b"}")
    try:
        _FIELDS.decode(whole)
    except UNDECODABLE:
        whole = _mended(whole) or _mended(before + b'"":0}') or b"{}"
    return lenient(whole, KinetoHeader)


def _mended(text: bytes) -> bytes | None:
    """The object as JSON that keeps JSON's rules; None where it is beyond that."""
    found = loose_object(text)
    try:
        return None if found is None else _NUMBERS.encode(found)
    except ValueError:
        return None
