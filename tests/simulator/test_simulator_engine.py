"""Stories of a few instructions: when the simulator says that everything happens."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from simulator.engine import Deadlock, simulate
from simulator.program import (
    COMM,
    Begin,
    Collective,
    Compute,
    End,
    Graph,
    Host,
    Instruction,
    Job,
    Message,
    Messages,
    ProcessGroup,
    Record,
    StepBegin,
    StepEnd,
    Synchronize,
    WaitFor,
)
from simulator.ran import HostCall, Mark, Moved, Run

LARGE, SMALL = 1 << 20, 1 << 10
ALL_REDUCE = Collective("0", "all_reduce", LARGE, 20)


def run(*programs: tuple[Instruction, ...], launch_ns: int = 1, queue_depth: int = 1024) -> Run:
    """The programs run together in one group named "0"; times are single ns."""
    size = len(programs)
    groups = (ProcessGroup("0", tuple(range(size))),)
    mesh, hosts = (("dp_replicate", size),), ("host0",) * size
    return simulate(
        Job("story", programs, groups, mesh, hosts, (0,) * size, launch_ns, queue_depth)
    )


def times(found: Run) -> list[list[tuple[int, int]]]:
    """Start and end of every device event of each rank."""
    return [[(ran.start_ns, ran.end_ns) for ran in rank.device] for rank in found.ranks]


def test_a_collective_moves_data_once_the_last_has_arrived() -> None:
    found = run((Compute(50, stream=COMM), ALL_REDUCE), (Compute(10, stream=COMM), ALL_REDUCE))
    assert times(found) == [[(1, 51), (51, 71)], [(1, 11), (11, 71)]]
    assert [rank.device[1].moves for rank in found.ranks] == [(Moved(51, 71, 0),)] * 2


def test_the_host_runs_ahead_and_streams_work_side_by_side() -> None:
    found = run((Compute(50), Compute(30, stream="other"), Compute(5), Host(3)))
    assert times(found) == [[(1, 51), (2, 32), (51, 56)]]
    assert [(call.start_ns, call.end_ns) for call in found.ranks[0].host] == [
        (0, 1), (1, 2), (2, 3), (3, 6),
    ]  # fmt: skip


def test_a_stream_waits_for_the_event_of_another() -> None:
    program = (Compute(50), Record("ready"), WaitFor("ready", COMM), Compute(20, stream=COMM),
               Record("done", COMM), Compute(5), WaitFor("done"), Compute(7))  # fmt: skip
    assert times(run(program)) == [[(1, 51), (51, 56), (51, 71), (71, 78)]]


def test_an_event_recorded_again_is_the_latest_one() -> None:
    program = (Compute(50), Record("e"), Compute(50), Record("e"), WaitFor("e", COMM),
               Compute(1, stream=COMM))  # fmt: skip
    assert times(run(program)) == [[(1, 51), (51, 101), (101, 102)]]


def test_the_host_waits_at_a_synchronization_for_the_stream_that_it_names() -> None:
    of_one = Synchronize(COMM, "cudaStreamSynchronize")
    found = run((Compute(50), Compute(20, stream=COMM), of_one, Synchronize(), Compute(1)))
    assert found.ranks[0].host[2:4] == (HostCall(of_one, 2, 22), HostCall(Synchronize(), 22, 51))
    assert times(found) == [[(1, 51), (2, 22), (52, 53)]]


def test_a_launch_blocks_while_the_queue_is_full() -> None:
    found = run((Compute(100), Compute(100), Compute(100)), queue_depth=1)
    assert [(call.start_ns, call.end_ns) for call in found.ranks[0].host] == [
        (0, 1), (1, 2), (2, 102),
    ]  # fmt: skip
    assert times(found) == [[(1, 101), (101, 201), (201, 301)]]


def test_a_graph_is_one_launch_and_keeps_its_order() -> None:
    body = (Compute(10), Record("e"), WaitFor("e", COMM), Compute(5, stream=COMM), Compute(3))
    found = run((Graph(body), Compute(1)))
    assert times(found) == [[(1, 11), (11, 14), (11, 16), (14, 15)]]
    assert [ran.launch for ran in found.ranks[0].device] == [0, 0, 0, 1]


def test_a_message_moves_once_both_ends_are_there() -> None:
    send = Messages("0", (Message("send", 1, LARGE, 20),))
    recv = Messages("0", (Message("recv", 0, LARGE, 20),))
    found = run((Host(40), send), (recv,))
    assert times(found) == [[(41, 61)], [(1, 61)]]
    assert found.ranks[1].device[0].moves == (Moved(41, 61, 0),)


def test_a_small_send_ends_without_its_receiver() -> None:
    send = Messages("0", (Message("send", 1, SMALL, 20),))
    recv = Messages("0", (Message("recv", 0, SMALL, 20),))
    assert times(run((send,), (Host(99), recv))) == [[(1, 21)], [(100, 120)]]


def test_a_batch_ends_with_its_last_message() -> None:
    def batch(peer: int) -> Messages:
        legs = (Message("send", peer, LARGE, 20), Message("recv", peer, LARGE, 20))
        return Messages("0", legs)

    found = run((Host(40), batch(1)), (batch(0),))
    assert times(found) == [[(41, 61)], [(1, 61)]]
    assert found.ranks[1].device[0].moves == (Moved(41, 61, 0), Moved(41, 61, 0))


def test_the_nth_receive_is_of_the_nth_send() -> None:
    send = [Messages("0", (Message("send", 1, LARGE, took),)) for took in (10, 30)]
    recv = [Messages("0", (Message("recv", 0, LARGE, took),)) for took in (10, 30)]
    assert times(run((*send,), (Host(4), *recv))) == [[(1, 15), (15, 45)], [(5, 15), (15, 45)]]


def test_the_root_of_a_broadcast_waits_for_no_rank() -> None:
    call = Collective("0", "broadcast", LARGE, 20, root=0)
    assert times(run((call,), (Host(90), call))) == [[(1, 21)], [(91, 111)]]
    assert times(run((Host(90), call), (call,))) == [[(91, 111)], [(1, 111)]]


def test_a_reduce_is_waited_for_at_its_root_alone() -> None:
    call = Collective("0", "reduce", LARGE, 20, root=0)
    assert times(run((call,), (Host(90), call))) == [[(1, 111)], [(91, 111)]]
    assert times(run((Host(90), call), (call,))) == [[(91, 111)], [(1, 21)]]


def test_marks_hold_the_calls_made_within_them() -> None:
    program = (StepBegin(3), Compute(10), Begin("PP:0F0"), Compute(10), End(), StepBegin(4),
               StepEnd())  # fmt: skip
    assert run(program).ranks[0].marks == (
        Mark("PP:0F0", None, 1, 2, 1, 2),
        Mark("ProfilerStep#3", 3, 0, 2, 0, 2),
        Mark("ProfilerStep#4", 4, 2, 2, 2, 2),
    )


def test_ranks_that_wait_for_each_other_are_named() -> None:
    send = Messages("0", (Message("send", 1, LARGE, 20),))
    with pytest.raises(Deadlock) as error:
        run((ALL_REDUCE, send), (Synchronize(), Messages("0", ()), ALL_REDUCE))
    assert str(error.value) == "rank 0: Messages (0,) on stream 'comm' lacks ranks [1]"


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ((WaitFor("e"),), "rank 0 waits for 'e': not recorded"),
        ((StepBegin(1), Begin("box"), StepEnd()), "rank 0: steps and annotations do not nest"),
        ((Collective("1", "all_reduce", 1, 1),), "rank 0 is no member of group '1'"),
    ],
)
def test_a_program_without_sense_is_refused(program: tuple[Instruction, ...], says: str) -> None:
    with pytest.raises(ValueError) as error:
        run(program)
    assert str(error.value) == says


def test_a_call_must_be_of_one_op_on_all_ranks() -> None:
    with pytest.raises(ValueError) as error:
        run((ALL_REDUCE,), (Collective("0", "all_gather", LARGE, 20),))
    assert str(error.value) == "call 0 of group '0' is of several ops"


def test_the_simulator_knows_nothing_of_what_it_judges() -> None:
    for module in sorted(Path(__file__).parent.glob("[!t]*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            else:
                named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in named if name.split(".")[0] == "stepsplit"], module.name
