"""How the code is cut: what import-linter does not see (pyproject.toml has the layers)."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("analyzer", "collectors", "dashboard")
OF_FRAMEWORKS = {"StepsplitCallback"}
"""Users import these from the integration of their framework."""


@cache
def read_modules() -> dict[Path, ast.Module]:
    files = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {path: ast.parse(path.read_text()) for path in files if path.stat().st_size > 120}


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in read_modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in OF_FRAMEWORKS} == {}
