"""The script's own profiler instead of ours (--share): its trace becomes the recording too."""

from __future__ import annotations

import functools
import os
import shutil
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler

from stepsplit.collectors.record.annotations import replace_attribute
from stepsplit.collectors.record.rank_files import shorten_trace_name
from stepsplit.collectors.record.trace_window import TraceWindow


class SharedWindow:
    """The window of a recording that takes the trace of the script's own profiler.

    It begins while that profiler is prepared or running, or is about to be, and `on_end` is called
    once it has ended. The script can still export its trace, and sees nothing else of ours.
    """

    device_stopped = False

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._trace: _SharedTrace | None = None
        self._patches = ExitStack()
        self.first: int | None = None
        """The first step that ended while the script's profiler ran."""
        self.recorded = 0
        replace_attribute(self._patches, autograd_profiler.profile, "__exit__", self._wrap_exit())

    def begin_step(self, step: int, number: int) -> None:
        """Does nothing: the script's profiler marks its steps itself."""

    def end_step(self, step: int) -> None:
        """Call after each step."""
        if torch.autograd._profiler_enabled():
            self.first = step if self.first is None else self.first
            self.recorded += 1

    def end(self) -> Any:
        """Returns what can export the script's trace; None if its profiler has not ended."""
        self._patches.close()
        return self._trace

    def _wrap_exit(self) -> Callable[..., Any]:
        original = autograd_profiler.profile.__exit__

        @functools.wraps(original)
        def leave(profiler: Any, *error: Any) -> Any:
            result = original(profiler, *error)
            is_ours = TraceWindow._open is not None
            if self._trace is None and not is_ours and profiler.kineto_results is not None:
                self._trace = _SharedTrace(profiler)
                self._on_end()
            return result

        return leave


class _SharedTrace:
    """The result of a profiler of the script, which torch can write only once."""

    def __init__(self, profiler: Any) -> None:
        self._profiler, self._results = profiler, profiler.kineto_results

    def export_chrome_trace(self, path: str) -> None:
        """Writes the trace, and lets the profiler's own exports copy it from then on."""
        self._results.save(path)
        # The open file keeps its content after it is packed and deleted, as long as its profiler.
        written = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self._profiler, os.close, written)
        original = self._profiler.export_chrome_trace

        def export(target: str, *args: Any, **options: Any) -> Any:
            is_other = self._profiler.kineto_results is not self._results
            # Another recording of the same profiler, or another kind of export, which is not the
            # file that is kept.
            if is_other or any(args[1:]) or options.get("use_python_export"):
                return original(target, *args, **options)
            os.lseek(written, 0, os.SEEK_SET)
            with open(written, "rb", closefd=False) as trace, Path(target).open("wb") as copy:
                shutil.copyfileobj(trace, copy)
            shorten_trace_name(Path(target), str(target))

        self._profiler.export_chrome_trace = export
