"""What only a real GPU shows; the CUDA paths have tests with imitations in tests/collectors too."""

from __future__ import annotations

import gzip
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from stepsplit.analyzer import DataError, analyze  # noqa: E402
from stepsplit.analyzer.readers.recording import read_recording  # noqa: E402
from stepsplit.analyzer.report.report import Report  # noqa: E402
from stepsplit.analyzer.trace import Category, RankTrace  # noqa: E402
from stepsplit.analyzer.watch.records import WatchBatch, WatchSample, decode_batch  # noqa: E402
from stepsplit.collectors.formats.rank_record import RankRecord, read_record  # noqa: E402
from stepsplit.collectors.formats.watch_notes import RankWindow  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

SCRIPT = Path(__file__).with_name("training.py")
STEPS, FIRST, RECORDED = 40, 12, 4


@dataclass(frozen=True)
class Recorded:
    """A recorded training: its folder, and what it measured itself."""

    folder: Path
    seconds: list[float]
    peak_bytes: int
    history: int

    @property
    def record(self) -> RankRecord:
        return read_record((self.folder / "rank0_record.json").read_text())

    @property
    def report(self) -> Report:
        return analyze(self.folder)

    @property
    def trace(self) -> RankTrace:
        return read_recording([self.folder]).traces[0]


