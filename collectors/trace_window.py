"""The profiler's window of steps: warm-up, start, end, and annotations inside."""

from __future__ import annotations

import functools
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, ClassVar

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, record_function

from stepsplit.collectors.record import RecordPlan

# torch.profiler over some steps: when it warms up, starts and ends, and who else may have it.

_STARTERS = ("_prepare_profiler", "_enable_profiler")
"""What every profiler of torch calls before it runs, in torch.autograd.profiler."""


class TraceWindow:
    """The profiler of one recording.

    torch has one a process. Where another one runs already, to warm up raises RuntimeError; when
    another starts meanwhile, `give_way` is called first and this one ends.
    """

    _open: ClassVar[TraceWindow | None] = None
    """The one that has torch's profiler."""

    def __init__(self, plan: RecordPlan, first: int, give_way: Callable[[], None]) -> None:
        self._plan, self._first, self._give_way = plan, first, give_way
        self._profiler: Any = None
        self._mark: Any = None
        self._patches = ExitStack()
        self._ours = self._started = False
        self.recorded = 0
        """Steps that were recorded to their end."""

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
        self._patches.enter_context(annotate_layers())
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


# Names in the trace for what torch leaves unnamed: microbatches of a stage, and messages.
#
# A trace then holds, on the thread that calls: stepsplit::F stage=1 mb=0      forward of a
# microbatch (B backward, W the weights' part of it) stepsplit::send group=3 src=0 dst=2 tag=0 n=7
# bytes=65536 dtype=float32      (recv alike) group is the name of the process group in the job,
# src and dst are global ranks, and n counts the messages of that (group, src, dst, tag) since the
# annotations began: the n-th send meets the n-th receive. The range is the posting; the wait
# comes after it.

_PHASES = {
    "forward_one_chunk": ("F", "fwd_chunk_id"),
    "backward_one_chunk": ("B", "bwd_chunk_id"),
    "backward_weight_one_chunk": ("W", "bwd_chunk_id"),
}

_active = False


@contextmanager
def annotate_layers() -> Iterator[None]:
    """While it lasts, pipeline stages and messages name themselves. Nested use changes nothing."""
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
            _replace(undo, _PipelineStageBase, method, _chunk(original, letter, parameter))


def _chunk(original: Callable[..., Any], letter: str, parameter: str) -> Callable[..., Any]:
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
    channels = _Channels()
    _replace(undo, group_type, "send", _message(group_type.send, "send", channels))
    _replace(undo, group_type, "recv", _message(group_type.recv, "recv", channels))


class _Channels:
    """Who is at the ends of a message, and how many went the same way before."""

    def __init__(self) -> None:
        self._numbers: defaultdict[tuple[object, ...], Iterator[int]] = defaultdict(count)
        self._ranks: dict[Any, list[int]] = {}

    def label(self, op: str, group: Any, tensors: Sequence[Any], peer: int, tag: int) -> str | None:
        """The name of the message; None for a group that torch does not know by rank."""
        try:
            ranks = self._ranks_of(group)
            here, there = ranks[group.rank()], ranks[peer]
            src, dst = (here, there) if op == "send" else (there, here)
            channel = f"group={group.group_name} src={src} dst={dst} tag={tag}"
            payload = _payload(tensors)
        except (AttributeError, LookupError, RuntimeError, TypeError):
            return None
        return f"stepsplit::{op} {channel} n={next(self._numbers[op, channel])} {payload}"

    def _ranks_of(self, group: Any) -> list[int]:
        if group not in self._ranks:
            self._ranks[group] = torch.distributed.get_process_group_ranks(group)
        return self._ranks[group]


def _message(original: Callable[..., Any], op: str, channels: _Channels) -> Callable[..., Any]:
    @functools.wraps(original, assigned=("__name__", "__doc__"))
    def annotated(group: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiler that traces through here must see torch's own call alone.
        if kwargs or len(args) != 3 or torch.compiler.is_compiling():
            return original(group, *args, **kwargs)
        label = channels.label(op, group, *args)
        if label is None:
            return original(group, *args)
        with record_function(label):
            return original(group, *args)

    return annotated


def _payload(tensors: Sequence[Any]) -> str:
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return f"bytes={size} dtype={str(tensors[0].dtype).removeprefix('torch.')}"


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    # The entry of the class itself: pybind's methods, read through the class, no longer bind.
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)
