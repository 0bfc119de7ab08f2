"""Schedules of the simulator: orders of small pipelines in full, makespans that papers state."""

from __future__ import annotations

import pytest

from simulator.playing import Durations, runnable
from simulator.schedules import SCHEDULES, Action, actions

SPLIT = Durations(forward=1, backward=2, input_gradient=1, weight_gradient=1)


def written(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[str]:
    """Each rank's order in words such as 0F3: stage, kind, microbatch."""
    orders = actions(schedule, stages, microbatches, chunks)
    return [" ".join(f"{a.stage}{a.kind}{a.microbatch}" for a in order) for order in orders]


def test_naive_takes_one_microbatch_forth_and_back_before_the_next() -> None:
    assert written("naive", 2, 2) == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    assert runnable(actions("naive", 4, 8)) == 8 * 4 * 2


def test_gpipe_does_all_forwards_then_all_backwards() -> None:
    assert written("gpipe", 2, 3) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_1f1b_warms_up_alternates_and_cools_down() -> None:
    assert written("1f1b", 3, 4) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_walks_groups_of_microbatches_through_the_chunks() -> None:
    assert written("interleaved", 2, 2, chunks=2) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


def test_zb_h1_delays_weight_gradients_by_one_microbatch_a_rank() -> None:
    assert written("zb-h1", 2, 3) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_zb_v_turns_around_on_the_last_rank() -> None:
    assert written("zb-v", 2, 3) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_dualpipe_v_pairs_a_forward_of_one_chunk_with_a_backward_of_the_other() -> None:
    assert written("dualpipe-v", 2, 4) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


def test_dualpipe_feeds_two_models_from_both_ends() -> None:
    assert written("dualpipe", 2, 4) == [
        "0F0 3F2 0F1 3B2 3F3 0B0 3B3 0I1 0W1",
        "2F2 1F0 2F3 1B0 1F1 2B2 1B1 2I3 2W3",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 3), (4, 8), (8, 32)])
def test_gpipe_and_1f1b_take_m_plus_p_less_1_forwards_and_backwards(
    stages: int, microbatches: int
) -> None:
    makespan = (microbatches + stages - 1) * 2
    assert runnable(actions("gpipe", stages, microbatches)) == makespan
    assert runnable(actions("1f1b", stages, microbatches)) == makespan


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_the_bubble_of_interleaved_shrinks_by_the_number_of_chunks(
    stages: int, microbatches: int, chunks: int
) -> None:
    whole = 2 * chunks
    makespan = runnable(actions("interleaved", stages, microbatches, chunks))
    assert makespan * chunks == microbatches * whole * chunks + (stages - 1) * whole


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (8, 16)])
def test_zb_h1_idles_p_less_1_times_forward_and_input_less_weight_gradient(
    stages: int, microbatches: int
) -> None:
    work, bubble = 3 * microbatches, (stages - 1) * (1 + 1 - 1)
    assert runnable(actions("zb-h1", stages, microbatches), SPLIT) == work + bubble


def test_zb_h1_with_fewer_microbatches_than_stages_hides_all_weight_gradients_but_one() -> None:
    assert runnable(actions("zb-h1", 8, 4), SPLIT) == (4 + 8 - 1) * (1 + 1) + 1


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_the_v_shapes_only_lose_the_time_that_the_last_rank_waits_for_its_first_forward(
    stages: int, microbatches: int
) -> None:
    makespan = 6 * microbatches + stages - 1
    assert runnable(actions("zb-v", stages, microbatches), SPLIT) == makespan
    assert runnable(actions("dualpipe-v", stages, microbatches), SPLIT) == makespan


def test_dualpipe_only_loses_the_time_that_its_middle_waits_for_its_first_forwards() -> None:
    assert runnable(actions("dualpipe", 8, 16), SPLIT) == 3 * 16 + 8 // 2 - 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_at_many_sizes(schedule: str) -> None:
    for stages in (2, 4, 6):
        for microbatches in (2 * stages, 3 * stages, 8 * stages):
            chunks = 3 if schedule == "interleaved" else 1
            orders = actions(schedule, stages, microbatches, chunks)
            busiest = max(sum(map(SPLIT.of, order)) for order in orders)
            assert busiest <= runnable(orders, SPLIT) <= 3 * microbatches * 2 * stages


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"),
    [("interleaved", 4, 6), ("dualpipe-v", 4, 7), ("dualpipe", 3, 8), ("zb-h7", 4, 8)],
)
def test_sizes_for_which_a_schedule_is_not_defined_are_refused(
    schedule: str, stages: int, microbatches: int
) -> None:
    with pytest.raises(ValueError, match=f"no schedule {schedule} of {stages} stages"):
        actions(schedule, stages, microbatches, 2)


def test_an_order_in_which_ranks_wait_for_each_other_is_refused() -> None:
    first = (Action("B", 0, 0), Action("F", 0, 0))
    second = (Action("F", 1, 0), Action("B", 1, 0))
    with pytest.raises(ValueError, match="wait for each other"):
        runnable((first, second))


def test_an_order_without_one_of_its_backwards_is_refused() -> None:
    first, second = actions("1f1b", 2, 2)
    with pytest.raises(ValueError, match="missing or done twice"):
        runnable((first, second[:-1]))
