"""Hang analysis of Flight Recorder dumps: which ranks wait for which, and in which call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from required import shared_trace
from rich.console import Console

from stepsplit.analyzer import (
    Analysis,
    Culprit,
    DataError,
    Hang,
    LastCall,
    Mismatch,
    MismatchSide,
    Missing,
    StackFrame,
    Stuck,
    StuckGroup,
    find_hang,
)
from stepsplit.analyzer.analysis import examine_or_find_hang
from stepsplit.analyzer.diagnose.hang_progress import ChainEnd, find_chain_ends
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.terminal import build_hang_screen

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
T0 = 1_790_000_000_000_000_000
WORLD = StuckGroup("0", "default_pg", (0, 1, 2))
TP = StuckGroup("1", "TP", (0, 1))
DP = StuckGroup("2", "DP", (1, 2))
CROSSED = StuckGroup("2", "DP", (0, 1))
Json = dict[str, Any]


def call(
    group: StuckGroup, seq: int, op: str = "all_reduce", state: str = "scheduled", **more: Any
) -> Json:
    """An entry of 1000 floats, called seq microseconds after T0."""
    return {
        "process_group": [group.name, group.description], "pg_id": int(group.name),
        "collective_seq_id": seq, "p2p_seq_id": seq, "is_p2p": False,
        "profiling_name": f"nccl:{op}", "state": state, "retired": state == "completed",
        "time_created_ns": T0 + seq * 1000, "input_sizes": [[1000]], "output_sizes": [[1000]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"],
    } | more  # fmt: skip


def done(group: StuckGroup, seq: int, **more: Any) -> Json:
    return call(group, seq, state="completed", **more)


def gloo(group: StuckGroup, seq: int, *, retired: bool) -> Json:
    """gloo leaves every state as it was at the call."""
    return call(group, seq) | {"profiling_name": "gloo:all_reduce", "retired": retired}


def dump(
    folder: Path,
    rank: int,
    groups: Sequence[StuckGroup],
    *calls: Json,
    status: Sequence[tuple[int, int]] = (),
) -> None:
    """A rank's dump; status holds (last enqueued, last completed) of each of the groups."""
    statuses = {
        group.name: {"last_enqueued_collective": last, "last_completed_collective": whole}
        for group, (last, whole) in zip(groups, status, strict=False)
    }
    config = {g.name: {"desc": g.description, "ranks": str(list(g.ranks))} for g in groups}
    body = {"version": "2.10", "pg_config": config, "pg_status": statuses, "entries": list(calls)}
    (folder / f"dump_{rank}").write_text(json.dumps(body))


def hang_of(*places: Path) -> Hang:
    found = find_hang(*places)
    assert found is not None
    return found


def stuck(group: StuckGroup, seq: int, op: str = "all_reduce", **more: Any) -> Stuck:
    return Stuck(
        group=group, op=op, seq=seq, dtype="Float", message_bytes=4000,
        called_unix_ns=str(T0 + seq * 1000), **more,
    )  # fmt: skip


def test_a_rank_that_did_not_call_blocks_the_others(tmp_path: Path) -> None:
    frame = {"name": "load", "filename": "data.py", "line": 7}
    dump(tmp_path, 0, [WORLD], done(WORLD, 4), call(WORLD, 5), call(WORLD, 6))
    dump(tmp_path, 1, [WORLD], done(WORLD, 4, frames=[frame]))
    dump(tmp_path, 2, [WORLD], done(WORLD, 4), call(WORLD, 5, state="started"))
    verdict = (
        "rank 1 blocks all other ranks: it has not called all_reduce 5 of default_pg (group 0)"
    )
    assert hang_of(tmp_path) == Hang(
        verdict=verdict,
        ranks=(0, 1, 2),
        culprits=(Culprit((1,), "not_called", (0, 2), verdict),),
        stuck=(
            stuck(WORLD, 5, enqueued=(0,), started=(2,), missing=(Missing(1, 4, 4),),
                  waits_for=(1,), queued=1),
        ),
        last_calls=(
            LastCall(rank=1, group=WORLD, op="all_reduce", seq=4, state="completed",
                     called_unix_ns=str(T0 + 4000), stack=(StackFrame("load", "data.py", 7),)),
        ),
    )  # fmt: skip


