"""Attaching to a running job through its agents or Kineto's daemon protocol."""

import faulthandler
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from stepsplit.collectors.attach import agent, kineto_daemon, messages, sockets, stacks
from stepsplit.collectors.attach.client import attach
from stepsplit.collectors.attach.kineto_daemon import capture
from stepsplit.collectors.attach.left_states import leave_state, read_left_states, remove_old_states
from stepsplit.collectors.attach.messages import (
    AgentAnswer,
    LookAnswer,
    Status,
    ask_look,
    ask_record,
    ask_status,
    format_answer,
    parse_request,
    read_line,
)
from stepsplit.collectors.attach.processes import (
    is_process_alive,
    list_ancestors,
    list_process_tree,
    read_environment,
)
from stepsplit.collectors.attach.sockets import build_socket_path, make_socket_folder
from stepsplit.collectors.attach.stacks import StackWatchdog
from stepsplit.collectors.attach.stop_watch import StopWatch
from stepsplit.collectors.formats.rank_record import CodeFrame
from stepsplit.collectors.formats.rank_state import Look, RankState
from stepsplit.collectors.guard import CollectError
from stepsplit.collectors.job.launcher import Identity, read_identity
from stepsplit.collectors.probes.imports import when_imported
from stepsplit.collectors.record.plan import RecordPlan

NO_PROCESS = 1 << 22
"""Above the highest process id of Linux."""
PLAN = RecordPlan(out="/runs/a", name="a", first=None, steps=3)


