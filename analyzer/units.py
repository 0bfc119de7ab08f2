"""Numbers as people read them: the only place with ms, GiB, GB/s and percent."""

from __future__ import annotations

UNKNOWN = "unknown"


def milliseconds(ns: int | float) -> str:
    """1_234_567 ns -> "1.23 ms"; three figures, and no more than the eye needs."""
    ms = ns / 1e6
    return f"{ms:,.{_decimals(ms)}f} ms"


def microseconds(ns: int | float) -> str:
    """4_400 ns -> "4.40 µs"."""
    us = ns / 1e3
    return f"{us:,.{_decimals(us)}f} µs"


def percent(ratio: float) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * ratio:.1f} %"


def gigabytes_per_second(bytes_per_s: float) -> str:
    """Decimal gigabytes: 12_300_000_000 -> "12.3 GB/s"."""
    rate = bytes_per_s / 1e9
    return f"{rate:,.{_decimals(rate)}f} GB/s"


def size(count_bytes: int | float) -> str:
    """A message's size, decimal as networks are sold: 134_000_000 -> "134 MB"."""
    value, units = float(count_bytes), ["TB", "GB", "MB", "kB", "B"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop()
    return f"{value:.{0 if units[-1] == 'B' else _decimals(value)}f} {units[-1]}"


def gibibytes(count_bytes: int | float) -> str:
    """Device memory, binary: 85_899_345_920 -> "80.0 GiB"."""
    return f"{count_bytes / 2**30:,.1f} GiB"


def _decimals(value: float) -> int:
    magnitude = abs(value)
    return 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
