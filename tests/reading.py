"""Files as readers are given them, and their beginnings, by which readers recognize them."""

from __future__ import annotations

from pathlib import Path

from stepsplit.analyzer.readers.compression import read_head
from stepsplit.analyzer.readers.sources import DiskFile, Source


def on_disk(file: Path) -> Source:
    return DiskFile(file)


def head_of_file(file: Path) -> bytes:
    return read_head(DiskFile(file))
