"""The process beside a watched job ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
from stepsplit.collectors.formats.watch_notes import NoteFile, RankEnded, RankStarted
from stepsplit.dashboard.watch_process import ReducerOptions

_MAIN = """
import os, time
pauses = []
def pause(seconds):
    pauses.append(seconds)
    os.kill({pid}, 9)
    while open("/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
        pass
time.sleep = pause
from stepsplit.dashboard import watch_process
watch_process.main()
print(pauses)
"""


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_end_of_a_job_is_not_held_up(tmp_path: Path, goes_on: bool) -> None:
    """Ranks that go on without the command are looked for once a second; without them nothing is
    waited for."""
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    now = time.time_ns()
    NoteFile(tmp_path, 0).write([RankStarted(0, 1, "h", rank.pid, 0, 0.005, now)])
    if goes_on:
        # The reducer that was there before has read it.
        Reducer(WatchFolder(tmp_path, "r", "h")).collect()
    else:
        NoteFile(tmp_path, 0).write([RankEnded(0, 9, now)])
    options = ReducerOptions(folder=str(tmp_path), run="r", host="h", disk_bytes=1 << 20)
    # The first pause of the reducer is the end of the rank.
    code = _MAIN.format(pid=rank.pid)
    done = subprocess.run(
        [sys.executable, "-c", code], input=msgspec.json.encode(options) + b"\n",
        capture_output=True, timeout=60, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rank.kill()
    rank.wait()
    assert done.stdout.decode().strip() == ("[1.0]" if goes_on else "[]")
