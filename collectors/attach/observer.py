"""Looks at this process from the agent's thread: Python stack, number of calls, exception."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType

from stepsplit.collectors.formats.rank_record import CodeFrame
from stepsplit.collectors.formats.rank_state import ENDED, RAISED, RUNNING, Look, RankState
from stepsplit.collectors.formats.run_spec import GroupInfo
from stepsplit.collectors.job.launcher import read_identity, read_job_name

# The innermost ones, of stacks that recursion or a framework may make very deep.
MAX_FRAMES = 64

# The text of an exception may be a whole tensor.
_MAX_ERROR = 500


class SelfObserver:
    """Describes this process; it only reads, and never waits for another thread or rank."""

    def __init__(self) -> None:
        self._joined_s = time.monotonic()
        self._last_step_s: float | None = None
        self._place = (0, 1)

    def note_join(self) -> None:
        """Notes that this process is a rank from now on."""
        self._joined_s = time.monotonic()

    def note_step_end(self) -> None:
        """Notes the time at which a step has ended."""
        self._last_step_s = time.monotonic()

    def measure_since_step_ns(self) -> int:
        """The time since the last step ended, or since this process joined the job."""
        since = self._joined_s if self._last_step_s is None else self._last_step_s
        return int((time.monotonic() - since) * 1e9)

    def describe(self, steps: int, step_times_ns: Sequence[int]) -> RankState:
        """The state of this process, with one look."""
        self._place = _read_place()
        error, error_stack = _read_exception()
        look = Look(
            at_unix_ns=time.time_ns(),
            steps=steps,
            since_step_ns=self.measure_since_step_ns(),
            calls=_count_calls(),
            stack=read_main_stack(),
            busy_ns=_read_main_busy_ns(),
            io_bytes=_read_io_bytes(),
        )
        return replace(
            self._build_state(RAISED if error else RUNNING),
            step_ns=max(step_times_ns, default=0),
            looks=(look,),
            groups=_list_groups(),
            error=error,
            error_stack=error_stack,
        )

    def describe_loss(self) -> RankState:
        """What is to be read of this process if it ends without a chance to say so."""
        self._place = _read_place()
        return self._build_state(ENDED)

    def describe_end(self, steps: int) -> RankState:
        """The state of this process at its end, when its process groups may be gone."""
        error, error_stack = _read_exception()
        return replace(
            self._build_state(ENDED),
            looks=(Look(time.time_ns(), steps, self.measure_since_step_ns(), 0, ()),),
            error=error,
            error_stack=error_stack,
        )

    def _build_state(self, condition: str) -> RankState:
        """The state of this process without looks, at the place that was read last."""
        rank, world_size = self._place
        return RankState(
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=read_job_name(),
            condition=condition,
        )


def read_main_stack() -> tuple[CodeFrame, ...]:
    """The stack of the main thread, innermost frame first."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[CodeFrame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        frames.append(CodeFrame(code.co_name, code.co_filename, frame.f_lineno or 0))
        frame = frame.f_back
    return tuple(frames)


def _read_main_busy_ns() -> int:
    """Time in which the main thread has run or, on a crowded machine, has waited for a CPU."""
    with suppress(OSError, ValueError):
        # The main thread has the number of the process.
        fields = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
        return int(fields[0]) + int(fields[1])
    with suppress(OSError, AttributeError):
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        return time.clock_gettime_ns(clock)
    return 0


def _read_io_bytes() -> int:
    """What this process has read and written; 0 if the system does not count it."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def _read_exception() -> tuple[str, tuple[CodeFrame, ...]]:
    """The exception that ended the main thread; "" if none has."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        return "", ()
    lines = traceback.format_exception_only(type(error), error)
    text = lines[-1].strip()[:_MAX_ERROR] if lines else type(error).__name__
    return text, _list_frames(error.__traceback__)


def _list_frames(trace: TracebackType | None) -> tuple[CodeFrame, ...]:
    frames = traceback.extract_tb(trace)[-MAX_FRAMES:]
    return tuple(CodeFrame(one.name, one.filename, one.lineno or 0) for one in reversed(frames))


def _has_process_group() -> bool:
    """Whether torch.distributed is imported and initialized; imports nothing."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and bool(module.is_initialized())


def _read_place() -> tuple[int, int]:
    place = read_identity()
    if not _has_process_group():
        return place.rank, place.world_size
    from stepsplit.collectors.job import process_groups

    rank, world_size, _ = process_groups.read_job()
    return rank, world_size


def _list_groups() -> tuple[GroupInfo, ...]:
    if not _has_process_group():
        return ()
    from stepsplit.collectors.job import process_groups

    return process_groups.list_groups()


def _count_calls() -> int:
    """The collectives that this rank has called in all groups, by their sequence numbers."""
    if not _has_process_group():
        return 0
    from stepsplit.collectors.job import process_groups

    return process_groups.count_calls()
