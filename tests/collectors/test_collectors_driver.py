"""The GPU driver's version from /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from stepsplit.collectors.probes.versions import read_driver_version

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 13\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [(OPEN, "580.65.06"), (CLOSED, "535.183.01"), ("6.8.5\n", "6.8.5"), ("none\n", None)],
)
def test_the_version_comes_from_the_first_file_that_has_one(
    text: str, version: str | None, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text(text)
    assert read_driver_version((tmp_path / "absent", tmp_path / "version")) == version


def test_without_a_driver_the_version_is_none(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff\xfe")
    assert read_driver_version((tmp_path / "odd", tmp_path / "absent")) is None