@pytest.fixture(autouse=True)
def own_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps these tests apart from other agents on this machine."""
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(tmp_path / "sockets"))


class Rank:
    """A rank whose thread answers like an agent."""

    def __init__(self, status: Status, takes: bool = True) -> None:
        self.status, self.takes = status, takes
        self.plans: list[RecordPlan] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(build_socket_path(status.pid)))
        self._server.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection:
                plan = parse_request(read_line(connection)).plan
                if plan is not None:
                    self.plans.append(plan)
                answer = AgentAnswer(self.takes, self.status.steps, "" if self.takes else "busy")
                connection.sendall(format_answer(self.status if plan is None else answer))


def status(rank: int, steps: int, pid: int = 0, job: str = "host:29500") -> Status:
    return Status(pid or NO_PROCESS + rank, rank, 2, 2, "host", job, steps, 100_000_000, False)


def test_attach_asks_all_ranks_for_the_same_future_steps() -> None:
    ranks = [Rank(status(1, steps=41)), Rank(status(0, steps=40))]

    agreed = attach(None, PLAN)

    assert [each.rank for each in agreed.ranks] == [0, 1]
    assert agreed.refused == ()
    assert ranks[0].plans == ranks[1].plans == [replace(PLAN, first=41 + 1 + 5 + 6)]


def test_an_attach_records_the_ranks_that_it_names() -> None:
    """All are asked: each knows by the plan whether it is one of them."""
    asked = [Rank(status(rank, steps=40)) for rank in (0, 1)]

    agreed = attach(None, replace(PLAN, ranks="1-3"))

    assert [len(rank.plans) for rank in asked] == [1, 1]
    assert agreed.recorded == (1,)


def test_attach_waits_until_the_step_time_is_known() -> None:
    rank = Rank(replace(status(0, 1), step_ns=0))
    threading.Timer(0.3, lambda: setattr(rank, "status", status(0, 2))).start()

    assert attach(None, PLAN).first == 2 + 1 + 5 + 6


def test_a_busy_rank_refuses_and_the_others_record() -> None:
    Rank(status(0, 40), takes=False)
    Rank(status(1, 40))

    assert attach(None, PLAN).refused == ("rank 0: busy",)


def test_the_error_has_the_reason_if_all_ranks_refuse() -> None:
    Rank(status(0, 40), takes=False)

    with pytest.raises(CollectError, match="no rank accepted the request: rank 0: busy"):
        attach(None, PLAN)


def test_with_two_jobs_a_process_id_is_required() -> None:
    """The job is selected by its parent: here the test, whose own parent may be process 1."""
    with subprocess.Popen(["sleep", "30"]) as child:
        own = Rank(status(0, 40, pid=child.pid))
        Rank(status(0, 7, job="other"))

        with pytest.raises(CollectError, match="2 jobs are on standby on this host"):
            attach(None, PLAN)
        attach(os.getpid(), PLAN)
        child.kill()

    assert len(own.plans) == 1


def test_the_error_without_a_job_has_a_hint() -> None:
    with pytest.raises(CollectError, match="start the job with stepsplit record --standby"):
        attach(None, PLAN)


def test_a_request_without_an_agent_returns_none() -> None:
    assert ask_status(NO_PROCESS) is None
    assert ask_record(NO_PROCESS, PLAN) is None


def stopped(rank: int, for_s: float, usual_s: float = 0.1) -> Status:
    since_ns, usual_ns = int(for_s * 1e9), int(usual_s * 1e9)
    return replace(status(rank, 40), since_step_ns=since_ns, longest_step_ns=usual_ns)


def test_attach_to_a_job_whose_steps_have_stopped_says_why() -> None:
    Rank(stopped(0, 9.0))
    Rank(stopped(1, 7.0))
    watch = StopWatch(lambda pid: f"rank 1 of {pid} waits" if pid == NO_PROCESS else None)

    with pytest.raises(CollectError) as raised:
        attach(None, PLAN, watch)

    assert str(raised.value) == (
        "no step has ended for 7 s: rank 1 of 4194304 waits; see stepsplit hang 4194304"
    )


@pytest.mark.parametrize(
    ("for_s", "usual_s"),
    [(4.0, 0.1), (20.0, 10.0), (50.0, 0.0)],
)
def test_a_step_is_waited_for_as_long_as_it_may_take(for_s: float, usual_s: float) -> None:
    def explain(pid: int) -> str | None:
        raise AssertionError(pid)

    StopWatch(explain).check([stopped(0, for_s, usual_s)])


def test_a_job_that_is_not_stuck_is_looked_at_again_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    looked: list[int] = []
    watch = StopWatch(looked.append)
    for _ in range(3):
        watch.check([stopped(0, 60.0)])
    assert looked == [NO_PROCESS]

    for _ in range(2):
        (alone := StopWatch()).check([stopped(0, 60.0)])
        alone.check([stopped(0, 60.0)])
    assert capsys.readouterr().err.splitlines() == 2 * [
        "no step has ended for 60 s; where the job hangs: stepsplit hang 4194304"
    ]


def rank_state(rank: int, **more: Any) -> RankState:
    look = Look(10**18, 3, 10**9, 7, (CodeFrame("load", "data.py", 7),))
    pid = NO_PROCESS + rank
    return RankState(rank, 2, "host", pid, "host:29500", looks=(look,), **more)


def test_a_look_and_a_dump_of_several_megabytes_pass_the_socket(tmp_path: Path) -> None:
    answer = LookAnswer(rank_state(0), "x" * (4 << 20))
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(build_socket_path(NO_PROCESS)))
    server.listen()

    def serve() -> None:
        connection, _ = server.accept()
        with server, connection:
            assert parse_request(read_line(connection)).flight
            connection.sendall(format_answer(answer))

    threading.Thread(target=serve, daemon=True).start()

    assert ask_look(NO_PROCESS, flight=True) == answer


def test_what_a_rank_has_left_replaces_that_of_the_same_rank_of_an_earlier_job() -> None:
    leave_state(replace(rank_state(0), pid=7))
    leave_state(rank_state(1, condition="ended", error="ValueError: no"))
    leave_state(rank_state(0))

    assert sorted(read_left_states(), key=lambda one: one.rank) == [
        rank_state(0),
        rank_state(1, condition="ended", error="ValueError: no"),
    ]


def test_what_ended_ranks_have_left_is_removed_after_a_day() -> None:
    leave_state(rank_state(0))
    leave_state(replace(rank_state(1), pid=os.getpid()))
    killed = build_socket_path(NO_PROCESS)
    for path in (killed, killed.with_suffix(".stack")):
        path.touch()
    for path in make_socket_folder().iterdir():
        os.utime(path, (0, 0))
    (new := killed.with_suffix(".new")).touch()

    remove_old_states()

    assert [one.rank for one in read_left_states()] == [1]
    assert sorted(make_socket_folder().iterdir()) == sorted(
        [new, build_socket_path(os.getpid()).with_suffix(".rank")]
    )


def test_a_socket_folder_accessible_to_others_is_refused() -> None:
    make_socket_folder().chmod(0o755)

    with pytest.raises(CollectError, match="accessible to other users"):
        build_socket_path(1)


def test_an_agent_whose_folder_was_removed_listens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /run/user/UID is at the last logout, which a job outlives."""
    monkeypatch.setattr(agent, "_EXISTS_S", 0.05)
    own, path = agent.Agent(PLAN), build_socket_path(os.getpid())
    own._pid = os.getpid()
    serving = threading.Thread(target=own._serve, args=(sockets.listen(path), path), daemon=True)
    serving.start()
    assert ask_status(os.getpid()) is not None

    shutil.rmtree(path.parent)

    deadline = time.monotonic() + 20
    while ask_status(os.getpid()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    own._is_over = True


@pytest.mark.parametrize("line", [b"", b"[]", b'{"do": "exit"}', b'{"do": "record"}', b"\xff"])
def test_an_invalid_request_raises_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_request(line)


def test_a_relayed_plan_is_not_published_again() -> None:
    assert parse_request(b'{"do": "status"}') == messages.AgentRequest(None)
    line = b'{"do": "record", "relayed": true, "plan": {"out": "o", "name": "n", "first": 4}}'
    assert parse_request(line) == messages.AgentRequest(RecordPlan("o", "n", 4), relayed=True)


def test_torchrun_variables_take_precedence_over_slurm_and_mpi() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    torchrun = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}

    assert read_identity(slurm) == Identity(3, 8, 1, 8)
    assert read_identity(slurm | torchrun) == Identity(5, 16, 1, 4)
    assert read_identity({}) == Identity(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("tasks", "node", "local"),
    [
        ("4(x2)", "1", 4),
        ("8(x3),4", "3", 4),
        ("8,4", "1", 4),
        ("2(x4)", "0", 2),
        ("1(x2)", "0", None),  # a launcher on each node, which starts the ranks
        ("odd", "0", None),
    ],
)
def test_slurm_tells_how_many_ranks_a_host_has(tasks: str, node: str, local: int | None) -> None:
    n_ranks = {"8(x3),4": 28, "8,4": 12}.get(tasks, 8)
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": str(n_ranks), "SLURM_NODEID": node}

    place = read_identity(slurm | {"SLURM_STEP_TASKS_PER_NODE": tasks})

    assert place.local_world_size == (n_ranks if local is None else local)


