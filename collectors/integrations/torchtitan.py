"""The recorder where torchtitan's Trainer has its profiler.

    Trainer.Config(profiler=StepsplitProfiler.Config(enable_profiling=True, profile_freq=10))

The fields keep their meaning, for one recording: of the first profile_freq steps the last
profiler_active are recorded, after profiler_warmup, into the folder save_traces_folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.integrations.common import Facts, LateRun, library
from stepsplit.collectors.run_spec import Training

_Profiler: Any = library("torchtitan.tools.profiler", "torchtitan").Profiler


class StepsplitProfiler(_Profiler):  # type: ignore[misc]
    """torchtitan's Profiler with our recorder for its traces; its memory snapshots are as ever."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Profiler.Config):  # type: ignore[misc]
        """Profiler.Config with stepsplit's recorder."""

    def build_torch_profiler(
        self, *, global_step: int, base_folder: str, leaf_folder: str
    ) -> _Handle | None:
        """The recorder, running; None where profiling is not enabled."""
        config = self._config
        if not config.enable_profiling:
            return None
        unrecorded = config.profile_freq - config.profiler_warmup - config.profiler_active
        run = LateRun(
            Path(base_folder, config.save_traces_folder, leaf_folder),
            wait=unrecorded + (config.profiler_skip_first or 0),
            warmup=config.profiler_warmup,
            active=config.profiler_active,
            record_shapes=True,
        )
        run.begin(lambda: Facts(training=Training(framework="fsdp2")))
        return _Handle(run)


class _Handle:
    """A running recorder, as torchtitan calls torch's profiler."""

    def __init__(self, run: LateRun) -> None:
        self._run = run

    def step(self) -> None:
        self._run.step()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._run.end(failed=error is not None)
