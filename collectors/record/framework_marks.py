"""Ranges in the trace where an RL framework measures what it does by a timer of its own."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from stepsplit.collectors.formats.rl_marks import FRAMEWORKS, MarkSource
from stepsplit.collectors.record.annotations import replace_attribute

_LONGEST_NAME = 200


@contextmanager
def annotate_framework_marks() -> Iterator[None]:
    """Has the timers of the frameworks that the script has imported make ranges, in the block."""
    with ExitStack() as undo:
        for source in (one for framework in FRAMEWORKS for one in framework.sources):
            # An import would start a framework that the script does not use.
            module = sys.modules.get(source.module)
            owner = getattr(module, source.owner, None) if source.owner else module
            if owner is None:
                continue
            if source.method:
                original = vars(owner).get(source.method)
                if callable(original):
                    replace_attribute(undo, owner, source.method, _mark_calls(original, source))
            elif {"__enter__", "__exit__"} <= vars(owner).keys():
                _mark_blocks(undo, owner, source.name)
        yield


def _mark_calls(original: Callable[..., Any], source: MarkSource) -> Callable[..., Any]:
    """The function with a range around the block of the context manager that it makes."""
    place = 1 if source.owner else 0

    def find_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[place] if len(args) > place else kwargs.get("name")

    if inspect.isgeneratorfunction(original):

        @functools.wraps(original)
        def mark_generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with ExitStack() as stack:
                _enter(stack, find_name(args, kwargs))
                yield from original(*args, **kwargs)

        return mark_generator

    @contextmanager
    def run_marked(inner: AbstractContextManager[Any], name: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            _enter(stack, name)
            yield stack.enter_context(inner)

    @functools.wraps(original)
    def mark_block(*args: Any, **kwargs: Any) -> Any:
        return run_marked(original(*args, **kwargs), find_name(args, kwargs))

    return mark_block


def _mark_blocks(undo: ExitStack, owner: Any, name: str) -> None:
    """Has the context manager make a range, from its entry to its exit."""
    enter, leave = vars(owner)["__enter__"], vars(owner)["__exit__"]
    # An object may be entered again within itself.
    opened: dict[int, list[ExitStack]] = {}

    @functools.wraps(enter)
    def mark_entry(block: Any) -> Any:
        result = enter(block)
        stack = ExitStack()
        _enter(stack, getattr(block, name, None))
        opened.setdefault(id(block), []).append(stack)
        return result

    @functools.wraps(leave)
    def mark_exit(block: Any, *error: Any) -> Any:
        # A block that was entered before the recording has no range.
        stacks = opened.get(id(block))
        if stacks:
            stacks.pop().close()
            if not stacks:
                del opened[id(block)]
        return leave(block, *error)

    replace_attribute(undo, owner, "__enter__", mark_entry)
    replace_attribute(undo, owner, "__exit__", mark_exit)


def _enter(stack: ExitStack, name: Any) -> None:
    """Opens the range; none without a name, and in code that torch.compile compiles."""
    if isinstance(name, str) and name and not torch.compiler.is_compiling():
        stack.enter_context(record_function(name[:_LONGEST_NAME]))
