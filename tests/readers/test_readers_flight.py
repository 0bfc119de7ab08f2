"""Flight Recorder dumps of every torch version, of two real hangs, and damaged ones."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.reading import head_of_file, on_disk
from support.required import list_shared_files, shared_trace

from stepsplit.analyzer import (
    OPS,
    DataError,
    FlightDump,
    FlightEntry,
    Frame,
    Group,
    GroupStatus,
    Note,
)
from stepsplit.analyzer.readers.flight_recorder import is_flight_dump, read_dump

T0 = 1_790_000_000_000_000_000
FRAME = {"name": "forward", "filename": "train.py", "line": 12}
Content = dict[str, Any] | list[Any]
Writer = Callable[[Content], bytes]


def as_json(content: Content) -> bytes:
    return json.dumps(content).encode()


def as_pickle(content: Content) -> bytes:
    return pickle.dumps(content, 2)


def dump_of(folder: Path, content: bytes, name: str = "dump_3") -> FlightDump:
    file = folder / name
    file.write_bytes(content)
    assert is_flight_dump(head_of_file(file))
    return read_dump(on_disk(file))


def modern() -> dict[str, Any]:
    """An all_gather that is done, and a receive that waits, as torch 2.4 and later write them."""
    done = {
        "record_id": 7, "pg_id": 2, "process_group": ("12", "TP"), "collective_seq_id": 41,
        "p2p_seq_id": 0, "op_id": 41, "is_p2p": False, "profiling_name": "nccl:_all_gather_base",
        "time_created_ns": T0, "time_discovered_started_ns": T0 + 30,
        "time_discovered_completed_ns": T0 + 90, "duration_ms": 0.05, "input_sizes": [[3, 2]],
        "input_dtypes": ["BFloat16"], "output_sizes": [[6, 2]], "output_dtypes": ["BFloat16"],
        "state": "completed", "retired": True, "timeout_ms": 600_000, "thread_id": "1",
        "thread_name": "pt_main", "frames": [FRAME, FRAME],
    }  # fmt: skip
    waiting = {
        "record_id": 8, "pg_id": 5, "process_group": ("30", "PP"), "collective_seq_id": 41,
        "p2p_seq_id": 9, "op_id": 50, "is_p2p": True, "profiling_name": "nccl:recv 1<-0",
        "time_created_ns": T0 + 500, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "input_sizes": [[4]], "input_dtypes": ["Float"],
        "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "scheduled", "retired": False,
        "timeout_ms": 600_000, "thread_id": "1", "thread_name": "pt_main", "frames": [],
    }  # fmt: skip
    return {
        "version": "2.9",
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
            "12": {"name": "12", "desc": "TP", "ranks": "[2, 3]"},
            "30": {"name": "30", "desc": "PP", "ranks": "[1, 3]"},
        },
        "pg_status": {
            "2": {
                "last_enqueued_collective": 41,
                "last_started_collective": 41,
                "last_completed_collective": 41,
            }
        },
        "nccl_version": "2.27.3",
        "entries": [waiting, done],
    }


DONE = FlightEntry(
    group_name="12", group_description="TP", group_number=2, seq=41, name="nccl:_all_gather_base",
    created_unix_ns=T0, dtype="BFloat16", input_bytes=12, output_bytes=24, state="completed",
    is_p2p=False, started_unix_ns=T0 + 30, completed_unix_ns=T0 + 90, dur_ns=50_000, retired=True,
    timeout_ns=600_000_000_000, thread_name="pt_main",
    stack=(Frame("forward", "train.py", 12), Frame("forward", "train.py", 12)),
)  # fmt: skip
WAITING = FlightEntry(
    group_name="30", group_description="PP", group_number=5, seq=9, name="nccl:recv 1<-0",
    created_unix_ns=T0 + 500, dtype="Float", input_bytes=16, output_bytes=16, state="scheduled",
    is_p2p=True, started_unix_ns=-1, completed_unix_ns=-1, dur_ns=-1, retired=False,
    timeout_ns=600_000_000_000, thread_name="pt_main", stack=(),
)  # fmt: skip


@pytest.mark.parametrize("write", [as_json, as_pickle])
def test_a_dump_has_calls_and_their_states(tmp_path: Path, write: Writer) -> None:
    dump = dump_of(tmp_path, write(modern()))
    assert (dump.version, dump.rank, dump.notes) == ("2.9", 3, ())
    assert dump.entries == (DONE, WAITING)
    assert dump.groups == (
        Group("0", (0, 1, 2, 3), "default_pg"),
        Group("12", (2, 3), "TP"),
        Group("30", (1, 3), "PP"),
    )
    assert dump.statuses == (GroupStatus(2, "12", 41, 41),)
    calls = dump.calls
    assert (calls.rank, calls.world_size, calls.host, calls.t0_unix_ns) == (3, 4, "", T0)
    assert rows(dump) == [
        ("all_gather", 1, 41, "bfloat16", -1, 12, 24, 0, 50_000),
        ("recv", 2, 9, "float32", 1, 16, 16, 500, -1),
    ]
    assert calls.calls.event.tolist() == [-1, -1]


def rows(dump: FlightDump) -> list[tuple[object, ...]]:
    """Op, group, seq, dtype, peer, input and message bytes, issued and duration of each call."""
    calls = dump.calls.calls
    return [
        (OPS[op], group, seq, calls.dtypes[dtype], peer, given, moved, issued, lasted)
        for op, group, seq, dtype, peer, given, moved, issued, lasted in zip(
            calls.op.tolist(), calls.group_id.tolist(), calls.seq.tolist(), calls.dtype.tolist(),
            calls.peer.tolist(), calls.input_bytes.tolist(), calls.message_bytes.tolist(),
            calls.issued_ns.tolist(), dump.calls.dur_ns.tolist(), strict=True,
        )
    ]  # fmt: skip


def test_json_writes_numbers_as_text_and_unknown_times_as_zero(tmp_path: Path) -> None:
    content = modern()
    for entry in content["entries"]:
        entry.pop("frames")
    content["entries"][0]["time_discovered_started_ns"] = 0
    content["entries"][0]["time_discovered_completed_ns"] = 0
    status = content["pg_status"]["2"]
    content["pg_status"] = {"2": {key: str(number) for key, number in status.items()}}
    dump = dump_of(tmp_path, gzip.compress(as_json(content)), "rank3_flight.json.gz")
    assert dump.entries[1] == WAITING
    assert dump.statuses == (GroupStatus(2, "12", 41, 41),)


def test_the_first_dumps_are_a_bare_list_in_microseconds(tmp_path: Path) -> None:
    entry = {
        "pg_id": 1, "seq_id": 6, "profiling_name": "nccl:all_reduce", "state": "started",
        "time_created_us": T0 // 1000, "input_sizes": [[3, 4]], "output_sizes": [[3, 4]],
        "retired": False, "frames": [FRAME],
    }  # fmt: skip
    dump = dump_of(tmp_path, as_pickle([entry]), "nccl_trace_rank_3")
    assert (dump.version, dump.rank, dump.groups) == ("", 3, (Group("1", (), ""),))
    assert dump.entries[0].created_unix_ns == T0
    assert dump.entries[0].stack == (Frame("forward", "train.py", 12),)
    assert rows(dump) == [("all_reduce", 0, 6, "", -1, -1, -1, 0, -1)]


def test_version_1_has_one_sequence_number_and_no_p2p_flag(tmp_path: Path) -> None:
    entry = {
        "record_id": 0, "pg_id": 0, "seq_id": 2, "profiling_name": "nccl:send 3->1",
        "time_created_ns": T0, "input_sizes": [5], "input_dtypes": ["Half"], "output_sizes": [[5]],
        "output_dtypes": ["Half"], "state": "completed", "retired": True, "pg_name": "0",
        "time_discovered_started_ns": T0 + 10, "time_discovered_completed_ns": T0 + 60,
    }  # fmt: skip
    content = {"version": "1.5", "entries": [entry], "pg_config": {"0": [0, 1, 2, 3]}}
    dump = dump_of(tmp_path, as_pickle(content))
    assert rows(dump) == [("send", 0, 2, "float16", 1, 10, 10, 0, 50)]
    assert dump.entries[0].is_p2p
    assert dump.calls.world_size == 4


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("_dump_14", 14), ("rank3_flight.json.gz", 3), ("rank_3", 3), ("nccl_trace_rank_3", 3),
        ("fr-Rank07.pkl", 7), ("dump_2.pickle", 2), ("rank_5/dump.json", 5), ("fr.json", -1),
        ("dump_20260923_1", 1), ("dump_1758580156", -1),
    ],
)  # fmt: skip
def test_a_rank_is_read_from_the_name(tmp_path: Path, name: str, rank: int) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    dump = dump_of(tmp_path, as_json({"version": "2.10", "pg_config": {}, "pg_status": {}}), name)
    assert (dump.rank, dump.calls.rank) == (rank, rank)
    assert [note.code for note in dump.notes] == (["rank_unknown"] if rank < 0 else [])


def test_the_only_common_member_of_all_groups_is_the_rank(
    tmp_path: Path,
) -> None:
    assert dump_of(tmp_path, as_json(modern()), "fr.json").rank == 3
    assert dump_of(tmp_path, as_json(modern()), "worker_1_rank0.json").rank == 3


def test_a_rank_in_the_name_is_ignored_if_groups_contradict_it(tmp_path: Path) -> None:
    world = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for name, rank in (("dump_1", 1), ("dump_9", -1)):
        content = {"version": "2.10", "pg_config": world, "pg_status": {}}
        assert dump_of(tmp_path, as_json(content), name).rank == rank


def test_group_numbers_get_names_by_order_if_all_have_a_status(tmp_path: Path) -> None:
    content = modern() | {"entries": []}
    content["pg_status"] = {"9": {"last_enqueued_collective": 1}, "00": {}, "2": {}, "odd": {}}
    assert dump_of(tmp_path, as_json(content)).statuses == (
        GroupStatus(0, "0", -1, -1),
        GroupStatus(2, "12", -1, -1),
        GroupStatus(9, "30", 1, -1),
    )
    del content["pg_status"]["2"]
    assert [s.group_name for s in dump_of(tmp_path, as_json(content)).statuses] == ["", ""]


ODD: list[Any] = [
    3, None, {}, {"profiling_name": 7}, {"profiling_name": "nccl:send", "pg_id": 2**70},
    {"profiling_name": "nccl:all_reduce", "time_created_ns": "soon"},
]  # fmt: skip


@pytest.mark.parametrize("write", [as_json, as_pickle])
def test_invalid_entries_are_skipped_and_counted(tmp_path: Path, write: Writer) -> None:
    content = modern()
    content["entries"] += ODD
    dump = dump_of(tmp_path, write(content))
    assert dump.entries == (DONE, WAITING)
    assert dump.notes == (Note("flight_odd", "6 invalid entries of the dump are skipped", 3),)


@pytest.mark.parametrize("sizes", [None, 3, [], "x", [["a"]], [[-1]], [[2**62, 2**62]], [[1] * 99]])
def test_invalid_sizes_are_unknown(tmp_path: Path, sizes: object) -> None:
    content = modern()
    content["entries"][0]["input_sizes"] = sizes
    assert dump_of(tmp_path, as_json(content)).entries[1].input_bytes == -1


def test_several_tensors_add_up_each_by_its_dtype(tmp_path: Path) -> None:
    content = modern()
    content["entries"][0] |= {"input_sizes": [[2], [], [3, 0]], "input_dtypes": ["Half", "Long"]}
    content["entries"][1] |= {"input_sizes": [[2], []], "input_dtypes": ["Half", "Long"]}
    dump = dump_of(tmp_path, as_json(content))
    assert [entry.input_bytes for entry in dump.entries] == [12, 6]


def test_a_truncated_json_dump_gives_its_complete_entries(tmp_path: Path) -> None:
    text = as_json({"entries": modern()["entries"], "version": "2.9"})
    middle = text.index(b'"record_id": 7')
    dump = dump_of(tmp_path, text[:middle])
    assert dump.entries == (WAITING,)
    assert [note.code for note in dump.notes] == ["flight_torn"]
    assert len(dump_of(tmp_path, text[:-10]).entries) == 2


@pytest.mark.parametrize("write", [as_json, as_pickle])
def test_a_truncated_dump_is_read_or_refused_in_one_line(tmp_path: Path, write: Writer) -> None:
    whole = write(modern())
    file = tmp_path / "dump_3"
    for cut in range(0, len(whole), 11):
        for content in (whole[:cut], gzip.compress(whole)[:cut]):
            file.write_bytes(content)
            try:
                read_dump(on_disk(file))
            except DataError as error:
                assert "\n" not in str(error)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_raise_nothing_but_dataerror(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(data.draw(st.sampled_from([as_json(modern()), as_pickle(modern())])))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
        content[place] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "dump_3"
    file.write_bytes(content)
    is_flight_dump(bytes(content))
    try:
        read_dump(on_disk(file))
    except DataError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1",
        b"[1, 2]",
        b'{"version": "2.9"}',
        b"{" * 5000,
        b'{"traceEvents": []}',
        b"7",
        b"\xff\xfe",
        b'"entries"',
    ],
)
def test_a_file_that_is_not_a_dump_is_an_error(tmp_path: Path, content: bytes) -> None:
    assert not is_flight_dump(content)
    file = tmp_path / "rank0.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match="not a Flight Recorder dump"):
        read_dump(on_disk(file))


def real(incident: str, rank: int) -> FlightDump:
    return read_dump(on_disk(shared_trace("flight_recorder_nvrx") / incident / f"_dump_{rank}"))


FAULTY = (9, 14)
EXPERTS = "EXPERT_MODEL_PARALLEL_GROUP"


@pytest.mark.parametrize(
    ("incident", "counts"),
    [
        ("lock_gil_1st", [11] * 8 + [9, 0, 9, 9, 9, 9, 0, 9]),
        ("gpu_error_2nd", [11] * 8 + [25, 20, 25, 25, 25, 25, 20, 25]),
    ],
)
def test_all_ranks_of_two_hangs(incident: str, counts: list[int]) -> None:
    dumps = [real(incident, rank) for rank in range(16)]
    assert [len(dump.entries) for dump in dumps] == counts
    for rank, dump in enumerate(dumps):
        assert (dump.rank, dump.version, dump.notes) == (rank, "2.9", ())
        assert dump.calls.world_size == 16
        assert len(dump.groups) == len(dump.statuses) == 13
        assert all(status.group_name for status in dump.statuses)
        assert all(rank in group.ranks for group in dump.groups)
        assert {entry.state for entry in dump.entries} <= {"scheduled"}


def all_to_alls(incident: str) -> dict[int, GroupStatus]:
    """How far each rank of the experts' group came on it."""
    found = {}
    for rank in range(8, 16):
        dump = real(incident, rank)
        group = next(group for group in dump.groups if group.description == EXPERTS)
        assert group == Group("72", tuple(range(8, 16)), EXPERTS)
        found[rank] = next(s for s in dump.statuses if s.group_name == "72")
    return found


