"""What the recorder writes next to the traces: run.json -> RunSpec, rank records -> RankRecord."""

from __future__ import annotations

import json
import re

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.sources import Source
from stepsplit.collectors.formats.rank_record import RANK_SCHEMA, RankRecord, read_record
from stepsplit.collectors.formats.run_spec import RunSpec, from_json

_MAX_BYTES = 64 << 20
"""Of a file; what follows is not read, and the text then invalid. Chosen, not measured."""

_RECORD_BEGIN = re.compile(rb'\A\s*\{\s*"schema"\s*:\s*"' + re.escape(RANK_SCHEMA.encode()) + rb'"')


def read_run_spec(source: Source) -> RunSpec:
    """The content of a run.json. Raises DataError if it is invalid."""
    text = read_metadata(source)
    try:
        return from_json(text)
    except ValueError as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        problem = f"not valid JSON ({error})" if is_syntax else str(error)
        raise DataError(source.where, problem, "fix it or leave it out") from None


def is_rank_record(head: bytes) -> bool:
    """Whether the bytes are the beginning of a rank record."""
    return _RECORD_BEGIN.match(head) is not None


def read_rank_record(source: Source) -> RankRecord:
    """The record in the file. Raises DataError if it is cut off or invalid."""
    text = read_metadata(source)
    try:
        return read_record(text)
    except ValueError as error:
        raise DataError(source.where, f"invalid rank record: {error}", RECORD_AGAIN) from None


def read_metadata(source: Source) -> bytes:
    """The unpacked bytes of a metadata file, at most 64 MiB of them."""
    with open_unpacked(source) as content:
        return content.read(_MAX_BYTES)
