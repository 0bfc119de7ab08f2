"""A stranger's text in every field of a JSON document that takes any."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

RUNNER = "::error title=t::planted ##[add-mask]a ##vso[task.setvariable]b ##teamcity[c] "
PLANTED = (
    f"{RUNNER}\x1b[5m\x1b]52;c;QQ==\x07\x1b]8;;http://e\x1b\\\x9b2J\r\n{RUNNER}\r::stop-commands::x\n"
    "section_start:1:a\r\x1b[0K\u202eab\u2066\u2028::error::c\u2029\x85\x00\x7f\u200b\U000e0041"
    "[red][/nope][link=http://e]l[/link] :smile: 名前 👍🏽 é"
)


def plant(body: Any, keys: frozenset[str]) -> Any:
    """The JSON value with the planted text at the end of every text of these keys."""

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            # A mesh of unknown axes is not compared.
            return {name: one if name == "mesh" else walk(one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [walk(one, key) for one in value]
        return value + PLANTED if isinstance(value, str) and key in keys else value

    return walk(body, "")


def plant_where_accepted(text: bytes, decode: Callable[[bytes], object]) -> bytes:
    """The JSON document with the planted text in every field that takes any text."""
    body, kept = json.loads(text), set[str]()
    for key in sorted(set(re.findall(r'"(\w+)":', text.decode()))):
        try:
            decode(json.dumps(plant(body, frozenset({key}))).encode())
        except Exception:  # noqa: BLE001 - a field with a fixed set of values
            continue
        kept.add(key)
    assert len(kept) > 5
    return json.dumps(plant(body, frozenset(kept))).encode()
