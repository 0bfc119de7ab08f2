"""Limits and keys of the fields of a config in a TOML file, which config_decode reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

MAX_NUMBER = 10**18
"""Of an integer in a file: far above any count, and within int64. Chosen, not measured."""

KEY = "key"
"""Metadata of a field: its key in a file if that differs from its name, "" if it has no key."""


@dataclass(frozen=True, slots=True)
class NumberLimits:
    """The smallest and largest value of a number in a file; label names a number of few values.

    Without limits an integer is at least 1 and any other number is above 0.
    """

    least: int = 1
    most: int = MAX_NUMBER
    label: str = ""


Natural = Annotated[int, NumberLimits(0)]
"""An integer that may be 0."""

NonNegative = Annotated[float, NumberLimits(0)]
"""A number that may be 0."""

AsDecimal = Annotated[int, NumberLimits(1, MAX_NUMBER, "")]
"""An integer that a calibration writes as 128.0."""
