"""How the code is cut: sizes of modules and functions, and names that occur once."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("analyzer", "collectors", "dashboard")
MOST_LINES, MOST_LINES_OF_FUNCTION = 900, 60
OF_FRAMEWORKS = {"StepsplitCallback"}
"""Users import these from the integration of their framework."""


@cache
def read_modules() -> dict[Path, ast.Module]:
    files = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {path: ast.parse(path.read_text()) for path in files if path.stat().st_size > 120}


def test_modules_are_not_too_large() -> None:
    lines = {path: path.read_text().count("\n") for path in read_modules()}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_functions_do_one_thing() -> None:
    functions = (
        (path.name, node.name, (node.end_lineno or 0) - node.lineno + 1)
        for path, tree in read_modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert [one for one in functions if one[2] > MOST_LINES_OF_FUNCTION] == []


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in read_modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in OF_FRAMEWORKS} == {}
