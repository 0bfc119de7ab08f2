"""Reading of files of any age and damage; an error is one line with the file and the hint."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace
from support.required import shared_repro

from stepsplit.analyzer import DataError, analyze
from stepsplit.analyzer.ops import compute_element_bytes, compute_message_bytes, parse_op
from stepsplit.analyzer.readers.recording import read_recording

PNG = b"\x89PNG\r\n\x1a\n" + bytes(64)


def body() -> bytes:
    return json.dumps(GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5).body()).encode()


def begun(content: bytes) -> bytes:
    """The file of a job that was killed before its first event was written."""
    return content[:100]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (PNG, "neither JSON nor another supported format"),
        (begun(body()), "cut off before its first event"),
        # Without the time: the bytes are the test's name, the same in every process of pytest.
        (gzip.compress(begun(body()), mtime=0), "cut off before its first event"),
        (gzip.compress(body(), mtime=0)[:9], "the file is damaged"),
        (b'{"nodes": []}', "not a trace"),
        (b'{"traceEvents": []}', "has no events"),
        (b'{"traceEvents": 7}', "not a trace"),
        (b"[1, 2]", "not a trace"),
        (b"[]", "has no events"),
        (
            b"[rank0]:[E603 17:48:01.5 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught",
            "a log that is not read: lines of the NCCL watchdog",
        ),
        (b"[2026-11-29 10:00:01] [INFO] epoch 3", "a log that is not read: no training step"),
        (b"[0]: starting", "a log that is not read"),
        (b"2026-11-29 10:00:01 starting", "a log that is not read"),
        (b"[", "has no events"),
        (b"[1.5e3, [2]]", "JSON, but not a trace"),
        (b'{ "a', "JSON, but not a trace"),
        (b"once upon a time", "neither JSON nor another supported format"),
    ],
)
def test_bad_input_is_one_line_with_file_and_hint(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        analyze(file)
    line = str(caught.value)
    assert line.startswith(f"{file}")
    assert problem in line
    assert caught.value.hint in line
    assert "\n" not in line


def test_lines_of_the_watchdog_are_no_json() -> None:
    with pytest.raises(DataError, match="a log that is not read: lines of the NCCL watchdog"):
        analyze(shared_repro("wild2") / "text_called_json" / "watchdog.log")


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        analyze(tmp_path / "nowhere.json")


def test_a_folder_without_a_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"nodes": []}')
    with pytest.raises(DataError, match="no trace found"):
        analyze(tmp_path)
    (tmp_path / "trace.json").write_bytes(begun(body()))
    with pytest.raises(
        DataError, match=r"no trace found; trace\.json: JSON, but not a trace, or cut"
    ):
        analyze(tmp_path)


def test_a_file_named_twice_is_read_once_with_its_neighbors(tmp_path: Path) -> None:
    file = GpuTrace(0, 2).step(1, 0, 10).kernel("gemm", 0, 5).write(tmp_path)
    run = {"schema": "stepsplit.run/1", "name": "exp1", "world_size": 2, "backend": "nccl"}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert analyze(file, tmp_path, file) == analyze(tmp_path)
    assert analyze(file).run.name == "exp1"


def test_two_traces_of_one_rank_are_an_error(tmp_path: Path) -> None:
    first = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5).write(tmp_path)
    (tmp_path / "again.json.gz").write_bytes(first.read_bytes())
    with pytest.raises(DataError, match="second trace of rank 0"):
        analyze(tmp_path)


@pytest.mark.parametrize(
    "shape",
    [
        lambda trace: trace,
        lambda trace: trace["traceEvents"],
        lambda trace: trace | {"distributedInfo": None},
        lambda trace: trace | {"distributedInfo": {"rank": "zero"}, "deviceProperties": 3},
        lambda trace: trace | {"distributedInfo": {"rank": 0, "pg_config": [{"ranks": "all"}]}},
        lambda trace: trace | {"traceEvents": [{"ph": "M", "name": "x", "args": {}}, {"ph": "i"},
                                               *trace["traceEvents"]]},
    ],
)  # fmt: skip
def test_traces_in_every_packing_give_the_same_report(
    tmp_path: Path, shape: Callable[[dict[str, object]], object]
) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5)
    file = tmp_path / "rank0.json"
    file.write_text(json.dumps(shape(trace.body()), indent=2))
    assert [row.compute_ns for row in analyze(file).steps] == [5_000]


def test_event_names_of_2020_are_read_like_current_ones(tmp_path: Path) -> None:
    old = {"user_annotation": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5)
    events = [event | {"cat": old[event["cat"]], "tid": "stream 7"} for event in trace.events]
    file = tmp_path / "old.json"
    file.write_text(json.dumps(events))
    assert [row.compute_ns for row in analyze(file).steps] == [5_000]


def test_times_too_large_for_a_float_keep_their_nanoseconds(tmp_path: Path) -> None:
    text = body().decode().replace('"ts": 0', '"ts": 1721000000000001.123')
    text = text.replace('"dur": 5', '"dur": 5.001')
    file = tmp_path / "big.json"
    file.write_text(text)
    assert [row.compute_ns for row in analyze(file).steps] == [5_001]


def test_a_rank_is_from_content_then_name_then_position(tmp_path: Path) -> None:
    for name, rank in (("a", 1), ("rank3_x", -1), ("z", -1)):
        trace = GpuTrace(rank, 4).step(1, 0, 10).kernel("gemm", 0, 5)
        (tmp_path / f"{name}.json").write_text(json.dumps(trace.body()))
    recording = read_recording([tmp_path])
    assert [(t.source.name, t.rank) for t in recording.traces] == [
        ("z.json", 0), ("a.json", 1), ("rank3_x.json", 3),
    ]  # fmt: skip
    assert [note.code for note in recording.notes] == ["rank_guessed"]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("alltoallv", "all_to_all"),
        ("c10d::broadcast_", "broadcast"),
        ("recv", "recv"),
        ("gloo:send", "send"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
        ("ncclDevKernel_Generic", "unknown"),
    ],
)
def test_ops_are_inferred_from_names(name: str, op: str) -> None:
    assert parse_op(name) == op


def test_sizes_follow_nccl_tests() -> None:
    assert compute_message_bytes("all_gather", 100, 400, 4) == 400
    assert compute_message_bytes("reduce_scatter", 400, 100, 4) == 400
    assert compute_message_bytes("all_reduce", 400, 400, 4) == 400
    # Each rank gives, or gets, a quarter of what the root gathers or scatters.
    assert compute_message_bytes("gather", 100, 400, 4) == 400
    assert compute_message_bytes("scatter", 400, 100, 4) == 400
    assert compute_message_bytes("scatter", 0, 100, 4) == 400
    assert compute_message_bytes("scatter", 400, -1, 4) == 400
    assert [compute_element_bytes(d) for d in ("Float", "BFloat16", "float8_e4m3fn", "odd")] == [
        4,
        2,
        1,
        -1,
    ]


def test_other_files_in_the_folder_are_skipped_with_a_note(tmp_path: Path) -> None:
    GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5).write(tmp_path)
    (tmp_path / "notes.json").write_text("[1, 2, 3]")
    (tmp_path / "rank1_trace.json").write_text("")
    (tmp_path / "metrics.json").write_text('{"loss": 3}')
    report = analyze(tmp_path)
    assert [row.compute_ns for row in report.steps] == [5_000]
    skipped = [(w.rank, w.message) for w in report.warnings if w.code == "file_skipped"]
    assert skipped == [(1, "rank1_trace.json: the file is empty")]


def test_files_of_an_older_larger_run_are_ignored_with_a_note(tmp_path: Path) -> None:
    for rank in range(3):
        GpuTrace(rank, 3).step(1, 0, 10).kernel("gemm", 0, 5).write(tmp_path)
    run = {"schema": "stepsplit.run/1", "name": "r", "world_size": 2, "backend": "nccl"}
    (tmp_path / "run.json").write_text(json.dumps(run))
    report = analyze(tmp_path)
    assert report.run.ranks == (0, 1)
    assert [row.rank for row in report.warnings if row.code == "stale_rank"] == [2]


@pytest.mark.parametrize("odd", ['"ts": 1e300', '"ts": 99999999999999999999'])
def test_an_event_beyond_64_bits_is_skipped_and_counted(tmp_path: Path, odd: str) -> None:
    file = tmp_path / "rank0_trace.json"
    file.write_text(body().decode().replace('"ts": 0', odd, 1))
    report = analyze(file)
    assert [row.compute_ns for row in report.steps] == [5_000]
    assert [w.message.split(" are")[0] for w in report.warnings if w.code == "entries_damaged"] == [
        "1 of 3 entries"
    ]


def test_an_event_without_a_time_is_ignored(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5)
    trace.events.append({"ph": "X", "cat": "kernel", "name": "lost", "args": {"stream": 7}})
    assert [row.compute_ns for row in analyze(trace.write(tmp_path)).steps] == [5_000]


def shapes_of(folder: Path) -> dict[str, str]:
    """The shapes of each event that has any, by name."""
    (trace,) = read_recording([folder]).traces
    shapes = trace.shapes
    return {
        trace.events.name_of(event): shapes.texts[text]
        for event, text in zip(shapes.event.tolist(), shapes.text_id.tolist(), strict=True)
    }


@pytest.mark.parametrize("indent", [None, 2])
def test_a_kernel_has_the_shapes_of_the_innermost_op_that_launched_it_else_its_grid(
    tmp_path: Path, indent: int | None
) -> None:
    trace = GpuTrace().step(1, 0, 100)
    trace.op("aten::linear", 0, 20, **{"Input Dims": [[8, 128], [512, 128], []]})
    trace.op("aten::t", 1, 2, **{"Input Dims": [[512, 128]]})
    trace.op("aten::mm", 3, 9, **{"Input Dims": [[8, 128], [128, 512]], "Input type": ["float"]})
    trace.op("aten::empty", 10, 11, **{"Input Dims": [[], [], []], "Concrete Inputs": ["[8]"]})
    trace.kernel("of_mm", 30, 40, launched=5, grid=[4, 1, 1])
    trace.kernel("of_linear", 40, 50, launched=12, grid=[4, 1, 1])
    trace.kernel("of_empty", 50, 51, launched=10.5)
    trace.kernel("of_none", 60, 70, launched=30, grid=[16, 2, 1])
    trace.kernel("unknown", 70, 80, launched=40)
    (tmp_path / "rank0_trace.json").write_text(json.dumps(trace.body(), indent=indent))
    assert shapes_of(tmp_path) == {
        "of_mm": "[[8, 128], [128, 512]]",
        "of_linear": "[[8, 128], [512, 128], []]",
        "of_empty": "[[8, 128], [512, 128], []]",
        "of_none": "grid [16, 2, 1]",
        "aten::linear": "[[8, 128], [512, 128], []]",
        "aten::t": "[[512, 128]]",
        "aten::mm": "[[8, 128], [128, 512]]",
    }


def test_an_op_of_a_cpu_run_has_the_shapes_of_its_inputs(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100).op("aten::mm", 0, 10, **{"Input Dims": [[8, 4], [4, 2]]})
    trace.op("aten::lists", 10, 20, **{"Input Dims": [[[8], [4, 2]], []]}).op("aten::add", 20, 30)
    trace.op("aten::empty", 30, 31, **{"Input Dims": [[], []]})
    short = ["c10::BFloat16", "c10::BFloat16"]
    trace.op("aten::short", 32, 33, **{"Input type": short, "Input Dims": [[8, 4], [4, 2]]})
    trace.op("aten::odd", 31, 32, **{"Input Dims": None}).write(tmp_path)
    assert shapes_of(tmp_path) == {
        "aten::mm": "[[8, 4], [4, 2]]",
        "aten::short": "[[8, 4], [4, 2]] bf16",
        "aten::lists": "[[[8], [4, 2]], []]",
    }


@pytest.mark.parametrize("grid", ["4x1x1", [4, "1"], None, {}, [2.5]])
def test_an_odd_grid_is_ignored(tmp_path: Path, grid: object) -> None:
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5, grid=grid).kernel("b", 5, 9, grid=[3])
    assert [row.compute_ns for row in analyze(trace.write(tmp_path)).steps] == [9_000]
    assert shapes_of(tmp_path) == {"b": "grid [3]"}


def test_waits_that_name_their_event_are_read(tmp_path: Path) -> None:
    """Of the rows, two lack what is waited for, and one has arguments of a wrong type."""
    trace = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5)
    recorded = trace.record_event(1)
    trace.wait_for_event(2, recorded, stream=7, on_stream=20).synchronize_device(3, 4)
    waits = {"wait_on_stream": 20, "wait_on_cuda_event_record_corr_id": recorded}
    for name, args in (
        ("Event Sync", {"stream": -1, "correlation": 91} | waits),
        ("Stream Sync", {"stream": 7, "correlation": 92}),
        ("Stream Wait Event", {"stream": 7, "correlation": 93}),
        ("Stream Wait Event", {"stream": 7} | waits),
        ("Stream Wait Event", {"stream": "7", "correlation": 94} | waits),
    ):
        trace.events.append(
            {"ph": "X", "cat": "cuda_sync", "name": name, "pid": 1, "tid": 7, "ts": 5, "dur": 1,
             "args": args}
        )  # fmt: skip
    found = read_recording([str(trace.write(tmp_path))]).traces[0].waits
    columns = (found.correlation, found.stream, found.on_stream, found.recorded)
    stream_wait, synchronize, *others = zip(*(one.tolist() for one in columns), strict=True)
    assert stream_wait[1:] == (7, 20, recorded)
    assert synchronize[1:3] == (-1, -1)
    assert others == [(91, -1, 20, recorded), (92, -1, 7, 92)]
