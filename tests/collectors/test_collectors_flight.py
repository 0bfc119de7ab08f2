"""NCCL's Flight Recorder and that of the other backends: both are saved, and a loss is reported."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.stderr_lines import warns

torch = pytest.importorskip("torch")

from support.fake_gpu import FakeGpu  # noqa: E402

from stepsplit.analyzer import FlightDump, read_files  # noqa: E402
from stepsplit.collectors.probes.flight_recorder import dump_flight_json  # noqa: E402

NCCL, OTHERS = "_dump_nccl_trace_json", "_dump_fr_trace_json"


def entry(name: str, number: int, created_ns: int, group: str = "0", pg_id: int = 0) -> Any:
    return {
        "collective_seq_id": number + 1,
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "is_p2p": False,
        "pg_id": pg_id,
        "process_group": [group, f"group {group}"],
        "profiling_name": name,
        "record_id": number,
        "state": "completed",
        "time_created_ns": created_ns,
    }


def build_dump(entries: list[Any], groups: dict[str, list[int]]) -> dict[str, Any]:
    return {
        "comm_lib_version": "2.27.5",
        "entries": entries,
        "pg_config": {
            name: {"name": name, "desc": f"group {name}", "ranks": str(ranks)}
            for name, ranks in groups.items()
        },
        "pg_status": {
            "0": {
                "last_enqueued_collective": len(entries),
                "last_started_collective": len(entries),
                "last_completed_collective": len(entries),
            }
        },
        "version": "2.10",
    }


ALL_REDUCES = build_dump([entry("nccl:all_reduce", i, 100 + i) for i in range(3)], {"0": [0, 1]})
BARRIER = build_dump([entry("gloo:barrier", 0, 50, group="7")], {"7": [0, 1], "": []})
EMPTY = build_dump([], {})


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the dumps of both recorders as a CUDA build of torch returns them."""
    from torch._C import _distributed_c10d

    def set_dumps(nccl: Any, others: Any) -> None:
        for name, dump in ((NCCL, nccl), (OTHERS, others)):
            text = json.dumps(dump, separators=(",", ":")).encode()
            monkeypatch.setattr(_distributed_c10d, name, lambda text=text: text, raising=False)

    return set_dumps


def read_back(folder: Path, dump: bytes | None) -> FlightDump:
    assert dump is not None
    (folder / "rank0_flight.json").write_bytes(dump)
    (file,) = read_files(folder / "rank0_flight.json")
    assert isinstance(file.content, FlightDump)
    return file.content


def test_entries_of_nccl_are_saved_without_or_with_those_of_gloo(
    tmp_path: Path, recorders: Any
) -> None:
    recorders(ALL_REDUCES, EMPTY)
    alone = read_back(tmp_path, dump_flight_json(0, 0))
    recorders(ALL_REDUCES, BARRIER)
    both = read_back(tmp_path, dump_flight_json(0, 0))

    assert [each.name for each in alone.entries] == ["nccl:all_reduce"] * 3
    assert [each.name for each in both.entries] == ["gloo:barrier", *["nccl:all_reduce"] * 3]
    assert [each.group_name for each in both.entries] == ["7", "0", "0", "0"]
    assert {group.name: group.ranks for group in both.groups} == {"0": (0, 1), "7": (0, 1)}
    # Both recorders number their groups from 0.
    assert {each.group_name: each.last_enqueued for each in both.statuses} == {"0": 3, "7": 1}
    assert both.notes == ()


def test_a_recorder_with_two_names_is_saved_once(tmp_path: Path, recorders: Any) -> None:
    recorders(ALL_REDUCES, ALL_REDUCES)

    assert len(read_back(tmp_path, dump_flight_json(0, 0)).entries) == 3


def test_a_build_without_nccl_has_one_recorder(
    tmp_path: Path, recorders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders(EMPTY, BARRIER)
    monkeypatch.delattr(torch._C._distributed_c10d, NCCL)

    assert len(read_back(tmp_path, dump_flight_json(0, 0)).entries) == 1
    recorders(EMPTY, EMPTY)
    assert dump_flight_json(0, 0) is None


def test_each_recorder_reports_entries_that_it_has_overwritten(recorders: Any) -> None:
    late = build_dump([entry("nccl:all_reduce", 7, 900), entry("nccl:all_reduce", 8, 901)], {})
    recorders(late, BARRIER)

    with warns("lost all but the last 2 collectives"):
        dump_flight_json(0, since_unix_ns=500)


@pytest.mark.parametrize("others", [EMPTY, BARRIER])
def test_a_job_with_nccl_whose_recorder_is_empty_warns(
    others: Any, recorders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeGpu(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    recorders(EMPTY, others)

    with warns("lost NCCL's Flight Recorder: it is empty"):
        dump = dump_flight_json(0, 0)

    assert (dump is None) == (others is EMPTY)
