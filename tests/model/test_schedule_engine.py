"""Pipelines of unequal stages: when each pass runs, and the fast path to the makespan."""

from __future__ import annotations

import random
from time import perf_counter

import pytest

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model import schedule_period, schedule_time
from stepsplit.analyzer.model.ideal_bubble import compute_ideal_bubble_fraction
from stepsplit.analyzer.model.schedule import Pass
from stepsplit.analyzer.model.schedule_graph import (
    Costs,
    ScheduleTimeline,
    build_graph,
    link_orders,
    simulate,
)
from stepsplit.analyzer.model.schedule_names import SCHEDULES, TWO_STAGES, Schedule
from stepsplit.analyzer.model.schedule_time import PipelineTime, compute_pipeline_time

UNEQUAL: Costs = ((2, 1, 2), (3, 2, 2))


def test_1f1b_of_two_unequal_stages_with_three_microbatches() -> None:
    """Rank 0: F0 F1 . B0 F2 . B1 . B2; rank 1 works without a pause once it has begun.

    rank 0  |F0|F1|     |B0 |F2|  |B1 |    |B2 |
            0  2  4     9   12 14 16  19   23  26
    rank 1     |F0 |B0  |F1 |B1   |F2 |B2  |
               2   5    9   12    16  19   23
    """
    assert simulate(build_graph("1f1b", 2, 3), UNEQUAL) == ScheduleTimeline(
        starts_ns=((0, 2, 9, 12, 16, 23), (2, 5, 9, 12, 16, 19)),
        ends_ns=((2, 4, 12, 14, 19, 26), (5, 9, 12, 16, 19, 23)),
        busy_ns=(15, 21),
    )


def test_the_bubble_of_a_rank_is_the_common_window_less_its_passes() -> None:
    timeline = simulate(build_graph("1f1b", 2, 3), UNEQUAL)
    assert (timeline.makespan_ns, timeline.bubbles_ns) == (26, (11, 5))


def test_a_transfer_delays_its_receiver() -> None:
    timeline = simulate(build_graph("1f1b", 2, 3), UNEQUAL, transfer_ns=1)
    assert timeline.starts_ns == ((0, 2, 11, 14, 18, 25), (3, 6, 10, 13, 17, 20))


def test_a_blocking_transfer_delays_the_sender_too() -> None:
    timeline = simulate(build_graph("1f1b", 2, 3), UNEQUAL, transfer_ns=1, blocking=True)
    assert timeline.starts_ns == ((0, 3, 11, 14, 19, 27), (3, 6, 11, 14, 19, 22))


def test_no_message_passes_where_the_v_turns_around() -> None:
    """Two stages on the one rank of the turn: only rank 0's ends of the V are across the link."""
    orders = ((Pass("F", 0, 0), Pass("F", 0, 1)), (Pass("F", 0, 0), Pass("F", 0, 1)))
    timeline = simulate(link_orders(orders, ((0, 3), (1, 2))), ((1, 0, 0),) * 4, transfer_ns=10)
    assert timeline.starts_ns == ((0, 23), (11, 12))


def test_overlapped_passes_start_and_end_together() -> None:
    orders = ((Pass("F", 0), Pass("F", 1, joined=True), Pass("B", 0)),)
    timeline = simulate(link_orders(orders, ((0,),)), ((2, 1, 2),))
    assert timeline == ScheduleTimeline(((0, 2, 2),), ((2, 7, 7),), (7,))


def test_a_deadlock_is_rejected() -> None:
    orders = ((Pass("F", 0), Pass("B", 0)), (Pass("B", 0), Pass("F", 0)))
    with pytest.raises(
        UsageError, match="deadlock: rank 0 blocks at pass 2 of 2, B of microbatch 0"
    ):
        link_orders(orders, ((0,), (1,)))


def test_a_wrong_number_of_costs_is_rejected() -> None:
    with pytest.raises(UsageError, match="2 costs for a pipeline of 4 stages; give one per stage"):
        simulate(build_graph("interleaved", 2, 2, 2), UNEQUAL)
    with pytest.raises(UsageError, match="2 costs for a pipeline of 4 stages; give one per stage"):
        compute_pipeline_time("interleaved", 2, 2, 2, UNEQUAL)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_leave_the_ideal_bubble(schedule: Schedule) -> None:
    """With equal times of the three kinds of pass, as the formulas of the V shapes assume."""
    chunks = 2 if schedule == "interleaved" else 1
    costs = ((1.0, 1.0, 1.0),) * model_stages(schedule, 4, chunks)
    timeline = simulate(build_graph(schedule, 4, 12, chunks), costs)
    ideal = compute_ideal_bubble_fraction(schedule, 4, 12, chunks, (1.0, 1.0, 1.0))
    assert timeline.bubbles_ns[0] / timeline.makespan_ns == pytest.approx(ideal)


# The fast path.


def model_stages(schedule: Schedule, stages: int, chunks: int) -> int:
    if schedule == "dualpipe":
        return stages
    return stages * (2 if schedule in TWO_STAGES and stages > 1 else chunks)


