"""What the ranks of a host note becomes batches: nothing lost, nothing counted twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stepsplit.analyzer import analyze
from stepsplit.analyzer.watch.records import WatchBatch, WatchEvent, decode_batch, encode_batch
from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder, read_state
from stepsplit.analyzer.watch.samples import SPOILS
from stepsplit.collectors.formats import watch_notes
from stepsplit.collectors.formats.step_memory import HeldStepMemory, StepMemory
from stepsplit.collectors.formats.watch_notes import (
    LEFT,
    RANKS,
    Beat,
    BeatFile,
    NoteFile,
    RankDropped,
    RankEnded,
    RankStarted,
    RankWindow,
    SampleReport,
    build_notes_path,
    count_incarnations,
    read_beat,
    take_capture_request,
)

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"

S = 1_000_000_000


def started(rank: int, incarnation: int = 0, host: str = "h1", world_size: int = 2) -> RankStarted:
    return RankStarted(rank, world_size, host, 1, incarnation, 0.005, S)


def window(rank: int, first: int, slowest_ns: int = 12) -> RankWindow:
    return RankWindow(rank, first, first + 19, S, 2 * S, 20, 8, 10, slowest_ns)


def sampled(
    rank: int, step: int = 22, no_data: str = "", cost_ns: int = 5, is_capture: bool = False
) -> SampleReport:
    return SampleReport(
        1, 0, rank, step, 2, time.time_ns(), None, str(step), True, no_data,
        cost_ns=cost_ns + rank, interval_steps=400, overhead=0.004, is_capture=is_capture,
    )  # fmt: skip


def note(
    folder: Path, *notes: RankStarted | RankWindow | SampleReport | RankDropped | RankEnded
) -> None:
    for each in notes:
        NoteFile(folder, each.rank).write([each])


def copy_sample(folder: Path, step: int = 22, name: str = "pp2_m2") -> Path:
    """A recording, a real one of two ranks, in the place of a sample."""
    place = folder / "samples" / str(step)
    place.mkdir(parents=True)
    for path in (SAMPLES / name).glob("r*"):
        if path.name != "report.json":
            shutil.copy(path, place)
    return place


def read_batches(folder: WatchFolder) -> list[WatchBatch]:
    lines = folder.batches.read_bytes().splitlines()
    return [decode_batch(line, str(folder.batches)) for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> WatchFolder:
    return WatchFolder(tmp_path, "exp1", "h1")


def test_what_the_ranks_note_is_in_one_batch(folder: WatchFolder) -> None:
    note(folder.path, started(0), started(1), window(0, 4), window(1, 4), RankDropped(1, 3, S))

    batch = Reducer(folder).collect()

    assert batch is not None
    expected = WatchBatch(
        id=batch.id,
        run="exp1",
        incarnation=0,
        host="h1",
        world_size=2,
        unix_ns=batch.unix_ns,
        budget=0.005,
        windows=tuple(
            RankWindow(
                rank=rank, first_step=4, last_step=23, start_unix_ns=S, end_unix_ns=2 * S, steps=20,
                min_step_ns=8, median_step_ns=10, max_step_ns=12,
            )
            for rank in (0, 1)
        ),
        events=(WatchEvent(kind="started", step=0, unix_ns=S, text="2 ranks, start 1"),),
        dropped={"trace": 3},
    )  # fmt: skip
    assert batch == expected
    assert read_batches(folder) == [batch]
    known = read_state(folder).ranks[0]
    assert (known.count_steps(attached=False), known.count_steps(attached=True)) == (23, 19)
    assert decode_batch(encode_batch(batch), "test") == batch


def test_without_news_there_is_no_batch_and_each_note_is_in_one_batch(folder: WatchFolder) -> None:
    note(folder.path, started(0), window(0, 4))
    reducer = Reducer(folder)
    assert reducer.collect() is not None
    assert reducer.collect() is None
    note(folder.path, window(0, 24))

    assert Reducer(folder).collect() is not None

    firsts = [each.first_step for batch in read_batches(folder) for each in batch.windows]
    assert firsts == [4, 24]
    assert len({batch.id for batch in read_batches(folder)}) == 2


def test_a_sample_has_the_numbers_of_its_report(folder: WatchFolder) -> None:
    place = copy_sample(folder.path)
    note(folder.path, started(0), started(1), sampled(0))
    reducer = Reducer(folder)
    assert reducer.collect().samples == ()  # type: ignore[union-attr]
    note(folder.path, sampled(1))

    (sample,) = reducer.collect().samples  # type: ignore[union-attr]

    report = analyze(place)
    assert (sample.no_data, sample.step, sample.cost_ns, sample.traces) == ("", 22, 6, "samples/22")
    rows = {(row.rank, row.split) for row in report.steps}
    assert {(each.rank, each.split) for each in sample.ranks} <= rows
    assert [each.rank for each in sample.ranks] == [0, 1]
    for each in sample.ranks:
        row = next(row for row in report.steps if (row.rank, row.split) == (each.rank, each.split))
        assert sum(each.split.buckets_ns) == row.step_ns
        exposed = [e for e in report.exposed if (e.rank, e.step) == (row.rank, row.step)]
        spent_ns = sum(e.collective_ns + e.p2p_ns + e.skew_ns for e in exposed)
        assert sum(each.exposed_ns.values()) == spent_ns
    assert (place / "report.json").exists()
    assert read_state(folder).newest == "samples/22"


def test_a_rank_without_a_trace_makes_the_sample_a_gap_with_its_reason(folder: WatchFolder) -> None:
    copy_sample(folder.path)
    reason = "the script's own torch.profiler is running"
    note(folder.path, started(0), started(1), sampled(0), sampled(1, no_data=reason))

    (sample,) = Reducer(folder).collect().samples  # type: ignore[union-attr]

    assert (sample.no_data, sample.ranks) == (f"rank 1: {reason}", ())


def test_a_damaged_trace_makes_the_sample_a_gap_with_its_reason(folder: WatchFolder) -> None:
    place = copy_sample(folder.path)
    trace = place / "rank1_trace.json.gz"
    trace.write_bytes(trace.read_bytes()[:20_000])
    note(folder.path, started(0), started(1), sampled(0), sampled(1))

    (sample,) = Reducer(folder).collect().samples  # type: ignore[union-attr]

    assert sample.ranks == ()
    assert sample.no_data.startswith("rank 1: the file is truncated")


def test_every_warning_that_spoils_a_sample_is_one_that_the_analysis_gives() -> None:
    sources = (ROOT / "analyzer").rglob("*.py")
    texts = [path.read_text() for path in sources if path.parent.name != "watch"]
    assert [code for code in SPOILS if not any(f'"{code}"' in text for text in texts)] == []


def test_a_sample_of_a_rank_that_was_killed_waits_no_longer_than_the_job(
    folder: WatchFolder,
) -> None:
    copy_sample(folder.path)
    note(folder.path, started(0), started(1), window(1, 4), sampled(0))
    reducer = Reducer(folder)
    assert reducer.collect().samples == ()  # type: ignore[union-attr]

    batch = reducer.collect(is_last=True)

    assert batch is not None
    assert len(batch.samples) == 1
    lost = [(each.kind, each.rank, each.step) for each in batch.events]
    assert lost == [("lost_rank", 0, 0), ("lost_rank", 1, 23)]


def test_a_restart_is_another_incarnation_and_names_the_rank_that_was_lost(
    folder: WatchFolder,
) -> None:
    note(folder.path, started(0), started(1), window(0, 4), window(1, 4))
    note(folder.path, RankEnded(0, 24, 3 * S))
    reducer = Reducer(folder)
    reducer.collect()
    assert count_incarnations(folder.path) == 1
    note(folder.path, started(0, 1, world_size=1), window(0, 24))
    note(folder.path, started(1, 1, world_size=1))

    batch = reducer.collect()

    assert batch is not None
    assert (batch.incarnation, batch.world_size) == (1, 1)
    kinds = [(each.kind, each.rank, each.step) for each in batch.events]
    assert kinds == [("restarted", None, 24), ("lost_rank", 1, 23)]
    assert count_incarnations(folder.path) == 2


def test_a_new_file_of_a_rank_is_no_restart(
    folder: WatchFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_notes, "MAX_NOTES_BYTES", 1000)
    file, reducer, kinds = NoteFile(folder.path, 0), Reducer(folder), []
    for note_ in (started(0, world_size=1), *(window(0, 4 + 20 * n) for n in range(20))):
        file.write([note_])
        batch = reducer.collect()
        kinds += [each.kind for each in batch.events] if batch is not None else []
    assert (folder.path / RANKS / "rank0.jsonl.old").exists()
    file.write([RankEnded(0, 404, 3 * S, LEFT), RankEnded(0, 404, 3 * S)])
    batch = reducer.collect()
    assert batch is not None
    assert [*kinds, *(each.kind for each in batch.events)] == ["started", "ended"]


def test_a_long_step_is_a_pause_and_the_end_of_samples_has_its_reason(folder: WatchFolder) -> None:
    note(folder.path, started(0), window(0, 4, slowest_ns=51), window(0, 24, slowest_ns=50))
    note(folder.path, RankEnded(0, 44, S, "3 samples in a row failed: no"), RankEnded(0, 60, S))

    batch = Reducer(folder).collect()

    assert batch is not None
    kinds = [(each.kind, each.step) for each in batch.events]
    assert kinds == [("started", 0), ("pause", 23), ("sampling_ended", 44), ("ended", 60)]


def test_slower_steps_are_a_change_and_have_the_ranks_sampled_at_once(folder: WatchFolder) -> None:
    slower = replace(window(0, 2_004), min_step_ns=20, median_step_ns=20, max_step_ns=20)
    note(folder.path, started(0), *[window(0, 4 + 20 * number) for number in range(100)])
    reducer = Reducer(folder)
    reducer.collect()
    assert not take_capture_request(folder.path)
    note(folder.path, *[replace(slower, first_step=2_004 + 20 * n) for n in range(5)])

    batch = Reducer(folder).collect()

    assert batch is not None
    (change,) = batch.events
    assert (change.kind, change.step, change.is_over) == ("change", 2_004, False)
    assert (change.before_ns, change.after_ns) == (10.0, 20.0)
    assert take_capture_request(folder.path)


def record(folder: Path, step: int) -> None:
    """A sample of both ranks, which is the same recording each time."""
    copy_sample(folder, step)
    note(folder, *[replace(sampled(rank, step), interval_steps=20) for rank in (0, 1)])


def test_the_sample_after_a_change_was_found_explains_it_with_those_since_its_first_step(
    folder: WatchFolder,
) -> None:
    slow = [replace(window(0, 2_004 + 20 * n), median_step_ns=20) for n in range(5)]
    note(folder.path, started(0), started(1), *[window(0, 4 + 20 * n) for n in range(100)])
    record(folder.path, 1_900)
    Reducer(folder).collect()
    # Two slow points are not yet a change, and the sample is of it all the same.
    note(folder.path, *slow[:2])
    record(folder.path, 2_020)
    early = Reducer(folder).collect()
    note(folder.path, *slow[2:])
    found = Reducer(folder).collect()
    record(folder.path, 2_100)
    explained = Reducer(folder).collect()
    record(folder.path, 2_200)
    later = Reducer(folder).collect()

    assert early and found and explained and later
    assert not early.events and not later.events
    assert [(each.kind, each.step) for each in found.events] == [("change", 2_004)]
    (cause,) = explained.events
    assert (cause.kind, cause.step, cause.before_ns) == ("change", 2_100, None)
    assert cause.text == "mostly compute: 0.00 ms in the mean of the ranks"


def test_what_explains_a_change_names_rank_finding_wait_and_host(folder: WatchFolder) -> None:
    """Before it a recording of four even ranks, since then one of which rank 0 stalls."""
    slow = [replace(window(0, 2_004 + 20 * n), median_step_ns=20) for n in range(5)]
    note(folder.path, started(0), *[started(rank, host="h2") for rank in (1, 2, 3)])
    note(folder.path, *[window(0, 4 + 20 * n) for n in range(100)], *slow)
    for step, name in ((1_900, "dp4"), (2_100, "built_ddp_host_stall")):
        copy_sample(folder.path, step, name)
        four = [replace(sampled(rank, step), interval_steps=20) for rank in range(4)]
        note(folder.path, *four)

    batch = Reducer(folder).collect()

    assert batch is not None
    change, cause = [each for each in batch.events if each.kind == "change"]
    assert (change.step, change.rank) == (2_004, None)
    assert (cause.step, cause.rank) == (2_100, 0)
    words = "rank 0: mostly ", "(rank 0 allocates or frees memory", "; others wait "
    assert all(word in cause.text for word in words), cause.text
    assert cause.text.endswith(" for it; it runs on h1")


def test_a_restart_says_how_its_steps_compare_with_the_last_start(folder: WatchFolder) -> None:
    """Once, by rank 0; not as a change, which would be an alarm."""
    millisecond = [replace(window(0, 4 + 20 * n), median_step_ns=10**6) for n in range(10)]
    note(folder.path, started(0), started(1), *millisecond, *[window(1, 4)] * 10)
    Reducer(folder).collect()
    again = [replace(each, rank=rank, median_step_ns=2 * 10**6)
             for rank in (0, 1) for each in millisecond]  # fmt: skip
    note(folder.path, started(0, 1), started(1, 1), *again)

    batch = Reducer(folder).collect()

    assert batch is not None
    assert [(each.kind, each.text) for each in batch.events if each.kind != "lost_rank"] == [
        ("restarted", "2 ranks, start 2"),
        ("restarted", "steps take 2.00 ms since this start, 1.00 ms before the restart (+100.0 %)"),
    ]


def test_a_sample_of_which_a_rank_says_nothing_until_the_end_has_no_data(
    folder: WatchFolder,
) -> None:
    copy_sample(folder.path)
    note(folder.path, started(0), started(1), sampled(0))
    note(folder.path, *[RankEnded(rank, 60, S) for rank in (0, 1)])

    batch = Reducer(folder).collect(is_last=True)

    assert batch is not None
    (sample,) = batch.samples
    assert sample.ranks == ()
    assert sample.no_data == "rank 1: it has said nothing of this sample"


def late(rank: int, number: int, local_ns: int) -> RankWindow:
    return replace(window(rank, 4 + 20 * number), last_step=23 + 20 * number, local_ns=local_ns)


def test_a_rank_that_becomes_late_is_named_by_its_local_times(folder: WatchFolder) -> None:
    note(folder.path, started(0), started(1))
    note(folder.path, *[late(rank, n, 6) for n in range(100) for rank in (0, 1)])
    reducer = Reducer(folder)
    reducer.collect()
    note(folder.path, *[late(0, n, 6) for n in range(100, 120)])
    note(folder.path, *[late(1, n, 7) for n in range(100, 120)])

    batch = Reducer(folder).collect()

    assert batch is not None
    (drift,) = batch.events
    assert (drift.kind, drift.rank, drift.step) == ("drift", 1, 2_004)
    assert (drift.before_ns, drift.after_ns, drift.is_over) == (0.0, 1.0, False)
    assert not take_capture_request(folder.path)


def test_a_drift_is_explained_by_the_next_sample_with_its_rank(folder: WatchFolder) -> None:
    note(folder.path, started(0), started(1))
    note(folder.path, *[late(rank, n, 6) for n in range(100) for rank in (0, 1)])
    record(folder.path, 1_900)
    Reducer(folder).collect()
    note(folder.path, *[late(rank, n, 6 + rank) for n in range(100, 120) for rank in (0, 1)])
    Reducer(folder).collect()
    record(folder.path, 2_500)

    batch = Reducer(folder).collect()

    assert batch is not None
    (cause,) = batch.events
    assert (cause.kind, cause.rank, cause.step, cause.before_ns) == ("drift", 1, 2_500, None)
    assert cause.text == "rank 1: mostly compute: 0.00 ms"


def test_after_a_restart_the_lateness_of_ranks_has_a_new_level(folder: WatchFolder) -> None:
    note(folder.path, started(0), started(1))
    note(folder.path, *[late(rank, n, 6) for n in range(100) for rank in (0, 1)])
    note(folder.path, *[RankEnded(rank, 2_003, S) for rank in (0, 1)])
    note(folder.path, started(0, 1), started(1, 1))
    note(folder.path, *[late(rank, n, 6 + rank) for n in range(100, 220) for rank in (0, 1)])

    batch = Reducer(folder).collect()

    assert batch is not None
    assert [each.kind for each in batch.events] == ["started", "ended", "restarted", "restarted"]


def test_a_requested_sample_is_an_event_and_its_traces_are_dropped_last(
    folder: WatchFolder,
) -> None:
    size = sum(path.stat().st_size for path in copy_sample(folder.path, 22).glob("*"))
    copy_sample(folder.path, 44)
    note(folder.path, started(0), started(1))
    note(folder.path, *[sampled(rank, 22, is_capture=True) for rank in (0, 1)])
    note(folder.path, *[sampled(rank, 44) for rank in (0, 1)])

    batch = Reducer(replace(folder, disk_bytes=2 * size - 10)).collect()

    assert batch is not None
    assert [(each.kind, each.step, each.text) for each in batch.events][1:] == [
        ("capture", 22, "all ranks are recorded in samples/22")
    ]
    assert [path.name for path in (folder.path / "samples").glob("*")] == ["22"]
    assert batch.dropped == {"sample": 1}


def test_of_hosts_that_share_the_folder_one_reduces_and_each_tells_its_own_ranks(
    folder: WatchFolder,
) -> None:
    copy_sample(folder.path)
    other = replace(folder, host="h2")
    note(folder.path, started(0), started(1, host="h2"), window(0, 4), window(1, 4))
    note(folder.path, sampled(0), sampled(1))

    batches = [Reducer(each).collect() for each in (folder, other)]

    ranks = [[each.rank for each in batch.windows] for batch in batches if batch]
    assert ranks == [[0], [1]]
    assert [len(batch.samples) for batch in batches if batch] == [1, 0]


def test_old_samples_leave_when_the_disk_budget_is_spent(folder: WatchFolder) -> None:
    for step in (22, 23, 24):
        copy_sample(folder.path, step)
        os.utime(folder.path / "samples" / str(step) / "rank0_trace.json.gz", (step, step))
    size = sum(f.stat().st_size for f in (folder.path / "samples" / "22").iterdir())
    note(folder.path, started(0), started(1), sampled(0, 24))

    batch = Reducer(replace(folder, disk_bytes=2 * size + 10)).collect()

    assert batch is not None
    assert batch.dropped == {"sample": 1}
    assert {path.name for path in (folder.path / "samples").iterdir()} == {"23", "24"}


def test_a_torn_line_of_a_full_disk_is_counted_and_the_rest_is_read(folder: WatchFolder) -> None:
    note(folder.path, started(0), window(0, 4))
    path = build_notes_path(folder.path, 0)
    with path.open("a") as file:
        file.write('{"kind": "window", "rank"\n{"kind": "of a later version"}\n')
    note(folder.path, window(0, 24))
    with path.open("a") as file:
        file.write('{"kind": "window", "not yet whole')

    batch = Reducer(folder).collect()

    assert batch is not None
    assert [each.first_step for each in batch.windows] == [4, 24]
    assert batch.dropped == {"line": 2}


def test_notes_are_read_on_when_their_file_has_become_the_old_one(folder: WatchFolder) -> None:
    note(folder.path, started(0), window(0, 4))
    reducer = Reducer(folder)
    reducer.collect()
    note(folder.path, window(0, 24))
    path = build_notes_path(folder.path, 0)
    path.replace(path.with_name("rank0.jsonl.old"))
    note(folder.path, window(0, 44))

    batch = reducer.collect()

    assert batch is not None
    assert ([each.first_step for each in batch.windows], batch.dropped) == ([24, 44], {})


def test_batches_that_were_sent_are_not_sent_again(folder: WatchFolder) -> None:
    note(folder.path, started(0), window(0, 4))
    reducer = Reducer(folder)
    reducer.collect()
    note(folder.path, window(0, 24))
    reducer.collect()
    first, second = [encode_batch(batch) + b"\n" for batch in read_batches(folder)]

    assert list(reducer.list_unsent()) == [first, second]
    reducer.note_sent()
    assert list(Reducer(folder).list_unsent()) == [second]


def test_a_batch_that_the_dashboard_refuses_is_counted_in_the_next_one(folder: WatchFolder) -> None:
    note(folder.path, started(0), window(0, 4))
    reducer = Reducer(folder)
    reducer.collect()
    reducer.note_sent(is_refused=True)

    batch = Reducer(folder).collect()

    assert batch is not None
    assert (batch.windows, batch.dropped) == ((), {"batch": 1})
    assert Reducer(folder).collect() is None


def test_a_batch_half_written_by_a_killed_reducer_is_written_again(folder: WatchFolder) -> None:
    note(folder.path, started(0), window(0, 4))
    Reducer(folder).collect()
    with folder.batches.open("a") as file:
        file.write('{"schema": "stepsplit.watch/1", "id": "half')
    note(folder.path, window(0, 24))

    Reducer(folder).collect()

    windows = [each.first_step for batch in read_batches(folder) for each in batch.windows]
    assert windows == [4, 24]


NOTES_AND_REDUCER = """
import sys, time
from pathlib import Path
from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
reducer = Reducer(WatchFolder(Path(sys.argv[1]), "exp1", "h1"))
print("begun", flush=True)
while True:
    reducer.collect()
