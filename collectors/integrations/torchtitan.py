"""The recorder in place of the profiler of torchtitan's Trainer.

    Trainer.Config(profiler=StepsplitProfiler.Config(enable_profiling=True, profile_freq=10))

The fields have their usual meaning, for one recording: the last profiler_active of the first
profile_freq steps are recorded to save_traces_folder, after profiler_warmup steps of warmup.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from inspect import getattr_static
from pathlib import Path
from types import FrameType
from typing import Any

from stepsplit.collectors.formats.run_spec import Training
from stepsplit.collectors.integrations.common import FrameworkSpec, LazyRecording, import_library

_Profiler: Any = import_library("torchtitan.tools.profiler", "torchtitan").Profiler


class StepsplitProfiler(_Profiler):  # type: ignore[misc]
    """torchtitan's Profiler that records traces with stepsplit; memory snapshots are unchanged."""

    @dataclass(kw_only=True, slots=True)
    class Config(_Profiler.Config):  # type: ignore[misc]
        """Profiler.Config with stepsplit's recorder."""

    def build_torch_profiler(
        self, *, global_step: int, base_folder: str, leaf_folder: str
    ) -> _Handle | None:
        """Starts the recorder; None if profiling is disabled."""
        config = self._config
        if not config.enable_profiling:
            return None
        # Its cycle has profile_freq steps, of which the last are warm-up and active.
        unrecorded = config.profile_freq - config.profiler_warmup - config.profiler_active
        run = LazyRecording(
            Path(base_folder, config.save_traces_folder, leaf_folder),
            wait=unrecorded + (config.profiler_skip_first or 0),
            warmup=config.profiler_warmup,
            active=config.profiler_active,
            record_shapes=True,
        )
        training = Training(framework="fsdp2")
        run.begin(lambda: FrameworkSpec(training=training, steps_before=global_step))
        return _Handle(run, _find_trainer())


def _find_trainer() -> Any:
    """The Trainer whose loop builds the profiler; None in a loop of the user's own.

    torchtitan does not pass it, and counts the tokens of its rank in ntokens_seen.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        # Any caller's object is looked at: none of its code may run.
        if isinstance(getattr_static(owner, "ntokens_seen", None), int):
            return owner
        frame = frame.f_back
    return None


class _Handle:
    """A running recorder with the interface of torch's profiler that torchtitan uses."""

    def __init__(self, run: LazyRecording, trainer: Any) -> None:
        self._run, self._trainer = run, trainer
        self._tokens = self._count_tokens()

    def step(self) -> None:
        before, self._tokens = self._tokens, self._count_tokens()
        known = before is not None and self._tokens is not None
        self._run.step(self._tokens - before if known else None, "torchtitan")

    def _count_tokens(self) -> Any:
        return getattr(self._trainer, "ntokens_seen", None)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._run.end(failed=error is not None)
