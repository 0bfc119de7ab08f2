"""The newest step of a watched rank, in memory that outlives a rank which is killed."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path

_STEP_AND_TIME = struct.Struct("=qq")


class StepMemory:
    """The rank writes at each step, without a system call: a file could have it wait for a disk.

    The memory has no name. Who holds it open, by HeldStepMemory, can read it after the rank's end.
    Raises OSError or AttributeError if the system has no such memory.
    """

    def __init__(self, rank: int, incarnation: int) -> None:
        self.descriptor = os.memfd_create(_build_label(rank, incarnation))
        os.ftruncate(self.descriptor, _STEP_AND_TIME.size)
        self._memory = mmap.mmap(self.descriptor, _STEP_AND_TIME.size)
        self._file = os.fstat(self.descriptor)

    def write(self, step: int, unix_ns: int) -> None:
        """Notes when the step ended."""
        _STEP_AND_TIME.pack_into(self._memory, 0, step, unix_ns)

    def close(self) -> None:
        """Frees the memory, unless it is held."""
        self._memory.close()
        # A script that closes all descriptors has perhaps opened a file of its own as this one.
        with suppress(OSError):
            if os.path.samestat(os.fstat(self.descriptor), self._file):
                os.close(self.descriptor)


class HeldStepMemory:
    """The step memory of another process of this user, held open until close().

    Raises OSError if the process has none as this descriptor, whose number may be another's by now.
    """

    def __init__(self, pid: int, descriptor: int, rank: int, incarnation: int) -> None:
        self._place = Path(f"/proc/{pid}/fd/{descriptor}")
        self._label = f"/memfd:{_build_label(rank, incarnation)} "
        if self.is_left():
            raise FileNotFoundError(f"{self._place} is no step memory")
        self._descriptor = os.open(self._place, os.O_RDONLY | os.O_CLOEXEC)

    def is_left(self) -> bool:
        """Whether the process has ended, or has closed the memory."""
        try:
            return not str(self._place.readlink()).startswith(self._label)
        except OSError:
            return True

    def read(self) -> tuple[int, int] | None:
        """The newest step, and when it ended, in ns since 1970; None if none has been noted."""
        data = os.pread(self._descriptor, _STEP_AND_TIME.size, 0)
        step, unix_ns = _STEP_AND_TIME.unpack(data)
        return (step, unix_ns) if unix_ns else None

    def close(self) -> None:
        """Lets the memory go."""
        os.close(self._descriptor)


def _build_label(rank: int, incarnation: int) -> str:
    return f"stepsplit-step-{rank}-{incarnation}"
