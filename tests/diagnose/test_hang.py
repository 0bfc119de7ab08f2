"""Hang analysis of Flight Recorder dumps: which ranks wait for which, and in which call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.required import shared_repro, shared_trace
from support.screens import print_lines

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
from stepsplit.analyzer.diagnose.hang.find import read_calls
from stepsplit.analyzer.diagnose.hang.wait_chains import ChainEnd, find_chain_ends
from stepsplit.collectors.formats.rank_record import CodeFrame
from stepsplit.collectors.formats.rank_state import RAS_NAME, Look, RankState, write_state
from stepsplit.collectors.formats.run_spec import GroupInfo, RunSpec, write_run_json
from stepsplit.dashboard import cli
from stepsplit.dashboard.reporters.hang import build_hang_screen

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


def test_a_status_that_counts_collectives_says_nothing_of_a_message(tmp_path: Path) -> None:
    sums = [done(TP, seq) for seq in (1, 2, 3)]
    dump(tmp_path, 0, [TP], *sums, status=[(3, 3)])
    recv = call(TP, 1, "recv 1<-0", is_p2p=True)
    dump(tmp_path, 1, [TP], *sums, recv, status=[(1, 3)])
    found = hang_of(tmp_path)
    assert [(one.ranks, one.cause, one.held) for one in found.culprits] == [
        ((0,), "not_called", (1,))
    ]
    assert found.stuck[0].missing == (Missing(0, None, None),)
    assert found.verdict == (
        "rank 0 blocks all other ranks: it has not called the send of recv 1 of TP (group 1)"
    )


def test_two_ranks_that_both_receive_are_a_deadlock(tmp_path: Path) -> None:
    dump(tmp_path, 0, [TP], call(TP, 1, "recv 0<-1", is_p2p=True), status=[(1, 0)])
    dump(tmp_path, 1, [TP], call(TP, 1, "recv 1<-0", is_p2p=True), status=[(1, 0)])
    assert [(one.ranks, one.cause) for one in hang_of(tmp_path).culprits] == [((0, 1), "deadlock")]


def test_a_message_of_which_the_ends_differ_in_size_is_a_mismatch(tmp_path: Path) -> None:
    """A collective of the same number is none."""
    sums = [done(TP, 1, input_sizes=[[7]], output_sizes=[[7]])]
    more = {"is_p2p": True, "input_sizes": [[2000]], "output_sizes": [[2000]]}
    dump(tmp_path, 0, [TP], *sums, call(TP, 1, "send 0->1", is_p2p=True))
    dump(tmp_path, 1, [TP], *sums, call(TP, 1, "recv 1<-0", **more))
    (culprit,) = hang_of(tmp_path).culprits
    assert (culprit.ranks, culprit.cause, culprit.held) == ((0, 1), "mismatch", ())
    assert culprit.message.endswith(
        "message 1 of TP (group 1) differs in size: 4000 on rank 0; 8000 on rank 1"
    )


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


def test_a_member_that_never_called_on_an_unlisted_group_is_missing_from_it() -> None:
    """gloo lists no members: rank 0 alone has called on group 1, and waits there for rank 1."""
    found = hang_of(shared_repro("recorded/frman"))
    assert found.culprits == (
        Culprit(
            (1,), "not_called", (0, 2),
            "rank 1 blocks all other ranks: it has not called all_reduce 1 of group 1"
            " (inferred: no list of its members)",
        ),
    )  # fmt: skip


def test_without_a_rank_that_could_be_missing_the_members_are_unknown(tmp_path: Path) -> None:
    dump(tmp_path, 0, [], gloo(TP, 1, retired=False))
    found = hang_of(tmp_path)
    assert [(one.ranks, one.cause) for one in found.culprits] == [((0,), "members_unknown")]
    assert found.verdict == (
        "rank 0 waits in all_reduce 1 of TP (group 1); the dumps do not list its members: one that"
        " never called on it may be missing"
    )


def test_run_json_lists_the_members_of_a_group(tmp_path: Path) -> None:
    dump(tmp_path, 0, [], gloo(TP, 1, retired=False))
    dump(tmp_path, 1, [])
    spec = RunSpec("run", 2, "gloo", groups=(GroupInfo("1", "TP", (0, 1)),))
    write_run_json(tmp_path, spec)
    assert [(one.ranks, one.cause) for one in hang_of(tmp_path).culprits] == [((1,), "not_called")]


def steps_of(tp: StuckGroup, world: StuckGroup, count: int) -> list[Json]:
    """Completed steps: an all_reduce of the pair, then one of all."""
    both = ((tp, seq) for seq in range(1, count + 1)), ((world, seq) for seq in range(1, count + 1))
    pairs = [one for two in zip(*both, strict=True) for one in two]
    return [done(group, seq, time_created_ns=T0 + at) for at, (group, seq) in enumerate(pairs)]


def test_of_two_that_wait_for_each_other_the_one_that_skipped_a_call_is_to_blame(
    tmp_path: Path,
) -> None:
    late = {"time_created_ns": T0 + 100}
    dump(tmp_path, 0, [TP, WORLD], *steps_of(TP, WORLD, 4), call(TP, 5, **late))
    dump(tmp_path, 1, [TP, WORLD], *steps_of(TP, WORLD, 4), call(WORLD, 5, **late))
    dump(tmp_path, 2, [WORLD], *(done(WORLD, seq) for seq in (1, 2, 3, 4)), call(WORLD, 5))
    assert hang_of(tmp_path).culprits == (
        Culprit(
            (1,), "order", (0, 2),
            "rank 1 blocks all other ranks: it has not called all_reduce 5 of TP (group 1); rank 1"
            " called all_reduce 5 of default_pg (group 0) right after all_reduce 4 of default_pg"
            " (group 0), where all_reduce of TP (group 1) had always followed",
        ),
    )  # fmt: skip


@pytest.mark.parametrize("called_first", [0, 2])
def test_of_several_calls_that_a_rank_owes_the_next_of_its_order_is_named(
    called_first: int, tmp_path: Path
) -> None:
    at = {rank: {"time_created_ns": T0 + 100 + (rank != called_first)} for rank in (0, 2)}
    steps = steps_of(TP, DP, 4)
    dump(tmp_path, 0, [TP], *(done(TP, seq) for seq in (1, 2, 3, 4)), call(TP, 5, **at[0]))
    dump(tmp_path, 1, [TP, DP], *steps)
    dump(tmp_path, 2, [DP], *(done(DP, seq) for seq in (1, 2, 3, 4)), call(DP, 5, **at[2]))
    assert hang_of(tmp_path).culprits == (
        Culprit((1,), "not_called", (0, 2),
                "rank 1 blocks all other ranks: it has not called all_reduce 5 of TP (group 1)"),
    )  # fmt: skip


def test_of_two_sizes_the_one_that_earlier_calls_did_not_have_is_odd(tmp_path: Path) -> None:
    dump(tmp_path, 0, [TP], done(TP, 4), done(TP, 5))
    dump(tmp_path, 1, [TP], done(TP, 4), call(TP, 5, input_sizes=[[2000]]))
    [culprit] = hang_of(tmp_path).culprits
    assert (culprit.ranks, culprit.cause) == ((1,), "mismatch")


def look(steps: int, at_s: float, since_s: float, busy_s: float = 0.0, calls: int = 9) -> Look:
    stack = (CodeFrame("sleep", "/lib/python3.12/time.py", 1), CodeFrame("load", "/job/data.py", 7))
    return Look(T0 + int(at_s * 1e9), steps, int(since_s * 1e9), calls, stack, int(busy_s * 1e9))


def state(rank: int, *looks: Look, **more: Any) -> RankState:
    return RankState(rank, 2, "host", 100 + rank, "job", step_ns=10**9, looks=looks, **more)


def stand(folder: Path, *states: RankState) -> Hang:
    """Rank 0 waits in a call of a pair for rank 1, whose state is given."""
    folder.mkdir(exist_ok=True)
    dump(folder, 0, [TP], done(TP, 4), call(TP, 5))
    for one in (state(0, look(3, 0, 8), look(3, 2, 10)), *states):
        write_state(folder, one)
    return read_calls([folder])


NOT_CALLED = "rank 1 blocks all other ranks: it has not called all_reduce 5 of TP (group 1)"


def test_the_culprit_is_described_by_what_it_does(tmp_path: Path) -> None:
    dump(tmp_path, 1, [TP], done(TP, 4))
    found = stand(tmp_path, state(1, look(3, 0, 8), look(3, 2, 10, busy_s=0.01)))
    assert (found.condition, found.culprits[0].cause) == ("stuck", "not_called")
    assert found.verdict == f"{NOT_CALLED}; it waits in data.py:7 load > sleep (time.py)"


def test_a_rank_that_computes_is_late(tmp_path: Path) -> None:
    dump(tmp_path, 1, [TP], done(TP, 4))
    found = stand(tmp_path, state(1, look(3, 0, 8), look(3, 2, 10, busy_s=1.9)))
    assert (found.condition, found.culprits[0].cause) == ("late", "late")
    assert found.verdict == (
        f"not known to be a hang: the rank that is late is not idle; {NOT_CALLED}; it computes"
        " (busy 95.0 % of the time) in data.py:7 load > sleep (time.py)"
    )


def test_a_rank_that_writes_a_checkpoint_is_late(tmp_path: Path) -> None:
    dump(tmp_path, 1, [TP], done(TP, 4))
    writing = replace(look(3, 2, 10), io_bytes=50_000_000)
    found = stand(tmp_path, state(1, look(3, 0, 8), writing))
    assert found.condition == "late"
    assert "it reads or writes (50 MB) in data.py:7 load" in found.verdict


def test_a_step_that_lasts_as_long_as_recent_ones_is_not_known_to_hang(tmp_path: Path) -> None:
    dump(tmp_path, 1, [TP], done(TP, 4))
    young = look(3, 0, 0.2), look(3, 2, 2.2)
    found = stand(tmp_path, state(0, *young), state(1, *young))
    assert found.condition == "late"
    assert found.note == (
        "not known to be a hang: the current step has lasted 2.2 s, and recent ones took up to"
        " 1.0 s"
    )


def test_steps_or_calls_that_go_on_are_not_a_hang(tmp_path: Path) -> None:
    found = stand(tmp_path / "steps", state(1, look(3, 0, 8), look(5, 2, 1)))
    assert (found.condition, found.culprits) == ("moving", ())
    assert found.verdict == "not a hang: rank 1 ended 2 steps in 2.0 s"
    found = stand(tmp_path / "calls", state(1, look(3, 0, 8), look(3, 2, 10, calls=12)))
    assert found.verdict == "not a hang: rank 1 made 3 collective calls in 2.0 s"


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ({"condition": "ended"}, "its process has ended (killed, or crashed)"),
        (
            {"condition": "ended", "error": "ValueError: no",
             "error_stack": (CodeFrame("load", "/job/data.py", 7),)},
            "its process has ended with ValueError: no in data.py:7 load",
        ),
        ({"condition": "stopped"}, "its process 101 is stopped (SIGSTOP or a debugger)"),
        ({"condition": "silent"}, "its process 101 does not answer: it holds Python's lock"),
    ],
)  # fmt: skip
def test_a_rank_that_has_gone_or_does_not_answer_is_to_blame(
    gone: Json, words: str, tmp_path: Path
) -> None:
    dump(tmp_path, 0, [TP], done(TP, 4), call(TP, 5))
    found = stand(tmp_path, state(1, **gone))
    assert [(one.ranks, one.cause) for one in found.culprits] == [((1,), gone["condition"])]
    assert found.verdict.endswith(f": all others have called all_reduce 5 of TP (group 1); {words}")


def test_a_call_that_failed_because_a_peer_had_gone_counts_as_open(tmp_path: Path) -> None:
    """torch retires it. Rank 0 raised in its call with rank 1, which was killed."""
    dump(tmp_path, 0, [TP], done(TP, 4), gloo(TP, 5, retired=True))
    error = "RuntimeError: [pair.cc:553] Connection closed by peer"
    write_state(tmp_path, state(0, look(3, 0, 9), groups=(GroupInfo("1", "TP", (0, 1)),),
                                condition="raised", error=error))  # fmt: skip
    write_state(tmp_path, state(1, condition="ended"))
    [culprit] = hang_of(tmp_path).culprits
    assert (culprit.ranks, culprit.cause, culprit.held) == ((1,), "ended", (0,))


def test_without_an_open_call_the_rank_that_is_not_in_torch_distributed_is_to_blame(
    tmp_path: Path,
) -> None:
    inside = CodeFrame("_store_based_barrier", "/x/torch/distributed/distributed_c10d.py", 9)
    looks = look(3, 0, 8), look(3, 2, 10)
    write_state(tmp_path, state(0, *(replace(one, stack=(inside,)) for one in looks)))
    write_state(tmp_path, state(1, *looks))
    assert read_calls([tmp_path]).verdict == (
        "rank 1 blocks all other ranks: no collective is open; it waits in data.py:7 load > sleep"
        " (time.py)"
    )


def test_the_dumps_of_a_recording_say_when_it_ended() -> None:
    found = read_calls([SAMPLES / "dp4"])
    assert found.condition == "clear"
    assert re.fullmatch(
        r"no call was open when this recording ended \([-0-9: ]+ UTC\): a later hang does not show"
        r" in it; while the job runs, stepsplit hang PID asks its ranks",
        found.verdict,
    )


def test_the_command_takes_dumps_and_its_status_says_whether_the_job_is_stuck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand(tmp_path, state(1, condition="stopped"))
    assert cli.run(["hang", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "rank 1 blocks all other ranks: all others have called all_reduce 5 of TP (group 1); its"
        " process 101 is stopped (SIGSTOP or a debugger)",
        "looked at 2 ranks   1 dump   no dump from rank 1   1 unfinished call   oldest since"
        " 2026-09-21 14:13:20 UTC",
        "",
        "group  description  call             size  waiting  missing    ",
        "1      TP           all_reduce 5  4.00 kB  0        1 (no dump)",
        "",
        "PYTHON STACKS, INNERMOST FIRST",
        "rank 1  stopped",
        "rank 0  running, 3 steps ended, the last 10.0 s ago",
        "    /lib/python3.12/time.py:1 sleep",
        "    /job/data.py:7 load",
    ]
    assert cli.run(["hang", str(SAMPLES / "dp4")]) == 0


def test_a_process_that_does_not_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["hang", str(1 << 22)]) == 2
    assert capsys.readouterr().err == (
        "stepsplit: no process 4194304 on this host; name a rank or the launcher\n"
    )


def test_the_screen_begins_with_the_verdict_and_ends_with_the_stacks(tmp_path: Path) -> None:
    frames = [
        {"name": "all_reduce", "filename": "/lib/torch/distributed/c10d.py", "line": 1},
        {"name": "load", "filename": "data.py", "line": 7},
    ]
    dump(tmp_path, 0, [TP], done(TP, 4), call(TP, 5))
    dump(tmp_path, 1, [TP], done(TP, 4, frames=frames))
    assert print_lines(build_hang_screen(hang_of(tmp_path)), width=100) == [
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
    hang = hang_of(*shared_trace(f"flight_recorder_nvrx/{incident}").glob("_dump_*"))
    lines = print_lines(build_hang_screen(hang), width=100)
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


def test_a_file_that_cannot_be_read_stops_no_diagnosis(tmp_path: Path) -> None:
    dump(tmp_path, 0, [WORLD], done(WORLD, 4), call(WORLD, 5))
    dump(tmp_path, 1, [WORLD], done(WORLD, 4))
    (tmp_path / "elsewhere").symlink_to(tmp_path / "gone")
    (tmp_path / "itself").symlink_to("itself")

    found = find_hang(tmp_path)

    assert found is not None and found.ranks == (0, 1)
    named = {one.message.partition(":")[0] for one in found.warnings}
    assert named == {"elsewhere", "itself"}


def test_dumps_next_to_a_trace_are_part_of_its_recording() -> None:
    assert isinstance(examine_or_find_hang([SAMPLES / "dp4"]), Analysis)


def ras_rank(rank: int, reduced: int) -> dict[str, Any]:
    return {"rank": rank, "host": "node1", "pid": 100 + rank, "cuda_dev": rank, "nvml_dev": rank,
            "status": {"init_state": 0, "async_error": 0},
            "collective_counts": {"AllReduce": reduced, "Broadcast": 3}}  # fmt: skip


RAS_JSON = json.dumps({
    "nccl_version": "2.28.3", "communicators_count": 1,
    "communicators": [{
        "hash": "0x9a", "secondary_hash": "0x1:0x2", "size": 4, "ranks_count": 3,
        "missing_ranks_count": 1,
        "ranks": [ras_rank(0, 42), ras_rank(1, 41), ras_rank(2, 42)],
        "missing_ranks": [{"rank": 3, "host": "node2", "pid": 103, "cuda_dev": 0, "nvml_dev": 0,
                           "status": {"unresponsive": True, "considered_dead": False}}],
    }],
    "ras": {"collection_time_sec": 0.1, "timeouts_count": 0},
})  # fmt: skip

RAS_TEXT = """NCCL version 2.26.2 compiled with CUDA 12.8
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 103 on node node2 managing GPU 0

