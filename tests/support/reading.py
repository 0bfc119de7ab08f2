"""Files as readers are given them, what reports say of them, and golden ones up to their last
digits."""

from __future__ import annotations

import re
from pathlib import Path

from stepsplit.analyzer import Report
from stepsplit.analyzer.readers.compression import read_head
from stepsplit.analyzer.readers.sources import DiskFile, Source


def on_disk(file: Path) -> Source:
    return DiskFile(file)


def head_of_file(file: Path) -> bytes:
    return read_head(DiskFile(file))


def list_messages(report: Report, code: str) -> list[str]:
    return [row.message for row in report.warnings if row.code == code]


def rounded(content: bytes) -> bytes:
    """The text with 12 digits of each number that has a fraction."""
    return re.sub(rb"\d+\.\d+", lambda found: b"%.12g" % float(found[0]), content)
