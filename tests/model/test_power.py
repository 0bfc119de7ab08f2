"""GPUs with a power limit, and those that theirs does not slow down."""

from __future__ import annotations

import math

import pytest

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.hardware_config import load_efficiency, load_hardware
from stepsplit.analyzer.model.predict import predict

JOB = """
[model]
preset = "llama-3.1-8b"
[parallel]
dp_shard = 8
[training]
seq_len = 8192
micro_batch = 1
global_batch = 8
recompute = "full"
[hardware]
preset = "{}"
{}
"""


def gemm_of(preset: str, keys: str = "") -> tuple[float, float, float]:
    """Rate of GEMMs, their peak and the clock."""
    job = parse_job(JOB.format(preset, keys))
    part = predict(job).compute_parts[0]
    assert part.peak is not None
    return part.rate, part.peak, job.hardware.clock


def test_a_limit_below_the_preset_s_slows_gemms_by_its_root() -> None:
    whole, _, clock = gemm_of("h100-sxm")
    limited, _, slow = gemm_of("h100-sxm", "power_watts = 350")
    assert (clock, slow) == (1.0, pytest.approx(math.sqrt(0.5)))
    # What GEMMs move does not slow down.
    assert slow < limited / whole < 1.1 * slow


def test_a_limit_above_it_changes_nothing_and_a_stated_clock_wins() -> None:
    assert gemm_of("h100-sxm", "power_watts = 900") == gemm_of("h100-sxm")
    assert gemm_of("h100-sxm", "power_watts = 350\nclock = 0.9")[2] == 0.9


def test_a_measured_clock_sets_what_gemms_reach() -> None:
    """0.95 of the peak at that clock, which is 989.4 TFLOP/s at 1,830 MHz."""
    rate, peak, _ = gemm_of("h100-sxm", "clock_mhz = 1400")
    # What GEMMs move does not slow down.
    assert 0.8 * 0.95 * 1400 / 1830 < rate / peak < 0.95 * 1400 / 1830
    assert gemm_of("h100-sxm", "clock_mhz = 1400\nclock = 0.9")[2] == 0.9
    slower = gemm_of("h100-sxm", "clock_mhz = 1400\npeak_mhz = 2000")[2]
    assert slower == pytest.approx(0.95 * 1400 / 2000 / load_efficiency("hopper").gemm)


def test_a_clock_says_nothing_where_the_gemms_at_one_are_not_known() -> None:
    message = (
        "hardware.clock_mhz: what GEMMs of b200-sxm reach at a clock is not known; state clock"
    )
    with pytest.raises(DataError, match=message):
        parse_job(JOB.format("b200-sxm", "clock_mhz = 1500"))
    with pytest.raises(DataError, match=r"1\.5 GHz are 1500 MHz"):
        parse_job(JOB.format("h100-sxm", "clock_mhz = 1.5"))


def test_the_h100_of_500_w_is_that_of_700_w_with_a_limit() -> None:
    preset, limited = load_hardware("h100-sxm-500w"), parse_job(
        JOB.format("h100-sxm", "power_watts = 500\nmemory_bytes_per_s = 2.4e12")
    ).hardware  # fmt: skip
    assert preset.clock == pytest.approx(limited.clock, abs=1e-3)
    assert preset.memory_bytes_per_s == limited.memory_bytes_per_s


def test_an_h20_reaches_nearly_its_peak() -> None:
    rate, peak, _ = gemm_of("h20-sxm")
    assert 0.85 < rate / peak < 0.96
    usual, h100_peak, _ = gemm_of("h100-sxm")
    assert usual / h100_peak < 0.76


def test_every_gpu_of_nvidia_names_its_power(subtests: pytest.Subtests) -> None:
    for name in ("a100-sxm-80gb", "h100-sxm", "h20-sxm", "b200-sxm", "gb200", "gb300", "mi300x"):
        with subtests.test(name):
            assert load_hardware(name).power_watts > 0


def test_kilowatts_are_refused_with_what_they_are() -> None:
    with pytest.raises(DataError, match=r"power_watts: 0\.7"):
        parse_job(JOB.format("h100-sxm", "power_watts = 0.7"))
