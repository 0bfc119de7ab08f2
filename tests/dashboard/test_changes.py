"""Lasting changes of a metric are detected, and rarely falsely reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from stepsplit.dashboard.pages.level_changes import (
    MAX_RUNS,
    MIN_LEVEL_RUNS,
    LevelChange,
    find_level_changes,
    partition_into_levels,
)

QUIET = (100.0, 101, 99, 100, 102, 98, 100, 101)
SEED, SDS = 20, (0.02, 0.05, 0.10)


def histories(runs: int, sd: float, count: int, step: float = 0.0) -> Iterator[tuple[float, ...]]:
    """Runs with noise of that sd, as a ratio; the later half is that much higher, in sds."""
    dice = np.random.default_rng([SEED, runs, round(1000 * sd)])
    level = np.where(np.arange(runs) < runs // 2, 100.0, 100.0 * (1 + step * sd))
    for _ in range(count):
        yield tuple(level * np.exp(sd * dice.standard_normal(runs)))


def compute_cost(values: Sequence[float], edges: Sequence[int], penalty: float) -> float:
    levels = [np.array(values[low:high]) for low, high in pairwise(edges)]
    distances = sum(float(((level - level.mean()) ** 2).sum()) for level in levels)
    return distances + penalty * (len(levels) - 1)


@given(st.lists(st.integers(0, 20), min_size=6, max_size=12), st.integers(1, 200))
def test_no_other_levels_cost_less(values: list[int], penalty: int) -> None:
    inner = range(1, len(values))
    allowed = [
        edges
        for count in range(len(values) // MIN_LEVEL_RUNS)
        for chosen in combinations(inner, count)
        if min(np.diff(edges := (0, *chosen, len(values)))) >= MIN_LEVEL_RUNS
    ]
    found = tuple(partition_into_levels(values, penalty))

    assert found in allowed
    least = min(compute_cost(values, edges, penalty) for edges in allowed)
    assert compute_cost(values, found, penalty) == pytest.approx(least)


def test_a_level_that_rises_and_falls_again_changed_twice() -> None:
    high = tuple(value + 20 for value in QUIET)

    assert find_level_changes(QUIET + high + QUIET) == (
        LevelChange(8, 100.125, 120.125),
        LevelChange(16, 120.125, 100.125),
    )


@pytest.mark.parametrize("odd", [50.0, 150.0, 1000.0])
@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_single_outlier_is_not_a_change(odd: float, at: int) -> None:
    runs = (*QUIET, *QUIET)

    assert find_level_changes((*runs[:at], odd, *runs[at:])) == ()


def test_a_level_needs_three_runs() -> None:
    assert find_level_changes((*QUIET, 130.0, 131.0)) == ()
    assert find_level_changes((*QUIET, 130.0, 131.0, 129.0)) == (LevelChange(8, 100.125, 130.0),)


def test_a_constant_metric_changes_by_at_least_one_percent() -> None:
    assert find_level_changes([8.0] * 6 + [10.0] * 6) == (LevelChange(6, 8.0, 10.0),)
    assert find_level_changes([8.0] * 6 + [8.07] * 6) == ()
    assert find_level_changes([0.0] * 6 + [2.0] * 6) == (LevelChange(6, 0.0, 2.0),)
    assert (
        find_level_changes([5.0] * 40)
        == find_level_changes([0.0] * 40)
        == find_level_changes([0.1] * 5)
        == ()
    )


def test_a_change_is_relative_to_the_previous_level() -> None:
    assert (LevelChange(3, 8.0, 10.0).ratio, LevelChange(3, 8.0, 6.0).ratio) == (0.25, -0.25)
    assert LevelChange(3, 0.0, 1.0).ratio is None


def test_only_the_newest_runs_of_a_long_history_are_searched() -> None:
    old = [50.0] * 30
    newest = [100.0] * (MAX_RUNS - 10) + [110.0] * 10

    assert find_level_changes(old + newest) == (LevelChange(30 + MAX_RUNS - 10, 100.0, 110.0),)


@pytest.mark.parametrize(("runs", "count"), [(10, 100), (30, 60), (100, 20)])
@pytest.mark.parametrize("sd", SDS)
def test_noise_alone_seldom_changes_a_level(runs: int, count: int, sd: float) -> None:
    alarms = sum(bool(find_level_changes(one)) for one in histories(runs, sd, count))

    assert alarms <= 0.05 * count


def test_a_step_of_three_sds_is_found_in_its_place() -> None:
    made = [find_level_changes(one) for sd in SDS for one in histories(30, sd, 8, step=3.0)]

    assert sum(any(abs(one.at - 15) <= 1 for one in found) for found in made) >= 0.8 * len(made)
