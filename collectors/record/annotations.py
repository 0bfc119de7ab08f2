"""Annotations that torch lacks: microbatches of a stage, and point-to-point messages.

The trace then has these ranges on the calling thread:
  stepsplit::F stage=1 mb=0
      forward of a microbatch (B: backward, W: weight gradients of the backward)
  stepsplit::send group=3 src=0 dst=2 tag=0 n=7 bytes=65536 dtype=float32
      a message (recv likewise)
group is the name of the process group, src and dst are global ranks, and n counts the messages of
that (group, src, dst, tag) since the annotations began: the n-th send matches the n-th receive.
The range covers the posting of the message; the wait follows it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch.profiler import record_function

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
            replace_attribute(
                undo, _PipelineStageBase, method, _annotate_chunk(original, letter, parameter)
            )


def _annotate_chunk(
    original: Callable[..., Any], letter: str, parameter: str
) -> Callable[..., Any]:
    @functools.wraps(original)
    def annotated(stage: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = args[0] if args else kwargs.get(parameter)
        # A torch that names the argument otherwise: the stage runs without the range.
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
    for op in ("send", "recv"):
        annotated = _annotate_message(getattr(group_type, op), op, channels)
        replace_attribute(undo, group_type, op, annotated)


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
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            payload = f"bytes={size} dtype={dtype}"
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


def replace_attribute(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    # Keep the class's own dict entry: a pybind method read through the class no longer binds.
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)
