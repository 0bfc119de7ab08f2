"""TensorBoard: event files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepsplit.analyzer.errors import make_write_error
from stepsplit.dashboard.sinks.scalars import PREFIX, ScalarPoint, SinkError


class TensorBoardSink:
    """Event files in DIR/stepsplit.

    A folder of their own, since TensorBoard follows only the newest event file of a folder.
    """

    def __init__(self, folder: str) -> None:
        self.name, self._folder = f"tensorboard:{folder}", Path(folder) / PREFIX
        self._writer: Any = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise make_write_error(self._folder, error) from None

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Writes the points. Raises SinkError if the disk does not take them."""
        from tensorboard.summary import Writer

        try:
            self._writer = writer = self._writer or Writer(str(self._folder))
            for point in points:
                for one in point.scalars:
                    seconds = point.unix_ns / 1e9
                    writer.add_scalar(one.name, one.value, point.step, wall_time=seconds)
            # TensorBoard reads the file meanwhile, and a job may be killed.
            writer.flush()
        except OSError as error:
            raise SinkError(f"{self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()


open_sink = TensorBoardSink
