"""Memory of a process and of all that it started, from /proc."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from resource import getpagesize

SAMPLE_SECONDS = 0.02
_PAGE_BYTES = getpagesize()


def peak_until_the_end(process: subprocess.Popen[bytes]) -> int:
    """The most bytes that were resident at once in the process and its children, as sampled.

    A page that several of them share counts once for each.
    """
    peak = 0
    while process.poll() is None:
        peak = max(peak, _tree_bytes(process.pid))
        time.sleep(SAMPLE_SECONDS)
    return peak


def peak_private_until_the_end(process: subprocess.Popen[bytes]) -> int:
    """The most bytes of the process alone that no file holds, as sampled: mapped pages of files,
    which the kernel takes back when memory is short, do not count."""
    peak = 0
    while process.poll() is None:
        try:
            _, resident, mapped = Path(f"/proc/{process.pid}/statm").read_text().split()[:3]
        except (OSError, ValueError):  # it has just ended
            continue
        peak = max(peak, (int(resident) - int(mapped)) * _PAGE_BYTES)
        time.sleep(SAMPLE_SECONDS)
    return peak


def _tree_bytes(pid: int) -> int:
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it has just ended
        return 0
    return resident * _PAGE_BYTES + sum(map(_tree_bytes, children))
