"""Constants fitted to runs with known constants, and the file that the model reads."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import (
    Calibration,
    DataError,
    Efficiency,
    HardwareConfig,
    JobConfig,
    Rates,
    UsageError,
    calibrate,
    predict,
    read_job,
    read_rates,
)
from stepsplit.analyzer.gap.calibrate import (
    CalibrationSample,
    StageSample,
    Transfer,
    find_impossible_rates,
    fit_calibration,
    fit_efficiency,
    format_hardware,
    to_json,
)
from stepsplit.analyzer.gap.calibration_sample import (
    AttentionSample,
    GemmSample,
    KernelSamples,
    collect_kernels,
    compute_parts,
)
from stepsplit.analyzer.model.comm_measured import TransferSweep
from stepsplit.analyzer.model.comm_time import time_of
from stepsplit.analyzer.model.config import AttentionRate, Dtype, GemmRate, MemoryCorrection
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.device_speed import compute_attention_share
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.ideal_bubble import compute_ideal_bubble_fraction
from stepsplit.analyzer.model.memory import compute_memory
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split.kernel_shapes import AttentionShape, GemmShape
from stepsplit.analyzer.split.run import split_run
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.calibration import build_calibration_screen

SAMPLES = Path(__file__).parents[2] / "sample_traces"
TRUE = Efficiency(0.6, 0.3, 0.3, 0.5, 8000.0, jitter=0.03, host_ns=1.5e6)
"""The constants of the machine that the runs of these stories ran on."""
JOB = """[model]
layers = 4
hidden = 512
heads = 8
vocab = 1000
tied = false
[parallel]
{parallel}
[training]
seq_len = 128
micro_batch = {micro_batch}
global_batch = 32
dtype = "fp32"
framework = "{framework}"
[hardware]
preset = "cpu"
"""


def job(parallel: str = "tp = 2", framework: str = "fsdp2", micro_batch: int = 4) -> JobConfig:
    return parse_job(JOB.format(parallel=parallel, framework=framework, micro_batch=micro_batch))


def run(
    of: JobConfig, true: Efficiency, name: str = "one", *transfers: Transfer
) -> CalibrationSample:
    """What a run of the job would show on a machine of these constants."""
    there = replace(of, hardware=replace(of.hardware, efficiency=true))
    splits, parts = predict(there).splits, compute_parts(of)
    stages = []
    for i, (split, part) in enumerate(zip(splits, parts, strict=True)):
        products = part.products / true.gemm + part.product_moves / true.memory
        products += part.product_launches * true.launch_ns
        core = part.core / true.attention
        other = split.compute_ns - products - core
        stages.append(StageSample(i, split.step_ns, split, products, core, other))
    return CalibrationSample(name, of, tuple(stages), transfers)


def close(found: Efficiency, true: Efficiency, *but: str) -> bool:
    keys = {"gemm", "attention", "memory", "launch_ns", "jitter", "host_ns"} - set(but)
    return all(math.isclose(getattr(found, k), getattr(true, k), rel_tol=0.01) for k in keys)


def known() -> Efficiency:
    return load_hardware("cpu").efficiency


def test_the_parts_make_up_the_predicted_compute() -> None:
    for one in (job(), job("pp = 2"), job("dp_shard = 2"), job("dp = 2", "ddp")):
        split = run(one, TRUE).stages[0]
        part = compute_parts(one)[0]
        other = part.other_moves / TRUE.memory + part.other_launches * TRUE.launch_ns
        # Attention's own launches are among the others.
        assert math.isclose(split.other_ns, other, rel_tol=1e-3)


def test_one_run_determines_all_constants_except_launches() -> None:
    true = replace(TRUE, launch_ns=known().launch_ns)
    found = fit_efficiency([run(job(), true)], known())
    assert close(found, true)


def test_stages_that_differ_tell_launches_from_bytes() -> None:
    runs = [run(job(micro_batch=1), TRUE), run(job(micro_batch=16), TRUE)]
    assert close(fit_efficiency(runs, known()), TRUE)


def test_like_runs_leave_launches_as_they_were() -> None:
    runs = [run(job(), TRUE), run(job(), TRUE)]
    assert fit_efficiency(runs, known()).launch_ns == known().launch_ns


def test_without_names_of_kernels_one_number_scales_all() -> None:
    true = replace(known(), gemm=0.35, attention=0.25, unfused_attention=0.1, memory=0.4,
                   launch_ns=10_000.0)  # fmt: skip
    blind = run(job(), true)
    stages = tuple(replace(one, products_ns=0.0, attention_ns=0.0) for one in blind.stages)
    found = fit_efficiency([replace(blind, stages=stages)], known())
    assert close(found, true, "host_ns")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("stated", [None, AttentionRate(400e12, 300e12, 500.0)])
def test_a_run_on_a_device_with_a_clock_is_predicted_by_its_calibration(
    named: bool, stated: AttentionRate | None
) -> None:
    """GB300 sustains 1.24 times what its family does, and its attention is half as fast as what is
    stated or published; the calibration replaces both, with names of kernels or without."""
    half = replace(job().training, dtype="bf16", seq_len=4096)
    device = replace(load_hardware("gb300"), attention=stated)
    of = replace(job("tp = 2", "megatron"), hardware=device, training=half)
    share = compute_attention_share(of) / 1.24
    known = device.efficiency
    true = replace(known, attention=share / 2, gemm=known.gemm / 2, memory=known.memory / 2,
                   launch_ns=2 * known.launch_ns)  # fmt: skip
    sample = run(replace(of, hardware=replace(device, attention=None)), true)
    if not named:
        stages = (replace(one, products_ns=0.0, attention_ns=0.0) for one in sample.stages)
        sample = replace(sample, stages=tuple(stages))
    found = fit_calibration([replace(sample, job=of)])
    assert found.hardware.attention is None
    [stage] = found.stages
    assert stage.predicted.compute_ns == pytest.approx(stage.measured.compute_ns, rel=0.01)
    assert found.hardware.efficiency.attention == pytest.approx(share / 2, rel=0.02)


def test_a_stated_table_of_gemms_is_left_for_what_was_recorded() -> None:
    sample = run(job(), TRUE)
    gemms = (GemmRate(4096, 4096, 4096, 1e9),)
    hardware = replace(sample.job.hardware, gemms=gemms)
    stated = replace(sample, job=replace(sample.job, hardware=hardware))
    assert fit_calibration([stated]).hardware == fit_calibration([sample]).hardware


def build_kernels(gemm: float, memory: float, launch_ns: float) -> KernelSamples:
    """The kernels of a run on H100 whose GEMMs reach that fraction of the peak, and whose attention
    is FlashAttention 3 at 0.9 of its published rate."""
    gemms, attention = [], []
    for rows, columns, inner in ((4096, 6144, 4096), (4096, 28672, 4096), (4096, 4096, 14336)):
        tiles = -(-rows // 128) * -(-columns // 128)
        waste = -(-tiles // 132) * 132 / tiles
        shape = GemmShape(rows, columns, inner)
        moved = 2 * (rows + columns) * inner + 2 * rows * columns
        took = shape.flops * waste / (989.4e12 * gemm) * 1e9 + moved / (3.35e12 * memory) * 1e9
        gemms.append(GemmSample(shape, "bf16", 10, round(10 * (took + launch_ns))))
    for tokens in (2048, 8192):
        core = AttentionShape(1, 32, tokens, 128)
        forward = core.causal_forward_flops / (0.9 * 662e12 * tokens / (tokens + 600))
        backward = 2.5 * core.causal_forward_flops / (0.9 * 569e12 * tokens / (tokens + 1050))
        attention.append(AttentionSample(core, "flash-3", False, 4, round(4e9 * forward)))
        attention.append(AttentionSample(core, "flash-3", True, 4, round(4e9 * backward)))
    return KernelSamples(tuple(gemms), tuple(attention), sum(one.took_ns for one in gemms))


def run_on_gpu() -> CalibrationSample:
    half = replace(job().training, dtype="bf16")
    of = replace(job("tp = 2", "megatron"), hardware=load_hardware("h100-sxm"), training=half)
    return run(of, replace(TRUE, launch_ns=of.hardware.efficiency.launch_ns))


def test_recorded_shapes_decide_the_rates_not_the_job(tmp_path: Path) -> None:
    """The job has another model than what ran; the GEMMs' rate and that of attention at both
    sequences are those of the kernels, and the file keeps them."""
    sample = run_on_gpu()
    launch_ns = sample.job.hardware.efficiency.launch_ns
    before = fit_calibration([sample]).hardware
    memory = before.efficiency.memory * before.memory_bytes_per_s / 3.35e12
    kernels = build_kernels(0.7, memory, launch_ns)
    found = fit_calibration([replace(sample, kernels=kernels)])
    assert before.efficiency.gemm < 0.6
    assert found.hardware.efficiency.gemm == pytest.approx(0.7, rel=0.01)
    assert found.hardware.attention is not None
    assert found.hardware.attention.forward_flops_per_s == pytest.approx(0.9 * 662e12, rel=0.01)
    assert found.hardware.attention.backward_flops_per_s == pytest.approx(0.9 * 569e12, rel=0.01)
    assert found.hardware.attention.start_tokens == 600
    (tmp_path / "mine.toml").write_text(format_hardware(found))
    text = JOB.format(parallel="tp = 2", micro_batch=4, framework="megatron")
    (tmp_path / "job.toml").write_text(text.replace('preset = "cpu"', 'file = "mine.toml"'))
    read = read_job(tmp_path / "job.toml").hardware.attention
    assert read is not None
    assert read.forward_flops_per_s == pytest.approx(
        found.hardware.attention.forward_flops_per_s, rel=1e-5
    )


def test_few_shapes_or_no_backward_leave_the_rates_to_the_sums() -> None:
    sample = run_on_gpu()
    kernels = build_kernels(0.7, 0.5, 4_000.0)
    few = replace(
        kernels,
        all_gemms_ns=3 * kernels.all_gemms_ns,
        attention=tuple(one for one in kernels.attention if not one.backward),
    )
    found = fit_calibration([replace(sample, kernels=few)])
    assert found.hardware == fit_calibration([sample]).hardware


def test_kernels_are_collected_with_their_shapes(tmp_path: Path) -> None:
    """Two GEMMs and a forward of attention on a GPU; the sum of a split GEMM belongs to it."""
    bf16 = ["c10::BFloat16"] * 3
    trace = GpuTrace().step(1, 0, 1_000)
    trace.op("aten::mm", 0, 5, **{"Input Dims": [[64, 128], [128, 256]], "Input type": bf16[:2]})
    trace.kernel("sm90_gemm_bf16_splitK", 10, 110, launched=1)
    trace.kernel("cublasLt::splitKreduce_kernel", 110, 120, launched=2)
    dims = [[2, 512, 8, 64]] * 3
    trace.op("flash_attn::fwd", 6, 9, **{"Input Dims": dims, "Input type": bf16})
    trace.kernel("flash_fwd_kernel", 130, 330, launched=7)
    recording = read_recording([trace.write(tmp_path)])
    split = split_run(recording.traces, recording.spec, compute_ideal_bubble_fraction)
    kernels = collect_kernels(split)
    assert {(one.shape, one.count, one.took_ns) for one in kernels.gemms} == {
        (GemmShape(64, 256, 128), 1, 100_000), (GemmShape(64, 256, 128), 0, 10_000),
    }  # fmt: skip
    assert kernels.all_gemms_ns == 110_000
    assert kernels.attention == (
        AttentionSample(AttentionShape(2, 8, 512, 64), "flash-2", False, 1, 200_000),
    )


def test_runs_that_disagree_meet_in_the_geometric_mean() -> None:
    fast, slow = (
        replace(TRUE, gemm=0.8, launch_ns=5000.0),
        replace(TRUE, gemm=0.2, launch_ns=5000.0),
    )
    found = fit_efficiency([run(job(), fast), run(job(), slow)], known())
    assert math.isclose(found.gemm, 0.4, rel_tol=0.01)


def test_a_device_that_is_never_idle_leaves_the_host_constant_unknown() -> None:
    gpu = replace(job(), hardware=load_hardware("h100-sxm"))
    busy = run(
        replace(gpu, training=replace(gpu.training, dtype="bf16")),
        replace(load_hardware("h100-sxm").efficiency, attention=0.3),
    )
    quiet = tuple(replace(one, split=replace(one.split, idle_ns=0)) for one in busy.stages)
    assert fit_efficiency([replace(busy, stages=quiet)], known()).host_ns == 0.0


def test_a_device_that_waits_once_per_step_does_not_either() -> None:
    """5 to 9 % of the step were idle in transformers' trainings on an H100, with 4 layers of which
    a forward would have taken the host 18 ms."""
    gpu = replace(job(), hardware=load_hardware("h100-sxm"))
    seen = run(gpu, replace(load_hardware("h100-sxm").efficiency, attention=0.3))
    (stage, *_) = seen.stages
    waits = replace(stage.split, idle_ns=stage.split.compute_ns // 10)
    late = replace(stage, split=waits, step_ns=waits.step_ns)
    assert fit_efficiency([replace(seen, stages=(late,))], known()).host_ns == 0.0


def test_a_device_that_waits_for_each_layer_shows_the_hosts_time() -> None:
    """That of the run which is idle for the larger part of its step."""
    gpu = replace(job(), hardware=load_hardware("h100-sxm"))
    true = replace(load_hardware("h100-sxm").efficiency, attention=0.3, host_ns=3e6)
    large = replace(gpu, training=replace(gpu.training, micro_batch=16, global_batch=64))
    for runs in ([run(gpu, true)], [run(gpu, true), run(large, true)]):
        assert fit_efficiency(runs, known()).host_ns == pytest.approx(3e6, rel=0.1)


def transfers(
    true: HardwareConfig, *sizes: int, ranks: int = 2, per_node: int = 2
) -> list[Transfer]:
    span = GroupPlacement(ranks, per_node)
    return [
        Transfer(
            "all_reduce",
            ranks,
            per_node,
            size,
            10,
            round(time_of("all_reduce", size, span, true).ns),
        )
        for size in sizes
    ]


def links(**numbers: float) -> HardwareConfig:
    """A CPU whose link differs in these."""
    known = load_hardware("cpu")
    return replace(known, intra=replace(known.intra, **numbers))


def test_links_are_found_again() -> None:
    true = links(bytes_per_s=5e9, latency_ns=120_000.0)
    found = fit_calibration([run(job(), TRUE, "one", *transfers(true, 1024, 1 << 20, 8 << 20))])
    assert math.isclose(found.hardware.intra.bytes_per_s, 5e9, rel_tol=0.02)
    assert math.isclose(found.hardware.intra.latency_ns, 120_000.0, rel_tol=0.02)
    assert found.hardware.inter == load_hardware("cpu").inter


def test_a_single_size_determines_only_the_bandwidth() -> None:
    true = links(bytes_per_s=5e9)
    found = fit_calibration([run(job(), TRUE, "one", *transfers(true, 8 << 20))]).hardware.intra
    assert found.latency_ns == load_hardware("cpu").intra.latency_ns
    assert math.isclose(found.bytes_per_s, 5e9, rel_tol=0.02)


def test_groups_over_nodes_tell_of_the_link_between_them() -> None:
    known = load_hardware("cpu")
    true = replace(known, inter=replace(known.inter, bytes_per_s=3e9))
    seen = transfers(true, 64 << 20, per_node=1)
    found = fit_calibration([run(job(), TRUE, "one", *seen)]).hardware
    assert math.isclose(found.inter.bytes_per_s, 3e9, rel_tol=0.02)
    assert found.intra == known.intra


def test_transfers_of_several_runs_become_one_sweep() -> None:
    one = Transfer("all_reduce", 2, 2, 1000, 10, 100)
    runs = [
        run(job(), TRUE, "a", one, replace(one, message_bytes=9000, ns=900)),
        run(job(), TRUE, "b", replace(one, ns=200), replace(one, op="all_gather")),
    ]
    assert fit_calibration(runs).transfers == (
        TransferSweep("all_gather", 2, 2, (1000,), (100,), swept=False),
        TransferSweep("all_reduce", 2, 2, (1000, 9000), (150.0, 900), swept=False),
    )


def test_beyond_recorded_sizes_the_closed_form_goes_on() -> None:
    on, span = load_hardware("cpu"), GroupPlacement(2, 2)
    slow = 3 * time_of("all_reduce", 1 << 20, span, on).ns
    rates = Rates((TransferSweep("all_reduce", 2, 2, (1 << 20,), (slow,), swept=False),))
    for size in (8, 1 << 20, 1 << 24):
        closed = time_of("all_reduce", size, span, on).ns
        assert math.isclose(rates.estimate_call_time("all_reduce", size, span, on).ns, 3 * closed)


def test_the_fullest_rank_corrects_the_memory() -> None:
    one = run(job(), TRUE)
    fuller = compute_memory(one.job)[0]
    peak = fuller.total_bytes + fuller.activations_bytes // 2
    stages = tuple(replace(stage, peak_bytes=peak) for stage in one.stages)
    found = fit_calibration([replace(one, stages=stages)]).hardware
    assert math.isclose(found.learned.activations, 1.5, rel_tol=1e-6)
    assert compute_memory(replace(one.job, hardware=found))[0].total_bytes == pytest.approx(
        peak, abs=2
    )


def test_a_peak_that_was_exceeded_is_raised() -> None:
    found = fit_calibration([run(job(), replace(TRUE, gemm=1.5))]).hardware
    assert found.efficiency.gemm == 1.0
    assert math.isclose(found.peak_flops_per_s("fp32") or 0, 1.5 * 80e9, rel_tol=0.01)


def test_one_run_is_explained_by_its_own_calibration() -> None:
    (one,) = fit_calibration([run(job(), replace(TRUE, launch_ns=5000.0))]).stages
    assert one.predicted.step_ns == pytest.approx(one.step_ns, rel=0.01)


def test_each_of_several_runs_is_predicted_by_the_others() -> None:
    true = replace(TRUE, launch_ns=5000.0)
    alike = fit_calibration([run(job(), true, "a"), run(job("pp = 2"), true, "b")])
    assert alike.hardware.efficiency.error == 0.05
    twice = replace(true, gemm=0.3, attention=0.15, memory=0.25)
    apart = fit_calibration([run(job(), true, "a"), run(job(), twice, "b")])
    assert apart.hardware.efficiency.error == pytest.approx(0.94, abs=0.01)
    assert fit_calibration([run(job(), true)]).hardware.efficiency.error == 0.2


def test_runs_of_one_layout_do_not_tell_of_others() -> None:
    true = replace(TRUE, launch_ns=5000.0)
    same = fit_calibration([run(job(), true, "a"), run(job(), true, "b")])
    assert same.hardware.efficiency.error == 0.2


def test_runs_of_which_one_takes_over_three_times_what_the_other_predicts_are_refused() -> None:
    slow = replace(TRUE, gemm=0.2, attention=0.1, memory=0.1, launch_ns=24_000.0, host_ns=4.5e6)
    with pytest.raises(UsageError, match=r"contradict each other: .* 0.3 times the step of a;"):
        fit_calibration([run(job(), slow, "a"), run(job(), TRUE, "b")])


def lengthen(sample: CalibrationSample, times: float) -> CalibrationSample:
    """The run with steps that are so many times as long, by copies that no constant explains."""
    stages = []
    for stage in sample.stages:
        copy_ns = round((times - 1) * stage.step_ns)
        split = replace(stage.split, copy_ns=copy_ns)
        stages.append(replace(stage, split=split, step_ns=split.step_ns))
    return replace(sample, stages=tuple(stages))


def test_the_band_of_a_calibration_from_one_run_contains_the_run(tmp_path: Path) -> None:
    sample = lengthen(run(job(), replace(TRUE, launch_ns=5000.0)), 1.5)
    found = fit_calibration([sample])
    assert found.hardware.efficiency.error == pytest.approx(0.5, abs=0.02)
    (tmp_path / "mine.toml").write_text(format_hardware(found))
    text = JOB.format(parallel="tp = 2", framework="fsdp2", micro_batch=4)
    (tmp_path / "job.toml").write_text(text.replace('preset = "cpu"', 'file = "mine.toml"'))
    made = predict(read_job(tmp_path / "job.toml"))
    assert made.low_ns < sample.stages[0].step_ns <= made.high_ns


def test_one_run_that_no_constants_fit_is_refused() -> None:
    words = r"no constants fit one: the model predicts 0.28 times its step; .* --job"
    with pytest.raises(UsageError, match=words):
        fit_calibration([lengthen(run(job(), replace(TRUE, launch_ns=5000.0)), 3.5)])


def test_a_job_of_another_size_is_refused_before_a_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out = tmp_path / "other.toml", tmp_path / "mine.toml"
    other.write_text("[model]\nlayers = 40\nhidden = 4096\nheads = 32\nvocab = 32000\n")
    command = ["calibrate", str(SAMPLES / "tp2_pp2"), "--job", str(other), "--out", str(out)]
    assert cli.run(command) == 2
    assert capsys.readouterr().err.startswith("stepsplit: no constants fit tp2_pp2: the model pred")
    assert not out.exists()


def test_runs_on_different_hardware_are_refused() -> None:
    other = replace(job(), hardware=replace(load_hardware("cpu"), name="other"))
    with pytest.raises(UsageError, match="one ran on cpu, two on other"):
        fit_calibration([run(job(), TRUE), run(other, TRUE, "two")])


@pytest.mark.parametrize(
    ("sample", "preset", "ran_on"),
    [
        ("tp2_pp2", "h100-sxm", "cpu"),
        ("h100_pp2", "a100-sxm-80gb", "h100-sxm"),
        ("h100_pp2", "cpu", "h100-sxm"),
    ],
)
def test_stated_hardware_that_the_run_did_not_have_is_refused(
    sample: str, preset: str, ran_on: str, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text(f'[hardware]\npreset = "{preset}"\n')
    words = f"different hardware: {sample} ran on {ran_on}, .hardware. is {preset}; leave"
    with pytest.raises(UsageError, match=words):
        calibrate(SAMPLES / sample, job=tmp_path / "job.toml")


def test_another_device_of_the_family_is_a_caveat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Someone may mean it: a variant with fewer units, or limited power."""
    rest = tmp_path / "job.toml"
    rest.write_text('[hardware]\npreset = "h200-sxm"\n')
    assert cli.run(["calibrate", str(SAMPLES / "h100_pp2"), "--job", str(rest)]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "caveat: h100_pp2 ran on h100-sxm, [hardware] is h200-sxm:" in screen


@pytest.fixture
def found() -> Calibration:
    seen = transfers(links(bytes_per_s=5e9), 1024, 1 << 20)
    found = fit_calibration([run(job(), TRUE, 'a "b"', *seen)])
    return replace(found, hardware=replace(found.hardware, learned=MemoryCorrection(1.25, 1000)))


def test_the_file_holds_all_of_it(found: Calibration, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(format_hardware(found))
    text = JOB.format(parallel="dp = 2", framework="ddp", micro_batch=4)
    run_file = tmp_path / "job.toml"
    run_file.write_text(text.replace('preset = "cpu"', 'file = "mine.toml"'))
    made = read_job(run_file)
    read = made.hardware
    assert read.efficiency.rows == ('run:a "b"',)
    assert close(read.efficiency, found.hardware.efficiency)
    assert read.learned == MemoryCorrection(1.25, 1000)
    assert read.intra.bytes_per_s == pytest.approx(found.hardware.intra.bytes_per_s, rel=1e-5)
    rates = read_rates(run_file, read)
    assert rates.sweeps == tuple(
        replace(one, times_ns=tuple(map(round, one.times_ns))) for one in found.transfers
    )
    assert predict(made, rates).confidence == "calibrated"


def test_keys_next_to_the_file_override_its_values(found: Calibration, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(format_hardware(found))
    text = JOB.format(parallel="dp = 2", framework="ddp", micro_batch=4)
    beside = 'file = "mine.toml"\nname = "ours"\nefficiency.gemm = 0.11'
    (tmp_path / "job.toml").write_text(text.replace('preset = "cpu"', beside))
    read = read_job(tmp_path / "job.toml").hardware
    assert (read.name, read.efficiency.gemm) == ("ours", 0.11)
    assert read.efficiency.memory == pytest.approx(found.hardware.efficiency.memory, rel=1e-5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ('file = "nowhere.toml"', ["nowhere.toml", "check the path"]),
        ('file = "mine.toml"\npreset = "cpu"', ["hardware.preset", "remove one of them"]),
        ('file = "odd.toml"', ["odd.toml", "transfers[0]", "ascending"]),
    ],
)
def test_a_wrong_file_is_named(
    found: Calibration, tmp_path: Path, wrong: str, words: list[str]
) -> None:
    (tmp_path / "mine.toml").write_text(format_hardware(found))
    sizes = f"sizes_bytes = {list(found.transfers[0].sizes_bytes)}"
    odd = format_hardware(found).replace(sizes, "sizes_bytes = [9, 8]")
    (tmp_path / "odd.toml").write_text(odd)
    text = JOB.format(parallel="dp = 2", framework="ddp", micro_batch=4)
    (tmp_path / "job.toml").write_text(text.replace('preset = "cpu"', wrong))
    with pytest.raises(DataError) as raised:
        read_rates(tmp_path / "job.toml", read_job(tmp_path / "job.toml").hardware)
    assert all(word in str(raised.value) for word in words)


def test_json_holds_both_sides(found: Calibration) -> None:
    body = json.loads(to_json(found))
    assert body["schema"] == "stepsplit.calibration/1"
    assert body["known"]["efficiency"]["gemm"] == 0.7
    (stage,) = body["stages"]
    assert stage["measured"].keys() == stage["predicted"].keys()


def test_a_recording_without_a_full_step_is_refused(tmp_path: Path) -> None:
    CpuTrace().op("aten::mm", 0, 10).write(tmp_path)
    with pytest.raises((DataError, UsageError)):
        calibrate(tmp_path)


def test_calibrate_needs_a_run() -> None:
    with pytest.raises(UsageError, match="pass the folder"):
        calibrate()


def test_the_command_fits_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = tmp_path / "rest.toml"
    rest.write_text('[model]\nlearned_positions = true\nnorm = "rms"\nbiases = false\n')
    out = tmp_path / "mine.toml"
    sample = str(SAMPLES / "tp2_pp2")
    assert cli.run(["calibrate", sample, "--job", str(rest), "--out", str(out)]) == 0
    screen = capsys.readouterr().out
    assert "cpu calibrated from 1 run: " in screen
    assert "all_reduce" in screen
    assert f'file = "{out}"' in screen.replace("\n", "")
    assert "[[transfers]]" in out.read_text()


def test_attention_at_its_published_rate_is_said_in_words() -> None:
    """Of an H100 no fraction is stated; rates of recorded kernels replace the published ones."""
    kernels = build_kernels(0.7, 0.5, 4_000.0)
    for sample, now in (
        (run_on_gpu(), r"[1-9][\d.,]* [MGT]FLOP/s"),
        (replace(run_on_gpu(), kernels=kernels), "59[56] TFLOP/s"),
    ):
        screen = io.StringIO()
        shown = build_calibration_screen(fit_calibration([sample]), None)
        Console(width=100, file=screen).print(shown)
        assert re.search(rf"^attention +as published +{now}$", screen.getvalue(), re.M)


def test_the_command_prints_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["calibrate", str(SAMPLES / "pp2_m2"), "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [one["stage"] for one in body["stages"]] == [0, 1]


def test_attention_faster_than_the_gemms_of_a_cpu_is_refused() -> None:
    """As where only a part of its kernels has a name of attention: 1.9 TFLOP/s on two cores."""
    found = fit_calibration([replace(run(job(), replace(TRUE, attention=24.0)), cores=2)])
    true = replace(TRUE, launch_ns=known().launch_ns)
    assert close(found.hardware.efficiency, true, "attention")
    assert found.hardware.efficiency.attention == known().attention
    assert found.refused == (
        "attention: 1.92 TFLOP/s is above the GEMMs' 48.0 GFLOP/s; not all of its kernels are known"
        " as attention, or the job has more of it than ran",
    )


def test_a_rate_above_what_the_hardware_can_do_is_refused() -> None:
    cpu = fit_calibration([replace(run(job(), replace(TRUE, gemm=20.0)), cores=2)])
    assert cpu.hardware.efficiency.gemm == known().gemm
    assert cpu.refused[0].startswith("gemm: 1.59 TFLOP/s is above what 2 cores can do; the job")


def test_a_rate_above_the_peak_of_a_gpu_is_refused() -> None:
    half = replace(job().training, dtype="bf16")
    of = replace(job(), hardware=load_hardware("h100-sxm"), training=half)
    rates = replace(TRUE, gemm=1.4, attention=0.9)
    (refused,) = find_impossible_rates(rates, [run(of, TRUE)])
    assert refused.name == "gemm"
    assert refused.reason.startswith("1.39 PFLOP/s is above the peak of h100-sxm; the job has more")
    assert find_impossible_rates(replace(rates, gemm=1.05), [run(of, TRUE)]) == ()


def test_gemms_of_fp32_may_run_as_tf32() -> None:
    of = replace(job(), hardware=load_hardware("h100-sxm"))
    found = fit_calibration([run(of, replace(TRUE, gemm=5.0))])
    assert found.refused == ()
    assert (found.hardware.peak_flops_per_s("fp32") or 0) > 3 * 66.9e12


def run_large_gemms(dtype: Dtype, gemm: float, name: str = "one") -> CalibrationSample:
    """A run on an H100 with GEMMs at this fraction of the peak of its dtype."""
    device, small = load_hardware("h100-sxm"), job()
    of = replace(
        small,
        model=replace(small.model, hidden=8192, ffn=32768),
        training=replace(small.training, dtype=dtype, seq_len=2048),
        hardware=device,
    )
    return run(of, replace(device.efficiency, gemm=gemm, attention=0.3), name)


def test_gemms_of_fp32_that_ran_as_tf32_leave_other_dtypes_as_they_were() -> None:
    """They reach 0.98 of TF32's peak, 7.2 times that of fp32; bf16's was raised as much."""
    peaks = dict(load_hardware("h100-sxm").peaks_flops_per_s)
    fast = run_large_gemms("fp32", 7.2, "a")
    for runs in ([fast], [fast, run_large_gemms("bf16", 0.9, "b")]):
        found = fit_calibration(runs).hardware
        assert dict(found.peaks_flops_per_s) == peaks | {"fp32": peaks["tf32"]}
        assert 0.9 <= found.efficiency.gemm < 1.0


def test_a_gpu_above_the_peak_of_bf16_raises_that_of_fp16_alone() -> None:
    found = fit_calibration([run_large_gemms("bf16", 1.05)]).hardware
    peaks = load_hardware("h100-sxm").peaks_flops_per_s
    raised = {dtype: (found.peak_flops_per_s(dtype) or 0) / peak for dtype, peak in peaks}
    assert raised == pytest.approx(
        {"fp32": 1, "tf32": 1, "bf16": 1.05, "fp16": 1.05, "fp8": 1}, rel=0.01
    )


def test_quick_takes_no_recordings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["calibrate", "--quick", str(SAMPLES / "pp2_m2")]) == 2
    assert cli.run(["calibrate", str(SAMPLES / "pp2_m2"), "--ranks", "2"]) == 2
    assert capsys.readouterr().err == (
        "stepsplit: --quick takes no recordings; leave out one of them\n"
        "stepsplit: --ranks is for --quick; recordings have their own ranks\n"
    )
