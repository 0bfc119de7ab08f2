"""The band of a peak knows that a job does not say how its loss is fused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from stepsplit.analyzer.model.config_file import parse_job, read_job
from stepsplit.analyzer.model.predict import predict
from stepsplit.dashboard.commands.model import model_command

QWEN = """
[model]
preset = "qwen3-8b"
[parallel]
tp = {tp}
dp = {dp}
zero = 1
overlap = ["dp"]
[training]
framework = "megatron"
seq_len = 4096
micro_batch = 1
global_batch = 64
{keys}
[hardware]
preset = "h100-sxm"
"""

GIB = 2**30


def band_of(tp: int, dp: int, keys: str = "") -> tuple[float, float, float]:
    """Peak, low and high end in GiB."""
    text = QWEN.format(tp=tp, dp=dp, keys=keys)
    (stage,) = predict(parse_job(text)).memory
    assert stage.total_bytes_low is not None and stage.total_bytes_high is not None
    return stage.total_bytes / GIB, stage.total_bytes_low / GIB, stage.total_bytes_high / GIB


@pytest.mark.parametrize(("tp", "dp", "measured_gib"), [(2, 8, 45.8), (4, 4, 28.1), (8, 2, 19.3)])
def test_peaks_that_a_reader_of_megatron_bridge_measured_are_in_the_band(
    tp: int, dp: int, measured_gib: float
) -> None:
    """Qwen3 8B on 16 H100 by Megatron-Bridge 0.1.0rc4 (Nebius, 2026), whose loss copies logits."""
    peak, low, high = band_of(tp, dp)
    assert low <= measured_gib <= high and measured_gib > 1.05 * peak


def test_a_stated_loss_and_a_recipe_leave_the_framework_s_band() -> None:
    peak, _, high = band_of(2, 8)
    assert high > 1.1 * peak
    for keys in ("fused_loss = true", 'recipe = "NeMo"'):
        peak, _, high = band_of(2, 8, keys)
        assert high == pytest.approx(1.035 * peak, rel=1e-3)


def test_a_job_that_fits_only_if_its_loss_works_in_place_says_so(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Without tensor parallelism it ran out of memory."""
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(QWEN.format(tp=1, dp=16, keys=""))
    shown = " ".join(CliRunner().invoke(model_command, [str(path)]).output.split())
    assert "of 79.6 GiB (91.9 %): fits, 43.7 % sure" in shown


def test_a_peak_below_the_memory_that_does_not_fit_has_its_reason(tmp_path: Path) -> None:
    """The allocator reserves 1.05 times the peak, and the CUDA context takes 1 GiB."""
    path = tmp_path / "job.toml"

    def show(memory_bytes: int) -> tuple[str, int]:
        device = f'preset = "h100-sxm"\nmemory_bytes = {memory_bytes}'
        path.write_text(QWEN.format(tp=2, dp=8, keys="").replace('preset = "h100-sxm"', device))
        peak_bytes = max(one.total_bytes for one in predict(read_job(path)).memory)
        return " ".join(CliRunner().invoke(model_command, [str(path)]).output.split()), peak_bytes

    _, peak_bytes = show(80 * 2**30)
    needed = f"{(1.05 * peak_bytes / 2**30) + 1:.1f} GiB with what the allocator reserves"
    above, _ = show(peak_bytes + 2**30)
    assert re.search(rf"DOES NOT FIT, [\d.]+ % sure, {needed}", above)
    below, _ = show(peak_bytes - 2**30)
    assert "DOES NOT FIT" in below and "reserves and" not in below
