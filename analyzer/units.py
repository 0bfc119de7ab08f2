"""Formatting for display: the only module with ms, GiB, GB/s, percent and dates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

UNKNOWN = "unknown"


def format_milliseconds(ns: int | float) -> str:
    """1_234_567 ns -> "1.23 ms"; about three significant digits."""
    ms = ns / 1e6
    return f"{ms:,.{_count_decimals(ms)}f} ms"


def format_signed_milliseconds(ns: int | float) -> str:
    """-1_234_567 ns -> "-1.23 ms"; zero has no sign."""
    return f"{'-' if ns < 0 else '+' if ns > 0 else ''}{format_milliseconds(abs(ns))}"


def format_milliseconds_range(low_ns: int | float, high_ns: int | float) -> str:
    """A range: 11e6 and 14e6 ns -> "11.0-14.0 ms", both with the decimals of the larger."""
    low, high = low_ns / 1e6, high_ns / 1e6
    decimals = _count_decimals(high)
    return f"{low:,.{decimals}f}-{high:,.{decimals}f} ms"


def choose_part_unit_ns(whole_ns: int | float) -> int:
    """The unit in ns in which the parts of a whole are shown: 1 ms from 1,000 ms on, and a tenth
    of it for each tenth of the whole, down to 1 µs."""
    for unit_ns in (1_000_000, 100_000, 10_000):
        if whole_ns >= 1_000 * unit_ns:
            return unit_ns
    return 1_000


def format_parts(count: int, unit_ns: int) -> str:
    """A part in units of choose_part_unit_ns, with the decimals of the unit:

    >>> format_parts(2483, 100_000)
    '248.3 ms'
    """
    decimals = len(str(1_000_000 // unit_ns)) - 1
    return f"{count * unit_ns / 1e6:,.{decimals}f} ms"


def format_signed_parts(count: int, unit_ns: int) -> str:
    """The same with its sign; zero has none."""
    return f"{'-' if count < 0 else '+' if count > 0 else ''}{format_parts(abs(count), unit_ns)}"


def format_microseconds(ns: int | float) -> str:
    """4_400 ns -> "4.40 µs"."""
    us = ns / 1e3
    return f"{us:,.{_count_decimals(us)}f} µs"


def format_percent(ratio: float, decimals: int = 1) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * ratio:.{decimals}f} %"


def format_signed_percent(ratio: float) -> str:
    """0.031 -> "+3.1 %"."""
    return f"{'+' if ratio >= 0 else '-'}{format_percent(abs(ratio))}"


def format_signed_points(ratio: float) -> str:
    """A difference of shares in percentage points: 0.012 -> "+1.2 pt"."""
    return f"{'-' if ratio < 0 else '+'}{100 * abs(ratio):.1f} pt"


def format_signed_range(low: float, high: float, unit: str) -> str:
    """A range of ratios in "pt" or "%": -0.012 and 0.034 -> "-1.2 to +3.4 pt"."""
    return f"{100 * low:+.1f} to {100 * high:+.1f} {unit}"


def format_gigabytes_per_second(bytes_per_s: float) -> str:
    """Decimal gigabytes: 12_300_000_000 -> "12.3 GB/s"."""
    rate = bytes_per_s / 1e9
    return f"{rate:,.{_count_decimals(rate)}f} GB/s"


def format_size(count_bytes: int | float) -> str:
    """A message size in decimal units: 134_000_000 -> "134 MB"."""
    return _format_scaled(count_bytes, [" TB", " GB", " MB", " kB", " B"])


def format_gibibytes(count_bytes: int | float) -> str:
    """Device memory in binary units: 85_899_345_920 -> "80.0 GiB"."""
    return f"{count_bytes / 2**30:,.1f} GiB"


def format_memory_size(count_bytes: int | float) -> str:
    """Memory in GiB, or in MiB below 1 GiB."""
    if count_bytes >= 2**30 or not count_bytes:
        return format_gibibytes(count_bytes)
    return f"{count_bytes / 2**20:,.0f} MiB"


def format_memory_range(low_bytes: int | float, high_bytes: int | float) -> str:
    """A range of device memory: "45.0-81.6 GiB", in MiB below 1 GiB."""
    if high_bytes < 2**30:
        return f"{low_bytes / 2**20:,.0f}-{high_bytes / 2**20:,.0f} MiB"
    return f"{low_bytes / 2**30:,.1f}-{high_bytes / 2**30:,.1f} GiB"


def format_count(number: int | float) -> str:
    """A parameter count: 8_030_261_248 -> "8.03B" (billion)."""
    return _format_scaled(number, ["T", "B", "M", "k", ""])


def format_microbatches(number: int) -> str:
    """A number of microbatches: "1 microbatch", "8 microbatches"."""
    return f"{number:,} microbatch{'' if number == 1 else 'es'}"


def format_per_step(number: float) -> str:
    """A number per step, with one decimal unless it is whole: 24.0 -> "24", 1200.5 -> "1,200.5"."""
    return f"{number:,.1f}".removesuffix(".0")


def format_calls(per_step: float) -> str:
    """Calls of a kind in most full steps: 0.25 -> "0.2", 0.0 -> "some steps", as most have none."""
    return format_per_step(per_step) if per_step else "some steps"


def format_flops(work: int | float) -> str:
    """Work (not a rate): 300_000_000_000_000 -> "300 TFLOP"."""
    return _format_scaled(
        work, [" EFLOP", " PFLOP", " TFLOP", " GFLOP", " MFLOP", " kFLOP", " FLOP"]
    )


def format_rate(rate: float, unit: str) -> str:
    """The rate of a kind of kernels: 241 TFLOP/s, 1,529 GB/s or 250 us a layer."""
    if unit == "flops_per_s":
        return f"{format_flops(rate)}/s"
    if unit == "bytes_per_s":
        return format_gigabytes_per_second(rate)
    return f"{format_microseconds(rate)} a layer"


def format_tokens_per_second(rate: float) -> str:
    """8904.3 -> "8,904 tokens/s"."""
    return f"{rate:,.{_count_decimals(rate)}f} tokens/s"


def group_consecutive(numbers: Sequence[int]) -> list[list[int]]:
    """The runs of consecutive numbers: (0, 1, 2, 7) -> [[0, 1, 2], [7]]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def format_number_list(numbers: Sequence[int]) -> str:
    """Ranks or steps: (0, 2, 4) -> "0, 2, 4"; more than eight are cut to eight and "..."."""
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _format_scaled(number: int | float, units: list[str]) -> str:
    """About three digits in the largest unit that gives at least 1; units are largest first."""
    value, units_left = float(number), units[:]
    while value >= 999.5 and len(units_left) > 1:
        value /= 1000
        units_left.pop()
    decimals = 0 if len(units_left) == len(units) else _count_decimals(value)
    return f"{value:.{decimals}f}{units_left[-1]}"


def _count_decimals(value: float) -> int:
    magnitude = abs(value)
    return 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2


def format_date(unix_ns: int) -> str:
    """The time to the minute.

    >>> format_date(1_790_000_000_000_000_000)
    '2026-09-21 14:13 UTC'
    """
    return f"{datetime.fromtimestamp(unix_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC"
