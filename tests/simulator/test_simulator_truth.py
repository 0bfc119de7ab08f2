"""Stories of a few kernels: what the simulator holds for the right answer."""

from __future__ import annotations

from simulator.engine import simulate
from simulator.losses import Loss, losses_of
from simulator.program import (
    COMM,
    Cause,
    Collective,
    Compute,
    Copy,
    Host,
    Instruction,
    Job,
    Message,
    Messages,
    ProcessGroup,
    Record,
    Scenario,
    StepBegin,
    StepEnd,
    Synchronize,
    WaitFor,
)
from simulator.truth import TrueSplit, TrueWait, Truth, truth_of

LARGE = 1 << 20


def job(*programs: tuple[Instruction, ...], stages: tuple[int, ...] = ()) -> Job:
    """The programs as step 1 of ranks in one group named "0"; a launch takes 1 ns."""
    size = len(programs)
    stepped = tuple((StepBegin(1), *program, Synchronize(), StepEnd()) for program in programs)
    groups, hosts = (ProcessGroup("0", tuple(range(size))),), ("host0",) * size
    return Job("story", stepped, groups, (), hosts, stages or (0,) * size, launch_ns=1)


def truth(*programs: tuple[Instruction, ...], stages: tuple[int, ...] = ()) -> Truth:
    return truth_of(simulate(job(*programs, stages=stages)))


def step(rank: int, end_ns: int, **buckets: int) -> TrueSplit:
    return TrueSplit(rank, 1, False, 0, end_ns, **buckets)


def blocking(call: Collective | Messages) -> tuple[Instruction, ...]:
    """The call on its own stream, after what was computed and before what follows."""
    stream = call.stream
    return (Record("before"), WaitFor("before", stream), call, Record("after", stream),
            WaitFor("after"))  # fmt: skip


def reduced(first_ns: int) -> tuple[Instruction, ...]:
    all_reduce = Collective("0", "all_reduce", LARGE, 20)
    return (Compute(first_ns), *blocking(all_reduce), Compute(30))


def single(op: str, peer: int) -> Messages:
    return Messages("0", (Message(op, peer, LARGE, 10),))


def test_waiting_for_a_rank_of_the_same_stage_is_skew() -> None:
    assert truth(reduced(50), reduced(10)) == Truth(
        (
            step(0, 101, compute_ns=80, collective_ns=20, idle_ns=1),
            step(1, 101, compute_ns=40, collective_ns=20, skew_ns=40, idle_ns=1),
        ),
        (TrueWait(1, 1, "skew", 0, "0", 11, 51),),
    )


def test_waiting_for_another_stage_is_bubble() -> None:
    first = (Compute(40), *blocking(single("send", 1)), Compute(50))
    last = (*blocking(single("recv", 0)), Compute(50))
    assert truth(first, last, stages=(0, 1)) == Truth(
        (
            step(0, 101, compute_ns=90, p2p_ns=10, idle_ns=1),
            step(1, 101, compute_ns=50, p2p_ns=10, bubble_ns=40, idle_ns=1),
        ),
        (TrueWait(1, 1, "bubble", 0, "0", 1, 41),),
    )


def test_communication_still_open_when_compute_resumes_blocked_nothing() -> None:
    open_on = (Collective("0", "all_reduce", LARGE, 20), Compute(10), Host(40), Compute(60))
    late = (Compute(70, stream=COMM), Collective("0", "all_reduce", LARGE, 20))
    assert truth(open_on, late).splits[0] == step(
        0, 103, compute_ns=70, idle_ns=33, overlapped_ns=20
    )


def test_of_a_call_that_ends_in_a_gap_only_that_gap_counts() -> None:
    early = (Collective("0", "all_reduce", LARGE, 20), Compute(10), *blocking(Messages("0", ())),
             Compute(5))  # fmt: skip
    late = (Compute(70, stream=COMM), Collective("0", "all_reduce", LARGE, 20))
    assert truth(early, late).splits[0] == step(
        0, 96, compute_ns=15, collective_ns=20, skew_ns=59, idle_ns=2
    )


def test_a_batch_waits_for_the_peer_that_comes_last() -> None:
    both = Messages("0", (Message("recv", 0, LARGE, 10), Message("recv", 2, LARGE, 10)))
    sends = (Compute(20, stream=COMM), single("send", 1))
    late = (Compute(60, stream=COMM), single("send", 1))
    found = truth(sends, (*blocking(both), Compute(5)), late)
    assert found.splits[1] == step(1, 76, compute_ns=5, p2p_ns=20, skew_ns=50, idle_ns=1)
    assert found.waits == (
        TrueWait(1, 1, "skew", 2, "0", 1, 21),
        TrueWait(1, 1, "skew", 2, "0", 31, 61),
    )


def test_a_copy_counts_where_nothing_else_runs() -> None:
    found = truth((Copy(30), Compute(10), Host(50), Compute(5)))
    assert found.splits == (step(0, 58, compute_ns=15, copy_ns=20, idle_ns=23),)


def test_steps_touch_and_end_with_what_they_launched() -> None:
    program = (Compute(9), StepBegin(1), Compute(50), Copy(100), StepBegin(2), Compute(20),
               StepEnd())  # fmt: skip
    whole = Job("story", (program,), (), (), ("host0",), (0,), launch_ns=1)
    assert truth_of(simulate(whole)).splits == (
        TrueSplit(0, 1, True, 10, 60, compute_ns=50),
        TrueSplit(0, 2, False, 60, 80, compute_ns=20),
    )


def test_a_loss_is_the_job_against_the_same_job_without_its_cause() -> None:
    slow, even = job(reduced(50), reduced(10)), job(reduced(10), reduced(10))
    planted = Scenario(slow, 0, Cause(0, "compute", "dp_replicate"), even)
    assert losses_of(planted) == (Loss(0, 40, 0), Loss(1, 40, 40))
    assert losses_of(Scenario(even, 0)) == ()
