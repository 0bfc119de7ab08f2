"""Exact ns from the microseconds of a trace's text."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import numpy as np

from stepsplit.analyzer.trace import Int64

Microseconds = int | float | Decimal

EXACT_BELOW_US = 2.0**43
"""Below this a float64 holds microseconds with three decimals exactly enough to round back."""
MOST_US = 2**61 // 1000
"""73 years: a time and a duration up to this, on any clock, add up to what 64 bits hold."""


def exact_ns(microseconds: Sequence[Microseconds]) -> Int64 | None:
    """The times in ns, exactly as the text stated them; None where these numbers cannot tell.

    A sum of the whole and the rounded fraction, since ts * 1000 is off by one from 2**42 us on.
    """
    values = np.array(microseconds) if len(microseconds) else np.zeros(0, dtype=np.int64)
    most = MOST_US if values.dtype == np.int64 else EXACT_BELOW_US
    if values.dtype.kind not in "if" or (len(values) and not np.abs(values).max() < most):
        return None
    whole = np.floor(values) if values.dtype.kind == "f" else values
    ns: Int64 = whole.astype(np.int64) * 1000
    return (
        ns if values.dtype.kind == "i" else ns + np.rint((values - whole) * 1000).astype(np.int64)
    )


def exact_ns_of_decimal(microseconds: Decimal) -> int | None:
    """The time in ns, digits beyond the ns rounded; None where it outgrows 64 bits."""
    if not (microseconds.is_finite() and -MOST_US < microseconds < MOST_US):
        return None
    return int((microseconds * 1000).to_integral_value())
