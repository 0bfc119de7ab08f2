"""Logs of NCCL's watchdogs, and answers of its RAS: what they show of a hang, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from support.required import shared_repro

from stepsplit.analyzer import DataError, Hang
from stepsplit.analyzer.diagnose.hang.find import read_calls
from stepsplit.analyzer.readers.watchdog_log import TimedOut, WatchdogStatus, parse_watchdog_lines
from stepsplit.dashboard.reporters.hang import build_hang_screen

WORK = "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=64, NumelOut=64, Timeout(ms)=600000)"
CAUGHT = (
    "[rank{rank}]:[E603 17:48:01.005 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught "
    f"collective operation timeout: {WORK} ran for 600068 milliseconds before timing out."
)
STATUS = (
    "[rank{rank}]:[E603 17:48:01.006 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) "
    "Rank {rank}]  failure detected by watchdog at work sequence id: {seq} PG status: last "
    "enqueued work: {enqueued}, last completed work: {completed}"
)


def caught(rank: int, seq: int = 24, op: str = "ALLREDUCE") -> str:
    return CAUGHT.format(rank=rank, seq=seq, op=op)


def status(rank: int, seq: int = 24, enqueued: int = 30, completed: int = 23) -> str:
    return STATUS.format(rank=rank, seq=seq, enqueued=enqueued, completed=completed)


def examine(folder: Path, *lines: str) -> Hang:
    (folder / "job.log").write_text("\n".join(["step 3 loss 2.1", *lines, "Aborted"]))
    return read_calls([folder])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=46, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 "
            "milliseconds before timing out.",
            TimedOut(1, True, 46, "all_reduce", None, 1802212),
        ),
        (
            "[80746] [rank0]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=7, OpType=_REDUCE_SCATTER_BASE, "
            "NumelIn=544, NumelOut=68, Timeout(ms)=600000) ran for 600060 milliseconds before "
            "timing out.",
            TimedOut(0, False, 7, "reduce_scatter", 544, 600060),
        ),
        (
            "node3: [default5]:[rank13]:[E1016 03:31:38 ProcessGroupNCCL.cpp:616] [Rank 1] "
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, "
            "OpType=_ALLGATHER_BASE, NumelIn=19, NumelOut=152, Timeout(ms)=600000) ran for 600071 "
            "milliseconds before timing out.",
            TimedOut(13, False, 9, "all_gather", 19, 600071),
        ),
        (
            "RuntimeError: [Rank 2] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=4, OpType=COALESCED, NumelIn=112, NumelOut=112, Timeout(ms)=1800000) "
            "ran for 1800010 milliseconds before timing out.",
            TimedOut(2, True, 4, "coalesced", 112, 1800010),
        ),
        (
            " 1%| | 24/1752 [01:32<1:23:08]"  # a progress bar without an end of its line
            + caught(5, 3, "ALLTOALL_BASE"),
            TimedOut(5, False, 3, "all_to_all", 64, 600068),
        ),
        (
            "[rank0]:[E321 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 0] Exception (either an error or "
            "timeout) detected by watchdog at work: 1580, last enqueued NCCL work: 1582, last "
            "completed NCCL work: 1579.",
            WatchdogStatus(0, False, "1", "", 1580, 1582, 1579),
        ),
        (
            "[rank3]:[E909 ProcessGroupNCCL.cpp:1709] [PG 0 (default_pg) Rank 3] Timeout at NCCL "
            "work: 2070, last enqueued NCCL work: 2082, last completed NCCL work: 2069.",
            WatchdogStatus(3, False, "0", "default_pg", 2070, 2082, 2069),
        ),
        (
            "[rank1]:[E626 ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 5(TP) Rank 1] Exception "
            "(either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL "
            "work: 811, last completed NCCL work: 807.",
            WatchdogStatus(1, False, "5", "TP", 808, 811, 807),
        ),
        (status(2), WatchdogStatus(2, False, "0", "default_pg", 24, 30, 23)),
    ],
)  # fmt: skip
def test_the_wordings_of_torch(line: str, expected: TimedOut | WatchdogStatus) -> None:
    log = parse_watchdog_lines([line])
    assert [*log.timeouts, *log.statuses] == [expected]


def test_a_rank_without_a_line_has_no_report_and_is_not_called_missing(tmp_path: Path) -> None:
    hang = examine(tmp_path, *(text(rank) for rank in (0, 1, 3) for text in (caught, status)))
    assert (hang.condition, hang.culprits, hang.no_dump) == ("stuck", (), (2,))
    (call,) = hang.stuck
    assert (call.op, call.seq, call.waiting, call.no_dump) == ("all_reduce", 24, (0, 1, 3), (2,))
    assert (call.missing, call.waits_for) == ((), ())
    assert hang.verdict == (
        "ranks 0, 1 and 3 gave up on all_reduce 24 of 64 elements of default_pg (group 0) after "
        "600 s; no report of rank 2; the log does not say which rank has not made the call"
    )
    console = Console(width=200, no_color=True, record=True)
    console.print(build_hang_screen(hang))
    shown = console.export_text()
    assert "3 reports   no report from rank 2" in shown and "dump from" not in shown


def test_a_rank_that_says_that_it_came_less_far_is_missing(tmp_path: Path) -> None:
    """Rank 1 gave up on an older call of another group."""
    behind = "[PG ID 3 PG GUID 3(TP) Rank 1]"
    hang = examine(
        tmp_path, caught(0), status(0), caught(2), status(2),
        caught(1, 9, "BROADCAST"), status(1, 9, 12, 8).replace(
            "[PG ID 0 PG GUID 0(default_pg) Rank 1]", behind),
        status(1, 23, 23, 23),
    )  # fmt: skip
    (culprit,) = hang.culprits
    assert (culprit.ranks, culprit.cause, culprit.held) == ((1,), "not_called", (0, 2))
    assert culprit.message == (
        "rank 1 blocks ranks 0 and 2: it has not called all_reduce 24 of default_pg (group 0), by"
        " its own watchdog"
    )


def test_ranks_in_different_calls_of_one_number(tmp_path: Path) -> None:
    lines = [text for rank in (0, 1, 2) for text in (caught(rank), status(rank))]
    hang = examine(tmp_path, *lines, caught(3, op="BROADCAST"), status(3))
    assert [(one.ranks, one.cause) for one in hang.culprits] == [((3,), "mismatch")]
    assert hang.verdict.startswith(
        "call 24 of default_pg (group 0) differs in op: all_reduce on ranks 0, 1 and 2; broadcast "
        "on rank 3; "
    )


def test_without_a_group_none_is_named(tmp_path: Path) -> None:
    hang = examine(tmp_path, caught(0), caught(4))
    assert hang.verdict.startswith(
        "ranks 0 and 4 gave up on all_reduce 24 of 64 elements of a group that the log does not "
        "name after 600 s; the log"
    )
    assert hang.stuck[0].no_dump == ()


def test_of_the_calls_of_a_rank_the_first_counts(tmp_path: Path) -> None:
    """Later ones are queued behind it; copies of a line count once."""
    hang = examine(tmp_path, *[caught(0, seq) for seq in (24, 25, 26, 24)], caught(1, 24))
    assert [(one.seq, one.waiting) for one in hang.stuck] == [(24, (0, 1))]


def test_the_log_of_a_stranger() -> None:
    hang = read_calls([shared_repro("wild2") / "text_called_json" / "watchdog.log"])
    assert [(one.op, one.seq, one.waiting) for one in hang.stuck] == [("all_reduce", 24, (0, 1, 3))]


RAS = """\
NCCL version 2.24.3 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  31 ranks have launched up to operation 6650
  1 rank has launched up to operation 6649
  Rank 3 -- GPU 3 managed by process 483072 on node 172.16.64.210

"""


def test_a_saved_answer_of_ras_shows_who_is_behind_at_one_moment(tmp_path: Path) -> None:
    (tmp_path / "ncclras.out").write_text(RAS)
    hang = read_calls([tmp_path])
    assert hang.condition == "late"
    assert hang.note.startswith("not known to be a hang: NCCL's RAS counts")
    assert hang.ras[-1] == (
        "#0-0 (27a079b828ff1a75) MISMATCH: Rank 3 -- GPU 3 managed by process 483072 on node "
        "172.16.64.210"
    )


def test_an_answer_of_ras_without_a_finding_is_no_hang(tmp_path: Path) -> None:
    (tmp_path / "ncclras.out").write_text(RAS.partition("#0-0")[0])
    with pytest.raises(DataError, match="no Flight Recorder dump found"):
        read_calls([tmp_path])
