"""How the code is cut: what import-linter does not see (pyproject.toml has the layers)."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("analyzer", "collectors", "dashboard")
OF_FRAMEWORKS = {"StepsplitCallback"}
"""Users import these from the integration of their framework."""


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            places[name].append(path.relative_to(ROOT).as_posix())
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in OF_FRAMEWORKS} == {}
