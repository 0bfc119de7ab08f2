"""Compresses the raw files of a rank to .gz in a separate process, off the training's path.

python pack.py [--thin] RAW OUT [RAW OUT ...]

Needs only the standard library and run_spec.py in the same folder, so that it starts quickly in
any Python. It runs at the lowest priority, outlives the rank that started it, and writes its
output atomically.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import runpy
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from stepsplit.collectors.run_spec import whole_file
else:
    whole_file = runpy.run_path(str(Path(__file__).with_name("run_spec.py")))["whole_file"]

_LEVEL = 6
_CHUNK = 1 << 20
_TAIL = 64
_COMMUNICATES = re.compile(
    r"^(c10d::|_c10d_functional::|_c10d_functional_autograd::|c10d_functional::"
    r"|record_param_comms|nccl:|gloo:|stepsplit::|symm_mem::)"
)
_WRAPS = re.compile(r"^(autograd::engine|torch::autograd::|PythonSubclass$|Optimizer\.)")
_DROPPED_CATEGORIES = {"python_function", "cpu_instant_event", "fwdbwd", "ac2g", "async_cpu_to_gpu"}
"""Categories that the time split does not use: stacks, memory events, flow arrows."""


def main(arguments: list[str]) -> int:
    """Packs the given files at the lowest priority; returns 1 if a file was lost."""
    with contextlib.suppress(OSError):
        os.nice(19)
    # Ctrl-C in a terminal is meant for the training; its recording must still be written.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return pack_all(arguments)


def pack_all(arguments: list[str]) -> int:
    """Packs the given files; returns 1 if a file was lost, with a line on stderr."""
    thin = arguments[:1] == ["--thin"]
    paths = [Path(argument) for argument in arguments[thin:]]
    status = 0
    for raw, out in zip(paths[::2], paths[1::2], strict=True):
        try:
            pack(raw, out, thin)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            sys.stderr.write(f"stepsplit: lost {out}: {reason}\n")
            status = 1
        finally:
            drop(raw)
    return status


def pack(raw: Path, out: Path, thin: bool = False) -> None:
    """Writes the raw JSON as a .gz atomically: write, fsync, rename.

    thin: keep only the trace events that the time split needs. Raises OSError, and ValueError for a
    truncated raw file.
    """
    _check_complete(raw)
    # mtime 0: the same content gives the same file.
    with whole_file(out) as file, gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
        for part in _read_thinned(raw) if thin and "_trace" in out.name else _read_stripped(raw):
            packed.write(part)


def drop(raw: Path) -> None:
    """Deletes the raw file, and the temporary file of an interrupted profiler export."""
    for path in (raw, raw.with_name(f"{raw.name}.tmp")):
        path.unlink(missing_ok=True)


def _check_complete(raw: Path) -> None:
    """Checks the end of the file, because the profiler does not report a full disk."""
    with raw.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL))
        if not file.read().rstrip().endswith((b"}", b"]")):
            raise ValueError("the file is truncated; is the disk full?")


def _read_stripped(raw: Path) -> Iterator[bytes]:
    """The file without indentation; a line break is never inside a JSON string."""
    with raw.open("rb") as file:
        while lines := file.readlines(_CHUNK):
            yield b"".join([line.strip() for line in lines])


@dataclass(slots=True)
class _Op:
    """A host event on one thread; holds: it is or contains communication."""

    index: int
    start: float
    end: float
    wraps: bool
    communicates: bool


def _read_thinned(raw: Path) -> Iterator[bytes]:
    """The trace without the ops nested in an op that contains no communication.

    The times of compute do not change; the inner structure of an op is lost.
    """
    text = raw.read_text(encoding="utf-8", errors="replace")
    offset = text.index('"traceEvents"')
    offset = text.index("[", offset) + 1
    spans = list(_parse_events(text, offset))
    dropped = _find_nested([event for event, _, _ in spans])
    events = [
        text[start:end]
        for index, (event, start, end) in enumerate(spans)
        if index not in dropped and event.get("cat") not in _DROPPED_CATEGORIES
    ]
    rest_offset = spans[-1][2] if spans else offset
    yield text[:offset].encode()
    for first in range(0, len(events), 1000):
        head = "," if first else ""
        yield (head + ",".join(events[first : first + 1000])).encode()
    yield text[rest_offset:].encode()


def _parse_events(text: str, offset: int) -> Iterator[tuple[dict[str, Any], int, int]]:
    """The events of the JSON list that begins at `at`, each with its start and end offset."""
    decode = json.JSONDecoder().raw_decode
    between = re.compile(r"[\s,]*")
    while (start := between.match(text, offset).end()) < len(text) and text[start] == "{":  # type: ignore[union-attr]
        event, offset = decode(text, start)
        yield event, start, offset


def _find_nested(events: list[dict[str, Any]]) -> set[int]:
    """Indices of the ops nested in an op that has no communication and is not a wrapper."""
    threads: defaultdict[tuple[Any, Any], list[_Op]] = defaultdict(list)
    for index, event in enumerate(events):
        # Only ops nest: a gloo range on this thread lasts until its wait returns.
        if event.get("cat") == "cpu_op" and event.get("ph") == "X":
            threads[event.get("pid"), event.get("tid")].append(_build_op(index, event))
    return {index for ops in threads.values() for index in _find_removable(ops)}


def _build_op(index: int, event: dict[str, Any]) -> _Op:
    name, start = str(event["name"]), float(event["ts"])
    end = start + float(event.get("dur", 0))
    holds = _COMMUNICATES.match(name) is not None
    return _Op(index, start, end, _WRAPS.match(name) is not None, holds)


def _find_removable(ops: list[_Op]) -> Iterable[int]:
    """The ops of one thread that can be removed."""
    ops.sort(key=lambda op: (op.start, -op.end))
    parents: list[int] = []
    stack: list[int] = []
    for position, op in enumerate(ops):
        while stack and ops[stack[-1]].end < op.end:
            stack.pop()
        parents.append(stack[-1] if stack else -1)
        stack.append(position)
    for position in range(len(ops) - 1, -1, -1):
        if ops[position].communicates and parents[position] >= 0:
            ops[parents[position]].communicates = True
    removed: list[bool] = []
    for position, op in enumerate(ops):
        parent = parents[position]
        covered = parent >= 0 and (
            removed[parent] or not (ops[parent].wraps or ops[parent].communicates)
        )
        removed.append(covered)
        if covered:
            yield op.index


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
