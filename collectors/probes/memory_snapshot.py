"""The history of CUDA's allocator and its snapshot."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.safe_io.atomic_file import whole_file

LOST_SNAPSHOT = "its memory snapshot"

MAX_HISTORY_ENTRIES = 50_000
"""Allocations and frees kept: the training waits while the snapshot makes objects of them."""

_SWITCHES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
"""Functions of torch._C through which every call of torch switches the history."""


class AllocationHistory:
    """The allocator's history since this object was made, with the Python stacks of allocations.

    C++ stacks are left out: torch would symbolize them in the snapshot, which took 461 s instead of
    4 s on a rank of an 8-GPU job (pytorch/torchtitan#3628), near the time-out of a collective.

    Raises RuntimeError if the training records its own history, which must go on unchanged, or if
    the allocator has none (cudaMallocAsync and pluggable ones).
    """

    def __init__(self) -> None:
        self._ours, self._patches = True, ExitStack()
        if torch._C._cuda_isHistoryEnabled():
            raise RuntimeError("the training records a memory history of its own")
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_HISTORY_ENTRIES
        )
        for name in _SWITCHES:
            self._watch_switch(name)

    def end(self) -> Any:
        """Takes the snapshot and ends the history, unless the training has switched it since."""
        self._patches.close()
        if not self._ours:
            raise RuntimeError("the training has begun or ended a memory history of its own")
        try:
            return torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _watch_switch(self, name: str) -> None:
        original: Callable[..., Any] | None = getattr(torch._C, name, None)
        if original is None:
            return

        def switch(*args: Any, **kwargs: Any) -> Any:
            self._ours = False
            return original(*args, **kwargs)

        setattr(torch._C, name, switch)
        self._patches.callback(_restore_switch, name, switch, original)


def _restore_switch(name: str, switch: Callable[..., Any], original: Callable[..., Any]) -> None:
    if getattr(torch._C, name, None) is switch:
        setattr(torch._C, name, original)


def write_in_background(snapshot: Any, path: Path, rank: int) -> None:
    """Writes the snapshot from a thread: no training step waits for the disk."""

    def write() -> None:
        with warn_on_failure(rank, LOST_SNAPSHOT), whole_file(path) as file:
            pickle.dump(snapshot, file)

    threading.Thread(target=write, name="stepsplit-memory").start()
