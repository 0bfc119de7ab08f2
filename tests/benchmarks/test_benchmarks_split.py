"""The benchmark of the split runs, on recordings that are what they say; only it judges speed."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from benchmarks.measuring import Run
from benchmarks.pipelined import Job, job_of, members, play
from benchmarks.pipelined_files import recording_of
from benchmarks.split import CALLS, main, measured
from benchmarks.split_rows import Verdict, missed, rows_of, verdicts_of
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.split.run import Schedule, split_run
from stepsplit.analyzer.trace import OPS


@pytest.mark.parametrize("calls", [400, *CALLS])
def test_a_job_has_the_calls_that_were_asked_for(calls: int) -> None:
    assert job_of(calls).calls == calls


def test_data_moves_for_50_to_200_us_after_the_last_member_has_come() -> None:
    starts, ends = defaultdict(list), defaultdict(list)
    for rank, run in enumerate(play(Job(microbatches=2, layers=1, buckets=1))):
        for ran in run.ran:
            if ran.op == "all_reduce":
                call = (ran.axis, members(rank, ran.axis), ran.nth)
                starts[call].append(ran.start_ns)
                ends[call].append(ran.end_ns)
    moved = [min(ends[call]) - max(starts[call]) for call in starts]
    assert {len(starts[call]) for call in starts} == {2, 8}
    assert 50_000 <= min(moved) < max(moved) < 201_000


def test_a_recording_reads_as_five_steps_of_1f1b_with_every_call_matched(tmp_path: Path) -> None:
    recording = read_recording([recording_of(400, tmp_path)])
    found = split_run(recording.traces, None, lambda *_: 0.5)
    calls = Counter(OPS[op] for trace in recording.traces for op in trace.calls.op.tolist())
    assert calls == {"all_reduce": 320, "send": 40, "recv": 40}
    assert (found.matched.key >= 0).all()
    assert {rank.numbers for rank in found.ranks} == {(3, 4, 5, 6, 7)}
    assert found.schedule == Schedule("1f1b", 1, 0.5)
    assert [note.code for note in found.notes] == ["mesh_inferred"]


def test_twice_the_calls_may_take_twice_as_long_and_a_tenth_more_for_noise() -> None:
    rows = rows_of(
        {50: 1, 100: 2},
        {50: [_run(1.0, 0.5), _run(1.0, 0.5)], 100: [_run(2.0, 1.0), _run(2.0, 1.5)]},
        {50: _run(1.0), 100: _run(2.0)},
    )
    assert [verdicts_of(row) for row in rows] == [
        (),
        (
            Verdict("of reading <= 1", 0.625, True),
            Verdict("of half <= 2 (+10% noise)", 2.5, False),
        ),
    ]
    assert missed(rows) == ("missed: 100 calls: of half <= 2 (+10% noise), measured 2.5",)


def test_small_recordings_are_measured_in_processes_of_their_own(tmp_path: Path) -> None:
    (row,) = measured([400], tmp_path, repeat=1)
    assert (row.calls, row.growth, len(row.reading), len(row.analysis)) == (400, (), 1, 1)
    assert min(*row.reading, *row.analysis) > 0
    assert row.peak_bytes > row.reading_peak_bytes > 0


@pytest.mark.slow
def test_a_quick_run_prints_a_row_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick", "--repeat", "1", "--work", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert [line.split("|")[1].strip() for line in lines] == ["calls", "-----", "400", "800"]


def _run(*seconds: float) -> Run:
    return Run(seconds, 0, 0, 0, 0.0)