Record = Callable[..., Recorded]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Records a training of one mode, once for each mode, options and environment."""
    known: dict[Any, Recorded] = {}

    def run(mode: str, *options: str, **environment: str) -> Recorded:
        key = (mode, options, *sorted(environment.items()))
        if key not in known:
            known[key] = _record(tmp_path_factory.mktemp(mode), mode, options, environment)
        return known[key]

    return run


def _record(
    folder: Path, mode: str, options: tuple[str, ...], environment: dict[str, str]
) -> Recorded:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words = ["--out", str(folder / "run"), "--first", str(FIRST), "--steps", str(RECORDED)]
    done = subprocess.run(
        [sys.executable, "-m", "stepsplit.dashboard", "record", *words, *options, "--",
         sys.executable, *launch, str(SCRIPT), mode, str(STEPS)],
        env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    measured = next(line for line in done.stdout.splitlines() if '"peak_bytes"' in line)
    return Recorded(folder / "run", **json.loads(measured[measured.index("{") :]))


@pytest.fixture
def plain(record: Record) -> Recorded:
    return record("plain", "--memory")


@pytest.mark.gpu("00 steps: buckets add up, and steps on the device take as long as they do")
def test_steps(plain: Recorded) -> None:
    rows = plain.report.steps
    # The host runs ahead: kernels of the step before still run at the begin of the recording.
    assert [row.kind for row in rows[1:]] == ["full"] * (RECORDED - 1)
    assert all(sum(row.split.buckets_ns) == row.step_ns for row in rows)
    own_ns = 1e9 * statistics.median(plain.seconds[FIRST + 1 : FIRST + RECORDED])
    full_ns = [row.step_ns for row in rows if row.kind == "full"]
    assert statistics.median(full_ns) == pytest.approx(own_ns, rel=0.05)


@pytest.mark.gpu("00 order: kernels follow their launches, and those of a stream each other")
def test_launches_and_stream_order(plain: Recorded) -> None:
    events = plain.trace.events
    kernels = np.flatnonzero(events.is_category(Category.KERNEL))
    kernels = kernels[~events.is_launched_before(kernels)]
    launches = events.find_launches(kernels)
    known = launches >= 0
    assert known.mean() > 0.99
    assert (events.start_ns[kernels[known]] >= events.start_ns[launches[known]]).all()
    for lane in np.unique(events.lane[kernels]).tolist():
        rows = kernels[events.lane[kernels] == lane]
        rows = rows[np.argsort(events.start_ns[rows], kind="stable")]
        overlap_ns = events.end_ns[rows[:-1]] - events.start_ns[rows[1:]]
        assert overlap_ns.max(initial=0) <= 2_000


@pytest.mark.gpu("01 Kineto's buffers full: the recording ends, its last step is partial")
def test_full_buffers(record: Record, tmp_path: Path) -> None:
    if getattr(torch.autograd, "_is_kineto_stopped", None) is None:
        pytest.skip("this torch cannot tell whether Kineto stopped")
    config = tmp_path / "kineto.conf"
    config.write_text("ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=8\n")
    found = record("bursts", KINETO_CONFIG=str(config))
    assert found.record.device_stopped_step is not None
    assert found.report.steps[-1].kind == "partial"


@pytest.mark.gpu("02 a CUDA trace without kernels is refused")
def test_no_device_activity(tmp_path: Path) -> None:
    work = torch.randn(64, 64, device="cuda")
    only = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=only, acc_events=True) as profiler:
        (work @ work).sum().item()
    profiler.export_chrome_trace(str(tmp_path / "rank0_trace.json"))
    body = json.loads((tmp_path / "rank0_trace.json").read_text())
    body["distributedInfo"] = {"backend": "nccl", "rank": 0, "world_size": 1}
    (tmp_path / "rank0_trace.json").write_text(json.dumps(body))
    with pytest.raises(DataError, match="device activity was not recorded"):
        analyze(tmp_path)


@pytest.mark.gpu("02 no launch of a whole recording counts as lost")
def test_lost_launches(plain: Recorded) -> None:
    assert not {w.code for w in plain.report.warnings} & {"device_work_cut", "device_work_lost"}


@pytest.mark.gpu("03 the Flight Recorder of NCCL is saved")
def test_flight_recorder(plain: Recorded) -> None:
    with gzip.open(plain.folder / "rank0_flight.json.gz") as file:
        entries = json.load(file)["entries"]
    assert sum(entry["profiling_name"].startswith("nccl:") for entry in entries) >= 8 * RECORDED


@pytest.mark.gpu("04 replays of a CUDA graph are compute, and no launch of it counts as lost")
def test_graphs(record: Record) -> None:
    plain, graph = record("plain", "--memory"), record("graph")
    more_ns = sum(r.compute_ns for r in graph.report.steps) - sum(
        r.compute_ns for r in plain.report.steps
    )
    assert more_ns > 0
    assert "device_work_lost" not in {w.code for w in graph.report.warnings}


@pytest.mark.gpu("05 RCCL's kernels")
def test_rccl() -> None:
    if torch.version.hip is None:
        pytest.skip("not an AMD GPU")
    pytest.skip("no test for AMD GPUs yet")


@pytest.mark.gpu("05 clocks and throttling by NVML, or why there are none")
def test_nvml(plain: Recorded) -> None:
    record = plain.record
    assert record.gpu_note or (len(record.gpu) == 2 and record.gpu[0].sm_clock_mhz)


@pytest.mark.gpu("06 a step ends with the last of its streams")
def test_streams(record: Record) -> None:
    trace, report = record("streams").trace, record("streams").report
    compute = np.flatnonzero(trace.kinds.computes)
    assert len(np.unique(trace.events.lane[compute])) >= 2
    within = [row.compute_ns for row in report.steps[1:]]
    alone = [row.compute_ns for row in record("plain", "--memory").report.steps[1:]]
    assert statistics.median(within) > statistics.median(alone)


@pytest.mark.gpu("06 several devices in one process")
def test_several_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    pytest.skip("no test for several GPUs yet")


@pytest.mark.gpu("07 times of steps by CUDA events agree with the synchronized ones")
def test_step_times_on_the_gpu(plain: Recorded) -> None:
    own_ns = 1e9 * statistics.median(plain.seconds[FIRST + RECORDED + 4 :])
    times = plain.record.steps
    assert statistics.median(times.gpu_after_ns) == pytest.approx(own_ns, rel=0.05)


@pytest.mark.gpu("08 steps after the profiler are as fast as before")
def test_cost_of_the_profiler(plain: Recorded) -> None:
    before, after = plain.seconds[4 : FIRST - 2], plain.seconds[FIRST + RECORDED + 4 :]
    assert statistics.median(after) <= 1.05 * statistics.median(before)
    assert plain.report.run.profiling_slowdown is not None


@pytest.mark.gpu("09 the allocator's snapshot and peaks")
def test_memory(plain: Recorded) -> None:
    assert list((plain.folder / "memory").iterdir())
    memory = plain.record.memory
    assert memory is not None and memory.peak_allocated_bytes == plain.peak_bytes
    weights = 8 * 4096 * 4096 * 2
    assert (memory.weights_bytes, memory.optimizer_bytes) == (weights, pytest.approx(2 * weights))


@pytest.mark.gpu("09 a memory history of the training itself goes on")
def test_history_of_the_training(record: Record) -> None:
    assert record("history", "--memory").history > 0


@pytest.mark.gpu("11 activations are those of the GPU")
def test_activations(plain: Recorded) -> None:
    memory = plain.record.memory
    assert memory is not None and memory.activations_bytes is not None
    assert memory.activations_bytes >= 8 * 4096 * 4096 * 2


@pytest.mark.gpu("13 versions of CUDA and NCCL are recorded")
def test_versions(plain: Recorded) -> None:
    assert {"torch", "cuda", "nccl"} <= dict(plain.record.versions).keys()


# A watched training: samples of one process, one after the other.


@dataclass(frozen=True)
class Watched:
    """A watched training: its folder and its batches."""

    folder: Path
    batches: tuple[WatchBatch, ...]

    @property
    def samples(self) -> list[WatchSample]:
        return [sample for batch in self.batches for sample in batch.samples]

    @property
    def windows(self) -> list[RankWindow]:
        return [window for batch in self.batches for window in batch.windows]

    @property
    def traces(self) -> list[RankTrace]:
        return [read_recording([self.folder / s.traces]).traces[0] for s in self.samples]


Watch = Callable[[str], Watched]


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Watches a training of one mode, once for each mode."""
    known: dict[str, Watched] = {}

    def run(mode: str) -> Watched:
        if mode not in known:
            known[mode] = _watch(tmp_path_factory.mktemp(mode) / "run", mode)
        return known[mode]

    return run


