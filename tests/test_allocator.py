"""The memory of freed arrays is reused where a process asks for it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_COUNT_FAULTS = """
import resource
import numpy as np
from stepsplit.analyzer.allocator import return_freed_memory, reuse_freed_memory
reuse_freed_memory()
np.ones(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    np.ones(1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
return_freed_memory()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_arrays_that_follow_each_other_have_one_piece_of_memory() -> None:
    """Fifty arrays of 8 MiB, each freed before the next: by default each may be of new pages."""
    command = [sys.executable, "-c", _COUNT_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50
