"""zstd as pyarrow unpacks it. Imported where a file is packed so, for pyarrow takes its time."""

from __future__ import annotations

import io

import pyarrow as pa


class Zstd:
    """The unpacked bytes of a zstd file. Raises OSError where it is cut off or damaged."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")

    def read(self, size: int, /) -> bytes:
        try:
            found: bytes = self._stream.read(size)
        except pa.ArrowException as error:
            raise OSError(str(error)) from None
        return found