Warnings
========

#0-0 (000000000000009a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  2 ranks have launched up to operation 42
  Rank 1 has launched up to operation 41 -- GPU 1 managed by process 101 on node node1
"""


@pytest.mark.parametrize("answer", [RAS_JSON, RAS_TEXT, "", "another protocol", "{broken"])
def test_an_answer_of_nccls_ras_is_part_of_the_hang(answer: str, tmp_path: Path) -> None:
    write_state(tmp_path, RankState(1, 4, pid=101))
    (tmp_path / RAS_NAME).write_text(answer)
    expected = {
        RAS_JSON: (
            "rank 3 of communicator 0x9a of 4 (process 103 on node2) does not answer",
            "rank 1 of communicator 0x9a of 4 (process 101 on node1) has launched 41 AllReduce,"
            " others 42",
        ),
        RAS_TEXT: (
            "INCOMPLETE: Missing communicator data from 1 job process",
            "INCOMPLETE: Process 103 on node node2 managing GPU 0",
            "#0-0 (000000000000009a) MISMATCH: Communicator ranks have different AllReduce"
            " operation counts",
            "#0-0 (000000000000009a) MISMATCH: 2 ranks have launched up to operation 42",
            "#0-0 (000000000000009a) MISMATCH: Rank 1 has launched up to operation 41 -- GPU 1"
            " managed by process 101 on node node1",
        ),
    }
    assert read_calls([tmp_path]).ras == expected.get(answer, ())
