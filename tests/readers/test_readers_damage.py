"""The smallest damaged files that broke a reader or lost more than the damage."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.builders import CpuTrace, GpuTrace
from support.reading import on_disk

from stepsplit.analyzer import DataError, KinetoFile, analyze
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.kineto import json_stream, reader
from stepsplit.analyzer.readers.kineto.json_stream import split_ranges
from stepsplit.analyzer.readers.kineto.trace_file import (
    join_parts,
    read_kineto,
    read_opening,
    read_range,
)
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.dashboard import cli

SAMPLES = Path(__file__).parents[2] / "sample_traces"
A, B, C = (json.dumps({"ph": "X", "name": name, "ts": 1, "dur": 2}) for name in "abc")


def read(folder: Path, content: str | bytes, name: str = "trace.json") -> KinetoFile:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read_kineto(on_disk(file))
    assert found is not None
    return found


def names(found: KinetoFile) -> list[str]:
    events = found.rows.events
    return [events.name_of(row) for row in range(len(events))]


def x(**fields: Any) -> str:
    return json.dumps({"ph": "X", "name": "x", "ts": 5, "dur": 1, "cat": "kernel"} | fields)


@pytest.mark.parametrize(
    ("text", "whole", "lost"),
    [
        (f'[{A},{{"ph":"X","args":{{"l":[{{"ph":"X","ts":9}},{{"ph":"X"', ["a"], 0),
        (f'[{A},{{"ph":"X","name":"}},{{', ["a"], 0),
        (f'[{A},{{"ph":"X","args":{{"l":[{{"a":1}},{{"b":2}}]}},"ts":9.', ["a"], 0),
        (f'[{A},{{"ph":"X","ts":1,"dur":NaN}},{B}],"x"', ["a", "b"], 1),
        (f'[{A},{{"ph":"X","ts":1,"args":{{"a":1}},{B},{C}]', ["a", "b", "c"], 1),
        (f'[{A},{{"ph":"X","ts":1,"na"me":"x"}},{B},{C}]', ["a", "b", "c"], 1),
        (f"[{A}],{B},{C}]", ["a", "b", "c"], 0),
        (f"[{A},[{B},{C}]", ["a", "b", "c"], 0),
        (f"[{A}{B},{C}]", ["a", "b", "c"], 0),
    ],
)
def test_damage_loses_only_the_entry_it_is_in(
    tmp_path: Path, text: str, whole: list[str], lost: int
) -> None:
    found = read(tmp_path, text)
    assert names(found) == whole
    assert found.rows.counts.lost == lost


def test_fields_after_a_damaged_last_entry_are_read(tmp_path: Path) -> None:
    info = '"distributedInfo": {"rank": 3, "world_size": 4}'
    found = read(tmp_path, f'{{"traceEvents": [{A}, {{"ph":"X" "ts":1}}], {info}}}')
    assert names(found) == ["a"]
    assert found.header.distributed.rank == 3
    assert found.notes[0].code == "entries_damaged"


def test_digits_beyond_a_float_survive_a_cut(tmp_path: Path) -> None:
    late = x(ts=5).replace(": 5,", ": 1721000000000001.123,")
    cut = read(tmp_path, f'[{late},{{"ph":"X","name":"}},{{')
    assert cut.rows.t0_unix_ns == 1_721_000_000_000_001_123


@pytest.mark.parametrize(
    "odd",
    [
        '"ts": "NaN"', '"ts": "1E+1000000"', '"ts": 1e99999999999999999999', '"dur": "-Infinity"',
        '"ts": true', '"name": "\\ud800"', '"args": {"x": "\\ud800"}', '"ph": "X"', '"ph": "M"',
        '"args": {"correlation": 99999999999999999999}', '"args": {"stream": 99999999999}',
        '"args": {"Collective name": "all_reduce", "dtype": "Float", "In msg nelems": 1e18}',
        '"args": {"Collective name": "x", "Process Group Ranks": "[Infinity]"}',
        '"args": {"Collective name": "x", "Process Group Ranks": "[99999999999]"}',
        '"args": {"Collective name": "x", "Seq": 99999999999999999999, "Dst Rank": 1e12}',
    ],
)  # fmt: skip
def test_an_invalid_value_is_ignored(tmp_path: Path, odd: str) -> None:
    text = json.dumps(GpuTrace().step(1, 0, 10).kernel("gemm", 0, 5).events)
    file = tmp_path / "trace.json"
    file.write_text(f"{text[:-1]}, {x()[:-1]}, {odd}}}]")
    report = analyze(file)
    assert [row.step for row in report.steps] == [1]
    assert report.steps[0].compute_ns >= 5_000


@pytest.mark.parametrize("dims", [[5], [{"a": 1}], [[10**12, "x"]], [[[10**12, [1]]]], [None]])
def test_invalid_shapes_give_an_unknown_size(tmp_path: Path, dims: list[Any]) -> None:
    args = {"Input Dims": dims, "Input type": ["float"], "Collective name": "allreduce"}
    trace = GpuTrace().step(1, 0, 10).kernel("ncclDevKernel_AllReduce", 2, 5, launched=1)
    trace.events.append({"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1,
                         "tid": 100, "ts": 0, "dur": 3, "args": args})  # fmt: skip
    assert len(analyze(trace.write(tmp_path)).steps) == 1


def test_times_of_other_phases_are_not_checked(tmp_path: Path) -> None:
    late = x(ts=5).replace(": 5,", ": 1721000000000001.123,")
    assert names(read(tmp_path, f'[{late},{{"ph":"M","ts":{{}}}}]')) == ["x"]


@pytest.mark.parametrize("fields", [b'"\xff": 1', b'"a": ' + b"[" * 5000 + b"]" * 5000])
def test_an_unreadable_header_loses_no_event(tmp_path: Path, fields: bytes) -> None:
    content = b"{" + fields + f', "traceEvents": [{A}]}}'.encode()
    assert names(read(tmp_path, content)) == ["a"]


def test_a_world_size_beyond_a_million_is_ignored(tmp_path: Path) -> None:
    body = GpuTrace(0, 2**31).step(1, 0, 10).kernel("gemm", 0, 5).body()
    assert read(tmp_path, json.dumps(body)).header.distributed.world_size == -1


def test_long_damage_loses_only_what_it_contains(tmp_path: Path) -> None:
    odd = '{"ph": "X", "ts": 1, "args": {"a": 1}'
    found = read(tmp_path, f"[{A},{','.join([odd] * 50_000)},{','.join([B] * 2_000)}]")
    assert names(found)[:1] == ["a"]
    assert len(names(found)) > 1_000


def test_the_fields_after_the_events_are_read_completely(tmp_path: Path) -> None:
    filler = np.random.default_rng(1).bytes(400_000).hex()
    body = {"traceEvents": [json.loads(A)], "x": filler, "distributedInfo": {"rank": 5}}
    packed = gzip.compress(json.dumps(body).encode())
    assert read(tmp_path, packed, "t.json.gz").header.distributed.rank == 5


@pytest.mark.parametrize("size", [100, 1 << 16, 2 << 20])
@pytest.mark.parametrize("at", [30, 9_000, 20_000, -5])
def test_a_gzip_gives_all_that_is_before_its_damage(tmp_path: Path, at: int, size: int) -> None:
    content = np.random.default_rng(1).integers(97, 105, 60_000, dtype=np.uint8).tobytes()
    packed = bytearray(gzip.compress(content))
    packed[at] ^= 0x10
    file = tmp_path / "t.gz"
    file.write_bytes(packed)
    with open_unpacked(on_disk(file)) as stream:
        found = b"".join(iter(lambda: stream.read(size), b""))
    assert found == _by_bytes(packed)
    assert stream.torn


def _by_bytes(packed: bytes | bytearray) -> bytes:
    state, found = zlib.decompressobj(wbits=31), b""
    for byte in packed:
        try:
            found += state.decompress(bytes([byte]))
        except zlib.error:
            break
    return found


def test_a_cut_zstd_gives_the_blocks_before_the_cut(tmp_path: Path) -> None:
    content = np.random.default_rng(1).bytes(1_000_000)
    file = tmp_path / "t.zst"
    file.write_bytes(pa.compress(content, codec="zstd", asbytes=True)[:900_000])
    with open_unpacked(on_disk(file)) as stream:
        found = stream.read(2 << 20)
    assert content.startswith(found)
    assert len(found) > 700_000


@pytest.mark.parametrize(
    "sample", ["dp4/rank0", "pp2_m8/rank1", "tp2_pp2_dp2/rank7", "with shapes"]
)
def test_ranges_of_a_sample_add_up_to_the_trace(
    sample: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "LEAST_RANGE_BYTES", 1 << 16)
    file = tmp_path / "trace.json"
    if sample == "with shapes":
        file.write_text(json.dumps(_with_shapes().body()))
    else:
        file.write_bytes(gzip.decompress((SAMPLES / f"{sample}_trace.json.gz").read_bytes()))
    opening, whole = read_opening(on_disk(file)), read_kineto(on_disk(file))
    assert opening is not None
    assert whole is not None
    for most in (2, 7):
        ranges = split_ranges(file, opening.array_at, most)
        assert 2 <= len(ranges) <= most
        found = join_parts(opening, [read_range(file, one) for one in ranges])
        assert _content(found) == _content(whole)


def _with_shapes() -> GpuTrace:
    """Kernels by turns with a grid alone and launched by an op with shapes."""
    trace = GpuTrace()
    for i in range(6_000):
        if i % 2:
            trace.op("aten::mm", i, i + 0.5, **{"Input Dims": [[i % 7, 8], [8, 4]]})
        trace.kernel("gemm", i, i + 1, launched=i + 0.25, grid=[i % 5 + 1, 1, 1])
    return trace


def _content(file: KinetoFile) -> tuple[object, ...]:
    events = file.rows.events
    lanes = [events.lanes[lane] for lane in events.lane.tolist()]
    shapes = file.rows.shapes
    columns = (events.start_ns, events.dur_ns, events.category, events.correlation, shapes.event)
    texts = [shapes.texts[text] for text in shapes.text_id.tolist()]
    return (file.header, file.notes, file.rows.counts, file.rows.t0_unix_ns, names(file), lanes,
            texts, *(column.tolist() for column in columns))  # fmt: skip


def bomb_in_a_zip(path: Path) -> None:
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("rank0_trace.json", "w") as member,
    ):
        for _ in range(64):
            member.write(b" " * (16 << 20))


def bomb_in_a_tar(path: Path) -> None:
    head = io.BytesIO()
    member = tarfile.TarInfo("rank0_trace.json")
    member.size = 1 << 30
    head.write(member.tobuf())
    path.write_bytes(gzip.compress(head.getvalue()) + gzip.compress(bytes(16 << 20)) * 64)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "make"), [("t.zip", bomb_in_a_zip), ("t.tar.gz", bomb_in_a_tar)])
def test_an_archive_of_a_gigabyte_of_zeros_is_refused(tmp_path: Path, name: str, make: Any) -> None:
    make(tmp_path / name)
    with pytest.raises(DataError, match="unpacks to over 100 times its size"):
        analyze(tmp_path / name)


def test_a_tar_of_a_sparse_member_counts_what_it_unpacks_to(tmp_path: Path) -> None:
    member = tarfile.TarInfo("rank0_trace.json")
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(8 << 40)}
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    with pytest.raises(DataError, match="unpacks to over 100 times its size"):
        analyze(tmp_path / "t.tar")


def test_a_zip_is_opened_once_for_all_of_its_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
        for number in range(40):
            archive.writestr(f"notes/{number}.json", "{}")
        archive.writestr("rank0_trace.json", json.dumps(CpuTrace().op("op", 0, 9).events))
    opened = []

    class Counted(zipfile.ZipFile):
        def __init__(self, *args: Any, **more: Any) -> None:
            opened.append(args)
            super().__init__(*args, **more)

    monkeypatch.setattr(zipfile, "ZipFile", Counted)
    assert analyze(tmp_path / "t.zip").steps
    assert len(opened) == 2, "to list and to read the members"


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    trace = GpuTrace(0, 2).step(1, 0, 10).kernel("gemm" * 3_000, 0, 10)
    (row,) = analyze(trace.write(tmp_path)).path_kernels
    assert row.kernel == "gemm" * 2_048


def test_more_names_than_can_be_classified_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_NAME_CHARACTERS", 30)
    trace = GpuTrace(0, 2).step(1, 0, 20).kernel("gemm" * 5, 0, 10).kernel("attention", 10, 20)
    analyze(trace.write(tmp_path))
    trace.kernel("softmax", 20, 21)
    with pytest.raises(
        DataError, match="names of its 3 kernels and ops have 36 characters; at most"
    ):
        analyze(trace.write(tmp_path))


def test_nested_steps_give_windows_without_overlap(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100).step(2, 5, 20).step(3, 20, 30).op("op", 1, 3)
    file = tmp_path / "rank0_trace.json"
    file.write_text(json.dumps(trace.events))
    assert analyze(file).steps


def test_a_link_to_itself_is_left_out_of_a_folder(tmp_path: Path) -> None:
    """As any other file of it that cannot be opened."""
    GpuTrace(0).step(1, 0, 100).kernel("gemm", 0, 60).write(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (warning,) = (one for one in analyze(tmp_path).warnings if "loop" in one.message)
    assert "Too many levels of symbolic links" in warning.message


@pytest.mark.parametrize(
    "command",
    [
        ["analyze", "alone"],
        ["analyze", "alone/loop"],
        ["calibrate", "alone"],
        ["model", "job.toml"],
        ["reduce", "alone/loop", "--out", "out"],
        ["redact", "run.json", "--out", "alone/loop"],
    ],
)
def test_a_link_to_itself_alone_is_one_line(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("alone").mkdir()
    Path("alone", "loop").symlink_to("loop")
    Path("run.json").write_text("{}")
    Path("job.toml").write_text(
        '[model]\npreset = "llama-3.1-8b"\n[training]\nseq_len = 8192\nmicro_batch = 1\n'
        'global_batch = 8\n[hardware]\npreset = "h100-sxm"\nmeasured = ["alone"]\n'
    )
    assert cli.run(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and ("alone" in error or "run.json" in error)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("", ""),
        (" \n\n", ""),
        ("SECOND", "the begin of another trace follows the end of the trace and is ignored"),
        ("REST", "more text follows the end of the trace and is ignored: 200 bytes or more"),
        ("\n]}", "more text follows the end of the trace and is ignored: 2 bytes or more"),
    ],
)
def test_what_follows_the_end_of_a_trace_is_said(tmp_path: Path, rest: str, message: str) -> None:
    """Two files joined, or one that was written over a longer one."""
    trace = GpuTrace(3, 4, groups=[("0", "dp", range(4))]).step(0, 0, 100).kernel("gemm", 0, 90)
    body = trace.body()
    info = body.pop("distributedInfo")
    text = json.dumps(body | {"distributedInfo": info})
    rest = rest.replace("SECOND", json.dumps(body)).replace("REST", text[-200:])
    (tmp_path / "rank3_trace.json").write_text(text + rest)
    recording = read_recording([tmp_path])
    [found] = recording.traces
    assert (found.rank, found.world_size) == (3, 4)
    messages = [note.message for note in found.notes if note.code == "text_after_trace"]
    assert [one[: len(message)] for one in messages] == [message] * bool(message)
