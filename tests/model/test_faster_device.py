"""A device whose every rate is higher never makes a predicted step longer."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings, strategies as st

from stepsplit.analyzer import UsageError, predict
from stepsplit.analyzer.model.config import (
    HardwareConfig,
    JobConfig,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.schedule_names import SCHEDULES


@st.composite
def draw_jobs(draw: st.DrawFn) -> JobConfig:
    """Jobs of any schedule, with any axes overlapped."""
    pp = draw(st.sampled_from([1, 2, 4]))
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    parallel = ParallelConfig(
        tp=draw(st.sampled_from([1, 2, 8])),
        pp=pp,
        dp_replicate=draw(st.sampled_from([1, 16])),
        cp=draw(st.sampled_from([1, 4])),
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        overlap=draw(st.frozensets(st.sampled_from(["tp", "cp", "ep", "dp", "pp"]))),
        context_kind=draw(st.sampled_from(["ring", "all-gather", "ulysses"])),
    )
    training = TrainingConfig(
        seq_len=draw(st.sampled_from([1024, 8192])),
        micro_batch=1,
        global_batch=pp * draw(st.sampled_from([2, 4])) * parallel.dp_replicate,
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    hardware = load_hardware(draw(st.sampled_from(["a100-sxm-80gb", "h100-sxm", "b200-sxm"])))
    model = load_model(draw(st.sampled_from(["llama-2-70b", "gpt3-13b", "mixtral-8x7b"])))
    return JobConfig(model, parallel, training, hardware)


def speed_up(hardware: HardwareConfig, times: float) -> HardwareConfig:
    peaks = tuple((dtype, peak * times) for dtype, peak in hardware.peaks_flops_per_s)
    return replace(
        hardware,
        peaks_flops_per_s=peaks,
        memory_bytes_per_s=hardware.memory_bytes_per_s * times,
    )


@settings(max_examples=60)
@given(job=draw_jobs(), times=st.sampled_from([1.02, 1.3, 3.0]))
def test_a_faster_device_never_lengthens_a_step(job: JobConfig, times: float) -> None:
    try:
        before_ns = predict(job).split.step_ns
    except UsageError:
        assume(False)
    after_ns = predict(replace(job, hardware=speed_up(job.hardware, times))).split.step_ns
    rounding_ns = 10
    assert after_ns <= before_ns + rounding_ns


def test_gathers_that_a_faster_device_exposes_delay_both_gradients() -> None:
    """Had the input gradient alone the exposed time, zb-h2 would fill less of its bubbles."""
    parallel = ParallelConfig(
        tp=8, pp=4, cp=4, dp_shard=128, zero=3, schedule="zb-h2",
        reshard_after_forward="always", overlap=frozenset(["tp", "cp", "dp"]),
    )  # fmt: skip
    training = TrainingConfig(
        seq_len=2048, micro_batch=1, global_batch=8 * 128, recompute="none", framework="fsdp2"
    )
    job = JobConfig(load_model("llama-2-70b"), parallel, training, load_hardware("h100-sxm"))
    before_ns = predict(job).split.step_ns

    faster = replace(job, hardware=speed_up(job.hardware, 3.0))

    assert predict(faster).split.step_ns <= before_ns
