"""Where span logs may lie."""

from __future__ import annotations

from pathlib import Path

_FOLDERS = ("", "structured_logs")
"""The folder itself, and torchtitan's within it."""


def list_span_logs(folder: Path) -> list[Path]:
    """The files in which span logs may be: in the folder, and in torchtitan's folder within it."""
    return sorted(path for name in _FOLDERS for path in (folder / name).glob("*.jsonl"))
