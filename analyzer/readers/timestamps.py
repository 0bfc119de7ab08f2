"""Exact ns from the microseconds of a trace's text."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from stepsplit.analyzer.trace import Int64

EXACT_BELOW_US = 2.0**43
"""Below this a float64 holds microseconds with three decimals exactly enough to round back."""


def exact_ns(microseconds: Sequence[int | float]) -> Int64 | None:
    """The times in ns, exactly as the text stated them; None where float64 has lost digits.

    A sum of the whole and the rounded fraction, since ts * 1000 is off by one from 2**42 us on.
    """
    if all(type(value) is int for value in microseconds):
        return np.array(microseconds, dtype=np.int64) * 1000
    values = np.array(microseconds, dtype=np.float64)
    if values.size and float(np.abs(values).max()) >= EXACT_BELOW_US:
        return None
    whole = np.floor(values)
    return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64)


def exact_ns_of_decimals(microseconds: Sequence[Decimal]) -> list[int]:
    """The times in ns of any size, digits beyond the ns rounded."""
    return [int((value * 1000).to_integral_value()) for value in microseconds]
