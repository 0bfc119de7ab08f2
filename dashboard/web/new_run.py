"""What a new run is asked to be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepsplit.dashboard.store.rows import Tag
from stepsplit.dashboard.web.refused import Refused

_KEY_LENGTH, _VALUE_LENGTH, _MOST_TAGS = 64, 200, 32


@dataclass(frozen=True, slots=True)
class NewRun:
    """A name and tags that can be kept."""

    name: str
    tags: tuple[Tag, ...]


def new_run(body: object) -> NewRun:
    """The run that the JSON asks for. Raises Refused."""
    asked = body if isinstance(body, Mapping) else {}
    name, tags = asked.get("name"), asked.get("tags") or {}
    if not isinstance(name, str) or not name.strip() or not name.strip().isprintable():
        raise Refused(400, 'send JSON with a name: {"name": "my run"}')
    if not isinstance(tags, Mapping) or len(tags) > _MOST_TAGS:
        raise Refused(400, f'tags are at most {_MOST_TAGS} texts by key: {{"branch": "main"}}')
    return NewRun(name.strip(), tuple(_tag(key, value) for key, value in tags.items()))


def _tag(key: object, value: object) -> Tag:
    if _is_text(key, 1, _KEY_LENGTH) and _is_text(value, 0, _VALUE_LENGTH):
        return Tag(str(key), str(value))
    lengths = f"{_KEY_LENGTH} and {_VALUE_LENGTH}"
    raise Refused(400, f"a tag's key and value are texts of at most {lengths} characters")


def _is_text(value: object, least: int, most: int) -> bool:
    return isinstance(value, str) and least <= len(value) <= most and value.isprintable()
