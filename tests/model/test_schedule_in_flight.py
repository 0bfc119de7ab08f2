"""Schedules: activations in flight on each pipeline rank."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, product

import pytest

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.schedule import Pass, build_orders, count_in_flight
from stepsplit.analyzer.model.schedule_names import SCHEDULES, Schedule


def count_peak_in_flight(order: Iterable[Pass]) -> int:
    """The peak of a rank's passes by their order; it does not depend on their times."""
    changes = ({"F": 1, "I": 0}.get(one.kind, -1) for one in order)
    return max(accumulate(changes), default=0)


def held(schedule: Schedule, stages: int, microbatches: int, chunks: int = 1) -> list[int]:
    return [count_in_flight(schedule, stages, microbatches, chunks, rank) for rank in range(stages)]


def test_an_activation_lives_until_its_weight_gradient() -> None:
    first, second = (Pass("F", 0), Pass("I", 0)), (Pass("F", 1), Pass("W", 0), Pass("B", 1))
    assert count_peak_in_flight((*first, *second)) == 2
    assert count_peak_in_flight(()) == 0


def test_1f1b_has_one_microbatch_fewer_in_flight_per_rank_and_gpipe_all() -> None:
    assert held("naive", 4, 8) == [1, 1, 1, 1]
    assert held("gpipe", 4, 8) == [8, 8, 8, 8]
    assert held("1f1b", 4, 8) == [4, 3, 2, 1]


def test_the_first_rank_of_interleaved_holds_a_layers_worth_of_l_times_1_plus_p_less_1_by_pv() -> (
    None
):
    """Korthikanti et al., section 4.2.3: of chunks with L / (p v) layers, here p = 4 and v = 3."""
    assert held("interleaved", 4, 8, 3) == [15, 13, 11, 9]
    assert count_in_flight("interleaved", 4, 8, 3) / (4 * 3) == 1 + (4 - 1) / (4 * 3)


def test_zero_bubble_schedules_have_equal_activations_on_every_rank() -> None:
    assert held("zb-h1", 4, 8) == [4, 4, 4, 4]
    assert held("zb-h2", 4, 8) == [7, 7, 7, 7]
    assert held("zb-v", 4, 8) == [8, 8, 8, 8]
    assert held("dualpipe", 4, 8) == [5, 5, 5, 5]
    assert held("dualpipe-v", 4, 8) == [9, 9, 9, 9]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_formula_matches_the_order(schedule: Schedule) -> None:
    counted = 0
    for p, m, chunks in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 5, 7, 8, 12, 16, 24), (1, 2, 3)):
        try:
            order_of = build_orders(schedule, p, m, chunks)
        except UsageError:
            continue
        assert held(schedule, p, m, chunks) == [
            count_peak_in_flight(order) for order in order_of
        ], (p, m, chunks)
        counted += 1
    assert counted > 20
