"""Runs a callback as soon as another module has been imported."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Calls `then` once after the module was imported; at once if it already is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder, first in sys.meta_path until the module is imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        # First, so that the search below does not find this finder again.
        sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                _call_after_exec(spec.loader, self._then)
                return spec  # type: ignore[no-any-return]
        return None


def _call_after_exec(loader: object, then: Callable[[], None]) -> None:
    """Makes the loader call `then` after it has executed the module."""
    run = getattr(loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: ModuleType) -> None:
        run(module)
        then()

    loader.exec_module = exec_module  # type: ignore[attr-defined]
