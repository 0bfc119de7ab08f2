"""Writes constraints-lowest.txt: exactly the lower bounds of pyproject.toml, next to one torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOWEST, LOCKED = ROOT / "constraints-lowest.txt", ROOT / "constraints.txt"
HEAD = """\
# Exactly the lower bounds of pyproject.toml, and the torch of constraints.txt: .ci/run runs the
# quick tier with them too. python tests/generate/constraints.py writes this file.
"""
_BOUND = re.compile(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)(?:,<[\w.]+)?")
_OF_OURS = "stepsplit["
_TOOLS = "dev"
"""The extra that the tests do not need."""


def format_lowest() -> str:
    """The content of constraints-lowest.txt."""
    bounds = {name: version for name, version in read_bounds(without=_TOOLS) if name != "torch"}
    pins = sorted((f"{name}=={version}" for name, version in bounds.items()), key=str.lower)
    torch = next(line for line in LOCKED.read_text().splitlines() if line.startswith("torch=="))
    return HEAD + "\n".join([torch, *pins]) + "\n"


def read_bounds(without: str = "") -> list[tuple[str, str]]:
    """The packages that pyproject.toml needs with their lower bounds, but those of one extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    lines = [*project["dependencies"]]
    lines += [line for extra, needed in extras.items() if extra != without for line in needed]
    found = {line: _BOUND.fullmatch(line) for line in lines if not line.startswith(_OF_OURS)}
    assert None not in found.values(), f"no lower bound: {found}"
    return [(match[1], match[2]) for match in found.values() if match is not None]


if __name__ == "__main__":
    LOWEST.write_text(format_lowest())