def test_the_status_is_used_for_a_rank_with_an_empty_ring_buffer(tmp_path: Path) -> None:
    dump(tmp_path, 0, [TP], call(TP, 5), status=[(5, 4)])
    dump(tmp_path, 1, [TP], status=[(4, 4)])
    found = hang_of(tmp_path)
    assert found.stuck == (
        stuck(TP, 5, enqueued=(0,), missing=(Missing(1, 4, 4),), waits_for=(1,)),
    )
    assert found.last_calls == ()


def test_a_call_that_the_ring_lost_is_not_missing(tmp_path: Path) -> None:
    dump(tmp_path, 0, [TP], call(TP, 5))
    dump(tmp_path, 1, [TP], done(TP, 8), status=[(8, 8)])
    found = hang_of(tmp_path)
    assert found.stuck == (stuck(TP, 5, enqueued=(0,), completed=(1,)),)
    assert [(one.ranks, one.cause) for one in found.culprits] == [((0,), "unfinished")]


def test_a_rank_that_called_another_op_is_the_odd_one(tmp_path: Path) -> None:
    dump(tmp_path, 0, [WORLD], call(WORLD, 5))
    dump(tmp_path, 1, [WORLD], call(WORLD, 5, "broadcast"))
    dump(tmp_path, 2, [WORLD], call(WORLD, 5))
    found = hang_of(tmp_path)
    sides = (MismatchSide("all_reduce", (0, 2)), MismatchSide("broadcast", (1,)))
    assert found.mismatches == (Mismatch(WORLD, 5, "op", sides),)
    assert found.culprits == (
        Culprit(
            (1,), "mismatch", (0, 2),
            "rank 1 blocks all other ranks: call 5 of default_pg (group 0) differs in op: "
            "all_reduce on ranks 0 and 2; broadcast on rank 1",
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "what", "sides"),
    [
        (
            {"input_sizes": [[999]]},
            "size",
            (MismatchSide("4000", (0,)), MismatchSide("3996", (1,))),
        ),
        (
            {"input_dtypes": ["Int"]},
            "dtype",
            (MismatchSide("Float", (0,)), MismatchSide("Int", (1,))),
        ),
    ],
)
def test_two_that_differ_in_size_or_dtype_are_both_to_blame(
    theirs: Json, what: str, sides: tuple[MismatchSide, ...], tmp_path: Path
) -> None:
    dump(tmp_path, 0, [TP], call(TP, 5))
    dump(tmp_path, 1, [TP], call(TP, 5) | theirs)
    found = hang_of(tmp_path)
    assert found.mismatches == (Mismatch(TP, 5, what, sides),)
    assert [(one.ranks, one.cause) for one in found.culprits] == [((0, 1), "mismatch")]


def test_an_all_to_all_may_hand_in_any_size(tmp_path: Path) -> None:
    dump(tmp_path, 0, [TP], call(TP, 5, "all_to_all"))
    dump(tmp_path, 1, [TP], call(TP, 5, "all_to_all", input_sizes=[[7]]))
    found = hang_of(tmp_path)
    assert found.mismatches == ()
    assert [(one.op, one.message_bytes) for one in found.stuck] == [("all_to_all", None)]
    assert [(one.ranks, one.cause) for one in found.culprits] == [((0, 1), "not_ending")]


def test_a_chain_over_two_groups_ends_at_the_rank_that_does_not_wait(tmp_path: Path) -> None:
    dump(tmp_path, 0, [TP], done(TP, 1), call(TP, 2))
    dump(tmp_path, 1, [TP, DP], done(TP, 1), call(DP, 7))
    dump(tmp_path, 2, [DP], done(DP, 6))
    found = hang_of(tmp_path)
    assert found.stuck == (
        stuck(DP, 7, enqueued=(1,), missing=(Missing(2, 6, 6),), waits_for=(2,)),
        stuck(TP, 2, enqueued=(0,), missing=(Missing(1, 1, 1),), waits_for=(1,)),
    )
    assert found.culprits == (
        Culprit((2,), "not_called", (0, 1),
                "rank 2 blocks all other ranks: it has not called all_reduce 7 of DP (group 2)"),
    )  # fmt: skip


