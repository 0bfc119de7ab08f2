"""Annotations with the names of the model's modules, in one step of a recording."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

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
    marks = _ModuleMarks()
    before = register_module_forward_pre_hook(marks.enter)
    # Called after an exception too, so that no range stays open.
    after = register_module_forward_hook(marks.leave, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


class ModulePaths:
    """The path of each module below the outermost one that was asked for."""

    def __init__(self) -> None:
        # Modules of one forward, such as replicas, leave their ids to others.
        self._paths: dict[int, tuple[weakref.ref[Any], str]] = {}
        self.search_ns = 0
        """What the searches took."""

    def find(self, module: Any) -> str:
        """The path of a module; it and those in it are searched the first time."""
        known = self._paths.get(id(module))
        if known is None or known[0]() is not module:
            begin = time.perf_counter_ns()
            for path, inner in module.named_modules():
                earlier = self._paths.get(id(inner))
                if earlier is None or earlier[0]() is not inner:
                    self._paths[id(inner)] = weakref.ref(inner), path or ROOT
            known = self._paths[id(module)]
            self.search_ns += time.perf_counter_ns() - begin
        return known[1]


class _ModuleMarks(threading.local):
    """The open ranges of each thread: checkpointing calls modules on autograd's threads."""

    def __init__(self) -> None:
        self._open: list[tuple[Any, Any]] = []
        self._paths = ModulePaths()
        # record_function is an operator: it takes four times as long, and dispatch modes of the
        # script, torch.jit.trace and make_fx would find it among those of the model.
        self._enter = torch.autograd._record_function_with_args_enter
        self._exit = torch.autograd._record_function_with_args_exit

    def enter(self, module: Any, _inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            mark = self._enter(f"{MODULE_MARK}{self._paths.find(module)}")
        except Exception:  # noqa: BLE001 - a script's own named_modules may fail
            return
        self._open.append((module, mark))

    def leave(self, module: Any, _inputs: Any, _output: Any) -> None:
        # The last one that is open, but where a call without a mark ends, or an interrupt has left
        # some open.
        if self._open and self._open[-1][0] is not module:
            if not any(called is module for called, _ in self._open):
                return
            while self._open[-1][0] is not module:
                self._exit(self._open.pop()[1])
        if self._open:
            self._exit(self._open.pop()[1])
