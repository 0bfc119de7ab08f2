"""Times are exact to the nanosecond of the trace's text."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from hypothesis import given, strategies as st

from stepsplit.analyzer.readers.kineto.schema import convert_decimal_to_ns, convert_to_ns


@given(st.lists(st.integers(0, 2**43 * 1000 - 1), min_size=1))
def test_microseconds_with_three_decimals_keep_every_nanosecond(stated_ns: list[int]) -> None:
    text = json.dumps([f"{ns // 1000}.{ns % 1000:03d}" for ns in stated_ns]).replace('"', "")
    found = convert_to_ns(json.loads(text))
    assert found is not None
    assert found.tolist() == stated_ns


def test_integers_are_microseconds() -> None:
    found = convert_to_ns([1_721_000_000_000_001, 2])
    assert found is not None
    assert found.tolist() == [1_721_000_000_000_001_000, 2_000]


def test_times_too_precise_for_a_float_are_read_as_decimals() -> None:
    assert convert_to_ns([1_721_000_000_000_001.123]) is None
    assert convert_decimal_to_ns(Decimal("1721000000000001.123")) == 1_721_000_000_000_001_123


@pytest.mark.parametrize("stated", [[2**62], [1e300], [2**80], [float("inf")]])
def test_times_beyond_64_bits_are_rejected(stated: list[int | float]) -> None:
    assert convert_to_ns(stated) is None
    assert convert_decimal_to_ns(Decimal(stated[0])) is None
