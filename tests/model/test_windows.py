"""Sliding windows: what attention computes of a sequence, and at which rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.work_builders import TINY, job

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import JobConfig
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.layer_time import time_dense_layer
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.parameters import count_model_flops
from stepsplit.analyzer.validation.tables import Published, build_recipe

WINDOWED = replace(TINY, layers=4, window=16, full_every=2)


@pytest.mark.parametrize("tokens", [8, 16, 17, 64, 1000])
def test_the_scores_are_those_inside_of_the_windows(tokens: int) -> None:
    """Counted one by one; half of a token is the diagonal, which sizes are rounded by."""
    inside = sum(min(query + 1, 16) for query in range(tokens))
    whole = tokens * (tokens + 1) // 2
    mean = (inside + whole) / 2 / tokens
    assert WINDOWED.count_attended_keys(tokens) / 2 == pytest.approx(mean, abs=0.5)


def test_without_full_layers_all_have_the_window() -> None:
    keys = replace(WINDOWED, full_every=0).count_attended_keys(1000)
    assert keys == 2 * 16 - 16**2 / 1000
    assert TINY.count_attended_keys(1000) == 1000


def test_the_flops_of_gpt_oss_are_those_that_megatron_bridge_counts_since_2026() -> None:
    """TFLOP/s and tokens/s of the same row, printed with three and five digits."""
    rows = [
        row
        for row in Published().read_records("megatron_bridge_performance")
        if "GPT OSS" in row.read_text("model") and row.read_text("release") >= "26.06"
    ]
    assert len(rows) == 7
    for row in rows:
        case = build_recipe(row)
        flops_per_s = count_model_flops(case.job, "C5") / case.step_ns * 1e9
        published = row.read_number("model_tflops_per_gpu") * 1e12 * row.read_count("gpus")
        assert flops_per_s == pytest.approx(published, rel=0.005)


def gpt_oss(kernel: str, window: int) -> JobConfig:
    model = replace(load_model("gpt-oss-20b"), experts=None, window=window, full_every=0)
    return replace(
        job(model=model, seq_len=4096, attention_kernel=kernel), hardware=load_hardware("gb300")
    )


def time_core(one: JobConfig) -> tuple[float, float]:
    layer = time_dense_layer(one, compute_device_speed(one))
    return layer.core_ns, layer.core_backward_ns


def test_a_window_shortens_both_passes_or_the_forward_alone() -> None:
    """cuDNN's backward in fp8 computes all scores whatever the window."""
    forward, backward = time_core(gpt_oss("cudnn", 128))
    whole_forward, whole_backward = time_core(gpt_oss("cudnn", 0))
    assert forward < whole_forward / 2
    assert backward < whole_backward / 2
    _, backward = time_core(gpt_oss("cudnn-fp8", 128))
    _, whole_backward = time_core(gpt_oss("cudnn-fp8", 0))
    assert backward == pytest.approx(whole_backward, rel=1e-6)


def test_full_every_needs_a_window() -> None:
    text = """
    model = { preset = "llama-3.1-8b", full_every = 2 }
    training = { seq_len = 4096, micro_batch = 1, global_batch = 8 }
    hardware = { preset = "h100-sxm" }
    """
    with pytest.raises(DataError, match=r"full_every \(2\) needs a window; give window"):
        parse_job(text)
    parse_job(text.replace("full_every = 2", "full_every = 2, window = 4096"))
    with pytest.raises(DataError, match=r"full_every \(33\) exceeds layers \(32\)"):
        parse_job(text.replace("full_every = 2", "full_every = 33, window = 4096"))


def test_a_ring_over_cp_has_no_windows() -> None:
    text = """
    model = { preset = "gpt-oss-20b" }
    parallel = { cp = 2 }
    training = { seq_len = 4096, micro_batch = 1, global_batch = 8 }
    hardware = { preset = "h100-sxm" }
    """
    with pytest.raises(DataError, match=r"ring over cp \(2\) attends without windows; set context"):
        parse_job(text)
    parse_job(text.replace("cp = 2", 'cp = 2, context = "all-gather"'))
    parse_job(text.replace("seq_len = 4096", "seq_len = 128"))
