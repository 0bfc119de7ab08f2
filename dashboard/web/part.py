"""What an upload's request says of its body: where it belongs, whether more follows, its digest."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from typing import BinaryIO

from werkzeug.datastructures import Headers

from stepsplit.dashboard.web.refused import Refused

_OFFSET = re.compile(r"\d{1,15}")
_DIGEST = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]*):")


@dataclass(frozen=True, slots=True)
class Part:
    """A body and its place. length is what was announced, None for a chunked body; sha256 None
    where the sender did not say. whole: the body replaces the file."""

    stream: BinaryIO
    length: int | None
    offset: int
    ends: bool
    sha256: bytes | None
    whole: bool = False


def whole_file(stream: BinaryIO, length: int | None, headers: Headers) -> Part:
    """The part of a PUT. Raises Refused."""
    return Part(stream, length, 0, True, _sha256(headers), whole=True)


def next_part(stream: BinaryIO, length: int | None, headers: Headers) -> Part:
    """The part of a PATCH: Upload-Offset, and Upload-Complete: ?1 with the last. Raises Refused."""
    offset = headers.get("Upload-Offset", "")
    if not _OFFSET.fullmatch(offset):
        raise Refused(400, "send Upload-Offset: the bytes that are held of the file (HEAD tells)")
    complete = headers.get("Upload-Complete", "?0")
    if complete not in ("?0", "?1"):
        raise Refused(400, "Upload-Complete is ?1 with the last part of a file, else ?0")
    return Part(stream, length, int(offset), complete == "?1", _sha256(headers))


def _sha256(headers: Headers) -> bytes | None:
    """The body's digest by RFC 9530; other algorithms than SHA-256 are left alone."""
    given = headers.get("Content-Digest")
    found = None if given is None else _DIGEST.search(given)
    if found is None:
        return None
    try:
        digest = base64.b64decode(found[1], validate=True)
    except binascii.Error:
        digest = b""
    if len(digest) != 32:
        raise Refused(400, "Content-Digest is not a SHA-256 by RFC 9530")
    return digest
