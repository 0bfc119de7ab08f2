"""The work of a rank before it waits for the gradients of others."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from stepsplit.collectors.guard import warn_lost
from stepsplit.collectors.probes.optimizers import (
    Listener,
    add_listener,
    ignore_step,
    remove_listener,
)


class LocalTimes:
    """Measures the local time of a step: from its begin to the last gradient of this rank.

    The gradient of the parameter that the optimizer has first is the last one to be ready. What a
    rank waits for afterwards, the reduction of gradients, is not in it; what it waits for before,
    tensor-parallel or pipeline neighbors, is. Sharded parameters (DTensor: FSDP2 copies their
    gradients to the host without overlap once they have a hook), DeepSpeed and optimizers that step
    within the backward pass have no such time.

    On a GPU, the times are those of events on its streams, which are never waited for: a step's
    time is known some steps later.
    """

    def __init__(self) -> None:
        self._listener = Listener(self._hook_first_parameter, ignore_step)
        self._handle: Any = None
        self._clock: _HostClock | _DeviceClock = _HostClock()
        add_listener(self._listener)

    def begin_step(self) -> int:
        """Begins a step; returns the local time in ns of the newest one that is known since the
        last call, or 0."""
        return self._clock.begin_step()

    def close(self) -> None:
        """Removes the hooks."""
        remove_listener(self._listener)
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _hook_first_parameter(self, optimizer: Any) -> None:
        # Once is enough, and each call of a step costs it.
        remove_listener(self._listener)
        # A DTensor's gradient is not this rank's alone: see the class.
        weights = (each for group in optimizer.param_groups for each in group["params"])
        local = (
            one
            for one in weights
            if one.requires_grad and one.is_leaf and not hasattr(one, "device_mesh")
        )
        weight = next(local, None)
        if weight is None:
            return
        if weight.is_cuda:
            self._clock = _DeviceClock()
        self._handle = weight.register_post_accumulate_grad_hook(self._note_gradient)

    def _note_gradient(self, weight: Any) -> None:
        try:
            self._clock.note_gradient()
        except Exception as error:  # noqa: BLE001 - nothing may reach the backward pass
            self._clock = _HostClock()
            self.close()
            warn_lost(0, f"the local times of its steps: {error!r}")


class _HostClock:
    """Times on the host."""

    def __init__(self) -> None:
        self._begin_ns = self._last_ns = 0

    def begin_step(self) -> int:
        begin, self._begin_ns = self._begin_ns, time.perf_counter_ns()
        return self._last_ns - begin if begin and self._last_ns > begin else 0

    def note_gradient(self) -> None:
        self._last_ns = time.perf_counter_ns()


_MOST_PENDING = 64
"""Steps whose events a GPU has not reached; a step beyond has no local time."""


class _DeviceClock:
    """Times on a GPU, by events on the streams of the training and of the backward pass."""

    def __init__(self) -> None:
        self._begin: Any = None
        self._last: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()

    def begin_step(self) -> int:
        if self._begin is not None and self._last is not None:
            self._pending.append((self._begin, self._last))
        newest_ns = 0
        # The newest that the GPU has reached; of a batch of steps the older ones are passed over.
        while self._pending and self._pending[0][1].query():
            begin, last = self._pending.popleft()
            newest_ns = round(begin.elapsed_time(last) * 1e6)
        self._last = None
        self._begin = self._record() if len(self._pending) < _MOST_PENDING else None
        return newest_ns

    def note_gradient(self) -> None:
        if self._begin is not None:
            self._last = self._record()

    def _record(self) -> Any:
        """An event on the current stream; None within the capture of a graph."""
        import torch

        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
