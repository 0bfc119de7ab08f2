"""Numbers as people read them."""

from __future__ import annotations

import pytest

from stepsplit.analyzer import units


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.format_milliseconds(1_234_567), "1.23 ms"),
        (units.format_milliseconds(99_960_000), "100 ms"),
        (units.format_milliseconds(4_812_000_000), "4,812 ms"),
        (units.format_microseconds(18_960), "19.0 µs"),
        (units.format_percent(0.1234), "12.3 %"),
        (units.format_gigabytes_per_second(355e9), "355 GB/s"),
        (units.format_size(512), "512 B"),
        (units.format_size(262_144), "262 kB"),
        (units.format_size(999_600), "1.00 MB"),
        (units.format_size(134e6), "134 MB"),
        (units.format_size(5e15), "5000 TB"),
        (units.format_gibibytes(80 * 2**30), "80.0 GiB"),
    ],
)
def test_three_figures_and_the_unit(shown: str, expected: str) -> None:
    assert shown == expected
