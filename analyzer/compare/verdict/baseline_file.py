"""A baseline as a small file that fits git: schema "stepsplit.baseline/1", a RunFacts a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stepsplit.analyzer.compare.verdict.run_facts import RunFacts
from stepsplit.analyzer.errors import DataError

SCHEMA = "stepsplit.baseline/1"
_HEAD = re.compile(rb'\s*\{\s*"schema"\s*:\s*"stepsplit\.baseline/')
_MEND = "write it anew with stepsplit baseline"


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that candidates are held against."""

    schema: str = SCHEMA
    runs: tuple[RunFacts, ...]


def to_json(runs: Sequence[RunFacts]) -> bytes:
    """The runs as JSON text, a fact a line so that a diff can be read; groups are left out."""
    body = b",\n".join(_run(msgspec.structs.replace(run, groups=())) for run in runs)
    return b'{"schema": "%s", "runs": [\n%s\n]}\n' % (SCHEMA.encode(), body)


def _run(run: RunFacts) -> bytes:
    fields = (
        b' "%s": %s' % (name.encode(), _lines(getattr(run, name))) for name in run.__struct_fields__
    )
    return b"{\n" + b",\n".join(fields) + b"\n}"


def _lines(value: object) -> bytes:
    """The value on a line, or each of its parts on one."""
    if not isinstance(value, tuple) or not value:
        return msgspec.json.encode(value)
    return b"[\n  " + b",\n  ".join(map(msgspec.json.encode, value)) + b"\n ]"


def is_baseline(path: Path) -> bool:
    """Whether the file says that it is a baseline, of whatever schema."""
    try:
        with path.open("rb") as file:
            return _HEAD.match(file.read(256)) is not None
    except (OSError, ValueError):
        return False


def read_baseline(path: Path) -> tuple[RunFacts, ...]:
    """The runs in the file. Raises DataError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except OSError as error:
        raise DataError(path, error.strerror or "unreadable", "name a baseline") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(path, f"not a stepsplit baseline ({error})", _MEND) from None
    if found.schema != SCHEMA:
        raise DataError(path, f"of schema {found.schema}, not {SCHEMA}", _MEND)
    if not found.runs:
        raise DataError(path, "holds no run", _MEND)
    return found.runs
