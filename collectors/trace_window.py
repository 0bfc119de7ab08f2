"""torch.profiler over some steps: when it warms up, starts and ends, and who else may have it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, record_function

from stepsplit.collectors import annotate
from stepsplit.collectors.plan import Plan

_STARTERS = ("_prepare_profiler", "_enable_profiler")
"""What every profiler of torch calls before it runs, in torch.autograd.profiler."""


class TraceWindow:
    """The profiler of one recording.

    torch has one a process. Where another one runs already, to warm up raises RuntimeError; when
    another starts meanwhile, `give_way` is called first and this one ends.
    """

    _open: ClassVar[TraceWindow | None] = None
    """The one that has torch's profiler."""

    def __init__(self, plan: Plan, first: int, give_way: Callable[[], None]) -> None:
        self._plan, self._first, self._give_way = plan, first, give_way
        self._profiler: Any = None
        self._mark: Any = None
        self._patches = ExitStack()
        self._ours = self._started = False
        self.recorded = 0
        """Steps that were recorded to their end."""

    @property
    def is_open(self) -> bool:
        """Whether the profiler is warming up or recording."""
        return self._profiler is not None

    @property
    def is_recording(self) -> bool:
        return self._mark is not None

    def before(self, step: int) -> None:
        """Call before each step: warms up, starts, and marks the step in the trace."""
        if self._profiler is None and step >= self._first - self._plan.warmup:
            self._warm_up()
        if self._profiler is not None and step >= self._first:
            if not self._started:
                self._start()
            self._mark = record_function(f"ProfilerStep#{step}")
            self._mark.__enter__()

    def after(self) -> None:
        """Call after each step."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)
            self.recorded += 1

    def end(self) -> Any:
        """Ends the profiler, also within a step. It, where a whole step was recorded; else None."""
        profiler, mark, self._mark = self._profiler, self._mark, None
        if profiler is None:
            return None
        try:
            if mark is not None:
                mark.__exit__(None, None, None)
            if not self._started:
                # As torch does: a profiler that is warm is ended by starting it first.
                self._start()
            self._run(profiler.stop_trace)
        finally:
            self._profiler = None
            self._patches.close()
        return profiler if self.recorded else None

    def _warm_up(self) -> None:
        if TraceWindow._open is not None:
            raise RuntimeError("another recording is under way, and there can be only one")
        if torch.autograd._profiler_enabled() or _another_is_warm():
            raise RuntimeError("another torch.profiler is running, and there can be only one")
        TraceWindow._open = self
        self._patches.callback(_closed)
        self._profiler = torch.profiler.profile(
            activities=_activities(),
            record_shapes=self._plan.shapes,
            profile_memory=self._plan.memory,
            with_stack=self._plan.stacks,
        )
        self._patches.enter_context(annotate.annotations())
        for name in _STARTERS:
            self._make_way_in(name)
        self._run(self._profiler.prepare_trace)

    def _start(self) -> None:
        self._started = True
        self._run(self._profiler.start_trace)

    def _make_way_in(self, name: str) -> None:
        original = getattr(autograd_profiler, name, None)
        if original is None:
            return

        def start(*args: Any, **kwargs: Any) -> Any:
            if not self._ours:
                self._give_way()
            return original(*args, **kwargs)

        setattr(autograd_profiler, name, start)
        self._patches.callback(setattr, autograd_profiler, name, original)

    def _run(self, part: Callable[[], None]) -> None:
        """Runs a part of our own profiler, for which there is no way to be made."""
        self._ours = True
        try:
            part()
        finally:
            self._ours = False


def _closed() -> None:
    TraceWindow._open = None


def _another_is_warm() -> bool:
    """Whether a profiler of the user's has been prepared and not started yet.

    torch knows no such state, and would crash where it is then started after ours. Such profilers
    are found among all objects, once a recording and before the steps that it records.
    """
    found = gc.get_referrers(torch.profiler.profile)
    inner = (each.profiler for each in found if isinstance(each, torch.profiler.profile))
    return any(each is not None and each.entered and each.kineto_results is None for each in inner)


def _activities() -> list[Any]:
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    return found
