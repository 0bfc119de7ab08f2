"""Compute, overlap and idle as HolisticTraceAnalysis counts them, by its loader and ours."""

from __future__ import annotations

import dataclasses
import gzip
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace
from support.required import SHARED_TRACES, absent, shared_trace
from support.splitting import recording_of

from stepsplit.analyzer import RankTrace, analyze
from stepsplit.analyzer.arrays import Intervals, make_empty_intervals, overlap_ns, subtract, union
from stepsplit.analyzer.buckets import Bucket
from stepsplit.analyzer.hta import convert_to_hta, open_in_hta
from stepsplit.analyzer.split.attribute import attribute
from stepsplit.analyzer.split.gaps import HeldGaps
from stepsplit.analyzer.split.steps import StepWindow
from stepsplit.analyzer.split.transfers import Pieces
from stepsplit.analyzer.split.work import collect_work
from stepsplit.analyzer.trace import DEVICE_CATEGORIES

if TYPE_CHECKING:
    from hta.trace_analysis import TraceAnalysis

OF_HTA = (
    "The inplace keyword",
    "The 'lsuffix' and 'rsuffix' keywords",
    "'ndarray' is not supported as a fill value",
    "invalid value encountered in scalar divide",
)
"""Its own warnings: for pandas 3, and where a rank has no communication."""
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in OF_HTA]
NO_DEVICE = ("cpu_only", "cupti_profiler", "distributed_info", "rank_unavailable", "large_integer")
UNREADABLE = {
    "kineto_pytorch_samples/resnet50_num_workers_0__2d19c6__worker0.pt.trace.json.gz":
        AttributeError,  # a bare list of events
    "kineto_tracelens/mi300__resnet_act_checkpoint.json.gz": TypeError,
    "kineto_tracelens/torch_compile_triton__trace.json.gz": TypeError,  # with pandas 3
}  # fmt: skip
"""What HTA's loader raises for."""
SYNC, TRITON = (
    "kineto_hta/critical_path__alexnet__benchmark_result_2869224_1695835535_trace.json.gz",
    "kineto_hta/triton_example__triton_example.json.gz",
)
QWEN = "kineto_tracelens/h100__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"
RESNET = "kineto_tracelens/mi300__resnet_act_checkpoint.json.gz"
QUICK = (
    QWEN, TRITON, "kineto_hta/trace_filter__sampled_rank-0.json.gz",
    "kineto_megatron_tp2_v100/rank0.9c44bd29b3f0_1375.1724066820235157909.pt.trace.json",
)  # fmt: skip
"""HTA takes seconds for each other trace."""
SLOW_IN_TURN = (
    pytest.mark.slow, pytest.mark.in_turn("analyzer/hta.py", "analyzer/readers/kineto"),
)  # fmt: skip
DEVICE_NAMES = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")


@pytest.fixture(autouse=True)
def rounding_off() -> Iterator[None]:
    """HTA's own loader keeps what is shorter than a microsecond."""
    if find_spec("hta") is None:
        absent("hta", "HolisticTraceAnalysis is not installed")
    from hta.configs.env_options import HTAEnvOptions

    HTAEnvOptions.instance().set_disable_ns_rounding(True)
    yield
    HTAEnvOptions.instance().set_disable_ns_rounding(False)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One rank as HTA breaks it down, over its window from the first kernel to the last.

    idle is where nothing runs at all; rest is communication and copies outside of compute.
    """

    compute_us: float
    idle_us: float
    rest_us: float

    def close(self, other: Breakdown, within_us: float) -> bool:
        mine, its = np.array(self.row), np.array(other.row)
        return bool((np.abs(mine - its) <= within_us).all())

    @property
    def row(self) -> tuple[float, float, float]:
        return self.compute_us, self.idle_us, self.rest_us


def of_hta(analysis: TraceAnalysis) -> Breakdown:
    """HTA's temporal breakdown of the first rank."""
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    names = ("compute_time(us)", "idle_time(us)", "non_compute_time(us)")
    return Breakdown(*(float(row[name]) for name in names))


def communication_of(trace: RankTrace) -> Intervals:
    events, rows = trace.events, trace.calls.event
    return union(events.start_ns[rows], events.end_ns[rows])


def of_stepsplit(trace: RankTrace) -> Breakdown:
    """The rank's whole window as one step, split as every step is.

    For HTA a gap under communication is busy, whenever that ends. The split counts only blocking
    communication, so it gets none here, and communication is subtracted from its idle time.
    """
    events = trace.events
    rows = events.is_category(*DEVICE_CATEGORIES)
    window = StepWindow(0, "full", int(events.start_ns[rows].min()), int(events.end_ns[rows].max()))
    found = attribute([window], collect_work(trace), _no_pieces(), _no_held_gaps())
    nothing = found.band.bucket == Bucket.IDLE
    idle = Intervals(found.band.start_ns[nothing], found.band.end_ns[nothing])
    idle_ns = subtract(idle, communication_of(trace)).total_ns
    compute_ns = found.splits[0].compute_ns
    rest_ns = window.end_ns - window.start_ns - compute_ns - idle_ns
    return Breakdown(compute_ns / 1000, idle_ns / 1000, rest_ns / 1000)


