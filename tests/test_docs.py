"""The docs: generated from today's docstrings, links that lead somewhere, examples that run."""

from __future__ import annotations

import doctest
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from generate.docs_api import BRIDGE, PACKAGES, PAGE, build_page

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
RUN_ELSEWHERE = ("validate",)
"""Examples that a test of their room runs, which takes seconds."""


@pytest.mark.slow
def test_the_api_page_is_generated_from_the_docstrings_of_today() -> None:
    assert PAGE.read_text() == build_page(), "python -m generate.docs_api rewrites it"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_in_public_docstrings_run(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if package.endswith("collectors"):
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    (tmp_path / "job.toml").write_text((ROOT / "docs" / "job.toml").read_text())
    module = importlib.import_module(package)
    exported = {name: getattr(module, name) for name in module.__all__}
    if package == BRIDGE[0].rpartition(".")[0]:
        exported[BRIDGE[1]] = getattr(importlib.import_module(BRIDGE[0]), BRIDGE[1])
    examples = {name: found for name, found in exported.items() if name not in RUN_ELSEWHERE}
    if "analyze" in exported:
        # A dozen examples show a row of one sample.
        exported["analyze"] = cache(exported["analyze"])
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for name, found in examples.items():
        if callable(found):
            for test in finder.find(found, name, globs=dict(exported)):
                runner.run(test)
    outcome = runner.summarize(verbose=False)
    assert outcome.failed == 0
