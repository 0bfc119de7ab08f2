"""Memory recordings: hand-made allocator snapshots, ones by torch, and a real timeline."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.builders import GpuTrace
from support.reading import head_of_file, on_disk
from support.required import list_shared_files, shared_trace

from stepsplit.analyzer import CategoryMemory, DataError, DeviceMemory, MemoryRecord, analyze
from stepsplit.analyzer.readers.memory_snapshot import is_memory_snapshot, read_memory

MIB = 1 << 20
BASE = 0x7F00_0000_0000
T0_US = 1_790_000_000_000_000
Json = dict[str, Any]


def record_of(folder: Path, content: object, protocol: int = 4) -> MemoryRecord:
    return read_bytes(folder, pickle.dumps(content, protocol))


def read_bytes(folder: Path, content: bytes) -> MemoryRecord:
    file = folder / "snapshot.pickle"
    file.write_bytes(content)
    assert is_memory_snapshot(head_of_file(file))
    return read_memory(on_disk(file))


def block(at: int, size: int, state: str, requested: int | None = None) -> Json:
    asked = size if requested is None else requested
    return {
        "address": BASE + at, "size": size, "requested_size": asked, "state": state, "frames": [],
    }  # fmt: skip


def segment(blocks: list[Json], device: int = 0, at: int = 0) -> Json:
    sizes = {state: sum(b["size"] for b in blocks if b["state"] in states) for state, states in (
        ("total", STATES), ("allocated", STATES[:1]), ("active", STATES[:2]))}  # fmt: skip
    return {
        "device": device, "address": BASE + at, "total_size": sizes["total"], "stream": 0,
        "allocated_size": sizes["allocated"], "active_size": sizes["active"],
        "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
        "frames": [], "blocks": blocks,
    }  # fmt: skip


STATES = ("active_allocated", "active_pending_free", "inactive")


def events(*acts: tuple[str, int, int]) -> list[Json]:
    """A microsecond apart: what the allocator did, at which address, with how many bytes."""
    return [
        {
            "action": action, "addr": BASE + at, "size": size, "stream": 0,
            "time_us": T0_US + i, "frames": [{"name": "f", "filename": "t.py", "line": 1}],
        }
        for i, (action, at, size) in enumerate(acts)
    ]  # fmt: skip


def snapshot() -> Json:
    """4 MiB reserved of 6; one tensor lives, one waits for its last use, one came and went."""
    blocks = [
        block(0, MIB, "active_allocated", MIB - 24),
        block(MIB, MIB, "active_pending_free", MIB - 100),
        block(2 * MIB, 2 * MIB, "inactive", 0),
    ]
    trace = events(
        ("segment_alloc", 0, 4 * MIB),
        ("alloc", 0, MIB - 24),
        ("alloc", MIB, MIB - 100),
        ("alloc", 2 * MIB, 1000),
        ("free_requested", 2 * MIB, 1000),
        ("free_completed", 2 * MIB, 1000),
        ("free_requested", MIB, MIB - 100),
        ("segment_free", 8 * MIB, 2 * MIB),
        ("snapshot", 0, 0),
    )
    return {
        "segments": [segment(blocks)],
        "device_traces": [trace, []],
        "allocator_settings": {"max_split_size": -1, "expandable_segments": False},
        "external_annotations": [],
    }


def numbers(device: DeviceMemory) -> tuple[int, ...]:
    return (
        device.device, device.allocated_bytes, device.active_bytes, device.requested_bytes,
        device.reserved_bytes, device.segments,
    )  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_a_snapshot_has_a_state_and_a_curve(tmp_path: Path, protocol: int) -> None:
    record = record_of(tmp_path, snapshot(), protocol)
    assert (record.kind, record.categories, record.notes) == ("snapshot", (), ())
    (device,) = record.devices
    assert numbers(device) == (0, MIB, 2 * MIB, 2 * MIB - 124, 4 * MIB, 1)
    assert device.curve.allocated_bytes.tolist() == [
        0, 0, MIB, 2 * MIB, 2 * MIB + 1024, 2 * MIB, 2 * MIB, MIB, MIB, MIB,
    ]  # fmt: skip
    assert device.curve.reserved_bytes.tolist() == [2 * MIB] + [6 * MIB] * 7 + [4 * MIB] * 2
    assert device.curve.time_ns.tolist() == [T0_US * 1000] + [(T0_US + i) * 1000 for i in range(9)]
    assert device.peak_allocated_bytes == 2 * MIB + 1024
    assert device.peak_reserved_bytes == 6 * MIB


def test_the_peak_is_divided_by_stack(tmp_path: Path) -> None:
    """Of the peak after the third allocation: a tensor of the final state, one freed after it, the
    one that is freed at once, and what was there before the recording."""
    content = snapshot()
    trace = content["device_traces"][0]
    assert [one["action"] for one in trace[1:4]] == ["alloc"] * 3
    for number, one in enumerate(trace[1:4]):
        frames = [{"name": "forward", "filename": "/home/me/job/model.py", "line": 7}]
        one["frames"] = [
            {
                "name": "linear",
                "filename": "/opt/site-packages/torch/nn/functional.py",
                "line": 10 + number // 2,
            },
            *frames,
        ]
    lost = events(("free_requested", 6 * MIB, 512))
    content["device_traces"][0] = [*trace[:6], *lost, *trace[6:]]
    (device,) = record_of(tmp_path, content).devices
    linear, line = "torch/nn/functional.py:{} linear", "model.py:7 forward"
    known = [(one.size_bytes, one.count, one.stack) for one in device.stacks]
    assert sum(one[0] for one in known) == device.peak_allocated_bytes
    assert known == [
        (2 * MIB, 2, (linear.format(10), line)),
        (1024, 1, (linear.format(11), line)),
        (512, 1, ()),
    ]


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["/home/alice/train.py"], ["train.py"]),
        (["/scratch/alice/train.py", "/scratch/alice/net/a/b.py"], ["train.py", "a/b.py"]),
        (["/home/alice/train.py", "/opt/megatron/core/x.py"], ["train.py", "core/x.py"]),
        (["C:\\Users\\alice\\train.py", "/root/y.py"], ["train.py", "y.py"]),
        (
            ["/usr/lib/python3.11/queue.py", "/home/alice/train.py"],
            ["python3.11/queue.py", "train.py"],
        ),
        (["??", "<string>", "/Users/alice/job/train.py"], ["??", "<string>", "train.py"]),
    ],
)
def test_a_stack_does_not_say_whose_program_it_is(
    tmp_path: Path, files: list[str], shown: list[str]
) -> None:
    content = snapshot()
    for one in content["device_traces"][0]:
        one["frames"] = [{"name": "f", "filename": file, "line": 1} for file in files]
    (device,) = record_of(tmp_path, content).devices
    assert {one.stack for one in device.stacks} - {()} == {tuple(f"{one}:1 f" for one in shown)}


def test_stacks_that_are_none_are_unknown(tmp_path: Path) -> None:
    content = snapshot()
    odd: list[Any] = [None, 7, ["no frame"], [{"name": []}], [{"filename": {}}], [{}], {"name": 1}]
    for one, frames in zip(content["device_traces"][0], odd, strict=False):
        one["frames"] = frames
    (device,) = record_of(tmp_path, content).devices
    assert device.peak_allocated_bytes == 2 * MIB + 1024
    assert {one.stack for one in device.stacks} <= {(), ("t.py:1 f",)}


@pytest.mark.parametrize("lost", range(9))
def test_a_trace_without_its_beginning_has_the_same_end(tmp_path: Path, lost: int) -> None:
    whole = record_of(tmp_path, snapshot()).devices[0].curve
    content = snapshot()
    content["device_traces"][0] = content["device_traces"][0][lost:]
    rest = record_of(tmp_path, content).devices[0].curve
    assert rest.allocated_bytes.tolist() == whole.allocated_bytes.tolist()[lost:]
    assert rest.reserved_bytes.tolist() == whole.reserved_bytes.tolist()[lost:]


def test_without_a_trace_there_is_no_peak(tmp_path: Path) -> None:
    content = snapshot() | {"device_traces": []}
    (device,) = record_of(tmp_path, content).devices
    assert numbers(device) == (0, MIB, 2 * MIB, 2 * MIB - 124, 4 * MIB, 1)
    assert (device.peak_allocated_bytes, device.peak_reserved_bytes, len(device.curve)) == (
        -1, -1, 0,
    )  # fmt: skip


def test_segments_alone_and_blocks_of_1_13_give_the_same_state(tmp_path: Path) -> None:
    old = snapshot()["segments"]
    for one in old[0]["blocks"]:
        asked = one.pop("requested_size")
        del one["address"], one["frames"]
        one["history"] = [{"addr": BASE, "real_size": asked, "frames": []}]
    assert numbers(record_of(tmp_path, old).devices[0]) == (
        0, MIB, 2 * MIB, 2 * MIB - 124, 4 * MIB, 1,
    )  # fmt: skip
    del old[0]["blocks"][0]["history"]
    assert record_of(tmp_path, old).devices[0].requested_bytes == -1


def test_a_trace_without_times_keeps_its_order(tmp_path: Path) -> None:
    content = snapshot()
    for event in content["device_traces"][0]:
        del event["time_us"]
    curve = record_of(tmp_path, content).devices[0].curve
    assert set(curve.time_ns.tolist()) == {-1}
    assert curve.allocated_bytes.max() == 2 * MIB + 1024


def test_expandable_segments_are_mapped_and_unmapped(tmp_path: Path) -> None:
    content = snapshot()
    content["device_traces"][0][0]["action"] = "segment_map"
    content["device_traces"][0][7]["action"] = "segment_unmap"
    assert record_of(tmp_path, content).devices[0].peak_reserved_bytes == 6 * MIB


def test_without_free_requests_a_block_counts_until_it_is_free(tmp_path: Path) -> None:
    content = snapshot()
    content["device_traces"][0] = [
        event for event in content["device_traces"][0] if event["action"] != "free_requested"
    ]
    (device,) = record_of(tmp_path, content).devices
    assert device.curve.allocated_bytes[-1] == device.active_bytes == 2 * MIB
    assert device.peak_allocated_bytes == 2 * MIB + 1024


def test_each_device_has_its_own_segments_and_trace(tmp_path: Path) -> None:
    content = snapshot()
    other = segment([block(0, 2 * MIB, "active_allocated")], device=3, at=64 * MIB)
    content["segments"].append(other)
    content["device_traces"] += [[], events(("alloc", 0, 2 * MIB))]
    first, second = record_of(tmp_path, content).devices
    assert first.peak_allocated_bytes == 2 * MIB + 1024
    assert numbers(second) == (3, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 1)
    assert second.curve.allocated_bytes.tolist() == [0, 2 * MIB]


def test_a_trace_inconsistent_with_its_state_gives_no_peak(tmp_path: Path) -> None:
    content = snapshot()
    content["device_traces"][0] = events(("alloc", 0, 64 * MIB), ("alloc", MIB, 64 * MIB))
    record = record_of(tmp_path, content)
    assert record.devices[0].allocated_bytes == MIB
    content["device_traces"][0] = events(("alloc", 9 * MIB, 64 * MIB))
    record = record_of(tmp_path, content)
    assert record.devices[0].peak_allocated_bytes == -1
    assert [note.code for note in record.notes] == ["memory_trace_odd"]


def test_invalid_segments_and_events_are_skipped_and_counted(tmp_path: Path) -> None:
    content = snapshot()
    content["segments"] += [7, {"total_size": -1}, {"total_size": 2**70}, {"blocks": []}]
    content["device_traces"][0] += [None, {"size": 3}, {"action": "alloc", "size": "big"}]
    record = record_of(tmp_path, content)
    assert record.devices[0].peak_allocated_bytes == 2 * MIB + 1024
    assert [note.message for note in record.notes] == [
        "7 invalid entries of the snapshot are skipped"
    ]


def test_a_report_says_that_the_history_in_its_recording_overflowed(tmp_path: Path) -> None:
    GpuTrace(0, 1).step(1, 0, 10).kernel("gemm", 0, 5).write(tmp_path)
    settings = {"allocator_settings": {"trace_alloc_overflowed": True}}
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(snapshot() | settings))
    (found,) = [row for row in analyze(tmp_path).warnings if row.code == "memory_overflowed"]
    assert "the history of allocations overflowed: its last 9 events are known" in found.message


@pytest.mark.parametrize(
    ("settings", "overflowed"),
    [
        ({"trace_alloc_overflowed": True, "trace_alloc_max_entries": 4}, True),
        ({"trace_alloc_overflowed": False}, False),
        ({}, False),
        (None, False),
        ([1], False),
    ],
)
def test_a_history_that_overflowed_lacks_earlier_peaks(
    tmp_path: Path, settings: object, overflowed: bool
) -> None:
    whole = snapshot()
    kept = len(whole["device_traces"][0])
    record = record_of(tmp_path, whole | {"allocator_settings": settings})
    text = (
        f"the history of allocations overflowed: its last {kept} events are known, and peaks before"
        " them are missing; record with larger max_entries"
    )
    assert [note.message for note in record.notes] == [text] * overflowed
    assert numbers(record.devices[0]) == numbers(record_of(tmp_path, snapshot()).devices[0])


def test_a_truncated_snapshot_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(snapshot(), 4)
    file = tmp_path / "cut.pickle"
    for content in (whole[: len(whole) // 2], gzip.compress(whole)[:-20]):
        file.write_bytes(content)
        with pytest.raises(DataError, match="cut off or damaged"):
            read_memory(on_disk(file))


ROWS = [
    [-1, 1, 100, 0], [-1, 1, 20, 7], [5000, 2, 50, 4], [6000, 3, -50, 4], [6000, 3, 50, 5],
    [7000, 4, -20, 7],
]  # fmt: skip


def categories(record: MemoryRecord) -> dict[str, tuple[int, int]]:
    found = {one.name: (one.peak_bytes, one.at_peak_bytes) for one in record.categories}
    return {name: held for name, held in found.items() if held != (0, 0)}


def test_a_raw_timeline_adds_up_by_category(tmp_path: Path) -> None:
    record = read_bytes(tmp_path, gzip.compress(json.dumps(ROWS).encode()))
    (device,) = record.devices
    assert (record.kind, record.notes) == ("timeline", ())
    assert (device.device, device.allocated_bytes, device.peak_allocated_bytes) == (-1, 150, 170)
    assert (device.reserved_bytes, device.segments, device.peak_reserved_bytes) == (-1, -1, -1)
    assert device.curve.time_ns.tolist() == [5000, 5000, 5000, 6000, 6000, 7000]
    assert device.curve.allocated_bytes.tolist() == [100, 120, 170, 120, 170, 150]
    assert categories(record) == {
        "parameter": (100, 100), "activation": (50, 50), "gradient": (50, 0), "unknown": (20, 20),
    }  # fmt: skip


def test_a_summed_timeline_gives_the_same_curve_in_microseconds(tmp_path: Path) -> None:
    held = [[0, 100, 0, 0, 0, 50, 0, 0, 20], [0, 100, 0, 0, 0, 0, 50, 0, 0]]
    record = read_bytes(tmp_path, json.dumps([[T0_US, T0_US + 2], held]).encode())
    (device,) = record.devices
    assert device.curve.time_ns.tolist() == [T0_US * 1000, (T0_US + 2) * 1000]
    assert device.curve.allocated_bytes.tolist() == [170, 150]
    assert categories(record) == {
        "parameter": (100, 100), "activation": (50, 50), "gradient": (50, 0), "unknown": (20, 20),
    }  # fmt: skip


def test_invalid_rows_and_a_missing_end_give_notes(tmp_path: Path) -> None:
    odd = json.dumps([*ROWS[:2], [1, 2], [1, 9, 3, 0], ["x"], *ROWS[2:]]).encode()
    record = read_bytes(tmp_path, odd)
    assert record.devices[0].peak_allocated_bytes == 170
    assert [note.message for note in record.notes] == ["3 invalid rows of the timeline are skipped"]
    record = read_bytes(tmp_path, json.dumps(ROWS).encode()[:60])
    assert record.devices[0].curve.allocated_bytes.tolist() == [100, 120, 170]
    assert [note.code for note in record.notes] == ["memory_torn"]


@pytest.mark.parametrize("extra", [[[9000, 2, 10**14, 0]] * 20_000, [[1, 2]] * 3])
def test_no_size_overflows(tmp_path: Path, extra: list[list[int]]) -> None:
    try:
        record = read_bytes(tmp_path, json.dumps(ROWS + extra).encode())
    except DataError as error:
        assert error.problem == "implausible sizes"
    else:
        assert record.devices[0].allocated_bytes == 150


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_raise_nothing_but_dataerror(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    held = [[0, 1, 2, 3, 4, 5, 6, 7, 8]]
    added_up = json.dumps([[T0_US], held]).encode()
    kinds = [pickle.dumps(snapshot(), 2), json.dumps(ROWS).encode(), added_up]
    content = bytearray(data.draw(st.sampled_from(kinds)))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    file = tmp_path_factory.getbasetemp() / "memory"
    file.write_bytes(content)
    is_memory_snapshot(bytes(content))
    try:
        read_memory(on_disk(file))
    except DataError as error:
        assert "\n" not in str(error)


REAL = "memory_analysis__memory_timeline.raw.gz"


def test_the_real_timeline_adds_up(tmp_path: Path) -> None:
    """Its own sums, by the standard library alone."""
    file = shared_trace("kineto_hta") / REAL
    rows = json.loads(gzip.decompress(file.read_bytes()))
    held, most = 0, 0
    for _, _, change, _ in rows:
        held += change
        most = max(most, held)
    record = read_memory(on_disk(file))
    (device,) = record.devices
    assert record.notes == ()
    assert len(device.curve) == len(rows) == 16845
    assert (device.allocated_bytes, device.peak_allocated_bytes) == (held, most)
    assert most == 3_082_832_104
    assert sum(one.at_peak_bytes for one in record.categories) == most
    assert record.categories[4] == CategoryMemory("activation", 2_746_497_024, 2_592_465_920)


def test_no_other_file_is_recognized_as_memory(subtests: pytest.Subtests) -> None:
    for file in list_shared_files():
        with subtests.test(file.name):
            assert is_memory_snapshot(head_of_file(file)) == (file.name == REAL)
