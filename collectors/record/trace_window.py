"""The profiler's window of steps: warmup, start, end, and the annotations in the trace."""

from __future__ import annotations

import functools
import gc
import os
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, record_function

from stepsplit.collectors.formats.rank_record import ModuleNames
from stepsplit.collectors.guard import warn, warn_on_failure
from stepsplit.collectors.job.process_groups import read_job
from stepsplit.collectors.record.annotations import annotate_layers, replace_attribute
from stepsplit.collectors.record.framework_marks import annotate_framework_marks
from stepsplit.collectors.record.library_calls import annotate_library_calls
from stepsplit.collectors.record.module_choice import ModuleChoice, has_compiled_code
from stepsplit.collectors.record.module_names import name_modules
from stepsplit.collectors.record.plan import RecordPlan

_STARTERS = ("_prepare_profiler", "_enable_profiler")
"""Functions of torch.autograd.profiler that every profiler calls before it runs."""


BUFFERS_FULL = (
    "Kineto's GPU buffers are full; record fewer steps, or name a file with a larger"
    " ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB in KINETO_CONFIG"
)


class ProfilerInUseError(RuntimeError):
    """Another torch.profiler of the process is running or prepared."""


class TraceWindow:
    """The profiler of one recording.

    torch allows one profiler per process. If another one is already running, the warmup raises
    ProfilerInUseError; if another one starts later, `on_other_profiler` is called first and this
    one ends.
    """

    _open: ClassVar[TraceWindow | None] = None
    """The window that currently uses torch's profiler."""

    def __init__(
        self,
        plan: RecordPlan,
        first: int,
        on_other_profiler: Callable[[], None],
        is_other_prepared: Callable[[], bool] | None = None,
    ) -> None:
        notice_captures()
        self._plan, self._first, self._give_way = plan, first, on_other_profiler
        self._is_other_prepared = is_other_prepared or _is_another_prepared
        self._profiler: Any = None
        self._mark: Any = None
        self._patches = ExitStack()
        self._names = ExitStack()
        self._choice = ModuleChoice(plan) if plan.modules is None else None
        self._begin_ns = 0
        self._steps_ns: list[int] = []
        self._activities = _list_activities()
        self._ours = self._warm = self._started = False
        self.recorded = 0
        """Number of completely recorded steps."""
        self.module_names: ModuleNames | None = None
        """Whether the modules are named in a step; None if that was neither asked for nor decided
        yet."""

    def begin_step(self, step: int, number: int) -> None:
        """Call before each step: warms up, starts, and marks the step in the trace.

        number: the step as the trace names it, which counts the steps before a resumption too.
        """
        if self._profiler is None and step >= self._first - self._plan.warmup:
            self._warm_up()
        if self._choice and self._profiler is not None and step == self._first - 1:
            with warn_on_failure(read_job()[0], "the names of its modules"):
                self._names.enter_context(self._choice.count_calls())
        if self._profiler is not None and step >= self._first:
            if not self._started:
                self._start()
            with warn_on_failure(read_job()[0], "the names of its modules"):
                self._name_modules(step, number)
            self._begin_ns = time.perf_counter_ns()
            self._mark = record_function(f"ProfilerStep#{number}")
            self._mark.__enter__()

    def end_step(self, step: int) -> None:
        """Call after each step."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)
            self.recorded += 1
            self._steps_ns.append(time.perf_counter_ns() - self._begin_ns)
        # The hooks cost time, so that the other steps are without them.
        self._names.close()

    def _name_modules(self, step: int, number: int) -> None:
        """Names the modules in the step that begins, if it is the one for that."""
        # Names that are asked for are in the first step, as the job may end before the last one.
        # Otherwise the steps before have to show what they may cost.
        if self._choice is None and self._plan.modules and step == self._first:
            if has_compiled_code():
                warn("--modules: not with torch.compile, whose code hooks would compile again")
                self.module_names = ModuleNames(why="compiled")
            else:
                self.module_names = ModuleNames(number)
        elif self._choice is not None and step == self._first + self._plan.steps - 1:
            self.module_names = self._choice.decide(number, self._steps_ns)
        if self.module_names is not None and self.module_names.step == number:
            self._names.enter_context(name_modules())

    @property
    def device_stopped(self) -> bool:
        """Whether Kineto has stopped to record the GPU, because its buffers are full."""
        is_stopped = getattr(torch.autograd, "_is_kineto_stopped", None)
        if is_stopped is None or not self._warm or ProfilerActivity.CUDA not in self._activities:
            # Without a GPU of ours, the flag is that of an earlier profiler.
            return False
        return bool(is_stopped())

    def end(self) -> Any:
        """Ends the profiler and returns it; None if no complete step was recorded."""
        profiler, mark, self._mark = self._profiler, self._mark, None
        if profiler is None:
            return None
        try:
            if mark is not None:
                mark.__exit__(None, None, None)
            if not self._started:
                # A prepared profiler must be started before it can be stopped.
                self._start()
            _stay_attached_beside_graphs()
            self._call_own(profiler.stop_trace)
        finally:
            self._profiler = None
            self._names.close()
            self._patches.close()
        if not self.recorded:
            release_profiler(profiler)
            return None
        return profiler

    def _warm_up(self) -> None:
        if TraceWindow._open is not None:
            raise RuntimeError("another recording is running; only one is possible per process")
        if torch.autograd._profiler_enabled() or self._is_other_prepared():
            raise ProfilerInUseError("the script's own torch.profiler is running")
        TraceWindow._open = self
        self._patches.callback(setattr, TraceWindow, "_open", None)
        self._profiler = torch.profiler.profile(
            activities=self._activities,
            record_shapes=self._plan.shapes,
            profile_memory=self._plan.memory,
            with_stack=self._plan.stacks,
            experimental_config=_choose_config(self._plan),
        )
        self._patches.enter_context(annotate_layers())
        self._patches.enter_context(annotate_library_calls())
        self._patches.enter_context(annotate_framework_marks())
        for name in _STARTERS:
            self._wrap_starter(name)
        _ignore_cycles()
        self._call_own(self._profiler.prepare_trace)
        self._warm = True

    def _start(self) -> None:
        self._started = True
        self._call_own(self._profiler.start_trace)

    def _wrap_starter(self, name: str) -> None:
        original = getattr(autograd_profiler, name, None)
        if original is None:
            return

        def start(*args: Any, **kwargs: Any) -> Any:
            # The script's profiler needs torch's only one: it goes first, and ours ends.
            if not self._ours:
                self._give_way()
            return original(*args, **kwargs)

        setattr(autograd_profiler, name, start)
        self._patches.callback(setattr, autograd_profiler, name, original)

    def _call_own(self, callback: Callable[[], None]) -> None:
        """Calls a method of our own profiler, which must not end this window."""
        self._ours = True
        try:
            callback()
        finally:
            self._ours = False


@functools.cache
def _ignore_cycles() -> None:
    """Torch up to 2.11 warns of every profiler that it clears the events of a cycle; ours have one.

    Once per process: each change of the filters has Python repeat the warnings that it has shown.
    """
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")


def release_profiler(profiler: Any) -> None:
    """Frees the events of a profiler of ours that has ended; it cannot be exported afterwards.

    Its action_map has bound methods of it. This reference cycle would keep all events until
    Python's oldest generation is collected: never, if a training has switched that off
    (pytorch/pytorch#193348).
    """
    if not isinstance(profiler, torch.profiler.profile):
        return
    actions = getattr(profiler, "action_map", None)
    if isinstance(actions, dict):
        actions.clear()
    profiler.profiler = None


def _choose_config(plan: RecordPlan) -> Any:
    """Has torch write the trace alone, without the Python objects of events() (torch 2.13).

    None, torch's default, if stacks or memory are recorded, or torch does not know the option.
    """
    kind = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    if plan.stacks or plan.memory or kind is None:
        return None
    try:
        return kind(trace_only=True)
    except TypeError:
        return None


class PreparedProfilers:
    """The profilers that are prepared in this process, without a search of all objects each time.

    It searches once, which takes 20 to 130 ms, and from then on notes every profiler that is
    prepared. For a process that is sampled again and again.
    """

    def __init__(self) -> None:
        self._profilers = weakref.WeakSet[Any](_list_profilers())
        self._patches = ExitStack()
        original = getattr(autograd_profiler.profile, "_prepare_trace", None)
        self._is_complete = original is not None
        if original is not None:
            replace_attribute(
                self._patches, autograd_profiler.profile, "_prepare_trace", self._wrap(original)
            )

    def is_any_waiting(self) -> bool:
        """Whether a profiler is prepared and not started yet."""
        if not self._is_complete:
            return _is_another_prepared()
        return any(map(_is_waiting, list(self._profilers)))

    def close(self) -> None:
        """Leaves torch as it was."""
        self._patches.close()

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare(profiler: Any, *args: Any, **kwargs: Any) -> Any:
            self._profilers.add(profiler)
            return original(profiler, *args, **kwargs)

        return prepare


def _is_another_prepared() -> bool:
    """Whether the user has prepared a profiler that is not started yet.

    torch does not report that state, and crashes if that profiler is started after ours. The check
    searches all objects, once per recording and before the recorded steps.
    """
    return any(map(_is_waiting, _list_profilers()))


def _list_profilers() -> list[Any]:
    referrers = gc.get_referrers(torch.profiler.profile)
    profilers = (each.profiler for each in referrers if isinstance(each, torch.profiler.profile))
    return [each for each in profilers if each is not None]


def _is_waiting(profiler: Any) -> bool:
    return bool(profiler.entered and profiler.kineto_results is None)


def _list_activities() -> list[Any]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return activities


_TEARDOWN = "TEARDOWN_CUPTI"

_has_captured = False


def can_detach() -> bool:
    """Whether a profiler that has ended leaves the later steps as fast as before.

    On CUDA, CUPTI stays attached unless Kineto is asked to detach it: see build_kineto_environment.
    From a process that has captured a CUDA graph it is not detached: see notice_captures.
    """
    is_asked = os.environ.get(_TEARDOWN) == "1" and not _has_captured
    return is_asked or not torch.cuda.is_available()


@functools.cache
def notice_captures() -> None:
    """From now on it is known whether this process captures a CUDA graph, not whether it has.

    Detaching CUPTI beside graphs crashes before CUDA 12.6 (pytorch/pytorch#112507). On CUDA 13.0
    one of three trainings with a graph ended with an error two steps after its eighth sample; the
    two others detached 39 times without one.
    """
    original = torch.cuda.CUDAGraph.capture_begin

    @functools.wraps(original)
    def capture_begin(*args: Any, **kwargs: Any) -> None:
        global _has_captured
        _has_captured = True
        original(*args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = capture_begin


def _stay_attached_beside_graphs() -> None:
    """Before a profiler stops; at its start Kineto needs the variable to attach itself again."""
    if _has_captured and os.environ.get(_TEARDOWN) == "1":
        os.environ[_TEARDOWN] = "0"
