"""Merging the folders that the hosts of a run wrote to local disks."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from stepsplit.collectors.__main__ import main
from stepsplit.collectors.formats.rank_record import (
    ClockProbe,
    CodeFrame,
    GcPause,
    GpuState,
    HostSamples,
    MemoryState,
    RankRecord,
    StepTimes,
    read_record,
    write_record,
)
from stepsplit.collectors.formats.run_spec import (
    GroupInfo,
    HostInfo,
    Mesh,
    RankInfo,
    RunSpec,
    from_json,
    write_run_json,
)
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.record.gather import gather

FIRST = RankRecord(
    run="exp",
    rank=RankInfo(0, 0, "a", 7, "cpu"),
    world_size=2,
    backend="gloo",
    groups=(GroupInfo("0", "default_pg", (0, 1)),),
    versions=(("torch", "2.13.0"),),
    machine=HostInfo("a", "Xeon", 2, 1 << 30),
    first_step=10,
    steps=StepTimes((5, 6), (7,), (5,), (6, 6), (8,), (6,)),
    memory=MemoryState(1, 2, 3, 4, None, None, 2),
    clocks=(ClockProbe(-30, 200, 1_700_000_000_000_000_000),),
    gpu=(GpuState(1, 1980, 0, None),),
    device_stopped_step=12,
    gpu_note="a MIG instance",
    host=HostSamples(
        ((CodeFrame("load", "lib/data.py", 7), CodeFrame("main", "train.py", 3)),),
        (5, 9),
        (0, 0),
        (GcPause(6, 2, 1),),
    ),
)
SECOND = replace(FIRST, rank=RankInfo(1, 0, "b", 9, "cpu"), machine=HostInfo("b"))


def host(folder: Path, record: RankRecord, content: str = "trace") -> Path:
    write_record(folder, record)
    (folder / f"rank{record.rank.rank}_trace.json.gz").write_text(content)
    return folder


@pytest.mark.parametrize(
    ("places", "place"), [((), (0,)), (((),), (0,)), (((CodeFrame("f", "a.py", 1),),), (0, 0))]
)
def test_looks_without_a_place_or_a_time_are_refused(
    places: tuple[tuple[CodeFrame, ...], ...], place: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="host: looks without a time or a place"):
        HostSamples(places, (5,), place)


def test_a_record_round_trips(tmp_path: Path) -> None:
    assert read_record(write_record(tmp_path, FIRST).read_bytes()) == FIRST


@pytest.mark.parametrize("text", ["[]", '{"schema": "stepsplit.rank/1"}', '{"schema": "x"}'])
def test_an_invalid_record_raises_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        read_record(text)


def test_two_hosts_are_merged_into_one_recording(tmp_path: Path) -> None:
    a, b = host(tmp_path / "a", FIRST), host(tmp_path / "b", SECOND)
    mesh = Mesh.of({"dp": 2})
    write_run_json(a, RunSpec("exp", 2, "gloo", mesh))

    found = gather([a, b], tmp_path / "whole")

    assert (found.ranks, found.missing) == ((0, 1), ())
    assert sorted(path.name for path in found.out.iterdir()) == [
        "rank0_record.json",
        "rank0_trace.json.gz",
        "rank1_record.json",
        "rank1_trace.json.gz",
        "run.json",
    ]
    spec = from_json((found.out / "run.json").read_bytes())
    assert (spec.mesh, [rank.host for rank in spec.ranks]) == (mesh, ["a", "b"])
    assert [machine.host for machine in spec.hosts] == ["a", "b"]


def test_records_of_an_older_recording_in_a_folder_below_do_not_count(tmp_path: Path) -> None:
    a = host(tmp_path / "a", FIRST)
    host(a / "old", SECOND)
    found = gather([a], tmp_path / "whole")
    assert (found.ranks, found.missing) == ((0,), (1,))


def test_a_full_disk_leaves_no_part_of_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full after the first file."""
    out, copied = tmp_path / "out" / "run", []

    def copy(source: Path, target: Path) -> None:
        copied.append(target)
        if len(copied) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(source))
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr("shutil.copy2", copy)
    with pytest.raises(CollectError) as error:
        gather([host(tmp_path / "a", FIRST), host(tmp_path / "b", SECOND)], out)
    assert str(error.value) == f"{out}: No space left on device; nothing is left there"
    assert (len(copied), list((tmp_path / "out").iterdir())) == (2, [])


def test_a_missing_rank_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host(tmp_path / "a", FIRST)

    assert main(["gather", str(tmp_path / "a"), "--out", str(tmp_path / "whole")]) == 0

    assert capsys.readouterr().err == "missing ranks: 1\n"


def test_two_runs_are_not_mixed(tmp_path: Path) -> None:
    a, b = host(tmp_path / "a", FIRST), host(tmp_path / "b", FIRST, content="another")

    with pytest.raises(CollectError, match="are they from the same run"):
        gather([a, b], tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_folder_without_ranks_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gather", str(tmp_path), "--out", str(tmp_path / "whole")]) == 2
    assert main(["gather", str(tmp_path / "none"), "--out", str(tmp_path / "whole")]) == 2
    assert capsys.readouterr().err.count("\n") == 2
