"""The statistics of the gate against SciPy's own, and their known answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from stepsplit.analyzer.significance import (
    ALPHA,
    MISS_RATE,
    POWER,
    SINGLE_RUN_FACTOR,
    Difference,
    adjust_holm,
    compute_difference,
    compute_excess,
    compute_t_tail,
)

BASE, WORSE = (10.0, 10.2, 9.9, 10.1, 9.8), (10.9, 11.2, 10.7, 11.0, 11.4)


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def test_five_runs_a_side_against_welch_and_the_permutations_of_scipy() -> None:
    found = compute_difference(BASE, WORSE)
    assert found is not None
    welch = stats.ttest_ind(WORSE, BASE, equal_var=False, alternative="greater")
    two_sided = stats.ttest_ind(WORSE, BASE, equal_var=False).confidence_interval(1 - 2 * ALPHA)
    assert found.mean == close(1.04)
    assert found.degrees_of_freedom == close(welch.df)
    assert (found.low, found.high) == (close(two_sided.low), close(two_sided.high))
    # All five are above all of the baseline: one way of 252, the rarest that there is.
    assert found.p == close(welch.pvalue)
    assert (found.p_permutation, found.n_permutations) == (
        close(1 / 252),
        252,
    ) and found.confirm_by_permutation(1e-6)


def test_the_tail_of_t_is_that_of_scipy() -> None:
    freedoms = (1.0, 1.0001, 1.7, 2.0, 3.0, 4.5, 7.0, 19.9, 39.0, 40.0, 41.0, 333.3, 1e4)
    ts = [sign * (i / 8 + tiny) for i in range(101) for sign in (1, -1) for tiny in (0.0, 1e-5)]
    for n in freedoms:
        for t in (*ts, 100.0, -1e4, 1e8, 1e200, 1e-200):
            assert abs(compute_t_tail(n, t) - float(stats.t.sf(t, n))) <= 1e-12, (n, t)
    # Of a million calls the fraction has hundreds of terms, each of which is rounded.
    assert compute_t_tail(1e6, 1.75) == pytest.approx(float(stats.t.sf(1.75, 1e6)), abs=1e-11)
    # Far out as well, where it is small: the tail of Cauchy's distribution is 1 / (pi t).
    assert compute_t_tail(1.0, 1e9) == pytest.approx(1e-9 / math.pi, rel=1e-12)
    assert compute_t_tail(30.0, 20.0) == pytest.approx(float(stats.t.sf(20.0, 30)), rel=1e-11)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 1000), min_size=4, max_size=7).filter(lambda runs: len({*runs}) > 1),
    st.lists(st.integers(1, 1000), min_size=4, max_size=7).filter(lambda runs: len({*runs}) > 1),
)
def test_any_runs_against_welch_and_permutations(one: list[int], other: list[int]) -> None:
    before, own = [float(v) for v in one], [float(v) for v in other]
    found = compute_difference(before, own)
    assert found is not None
    welch = stats.ttest_ind(own, before, equal_var=False, alternative="greater").pvalue
    dealt = stats.permutation_test(
        (own, before), lambda a, b: a.sum() / len(a) - b.sum() / len(b),
        alternative="greater", n_resamples=math.inf,
    ).pvalue  # fmt: skip
    assert found.p == pytest.approx(welch, rel=1e-6)
    assert found.p_permutation == pytest.approx(dealt if welch <= ALPHA else 1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("n", "m", "freedom"),
    [(3, 3, 4.0), (2, 3, 1.0), (2, 5, 1.0), (3, 4, 2.0)],
    ids=lambda value: str(value),
)
def test_too_few_runs_to_permute_leave_t_with_the_freedom_of_the_smaller_side(
    n: int, m: int, freedom: float
) -> None:
    one, other = [float(i) for i in range(n)], [float(i) for i in range(m)]
    found = compute_difference(one, other)
    assert found is not None and found.degrees_of_freedom == pytest.approx(freedom)


def test_a_side_of_one_run_takes_the_noise_of_the_other() -> None:
    found = compute_difference(BASE, (11.0,))
    assert found is not None
    error = math.sqrt(0.025 * (1 + 1 / 5))
    assert (found.mean, found.error, found.degrees_of_freedom) == (close(1.0), close(error), 4)
    assert found.p == close(SINGLE_RUN_FACTOR * stats.t.sf(1.0 / error, 4))
    turned = compute_difference((10.0,), WORSE)
    assert turned is not None and turned.degrees_of_freedom == 4


def test_one_run_per_side_has_no_test() -> None:
    assert compute_difference((10.0,), (11.0,)) is None
    assert compute_excess((1.0,)) is None


def test_runs_without_noise_are_compared_exactly() -> None:
    same, more = (
        compute_difference((3.0, 3.0, 3.0), (3.0, 3.0)),
        compute_difference((3.0, 3.0), (4.0, 4.0)),
    )
    assert same is not None and (same.p, same.low, same.high) == (1.0, 0.0, 0.0)
    assert more is not None and (more.p, more.low) == (0.0, 1.0)


def test_many_runs_are_dealt_by_the_same_dice_each_time() -> None:
    one, other = [float(i % 7) for i in range(20)], [float(i % 7) + 0.1 for i in range(20)]
    first, again = compute_difference(one, other), compute_difference(one, other)
    assert first == again and first is not None and 0.2 < first.p < 0.8


def test_the_distance_from_a_limit_is_a_t_of_one_sample() -> None:
    over = [0.5, 0.7, 0.4]
    found = compute_excess(over)
    assert found is not None
    expected = stats.ttest_1samp(over, 0.0, alternative="greater")
    assert (found.p, found.degrees_of_freedom) == (close(expected.pvalue), 2)
    alone = compute_excess((0.6,), BASE)
    assert alone is not None and alone.error == close(math.sqrt(0.025))


def test_what_is_detectable_is_found_so_often() -> None:
    found = Difference(0.0, 1.0, 8.0, 0.5)
    need = stats.t.ppf(1 - ALPHA, 8) + stats.t.ppf(POWER, 8)
    assert found.compute_detectable(0.0) == close(need)
    assert found.compute_detectable(5.0) == close(5.0 + stats.t.ppf(POWER, 8))
    assert found.is_within(stats.t.ppf(1 - MISS_RATE, 8) + 1e-9)
    assert not found.is_within(stats.t.ppf(1 - MISS_RATE, 8) - 1e-9)


@pytest.mark.parametrize(
    ("ps", "adjusted"),
    [
        ((), []),
        ((0.01,), [0.01]),
        ((0.01, 0.04, 0.03), [0.03, 0.06, 0.06]),
        ((0.5, 0.001, 0.9), [1.0, 0.003, 1.0]),
    ],
)
def test_holm(ps: Sequence[float], adjusted: list[float]) -> None:
    assert adjust_holm(ps) == pytest.approx(adjusted)
