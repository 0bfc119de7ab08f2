"""What glibc does with the memory of freed arrays; without glibc, nothing is done here."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As malloc.h of glibc numbers them."""

_REUSED_BYTES = 32 << 20
"""The largest array whose memory is reused, also the most that glibc takes: a column of int64 of
four million events. With 16 MiB a trace of 380 MB gains half as much."""

_KEPT_BYTES = 128 << 20
"""The free memory that is kept: a dozen columns of such a trace."""


def reuse_freed_memory() -> None:
    """Lets the next arrays have the memory of freed ones, for the whole process.

    By default glibc gives each large array back, and the next one costs a page fault for every
    4 KiB: 1 to 5 % of an analysis in single runs. For a process of our own, not for one that calls
    the library.
    """
    with suppress(AttributeError, OSError, TypeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _REUSED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def return_freed_memory() -> None:
    """Gives memory of freed arrays back to the system: glibc keeps what lies between others, a
    quarter of the memory at 1,024 ranks.

    Also what is kept for reuse: between two phases the peak counts for more than the faults of the
    next arrays, which come once a phase.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