def test_with_the_lock_held_the_faulty_ranks_never_call_what_the_others_wait_in() -> None:
    """The experts' all_to_all 45265 is the first that 9 and 14 lack; nothing of theirs is open."""
    came = all_to_alls("lock_gil_1st")
    for rank, status in came.items():
        assert status.last_completed == 45264
        assert status.last_enqueued == (45264 if rank in FAULTY else 45267)
    assert all(not real("lock_gil_1st", rank).entries for rank in FAULTY)


def test_with_the_device_in_error_the_faulty_ranks_are_stuck_in_earlier_calls() -> None:
    """Their all_to_all 44788 never completes; the others are through it, and wait in 44791."""
    came = all_to_alls("gpu_error_2nd")
    for rank, status in came.items():
        last = (44790, 44787) if rank in FAULTY else (44796, 44790)
        assert (status.last_enqueued, status.last_completed) == last
        waits = [e for e in real("gpu_error_2nd", rank).entries if e.group_description == EXPERTS]
        assert waits[0].seq == status.last_completed + 1
        assert waits[0].name == "nccl:all_to_all"


def test_a_peer_is_a_global_rank_in_every_group() -> None:
    """ "recv 1<-0" counts within the pipeline's group of ranks 2 and 10."""
    calls = real("gpu_error_2nd", 10).calls.calls
    assert set(calls.peer[calls.is_message].tolist()) == {2}


def test_no_other_file_is_recognized_as_a_dump(subtests: pytest.Subtests) -> None:
    for file in list_shared_files():
        with subtests.test(file.name):  # of these files the dumps alone have no suffix
            assert is_flight_dump(head_of_file(file)) == (not file.suffix)
