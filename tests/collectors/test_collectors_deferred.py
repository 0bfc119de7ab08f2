"""Failures of the recorder: a delayed SIGTERM, and one line for each thing that is lost."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.stderr_lines import warns

from stepsplit.collectors.guard import delay_sigterm, forget_full_folder, warn_on_failure

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


def test_a_full_disk_is_one_line_with_its_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with warns("ENOSPC") as lines:
            for name in ("its trace", "its record"):
                with warn_on_failure(3, name):
                    raise OSError(errno.ENOSPC, "no space", str(tmp_path / "file"))
        forget_full_folder(tmp_path)

        full = "rank 3: lost its files: No space left on device (ENOSPC) in"
        assert lines == [f"{full} {tmp_path}"]


def test_a_warning_has_one_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    with warn_on_failure(3, "its record"):
        raise ValueError("why\nand where")

    assert capsys.readouterr().err == "stepsplit: rank 3: lost its record: why\n"
