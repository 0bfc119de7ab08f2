"""Dumps of NCCL's Inspector, of every format that its releases wrote."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reading import on_disk
from support.required import SHARED_TRACES, shared_trace

from stepsplit.analyzer import OPS, DataError, Group, InspectorLog
from stepsplit.analyzer.readers.nccl.inspector import is_inspector_log, read_inspector

US = 1_749_490_229_087_081
Json = dict[str, Any]


def context(comm: str = "0xa", rank: int = 1, name: str = "", version: str = "v4.0") -> Json:
    header = {"id": comm, "rank": rank, "n_ranks": 4, "nnodes": 1}
    return {
        "header": header | ({"comm_name": name} if name else {}),
        "metadata": {
            "inspector_output_format_version": version,
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": US,
            "hostname": "node7",
            "pid": 42,
        },
    }


def coll(name: str, sn: int, size: int, us: float, **more: object) -> Json:
    fields = {"coll": name, "coll_sn": sn, "coll_msg_size_bytes": size, "coll_exec_time_us": us}
    timed = {"coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 2.5, "coll_busbw_gbs": 3.75}
    return {"coll_perf": fields | timed | more}


def p2p(name: str, sn: int, peer: int, size: int, us: int) -> Json:
    fields = {"p2p": name, "p2p_sn": sn, "p2p_peer": peer, "p2p_msg_size_bytes": size}
    timed = {"p2p_timing_source": "kernel_cpu", "p2p_algobw_gbs": 1.0, "p2p_busbw_gbs": 1.0}
    return {"p2p_perf": fields | {"p2p_exec_time_us": us} | timed}


def marker(colls: int, p2ps: int, dropped: int = 0, **more: str) -> Json:
    counts = {"coll_records": colls, "p2p_records": p2ps, "coll_dropped_total": dropped}
    return context(version="v4.3", **more) | {"dump_stats": counts}


def lines(*records: Json) -> bytes:
    return b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records)


def read(folder: Path, content: bytes) -> InspectorLog:
    file = folder / "node7-pid42.log"
    file.write_bytes(content)
    return read_inspector(on_disk(file))


def rows(log: InspectorLog) -> list[tuple[object, ...]]:
    """(communicator, rank, op, seq, peer, input, message, duration) of each call."""
    return [
        (c.groups[0].name, c.rank, OPS[c.calls.op[i]], *(int(column[i]) for column in columns))
        for c in log.calls
        for columns in [(c.calls.seq, c.calls.peer, c.calls.input_bytes, c.calls.message_bytes,
                         c.dur_ns)]
        for i in range(len(c.calls))
    ]  # fmt: skip


CALLS = [
    coll("AllReduce", 7, 1000, 110),
    coll("AllGather", 3, 1000, 12),
    p2p("Send", 9, 2, 500, 8),
]
EXPECTED = [
    ("0xa", 1, "all_reduce", 7, -1, 1000, 1000, 110_000),
    ("0xa", 1, "all_gather", 3, -1, 1000, 4000, 12_000),
    ("0xa", 1, "send", 9, 2, 500, 500, 8_000),
]
DUMPS = {
    "a header each": lines(*(context() | call for call in CALLS)),
    "headers once": lines(marker(2, 1), *CALLS),
    "spread over lines": b"\n".join(json.dumps(context() | c, indent=2).encode() for c in CALLS),
    "windows lines": lines(*(context() | call for call in CALLS)).replace(b"\n", b"\r\n"),
    "packed": gzip.compress(lines(*(context() | call for call in CALLS))),
}


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
def test_all_formats_give_the_same_log(tmp_path: Path, dump: bytes) -> None:
    log = read(tmp_path, dump)
    assert rows(log) == EXPECTED
    assert (log.host, log.pid, log.notes) == ("node7", 42, ())
    assert log.timings == ("kernel_gpu", "kernel_cpu")
    (measured,) = log.measured
    assert measured.timing.tolist() == [0, 0, 1]
    assert measured.algbw_bytes_per_s.tolist() == [2.5e9, 2.5e9, 1e9]
    assert measured.busbw_bytes_per_s.tolist() == [3.75e9, 3.75e9, 1e9]


@pytest.mark.parametrize(
    ("name", "op", "input_bytes", "message_bytes"),
    [
        ("AllReduce", "all_reduce", 100, 100),
        ("AllGather", "all_gather", 100, 400),
        ("AllGatherV", "all_gather", 100, 400),
        ("ReduceScatter", "reduce_scatter", 400, 400),
        ("Broadcast", "broadcast", 100, 100),
        ("Reduce", "reduce", 100, 100),
        ("SendRecv", "send_recv", 100, 100),
        ("All2All", "all_to_all", -1, -1),
        ("Invalid", "unknown", 100, 100),
    ],
)
def test_sizes_are_those_of_nccl_tests(
    tmp_path: Path, name: str, op: str, input_bytes: int, message_bytes: int
) -> None:
    log = read(tmp_path, lines(context() | coll(name, 1, 100, 5)))
    assert rows(log) == [("0xa", 1, op, 1, -1, input_bytes, message_bytes, 5_000)]


def test_each_communicator_and_rank_has_its_calls(tmp_path: Path) -> None:
    """As one process that drives two GPUs writes them, the dumps of its communicators in turn."""
    dump = lines(
        marker(1, 0, comm="0xa", name="DP"), coll("AllReduce", 1, 8, 1),
        marker(1, 0, comm="0xb", name="unknown"), coll("AllReduce", 1, 8, 2),
        marker(1, 0, comm="0xa", name="DP"), coll("AllReduce", 2, 8, 3),
        context("0xa", rank=2, name="DP") | coll("AllReduce", 1, 8, 4),
    )  # fmt: skip
    log = read(tmp_path, dump)
    assert [(c.groups, c.rank, c.calls.seq.tolist()) for c in log.calls] == [
        ((Group("DP", (0, 1, 2, 3), "0xa"),), 1, [1, 2]),
        ((Group("0xb", (0, 1, 2, 3), "0xb"),), 1, [1]),
        ((Group("DP", (0, 1, 2, 3), "0xa"),), 2, [1]),
    ]


def test_verbose_dumps_have_start_times(tmp_path: Path) -> None:
    late, early = (
        {"event_trace_ts": {"coll_start_ts": US + n, "kernel_events": [{"channel_id": 0}]}}
        for n in (90, 30)
    )
    dump = lines(
        context() | coll("AllReduce", 1, 8, 1, **late),
        context() | coll("AllReduce", 2, 8, 1),
        context("0xb") | coll("AllReduce", 1, 8, 1, **early),
    )
    log = read(tmp_path, dump)
    assert [c.calls.issued_ns.tolist() for c in log.calls] == [[60_000, -1], [0]]
    assert {c.t0_unix_ns for c in log.calls} == {(US + 30) * 1000}


def test_without_starts_the_log_begins_with_its_first_dump(tmp_path: Path) -> None:
    (calls,) = read(tmp_path, DUMPS["headers once"]).calls
    assert calls.t0_unix_ns == US * 1000
    assert calls.calls.issued_ns.tolist() == [-1, -1, -1]
    assert (calls.host, calls.world_size) == ("node7", -1)


def test_invalid_numbers_are_unknown(tmp_path: Path) -> None:
    """A clock that went back, a time of zero (which old releases divided by), a fraction."""
    dump = lines(context() | coll("AllReduce", 1, 8, 2**64 - 5, coll_algobw_gbs="nan"))
    dump += lines(context() | coll("AllReduce", 2, 8, 0)).replace(b":2.5", b":inf")
    dump += lines(context() | coll("AllReduce", 3, 2**64 - 1, 1.234))
    log = read(tmp_path, dump)
    assert log.calls[0].dur_ns.tolist() == [-1, 0, 1_234]
    assert log.calls[0].calls.message_bytes.tolist() == [8, 8, -1]
    algbw = log.measured[0].algbw_bytes_per_s
    np.testing.assert_array_equal(algbw, [np.nan, np.nan, 2.5e9])


def test_invalid_lines_and_calls_without_a_communicator_are_counted(tmp_path: Path) -> None:
    """A torn marker must not give its calls to the communicator before it."""
    torn = lines(marker(1, 0, comm="0xb"))[:60] + b"\n"
    proxy = {"proxy_trace": {"record_type": "proxy_step", "rank": 2}}
    whole = lines(marker(1, 0, dropped=5), coll("AllReduce", 1, 8, 1))
    log = read(tmp_path, whole + torn + lines(coll("AllReduce", 6, 8, 1), proxy) + b"{}\n\n")
    assert rows(log) == [("0xa", 1, "all_reduce", 1, -1, 8, 8, 1_000)]
    assert {note.code: note.message for note in log.notes} == {
        "lines_skipped": "2 lines are not complete Inspector records",
        "calls_skipped": "1 calls have no record that names their communicator; ignored",
        "calls_missing": "the Inspector dropped 5 calls; its ring buffer was full",
    }


@pytest.mark.parametrize("shape", ["a header each", "headers once", "spread over lines"])
def test_a_truncated_dump_gives_its_complete_records(tmp_path: Path, shape: str) -> None:
    dump = DUMPS[shape]
    for end in range(0, len(dump), 7):
        try:
            found = rows(read(tmp_path, dump[:end]))
        except DataError:
            continue
        assert found == EXPECTED[: len(found)]
    assert len(rows(read(tmp_path, dump[: dump.rindex(b"{")]))) == 2


def test_a_truncated_compressed_dump_has_a_note(tmp_path: Path) -> None:
    content = lines(*(context() | coll("AllReduce", i, i * 8, i) for i in range(5000)))
    packed = gzip.compress(content)
    log = read(tmp_path, packed[: len(packed) // 2])
    assert 0 < len(log.calls[0].calls) < 5000
    assert "file_cut" in [note.code for note in log.notes]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{\n" * 9000, b"[" * 90_000, b"\x1f\x8b\x08"])
def test_other_files_raise_a_data_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="no complete Inspector record"):
        read(tmp_path, content)


def test_damage_raises_only_data_errors(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(300):
        dump = bytearray(DUMPS["headers once"] + DUMPS["a header each"])
        for _ in range(chance.randint(1, 6)):
            dump[chance.randrange(len(dump))] = chance.randrange(256)
        is_inspector_log(bytes(dump))
        try:
            read(tmp_path, bytes(dump))
        except DataError:
            continue


def test_dumps_are_recognized_by_content() -> None:
    torn_first = DUMPS["a header each"][100:]
    for head in (*DUMPS.values(), torn_first, lines(marker(0, 0, dropped=1))):
        head = gzip.decompress(head) if head.startswith(b"\x1f\x8b") else head
        assert is_inspector_log(head)
    for other in (b"", b"\xff" * 100, b'{"header": 1, "n_ranks": 2}', b'{"header":{"n_ranks":8}}'):
        assert not is_inspector_log(other)


def test_no_other_real_file_is_recognized_as_a_dump() -> None:
    files = [file for file in shared_trace("nccl_logs").parent.rglob("*") if file.is_file()]
    assert files
    for file in files:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            assert not is_inspector_log(content.read(1 << 16)), file


def samples() -> list[str]:
    """The records of one call that NVIDIA's documentation shows."""
    pages = sorted((SHARED_TRACES / "nccl_inspector").glob("*README.md"))
    return [
        text for page in pages for text in re.findall(r"```json\n(.*?)```", page.read_text(), re.S)
    ]


def test_the_documented_samples_agree_with_their_own_bandwidths(tmp_path: Path) -> None:
    """Their algbw is the message by nccl-tests over the time: the sizes are what they should be."""
    shared_trace("nccl_inspector")
    log = read(tmp_path, "\n".join(samples()).encode())
    assert [row[2:] for row in rows(log)] == [
        ("reduce_scatter", 129, -1, 32 * 65536, 32 * 65536, 110_000),
        ("all_reduce", 1407, -1, 17179869184, 17179869184, 61_974_000),
        ("reduce_scatter", 1231, -1, 8 * 2147483648, 8 * 2147483648, 41_057_000),
    ]
    for calls, measured in zip(log.calls, log.measured, strict=True):
        algbw = calls.calls.message_bytes / (calls.dur_ns / 1e9)
        np.testing.assert_allclose(algbw, measured.algbw_bytes_per_s, rtol=1e-6)
    assert [c.calls.issued_ns.tolist() for c in log.calls] == [[-1], [-1], [0]]
    assert log.calls[2].t0_unix_ns == 1752867229235059 * 1000
