"""A recording carried to other hardware, compared with the run there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_simulator.jobs import Job
from cuda_simulator.simulate import simulate
from support.builders import GpuTrace

from stepsplit.analyzer import CarriedRun, what_if
from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard import cli

SAMPLES = Path(__file__).parents[2] / "sample_traces"
PUBLIC = Path(__file__).parents[3] / "shared/traces/kineto_tracelens"
PEAKS = {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 66.9e12, "tf32": 494.7e12}


def write_device(folder: Path, times: float, link: str = "nvlink-4") -> str:
    """A file of hardware whose kernels are so many times as fast as on H100."""
    path = folder / f"times_{times:g}.toml"
    peaks = "\n".join(f"{dtype} = {peak * times}" for dtype, peak in PEAKS.items())
    path.write_text(
        f'name = "times {times:g}"\nfamily = "hopper"\nmemory_bytes = 85520809984\n'
        f"memory_bytes_per_s = {3.35e12 * times}\ngpus_per_node = 8\nmultiprocessors = 132\n"
        f'intra = "{link}"\nnodes_link = "ib-ndr-400"\nhost = "host-pcie-5"\n[peaks]\n{peaks}\n'
    )
    return str(path)


def carry(folder: Path, times: float) -> CarriedRun:
    found = what_if(
        folder / "run",
        hardware=write_device(folder, times),
        recorded_on=write_device(folder, 1),
    )
    assert found.carried is not None
    return found.carried


LARGE_LAYER_NS = 5_000_000
"""So that the fixed part of a kernel's time does not matter."""


@pytest.mark.parametrize("job", [
    Job("tp2_pp2", tp=2, pp=2, layers=1, microbatches=4),
    Job("fsdp2", dp=2, fsdp=True, layers=4, microbatches=8),
    Job("pp2", pp=2, layers=4, microbatches=4),
])  # fmt: skip
@pytest.mark.parametrize("times", [4.0, 0.5])
def test_the_carried_step_is_that_of_the_job_on_that_device(
    job: Job, times: float, tmp_path: Path
) -> None:
    """The simulator runs the job again with its compute so many times as fast; its host and
    transfers stay. At 4 times the launch queue, full in the recording, limits nothing any more."""
    job = replace(job, layer_ns=LARGE_LAYER_NS)
    there = replace(
        job, layer_ns=int(job.layer_ns / times), optimizer_ns=int(job.optimizer_ns / times)
    )
    (tmp_path / "run").mkdir()
    simulate(job).write(tmp_path / "run")
    found = carry(tmp_path, times)
    assert found.step_ns == pytest.approx(simulate(there).step_ns, rel=0.02)
    assert found.low_ns < found.step_ns < found.high_ns


