"""DeepSpeed's engine as what steps: its inner optimizers step once for each group of parameters."""

from __future__ import annotations

import functools
import sys
from typing import Any

from stepsplit.collectors.control.imports import when_imported
from stepsplit.collectors.optimizers import Listener, call

_ENGINE = "deepspeed.runtime.engine"


def enclose_engines(listener: Listener) -> None:
    """The listener hears of each engine's step as of an optimizer around the engine's own."""
    when_imported(_ENGINE, lambda: _enclose(listener))


def _enclose(listener: Listener) -> None:
    kind: Any = getattr(sys.modules[_ENGINE], "DeepSpeedEngine", None)
    original = getattr(kind, "_take_model_step", None)
    if original is None:
        return

    @functools.wraps(original)
    def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        call(listener, listener.before, engine)
        result = original(engine, *args, **kwargs)
        call(listener, listener.after, engine)
        return result

    kind._take_model_step = step
