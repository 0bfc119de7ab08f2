"""Sinks through a library or a file: TensorBoard, W&B and JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepsplit.analyzer.errors import make_write_error
from stepsplit.collectors.log_to import STEP
from stepsplit.dashboard.sinks.scalars import PREFIX, ScalarPoint, SinkError

_SECOND_NS = 10**9

START_TIMEOUT_S = 20.0
"""How long W&B may take to start a run, during which a watch sends nothing to others."""


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
                    seconds = point.unix_ns / _SECOND_NS
                    writer.add_scalar(one.name, one.value, point.step, wall_time=seconds)
            writer.flush()
        except OSError as error:
            raise SinkError(f"{self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()


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
        lines = "".join(_format_line(point) for point in points)
        try:
            with self._path.open("ab") as file:
                file.write(lines.encode())
        except OSError as error:
            raise SinkError(f"{self.name}: {error.strerror or error}") from None

    def close(self) -> None:
        """Does nothing: the file is closed after each write."""


def _format_line(point: ScalarPoint) -> str:
    head = {"run": point.run, "unix_ns": point.unix_ns}
    return json.dumps({**head, **_build_values(point)}) + "\n"


def _build_values(point: ScalarPoint) -> dict[str, Any]:
    return {STEP: point.step, **{one.name: one.value for one in point.scalars}}


class WandbSink:
    """A run of W&B.

    With the id of a run that another process logs to, its numbers are added in W&B's shared mode,
    which needs a connection and that the other process has started it in this mode too. Without,
    or offline, they are a run of their own.
    """

    def __init__(self, place: str) -> None:
        self.name = f"wandb:{place}" if place else "wandb"
        self._place = place
        self._run: Any = None

    def write(self, points: Sequence[ScalarPoint]) -> None:
        """Logs the points; W&B sends them later. Raises SinkError if it cannot start the run."""
        import wandb

        try:
            for point in points:
                run = self._run or self._start(point.run)
                run.log(_build_values(point))
        except (wandb.Error, OSError) as error:
            text = " ".join(str(error).split())
            raise SinkError(f"{self.name}: {text or type(error).__name__}") from None

    def _start(self, name: str) -> Any:
        import wandb

        entity, project, run_id = split_wandb_place(self._place)
        project = project or os.environ.get("WANDB_PROJECT") or PREFIX
        if run_id and os.environ.get("WANDB_MODE", "online") in ("online", "shared"):
            shared = wandb.Settings(
                mode="shared", x_primary=False, x_label=PREFIX, silent=True,
                init_timeout=START_TIMEOUT_S,
            )  # fmt: skip
            self._run = wandb.init(entity=entity, project=project, id=run_id, settings=shared)
        else:
            self._run = wandb.init(
                entity=entity,
                project=project,
                id=run_id,
                name=name,
                resume="allow" if run_id else None,
                settings=wandb.Settings(silent=True, console="off", init_timeout=START_TIMEOUT_S),
            )
        self._run.define_metric(f"{PREFIX}/*", step_metric=STEP)
        return self._run

    def close(self) -> None:
        """Ends the run, which waits for W&B to have sent its numbers."""
        import wandb

        if self._run is not None:
            with suppress(wandb.Error, OSError):
                self._run.finish()


def split_wandb_place(place: str) -> tuple[str | None, str | None, str | None]:
    """Entity, project and run of [ENTITY/]PROJECT[/RUN]; None for what is not there."""
    parts = [part or None for part in place.split("/")]
    if len(parts) >= 3:
        return parts[0], parts[1], parts[2]
    return None, parts[0], parts[1] if len(parts) == 2 else None