def test_the_import_callback_runs_once_after_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "awaited_module.py").write_text("made = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[bool] = []

    when_imported("awaited_module", lambda: seen.append(sys.modules["awaited_module"].made))
    assert seen == []
    import awaited_module  # type: ignore[import-not-found]  # noqa: F401

    when_imported("awaited_module", lambda: seen.append(False))

    assert seen == [True, False]


def test_processes_are_found_by_their_ancestors() -> None:
    child = subprocess.Popen(["sleep", "30"], env={"RANK": "1"})
    try:
        assert os.getpid() in list_ancestors(child.pid)
        assert child.pid in list_process_tree(os.getpid())
        # The environment of the new program is readable shortly after its start.
        deadline = time.monotonic() + 10
        while not read_environment(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_environment(child.pid).get("RANK") == "1"
    finally:
        child.kill()
        child.wait()


def test_a_process_whose_name_ends_within_a_letter_is_alive() -> None:
    """The kernel keeps 15 bytes of a name."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes(("trainer (run) " + "ö").encode()[:15])
        assert name.read_bytes() == b"trainer (run) \xc3\n"
        assert is_process_alive(os.getpid())
        assert os.getppid() in list_ancestors(os.getpid())
    finally:
        name.write_bytes(before.strip())


ASK = """
import os, socket, struct, sys, time
from pathlib import Path

folder, head = Path(os.environ["KINETO_IPC_SOCKET_DIR"]), struct.Struct("=Q32s")

def message(kind, body):
    return head.pack(len(body), kind) + body

with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
    client.bind(str(folder / "client"))
    client.settimeout(10)
    while not (folder / "dynolog").exists():
        time.sleep(0.01)
    client.connect(str(folder / "dynolog"))
    client.send(b"too short")
    client.send(message(b"req\\xff", b""))
    client.send(message(b"ctxt", struct.pack("=iiq", 0, os.getpid(), 0)))
    assert client.recv(4096)[head.size :] == struct.pack("=i", 1)
    client.send(message(b"req", struct.pack("=iiqii", 3, 2, 0, os.getpid(), 1)))
    configuration = client.recv(4096)[head.size :]
(folder / "configuration").write_bytes(configuration)
(folder / "out" / f"kineto_{os.getpid()}.json").write_text('{"traceEvents": []}')
time.sleep(30)
"""
"""A rank as Kineto makes it one: asks the daemon, and writes its trace once configured."""


@contextmanager
def start_asking(folder: Path, script: str = ASK) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose environment marks it as a rank that uses a profiler daemon."""
    variables = {"RANK": "1", "KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(folder)}
    with subprocess.Popen([sys.executable, "-I", "-c", script], env=variables) as process:
        try:
            while not read_environment(process.pid):
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def test_a_profiler_that_asks_a_daemon_gets_the_steps(tmp_path: Path) -> None:
    with start_asking(tmp_path) as asker:
        (found,) = capture(asker.pid, replace(PLAN, out=str(tmp_path / "out")), timeout_s=10)

    assert (found.pid, found.rank) == (asker.pid, 1)
    assert found.trace == tmp_path / "out" / f"kineto_{asker.pid}.json"
    text = (tmp_path / "configuration").read_text()
    assert f"ACTIVITIES_LOG_FILE={tmp_path}/out/kineto.json\n" in text
    assert "ACTIVITIES_ITERATIONS=3\n" in text
    assert "PROFILE_START_ITERATION_ROUNDUP=10\n" in text
    assert not (tmp_path / "dynolog").exists()


def test_a_process_that_asks_in_the_name_of_a_rank_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kineto_daemon, "_REQUEST_TIMEOUT_S", 2.0)
    with (
        start_asking(tmp_path, "import time; time.sleep(30)") as rank,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        other.bind(str(tmp_path / "other"))
        plan = replace(PLAN, out=str(tmp_path / "out"))
        capturing = pool.submit(capture, rank.pid, plan, 1.0)
        while not (tmp_path / "dynolog").exists():
            time.sleep(0.01)
        for body in (b"", struct.pack("=iiqii", 3, 2, 0, rank.pid, 1)):
            message = struct.pack("=Q32s", len(body), b"req") + body
            other.sendto(message, str(tmp_path / "dynolog"))
        with pytest.raises(CollectError) as error:
            capturing.result()
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.recv(4096)

    assert f"{rank.pid} did not ask" in str(error.value)
    assert f"; ignored process {os.getpid()} of user {os.geteuid()}" in str(error.value)


def test_a_socket_in_use_by_another_daemon_is_an_error(tmp_path: Path) -> None:
    with (
        start_asking(tmp_path, "import time; time.sleep(30)") as rank,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        other.bind(str(tmp_path / "dynolog"))
        with pytest.raises(CollectError) as error:
            capture(rank.pid, replace(PLAN, out=str(tmp_path / "out")), timeout_s=1)

    assert str(error.value) == (
        f"dynolog's socket {tmp_path}/dynolog: Address already in use; another daemon uses it,"
        f" process {os.getpid()}: use that one instead"
    )


DUMP = """Timeout (0:00:08)!
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 416 in select

Thread 0x00007f02 [MainThread] (most recent call first):
  File "/home/me/my train.py", line 12 in load batch
  File "/home/me/my train.py", line 40 in <module>
"""


def test_the_stack_of_the_main_thread_is_read_from_what_faulthandler_wrote() -> None:
    assert stacks.parse_stack(DUMP, 0x7F02) == (
        CodeFrame("load batch", "/home/me/my train.py", 12),
        CodeFrame("<module>", "/home/me/my train.py", 40),
    )
    assert stacks.parse_stack(DUMP, 0x7F03) == ()
    assert stacks.parse_stack("", 0x7F02) == ()


def test_a_process_that_holds_the_lock_has_a_stack_and_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(tmp_path / "sockets"))
    path = stacks.build_stack_path(41)
    line = stacks.WatchLine(0x7F02, time.time_ns() - 9 * 10**9, 17, 2 * 10**9)
    assert stacks.read_stack(41) is None
    path.write_text(json.dumps(asdict(line)) + "\n")
    assert stacks.read_stack(41) is None
    path.write_text(json.dumps(asdict(line)) + "\n" + DUMP)
    look = stacks.read_stack(41)
    assert look is not None
    assert (look.steps, look.stack[0].line) == (17, 12)
    assert 11 * 10**9 <= look.since_step_ns < 60 * 10**9


def test_a_script_that_uses_the_watchdog_of_faulthandler_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(tmp_path / "sockets"))
    armed: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **more: armed.append("x"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append("end"))
    line = stacks.WatchLine(0, 0, 0, 0)
    watchdog = StackWatchdog(lambda: line)
    watchdog.install()
    watchdog.start()
    while not armed:
        time.sleep(0.01)
    assert stacks.build_stack_path(os.getpid()).exists()

    faulthandler.dump_traceback_later(60)
    watchdog.stop()

    assert armed == ["x", "x"]
    assert not stacks.build_stack_path(os.getpid()).exists()
