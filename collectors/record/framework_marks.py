"""Ranges in the trace where an RL framework measures what it does by a timer of its own."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from stepsplit.collectors.formats.rl_marks import FRAMEWORKS, MarkSource
from stepsplit.collectors.record.annotations import replace_attribute

# The name is the framework's, and a mark may be made from a user's text.
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

    @functools.wraps(original)
    def mark_block(*args: Any, **kwargs: Any) -> Any:
        block = original(*args, **kwargs)
        is_context = {"__enter__", "__exit__"} <= {*dir(type(block))}
        return _MarkedBlock(block, find_name(args, kwargs)) if is_context else block

    return mark_block


class _MarkedBlock(ContextDecorator):
    """A context manager with a range around its block, which the script may use in all other ways,
    such as a decorator, as the one that it has made."""

    def __init__(self, block: Any, name: Any) -> None:
        self._block = block
        self._name = name
        # It may be entered again within itself.
        self._opened: list[ExitStack] = []

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            _enter(stack, self._name)
            result = stack.enter_context(self._block)
            self._opened.append(stack.pop_all())
        return result

    def __exit__(self, *error: Any) -> Any:
        return self._opened.pop().__exit__(*error)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What is no decorator of contextlib does something of its own, which has no range.
        block = self._block
        is_plain = isinstance(block, ContextDecorator)
        if is_plain and type(block).__call__ is ContextDecorator.__call__:
            return super().__call__(*args, **kwargs)
        return block(*args, **kwargs)

    def _recreate_cm(self) -> _MarkedBlock:
        # For each call of the function that it decorates: a generator runs only once.
        return _MarkedBlock(self._block._recreate_cm(), self._name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_block":
            # While it is copied.
            raise AttributeError(attribute)
        return getattr(self._block, attribute)


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