def drawn_costs(dice: random.Random, stages: int) -> Costs:
    """Equal stages, stages that differ, or equal ones between a first and a last that differ."""
    spread = dice.choice([0.0, 0.02, 0.3, 1.0])
    costs = [
        (1e6 + spread * 1e6 * dice.random(), 1e6 + spread * 1e6 * dice.random(), 9e5)
        for _ in range(stages)
    ]
    return tuple(costs[:1] * (stages - 1) + costs[-1:] if dice.random() < 0.4 else costs)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fast_path_equals_the_whole_simulation(schedule: Schedule) -> None:
    dice = random.Random(schedule)
    for _ in range(30):
        p = dice.choice([2, 4, 6]) if schedule == "dualpipe" else dice.choice([1, 2, 3, 5])
        chunks = dice.choice([2, 3]) if schedule == "interleaved" else 1
        m = 2 * p * dice.choice([1, 4, 6]) + (0 if schedule == "interleaved" else 2)
        costs = drawn_costs(dice, model_stages(schedule, p, chunks))
        transfer_ns, blocking = dice.choice([0.0, 1e4, 3e5]), dice.random() < 0.5
        whole = simulate(build_graph(schedule, p, m, chunks), costs, transfer_ns, blocking)
        fast = compute_pipeline_time(schedule, p, m, chunks, costs, transfer_ns, blocking)
        assert fast.makespan_ns == pytest.approx(whole.makespan_ns, rel=1e-9)
        assert fast.bubbles_ns == pytest.approx(whole.bubbles_ns, abs=1e-9 * whole.makespan_ns)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_far_more_microbatches_give_exactly_the_time_of_their_simulation(
    schedule: Schedule,
) -> None:
    """Whole times have no rounding. Stages that differ little reach a steady state late; slow
    messages give one of many periods; stages may take no time."""
    dice = random.Random(f"exact {schedule}")
    for _ in range(12):
        p = dice.choice([2, 4, 6]) if schedule == "dualpipe" else dice.choice([2, 3, 5])
        chunks = dice.choice([2, 3]) if schedule == "interleaved" else 1
        few = 5 * p + dice.randrange(2 * p)
        m = {"interleaved": p, "dualpipe": 2}.get(schedule, 1) * (few + dice.randrange(150))
        usual, spread = dice.choice([1, 50, 10**6]), dice.choice([2, 10, 10**5])
        costs: Costs = tuple(
            (float(usual + dice.randrange(spread)), float(usual), float(dice.randrange(spread)))
            for _ in range(model_stages(schedule, p, chunks))
        )
        transfer_ns = float(dice.choice([0, 1, usual // 3, 5 * usual]))
        # The closed forms of naive and gpipe have no blocking sends.
        blocking = schedule not in ("naive", "gpipe") and dice.random() < 0.3
        whole = simulate(build_graph(schedule, p, m, chunks), costs, transfer_ns, blocking)
        fast = compute_pipeline_time(schedule, p, m, chunks, costs, transfer_ns, blocking)
        assert fast.makespan_ns == whole.makespan_ns


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_billion_microbatches_are_timed_from_a_few(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest stage works nearly all the time, and no graph has more than 8,192 forwards."""
    sizes = []

    def note_size(schedule: Schedule, p: int, m: int, chunks: int = 1) -> object:
        sizes.append(m)
        return build_graph(schedule, p, m, chunks)

    for module in (schedule_time, schedule_period):
        monkeypatch.setattr(module, "build_graph", note_size)
    chunks = 2 if schedule == "interleaved" else 1
    costs = ((1e6, 1e6, 1e6),) * (model_stages(schedule, 8, chunks) - 1) + ((1.3e6, 1.3e6, 1e6),)
    time = compute_pipeline_time(schedule, 8, 8 * 10**9, chunks, costs, 1e5)
    assert max(sizes) * len(costs) <= 8192
    if schedule != "naive":
        assert min(time.bubbles_ns) / time.makespan_ns < (0.01 if schedule == "gpipe" else 1e-6)


def test_longer_pipelines_and_whole_simulations_are_refused() -> None:
    with pytest.raises(UsageError, match="129 ranks x 129 model stages exceeds 16384"):
        compute_pipeline_time("1f1b", 129, 10**6, 1, ((1.0, 1.0, 1.0),) * 129)
    with pytest.raises(UsageError, match="at most 131072 forwards are"):
        compute_pipeline_time("gpipe", 2, 10**9, 1, UNEQUAL, 1.0, blocking=True)
    assert compute_ideal_bubble_fraction("zb-h1", 10**9, 10**9, 1, (1.0, 1.0, 1.0)) is None


def test_bubble_fraction_is_of_the_window_and_bubble_overhead_of_the_useful_time() -> None:
    time = compute_pipeline_time("1f1b", 2, 3, 1, UNEQUAL)
    assert time == PipelineTime(26, (11, 5))
    assert (time.bubble_fraction, time.bubble_overhead) == (16 / 52, 16 / 36)


@pytest.mark.slow
@pytest.mark.alone
def test_sixteen_ranks_with_128_microbatches_take_milliseconds() -> None:
    """About 0.4 ms, 2.5 ms with the graph; the limits are wide, for a machine under load."""
    compute_pipeline_time("1f1b", 16, 128, 1, ((1.0, 1.0, 1.0),) * 16)
    since = perf_counter()
    for last in range(20):
        compute_pipeline_time(
            "1f1b", 16, 128, 1, ((1e6, 1e6, 1e6),) * 15 + ((1e6 + last, 1e6, 1e6),)
        )
    assert perf_counter() - since < 20 * 0.01


def test_the_same_stages_are_simulated_once() -> None:
    compute_pipeline_time("1f1b", 16, 128, 1, ((1.0, 1.0, 1.0),) * 16)
    hits = compute_pipeline_time.cache_info().hits
    compute_pipeline_time("1f1b", 16, 128, 1, ((1.0, 1.0, 1.0),) * 16)
    assert compute_pipeline_time.cache_info().hits == hits + 1
