"""Where span logs may lie; apart, as what reads them takes long to import."""

from __future__ import annotations

from pathlib import Path


def list_span_logs(folder: Path) -> list[Path]:
    """The files in which span logs may be: in the folder, and in torchtitan's within it."""
    return sorted([*folder.glob("*.jsonl"), *folder.glob("structured_logs/*.jsonl")])