"""


@pytest.mark.slow
def test_a_reducer_killed_at_any_time_loses_and_repeats_nothing(folder: WatchFolder) -> None:
    note(folder.path, started(0))
    steps, kills = range(4, 4 + 20 * 400, 20), 0
    process = None
    for first in steps:
        if process is None:
            command = [sys.executable, "-c", NOTES_AND_REDUCER, str(folder.path)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
        note(folder.path, window(0, first))
        time.sleep(0.002 * (first % 7))
        if first % 400 == 4:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            process, kills = None, kills + 1
    if process is not None:
        process.kill()
        process.communicate()
    Reducer(folder).collect()

    assert kills == 20
    batches = read_batches(folder)
    assert [each.first_step for batch in batches for each in batch.windows] == list(steps)
    assert len({batch.id for batch in batches}) == len(batches)
    assert json.loads(folder.state.read_text())["batches"] == len(batches)


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_a_ledger_that_fails_stops_no_batch(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise error

    monkeypatch.setattr("stepsplit.analyzer.watch.reducer.read_ledger", fail)
    note(tmp_path, started(0), window(0, 1))
    batch = Reducer(WatchFolder(tmp_path, "run", "h1")).collect(is_last=True)
    assert batch is not None and len(batch.windows) == 1 and batch.ledger is None


# A rank that is killed between two beats.

_ENDLESS_RANK = """
import sys, time
from stepsplit.collectors.formats.step_memory import StepMemory
memory = StepMemory(0, 0)
for step in range(72):
    memory.write(step, time.time_ns())
