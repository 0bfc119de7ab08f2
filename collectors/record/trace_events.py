"""The events of a trace, one after the other: what a thin trace keeps, and the peak of activations.

Standard library only, and nothing of this package: pack.py runs this file by its path.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

# The content of a packed file, in pieces: plain or thin.

_COMMUNICATES = re.compile(
    r"^(c10d::|_c10d_functional::|_c10d_functional_autograd::|c10d_functional::"
    r"|record_param_comms|nccl:|gloo:|stepsplit::|symm_mem::)"
)
_WRAPS = re.compile(r"^(autograd::engine|torch::autograd::|PythonSubclass$|Optimizer\.)")
_DROPPED_CATEGORIES = {"python_function", "cpu_instant_event", "fwdbwd", "ac2g", "async_cpu_to_gpu"}
"""Categories that the time split does not use: stacks, memory events, flow arrows."""


class Thinning:
    """Which events stay, by their position in the file."""

    def __init__(self) -> None:
        self._begins, self._ends, self._dropped = array("Q"), array("Q"), bytearray()
        self._threads: defaultdict[tuple[Any, Any], _HostThread] = defaultdict(_HostThread)

    def add(self, event: dict[str, Any], begin: int, end: int) -> None:
        """The next event of the file, and its bytes there."""
        category = event.get("cat")
        # Only ops nest: a gloo range on this thread lasts until its wait returns.
        if category == "cpu_op" and event.get("ph") == "X":
            self._threads[event.get("pid"), event.get("tid")].add(event, len(self._begins))
        self._begins.append(begin)
        self._ends.append(end)
        self._dropped.append(category in _DROPPED_CATEGORIES)

    def list_kept_ranges(self) -> Iterator[tuple[int, int]]:
        """The bytes of the events that stay; neighbors are one range."""
        for thread in self._threads.values():
            for event in thread.find_removable():
                self._dropped[event] = True
        first = -1
        for event, dropped in enumerate(self._dropped):
            if dropped and first >= 0:
                yield self._begins[first], self._ends[event - 1]
            first = -1 if dropped else event if first < 0 else first
        if first >= 0:
            yield self._begins[first], self._ends[-1]


# Bits: an op may be both.
_WRAPPER, _COMMUNICATION = 1, 2


@dataclass(slots=True)
class _HostThread:
    """The ops of one thread in order of their start; the profiler writes them so."""

    events: array[int] = field(default_factory=lambda: array("I"))
    parents: array[int] = field(default_factory=lambda: array("i"))
    flags: bytearray = field(default_factory=bytearray)
    """_WRAPPER, and _COMMUNICATION if the op is or contains communication."""
    stack: list[tuple[int, int]] = field(default_factory=list)
    """The open ops: number on this thread and end in ns."""
    last_start_ns: int = -(1 << 63)
    ordered: bool = True

    def add(self, event: dict[str, Any], index: int) -> None:
        """The next op; index: its position among the events of the file."""
        start_ns = _read_ns(event["ts"])
        end_ns = start_ns + _read_ns(event.get("dur", 0))
        self.ordered &= start_ns >= self.last_start_ns
        self.last_start_ns = start_ns
        stack, name = self.stack, str(event["name"])
        while stack and stack[-1][1] < end_ns:
            stack.pop()
        self.parents.append(stack[-1][0] if stack else -1)
        stack.append((len(self.events), end_ns))
        self.events.append(index)
        wraps = _WRAPPER if _WRAPS.match(name) else 0
        self.flags.append(wraps | (_COMMUNICATION if _COMMUNICATES.match(name) else 0))

    def find_removable(self) -> Iterator[int]:
        """The ops nested in an op that has no communication and is not a wrapper.

        None if the ops were out of order: their nesting is not known.
        """
        if not self.ordered:
            return
        parents, flags = self.parents, self.flags
        # From the last one, so that each op is done before its parent.
        for op in range(len(flags) - 1, -1, -1):
            if flags[op] & _COMMUNICATION and parents[op] >= 0:
                flags[parents[op]] |= _COMMUNICATION
        removed = bytearray(len(flags))
        for op, parent in enumerate(parents):
            if parent >= 0 and (removed[parent] or not flags[parent]):
                removed[op] = True
                yield self.events[op]


def measure_activations(file: BinaryIO, device: str) -> int | None:
    """Peak activation memory of the recorded steps in bytes; None without memory events.

    device: "cpu", or "device" for an accelerator: the one with the largest peak. It is the peak
    above the memory allocated at both the begin and the end of a step: memory still allocated at
    the end is new gradients or optimizer state. Raises ValueError for an invalid trace.
    """
    steps: list[tuple[int, int]] = []
    changes: defaultdict[Any, tuple[array[int], array[int]]] = defaultdict(
        lambda: (array("q"), array("q"))
    )

    def add(event: dict[str, Any], begin: int, end: int) -> None:
        name = event.get("name", "")
        if name == "[memory]":
            args = event["args"]
            if (args["Device Type"] == _CPU) == (device == "cpu"):
                at_ns, sizes = changes[args["Device Type"], args["Device Id"]]
                at_ns.append(_read_ns(event["ts"]))
                sizes.append(int(args["Bytes"]))
        elif name.startswith("ProfilerStep#") and event.get("cat") == "user_annotation":
            start_ns = _read_ns(event["ts"])
            steps.append((start_ns, start_ns + _read_ns(event.get("dur", 0))))

    scan_events(file, add)
    peaks = [_find_peak(steps, at_ns, sizes) for at_ns, sizes in changes.values()]
    return max(peaks) if peaks and steps else None


_CPU = 0
"""torch's number of this type of device."""


