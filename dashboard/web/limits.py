"""How much the server takes."""

from __future__ import annotations

from dataclasses import dataclass

JSON_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a file, bytes and files a run; and what an upload must leave free on the disk."""

    file_bytes: int = 8 << 30
    run_bytes: int = 64 << 30
    run_files: int = 8_192
    spare_bytes: int = 1 << 30