print(memory.descriptor, flush=True)
time.sleep(60)
"""


def test_the_newest_step_of_a_killed_rank_is_known(folder: WatchFolder) -> None:
    begin = time.time_ns()
    rank = subprocess.Popen([sys.executable, "-c", _ENDLESS_RANK], stdout=subprocess.PIPE)
    assert rank.stdout is not None
    descriptor = int(rank.stdout.readline())
    note(folder.path, replace(started(0), pid=rank.pid, step_descriptor=descriptor))
    # Its thread has written so far, when it is killed.
    BeatFile(folder.path, 0, 0).write(Beat(66, begin, begin))
    reducer = Reducer(folder)
    reducer.collect()
    assert read_beat(folder.path, 0, 0) == Beat(66, begin, begin)
    rank.kill()
    rank.communicate()
    reducer.collect(is_last=True)
    beat = read_beat(folder.path, 0, 0)
    assert beat is not None and beat.step == 71
    assert begin < beat.step_unix_ns == beat.unix_ns < time.time_ns()
    (lost,) = [event for batch in read_batches(folder) for event in batch.events if event.rank == 0]
    assert (lost.kind, lost.step) == ("lost_rank", 71)


def test_another_process_or_descriptor_is_no_step_memory() -> None:
    own = StepMemory(3, 1)
    held = HeldStepMemory(os.getpid(), own.descriptor, 3, 1)
    assert held.read() is None
    own.write(7, time.time_ns())
    found = held.read()
    assert found is not None and found[0] == 7
    assert not held.is_left()
    for pid, descriptor, rank in ((os.getpid(), own.descriptor, 2), (os.getpid(), 0, 3),
                                  (os.getpid(), -1, 3), (1 << 22, own.descriptor, 3)):  # fmt: skip
        with pytest.raises(OSError, match="no step memory"):
            HeldStepMemory(pid, descriptor, rank, 1)
    own.close()
    assert held.is_left() and held.read() == found
    held.close()


def test_the_end_of_a_watch_closes_no_file_of_the_script(tmp_path: Path) -> None:
    """A script that closes all descriptors gets the same numbers for its files."""
    own = StepMemory(3, 1)
    os.close(own.descriptor)
    with (tmp_path / "log.txt").open("w") as log:
        assert log.fileno() == own.descriptor
        own.close()
        log.write("still open")
