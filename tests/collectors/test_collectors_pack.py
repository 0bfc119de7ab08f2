"""Packing a rank's raw files: atomically, and thin without changing the split."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stepsplit.analyzer import analyze
from stepsplit.collectors.record import pack as packing, trace_events
from stepsplit.collectors.record.pack import pack, pack_all

SAMPLES = Path(__file__).parents[2] / "sample_traces"


def event(name: str, start: int, end: int, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "args": args, **times}


def write_raw(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "traceName": "x"}))
    return path


def names(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [each["name"] for each in json.load(file)["traceEvents"]]


STEP = [
    event("ProfilerStep#3", 0, 100, "user_annotation"),
    event("aten::linear", 0, 20),
    event("aten::addmm", 5, 15),
    event("autograd::engine::evaluate_function: MmBackward0", 20, 60),
    event("MmBackward0", 21, 40),
    event("aten::mm", 22, 39),
    event("DDP hook", 41, 59),
    event("aten::div", 42, 45),
    event("c10d::allreduce_", 46, 50),
    event("gloo:all_reduce", 46, 90, "user_annotation"),
    event("<frozen>", 0, 99, "python_function"),
    event("[memory]", 5, 5, "cpu_instant_event"),
]


def test_thin_removes_ops_nested_in_ops_without_communication(
    tmp_path: Path,
) -> None:
    raw, out = write_raw(tmp_path / "raw", STEP), tmp_path / "rank0_trace.json.gz"

    pack(raw, out, thin=True)

    assert names(out) == [
        "ProfilerStep#3",
        "aten::linear",
        "autograd::engine::evaluate_function: MmBackward0",
        "MmBackward0",
        "DDP hook",
        "aten::div",
        "c10d::allreduce_",
        "gloo:all_reduce",
    ]


def test_full_keeps_all_events(tmp_path: Path) -> None:
    raw, out = write_raw(tmp_path / "raw", STEP), tmp_path / "rank0_trace.json.gz"

    pack(raw, out)

    assert names(out) == [each["name"] for each in STEP]


def test_a_truncated_raw_file_is_not_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw", tmp_path / "rank0_trace.json.gz"
    raw.write_text('{"traceEvents": [{"ph": "X", "na')

    assert pack_all([(raw, out)]) == 1

    assert list(tmp_path.iterdir()) == []
    assert "the file is truncated; is the disk full?" in capsys.readouterr().err


def test_one_lost_file_does_not_affect_the_others(tmp_path: Path) -> None:
    good = write_raw(tmp_path / "raw", STEP)

    files = [(tmp_path / "none", tmp_path / "a.gz"), (good, tmp_path / "raw.gz")]
    assert pack_all(files) == 1

    assert [path.name for path in tmp_path.iterdir()] == ["raw.gz"]


def test_a_whole_file_that_cannot_be_packed_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = write_raw(tmp_path / "raw", STEP), tmp_path / "rank0_trace.json.gz"
    out.mkdir()

    assert pack_all([(raw, out)]) == 1

    assert json.loads((tmp_path / "rank0_trace.json").read_text())["traceEvents"] == STEP
    assert "is not packed" in capsys.readouterr().err


def test_thin_packing_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_events, "_WINDOW", 1 << 16)
    monkeypatch.setattr(packing, "_CHUNK", 1 << 16)
    events = [event("aten::mm", start, start + 1, shapes=["x" * 100]) for start in range(40_000)]
    raw = write_raw(tmp_path / "raw", events)

    tracemalloc.start()
    pack(raw, tmp_path / "rank0_trace.json.gz", thin=True)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    # It once took eight times the size of the raw file.
    assert peak_bytes < raw.stat().st_size / 2
    assert len(names(tmp_path / "rank0_trace.json.gz")) == 40_000


@pytest.mark.parametrize("window", [1, 7, 100, 1000])
def test_events_may_be_read_in_pieces_of_any_size(window: int, tmp_path: Path) -> None:
    raw, out = write_raw(tmp_path / "raw", STEP), tmp_path / "rank0_trace.json.gz"
    pack(raw, out, thin=True)
    whole = gzip.decompress(out.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_events, "_WINDOW", window)
        pack(raw, out, thin=True)

    assert gzip.decompress(out.read_bytes()) == whole


def test_a_thread_whose_ops_are_out_of_order_is_packed_in_full(tmp_path: Path) -> None:
    late_parent = [event("aten::addmm", 5, 15), event("aten::linear", 0, 20)]
    raw, out = write_raw(tmp_path / "raw", late_parent), tmp_path / "rank0_trace.json.gz"

    pack(raw, out, thin=True)

    assert names(out) == ["aten::addmm", "aten::linear"]


def test_a_trace_with_an_invalid_event_is_packed_in_full(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = write_raw(tmp_path / "raw", STEP), tmp_path / "rank0_trace.json.gz"
    broken = raw.read_text().replace('"aten::div"', '"aten::"div""')
    raw.write_text(broken)

    pack(raw, out, thin=True)

    assert gzip.decompress(out.read_bytes()).decode() == broken
    assert "packed in full instead of thin" in capsys.readouterr().err


@pytest.mark.parametrize("sample", ["tp2_pp2", "fsdp4", "dp4", "pp2_m2"])
def test_thin_traces_of_real_runs_have_the_same_split(sample: str, tmp_path: Path) -> None:
    for path in (SAMPLES / sample).iterdir():
        if "_trace" in path.name:
            raw = tmp_path / "raw"
            raw.write_bytes(gzip.decompress(path.read_bytes()))
            pack(raw, tmp_path / path.name, thin=True)
            raw.unlink()
            assert (tmp_path / path.name).stat().st_size < path.stat().st_size / 2
        elif path.name == "run.json" or "_flight" in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())

    thin, full = analyze(tmp_path), analyze(SAMPLES / sample)

    assert thin.steps == full.steps
    assert thin.exposed == full.exposed
    assert thin.collectives == full.collectives
