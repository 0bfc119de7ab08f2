"""Tests that take turns: an eighth of the slow ones runs each time, and all that a change concerns.

A test marked `in_turn("collectors", ...)` runs where a file under one of these paths has changed,
or the test's own file, or a module beside it that it imports. Of the others an eighth runs, chosen
by what the last commit holds. STEPSPLIT_EVERY=1 runs all.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TURNS = 8
_TOO_WIDE = ("simulator", "turns")
"""Modules whose change is no reason to run all tests that import them."""

PAGES = (
    "dashboard/figures", "dashboard/pages", "dashboard/store", "dashboard/web", "analyzer/report",
)  # fmt: skip
"""What the pages of the dashboard are made of."""

_VERSIONS = ("constraints-lowest.txt",)

INTEGRATION = (
    "collectors/integrations", "collectors/profiler.py", "collectors/record/rank_files.py",
    "collectors/formats/rank_record.py", "collectors/record/trace_window.py",
)  # fmt: skip
"""What the hooks of the frameworks are made of."""


@dataclass(frozen=True)
class Change:
    """The files that differ from a commit, relative to the root; none where there is no commit."""

    since: str
    paths: frozenset[str]

    def touches(self, folders: Collection[str]) -> bool:
        return any(path == f or path.startswith(f"{f}/") for path in self.paths for f in folders)


@cache
def read_change() -> Change:
    """What changed since STEPSPLIT_CHANGED_SINCE, with what is not committed.

    Without it: since this branch left origin's, or, where it has no commits of its own, since the
    commit before the last. Files that were only moved have not changed.
    """
    since = os.environ.get("STEPSPLIT_CHANGED_SINCE") or _find_base()
    if not since:
        return Change("", frozenset())
    if not _git("rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        raise pytest.UsageError(f"STEPSPLIT_CHANGED_SINCE: no commit {since} here")
    changed = {
        path
        for status, *paths in (
            line.split("\t") for line in _git("diff", "--name-status", "-M", since).splitlines()
        )
        if status != "R100"
        for path in paths
    }
    new = _git("ls-files", "--others", "--exclude-standard").splitlines()
    return Change(since, frozenset({*changed, *new}))


def is_in_part(file: Path) -> bool:
    """Whether a file of tests is one of those that run this time.

    With STEPSPLIT_PART=N these are an Nth of all files, twice as many where versions changed.
    """
    part = os.environ.get("STEPSPLIT_PART")
    if not part or os.environ.get("STEPSPLIT_EVERY"):
        return True
    parts = int(part) // (2 if read_change().touches(_VERSIONS) else 1)
    return file in _list_files()[_find_turn(parts) :: parts]


def select_in_turn(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of the items that run this time."""
    if os.environ.get("STEPSPLIT_EVERY"):
        return list(items)
    marked = [item for item in items if item.get_closest_marker("in_turn")]
    turn = set(marked[_find_turn(_TURNS) :: _TURNS])
    left = {item for item in marked if item not in turn and not _is_concerned(item)}
    return [item for item in items if item not in left]


def describe_turn() -> str:
    change = read_change()
    turn = f"slow tests: turn {_find_turn(_TURNS) + 1} of {_TURNS}"
    if not change.since:
        return turn
    return f"{turn}, and those of {len(change.paths)} files changed since {change.since[:10]}"


def _is_concerned(item: pytest.Item) -> bool:
    folders = {f for mark in item.iter_markers("in_turn") for f in mark.args}
    absent = [f for f in folders if not (ROOT / f).exists()]
    if absent:
        raise pytest.UsageError(f"{item.nodeid}: in_turn names {absent[0]}, which does not exist")
    return read_change().touches(folders | _find_sources(item.path))


@cache
def _find_sources(test: Path) -> frozenset[str]:
    """The test's file, and the modules and packages of the tests that it imports."""
    names = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{one.name}" for one in node.names}
    tests = Path(__file__).parents[1]
    found = [test]
    for first, *rest in (name.split(".") for name in names):
        # All tests import builders: of these folders a test is for the modules that it names.
        if first in ("support", "fuzz", "generate") and rest:
            found.append(tests / first / f"{rest[0]}.py")
        elif first != "simulator":
            found += [path for path in (tests / f"{first}.py", tests / first) if path.exists()]
    return frozenset(path.relative_to(ROOT).as_posix() for path in found)


@cache
def _list_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def _find_turn(turns: int) -> int:
    return int(_git("rev-parse", "HEAD^{tree}")[:6] or "0", 16) % turns


def _find_base() -> str:
    head = _git("rev-parse", "HEAD")
    for branch in ("origin/HEAD", "origin/main"):
        base = _git("merge-base", branch, "HEAD")
        if base and base != head:
            return base
    return _git("rev-parse", "--verify", "--quiet", "HEAD~1")


def _git(*words: str) -> str:
    """What git says; nothing where it fails."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
