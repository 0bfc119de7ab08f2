"""Decodes JSON into dataclasses; every field is checked against its annotation."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

_T = TypeVar("_T")

# What int64 does not hold.
_LARGEST = 2**63

_MAX_JSON_DIGITS = 400
"""Of a number in JSON, as of the largest float; Python refuses to convert more than 4,300."""

_JSON_NAMES = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}

_MAX_SHOWN = 60
"""Maximum length of a wrong value in an error message."""


def parse_object(text: str | bytes, schema: str) -> dict[str, Any]:
    """The JSON object in the text. Raises ValueError if it is another schema or not valid JSON.

    NaN and Infinity, which Python's json accepts, are not valid.
    """
    try:
        body = json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(body, dict) or body.get("schema") != schema:
        raise ValueError(f"not a {schema} file")
    return body


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_JSON_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def decode_field(body: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    """The value of a required field. Raises ValueError if it is missing or of another type."""
    if name not in body:
        raise ValueError(f"{name} is missing")
    value: _T = decode_value(body[name], kind, name)
    return value


def decode_value(value: Any, kind: Any, place: str) -> Any:
    """The value as `kind`: a scalar, tuple[X, ...], X | None, or a dataclass of these.

    Fields that a dataclass does not have are ignored, and missing ones keep their default. place
    names the value in the ValueError if it is of another type.
    """
    if isinstance(kind, types.UnionType):
        kinds = [one for one in typing.get_args(kind) if one is not types.NoneType]
        return None if value is None else decode_value(value, kinds[0], place)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{place}: {_show(value)} is not a list")
        item = typing.get_args(kind)[0]
        return tuple(decode_value(one, item, f"{place}[{i}]") for i, one in enumerate(value))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{place}: {_show(value)} is not an object")
        hints, values = _get_hints(kind), dict[str, Any]()
        for field in dataclasses.fields(kind):
            if field.name in value:
                name = f"{place}.{field.name}"
                values[field.name] = decode_value(value[field.name], hints[field.name], name)
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"{place}.{field.name} is missing")
        return kind(**values)
    # JavaScript and some tools write whole numbers with a point.
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = replace_surrogates(value)
    # For Python a bool is an int; in these files it is none.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_valid = is_number if kind is float else type(value) is kind
    # Larger numbers fit neither numpy's int64 nor a column of a table.
    if is_valid and not (is_number and abs(value) >= _LARGEST):
        return value
    raise ValueError(f"{place}: {_show(value)} is not {_JSON_NAMES[kind]}")


# get_type_hints evaluates every annotation of the class anew.
@functools.cache
def _get_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def replace_surrogates(text: str) -> str:
    """The text with "?" for what UTF-8 cannot encode: Python's form of other bytes in file names
    and in the environment, or \\ud800 in JSON."""
    return text.encode(errors="replace").decode()


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def select_known_fields(kind: type, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `body` that `kind` has; fields of a newer version are ignored."""
    return {field.name: body[field.name] for field in fields(kind) if field.name in body}