def _no_pieces() -> Pieces:
    none = np.empty(0, dtype=np.int64)
    return Pieces(none.astype(np.int32), none.astype(np.uint8), none, none, none,
                  none.astype(np.int32))  # fmt: skip


def _no_held_gaps() -> HeldGaps:
    none, no = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    return HeldGaps(none, none, none, none, none, no, make_empty_intervals())


def real_traces() -> list[Any]:
    """Every shared trace with work of a device that HTA counts as such."""
    files = sorted(SHARED_TRACES.glob("kineto_*/*json*"))
    named = [file.relative_to(SHARED_TRACES).as_posix() for file in files]
    chosen = [n for n in named if "pytorch_et" not in n and not any(x in n for x in NO_DEVICE)]
    return [
        pytest.param(name, id=name[7:50], marks=() if name in QUICK else SLOW_IN_TURN)
        for name in chosen
    ]


@cache
def trace_of(name: str) -> RankTrace:
    """The one rank in a shared file."""
    folder, _, file = name.partition("/")
    return recording_of(shared_trace(folder) / file).traces[0]


def loaded_by_hta(name: str, folder: Path, mark: str = "Profiled") -> TraceAnalysis:
    """A shared file by HTA's own loader, its steps marked otherwise, so that it drops none."""
    from hta.trace_analysis import TraceAnalysis

    file = SHARED_TRACES / name
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    copy = folder / f"{file.name.partition('.json')[0]}.json"
    copy.write_bytes(text.replace(b"ProfilerStep#", f"{mark}Step#".encode()))
    return TraceAnalysis(trace_files={0: str(copy)})


def without_other_work(analysis: TraceAnalysis) -> TraceAnalysis:
    """Without what HTA takes for work of the device because it names a stream."""
    frame, symbols = analysis.t.traces[0], analysis.t.symbol_table.get_sym_table()
    work = [i for i, symbol in enumerate(symbols) if symbol.lower() in DEVICE_NAMES]
    analysis.t.traces[0] = frame[frame["stream"].eq(-1) | frame["cat"].isin(work)]
    return analysis


def in_one_step(trace: RankTrace) -> RankTrace:
    """The trace without marks of steps, of which HTA would drop the last."""
    names = tuple(name.replace("ProfilerStep#", "ProfiledStep#") for name in trace.events.names)
    return replace(trace, events=dataclasses.replace(trace.events, names=names))


def in_whole_us(trace: RankTrace) -> bool:
    return not (trace.events.start_ns % 1000).any() and not (trace.events.dur_ns % 1000).any()


def traces_for_htas_loader() -> list[Any]:
    return [one for one in real_traces() if one.values[0] not in UNREADABLE]


@pytest.mark.parametrize("name", traces_for_htas_loader())
def test_compute_idle_and_overlap_are_htas(name: str, tmp_path: Path) -> None:
    """To the microsecond, since HTA holds a time of today in a float; else to the last digit."""
    trace, theirs = trace_of(name), without_other_work(loaded_by_hta(name, tmp_path))
    assert of_stepsplit(trace).close(of_hta(theirs), 0 if in_whole_us(trace) else 1)
    communication = communication_of(trace)
    covered = overlap_ns(communication, collect_work(trace).compute)
    share = 100 * covered / communication.total_ns if len(communication) else math.nan
    percent = theirs.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].iloc[0]
    assert percent == pytest.approx(share, abs=0.01, nan_ok=True)


@pytest.mark.parametrize("name", real_traces())
def test_compute_idle_and_copies_are_htas_through_the_bridge(name: str) -> None:
    """Compute and idle to the nanosecond; memory is copies outside of compute and communication.

    HTA cuts each stretch of memory to whole microseconds, so elsewhere the sums are smaller."""
    trace = in_one_step(trace_of(name))
    handed = convert_to_hta([trace])
    assert of_hta(handed).close(of_stepsplit(trace_of(name)), 0.0005)
    work, communication = collect_work(trace), communication_of(trace)
    bare = subtract(subtract(work.copy, work.compute), communication)
    kinds = handed.get_gpu_kernel_breakdown(visualize=False)[0].set_index("kernel_type")
    theirs = int(kinds["sum"].get("MEMORY", 0)) * 1000
    lost = 0 if in_whole_us(trace) else 1000 * (2 * len(work.copy) + len(communication) + 1)
    assert 0 <= bare.total_ns - theirs <= lost


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/hta.py", "analyzer/readers/kineto")
@pytest.mark.parametrize(("name", "error"), UNREADABLE.items(), ids=lambda x: str(x)[:40])
def test_what_htas_loader_raises_for_is_handed_over(
    name: str, error: type[Exception], tmp_path: Path
) -> None:
    trace = trace_of(name)
    with pytest.raises(error):
        loaded_by_hta(name, tmp_path)
    assert of_hta(convert_to_hta([trace])).compute_us > 0


