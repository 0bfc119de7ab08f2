"""Times are exact to the nanosecond of the trace's text."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st
from msgspec import Raw

from stepsplit.analyzer.readers.kineto.schema import read_microseconds


def read(*texts: str) -> list[int | None]:
    """The ns of each text; None where it is no number of 64 bits."""
    ns, is_known = read_microseconds([Raw(text.encode()) for text in texts])
    return [time if known else None for time, known in zip(ns.tolist(), is_known, strict=True)]


@given(st.lists(st.integers(0, 2**60), min_size=1))
def test_microseconds_with_three_decimals_keep_every_nanosecond(stated_ns: list[int]) -> None:
    assert read(*(f"{ns // 1000}.{ns % 1000:03d}" for ns in stated_ns)) == stated_ns


@given(st.lists(st.decimals(-(10**15), 10**15, allow_nan=False).map(str), min_size=1))
def test_any_number_is_rounded_half_to_even(texts: list[str]) -> None:
    assert read(*texts) == [round(Fraction(text) * 1000) for text in texts]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1721000000000001", 1_721_000_000_000_001_000),
        ("1721000000000001.123", 1_721_000_000_000_001_123),
        ("1.0005", 1000),
        ("1.0015", 1002),
        ("1.00150000000000001", 1002),
        ("0.1", 100),
        ("-2.5", -2500),
        ("1e3", 1_000_000),
        ('"7.25"', 7250),
        ('"1,5"', None),
        ("null", None),
        ("true", None),
        ("[1]", None),
        ('"x"', None),
        (str(2**62), None),
        ("1e300", None),
        (str(Decimal(2**61) / 1000), None),
    ],
)
def test_a_time_is_what_its_text_says(text: str, ns: int | None) -> None:
    assert read(text) == [ns]
    assert read("1.5", text, "2.125", "4", text) == [1500, ns, 2125, 4000, ns]


def test_no_times() -> None:
    assert read() == []
