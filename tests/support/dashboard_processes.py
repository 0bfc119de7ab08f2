"""A real `stepsplit dashboard` with all its processes, which tests may kill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stepsplit.dashboard.store.store import Store
from support.waiting import until


def find_free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Dashboard:
    """A dashboard that answers at url; its log is what it wrote to standard error."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def processes(self) -> dict[int, str]:
        """The command line of every process below, by id."""
        return {pid: _command(pid) for pid in _below(self.process.pid)}

    def workers(self) -> list[int]:
        """The processes that analyze."""
        return [pid for pid, command in self.processes().items() if " worker " in command]

    def server(self) -> list[int]:
        """The processes that answer."""
        return [pid for pid, command in self.processes().items() if " worker " not in command]

    def kill_all(self) -> None:
        """As a loss of power does."""
        for pid in (self.process.pid, *_below(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=10)


@contextmanager
def running_dashboard(folder: Path, *options: str) -> Iterator[Dashboard]:
    """A dashboard on the store in the folder."""
    with open_store(folder):
        pass
    printed, log = folder / "printed.txt", folder / "log.txt"
    command = [sys.executable, "-m", "stepsplit.dashboard", "dashboard", "--port", "0"]
    # Else it depends on the accounts of this machine whether there is a login.
    command += ["--open-to-this-host"]
    command += ["--store", store_url(folder), "--artifacts", str(folder / "artifacts"), *options]
    # What a killed dashboard cannot remove goes with the test's folder.
    env = {**os.environ, "TMPDIR": str(folder)}
    with printed.open("wb") as out, log.open("ab") as error:
        process = subprocess.Popen(
            command, stdout=out, stderr=error, env=env, start_new_session=True
        )
    try:
        until(lambda: b"http" in printed.read_bytes() or process.poll() is not None)
        yield Dashboard(printed.read_text().split()[1], process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=30)


def store_url(folder: Path) -> str:
    """The store that the dashboard of the folder is on."""
    return f"sqlite:///{folder}/runs.db"


@contextmanager
def open_store(folder: Path) -> Iterator[Store]:
    """The same store, from this process."""
    store = Store.open(store_url(folder), folder / "artifacts")
    try:
        yield store
    finally:
        store.close()


def is_gone(pid: int) -> bool:
    """Whether the process has ended."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _below(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    children = [int(child) for child in text.split()]
    return [one for child in children for one in (child, *_below(child))]


def _command(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
