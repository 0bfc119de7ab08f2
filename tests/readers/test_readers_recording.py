"""Files and ranks of a recording in the layouts of frameworks."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import (
    OPS,
    DataError,
    Group,
    StepsplitError,
    UsageError,
    analyze,
    read_files,
)
from stepsplit.analyzer.readers.recording import Recording, read_recording
from stepsplit.analyzer.report.io import from_json, to_json


def trace(rank: int = -1, world_size: int = 1, *, end: float = 5) -> bytes:
    """A trace with this rank, or without a rank."""
    return json.dumps(
        GpuTrace(rank, world_size).step(1, 0, 10).kernel("gemm", 0, end).body()
    ).encode()


def lay_out(folder: Path, *names: str, ranks: bool = False) -> Path:
    """Traces under these names, in the folder; they state their ranks in this order if asked."""
    for rank, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = trace(rank if ranks else -1)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


def by_rank(recording: Recording) -> dict[int, str]:
    return {t.rank: t.source.name for t in recording.traces}


def codes(recording: Recording) -> list[str]:
    return [note.code for note in recording.notes]


@pytest.mark.parametrize(
    "names",
    [
        ["rank-0.Aug_01_10.pt.trace.json.gz", "rank-1.Aug_01_10.pt.trace.json.gz"],  # HTA
        ["iteration_10/rank0_trace.json.gz", "iteration_10/rank1_trace.json.gz"],  # torchtitan
        ["torch_profile/rank-0.json.gz", "torch_profile/rank-1.json.gz"],  # Megatron-LM
        ["log/worker0.1623143.pt.trace.json", "log/worker1.1623144.pt.trace.json"],  # TensorBoard
        ["rank_0/trace.json", "rank_1/trace.json"],  # a folder a rank
    ],
)
def test_ranks_are_read_from_names_of_frameworks(tmp_path: Path, names: list[str]) -> None:
    recording = read_recording([lay_out(tmp_path, *names)])
    assert by_rank(recording) == {i: Path(name).name for i, name in enumerate(names)}
    assert codes(recording) == []


def test_small_numbers_at_the_end_of_names_are_ranks_with_a_note(tmp_path: Path) -> None:
    recording = read_recording([lay_out(tmp_path, "trace_2.json", "trace_10.json")])
    assert by_rank(recording) == {2: "trace_2.json", 10: "trace_10.json"}
    assert codes(recording) == ["rank_guessed", "rank_guessed"]


def test_many_guesses_are_one_warning(tmp_path: Path) -> None:
    recording = read_recording([lay_out(tmp_path, *(f"trace_{i}.json" for i in range(12)))])
    assert by_rank(recording) == {i: f"trace_{i}.json" for i in range(12)}
    assert [note.message for note in recording.notes] == [
        "12 traces have no rank; assigned in order from trace_0.json (rank 0) to trace_11.json (11)"
    ]


def test_a_folder_whose_name_is_not_utf_8_makes_a_report_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"run\xff")
    folder.mkdir()
    (folder / "rank0_trace.json").write_bytes(trace())
    (folder / os.fsdecode(b"rank1_trace\xff.json")).write_bytes(b"{")
    report = analyze(folder)
    assert from_json(to_json(report)) == report
    assert report.run.name == "run?"
    assert [row.message for row in report.warnings if row.code == "file_skipped"] == [
        "rank1_trace?.json: JSON, but not a trace, or cut off before its first event"
    ]


def test_dates_in_names_are_not_ranks(tmp_path: Path) -> None:
    recording = read_recording([lay_out(tmp_path, "a_20260102.json", "b_20260101.json")])
    assert by_rank(recording) == {0: "a_20260102.json", 1: "b_20260101.json"}


def test_names_decide_between_traces_of_the_same_rank(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        (tmp_path / f"rank{rank}.json").write_bytes(trace(0, 4))
    recording = read_recording([tmp_path])
    assert by_rank(recording) == {0: "rank0.json", 1: "rank1.json", 2: "rank2.json"}
    [note] = recording.notes
    assert note.message == "several traces have rank 0: ranks are taken from the file names"


def test_a_local_rank_is_not_a_rank_of_the_job(tmp_path: Path) -> None:
    names = [f"node{node}/local_rank{rank}_trace.json" for node in (0, 1) for rank in (0, 1)]
    recording = read_recording([lay_out(tmp_path, *names)])
    assert [f"{t.source.parent.name}/{t.source.name}" for t in recording.traces] == names
    assert codes(recording) == ["rank_guessed"] * 4


def test_the_latest_of_several_captures_is_used(tmp_path: Path) -> None:
    for iteration in (9, 10):
        lay_out(tmp_path / f"iteration_{iteration}", "rank0.json", "rank1.json", ranks=True)
    recording = read_recording([tmp_path])
    assert [t.source.parent.name for t in recording.traces] == ["iteration_10", "iteration_10"]
    assert codes(recording) == ["older_captures"]


def test_a_capture_that_lacks_ranks_is_not_preferred(tmp_path: Path) -> None:
    lay_out(tmp_path / "iteration_9", "rank0.json", "rank1.json", ranks=True)
    lay_out(tmp_path / "iteration_10", "rank0.json", ranks=True)
    recording = read_recording([tmp_path])
    assert [t.source.parent.name for t in recording.traces] == ["iteration_9", "iteration_9"]


def test_cycles_of_one_profiler_are_captures_too(tmp_path: Path) -> None:
    for stamp in ("1623143566756", "1623143577777"):
        lay_out(tmp_path, f"host_12.{stamp}.pt.trace.json", ranks=True)
    recording = read_recording([tmp_path])
    assert by_rank(recording) == {0: "host_12.1623143577777.pt.trace.json"}
    assert codes(recording) == ["older_captures"]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["host_12.1623143566756.pt.trace.json", "host_12.1623143577777.pt.trace.json"], [1]),
        (["profile_step_9.json", "profile_step_10.json"], [1]),
        (["epoch9/gpu_0.json", "epoch9/gpu_1.json", "epoch10/gpu_0.json", "epoch10/gpu_1.json"],
         [2, 3]),
    ],
)  # fmt: skip
def test_captures_of_one_process_are_not_ranks(
    tmp_path: Path, names: list[str], kept: list[int]
) -> None:
    recording = read_recording([lay_out(tmp_path, *names)])
    found = [str(trace.source.relative_to(tmp_path)) for trace in recording.traces]
    assert found == [names[i] for i in kept]
    assert codes(recording) == ["older_captures", *["rank_guessed"] * len(kept)]


def test_two_runs_in_one_folder_are_an_error_with_file_and_rank(tmp_path: Path) -> None:
    lay_out(tmp_path / "good", "rank0.json", ranks=True)
    lay_out(tmp_path / "bad", "rank0.json", ranks=True)
    with pytest.raises(DataError, match=r"good/rank0\.json: second trace of rank 0; the first is"):
        read_recording([tmp_path])


def test_traces_of_different_devices_may_be_of_different_runs(tmp_path: Path) -> None:
    for rank, device in enumerate(("A100", "MI300X")):
        body = GpuTrace(rank, 2).step(1, 0, 10).kernel("gemm", 0, 5).body()
        body["deviceProperties"] = [{"name": device}]
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(body))
    [note] = read_recording([tmp_path]).notes
    assert note.message == "traces of different devices (A100, MI300X): are they from one run?"


def test_traces_of_different_world_sizes_may_be_of_different_runs(tmp_path: Path) -> None:
    for rank, size in enumerate((2, 4, 4, 4)):
        (tmp_path / f"rank{rank}.json").write_bytes(trace(rank, size))
    [note] = read_recording([tmp_path]).notes
    assert note.message == (
        "traces of different world sizes (2 by rank 0; 4 by rank 1, 2): of two programs, such as a "
        "trainer and its rollouts, or of two runs; analyze each one's traces by themselves"
    )


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "run.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for rank in range(2):
            archive.writestr(f"run/rank{rank}.json", trace(rank, 2))
    return folder / "run.zip"


def tarred(folder: Path) -> Path:
    with tarfile.open(folder / "run.tar.gz", "w:gz") as archive:
        for rank in range(2):
            member = tarfile.TarInfo(f"run/rank{rank}.json.gz")
            content = gzip.compress(trace(rank, 2))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return folder / "run.tar.gz"


def plain(folder: Path) -> Path:
    for rank in range(2):
        (folder / f"rank{rank}.json").write_bytes(trace(rank, 2))
    return folder


def zstandard(folder: Path) -> Path:
    for rank in range(2):
        packed = pa.compress(trace(rank, 2), codec="zstd", asbytes=True)
        (folder / f"rank{rank}.json.zst").write_bytes(packed)
    return folder


@pytest.mark.parametrize("packed", [plain, zipped, tarred, zstandard])
def test_a_recording_is_the_same_in_every_archive_format(
    tmp_path: Path, packed: Callable[[Path], Path]
) -> None:
    report = analyze(packed(tmp_path))
    assert [(row.rank, row.compute_ns) for row in report.steps] == [(0, 5_000), (1, 5_000)]
    assert [row.code for row in report.warnings] == ["mesh_unknown"]


def test_a_folder_without_a_trace_says_what_its_first_file_is(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[model]\n")
    (tmp_path / "notes.json").write_text("hello")
    (tmp_path / "zero.bin").touch()
    words = "no trace found; notes.json: neither JSON nor another supported format, and 1 more"
    with pytest.raises(DataError, match=words):
        analyze(tmp_path)


def test_a_recording_at_a_url_is_read(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    for rank in range(2):
        files.pipe(f"/runs/exp1/rank{rank}.json", trace(rank, 2))
    files.pipe("/runs/packed.zip", zipped(tmp_path).read_bytes())
    for place in ("memory://runs/exp1", "memory://runs/packed.zip"):
        report = analyze(place)
        assert [(row.rank, row.compute_ns) for row in report.steps] == [(0, 5_000), (1, 5_000)]
    assert analyze("memory://runs/exp1").run.name == "exp1"
    with pytest.raises(DataError, match="memory://runs/exp2: no such file or folder"):
        analyze("memory://runs/exp2")


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("nosuch://x/y", "Protocol not known: nosuch"),
        ("ftp://nohost.invalid/x", "check the URL and your access"),
    ],
)
def test_a_url_that_cannot_be_opened_says_why(url: str, refused: str) -> None:
    with pytest.raises(StepsplitError, match=re.escape(refused)) as raised:
        analyze(url)
    assert str(raised.value).startswith(f"{url}: ")


def test_a_server_that_does_not_answer_is_not_a_missing_file() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(DataError, match=r"x\.json: Cannot connect to host 127\.0\.0\.1:9"):
        analyze("http://127.0.0.1:9/x.json")


class _Refusing(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(403)

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_that_refuses_is_an_error_in_one_line() -> None:
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(DataError, match=r"trace\.json: .*403.*check the URL"):
                analyze(f"http://127.0.0.1:{server.server_port}/trace.json")
        finally:
            server.shutdown()


def test_a_url_without_its_backend_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match=r"^s3://x/y: Install s3fs"):
        analyze("s3://x/y")


def test_paths_in_archives_do_not_escape(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        for name in ("../../rank0.json", "/rank1.json"):
            member = tarfile.TarInfo(name)
            member.size = len(trace())
            archive.addfile(member, io.BytesIO(trace()))
        link = tarfile.TarInfo("rank2.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    assert by_rank(read_recording([tmp_path / "evil.tar"])) == {0: "rank0.json", 1: "rank1.json"}
    assert not list(tmp_path.parent.glob("rank*"))


def test_a_truncated_archive_gives_the_complete_files(tmp_path: Path) -> None:
    whole = tarred(tmp_path).read_bytes()
    archive = tmp_path / "cut.tar"
    archive.write_bytes(gzip.decompress(whole)[:1000])
    assert by_rank(read_recording([archive])) == {0: "rank0.json.gz"}


def test_a_git_lfs_pointer_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:760b\nsize 87060\n")
    with pytest.raises(DataError, match="a Git LFS pointer, not the file itself; fetch it with"):
        read_recording([file])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "report1.nsys-rep",
            b"\x00\x01",
            "an Nsight Systems report.*; export it with nsys export --type sqlite",
        ),
        (
            "StringIds.arrow",
            b"ARROW1\0\0",
            "Arrow tables of Nsight Systems.*; export the report with nsys export --type sqlite",
        ),
        (
            "4711_results.json",
            b'{ "rocprofiler-sdk-tool": [{"metadata": {"pid": 4711}, "buffer_records": {}}]}',
            "rocprofv3's JSON.*; no command converts it; record the job with stepsplit record",
        ),
        (
            "4711_results.db",
            b"SQLite format 3\0 CREATE TABLE rocpd_string_0001 (id INTEGER)",
            "rocprofv3's database.*; no command converts it; record the job with stepsplit record",
        ),
        (
            "4711_results.pftrace",
            b"\x0a\x04\x40\x01\x50\x01" * 20,
            "a Perfetto trace in binary form.*; analyze the torch.profiler trace",
        ),
        (
            "host0.xplane.pb",
            b"\x0a\x11\x08\x01\x12\x0d/device:GPU:0",
            "an XPlane profile.*; no command converts it: .* nsys profile -t cuda,nvtx",
        ),
    ],
)
def test_what_other_profilers_write_is_refused_by_name_with_what_to_do(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    (folder / "notes.txt").write_text("of this evening\n")
    file = folder / name
    file.write_bytes(content)

    with pytest.raises(DataError, match=says):
        analyze(file)
    with pytest.raises(DataError, match=f"no trace found; {re.escape(name)}: {says}"):
        analyze(folder)


def test_the_error_without_a_trace_lists_the_kinds_found(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "host0:1:2 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 1000 "
        "datatype 7 op 0 root 0 comm 0x3 [nranks=2] stream 0x4\n"
    )
    with pytest.raises(DataError, match="no trace found; found only: NCCL log"):
        analyze(log)
    [read] = read_files(log)
    assert (read.kind, read.events, read.refused) == ("NCCL log", 1, "")


@pytest.mark.parametrize(
    "around",
    [
        {"Collective name": "allreduce", "In msg nelems": 1000, "Group size": 2, "dtype": "Float"},
        {"Input Dims": [[[600], [20, 20]], [], []], "Input type": ["float", "", ""]},
    ],
)
def test_details_missing_in_a_kernel_are_from_the_op_around_its_launch(
    tmp_path: Path, around: dict[str, object]
) -> None:
    one = GpuTrace().step(1, 0, 100).kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 20, 40)
    one.events.append({"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1,
                       "tid": 100, "ts": 19, "dur": 3, "args": around})  # fmt: skip
    [found] = read_recording([one.write(tmp_path)]).traces
    assert found.calls.message_bytes.tolist() == [4000]
    assert [found.calls.dtypes[i] for i in found.calls.dtype.tolist()] == ["float32"]


@pytest.mark.parametrize("ranks", ["[0, 2]", [0, 2]])
def test_ranks_of_a_group_are_a_text_or_a_list(tmp_path: Path, ranks: object) -> None:
    fields = {
        "Collective name": "allreduce",
        "Process Group Name": "7",
        "Process Group Ranks": ranks,
    }
    body = GpuTrace(0, 2).step(1, 0, 9).kernel("ncclDevKernel_AllReduce", 2, 4, **fields).body()
    body["distributedInfo"]["pg_config"] = [{"pg_name": "6", "ranks": ranks}]
    (tmp_path / "rank0.json").write_text(json.dumps(body))
    [found] = read_recording([tmp_path]).traces
    assert found.groups == (Group("6", (0, 2), ""), Group("7", (0, 2), ""))
    assert found.world_size == 3


@pytest.mark.parametrize(
    ("kernel", "op"),
    [("ncclDevKernel_SendRecv", "send_recv"), ("ncclDevKernel_AllGather_RING_LL", "all_gather")],
)
def test_a_coalesced_call_is_what_its_kernel_does(tmp_path: Path, kernel: str, op: str) -> None:
    fields = {"Collective name": "coalesced", "In msg nelems": 0, "Seq": 13}
    one = GpuTrace().step(1, 0, 100).kernel(kernel, 20, 40, **fields)
    [found] = read_recording([one.write(tmp_path)]).traces
    assert [OPS[code] for code in found.calls.op.tolist()] == [op]


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("void allreduce_fusion_kernel_oneshot_lamport<8>()", "all_reduce"),  # TensorRT-LLM
        ("kuserbuffers_pushsend(int*, int*, int4*, int4*, int)", "unknown"),  # TransformerEngine
        ("void mori::moe::EpCombineIntraNodeKernel<float>()", "all_to_all"),
    ],
)
def test_kernels_of_other_libraries_communicate_too(tmp_path: Path, kernel: str, op: str) -> None:
    [found] = read_recording([GpuTrace().step(1, 0, 9).kernel(kernel, 2, 4).write(tmp_path)]).traces
    assert [OPS[code] for code in found.calls.op.tolist()] == [op]


def test_a_truncated_file_gives_its_complete_events_and_a_note(tmp_path: Path) -> None:
    two = GpuTrace(0).step(1, 0, 10).kernel("gemm", 0, 5).kernel("gemm", 5, 9)
    whole = json.dumps(two.body()).encode()
    file = tmp_path / "rank0_trace.json"
    file.write_bytes(whole[: whole.rindex(b'"gemm"')])
    report = analyze(file)
    assert [(row.kind, row.step_ns) for row in report.steps] == [("partial", 10_000)]
    [cut] = [w for w in report.warnings if w.code == "trace_cut_off"]
    assert (cut.rank, cut.message) == (
        0,
        "the file is truncated; 4 complete entries were read",
    )


@pytest.mark.parametrize(
    ("odd", "compute_ns"),
    [
        (b'"dur": NaN', 2_000),
        (b'"dur": "5"', 7_000),
        (b'"dur": 5, "name": null', 7_000),
        (b'"dur": 5, "note": "\xff\xfe"', 7_000),
        (b'"dur": 5, "note": "a\tb"', 7_000),
        (b'"dur": 5, "pid": [1]', 7_000),  # another main stream
    ],
)
def test_an_invalid_event_does_not_lose_the_others(
    tmp_path: Path, odd: bytes, compute_ns: int
) -> None:
    two = GpuTrace(0).step(1, 0, 10).kernel("gemm", 0, 5).kernel("gemm", 6, 8)
    file = tmp_path / "rank0_trace.json"
    file.write_bytes(json.dumps(two.body()).encode().replace(b'"dur": 5', odd))
    report = analyze(file)
    assert [row.compute_ns for row in report.steps] == [compute_ns]
    damaged = [w.message for w in report.warnings if w.code == "entries_damaged"]
    assert damaged == ([] if compute_ns > 2_000 else ["1 of 5 entries are damaged; ignored"])


def test_a_negative_duration_becomes_zero_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "rank0_trace.json"
    two = GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5).kernel("gemm", 8, 3)
    file.write_text(json.dumps(two.body()))
    report = analyze(file)
    assert [row.compute_ns for row in report.steps] == [5_000]
    assert [w.rank for w in report.warnings if w.code == "negative_durations"] == [0]


@pytest.mark.parametrize("category", ["gcu_runtime", "Runtime", "cuda_driver", "supa_driver"])
def test_launches_of_every_device_are_launches(tmp_path: Path, category: str) -> None:
    body = GpuTrace().step(1, 0, 10).kernel("gemm", 3, 5, launched=1).body()
    body["traceEvents"][1]["cat"] = category
    (tmp_path / "rank0.json").write_text(json.dumps(body))
    [found] = read_recording([tmp_path]).traces
    assert found.events.find_launch_ns(np.arange(3)).tolist() == [-1, 1_000, 1_000]


def test_a_trace_of_an_unknown_tool_gives_a_note(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "AscendCL", "name": "op", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [event]}))
    [found] = read_recording([tmp_path]).traces
    assert [note.code for note in found.notes] == ["unknown_categories"]


def test_a_key_without_a_value_loses_nothing(tmp_path: Path) -> None:
    """Some builds of torch write groups without a description so."""
    one = GpuTrace(1, 2, groups=[("0", "GAP", (0, 1))]).step(1, 0, 10).all_reduce(
        2, 8, **{"Process Group Description": "GAP"}
    )  # fmt: skip
    text = json.dumps(one.body() | {"note": "NAN"})
    text = text.replace('"GAP"', "").replace('"NAN"', "NaN")
    (tmp_path / "trace.json").write_text(text)
    [found] = read_recording([tmp_path]).traces
    assert (found.rank, found.world_size, found.host) == (1, 2, "host0")
    assert found.calls.message_bytes.tolist() == [4000]
    assert [note.code for note in found.notes] == []


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        ("be", "only 4 asynchronous events (phases b, n, e)"),
        ("bne", "only 6 asynchronous events (phases b, n, e)"),
        ("BE", "only 4 begin and end events (phases B, E)"),
    ],
)
def test_a_file_of_events_without_a_duration_says_what_it_has(
    tmp_path: Path, phases: str, found: str
) -> None:
    entries = [
        {"cat": "resnet50", "name": str(i), "id": str(i), "ph": phase, "ts": i, "pid": 0}
        for i in range(2)
        for phase in phases
    ]
    file = tmp_path / "chrome_trace.json"
    file.write_text(json.dumps(entries, indent=4))
    with pytest.raises(DataError) as named:
        analyze(file)
    assert named.value.problem == f"{found} and none with a duration"
    with pytest.raises(DataError, match=r"no trace found; chrome_trace\.json: only"):
        analyze(tmp_path)
