"""What the fields of a type mean, from its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping


def read_meanings(content: type) -> Mapping[str, str]:
    """What each attribute means, with its unit, from the docstrings of the type and its bases."""
    meanings: dict[str, str] = {}
    for one in reversed(content.__mro__[:-1]):
        section = re.search(
            r"^(?:Attributes|Args):\n((?:[ ]+.*\n?|\n)+)", inspect.getdoc(one) or "", re.MULTILINE
        )
        if section is not None:
            found = re.findall(
                r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section.group(1), flags=re.MULTILINE
            )
            meanings |= {name: " ".join(text.split()) for name, text in found}
    return meanings
