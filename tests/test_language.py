"""The words of names, texts and docs: plain engineering English (CONTRIBUTING.md, "Words")."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("analyzer", "collectors", "dashboard", "examples", "tests")

FORBIDDEN = re.compile(
    r"(?<![a-z])(mend(s|ed|ing)?|told|nobody|hangs on|held against|evened|needless(ly)?|fellows?"
    r"|folk|sparing)(?![a-z])"
)
"""Words of an earlier private dialect, for which the field says fix, inferred, critical path,
compared with, redundant, peer, rule of thumb."""

LEAST_VERBS = 0.60

ITSELF = Path(__file__).name


def words_of(text: str) -> list[str]:
    """The forbidden words of a text; CamelCase and snake_case names are taken apart."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()
    return [found[0] for found in FORBIDDEN.finditer(re.sub(r"\s+", " ", apart))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def test_a_wrong_file_is_told(): ...", ["told"]),
        ("class MendedRun", ["mended"]),
        ("what the end of a step hangs\n on", ["hangs on"]),
        ("we recommend an amended, untold folklore; Mendel", []),
    ],
)
def test_words_are_found_in_names_and_over_line_ends(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def listed_files(*endings: str) -> list[Path]:
    wanted = (ROOT / name for name in _list_names() if name.endswith(endings))
    return [path for path in wanted if path.name != ITSELF and "sample_traces" not in path.parts]


def _list_names() -> list[str]:
    """The files of the project; all that are here in a source release, which has no git."""
    if not (ROOT / ".git").exists():
        return [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")


@pytest.mark.parametrize("room", [*ROOMS, "docs"])
def test_no_forbidden_word_is_in_names_texts_or_docs(room: str) -> None:
    files = [
        path
        for path in listed_files(".py", ".md", ".toml", ".js", ".css", ".txt", ".html")
        if path.relative_to(ROOT).parts[0] == room
        or (room == "docs" and path.parent == ROOT and path.suffix == ".md")
    ]
    assert files
    found = {
        str(path.relative_to(ROOT)): words
        for path in files
        if (words := words_of(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def list_functions(path: Path) -> Iterator[str]:
    """The functions and methods of a file, without properties, overloads and dunders."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            hidden = any(one.endswith(("property", ".setter", "overload")) for one in decorators)
            if not node.name.startswith("__") and not hidden:
                yield node.name


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def known_verbs() -> frozenset[str]:
    return frozenset((Path(__file__).parent / "verbs.txt").read_text().split())


@pytest.mark.parametrize("package", ["analyzer", "collectors", "dashboard"])
def test_functions_are_verb_phrases(package: str) -> None:
    files = [path for path in listed_files(".py") if path.relative_to(ROOT).parts[0] == package]
    names = [name for path in files for name in list_functions(path)]
    verbs = [name for name in names if name.lstrip("_").split("_")[0] in known_verbs()]
    assert len(verbs) / len(names) > LEAST_VERBS
