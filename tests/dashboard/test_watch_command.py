"""stepsplit watch on real trainings: what it tells, and that the training is as without it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from collector_jobs.starting import heed_interrupts
from support.dashboard_processes import find_free_port, open_store, running_dashboard
from support.waiting import until

pytest.importorskip("torch")

from stepsplit.analyzer import analyze
from stepsplit.analyzer.watch.records import WatchBatch, decode_batch
from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
from stepsplit.collectors.attach.processes import list_process_tree
from stepsplit.collectors.attach.sockets import list_agents
from stepsplit.collectors.formats.watch_notes import (
    NoteFile,
    RankEnded,
    RankStarted,
    RankWindow,
    read_beat,
)
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.watch import WatchRange
from stepsplit.dashboard.store.watch_slots import LEVELS_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turn(
        "analyzer/watch", "collectors", "dashboard/commands/watch.py",
        "dashboard/store/watch_batches.py",
        "dashboard/watch_process.py", "dashboard/watch_sender.py",
        "dashboard/sinks/point_logger.py",
    ),
]  # fmt: skip

STEPS = 2_500

JOB = Path(__file__).parents[1] / "collector_jobs" / "watched.py"


def build_command(steps: int, ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), str(JOB), str(steps)]


def start(out: Path, command: list[str], *options: str) -> subprocess.Popen[str]:
    watch = [sys.executable, "-m", "stepsplit.dashboard", "watch", "--out", str(out)]
    watch += ["--every", "100steps", "--budget", "50", *options]
    watch += ["--", *command] if command else []
    return subprocess.Popen(
        watch,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


def watch(out: Path, command: list[str], *options: str) -> tuple[int, str, str]:
    process = start(out, command, *options)
    printed, errors = process.communicate(timeout=240)
    return process.returncode, printed, errors


def read_batches(out: Path) -> list[WatchBatch]:
    (path,) = (out / "hosts").glob("*.jsonl")
    return [decode_batch(line, str(path)) for line in path.read_bytes().splitlines()]


def list_windows(batches: list[WatchBatch], rank: int) -> list[RankWindow]:
    return [each for batch in batches for each in batch.windows if each.rank == rank]


def list_events(batches: list[WatchBatch]) -> list[tuple[str, int | None]]:
    """All events but those of a slower machine: steps that change, and the capture of a change."""
    of_load = ("pause", "change", "drift", "capture")
    events = [each for batch in batches for each in batch.events]
    return [(each.kind, each.rank) for each in events if each.kind not in of_load]


def find_reducers(watch: subprocess.Popen[str]) -> list[int]:
    """The reducers of the watch: other tests have their own at the same time."""
    found = []
    for pid in list_process_tree(watch.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"stepsplit.dashboard.watch_process" in command:
            found.append(pid)
    return found


def wait_until_batches(out: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = list((out / "hosts").glob("*.jsonl"))
        if found and len(found[0].read_bytes().splitlines()) >= number:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no {number} batches in {out}")


@pytest.fixture(scope="module")
def plain() -> str:
    """The last loss of the training without a watch."""
    done = subprocess.run(build_command(STEPS), capture_output=True, text=True, check=True)
    return done.stdout


def test_a_training_is_watched_until_its_end(tmp_path: Path, plain: str) -> None:
    status, printed, errors = watch(tmp_path / "run", build_command(STEPS))

    assert (status, printed) == (0, plain)
    batches = read_batches(tmp_path / "run")
    samples = [each for batch in batches for each in batch.samples]
    counted = [each for each in samples if not each.no_data]
    assert len(counted) >= 3
    for sample in counted:
        report = analyze(tmp_path / "run" / sample.traces)
        rows = {(row.rank, row.split) for row in report.steps}
        assert {(each.rank, each.split) for each in sample.ranks} <= rows
        assert [each.rank for each in sample.ranks] == [0, 1]
    # All unprofiled steps but the first few are in the windows of both ranks, in order.
    for rank in (0, 1):
        windows = list_windows(batches, rank)
        assert all(one.last_step < next.first_step for one, next in pairwise(windows))
        assert STEPS - sum(each.steps for each in windows) < 5 * (len(samples) + 2)
    assert list_events(batches) == [("started", None), ("ended", None)]
    assert {batch.run for batch in batches} == {"run"}
    assert batches[-1].overhead is not None
    last = errors.strip().splitlines()[-1]
    assert re.match(rf"watched {STEPS} steps, {len(samples)} samples.*, which cost .* %", last)
    assert "USDT" not in errors


def test_numbers_go_to_sinks_and_dead_ones_cost_a_line_each(tmp_path: Path, plain: str) -> None:
    file = tmp_path / "numbers.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # It takes connections and does not answer.
        urls = ["http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        sinks = [f"json:{file}", *(f"otlp:{url}" for url in urls)]
        options = [word for sink in sinks for word in ("--log-to", sink)]
        status, printed, errors = watch(tmp_path / "run", build_command(STEPS), *options)

    assert (status, printed) == (0, plain)
    for url in urls:
        assert len(re.findall(rf"stepsplit: otlp:{url}/v1/metrics: .*", errors)) == 1
    batches = read_batches(tmp_path / "run")
    points = [json.loads(line) for line in file.read_text().splitlines()]
    sampled = {one["stepsplit/step"]: one for one in points if "stepsplit/idle_share" in one}
    counted = [one for batch in batches for one in batch.samples if not one.no_data]
    assert list(sampled) == [one.step for one in counted]
    for sample in counted:
        idle_ns = sum(each.split.idle_ns for each in sample.ranks)
        total_ns = sum(each.split.step_ns for each in sample.ranks)
        assert sampled[sample.step]["stepsplit/idle_share"] == idle_ns / total_ns
    timed = [one for one in points if "stepsplit/step_time_s" in one]
    longest_ns = max(each.max_step_ns for rank in (0, 1) for each in list_windows(batches, rank))
    assert max(one["stepsplit/step_time_max_s"] for one in timed) == longest_ns / 1e9


def test_a_killed_reducer_is_replaced_and_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, build_command(3 * STEPS))
    for number in (2, 4):
        # A batch whose state is not written yet is written again, so two of them are waited for.
        wait_until_batches(out, number)
        (reducer,) = find_reducers(process)
        os.kill(reducer, signal.SIGKILL)
    process.communicate(timeout=240)

    assert process.returncode == 0
    batches = read_batches(out)
    assert list_events(batches) == [("started", None), ("ended", None)]
    for rank in (0, 1):
        windows = list_windows(batches, rank)
        assert all(one.last_step < next.first_step for one, next in pairwise(windows))
        gaps = [next.first_step - one.last_step for one, next in pairwise(windows)]
        assert set(gaps) <= {1, 5}  # A sample has a warmup step, two steps and its export.
    assert len({sample.id for batch in batches for sample in batch.samples}) >= 3


def test_a_job_that_is_started_again_on_fewer_ranks_goes_on_as_another_incarnation(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    for ranks in (4, 2):
        status, _, _ = watch(out, build_command(300, ranks))
        assert status == 0

    batches = read_batches(out)
    sizes = {(batch.incarnation, batch.world_size) for batch in batches}
    assert sizes == {(0, 4), (1, 2)}
    # After a while a second event of the restart compares its steps with those before.
    events = [event for event, _ in groupby(list_events(batches))]
    assert events == [("started", None), ("ended", None), ("restarted", None), ("ended", None)]
    assert len({batch.id for batch in batches}) == len(batches)
    for batch in batches:
        for sample in batch.samples:
            assert [each.rank for each in sample.ranks] in ([], list(range(batch.world_size)))


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, build_command(100_000))
    wait_until_batches(out, 1)
    assert process.poll() is None
    (rank_1,) = [n for n in read_started(out) if n[0] == 1]
    os.kill(rank_1[1], signal.SIGKILL)
    process.communicate(timeout=240)

    assert process.returncode == 1
    assert ("lost_rank", 1) in list_events(read_batches(out))
    # Its thread writes a beat some time after the step; that of its memory is of the step itself.
    beat = read_beat(out, 1, 0)
    assert beat is not None and beat.step_unix_ns == beat.unix_ns


def read_started(out: Path) -> list[tuple[int, int]]:
    """(rank, pid) of the ranks that have started."""
    from stepsplit.collectors.formats.file_names import list_note_files
    from stepsplit.collectors.formats.watch_notes import RankStarted, read_notes

    notes = [note for path in list_note_files(out) for note in read_notes(path).notes]
    return [(each.rank, each.pid) for each in notes if isinstance(each, RankStarted)]


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=False, capture_output=True)


def test_on_a_full_disk_the_training_goes_on_as_without(tmp_path: Path, plain: str) -> None:
    with small_disk(tmp_path / "disk") as disk:
        status, printed, errors = watch(disk / "run", build_command(STEPS))

        assert (status, printed) == (0, plain)
        assert "No space left on device" in errors
        assert "Traceback" not in errors
        lines = [line for line in errors.splitlines() if "No space left on device" in line]
        assert len(lines) == len(set(lines)) <= 8, errors


def test_an_odd_interval_or_command_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for options, command in ((["--every", "soon"], ["true"]), ([], ["no-such-command"])):
        status, printed, errors = watch(out, command, *options)
        assert (status, printed, errors.count("\n")) == (2, "", 1)
    assert not out.exists()


def leave_batches(folder: WatchFolder, number: int) -> None:
    """As a watch that had no dashboard, and whose rank has ended."""
    notes, now_ns = NoteFile(folder.path, 0), time.time_ns()
    notes.write([RankStarted(0, 1, folder.host, 1, 0, 0.005, now_ns)])
    for batch in range(number):
        first = 20 * batch
        notes.write([RankWindow(0, first, first + 19, now_ns, now_ns + 200, 20, 8, 10, 12)])
        if batch == number - 1:
            notes.write([RankEnded(0, first + 19, now_ns + 200)])
        assert Reducer(folder).collect() is not None


def test_what_an_ended_watch_left_is_sent_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    for host, batches in (("a", 3), ("b", 1)):
        leave_batches(WatchFolder(out, "run", host), batches)
    unused = f"http://127.0.0.1:{find_free_port()}"

    assert cli.run(["watch", "--send", str(out), "--to", unused]) == 2
    assert "0 batches sent, 4 not yet: repeat the command later" in capsys.readouterr().err
    with running_dashboard(tmp_path) as dashboard:
        for expected in ("4 batches sent", "0 batches sent"):
            assert cli.run(["watch", "--send", str(out), "--to", dashboard.url]) == 0
            assert capsys.readouterr().err == f"{expected} to {dashboard.url}\n"

    assert count_received(tmp_path) == 4


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--send", "{}", "--to", "http://127.0.0.1:9"], "no batches of a watch"),
        (["--send", "{}"], "--to URL"),
        (["--send", "{}", "--to", "http://127.0.0.1:9", "--", "true"], "give no command"),
    ],
)
def test_what_cannot_be_sent_is_one_line(
    options: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["watch", *(option.format(tmp_path) for option in options)]) == 2
    errors = capsys.readouterr().err
    assert problem in errors
    assert errors.count("\n") == 1


def test_a_dashboard_that_was_away_gets_every_batch_once(tmp_path: Path) -> None:
    out, port = tmp_path / "run", str(find_free_port())
    with running_dashboard(tmp_path, "--port", port) as dashboard:
        process = start(out, build_command(3 * STEPS), "--to", dashboard.url)
        until(lambda: count_received(tmp_path) >= 1, within_s=60)
        dashboard.kill_all()
    wait_until_batches(out, count_received(tmp_path) + 1)
    with running_dashboard(tmp_path, "--port", port):
        _, errors = process.communicate(timeout=240)

    assert process.returncode == 0
    assert errors.count("batches are kept and sent later") == 1
    batches = read_batches(out)
    assert count_received(tmp_path) == len(batches)
    with open_store(tmp_path) as store:
        watch = store.watches.find_watch("run")
        assert watch is not None
        everything = WatchRange(0, 1 << 40, LEVELS_S[0])
        slots = store.watches.read_steps(watch.id, everything)
    # A slot has as many steps as the rank with most of them.
    of_ranks = [sum(each.steps for each in list_windows(batches, rank)) for rank in (0, 1)]
    assert max(of_ranks) <= sum(slot.summary.steps for slot in slots) <= sum(of_ranks)


@contextmanager
def standby(folder: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """A job on standby, once its ranks step."""
    record = [sys.executable, "-m", "stepsplit.dashboard", "record", "--standby"]
    record += ["--out", str(folder / "standby"), "--"]
    before = set(list_agents())
    job = subprocess.Popen([*record, *build_command(steps)], stdout=subprocess.PIPE, text=True)
    until(lambda: len(set(list_agents()) - before) == 2, within_s=60)
    yield job
    if job.poll() is None:
        job.kill()


def test_a_running_job_is_watched_until_its_end(tmp_path: Path, plain: str) -> None:
    with standby(tmp_path, STEPS) as job:
        status, printed, errors = watch(tmp_path / "run", [], "--attach", str(job.pid))
        loss, _ = job.communicate(timeout=60)

    assert (status, printed, loss) == (0, "", plain)
    assert f"watching ranks 0, 1 in {tmp_path / 'run'}" in errors
    batches = read_batches(tmp_path / "run")
    assert list_events(batches) == [("started", None), ("ended", None)]
    assert any(not each.no_data for batch in batches for each in batch.samples)
    assert all(list_windows(batches, rank)[-1].last_step == STEPS - 1 for rank in (0, 1))


def test_ctrl_c_ends_the_watch_of_a_running_job_which_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with standby(tmp_path, 4 * STEPS) as job:
        process = start(out, [], "--attach", str(job.pid))
        wait_until_batches(out, 1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert "the job goes on without its watch" in errors
        assert job.poll() is None
        again = start(tmp_path / "again", [], "--attach", str(job.pid))
        _, errors = again.communicate(timeout=240)
        job.communicate(timeout=60)
        assert job.returncode == 0

    assert (process.returncode, again.returncode) == (0, 0), errors
    assert list_events(read_batches(out)) == [("started", None), ("ended", None)]
    last, first = (read_batches(each) for each in (out, tmp_path / "again"))
    assert list_windows(last, 0)[-1].last_step < list_windows(first, 0)[0].first_step


def test_a_requested_sample_is_uploaded_as_a_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with running_dashboard(tmp_path) as dashboard:
        options = ("--to", dashboard.url, "--upload-captures", "--every", "1h")
        process = start(out, build_command(3 * STEPS), *options)
        wait_until_batches(out, 1)
        (out / "capture").touch()
        _, errors = process.communicate(timeout=240)

    assert process.returncode == 0, errors
    events = [event for each in read_batches(out) for event in each.events]
    # A slower machine may bring another capture later.
    capture = next(event for event in events if event.kind == "capture")
    with open_store(tmp_path) as store:
        watch = store.watches.find_watch("run")
        assert watch is not None
        run = store.list_runs()[-1]
        assert {(tag.key, tag.value) for tag in run.tags} >= {("watch", "run")}
        assert store.watches.find_run_of_sample(watch.id, capture.unix_ns) == run.id
        samples = [one for one in store.watches.list_samples(watch.id, 10) if one.run_id == run.id]
    assert [one.sample.step for one in samples] == [capture.step]


def count_received(folder: Path) -> int:
    """The batches of the run that the dashboard of the folder has."""
    with open_store(folder) as store:
        watch = store.watches.find_watch("run")
        return 0 if watch is None else watch.batches
