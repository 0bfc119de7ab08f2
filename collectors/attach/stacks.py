"""The stack of a process that does not answer because a thread holds Python's lock.

Its agent writes a line about itself to a file from time to time, and faulthandler's thread, which
needs no lock, adds the stacks of all threads if the agent cannot do so again.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsplit.collectors.attach.sockets import build_socket_path, find_files
from stepsplit.collectors.formats.rank_record import CodeFrame
from stepsplit.collectors.formats.rank_state import Look
from stepsplit.collectors.guard import warn_on_failure
from stepsplit.collectors.job.launcher import read_identity
from stepsplit.collectors.safe_io.private_folder import open_private

STACK_SUFFIX = ".stack"


@dataclass(frozen=True, slots=True)
class WatchLine:
    """The line of an agent: its main thread, and its steps at that time."""

    main_thread: int
    at_unix_ns: int
    steps: int
    since_step_ns: int


def build_stack_path(pid: int) -> Path:
    """The file for the stacks of the process."""
    return build_socket_path(pid).with_suffix(STACK_SUFFIX)


def read_stack(pid: int) -> Look | None:
    """The state of the process when its stacks were written; None if they were not."""
    try:
        path = find_files(pid, STACK_SUFFIX)[0]
        with open(path, errors="replace", encoding="utf-8", opener=open_private) as file:
            first, _, dump = file.read().partition("\n")
        line = WatchLine(**json.loads(first))
    except (OSError, ValueError, TypeError, IndexError):
        return None
    stack = parse_stack(dump, line.main_thread)
    if not stack:
        return None
    now_ns = time.time_ns()
    # The line was written before the hang: the time since then adds to it.
    since_ns = line.since_step_ns + now_ns - line.at_unix_ns
    return Look(now_ns, line.steps, since_ns, calls=0, stack=stack)


_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\(most recent call first\):\n"
    r"((?:  File [^\n]*\n?)*)",
    re.MULTILINE,
)

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def parse_stack(dump: str, thread: int) -> tuple[CodeFrame, ...]:
    """The stack of a thread in the text of faulthandler, innermost frame first."""
    stacks = {int(number, 16): lines for number, lines in _THREAD.findall(dump)}
    frames = _FRAME.findall(stacks.get(thread, ""))
    return tuple(CodeFrame(function, file, int(line)) for file, line, function in frames)


# Stacks that can be read while a thread holds Python's lock.

WATCHDOG_S, _ARM_S = 8.0, 2.0
"""The lock held for longer than the first is taken for a hang; how often that is postponed."""


class StackWatchdog:
    """Has faulthandler write the stacks to a file if this class cannot run for a while.

    faulthandler has one such watchdog per process: once the script uses it, ours ends. A process
    that was frozen as a whole (a debugger, SIGSTOP) may write its stacks too, when it goes on. It
    rests while the process forks: at its end a child would wait for a thread that it does not have.
    """

    def __init__(self, describe: Callable[[], WatchLine]) -> None:
        self._describe = describe
        self._ended = threading.Event()
        self._arm = faulthandler.dump_traceback_later
        self._cancel = faulthandler.cancel_dump_traceback_later
        self._thread: threading.Thread | None = None
        self._file: Any = None
        self._arming = threading.Lock()

    def install(self) -> None:
        """Notices from now on if the script uses faulthandler's watchdog itself."""
        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            setattr(faulthandler, name, self._wrap(getattr(faulthandler, name)))
        os.register_at_fork(
            before=self._rest, after_in_parent=self._go_on, after_in_child=self._end_in_child
        )

    def start(self) -> None:
        """Watches from now on, from a thread of its own."""
        if not self._ended.is_set():
            name = "stepsplit-watchdog"
            self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the watch and removes its file."""
        is_ours = self._file is not None and not self._ended.is_set()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(1.0)
        if is_ours:
            self._cancel()
        with suppress(OSError):
            build_stack_path(os.getpid()).unlink(missing_ok=True)

    def _rest(self) -> None:
        self._arming.acquire()
        if self._file is not None and not self._ended.is_set():
            self._cancel()

    def _go_on(self) -> None:
        self._arm_unless_ended()
        self._arming.release()

    def _end_in_child(self) -> None:
        # The locks of the parent's threads stay locked. A child of a launcher may be a rank.
        has_ended = self._thread is not None or self._ended.is_set()
        self._ended, self._arming = threading.Event(), threading.Lock()
        if has_ended:
            self._ended.set()
        self._thread = None

    def _arm_unless_ended(self) -> None:
        if self._file is not None and not self._ended.is_set():
            self._arm(WATCHDOG_S, file=self._file)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def used_by_script(*args: Any, **kwargs: Any) -> Any:
            self._ended.set()
            return original(*args, **kwargs)

        return used_by_script

    def _watch(self) -> None:
        what = "its stacks while Python's lock is held"
        path = build_stack_path(os.getpid())
        rank = read_identity().rank
        with warn_on_failure(rank, what), open(path, "w+", opener=open_private) as self._file:
            while not self._ended.is_set():
                # Also without the stacks of an earlier hang that has passed.
                self._file.seek(0)
                self._file.truncate()
                self._file.write(json.dumps(asdict(self._describe())) + "\n")
                self._file.flush()
                with self._arming:
                    self._arm_unless_ended()
                self._ended.wait(_ARM_S)
