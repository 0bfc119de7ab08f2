"""The page of published recordings, and the script that makes it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.gallery import EXHIBITS, Exhibit, show

ROOT = Path(__file__).parents[2]


def test_the_page_has_each_recording_with_its_commit() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text()
    *titles, _ = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert titles == [one.title for one in EXHIBITS]
    for exhibit in EXHIBITS:
        assert f"github.com/{exhibit.repository}/tree/{exhibit.commit}" in page
        assert " ".join(exhibit.known.split()) in " ".join(page.split())


@pytest.mark.slow
def test_a_recording_of_a_repository_is_shown_as_the_command_prints_it(tmp_path: Path) -> None:
    """A clone that is there is asked, and the network is not."""
    clone = tmp_path / "someone" / "traces"
    shutil.copytree(ROOT / "sample_traces" / "tp2_pp2", clone / "data" / "tp2_pp2")

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
        command = ["git", "-C", str(clone), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "traces")
    exhibit = Exhibit(
        "Four ranks", "someone/traces", git("rev-parse", "HEAD"), ("data/tp2_pp2",), "analyze",
        "Their README.", "The same.",
    )  # fmt: skip
    shutil.move(clone / ".git", tmp_path / "clones" / "someone" / "traces")
    text = show(exhibit, tmp_path / "clones")
    assert text.startswith("## Four ranks\n")
    assert "$ stepsplit analyze tp2_pp2\nrun tp2_pp2   4 x cpu" in text
    assert "TOP BOTTLENECKS" in text and "PARTS OF THE MODEL" not in text
