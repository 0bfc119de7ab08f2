"""Where the training thread is in the user's code during the recorded steps, and how long Python's
garbage collections take."""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from stepsplit.collectors.formats.rank_record import CodeFrame, GcPause, HostSamples
from stepsplit.collectors.guard import warn_on_failure

INTERVAL_S = 0.01
"""Time from one look at the stack to the next, at the beginning of a recording."""

MAX_SHARE = 0.002
"""Looks become rarer if they need more than this share of a core.

A training thread that holds the GIL loses about twice that: it must hand the GIL over and back.
"""

MAX_LOOKS = 4096
"""When so many are kept, every second one is dropped, and looks are half as frequent from then."""

_MAX_PLACES = 1024

LOST_PLACES = "the places in the code where its host spends time"

MIN_PAUSE_NS, _MAX_PAUSES = 200_000, 1024
"""Shorter garbage collections are not kept; the youngest generation's take about 10 us."""


class HostSampler:
    """Looks at the stack of the thread that made it, from start() to stop().

    A look holds the GIL for some 10 us, and adds nothing to the trace. Calling sys.setprofile or a
    signal handler instead would slow down or interrupt the training's own code.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._thread = rank, threading.get_ident()
        self._running = threading.Lock()
        self._looks: list[tuple[int, int]] = []
        self._places: dict[_Place, int] = {}
        self._pauses: list[GcPause] = []
        self._pause_began_ns = 0
        self._interval_s = INTERVAL_S
        find_place(sys._getframe())  # the first look is slow, and no recorded step waits for it

    def start(self) -> None:
        """Begins to look, from a thread of its own; without effect if it has begun."""
        if not self._running.acquire(blocking=False):
            return
        gc.callbacks.append(self._note_collection)
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return  # without the GIL a frame may end while it is looked at
        threading.Thread(
            target=self._look_until_stopped, name="stepsplit-host", daemon=True
        ).start()

    def stop(self) -> HostSamples:
        """Ends and returns what was seen."""
        with suppress(ValueError):
            gc.callbacks.remove(self._note_collection)
        if self._running.locked():
            self._running.release()
        # First the looks: each has its place before it is kept.
        looks = tuple(self._looks)
        return HostSamples(
            places=tuple(
                tuple(
                    CodeFrame(
                        # Without the functions around a nested one.
                        getattr(code, "co_qualname", code.co_name).rsplit("<locals>.", 1)[-1],
                        shorten_file(code.co_filename),
                        line,
                    )
                    for code, line in place
                )
                for place in tuple(self._places)
            ),
            at_unix_ns=tuple(at_ns for at_ns, _ in looks),
            place=tuple(place for _, place in looks),
            gc_pauses=tuple(self._pauses),
        )

    def _look_until_stopped(self) -> None:
        with warn_on_failure(self._rank, LOST_PLACES):
            wait_s = self._interval_s
            while not self._running.acquire(timeout=wait_s):
                began_ns = time.thread_time_ns()
                self._look()
                cost_s = (time.thread_time_ns() - began_ns) / 1e9
                wait_s = max(self._interval_s, cost_s / MAX_SHARE)

    def _look(self) -> None:
        # A frame keeps the tensors of its function alive, so none may outlive this call.
        place = find_place(sys._current_frames().get(self._thread))
        at_ns = time.time_ns()
        # A job that makes code as it runs has a new place at each look: those beyond the limit are
        # not kept.
        if place is None or (place not in self._places and len(self._places) >= _MAX_PLACES):
            return
        self._looks.append((at_ns, self._places.setdefault(place, len(self._places))))
        if len(self._looks) >= MAX_LOOKS:
            self._looks = self._looks[::2]
            self._interval_s *= 2

    def _note_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Called by the interpreter at the begin and at the end of a garbage collection."""
        now_ns = time.time_ns()
        if phase == "start":
            self._pause_began_ns = now_ns
            return
        took_ns = now_ns - self._pause_began_ns
        if self._pause_began_ns and took_ns >= MIN_PAUSE_NS and len(self._pauses) < _MAX_PAUSES:
            self._pauses.append(GcPause(self._pause_began_ns, took_ns, info["generation"]))


# The place in the code that a stack stands for.

_Place = tuple[tuple[CodeType, int], ...]
"""Code and line of one or two frames, see find_place."""

_SKIPPED, _LIBRARY, _USER = range(3)

_SITE_FOLDERS = ("site-packages", "dist-packages")

_kinds: dict[str, int] = {}


def find_place(frame: FrameType | None) -> _Place | None:
    """The innermost frame outside of the standard library and torch.

    If it is in another installed package, the innermost frame of the user's code follows. None if
    there is no such frame.
    """
    inner: tuple[CodeType, int] | None = None
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code.co_filename)
        if kind is None:
            file, paths = code.co_filename, sysconfig.get_paths()
            if file.startswith("<") or file.startswith(_list_skipped_folders()):
                kind = _SKIPPED
            elif any(name in Path(file).parts for name in _SITE_FOLDERS):
                # Before the standard library, whose folder has these folders in it.
                kind = _LIBRARY
            else:
                is_standard = file.startswith((paths["stdlib"], paths["platstdlib"]))
                kind = _SKIPPED if is_standard else _USER
            _kinds[file] = kind
        if kind == _USER:
            here = code, frame.f_lineno or code.co_firstlineno
            return (here,) if inner is None else (inner, here)
        if kind == _LIBRARY and inner is None:
            inner = code, frame.f_lineno or code.co_firstlineno
        frame = frame.f_back
    return None if inner is None else (inner,)


@functools.cache
def _list_skipped_folders() -> tuple[str, ...]:
    """The folders of torch and of the collectors, each with a separator at its end."""
    own = Path(__file__).parents[1]
    return tuple(f"{Path(folder)}{os.sep}" for folder in (*torch.__path__, own, own.resolve()))


def shorten_file(file: str) -> str:
    """The file relative to the folder of its package, of the job or of its script; else as it
    is."""
    parts = Path(file).parts
    for name in _SITE_FOLDERS:
        if name in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(name) :])
    for folder in (Path.cwd(), sys.path[0]):
        with suppress(ValueError):
            return Path(file).relative_to(folder).as_posix()
    return file
