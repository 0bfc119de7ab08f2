"""Packs raw files in a separate process, so that no training step waits for gzip."""

from __future__ import annotations

import atexit
import contextlib
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepsplit.collectors.record import pack
from stepsplit.collectors.safe_io.helper_process import PYTHON

PACK_TIMEOUT_S = 60.0
"""How long the end of a job waits for its files to be packed."""

_KEEP_TIMEOUT_S = 60.0
"""How long it then waits until the raw files have their own names, copied from another disk."""


MemoryDevice = Literal["cpu", "device"]


@dataclass(frozen=True, slots=True)
class PackTask:
    """A raw file and its packed output."""

    raw: Path
    out: Path


class Packer:
    """The packing processes of one recording."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def pack(
        self, files: list[PackTask], thin: bool = False, memory: MemoryDevice | None = None
    ) -> None:
        """Packs the files in a new process; if none can be started, keeps the raw files.

        memory: also measures the activations on that device.
        """
        if not files:
            return
        arguments = ["--thin"] * thin + (["--memory", memory] if memory else [])
        arguments += [str(path) for each in files for path in (each.raw, each.out)]
        # -I -S: a folder on PYTHONPATH must not start another agent in the new process.
        command = [*PYTHON, "-I", "-S", str(Path(pack.__file__)), *arguments]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A signal to the job's process group must not interrupt the packing.
                start_new_session=True,
            )
        except OSError:
            # Neither gzip nor a copy to another disk may hold up the training.
            kept = [(each.raw, each.out) for each in files]
            threading.Thread(target=pack.keep_all, args=(kept,), name="stepsplit-keep").start()
            return
        if not self._processes:
            atexit.register(self.finish)
        self._processes.append(process)

    def wait(self, timeout_s: float = PACK_TIMEOUT_S) -> bool:
        """Waits at most `timeout_s`; returns whether all files are packed."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._processes = [each for each in self._processes if each.poll() is None]
        if not self._processes:
            atexit.unregister(self.finish)
        return not self._processes

    def finish(self, timeout_s: float = PACK_TIMEOUT_S) -> None:
        """Packs what can be packed in time, and gives the other raw files their own names.

        For the end of the process: under Slurm and Kubernetes the packing processes die with it.
        """
        if self.wait(timeout_s):
            return
        for process in self._processes:
            process.terminate()
        self.wait(_KEEP_TIMEOUT_S)
