"""A verdict as JSON, in and out: schema "stepsplit.verdict/1", the fields of Verdict."""

from __future__ import annotations

import msgspec

from stepsplit.analyzer.compare.verdict.verdict import SCHEMA, Verdict
from stepsplit.analyzer.errors import DataError


def to_json(verdict: Verdict) -> bytes:
    """The verdict as JSON text."""
    return msgspec.json.format(msgspec.json.encode(verdict), indent=1) + b"\n"


def from_json(text: bytes, source: object = "verdict.json") -> Verdict:
    """The verdict of the text. Raises DataError where the text is none of this schema."""
    try:
        verdict = msgspec.json.decode(text, type=Verdict)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(source, f"not a stepsplit verdict ({error})", "check again") from None
    if verdict.schema != SCHEMA:
        raise DataError(source, f"of schema {verdict.schema}, not {SCHEMA}", "check again")
    return verdict