def _watch(folder: Path, mode: str) -> Watched:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words = ["--out", str(folder), "--every", "100steps", "--budget", "50"]
    done = subprocess.run(
        [sys.executable, "-m", "stepsplit.dashboard", "watch", *words, "--",
         sys.executable, *launch, str(SCRIPT), mode, "2000"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (folder / "hosts").glob("*.jsonl")
    lines = path.read_bytes().splitlines()
    return Watched(folder, tuple(decode_batch(line, str(path)) for line in lines))


@pytest.mark.gpu("14 watch: every sample counts and has the kernels of the first one")
def test_kernels_of_all_samples(watch: Watch) -> None:
    """CUPTI of CUDA 12.6 to 13.0 breaks more kernel records from session to session
    (pytorch/pytorch#192021)."""
    found = watch("plain")
    assert len(found.samples) >= 5
    assert {sample.no_data for sample in found.samples} == {""}
    assert len({count_kernels(trace) for trace in found.traces}) == 1


def count_kernels(trace: RankTrace) -> int:
    """The kernels that the host launched in the recorded steps."""
    kernels = np.flatnonzero(trace.events.is_category(Category.KERNEL))
    return int((~trace.events.is_launched_before(kernels)).sum())


@pytest.mark.gpu("14 watch: kernels keep their distance from their launches")
def test_clocks_of_all_samples(watch: Watch) -> None:
    """Device times may move from profile to profile of a process (pytorch/pytorch#175790)."""
    least_ns = []
    for trace in watch("plain").traces:
        kernels = np.flatnonzero(trace.events.is_category(Category.KERNEL))
        launches = trace.events.find_launches(kernels)
        known = launches >= 0
        gap_ns = trace.events.start_ns[kernels[known]] - trace.events.start_ns[launches[known]]
        least_ns.append(int(gap_ns.min()))
    assert min(least_ns) >= 0
    assert max(least_ns) - min(least_ns) < 100_000


@pytest.mark.gpu("14 watch: steps are as fast after the first sample as before")
def test_steps_after_the_first_sample(watch: Watch) -> None:
    found = watch("plain")
    first = found.samples[0].step
    before, after = (
        [w.median_step_ns for w in found.windows if (w.first_step > first) == is_after]
        for is_after in (False, True)
    )
    assert statistics.median(after) <= 1.05 * statistics.median(before[1:])
    assert not [e for batch in found.batches for e in batch.events if e.kind == "sampling_ended"]


@pytest.mark.gpu("14 watch: the last gradient is ready within the step, by CUDA events")
def test_local_times(watch: Watch) -> None:
    windows = watch("plain").windows[1:]
    assert all(0.1 < w.local_ns / w.median_step_ns <= 1.05 for w in windows)


@pytest.mark.gpu("14 watch: a CUDA graph that is captured between samples leaves device activity")
def test_graph_between_samples(watch: Watch) -> None:
    """A session before the capture left a process without device activity elsewhere."""
    found = watch("late_graph")
    later = [sample for sample in found.samples if sample.step > 200]
    assert len(later) >= 5
    assert {sample.no_data for sample in found.samples} == {""}
