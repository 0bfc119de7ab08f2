"""The end of a process whose threads ask the job's store: it keeps its status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

POLLING = """
import sys, threading, time
from torch import distributed
from stepsplit.collectors.job import job_store

distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
store = distributed.TCPStore("127.0.0.1", 0, 1, True)
distributed.distributed_c10d._world.pg_map[distributed.group.WORLD] = ("gloo", store)
job_store.get_store = lambda: store
for _ in range(8):
    arguments = ("never", 60.0, 0.0)
    threading.Thread(target=job_store.wait_for_value, args=arguments, daemon=True).start()
time.sleep(0.5)
"""


@pytest.mark.slow
def test_threads_in_the_store_do_not_abort_a_process_that_ends(tmp_path: Path) -> None:
    """Without a guard about half of these processes end with "terminate called without an active
    exception": threads are ended in torch's C++ when Python is."""
    script = tmp_path / "polling.py"
    script.write_text(POLLING)
    ended = [
        subprocess.run(
            [sys.executable, str(script), str(tmp_path / f"file{number}")],
            capture_output=True, text=True, timeout=120, check=False,
        )
        for number in range(6)
    ]  # fmt: skip
    assert [(one.returncode, one.stderr) for one in ended] == [(0, "")] * 6


COLLECTING = """
import time
from stepsplit.collectors.record import run_file

class Writer(run_file.RunFile):
    def __init__(self): pass
    def _is_writer(self): return True

def action(timeout_s):
    time.sleep(0.5)
    print("whole", flush=True)

run_file.has_other_ranks = lambda: True
Writer().run_within_step(action)
"""


def test_a_process_ends_after_what_asks_the_store_for_its_run_file() -> None:
    """A recording that ends in the last steps of a job asks from a thread as the process ends."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECTING], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "whole\n"