@pytest.mark.parametrize(
    ("name", "as_loaded_us", "work_us"),
    [
        pytest.param(SYNC, 12_996_011, 12_920_244, id="cuda_sync", marks=SLOW_IN_TURN),
        pytest.param(TRITON, 95.812, 1.76, id="triton"),
    ],
)
def test_hta_takes_waits_and_ops_with_a_stream_for_kernels(
    name: str, as_loaded_us: float, work_us: float, tmp_path: Path
) -> None:
    """Its window and its idle time are then those of the waits; the bridge hands none over."""
    trace = trace_of(name)
    as_loaded = sum(of_hta(loaded_by_hta(name, tmp_path)).row)
    assert as_loaded == pytest.approx(as_loaded_us, abs=1)
    assert sum(of_hta(convert_to_hta([trace])).row) == pytest.approx(work_us, abs=0.001)
    assert sum(of_stepsplit(trace).row) == pytest.approx(work_us, abs=0.001)


def test_htas_rounding_breaks_it_and_the_bridge_does_not_round(tmp_path: Path) -> None:
    from hta.configs.env_options import HTAEnvOptions

    trace = trace_of(QWEN)
    HTAEnvOptions.instance().set_disable_ns_rounding(False)
    with pytest.raises(AssertionError):
        of_hta(loaded_by_hta(QWEN, tmp_path))
    assert of_hta(convert_to_hta([trace])).close(of_stepsplit(trace), 0.0005)


def test_hta_drops_kernels_of_earlier_steps_where_several_are_marked() -> None:
    """968 of 3,653 were launched before the trace began: a quarter of the time that is compute."""
    trace = trace_of(RESNET)
    analysis = convert_to_hta([trace])
    kept = analysis.t.get_trace(0).query("stream != -1")
    assert (int(trace.events.is_category(*DEVICE_CATEGORIES).sum()), len(kept)) == (3653, 2685)
    assert of_hta(analysis).compute_us == pytest.approx(19_234.094, abs=0.001)
    assert of_stepsplit(trace).compute_us == pytest.approx(25_739.303, abs=0.001)


def test_kernels_on_stream_0_are_of_the_step_that_launched_them() -> None:
    """HTA's loader gives 2,673 of these no step: it takes AMD's default stream for none."""
    kept = convert_to_hta([trace_of(RESNET)]).t.get_trace(0).query("stream != -1")
    assert kept["iteration"].value_counts().to_dict() == {15: 895, 16: 895, 17: 895}


BOTH_WAYS = (
    "kineto_hta/nccl_parser_config__nccl_data.json.gz",
    "kineto_hta/trace_filter__sampled_rank-0.json.gz",
    "kineto_megatron_tp2_v100/rank0.9c44bd29b3f0_1375.1724066820235157909.pt.trace.json",
)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=SLOW_IN_TURN) for name in BOTH_WAYS[:2]), BOTH_WAYS[2]],
    ids=lambda name: name[7:50],
)  # fmt: skip
def test_hta_gives_the_same_results_for_its_own_and_for_bridged_data(
    name: str, tmp_path: Path
) -> None:
    """As marked, so that its own choice of steps and kernels is made both ways."""
    handed, loaded = (
        convert_to_hta([replace(trace_of(name), rank=0)]),
        loaded_by_hta(name, tmp_path, "Profiler"),
    )
    for one, other in zip(_answers(handed), _answers(loaded), strict=True):
        pd.testing.assert_frame_equal(one, other, check_dtype=False, atol=1, rtol=0)


def _answers(analysis: TraceAnalysis) -> Iterator[pd.DataFrame]:
    yield analysis.get_temporal_breakdown(visualize=False)
    yield analysis.get_comm_comp_overlap(visualize=False)
    yield from analysis.get_gpu_kernel_breakdown(visualize=False)
    idle = analysis.get_idle_time_breakdown(visualize=False)[0]
    yield idle.sort_values(["stream", "idle_category"], ignore_index=True)
    yield analysis.get_queue_length_summary().reset_index()
    launches = analysis.get_cuda_kernel_launch_stats(visualize=False)[0]
    yield launches.sort_values("correlation", ignore_index=True)
    graph, found = analysis.critical_path_analysis(0, "ProfilerStep", 0)
    assert found
    yield graph.summary().to_frame()


def test_hta_calls_the_waiting_communication() -> None:
    folder = shared_trace("kineto_megatron_tp2_v100")
    theirs = open_in_hta(folder).get_temporal_breakdown(visualize=False).set_index("rank")
    rows = analyze(folder).steps
    assert theirs["compute_time(us)"].to_dict() == pytest.approx(
        {row.rank: row.compute_ns / 1000 for row in rows}, abs=0.001
    )
    assert theirs.loc[1, "non_compute_time(us)"] > 100 * rows[1].collective_ns / 1000
