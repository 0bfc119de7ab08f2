"""JSON objects that break the rules of JSON in the ways that writers of traces are known for."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

_NO_VALUE = re.compile(r'":\s*(?=[,}\]])')
_LAST_COMMA = re.compile(r",\s*(?=[}\]])")


def loose_object(text: bytes) -> dict[str, Any] | None:
    """The object that the text means, numbers with a point as Decimal; None where it means none.

    NaN and infinities are None. Bytes that are no UTF-8 are replaced, control characters stay. Some
    builds of torch write a key without its value: that is None too.
    """
    known = text.decode(errors="replace")
    found = _parsed(known)
    if found is None:
        found = _parsed(_LAST_COMMA.sub("", _NO_VALUE.sub('": null', known)))
    return found


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text, strict=False, parse_float=decimal_of, parse_constant=_none)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def decimal_of(text: str) -> Decimal | None:
    """The number, None where even the exponent is beyond numbers."""
    try:
        return Decimal(text)
    except ArithmeticError:
        return None


def _none(_: str) -> None:
    """NaN and infinities say nothing."""
