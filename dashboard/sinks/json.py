"""JSON lines: a file for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from stepsplit.analyzer.errors import make_write_error
from stepsplit.dashboard.sinks.scalars import ScalarPoint, SinkError


class JsonSink:
    """A file to which one JSON object a point is appended, with the names of trackers."""

    def __init__(self, file: str) -> None:
        self.name, self._path = f"json:{file}", Path(file)
        try:
            self._path.open("ab").close()
        except OSError as error:
            raise make_write_error(self._path, error) from None

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Appends the points in one piece. Raises SinkError if the disk does not take them."""
        lines = "".join(
            json.dumps({"run": point.run, "unix_ns": point.unix_ns, **point.values}) + "\n"
            for point in points
        )
        try:
            # In one write: what reads the file meanwhile sees whole lines.
            with self._path.open("ab") as file:
                file.write(lines.encode())
        except OSError as error:
            raise SinkError(f"{self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        """Does nothing: the file is closed after each write."""


open_sink = JsonSink
