"""Jobs of four ranks on gloo that hang in different ways: one command gives the answer."""

from __future__ import annotations

import json
import os
import re
import signal
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stepsplit.collectors.attach.sockets import list_agents

pytest.importorskip("torch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.in_turn(
        "analyzer/diagnose/hang", "collectors",
        "dashboard/commands/analyze.py",
    ),
]  # fmt: skip

JOBS = Path(__file__).parents[1] / "collector_jobs"
N_RANKS, ANSWER_S = 4, 15.0
OTHERS = [0, 2, 3]


@dataclass(frozen=True)
class Answer:
    """What must be said of a kind of hang: the ranks to blame, why, who waits, and these words."""

    ranks: list[int]
    cause: str
    words: tuple[str, ...]
    held: list[int] = field(default_factory=lambda: OTHERS)


TP_7 = "it has not called all_reduce 7 of tp (group 1)"
ANSWERS = {
    "missing_call": Answer([1], "order", (
        TP_7,
        "all_reduce 7 of dp (group 4) right after broadcast 12 of default_pg (group 0)",
        "it waits in hangs.py",
    )),
    "wrong_order": Answer([1], "mismatch", (
        "call 13 of default_pg (group 0) differs in op:"
        " all_reduce on ranks 0, 2 and 3; broadcast on rank 1",
        " train_step > broadcast",
    )),
    "size": Answer([1], "mismatch", (
        "call 7 of tp (group 1) differs in size: 8388608 on rank 0; 16777216 on rank 1",
        " exchange > all_reduce",
    )),
    "other_group": Answer([1], "order", (
        TP_7, "where all_reduce of tp (group 1) had always followed", " exchange > all_reduce",
    )),
    "crash": Answer([1], "ended", (
        "all others have called all_reduce 7 of dp (group 4)",
        "its process has ended (killed, or crashed)",
    )),
    "exception": Answer([1], "raised", (
        TP_7, "it has raised ValueError: batch 6 has no labels in hangs.py", " load_batch",
    )),
    "loader": Answer([1], "not_called", (TP_7, " load_batch > wait (threading.py)")),
    "two_groups": Answer([1, 2], "order", (
        "they have not called all_reduce 7 of tp (group 1)",
        "rank 2 called all_reduce 7 of dp (group 3) right after broadcast 12",
    ), held=[0, 3]),
    "gil": Answer([1], "silent", ("it holds Python's lock in hangs.py:", " load_batch")),
    "stopped": Answer([1], "stopped", ("is stopped (SIGSTOP or a debugger)",)),
}  # fmt: skip


@contextmanager
def standing_job(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[str]]:
    """The job on standby, from the step with the fault on; it does not outlive the block."""
    monkeypatch.setenv("STEPSPLIT_SOCKETS", str(folder / "sockets"))
    command = [sys.executable, "-m", "stepsplit.collectors", "record", "--standby"]
    command += ["--out", str(folder / "run"), "--", sys.executable]
    command += [str(JOBS / "four_ranks.py"), str(JOBS / "hangs.py"), kind]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_step(job, 6)
        yield job
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()


def wait_for_step(job: subprocess.Popen[str], step: int) -> None:
    """Returns when all ranks have begun the step."""
    assert job.stdout is not None
    for _ in range(N_RANKS):
        assert job.stdout.readline() == f"step {step} begins\n"


def ask(job: subprocess.Popen[str]) -> dict[str, Any]:
    """The answer of one command, which takes less than the promised time."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "stepsplit.dashboard", "hang", str(job.pid), "--json", "-"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.monotonic() - begin_s < ANSWER_S
    assert answer.stderr == ""
    body: dict[str, Any] = json.loads(answer.stdout)
    assert answer.returncode == (body["condition"] == "stuck")
    return body


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_rank_the_call_its_stack_and_who_waits_are_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ANSWERS[kind]
    with standing_job(kind, tmp_path, monkeypatch) as job:
        body = ask(job)
    [culprit] = body["culprits"]
    assert (culprit["ranks"], culprit["cause"], culprit["held"]) == (
        expected.ranks, expected.cause, expected.held,
    )  # fmt: skip
    assert body["condition"] == "stuck"
    assert [words for words in expected.words if words not in culprit["message"]] == []


@pytest.mark.alone
def test_a_slow_rank_is_late_and_a_job_that_steps_is_not_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standing_job("slow", tmp_path, monkeypatch) as job:
        late = ask(job)
        wait_for_step(job, 7)
        moving = ask(job)
    assert (late["condition"], [one["cause"] for one in late["culprits"]]) == ("late", ["late"])
    assert late["verdict"].startswith("not known to be a hang: ")
    assert "computes (busy " in late["verdict"]
    assert "compute_slowly" in late["verdict"]
    assert (moving["condition"], moving["culprits"]) == ("moving", [])
    assert moving["verdict"].startswith("not a hang: rank ")


@pytest.mark.alone
def test_attach_says_that_the_steps_have_stopped_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standing_job("loader", tmp_path, monkeypatch) as job:
        command = [sys.executable, "-m", "stepsplit.dashboard", "attach", str(job.pid)]
        begin_s = time.monotonic()
        answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert time.monotonic() - begin_s < ANSWER_S
    assert answer.returncode == 2
    last = answer.stderr.splitlines()[-1]
    assert re.match(
        r"stepsplit: no step has ended for \d+ s: rank 1 blocks all other ranks: ", last
    )
    assert [words for words in ANSWERS["loader"].words if words not in last] == [], last
    assert not (tmp_path / "runs").exists()


class _Ras(socketserver.StreamRequestHandler):
    """NCCL's RAS of a job whose rank 1 has launched one all_reduce less."""

    def handle(self) -> None:
        for line in self.rfile:
            if line == b"VERBOSE STATUS\n":
                self.wfile.write(json.dumps({"communicators": [self.communicator]}).encode())
                return
            self.wfile.write(b"SERVER PROTOCOL 2\n" if line.startswith(b"CLIENT") else b"OK\n")

    @property
    def communicator(self) -> dict[str, Any]:
        ranks = [{"rank": rank, "host": "here", "pid": pid,
                  "collective_counts": {"AllReduce": 6 + (rank != 1)}}
                 for rank, pid in enumerate(sorted(list_agents()))]  # fmt: skip
        return {"hash": "0x1", "size": len(ranks), "ranks": ranks}


def test_nccls_ras_is_asked_too_and_one_of_another_job_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _Ras) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.server_address[1]}")
        with standing_job("loader", tmp_path, monkeypatch) as job:
            body = ask(job)
            monkeypatch.setattr(sys.modules[__name__], "list_agents", lambda: [1, 2])
            other = ask(job)
        server.shutdown()
    [sentence] = body["ras"]
    assert sentence.startswith("rank 1 of communicator 0x1 of 4 (process ")
    assert sentence.endswith(" on here) has launched 6 AllReduce, others 7")
    assert (other["condition"], other["ras"]) == ("stuck", [])
