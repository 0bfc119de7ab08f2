"""Contestants -> how long each took and how much memory, each run in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import busy
from benchmarks.contestants import Contestant
from benchmarks.resident import peak_until_the_end

_TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Run:
    """One process: seconds of each opening, and the most bytes resident at once.

    peak_bytes is of the process and its children, as sampled; own_peak_bytes of the process alone,
    as the kernel counted. others_cores is how many cores other programs kept busy meanwhile.
    """

    seconds: tuple[float, ...]
    events: int
    peak_bytes: int
    own_peak_bytes: int
    others_cores: float


def runs_of(
    contestants: Sequence[Contestant], repeat: int, say: Callable[[str], None]
) -> dict[str, tuple[Run, ...]]:
    """The runs of each contestant, by its key; all take turns, so that noise meets all alike."""
    found: dict[str, tuple[Run, ...]] = {one.key: () for one in contestants}
    for turn in range(repeat):
        for one in contestants:
            if turn == 0 or not one.once:
                say(f"{turn + 1} of {repeat}: {one.title or one.key}")
                found[one.key] += (_run(one),)
    return found


def _run(one: Contestant) -> Run:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        begin = busy.now()
        process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.opens.{one.program}", *one.arguments],
            stdout=subprocess.PIPE, stderr=said, env=_environment(one, folder), cwd=folder,
        )  # fmt: skip
        peak = peak_until_the_end(process)
        result, _ = process.communicate()
        others_cores = busy.now().others_cores(begin)
        if process.returncode:
            said.seek(0)
            reason = said.read().decode(errors="replace").strip()
            raise RuntimeError(f"{one.title or one.key} failed: {reason[-2000:]}")
    last = json.loads(result.splitlines()[-1])
    seconds, events = tuple(last["seconds"]), last["events"]
    return Run(seconds, events, peak, last["own_peak_bytes"], others_cores)


def _environment(one: Contestant, folder: str) -> dict[str, str]:
    """Where the program finds what it imports, and where stepsplit keeps what it read."""
    found_in = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    cache = folder if one.caches else "off"
    return {**os.environ, "PYTHONPATH": found_in, "STEPSPLIT_CACHE": cache}
