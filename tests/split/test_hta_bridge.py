"""Ranks that stepsplit has read, handed over to HolisticTraceAnalysis."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from support.builders import BASE_NS, COMM_STREAM, COMPUTE_STREAM, MAIN, GpuTrace
from support.nsys_builders import Export
from support.required import absent

from stepsplit.analyzer import UsageError
from stepsplit.analyzer.hta import open_in_hta

pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")  # HTA's own, for pandas 3

SAMPLES = Path(__file__).parents[2] / "sample_traces"
WORLD = ("0", "default_pg", [0, 1])
ROW = ("cat", "name", "pid", "tid", "ts", "dur", "end", "stream", "correlation", "iteration")


@pytest.fixture(autouse=True)
def hta_is_there() -> None:
    if find_spec("hta") is None:
        absent("hta", "HolisticTraceAnalysis is not installed")


def a_rank(rank: int) -> GpuTrace:
    """From 10 to 70: 20 of compute, 30 of communication, half of it hidden, a copy of 10."""
    trace = GpuTrace(rank, 2, groups=[WORLD]).step(1, 0, 100)
    return trace.kernel("gemm", 10, 30, launched=5).all_reduce(20, 50).memcpy(60, 70)


def compact(folder: Path) -> Path:
    for rank in range(2):
        text = json.dumps(a_rank(rank).body(), separators=(",", ":"))
        (folder / f"rank{rank}.json").write_text(text)
    return folder


def cut_off(folder: Path) -> Path:
    for rank in range(2):
        text = json.dumps(a_rank(rank).kernel("never", 80, 90).body())
        (folder / f"rank{rank}.json").write_text(text[: text.rindex("cudaLaunchKernel")])
    return folder


def archive(folder: Path) -> Path:
    with tarfile.open(folder / "run.tar.gz", "w:gz") as packed:
        for rank in range(2):
            packed.add(a_rank(rank).write(folder), f"run/rank{rank}_trace.json.gz")
    return folder / "run.tar.gz"


def url(folder: Path) -> str:
    files = fsspec.filesystem("memory")
    for rank in range(2):
        files.pipe(f"/hta/rank{rank}.json.gz", a_rank(rank).write(folder).read_bytes())
    return "memory://hta"


def bare_lists(folder: Path) -> Path:
    for rank in range(2):
        text = json.dumps(a_rank(rank).body()["traceEvents"])
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.mark.parametrize("written", [compact, cut_off, archive, url, bare_lists])
def test_hta_breaks_down_what_its_loader_cannot_open(
    written: Callable[[Path], Path | str], tmp_path: Path
) -> None:
    analysis = open_in_hta(written(tmp_path))
    times = ("compute_time(us)", "non_compute_time(us)", "idle_time(us)")
    table = analysis.get_temporal_breakdown(visualize=False).set_index("rank")[[*times]]
    assert table.T.to_dict("list") == {0: [20, 30, 10], 1: [20, 30, 10]}
    hidden = analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    assert hidden.to_list() == [33.33, 33.33]


def test_htas_loader_takes_ranks_in_compact_json_for_one(tmp_path: Path) -> None:
    from hta.common.trace import Trace

    folder = compact(tmp_path)
    assert [*Trace([str(folder / f"rank{rank}.json") for rank in range(2)]).trace_files] == [0]
    assert open_in_hta(folder).t.get_ranks() == [0, 1]


def test_an_export_of_nsight_systems_is_handed_over(tmp_path: Path) -> None:
    export = Export().kernel("gemm", 10_000, 30_000, launched=5_000)
    path = export.kernel("gemm", 35_000, 40_000, launched=31_000).write(tmp_path / "a.sqlite")
    analysis = open_in_hta(path)
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    assert (row["compute_time(us)"], row["idle_time(us)"]) == (25, 5)
    launches = analysis.get_cuda_kernel_launch_stats(visualize=False)[0]
    assert launches["launch_delay"].to_list() == pytest.approx([4.999, 3.999])
    queue = analysis.get_queue_length_time_series()[0]
    assert queue["queue_length"].to_list() == [1, 0, 1, 0]


def test_every_event_becomes_a_row_linked_to_its_launch(tmp_path: Path) -> None:
    """Of the second step only the host's time is there, for HTA drops the last step's kernels."""
    trace = GpuTrace().step(1, 0, 40).kernel("gemm", 10, 30.5, launched=5)
    trace.step(2, 40, 80).kernel("late", 60, 70, launched=50).write(tmp_path)
    analysis = open_in_hta(tmp_path)
    frame, names = analysis.t.get_trace(0), analysis.t.symbol_table.get_sym_table()
    rows = frame.sort_values("ts")[[*ROW]].itertuples(index=False, name=None)
    linked = [(names[cat], names[name], *rest) for cat, name, *rest in rows]
    assert linked == [
        ("user_annotation", "ProfilerStep#1", 1, MAIN, 0, 40, 40, -1, -1, 1),
        ("cuda_runtime", "cudaLaunchKernel", 1, MAIN, 5, 0, 5, -1, 2, 1),
        ("kernel", "gemm", 0, COMPUTE_STREAM, 10, 20.5, 30.5, COMPUTE_STREAM, 2, 1),
    ]
    kernel = frame[frame["stream"] >= 0].iloc[0]
    launch = frame.loc[int(kernel["index_correlation"])]
    assert (names[int(launch["name"])], launch["index_correlation"]) == (
        "cudaLaunchKernel", kernel["index"],
    )  # fmt: skip


def test_ranks_use_their_wall_clocks(tmp_path: Path) -> None:
    for rank in range(2):
        GpuTrace(rank, 2, base_ns=BASE_NS + 7_000 * rank).kernel("gemm", 10, 30).write(tmp_path)
    handed = open_in_hta(tmp_path).t
    assert [handed.get_trace(rank)["ts"].min() for rank in range(2)] == [0, 7]
    assert [handed.get_trace_start_unixtime_ns(r) for r in range(2)] == [BASE_NS + 10_000] * 2


def test_threads_named_by_words_have_numbers_of_their_own(tmp_path: Path) -> None:
    body = GpuTrace().kernel("gemm", 10, 30).kernel("gemm", 40, 50).body()
    body["traceEvents"][0]["tid"], body["traceEvents"][2]["tid"] = "thread 7 (python)", "autograd"
    (tmp_path / "rank0.json").write_text(json.dumps(body))
    frame = open_in_hta(tmp_path).t.get_trace(0)
    assert frame.query("stream == -1")["tid"].to_list() == [8, 9]
    assert frame.query("stream != -1")["tid"].to_list() == [COMPUTE_STREAM] * 2


def test_what_a_trace_does_not_keep_is_missing_not_zero(tmp_path: Path) -> None:
    a_rank(0).write(tmp_path)
    with pytest.raises(KeyError, match="memory_bw_gbps"):
        open_in_hta(tmp_path).get_memory_bw_summary()


def test_hta_knows_no_run_on_cpus() -> None:
    with pytest.raises(IndexError):
        open_in_hta(SAMPLES / "pp2_m2").get_temporal_breakdown(visualize=False)


def test_hta_finds_no_straggler_among_the_kernels_of_newer_nccl(tmp_path: Path) -> None:
    """It looks for names that begin with ncclKernel; those of today begin with ncclDevKernel."""
    for rank in range(2):
        a_rank(rank).write(tmp_path)
    analysis = open_in_hta(tmp_path)
    assert analysis.t.get_trace(0).query(f"stream == {COMM_STREAM}")["iteration"].to_list() == [1]
    with pytest.raises(ValueError, match="argmax of an empty sequence"):
        analysis.get_potential_stragglers()


def test_without_hta_the_error_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_rank(0).write(tmp_path)
    monkeypatch.setitem(sys.modules, "hta.common.trace", None)
    with pytest.raises(UsageError, match=r"stepsplit\[hta\]"):
        open_in_hta(tmp_path)
