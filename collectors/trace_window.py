"""The profiler's window of steps: warmup, start, end, and the annotations in the trace."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, record_function

from stepsplit.collectors.rank_files import shorten_trace_name
from stepsplit.collectors.record import RecordPlan

# torch.profiler over some steps, and what happens if another profiler is in use.

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
        self._activities = _list_activities()
        self._ours = self._warm = self._started = False
        self.recorded = 0
        """Number of completely recorded steps."""

    def begin_step(self, step: int, number: int) -> None:
        """Call before each step: warms up, starts, and marks the step in the trace.

        number: the step as the trace names it, which counts the steps before a resumption too.
        """
        if self._profiler is None and step >= self._first - self._plan.warmup:
            self._warm_up()
        if self._profiler is not None and step >= self._first:
            if not self._started:
                self._start()
            self._mark = record_function(f"ProfilerStep#{number}")
            self._mark.__enter__()

    def end_step(self, step: int) -> None:
        """Call after each step."""
        mark, self._mark = self._mark, None
        if mark is not None:
            mark.__exit__(None, None, None)
            self.recorded += 1

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
        self._patches.callback(_release_window)
        self._profiler = torch.profiler.profile(
            activities=self._activities,
            record_shapes=self._plan.shapes,
            profile_memory=self._plan.memory,
            with_stack=self._plan.stacks,
            experimental_config=_choose_config(self._plan),
        )
        self._patches.enter_context(annotate_layers())
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


def _release_window() -> None:
    TraceWindow._open = None


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
            _replace(
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


# The script's own profiler instead of ours (--share): its trace becomes the recording too.


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
        _replace(self._patches, autograd_profiler.profile, "__exit__", self._wrap_exit())

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
            if is_other or any(args[1:]) or options.get("use_python_export"):
                return original(target, *args, **options)
            os.lseek(written, 0, os.SEEK_SET)
            with open(written, "rb", closefd=False) as trace, Path(target).open("wb") as copy:
                shutil.copyfileobj(trace, copy)
            shorten_trace_name(Path(target), str(target))

        self._profiler.export_chrome_trace = export


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
    """From now on it is known whether this process has captured a CUDA graph.

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


# Annotations that torch lacks: microbatches of a stage, and point-to-point messages.
#
# The trace then has these ranges on the calling thread:
#   stepsplit::F stage=1 mb=0
#       forward of a microbatch (B: backward, W: weight gradients of the backward)
#   stepsplit::send group=3 src=0 dst=2 tag=0 n=7 bytes=65536 dtype=float32
#       a message (recv likewise)
# group is the name of the process group, src and dst are global ranks, and n counts the messages of
# that (group, src, dst, tag) since the annotations began: the n-th send matches the n-th receive.
# The range covers the posting of the message; the wait follows it.

_PHASES = {
    "forward_one_chunk": ("F", "fwd_chunk_id"),
    "backward_one_chunk": ("B", "bwd_chunk_id"),
    "backward_weight_one_chunk": ("W", "bwd_chunk_id"),
}

_active = False


@contextmanager
def annotate_layers() -> Iterator[None]:
    """Annotates pipeline stages and messages within the block; nested use has no effect."""
    global _active
    if _active:
        yield
        return
    with ExitStack() as undo:
        _annotate_stages(undo)
        _annotate_messages(undo)
        _active = True
        try:
            yield
        finally:
            _active = False


def _annotate_stages(undo: ExitStack) -> None:
    try:
        from torch.distributed.pipelining.stage import _PipelineStageBase
    except ImportError:
        return
    for method, (letter, parameter) in _PHASES.items():
        original = vars(_PipelineStageBase).get(method)
        if original is not None:
            _replace(undo, _PipelineStageBase, method, _annotate_chunk(original, letter, parameter))


def _annotate_chunk(
    original: Callable[..., Any], letter: str, parameter: str
) -> Callable[..., Any]:
    @functools.wraps(original)
    def annotated(stage: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = args[0] if args else kwargs.get(parameter)
        if chunk is None:
            return original(stage, *args, **kwargs)
        with record_function(f"stepsplit::{letter} stage={stage.stage_index} mb={chunk}"):
            return original(stage, *args, **kwargs)

    return annotated


def _annotate_messages(undo: ExitStack) -> None:
    group_type = getattr(torch.distributed, "ProcessGroup", None)
    if group_type is None:
        return
    channels = _MessageLabels()
    _replace(undo, group_type, "send", _annotate_message(group_type.send, "send", channels))
    _replace(undo, group_type, "recv", _annotate_message(group_type.recv, "recv", channels))


class _MessageLabels:
    """Builds the label of a message: its two ranks and its number on that channel."""

    def __init__(self) -> None:
        self._numbers: defaultdict[tuple[object, ...], Iterator[int]] = defaultdict(count)
        self._ranks: dict[Any, list[int]] = {}

    def build_label(
        self, op: str, group: Any, tensors: Sequence[Any], peer: int, tag: int
    ) -> str | None:
        """The label of the message; None if torch has no ranks for the group."""
        try:
            ranks = self._find_ranks(group)
            here, there = ranks[group.rank()], ranks[peer]
            src, dst = (here, there) if op == "send" else (there, here)
            channel = f"group={group.group_name} src={src} dst={dst} tag={tag}"
            payload = _format_payload(tensors)
        except (AttributeError, LookupError, RuntimeError, TypeError):
            return None
        return f"stepsplit::{op} {channel} n={next(self._numbers[op, channel])} {payload}"

    def _find_ranks(self, group: Any) -> list[int]:
        if group not in self._ranks:
            self._ranks[group] = torch.distributed.get_process_group_ranks(group)
        return self._ranks[group]


def _annotate_message(
    original: Callable[..., Any], op: str, channels: _MessageLabels
) -> Callable[..., Any]:
    @functools.wraps(original, assigned=("__name__", "__doc__"))
    def annotated(group: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile must trace only torch's own call.
        if kwargs or len(args) != 3 or torch.compiler.is_compiling():
            return original(group, *args, **kwargs)
        label = channels.build_label(op, group, *args)
        if label is None:
            return original(group, *args)
        with record_function(label):
            return original(group, *args)

    return annotated


def _format_payload(tensors: Sequence[Any]) -> str:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return f"bytes={size} dtype={str(tensors[0].dtype).removeprefix('torch.')}"


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    # Keep the class's own dict entry: a pybind method read through the class no longer binds.
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)
