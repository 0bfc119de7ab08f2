"""Weights & Biases: a run, or another process's run in shared mode."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stepsplit.collectors.record.log_to import STEP
from stepsplit.dashboard.sinks.scalars import PREFIX, ScalarPoint, SinkError

START_TIMEOUT_S = 20.0
"""How long W&B may take to start a run, during which a watch sends nothing to others."""


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
                run.log(point.values)
        except (wandb.Error, OSError) as error:
            text = " ".join(str(error).split())
            raise SinkError(f"{self.name}: {text or type(error).__name__}") from None

    def _start(self, name: str) -> Any:
        import wandb

        # [ENTITY/]PROJECT[/RUN]: of two parts the second is the run.
        parts = [part or None for part in self._place.split("/")]
        entity, project, run_id = (parts if len(parts) > 2 else [None, *parts, None])[:3]
        project = project or os.environ.get("WANDB_PROJECT") or PREFIX
        if run_id and os.environ.get("WANDB_MODE", "online") in ("online", "shared"):
            # Not primary: only the other process writes the run's files.
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
        # Else W&B draws them over its own count of logs, which other processes advance too.
        self._run.define_metric(f"{PREFIX}/*", step_metric=STEP)
        return self._run

    def close(self) -> None:
        """Ends the run, which waits for W&B to have sent its numbers. Raises SinkError if W&B says
        that they are lost."""
        import wandb

        if self._run is None:
            return
        try:
            self._run.finish()
        except (wandb.Error, OSError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise SinkError(f"{self.name}: the numbers were not sent: {text}") from None


open_sink = WandbSink
