"""How steps differ: the usual one, the tail, and what held the slow ones up."""

from __future__ import annotations

from stepsplit.analyzer import SlowStep, Split, StepDurations
from stepsplit.analyzer.buckets import Kind, StepSplit
from stepsplit.analyzer.split.steps import Variation, variation_of


def step(rank: int, number: int, kind: Kind = "full", **buckets_ns: int) -> StepSplit:
    """A step of 100 ns of compute, unless told, and what else is told."""
    return StepSplit(rank, number, kind, 0, Split(**({"compute_ns": 100} | buckets_ns)))


def test_each_rank_and_the_run_have_a_median_a_tail_and_the_slow_steps() -> None:
    lengths = {1: 100, 2: 102, 3: 101, 4: 150, 5: 100, 6: 101}
    steps = [step(0, n, compute_ns=ns) for n, ns in lengths.items()]
    found = StepDurations(0, 6, 101, 150, 150, (4,))
    assert variation_of(steps) == Variation(
        (found,),
        StepDurations(None, 6, 101, 150, 150, (4,)),
        (SlowStep(4, 150, 49, 0, "compute", 49),),
    )


def test_p99_of_many_steps_is_the_time_that_99_percent_do_not_exceed() -> None:
    steps = [step(0, n, compute_ns=n) for n in range(1, 201)]
    [row] = variation_of(steps).ranks
    assert (row.median_ns, row.p99_ns, row.longest_ns) == (100, 198, 200)


def test_a_slow_step_is_the_doing_of_the_rank_that_was_busy_not_of_those_that_waited() -> None:
    """Rank 1 loads data for 60 ns longer, and both others wait for it."""
    steps = [step(rank, n, skew_ns=10) for rank in range(3) for n in range(7)]
    steps = [one for one in steps if one.step != 5]
    steps += [step(0, 5, skew_ns=70), step(1, 5, skew_ns=8, idle_ns=62), step(2, 5, skew_ns=70)]
    found = variation_of(steps)
    assert found.slow == (SlowStep(5, 170, 60, 1, "idle", 62),)
    assert [row.slow_steps for row in found.ranks] == [(5,), (5,), (5,)]


def test_a_wait_is_named_where_nothing_else_explains_the_step() -> None:
    """The rank that was waited for is not in the recording."""
    steps = [step(0, n) for n in range(6)] + [step(0, 6, compute_ns=105, skew_ns=45)]
    assert variation_of(steps).slow == (SlowStep(6, 150, 50, 0, "skew", 45),)


def test_even_steps_are_not_slow_for_a_few_nanoseconds() -> None:
    steps = [step(0, n, compute_ns=1000 + (20 if n == 3 else 0)) for n in range(8)]
    assert variation_of(steps).slow == ()


def test_of_uneven_steps_a_long_one_is_not_unusual() -> None:
    lengths = (100, 130, 160, 110, 170, 140, 120, 190)
    assert variation_of([step(0, n, compute_ns=ns) for n, ns in enumerate(lengths)]).slow == ()


def test_too_few_steps_do_not_tell_which_is_unusual() -> None:
    assert variation_of([step(0, n, compute_ns=100 + 300 * (n == 2)) for n in range(5)]).slow == ()


def test_partial_and_other_steps_and_those_missing_on_a_rank_say_nothing_of_the_run() -> None:
    steps = [step(rank, n) for rank in range(2) for n in range(1, 8)]
    steps += [step(0, 0, "partial", idle_ns=900), step(0, 8, "other", idle_ns=900), step(1, 9)]
    found = variation_of(steps)
    assert found.run == StepDurations(None, 7, 100, 100, 100, ())
    assert [row.steps for row in found.ranks] == [7, 8]


def test_without_a_full_step_on_every_rank_nothing_is_said_of_the_run() -> None:
    assert variation_of([]) == Variation((), None, ())
    found = variation_of([step(0, 1), step(1, 2)])
    assert (found.run, found.slow) == (None, ())