def test_two_groups_called_in_another_order_are_a_deadlock(tmp_path: Path) -> None:
    dump(tmp_path, 0, [TP, CROSSED], call(TP, 3))
    dump(tmp_path, 1, [TP, CROSSED], call(CROSSED, 9))
    assert hang_of(tmp_path).culprits == (
        Culprit(
            (0, 1), "deadlock", (),
            "deadlock of ranks 0 and 1: rank 0 in all_reduce 3 of TP (group 1) waiting for rank 1; "
            "rank 1 in all_reduce 9 of DP (group 2) waiting for rank 0",
        ),
    )  # fmt: skip


def test_a_message_waits_for_its_other_end_behind_an_older_collective(tmp_path: Path) -> None:
    recv = call(TP, 4, "recv 0<-1", is_p2p=True)
    dump(tmp_path, 0, [TP], recv)
    dump(tmp_path, 1, [TP, DP], call(TP, 3, "send 1->0", "completed", is_p2p=True), call(DP, 7))
    dump(tmp_path, 2, [DP], done(DP, 6))
    found = hang_of(tmp_path)
    assert found.stuck[1] == stuck(
        TP, 4, "recv", enqueued=(0,), missing=(Missing(1, None, None),), waits_for=(1,)
    )
    assert [(one.ranks, one.held) for one in found.culprits] == [((2,), (0, 1))]


def test_messages_of_one_batch_are_done_when_the_batch_is(tmp_path: Path) -> None:
    batch = [
        call(TP, 4, "recv 0<-1", is_p2p=True),
        call(TP, 4, "send 0->1", is_p2p=True),
        call(TP, 4, "coalesced", "completed", is_p2p=True),
    ]
    dump(tmp_path, 0, [TP], *batch)
    assert find_hang(tmp_path) is None


def test_collectives_of_one_batch_may_differ_in_size(tmp_path: Path) -> None:
    for rank, state in enumerate(("completed", "scheduled")):
        one, other = (
            call(TP, 5, "_all_gather_base"),
            call(TP, 5, "_all_gather_base", output_sizes=[[7]]),
        )
        dump(tmp_path, rank, [TP], one, other, call(TP, 5, "coalesced", state))
    found = hang_of(tmp_path)
    assert found.mismatches == ()
    assert [(one.op, one.enqueued, one.completed) for one in found.stuck] == [
        ("all_gather", (1,), (0,))
    ]


def test_gloo_state_is_taken_from_retired_and_members_are_inferred(tmp_path: Path) -> None:
    dump(tmp_path, 0, [], gloo(WORLD, 1, retired=True), gloo(WORLD, 2, retired=False))
    dump(tmp_path, 1, [], gloo(WORLD, 1, retired=True), gloo(WORLD, 2, retired=False))
    dump(tmp_path, 2, [], gloo(WORLD, 1, retired=True))
    found = hang_of(tmp_path)
    assert found.stuck == (
        stuck(WORLD, 2, enqueued=(0, 1), missing=(Missing(2, 1, 1),), waits_for=(2,)),
    )
    assert found.warnings == ()


def test_a_rank_without_a_dump_is_suspected_where_all_others_are_there(tmp_path: Path) -> None:
    dump(tmp_path, 0, [WORLD], call(WORLD, 5))
    dump(tmp_path, 2, [WORLD], call(WORLD, 5))
    found = hang_of(tmp_path)
    assert found.no_dump == (1,)
    assert found.stuck == (stuck(WORLD, 5, enqueued=(0, 2), no_dump=(1,), waits_for=(1,)),)
    assert found.culprits == (
        Culprit(
            (1,), "no_dump", (0, 2),
            "rank 1 blocks all other ranks (inferred): no dump of it, and all others have "
            "called all_reduce 5 of default_pg (group 0)",
        ),
    )  # fmt: skip


def test_nothing_is_stuck_in_a_healthy_job(tmp_path: Path) -> None:
    for rank in WORLD.ranks:
        dump(tmp_path, rank, [WORLD], done(WORLD, 4), done(WORLD, 5))
    assert find_hang(tmp_path) is None


def test_two_dumps_of_one_rank_are_of_two_hangs(tmp_path: Path) -> None:
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        dump(folder, 0, [TP], call(TP, 5))
    with pytest.raises(DataError, match="pass the dumps of one hang"):
        find_hang(tmp_path)


def test_chains_end_at_ranks_that_wait_only_for_each_other() -> None:
    calls = (
        stuck(WORLD, 1, enqueued=(2,), waits_for=(0,)),
        stuck(TP, 2, enqueued=(0, 1), waits_for=(0, 1)),
    )
    assert find_chain_ends(calls) == (ChainEnd((0, 1), (1,), (2,)),)