def _find_peak(steps: list[tuple[int, int]], at_ns: array[int], sizes: array[int]) -> int:
    order = sorted(range(len(at_ns)), key=at_ns.__getitem__)
    times_ns = [at_ns[i] for i in order]
    largest = 0
    for begin, end in steps:
        current_bytes = peak_bytes = 0
        for i in order[bisect_left(times_ns, begin) : bisect_left(times_ns, end)]:
            current_bytes += sizes[i]
            peak_bytes = max(peak_bytes, current_bytes)
        largest = max(largest, peak_bytes - max(current_bytes, 0))
    return largest


def _read_ns(microseconds: Any) -> int:
    return round(float(microseconds) * 1000)


# The events of a trace, one after the other.

# An event with stacks and shapes has some KB; a file without its end would be read into memory.
_MOST_OF_EVENT = 64 << 20
_WINDOW = 4 << 20
_BETWEEN = re.compile(r"[\s,]*")


def scan_events(
    file: BinaryIO, handle: Callable[[dict[str, Any], int, int], None]
) -> tuple[int, int]:
    """Calls handle(event, begin, end) for each trace event, with its bytes in the file.

    Returns the byte after the list's bracket and the byte after its last event. Only a few MB are
    in memory. Raises ValueError at the first event that is not JSON.
    """
    decode = json.JSONDecoder(strict=False).raw_decode
    window = _Window(file)
    begin = position = window.find_list()
    while True:
        match = _BETWEEN.match(window.text, position)
        start = match.end() if match else position
        if start == len(window.text) and window.extend(position):
            position = 0
            continue
        if window.text[start : start + 1] != "{":
            return begin, window.base + position
        try:
            event, end = decode(window.text, start)
        except ValueError:
            # Cut off by the window, or not JSON: more of the file tells which.
            if len(window.text) - start > _MOST_OF_EVENT or not window.extend(position):
                raise
            position = 0
            continue
        handle(event, window.base + start, window.base + end)
        position = end


class _Window:
    """A part of the file as text with one character per byte; base is its offset in the file."""

    def __init__(self, file: BinaryIO) -> None:
        file.seek(0)
        self._file, self.text, self.base = file, "", 0

    def extend(self, position: int) -> bool:
        """Forgets what is before the position and reads on; False at the end of the file."""
        more = self._file.read(_WINDOW)
        # One character per byte, so that places in the text are places in the file; names are only
        # looked at for ASCII patterns.
        self.text = self.text[position:] + more.decode("latin-1")
        self.base += position
        return bool(more)

    def find_list(self) -> int:
        """The position after the bracket of the list of events."""
        while len(self.text) < _MOST_OF_EVENT and self.extend(0):
            key = self.text.find('"traceEvents"')
            bracket = self.text.find("[", key) if key >= 0 else -1
            if bracket >= 0:
                return bracket + 1
        raise ValueError("no traceEvents in the file")
