"""A file's text, unpacked; what is wrong with it told in one line."""

from __future__ import annotations

import zlib
from pathlib import Path

from stepsplit.analyzer.errors import DataError

try:
    from isal.igzip import decompress
except ImportError:  # the extra [fast] is not installed
    from gzip import decompress

GZIP_MAGIC = b"\x1f\x8b"
RECORD_AGAIN = "record it again or leave it out"


def read_text(path: Path) -> bytes:
    """The file's JSON text, decompressed where it is gzip. Raises DataError for what is no JSON."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(path, error.strerror or "unreadable", "check the path") from None
    text = _gunzip(path, content) if content.startswith(GZIP_MAGIC) else content
    text = text.removeprefix(b"\xef\xbb\xbf")
    start = text.lstrip()[:1]
    if not start:
        raise DataError(path, "the file is empty", RECORD_AGAIN)
    if start not in b"{[":
        raise DataError(
            path, "not JSON, so no trace", "name a torch.profiler trace (.json, .json.gz)"
        )
    return text


def _gunzip(path: Path, content: bytes) -> bytes:
    try:
        return bytes(decompress(content))  # type: ignore[no-untyped-call]
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise DataError(path, f"the gzip data is torn ({error})", RECORD_AGAIN) from None
