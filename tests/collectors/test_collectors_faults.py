"""Whatever happens to a recorded training: it ends as it would without us, and no file is half.

Each test runs a real training of two ranks, under `record` where nothing else is said. Steps 6 to 8
of 12 are to be recorded. What a job says holds its last losses to the bit.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from collector_jobs.starting import (
    COLLECTORS,
    HERE,
    RANKS,
    TORCHRUN,
    TRAIN,
    Ended,
    drafts,
    end,
    ended_at_last,
    names,
    plain,
    recorded,
    recording,
    run,
    start,
    steps,
)

from stepsplit.analyzer import analyze
from stepsplit.collectors.attach.messages import Status, ask_status
from stepsplit.collectors.attach.processes import list_process_tree
from stepsplit.collectors.attach.sockets import list_agents

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.in_turn("collectors")]

RANK_0, RANK_1 = (
    [f"rank{rank}_{name}" for name in ("flight.json.gz", "record.json", "trace.json.gz")]
    for rank in (0, 1)
)
FLIGHT_DUMPS = (RANK_0[0], RANK_1[0])
WHOLE = [*RANK_0, *RANK_1, "run.json"]
"""The files of a recording of both ranks."""


@pytest.fixture(autouse=True)
def own_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps the agents of these jobs apart from others, with a short socket path."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        monkeypatch.setenv("STEPSPLIT_SOCKETS", folder)
        yield


@pytest.fixture(scope="module")
def undisturbed() -> Ended:
    """The training without the recorder and without faults."""
    return plain("nothing")


Disk = Callable[[str], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mounts a small disk with the given mount options."""
    place = tmp_path / "disk"
    place.mkdir()

    def mounted(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a tmpfs is not permitted here")
        return place

    yield mounted
    subprocess.run(["umount", str(place)], check=False, capture_output=True)


ABORT = "terminate called without an active exception"
"""An abort of gloo's threads at the end of a process, with or without the recorder."""


def alike(one: Ended, other: Ended) -> bool:
    """Whether both have the same status and output; gloo's own abort is ignored."""
    if any(ABORT in job.err for job in (one, other)):
        return _said(one) == _said(other)
    return (one.status, one.out) == (other.status, other.out)


def _said(job: Ended) -> list[str]:
    return [line for line in job.out.splitlines() if not line.startswith("statuses")]


# A rank that is killed.


def test_a_rank_killed_in_a_recorded_step_does_not_affect_the_other_ranks_files(
    tmp_path: Path,
) -> None:
    job = recorded("killed_in_a_recorded_step", tmp_path)

    assert alike(job, plain("killed_in_a_recorded_step"))
    assert names(tmp_path) == [*RANK_0, "run.json"]
    assert steps(tmp_path, 0) == [6, 7]
    assert not drafts(tmp_path)


def test_files_are_complete_if_the_rank_is_killed_while_packing(tmp_path: Path) -> None:
    job = recorded("killed_while_packed", tmp_path)

    assert alike(job, plain("killed_while_packed"))
    assert names(tmp_path) == WHOLE
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [6, 7, 8]


def test_the_next_recording_removes_files_of_an_interrupted_export(
    tmp_path: Path, undisturbed: Ended
) -> None:
    killed = recorded("killed_while_exported", tmp_path)

    assert (killed.status, killed.out.splitlines()[-1]) == (137, "statuses [0, -9]")
    assert names(tmp_path) == [*RANK_0, "run.json"]
    assert len(drafts(tmp_path)) == 1

    assert alike(recorded("nothing", tmp_path, "--overwrite"), undisturbed)
    assert (names(tmp_path), drafts(tmp_path)) == (WHOLE, [])
    assert steps(tmp_path, 1) == [6, 7, 8]


# A folder that takes no files.


def test_a_full_disk_loses_only_the_recording(disk: Disk, undisturbed: Ended) -> None:
    place = disk("size=4k")
    (place / "data").write_bytes(bytes(4096))
    folder = place / "run"

    job = recorded("nothing", folder)

    assert alike(job, undisturbed)
    assert job.lost == lost_to_a_full_disk(folder)
    assert not folder.exists()


def test_a_disk_that_is_full_amid_a_trace_keeps_none_in_part(
    disk: Disk, undisturbed: Ended
) -> None:
    # Smaller than one trace. The space of a deleted one may do for the other rank's dump.
    folder = disk("size=48k") / "run"

    job = recorded("nothing", folder)

    assert alike(job, undisturbed)
    assert job.lost == lost_to_a_full_disk(folder)
    assert not folder.exists() or set(names(folder)) <= {*FLIGHT_DUMPS, "run.json"}
    assert not drafts(folder)


def lost_to_a_full_disk(folder: Path) -> list[str]:
    reason = f"No space left on device (ENOSPC) in {folder}"
    return [f"rank {rank}: lost its files: {reason}" for rank in (0, 1)]


def test_record_does_not_start_the_job_if_the_folder_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    job = run([*recording(tmp_path / "file" / "run"), sys.executable, "-c", "print('started')"])

    assert (job.status, job.out) == (2, "")
    assert job.err.count("\n") == 1


def test_an_unwritable_folder_loses_only_the_recording(disk: Disk, undisturbed: Ended) -> None:
    folder = disk("ro")

    job = run([*RANKS, str(HERE / "recorded.py"), "recorder_cannot_write"], READ_ONLY=str(folder))

    assert alike(job, undisturbed)
    assert [line for line in job.lost if line.startswith("rank 0: lost its trace: ")]
    assert [line for line in job.lost if line.startswith("rank 1: lost its trace: ")]
    assert not list(folder.iterdir())


# A profiler of the user's own.


@pytest.mark.parametrize(
    ("scenario", "recorded_steps"),
    [
        # Rank 0's runs from the first step on; rank 1 starts one in step 7.
        ("own_profiler_throughout_or_in_a_recorded_step", (None, [6, 7])),
        # Rank 0's is warm when ours is to warm up; rank 1's warms up when ours is warm. Ours begins
        # again after theirs has ended, and is cut off by the end of the job, after step 11.
        ("own_profiler_warm_or_begun_as_ours_is_warm", ([11, 12], [10, 11, 12])),
    ],
)
def test_the_recorder_yields_to_the_users_profiler_with_one_warning(
    scenario: str,
    recorded_steps: tuple[list[int] | None, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "run"

    job = recorded(scenario, out)

    assert alike(job, plain(scenario))
    warnings = re.findall(r"^stepsplit: (rank \d): .*torch.profiler", job.err, re.MULTILINE)
    assert sorted(warnings) == ["rank 0", "rank 1"]
    traces = [name for name in names(out) if "trace" in name]
    assert [f"rank{rank}_trace.json.gz" in traces for rank in (0, 1)] == [
        wanted is not None for wanted in recorded_steps
    ]
    assert all(steps(out, k) == wanted for k, wanted in enumerate(recorded_steps) if wanted)


@pytest.mark.parametrize(
    ("scenario", "recorded_steps"),
    [
        # Rank 0's is one trace of its first ten steps; ours has step 6 when rank 1's starts.
        ("own_profiler_throughout_or_in_a_recorded_step", (None, [6, 7])),
        # The script numbers the steps of its profilers from their start.
        ("own_profiler_warm_or_begun_as_ours_is_warm", ([4, 5], [1, 2])),
    ],
)
def test_with_share_the_trace_of_the_users_profiler_is_recorded_and_still_its_own(
    scenario: str,
    recorded_steps: tuple[list[int] | None, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "run"

    job = recorded(scenario, out, "--share")

    assert alike(job, plain(scenario))
    assert names(out) == WHOLE
    for rank, wanted in enumerate(recorded_steps):
        said = f"rank {rank}: .* (those|that) of the script's own torch.profiler"
        assert bool(re.search(said, job.err)) == (wanted != [6, 7])
        assert wanted is None or steps(out, rank) == wanted
    report = analyze(out)
    assert {step.rank for step in report.steps if step.kind == "full"} == {0, 1}


def test_a_script_that_profiles_itself_all_the_time_is_recorded_and_attached_to_with_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    stop = tmp_path / "stop"
    scenario = "own_schedule_until_stopped"

    # With the profiler free for one step in three, three steps never fit.
    waiting = recorded(scenario, tmp_path / "waiting", STOP=str(stop))
    shared = recorded(scenario, tmp_path / "shared", "--share", STOP=str(stop))

    assert len(waiting.lost) == 2 and waiting.err.count("--share copies its trace") == 2
    assert alike(waiting, shared) and shared.lost == []
    assert names(tmp_path / "shared") == WHOLE
    assert steps(tmp_path / "shared", 0) == steps(tmp_path / "shared", 1) == [4, 5]

    standby = [*COLLECTORS, "record", "--standby", "--out", str(tmp_path / "none"), "--"]
    job = start([*standby, *RANKS, TRAIN, scenario], STOP=str(stop), STEPS="100000")
    with ended_at_last(job):
        when(lambda ranks: [status.steps > 5 for status in ranks] == [True, True])
        attached = run(attach(tmp_path / "attached", str(job.pid), "--share"))
        stop.touch()
        ended = end(job)

    assert attached.status == 0, attached.err
    assert names(tmp_path / "attached") == WHOLE
    assert steps(tmp_path / "attached", 0) == steps(tmp_path / "attached", 1)
    assert ended.status == 0 and ended.out.count("exported all: True") == 2


def test_a_recorder_inside_the_users_own_profiler_warns_once(tmp_path: Path) -> None:
    script = [*RANKS, str(HERE / "recorded.py"), "recorder_inside_own_profiler"]

    job = run(script, OUT=str(tmp_path / "run"), TMPDIR=str(tmp_path))

    assert job.status == 0
    assert "rank 0 saw 12 linear, True" not in job.out and "saw 24 linear, True" in job.out
    assert [line.split(":")[0] for line in job.lost] == ["rank 0", "rank 1"]


def test_the_first_of_two_recorders_continues_and_torch_is_restored(
    tmp_path: Path,
) -> None:
    script = [*RANKS, str(HERE / "recorded.py"), "recorder_twice_at_once"]

    job = run(script, OUT=str(tmp_path), TMPDIR=str(tmp_path))

    assert job.status == 0
    assert (names(tmp_path / "1"), names(tmp_path / "2")) == (WHOLE, ["run.json"])
    assert [line.split(":")[0] for line in job.lost] == ["rank 0", "rank 1"]


# How a training ends.


def test_a_slow_export_delays_the_other_rank_without_failing_it(
    tmp_path: Path, undisturbed: Ended
) -> None:
    job = recorded("slow_export_on_rank_1", tmp_path)

    assert alike(job, undisturbed)
    assert (names(tmp_path), job.lost) == (WHOLE, [])


def test_a_training_that_raises_keeps_its_error_and_its_recorded_steps(
    tmp_path: Path,
) -> None:
    job = recorded("raises_in_a_recorded_step", tmp_path)

    assert alike(job, plain("raises_in_a_recorded_step"))
    assert job.err.count("ValueError: the training's own error") == 2
    assert names(tmp_path) == WHOLE
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [6, 7, 8]


def test_a_training_that_exits_early_has_its_files(tmp_path: Path) -> None:
    job = recorded("leaves_at_once", tmp_path)

    assert alike(job, plain("leaves_at_once"))
    assert job.status == 7
    assert names(tmp_path) == WHOLE


def test_a_training_shorter_than_the_first_step_has_its_own_first_steps_recorded(
    tmp_path: Path, undisturbed: Ended
) -> None:
    job = recorded("nothing", tmp_path, "--first", "14")

    assert alike(job, undisturbed)
    assert (names(tmp_path), job.lost) == (WHOLE, [])
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [1, 2, 3]
    assert "recorded 2 ranks, its first steps because the job ended before step 14" in job.err


def test_ranks_that_outlive_their_launcher_are_named(tmp_path: Path) -> None:
    """SIGKILL of torchrun leaves its ranks running."""
    job = start([*recording(tmp_path), *TORCHRUN, TRAIN, "never_ends"])
    with ended_at_last(job):
        assert job.stdout is not None and job.stderr is not None
        for _ in (0, 1):
            assert job.stdout.readline() == "in step 8\n"
        launcher = next(pid for pid in list_process_tree(job.pid) if pid != job.pid)
        ranks = [pid for pid in list_process_tree(launcher) if pid != launcher]
        os.kill(launcher, signal.SIGKILL)
        said = next(line for line in job.stderr if line.startswith("stepsplit: "))
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    listed = [f"{rank} (process {pid})" for rank, pid in enumerate(ranks)]
    assert said.startswith(f"stepsplit: the command was killed (SIGKILL), but ranks {listed[0]}, ")
    assert listed[1] in said and said.endswith(f" go on; what they record is in {tmp_path}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_as_without_the_recorder(
    number: signal.Signals, tmp_path: Path
) -> None:
    job = [*TORCHRUN, TRAIN, "never_ends"]

    with_us = signalled([*recording(tmp_path), *job], number)

    assert with_us.status == signalled(job, number).status
    # Ctrl-C is an exception in the ranks, which end in order; SIGTERM kills them.
    found = list(tmp_path.glob("*trace*"))
    assert len(found) == (2 if number == signal.SIGINT else 0)
    assert all(steps(tmp_path, rank)[:2] == [6, 7] for rank in range(len(found)))
    assert not drafts(tmp_path)


def signalled(command: list[str], number: signal.Signals) -> Ended:
    """The job, signalled in a recorded step: its process group as by a terminal, or one process."""
    process = start(command)
    with ended_at_last(process):
        assert process.stdout is not None
        for _ in (0, 1):
            assert process.stdout.readline() == "in step 8\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        return end(process)


# What else runs in a job.


def test_workers_of_a_data_loader_start_in_a_recorded_step(tmp_path: Path) -> None:
    job = recorded("loads_data_in_a_recorded_step", tmp_path)

    assert alike(job, plain("loads_data_in_a_recorded_step"))
    assert (names(tmp_path), job.lost) == (WHOLE, [])
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [6, 7, 8]


def test_a_training_in_a_subprocess_does_not_replace_the_recording(
    tmp_path: Path, undisturbed: Ended
) -> None:
    job = recorded("trains_in_a_subprocess", tmp_path)

    assert alike(job, undisturbed)
    assert names(tmp_path) == WHOLE
    # The other training has no collectives.
    assert b"gloo:all_reduce" in gzip.decompress((tmp_path / "rank0_trace.json.gz").read_bytes())


def test_a_script_without_torch_runs_as_it_is(tmp_path: Path) -> None:
    code = "import sys; print('torch' in sys.modules, 'agent' in sys.modules); sys.exit(3)"

    job = run([*recording(tmp_path), sys.executable, "-c", code])

    assert (job.status, job.out) == (3, "False False\n")
    assert job.err.count("\n") == 1 and "no process of the command has ended two steps" in job.err
    assert not tmp_path.exists()


SAYS_ITS_START = """
import json, os, sys, sitecustomize
print(json.dumps([p for p in sys.path if "collectors" not in p]), os.environ["ORDER"])
print(getattr(sitecustomize, "WHOSE", "not the user's"))
"""


def test_the_users_sitecustomize_runs_and_pythonpath_stays(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['ORDER'] = WHOSE = 'user'\n")
    (tmp_path / "empty").mkdir()
    script = [sys.executable, "-c", SAYS_ITS_START]
    path = os.pathsep.join([str(tmp_path), str(tmp_path / "empty")])

    without = run(script, PYTHONPATH=path)
    with_us = run([*recording(tmp_path / "run"), *script], PYTHONPATH=path)

    assert without.out.endswith(" user\nuser\n")
    assert alike(with_us, without)


def bare_python(folder: Path, packages: str) -> str:
    """A Python with the same packages but stepsplit: a .pth of a .pth is not read."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "torch_is_there.pth").write_text(f"{packages}\n")
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("namesake", [False, True], ids=["not there", "a folder of that name"])
def test_a_python_without_stepsplit_is_recorded(
    namesake: bool, tmp_path: Path, undisturbed: Ended
) -> None:
    python = bare_python(tmp_path / "venv", str(Path(torch.__file__).parents[1]))
    if run([python, "-c", "import stepsplit.collectors"]).status == 0:
        pytest.skip("stepsplit lies beside torch here, and is found with it")
    if namesake:
        (tmp_path / "path" / "stepsplit").mkdir(parents=True)

    out = tmp_path / "run"
    ranks = [python, *RANKS[1:], TRAIN, "nothing"]
    job = run([*recording(out), *ranks], PYTHONPATH=str(tmp_path / "path"))

    assert alike(job, undisturbed)
    assert (names(out), job.lost) == (WHOLE, [])


OPTIMIZERS = {
    # A step skipped by a gradient scaler does not count.
    "scaler_skips_two_of_8": 6,
    "two_step_8_times": 8,
    "one_wraps_another": 8,
    "one_calls_a_closure": 8,
    "one_raises_in_its_third_of_8": 7,
    # The other one takes over with its second step.
    "one_raises_and_is_replaced": 6,
    "compiled_8_times": 8,
}


def test_steps_are_counted_for_unusual_optimizers(tmp_path: Path) -> None:
    script = [sys.executable, str(HERE / "optimizers.py"), *OPTIMIZERS]

    job = run([*recording(tmp_path, "--standby"), *script])

    counts = dict(line.split() for line in job.out.splitlines())
    assert {name: int(count) for name, count in counts.items()} == OPTIMIZERS
    # torch.compile would log if it traced the hooks.
    assert "does not know how to trace" not in job.err


# Attach.


def attach(out: Path, *words: str) -> list[str]:
    """The command line of an attach that records three steps."""
    return [*COLLECTORS, "attach", *words, "--out", str(out), "--steps", "3"]


def when(seen: Callable[[list[Status]], Any], patience_s: float = 60.0) -> list[Status]:
    """The ranks on standby, once the condition is true."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        ranks = [status for status in map(ask_status, list_agents()) if status is not None]
        if seen(ranks):
            return ranks
        time.sleep(0.05)
    raise AssertionError(f"not within {patience_s} s: {ranks}")


def refused(job: Ended, why: str) -> bool:
    """Whether a command ended with status 2 and one line that contains the reason."""
    return job.status == 2 and job.err.count("\n") == 1 and why in job.err


def test_attach_records_the_same_steps_on_all_ranks_once_at_a_time(tmp_path: Path) -> None:
    assert refused(run(attach(tmp_path / "none")), "is on standby")
    stop = tmp_path / "stop"
    standby = [*COLLECTORS, "record", "--standby", "--out", str(tmp_path / "standby"), "--"]
    job = start([*standby, *RANKS, TRAIN, "until_stopped"], STOP=str(stop))
    with ended_at_last(job):
        when(lambda ranks: [status.steps > 5 for status in ranks] == [True, True])
        first = start(attach(tmp_path / "first", str(job.pid)))
        with ended_at_last(first):
            when(lambda ranks: all(status.busy for status in ranks))
            second = run(attach(tmp_path / "second"))
            attached = end(first)
        assert attached.status == 0, attached.err
        assert second.err.startswith("another attach records this job: waiting for its end\n")
        # All files must exist when attach reports success; rank 1 takes a second to write.
        assert names(tmp_path / "first") == names(tmp_path / "second") == WHOLE
        assert refused(run(attach(tmp_path / "first")), "or replace it with --overwrite")
        stop.touch()
        ended = end(job)

    for folder in (tmp_path / "first", tmp_path / "second"):
        seen = steps(folder, 0)
        assert len(seen) == 3 and seen == steps(folder, 1)
    assert ended.out.count("torch is as it was: True") == 2
    losses = [line for line in ended.out.splitlines() if "loss" in line]
    again = run([*RANKS, TRAIN, "nothing"], STEPS=losses[0].split()[-1])
    assert losses == again.out.splitlines()[:2]
