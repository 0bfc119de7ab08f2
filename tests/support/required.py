"""What a machine must have: where STEPSPLIT_REQUIRE names it, its absence fails, not skips."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED_TRACES = Path(__file__).parents[3] / "shared" / "traces"


def absent(what: str, why: str) -> None:
    """Skips the test that asks, or fails it where STEPSPLIT_REQUIRE names what is absent."""
    if what in os.environ.get("STEPSPLIT_REQUIRE", "").split(","):
        pytest.fail(f"{what} is required here: {why}")
    pytest.skip(why)


def shared_trace(name: str) -> Path:
    """A folder of other people's traces, kept beside the project and not in it."""
    folder = SHARED_TRACES / name
    if not folder.exists():
        absent("traces", f"{name} is not beside the project")
    return folder


def list_shared_files() -> list[Path]:
    """All files of those traces."""
    files = sorted(file for file in SHARED_TRACES.rglob("*") if file.is_file())
    if not files:
        absent("traces", "no traces are next to the project")
    return files


def shared_repro(name: str) -> Path:
    """A folder of recordings that were once analyzed wrongly, beside the project and not in it."""
    folder = SHARED_TRACES.parent / "repro" / name
    if not folder.exists():
        absent("repro", f"{name} is not beside the project")
    return folder
