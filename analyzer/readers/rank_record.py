"""What a rank told of its own recording, beside its trace: the file -> RankRecord."""

from __future__ import annotations

import re

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.readers.unpack import unpacked
from stepsplit.collectors.rank_record import RANK_SCHEMA, RankRecord, read_record

_BEGIN = re.compile(rb'\s*\{\s*"schema"\s*:\s*"' + re.escape(RANK_SCHEMA.encode()) + rb'"')
_MOST_BYTES = 64 << 20


def recognizes(head: bytes) -> bool:
    """Whether the bytes begin as a rank's record does."""
    return _BEGIN.match(head) is not None


def read_rank_record(source: Source) -> RankRecord:
    """The record in the file. Raises DataError for one that was cut off or is odd."""
    with unpacked(source) as content:
        text = content.read(_MOST_BYTES)
    try:
        return read_record(text)
    except ValueError as error:
        raise DataError(source.where, f"a rank's record: {error}", RECORD_AGAIN) from None