def test_gradients_that_were_overlapped_are_exposed_on_a_faster_device(tmp_path: Path) -> None:
    """All reductions are hidden behind the backward as recorded, and longer than the carried
    one."""
    job = Job(
        "dp4", dp=4, layers=2, microbatches=1, layer_ns=LARGE_LAYER_NS, buckets=8,
        bucket_ns=12_000_000,
    )  # fmt: skip
    there = replace(job, layer_ns=job.layer_ns // 8, optimizer_ns=job.optimizer_ns // 8)
    (tmp_path / "run").mkdir()
    simulate(job).write(tmp_path / "run")
    found = carry(tmp_path, 8)
    assert found.communication_ns > 0.5 * found.step_ns
    assert found.step_ns == pytest.approx(simulate(there).step_ns, rel=0.1)


@pytest.mark.parametrize("sample", ["tp2_pp2", "dp4"])
def test_on_its_own_hardware_a_recording_keeps_its_step(sample: str) -> None:
    found = what_if(SAMPLES / sample, hardware="cpu")
    assert found.carried is not None
    assert found.carried.step_ns == pytest.approx(found.step_ns, rel=1e-4)
    assert (found.carried.low_ns, found.carried.high_ns) == (found.carried.step_ns,) * 2
    assert found.changes == ()


def write_launches(folder: Path, every: int, took: int, launched_every: int) -> None:
    """100 GEMMs on one rank; the host needs launched_every us for each."""
    trace = GpuTrace().step(1, 0, 100 * every)
    for i in range(100):
        start = every * i + 10
        trace.kernel("sm90_gemm_bf16", start, start + took, launched=launched_every * i)
    (folder / "run").mkdir()
    trace.write(folder / "run")


def test_a_host_bound_step_does_not_get_faster(tmp_path: Path) -> None:
    """Kernels of 50 us are launched every 200 us: 4 times the speed saves only the last one's
    time, and the screen says what bounds the step."""
    write_launches(tmp_path, every=200, took=50, launched_every=200)
    found = carry(tmp_path, 4)
    recorded_ns = 100 * 200_000
    assert recorded_ns - 50_000 < found.step_ns < recorded_ns
    assert found.host_ns == pytest.approx(found.step_ns, rel=0.01)
    assert "the host launches no faster there" in found.limits[0]


def test_a_host_bound_step_becomes_device_bound_on_a_slow_device(tmp_path: Path) -> None:
    """At a tenth of the speed the kernels of 50 us take 5 + 450 us and run back to back."""
    write_launches(tmp_path, every=200, took=50, launched_every=200)
    found = carry(tmp_path, 0.1)
    assert found.step_ns == pytest.approx(100 * 455_000 + 100 * 1_000, rel=0.01)
    assert found.idle_ns < 0.01 * found.step_ns


def test_a_host_that_waits_for_the_device_waits_less_on_a_faster_one(tmp_path: Path) -> None:
    """Ten times: the host launches a kernel of 1 ms, and synchronizes before the next."""
    trace = GpuTrace().step(1, 0, 11_000)
    for i in range(10):
        at = 1_100 * i
        trace.kernel("sm90_gemm_bf16", at + 10, at + 1_010, launched=at)
        trace.synchronize_device(at + 5, at + 1_020)
    (tmp_path / "run").mkdir()
    trace.write(tmp_path / "run")
    kernel_us = 5 + 995 / 2
    assert carry(tmp_path, 2).step_ns == pytest.approx(1e3 * 10 * (100 + kernel_us), rel=0.01)


def test_shapes_decide_the_rate_of_a_kernel(tmp_path: Path) -> None:
    """A GEMM with few rows is limited by memory: twice the FLOP/s do not help it."""
    shapes = {"Input Dims": [[4, 8192], [8192, 8192]], "Input type": ["c10::BFloat16"] * 2}
    trace = GpuTrace().step(1, 0, 1_100)
    trace.op("aten::mm", 0, 5, **shapes)
    trace.kernel("sm90_gemm_bf16", 10, 1_010, launched=2)
    (tmp_path / "run").mkdir()
    trace.write(tmp_path / "run")
    found = carry(tmp_path, 2)
    [kernels] = found.kernels
    assert (kernels.kind, kernels.count, kernels.by_shape) == ("gemm", 1, 1.0)
    fast = tmp_path / "flops.toml"
    text = Path(write_device(tmp_path, 2)).read_text().replace("6700000000000.0", "3350000000000.0")
    fast.write_text(text)
    by_flops = what_if(
        tmp_path / "run", hardware=str(fast), recorded_on=write_device(tmp_path, 1)
    ).carried
    assert by_flops is not None
    assert by_flops.kernels[0].carried_ns > 0.95 * kernels.recorded_ns
    assert kernels.carried_ns == pytest.approx(kernels.recorded_ns / 2, rel=0.02)


def test_a_link_changes_the_transfers_of_its_axis(tmp_path: Path) -> None:
    """tp over a link of twice the rate; dp keeps its own."""
    job = Job("tp2_dp2", tp=2, dp=2, layers=1, microbatches=2)
    (tmp_path / "run").mkdir()
    simulate(job).write(tmp_path / "run")
    source = write_device(tmp_path, 1)
    found = what_if(tmp_path / "run", links=["tp=nvlink5"], recorded_on=source).carried
    assert found is not None
    assert found.target == "times 1, tp over nvlink-5"
    calls = {row.axis: row for row in found.calls}
    assert calls["tp"].carried_ns < 0.8 * calls["tp"].recorded_ns
    assert calls["dp_replicate"].carried_ns == calls["dp_replicate"].recorded_ns
    kernels = sum(row.carried_ns - row.recorded_ns for row in found.kernels)
    assert kernels == 0
    short = what_if(tmp_path / "run", links=["dp=nvlink5"], recorded_on=source).carried
    assert short is not None
    assert short.target == "times 1, dp_replicate over nvlink-5"


def test_groups_that_fit_in_a_larger_node_use_its_links(tmp_path: Path) -> None:
    """Four ranks on two hosts: with 72 GPUs a node, dp no longer crosses the network."""
    groups = [("0", "DATA_PARALLEL_GROUP", list(range(4)))]
    (tmp_path / "run").mkdir()
    for rank in range(4):
        trace = GpuTrace(rank, 4, host=f"host{rank // 2}", groups=groups).step(1, 0, 12_000)
        trace.kernel("sm90_gemm_bf16", 0, 1_000)
        trace.all_reduce(1_000, 11_000, nelems=250_000_000).kernel("adam", 11_010, 11_020)
        trace.write(tmp_path / "run")
    source = write_device(tmp_path, 1)
    found = what_if(tmp_path / "run", gpus_per_node=72, recorded_on=source).carried
    assert found is not None
    [calls] = found.calls
    assert calls.recorded_ns == 10_000_000
    assert calls.carried_ns < calls.recorded_ns / 2


@pytest.mark.parametrize(("options", "words"), [
    (["--hardware", "h100"], "unknown hardware preset 'h100'"),
    (["--hardware", "b200-sxm"], "'Test GPU' has no hardware preset; say what it is with"),
    (["--hardware", "cpu", "--recorded-on", "h100-sxm"], "cannot be carried to cpu"),
    (["--recorded-on", "h100-sxm"], "recorded_on needs hardware"),
    (["--gpus-per-node", "8"], "'Test GPU' has no hardware preset"),
    (["--link", "tp", "--recorded-on", "h100-sxm"], "--link 'tp' is not AXIS=PRESET"),
    (["--link", "tp=nvlink-5", "--recorded-on", "h100-sxm"], "no communication on 'tp'"),
    (["--link", "all=nvlink-9", "--recorded-on", "h100-sxm"], "unknown link 'nvlink-9'"),
])  # fmt: skip
def test_what_cannot_be_carried_is_refused_in_a_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 10).write(tmp_path)
    assert cli.run(["what-if", str(trace), *options]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_a_recording_on_a_cpu_is_of_no_gpu() -> None:
    with pytest.raises(UsageError, match="recorded on a CPU, not on h100-sxm"):
        what_if(SAMPLES / "tp2_pp2", hardware="b200-sxm", recorded_on="h100-sxm")


def test_the_carried_step_is_on_the_screen_and_in_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_launches(tmp_path, every=200, took=50, launched_every=200)
    words = ["what-if", str(tmp_path / "run"), "--hardware", "b200-sxm"]
    words += ["--recorded-on", "h100-sxm"]
    assert cli.run(words) == 0
    shown = capsys.readouterr().out
    assert "carried from h100-sxm to b200-sxm" in shown
    assert "band" in shown
    assert cli.run([*words, "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["carried"]["low_ns"] < body["carried"]["step_ns"] < body["carried"]["high_ns"]
    assert body["carried"]["kernels"][0]["kind"] == "gemm"


@pytest.mark.parametrize(
    "model", ["Qwen_Qwen1.5-0.5B-Chat__1016005", "gaunernst_bert-small-uncased__1016001"]
)
@pytest.mark.parametrize(
    ("here", "there", "preset"), [("h100", "mi300", "mi300x"), ("mi300", "h100", "h100-sxm")]
)
def test_public_recordings_of_one_model_on_two_devices(
    model: str, here: str, there: str, preset: str
) -> None:
    """TraceLens' recordings of inference on H100 and MI300X: the step of the other lies in the
    band."""
    if not PUBLIC.is_dir():
        pytest.skip("the public recordings are not here")
    found = what_if(PUBLIC / f"{here}__{model}.json.gz", hardware=preset).carried
    measured_ns = what_if(PUBLIC / f"{there}__{model}.json.gz", changes=["no-idle"]).step_ns
    assert found is not None
    assert found.low_ns < measured_ns < found.high_ns
    assert found.step_ns == pytest.approx(measured_ns, rel=0.21)
