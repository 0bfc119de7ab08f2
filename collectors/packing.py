"""Hands raw files to a process that packs them, so that no training step waits for a gzip."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from stepsplit.collectors import pack

PATIENCE_S = 60.0
"""How long the end of a job waits for its files; the packing itself goes on beyond."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A raw file and what it is to become."""

    raw: Path
    out: Path


class Packer:
    """The packing processes of one recording."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def pack(self, files: list[Packed], thin: bool = False) -> None:
        """Packs the files in a process of its own; here and now where none can be started."""
        arguments = ["--thin"] * thin + [str(p) for each in files for p in (each.raw, each.out)]
        if not files:
            return
        # No site-packages: a folder on PYTHONPATH must not start another agent in there.
        command = [sys.executable, "-I", "-S", str(Path(pack.__file__)), *arguments]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # What ends the job's process group must not cut its files short.
                start_new_session=True,
            )
        except OSError:
            pack.pack_all(arguments)
            return
        self._processes.append(process)

    def wait(self, timeout_s: float = PATIENCE_S) -> bool:
        """Whether all is packed, after waiting so long at most."""
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._processes = [each for each in self._processes if each.poll() is None]
        return not self._processes
