"""What a slow rank's device said of itself while it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from stepsplit.collectors.rank_record import RankRecord

_LOWER = 0.97
"""A clock below this part of the median rank's is worth a word."""
_REASONS = (
    (0x0004, "power cap"),
    (0x0008, "hardware slowdown"),
    (0x0010, "sync boost"),
    (0x0020, "too hot, by software"),
    (0x0040, "too hot, by hardware"),
    (0x0080, "power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h) that slow a busy device down."""


def said_of(records: Sequence[RankRecord], rank: int) -> str:
    """Its SM clock beside the median rank's, and what throttled it; "" where nothing tells."""
    clocks = {one.rank.rank: clock for one in records if (clock := _clock_mhz(one)) is not None}
    words = []
    if rank in clocks and clocks[rank] < _LOWER * median(clocks.values()):
        usual = median(clocks.values())
        words.append(f"its SM clock is {clocks[rank]:,.0f} MHz, the median rank's {usual:,.0f}")
    reasons = _throttled(records, rank)
    if reasons:
        words.append(f"throttled: {', '.join(reasons)}")
    return "; ".join(words)


def _clock_mhz(record: RankRecord) -> float | None:
    read = [state.sm_clock_mhz for state in record.gpu if state.sm_clock_mhz is not None]
    return median(read) if read else None


def _throttled(records: Sequence[RankRecord], rank: int) -> list[str]:
    bits = 0
    for record in records:
        if record.rank.rank == rank:
            for state in record.gpu:
                bits |= state.throttle_reasons or 0
    return [name for bit, name in _REASONS if bits & bit]
