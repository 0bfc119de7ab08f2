"""The recipe "add a reader" of CONTRIBUTING.md: a module and an entry; every command takes it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.builders import GpuTrace

from stepsplit.analyzer import DataError, RankTrace, Rules, analyze, read_files
from stepsplit.analyzer.readers import file_kinds
from stepsplit.analyzer.readers.compression import open_unpacked
from stepsplit.analyzer.readers.file_kinds import FileKind, FileRole
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN
from stepsplit.analyzer.readers.rank_traces import read_whole_files
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.readers.reduction import reduce_recording
from stepsplit.analyzer.readers.sources import Source
from stepsplit.analyzer.redact import copies, redact_recording
from stepsplit.analyzer.redact.forms import Texts
from stepsplit.collectors.formats.rank_record import (
    ModuleNames,
    RankRecord,
    StepTimes,
    write_record,
)
from stepsplit.collectors.formats.run_spec import RankInfo

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "pp2_m2"
BEGIN = b"TOY/1 rank "


def is_toy(head: bytes) -> bool:
    return head.startswith(BEGIN)


def read_toy(source: Source, rules: Rules = BUILT_IN) -> tuple[RankTrace, ...]:
    """The trace of this rank of the sample: a toy names its rank, and nothing more."""
    with open_unpacked(source) as content:
        rank = content.read(1 << 10).removeprefix(BEGIN)
    if not rank.isdigit():
        raise DataError(source.where, "a toy without a rank", "write it again")
    traces = read_recording([SAMPLE], rules=rules).traces
    return (replace(traces[int(rank)], source=Path(source.where)),)


def copy_toy(source: Source, out: Path, texts: Texts) -> None:
    with open_unpacked(source) as content:
        out.write_bytes(content.read(1 << 10))


TOY = FileKind(
    "toy trace",
    recognize=is_toy,
    read=read_toy,
    count=lambda traces: sum(len(trace.events) for trace in traces),
    role=FileRole.TRACE,
    read_ranks=partial(read_whole_files, read_toy),
    is_raw=True,
)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(2):
        (folder / f"toy{rank}").write_bytes(BEGIN + str(rank).encode())
    return folder


def register(monkeypatch: pytest.MonkeyPatch, kind: FileKind[tuple[RankTrace, ...]]) -> None:
    monkeypatch.setattr(file_kinds, "KINDS", (*file_kinds.KINDS, kind))


def test_a_registered_kind_is_a_trace_like_any_other(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {row.refused for row in read_files(recording)} == {"unknown format"}
    register(monkeypatch, TOY)

    report = analyze(recording)
    rows = read_files(recording)
    reduced = reduce_recording([recording], tmp_path / "tables")

    sample = analyze(*sorted(SAMPLE.glob("rank*_trace.json.gz")))
    assert [step.split for step in report.steps] == [step.split for step in sample.steps]
    assert [(row.kind, row.refused) for row in rows] == [("toy trace", "")] * 2
    assert all(row.events > 1000 for row in rows)
    assert reduced.raw_bytes == 2 * len(BEGIN + b"0")


def test_one_that_cannot_be_read_is_a_note_or_an_error_if_it_was_named(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, TOY)
    (recording / "toy2").write_bytes(BEGIN)

    notes = [note.message for note in read_recording([recording]).notes]

    assert "toy2: a toy without a rank" in notes
    with pytest.raises(DataError, match="a toy without a rank"):
        read_recording([recording / "toy2"])


def test_a_kind_is_redacted_as_its_entry_says_or_left_out(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GpuTrace().step(1, 0, 10).kernel("gemm", 1, 5).write(recording)  # so that there is a copy
    register(monkeypatch, TOY)
    left_out = redact_recording([recording], tmp_path / "without").left_out
    assert [why for _, why in left_out] == ["toy trace", "toy trace"]

    monkeypatch.setitem(copies.COPIES, "toy", copies.Copy(".toy", copy_toy))
    register(monkeypatch, replace(TOY, redact_as="toy"))
    monkeypatch.setattr(file_kinds, "KINDS", [one for one in file_kinds.KINDS if one is not TOY])
    done = redact_recording([recording], tmp_path / "with")

    assert [name for name in done.files if name.endswith(".toy")] == ["toy0_0.toy", "toy1_1.toy"]
    assert done.left_out == ()


def test_every_entry_names_functions_that_exist_and_a_key_of_a_copy() -> None:
    for kind in file_kinds.KINDS:
        assert (kind.recognize is None) != (kind.file_name is None), kind.name
        assert (kind.role is FileRole.TRACE) == (kind.read_ranks is not None), kind.name
        assert not kind.redact_as or kind.redact_as in copies.COPIES, kind.name
        for function in (kind.recognize, kind.read):
            if isinstance(function, file_kinds.Import):
                assert callable(function.load()), kind.name


@pytest.mark.parametrize(
    ("end_step", "named", "steps"),
    [(16, 15, 4), (None, 15, 4), (None, None, 3), (11, None, 0)],
    ids=["of a range", "with a named one", "by their times", "of a damaged range"],
)
def test_a_record_counts_its_steps_with_the_one_whose_modules_are_named(
    tmp_path: Path, end_step: int | None, named: int | None, steps: int
) -> None:
    """The named step has no time: its names take some of it."""
    record = RankRecord(
        "job", RankInfo(0, 0, "host0", 1, "Test GPU"), 1, "nccl",
        first_step=12, end_step=end_step, steps=StepTimes(profiled_ns=(7, 8, 9)),
        module_names=ModuleNames(step=named),
    )  # fmt: skip
    (read,) = read_files(write_record(tmp_path, record))
    assert (read.kind, read.events) == ("rank record", steps)
