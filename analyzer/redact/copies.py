"""How a file of each kind is copied; files of other kinds are left out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stepsplit.analyzer.errors import RECORD_AGAIN, DataError, parse_toml, write
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.flight_recorder import decode_dump
from stepsplit.analyzer.readers.kinds import FLIGHT, RECORD, TRACE
from stepsplit.analyzer.readers.kineto.schema import UNDECODABLE
from stepsplit.analyzer.readers.pickle import read_whole
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.redact.fields import FLIGHT_FIELDS, JOB_FIELDS, RECORD_FIELDS, RUN_FIELDS
from stepsplit.analyzer.redact.forms import Fields, Texts, copy_object
from stepsplit.analyzer.redact.nccl_log import copy_nccl_log
from stepsplit.analyzer.redact.trace import copy_trace
from stepsplit.collectors.formats.run_spec import RUN_FILE

JOB, LOG = "job.toml", "NCCL log"

_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Copy:
    """How a kind of file is copied: the begin and the end of a numbered file's name, and the
    function that writes the copy and returns the number of dropped lines."""

    stem: str
    ending: str
    write: Callable[[Source, Path, Texts], int | None]


def _copy_json(fields: Fields, source: Source, out: Path, texts: Texts) -> None:
    with open_unpacked(source) as content:
        text = content.read(_MAX_BYTES)
    try:
        body = msgspec.json.decode(text, type=dict[str, Any])
    except UNDECODABLE as error:
        raise DataError(source.where, f"not valid JSON ({error})", RECORD_AGAIN) from None
    write(out, json.dumps(copy_object(body, fields, texts), indent=1).encode() + b"\n")


def _copy_dump(source: Source, out: Path, texts: Texts) -> None:
    """Writes a Flight Recorder dump as JSON, also if it was a pickle."""
    with open_unpacked(source) as content:
        dump, _ = decode_dump(read_whole(content, source.where), source.where)
    body = copy_object(msgspec.structs.asdict(dump), FLIGHT_FIELDS, texts)
    write(out, gzip.compress(msgspec.json.encode(body), 6, mtime=0))


def _copy_job(source: Source, out: Path, texts: Texts) -> None:
    with open_unpacked(source) as content:
        text = content.read(_MAX_BYTES)
    job = copy_object(parse_toml(source.where, text), JOB_FIELDS, texts)
    write(out, "".join(_format_tables(job)).encode())


def _format_tables(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[str]:
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):
            yield f"{key} = {_format_toml_value(value)}\n"
    for key, value in table.items():
        if isinstance(value, dict):
            yield f"\n[{'.'.join((*path, key))}]\n"
            yield from _format_tables(value, (*path, key))


def _format_toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_format_toml_value(each) for each in value if each is not None)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value)


COPIES: Mapping[str, Copy] = {
    TRACE.name: Copy("trace", ".json.gz", copy_trace),
    RUN_FILE: Copy("run", ".json", partial(_copy_json, RUN_FIELDS)),
    RECORD.name: Copy("record", ".json", partial(_copy_json, RECORD_FIELDS)),
    FLIGHT.name: Copy("flight", ".json.gz", _copy_dump),
    LOG: Copy("nccl", ".log", copy_nccl_log),
    JOB: Copy("job", ".toml", _copy_job),
}
