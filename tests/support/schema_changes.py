"""Whether one JSON Schema is an additive change of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
_TEXTS = ("title", "description", "$schema", "$defs", "default")


def find_breaking_changes(old: Schema, new: Schema) -> list[str]:
    """What is more than an added, optional property, each with its place; empty if nothing is."""
    return list(_compare(old, new, old, new, "", set()))


def _compare(
    old: Schema, new: Schema, old_root: Schema, new_root: Schema, place: str, seen: set[Any]
) -> Iterator[str]:
    pair = old.get("$ref"), new.get("$ref")
    if pair in seen and pair != (None, None):
        return
    seen = seen | {pair}
    old, new = _resolve(old, old_root), _resolve(new, new_root)
    inner = "properties", "required", "items", "prefixItems", "anyOf", "additionalProperties"
    for key in (old.keys() | new.keys()) - {*_TEXTS, *inner}:
        if old.get(key) != new.get(key):
            yield f"{place}: {key} is {new.get(key)}, was {old.get(key)}"
    before, after = old.get("properties", {}), new.get("properties", {})
    required, still = set(old.get("required", ())), set(new.get("required", ()))
    for name in sorted(required - still):
        yield f"{place}.{name}: may be missing now"
    for name in sorted(still - required):
        yield f"{place}.{name}: required now"
    for name, one in before.items():
        if name not in after:
            yield f"{place}.{name}: is gone"
        else:
            yield from _compare(one, after[name], old_root, new_root, f"{place}.{name}", seen)
    for key in ("prefixItems", "anyOf"):
        one, other = old.get(key, []), new.get(key, [])
        if len(one) != len(other):
            yield f"{place}: {key} has {len(other)} members, had {len(one)}"
        for each, its in zip(one, other, strict=False):
            yield from _compare(each, its, old_root, new_root, f"{place}[]", seen)
    for key in ("items", "additionalProperties"):
        one, other = old.get(key), new.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _compare(one, other, old_root, new_root, f"{place}[]", seen)
        elif one != other:
            yield f"{place}: {key} is {other}, was {one}"


def _resolve(schema: Schema, root: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return found
