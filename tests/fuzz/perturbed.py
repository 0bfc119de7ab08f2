"""Recordings whose times are slightly wrong, as clocks and profilers leave them."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Perturb = Callable[[list[Event], random.Random], None]
"""Changes the complete events of one trace in place; times in microseconds."""

SOON_US = 6.0
"""A kernel that starts so soon after the end of communication waited for it."""


def move_ends(events: list[Event], rng: random.Random) -> None:
    """Every event ends up to 1 us earlier or later."""
    for event in events:
        event["dur"] = round(max(0.0, event["dur"] + rng.uniform(-1, 1)), 3)


def round_times(events: list[Event], _: random.Random) -> None:
    """Every event begins and ends on a whole microsecond."""
    for event in events:
        start, end = round(event["ts"]), round(event["ts"] + event["dur"])
        event |= {"ts": start, "dur": end - start}


def start_kernels_after(gap_us: float) -> Perturb:
    """A kernel that waited for communication starts so long after its end; it may be negative."""

    def perturb(events: list[Event], _: random.Random) -> None:
        kernels = [event for event in events if event.get("cat") == "kernel"]
        ends = sorted(event["ts"] + event["dur"] for event in kernels if "nccl" in event["name"])
        for event in kernels:
            start = event["ts"]
            last = bisect_left(ends, start) - 1
            if "nccl" not in event["name"] and last >= 0 and start - ends[last] <= SOON_US:
                event["ts"] = round(ends[last] + gap_us, 3)
                event["dur"] = round(max(start + event["dur"] - event["ts"], 0), 3)

    return perturb


def write_perturbed(recording: Path, folder: Path, perturb: Perturb, seed: int = 1) -> Path:
    """Writes the recording, a file or a folder, with perturbed traces; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in [recording] if recording.is_file() else sorted(recording.iterdir()):
        body = read_trace(file)
        if body is None:
            shutil.copy(file, folder)
            continue
        events = [e for e in body["traceEvents"] if e.get("ph") == "X" and "dur" in e]
        perturb(events, random.Random(f"{seed} {file.name}"))
        (folder / file.name.removesuffix(".gz")).write_text(json.dumps(body))
    return folder


def read_trace(file: Path) -> dict[str, Any] | None:
    """The body of a trace; None for another file."""
    if ".json" not in file.name:
        return None
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    body = json.loads(text)
    return body if isinstance(body, dict) and "traceEvents" in body else None