@pytest.mark.parametrize(
    ("incident", "cause", "waits", "stands"),
    [("lock_gil_1st", "not_called", 45265, None), ("gpu_error_2nd", "unfinished", 44791, 44788)],
)
def test_the_ranks_with_injected_faults_are_the_culprits(
    incident: str, cause: str, waits: int, stands: int | None
) -> None:
    found = hang_of(*sorted(shared_trace(f"flight_recorder_nvrx/{incident}").glob("_dump_*")))
    others = tuple(rank for rank in range(16) if rank not in (9, 14))
    assert [(one.ranks, one.cause, one.held) for one in found.culprits] == [
        ((9, 14), cause, others)
    ]
    assert f"not called all_to_all {waits} of EXPERT_MODEL_PARALLEL_GROUP" in found.verdict
    first = found.stuck[0]
    assert (first.group.name, first.seq, first.waits_for) == ("72", waits, (9, 14))
    assert first.waiting == (8, 10, 11, 12, 13, 15)
    own = [one.seq for one in found.stuck if one.group.name == "72" and one.waiting == (9, 14)]
    assert own == ([] if stands is None else [stands])


def shown(hang: Hang, width: int) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(build_hang_screen(hang))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_screen_begins_with_the_verdict_and_ends_with_the_stacks(tmp_path: Path) -> None:
    frames = [
        {"name": "all_reduce", "filename": "/lib/torch/distributed/c10d.py", "line": 1},
        {"name": "load", "filename": "data.py", "line": 7},
    ]
    dump(tmp_path, 0, [TP], done(TP, 4), call(TP, 5))
    dump(tmp_path, 1, [TP], done(TP, 4, frames=frames))
    assert shown(hang_of(tmp_path), 100) == [
        "rank 1 blocks all other ranks: it has not called all_reduce 5 of TP (group 1)",
        "2 dumps   1 unfinished call   oldest since 2026-09-21 14:13:20 UTC",
        "",
        "group  description  call             size  waiting  missing",
        "1      TP           all_reduce 5  4.00 kB  0        1",
        "",
        "LAST CALLS OF THESE RANKS",
        "rank 1  last called all_reduce 4 of TP (group 1): completed",
        "    data.py:7 load",
    ]


@pytest.mark.parametrize("incident", ["lock_gil_1st", "gpu_error_2nd"])
def test_a_real_hang_is_one_screen_of_a_hundred_columns(incident: str) -> None:
    lines = shown(hang_of(*shared_trace(f"flight_recorder_nvrx/{incident}").glob("_dump_*")), 100)
    assert lines[0].startswith("ranks 9 and 14 block all other ranks: ")
    assert len(lines) < 30
    assert max(map(len, lines)) <= 100


def test_analyze_reports_a_hang_for_dumps_without_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, 0, [TP], done(TP, 4), call(TP, 5))
    dump(tmp_path, 1, [TP], done(TP, 4))
    assert cli.run(["analyze", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("rank 1 blocks all other ranks: ")
    out = tmp_path / "out"
    assert cli.run(["analyze", str(tmp_path), "--out", str(out), "--json", "-"]) == 0
    text = capsys.readouterr().out
    assert (out / "hang.json").read_text() == text
    body = json.loads(text)
    assert (body["schema"], body["culprits"][0]["ranks"]) == ("stepsplit.hang/1", [1])


def test_analyze_reports_that_no_call_is_stuck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, 0, [TP], done(TP, 4))
    dump(tmp_path, 1, [TP], done(TP, 4))
    assert cli.run(["analyze", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "nothing is stuck: every call in the dumps has completed",
        "2 dumps",
    ]


def test_an_empty_file_among_named_dumps_is_left_out(tmp_path: Path) -> None:
    dump(tmp_path, 0, [WORLD], done(WORLD, 4), call(WORLD, 5))
    dump(tmp_path, 1, [WORLD], done(WORLD, 4))
    (tmp_path / "dump_2").write_bytes(b"")
    found = examine_or_find_hang(sorted(tmp_path.iterdir()))
    assert isinstance(found, Hang)
    assert found.ranks == (0, 1)


def test_dumps_next_to_a_trace_are_part_of_its_recording() -> None:
    assert isinstance(examine_or_find_hang([SAMPLES / "dp4"]), Analysis)
