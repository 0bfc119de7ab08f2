"""A SIGTERM while files are written is delivered afterwards."""

import os
import signal
import subprocess
import sys

from stepsplit.collectors.guard import delay_sigterm

SCRIPT = """
import os, signal, time
from stepsplit.collectors.guard import delay_sigterm

with delay_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    print("written", flush=True)
print("not reached", flush=True)
"""


def test_the_process_finishes_writing_and_then_terminates() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "written\n")


def test_the_users_handler_gets_the_signal_afterwards() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with delay_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            assert got == []
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
