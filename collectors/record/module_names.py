"""Annotations with the names of the model's modules, in one step of a recording."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

MODULE_MARK = "stepsplit::module "
"""Prefix of a module's range on the thread that calls it, before its path in the model."""

ROOT = "."
"""The path of the outermost module."""


@contextmanager
def name_modules() -> Iterator[None]:
    """Annotates each call of a module within the block with its path, such as layers.3.attention.

    The hooks are torch's global ones: no module is changed. A module's path is that below the
    outermost module that calls it. Modules inside compiled code are not called.
    """
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )

    marks = _ModuleMarks()
    before = register_module_forward_pre_hook(marks.enter)
    # Called after an exception too, so that no range stays open.
    after = register_module_forward_hook(marks.leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def has_compiled_code() -> bool:
    """Whether torch.compile has run: it compiles again when global hooks come and go."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return bool(counters and counters["frames"]["total"])


class _ModuleMarks(threading.local):
    """The open ranges of each thread: checkpointing calls modules on autograd's threads."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []
        self._paths: dict[int, str] = {}

    def enter(self, module: Any, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if id(module) not in self._paths:
            for path, inner in module.named_modules():
                self._paths.setdefault(id(inner), path or ROOT)
        mark = record_function(f"{MODULE_MARK}{self._paths[id(module)]}")
        mark.__enter__()
        self._open.append((module, mark))

    def leave(self, module: Any, _inputs: Any, _output: Any) -> None:
        while self._open:
            called, mark = self._open.pop()
            mark.__exit__(None, None, None)
            if called is module:
                return
