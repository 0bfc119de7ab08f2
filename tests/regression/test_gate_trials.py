"""The check over many trials: few false alarms, and every planted regression is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from support.gate_builders import runs
from support.gate_trials import RULES, STEPS, Cell, answers
from support.ground_truth import SEED

from stepsplit.analyzer import significance
from stepsplit.analyzer.regression import judge, samples
from stepsplit.analyzer.regression.checks import parse_budget
from stepsplit.analyzer.significance import MISS_RATE, POWER, Difference, compute_difference
from stepsplit.dashboard.reporters import verdict as verdict_screen

pytestmark = pytest.mark.seeded
TRIALS = 150
ALARMS = 0.025
"""Percentage of trials that may raise a false alarm."""


def most_by_chance(share: float, trials: int) -> float:
    """So many of the trials a share of them may come to, but for one case in a thousand."""
    return trials * share + 3.1 * (trials * share * (1 - share)) ** 0.5


def check_gate(trials: int = TRIALS) -> None:
    """Asserts what docs/check.md promises. Cells of bad noise alarm most, those of little find."""
    for baseline, candidate in ((5, 5), (10, 3), (3, 10)):
        for shape in ("normal", "skewed"):
            same = answers(Cell(baseline, candidate, shape, 0.10), trials, SEED)
            assert same["regressed"] <= most_by_chance(ALARMS, trials), (baseline, shape, same)
    # Three runs that happen to be alike make t sure; dealt anew, as many come out as far apart.
    alike = compute_difference(
        (1.0, 1.05, 1.1), (1.02, 1.3, 1.9, 1.4, 2.2, 1.1, 1.04, 1.6, 1.03, 1.5)
    )
    assert alike is not None and alike.p < ALARMS and not alike.confirm_by_permutation(ALARMS), (
        alike
    )
    quiet = answers(Cell(5, 5, "normal", 0.02), trials, SEED)
    assert quiet["pass"] >= trials / 8, quiet
    assert quiet["regressed"] <= most_by_chance(0.005, trials), quiet
    worse = answers(Cell(5, 5, "normal", 0.02, effect=0.10), trials, SEED)
    assert worse["regressed"] >= 0.95 * trials and not worse["pass"], worse
    edge = answers(Cell(5, 5, "normal", 0.05, effect=0.06), trials, SEED, RULES[:1])
    assert edge["pass"] <= most_by_chance(MISS_RATE, trials), edge
    unsure = answers(Cell(5, 5, "normal", 0.10, effect=0.10), trials, SEED)
    assert unsure["pass"] <= most_by_chance(0.001, trials), unsure
    added = answers(Cell(3, 3, "normal", 0.10, added=True), trials, SEED)
    assert added["regressed"] == trials, added


def test_alarms_are_rare_and_regressions_are_found() -> None:
    check_gate()


Plant = Callable[[pytest.MonkeyPatch], None]


def _in_place(module: Any, name: str, bug: Callable[..., Any]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, name)
        patch.setattr(module, name, lambda *args: bug(original, *args))

    return plant


def _noise_forgotten(original: Any, *sides: Any) -> Difference:
    return replace(original(*sides), error=0.0, p=0.0)


def _steps_as_samples(original: Any, before: Any, own: Any) -> Difference:
    found = original(before, own)
    return _change_error(found, found.error / STEPS**0.5)


def _no_root_of_the_runs(original: Any, before: Any, own: Any) -> Difference:
    found = original(before, own)
    return _change_error(found, found.error * len(own))


def _change_error(found: Difference, error: float) -> Difference:
    p = significance.compute_t_p_value(found.mean, error, found.degrees_of_freedom)
    return structs.replace(found, error=error, p=p)


def _turned_sides(original: Any, before: Any, own: Any) -> Difference:
    return original(own, before)


def _no_permutation(original: Any, *sides: Any) -> float:
    return 0.0


def _always_sure(original: Any, *args: Any) -> bool:
    return True


def _never_over(original: Any, budget: Any, before: Any, own: Any) -> Any:
    return replace(original(budget, before, own), allowed=1e18)


def _totals_alone(original: Any, budget: Any, before: Any, own: Any, names: Any) -> Any:
    return original(budget, replace(before, most=own.most), own, names)


BUGS = {
    "noise forgotten": _in_place(samples, "compute_difference", _noise_forgotten),
    "steps taken for samples": _in_place(significance, "run_welch_test", _steps_as_samples),
    "error not divided by the runs": _in_place(
        significance, "run_welch_test", _no_root_of_the_runs
    ),
    "sides turned round": _in_place(samples, "compute_difference", _turned_sides),
    "no permutation": _in_place(significance, "compute_permutation_p", _no_permutation),
    "budget not heeded": _in_place(judge, "build_sample", _never_over),
    "a pass without power": _in_place(judge, "_is_within_budget", _always_sure),
    "new kinds of calls not found": _in_place(judge, "_check_exact", _totals_alone),
}


QUICK = ("no permutation", "sides turned round")
SLOW_IN_TURN = (
    pytest.mark.slow, pytest.mark.in_turn("analyzer/regression", "analyzer/significance.py"),
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(bug, marks=() if bug in QUICK else SLOW_IN_TURN) for bug in BUGS]
)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(AssertionError):
        check_gate()


@pytest.mark.slow
def test_the_proposed_number_of_runs_decides_and_fewer_do_not() -> None:
    """Runs with known noise, as many as the check proposes for it: what it promises comes true."""
    noise, allowed = 0.05, 0.05
    needed = significance.count_runs_needed(noise, allowed)
    assert needed is not None
    dice = np.random.default_rng(SEED)

    def share(answer: str, n_runs: int, shift: float = 0.0, budget: float = allowed) -> float:
        # A regression is confirmed by permutations, which take longer.
        trials = 8 if shift else TRIALS
        rules = [parse_budget(f"exposed_comm:{100 * budget:.4f}%")]
        found = [
            judge.check_candidate(
                runs("own", "exposed_comm", 0.1 * (1 + shift + noise * dice.normal(size=n_runs))),
                runs("base", "exposed_comm", 0.1 * (1 + noise * dice.normal(size=n_runs))),
                rules,
            ).answer
            for _ in range(trials)
        ]
        return found.count(answer) / trials

    chance = 3.1 * (POWER * (1 - POWER) / TRIALS) ** 0.5
    assert abs(share("pass", needed) - POWER) <= chance + 0.05
    assert share("pass", needed // 2) < POWER - chance
    assert share("regressed", needed, shift=1.5 * allowed) >= 0.5
    decidable = significance.compute_decidable(noise, 5)
    assert abs(share("pass", 5, budget=decidable) - POWER) <= chance + 0.05


def test_an_undecided_check_says_what_would_decide() -> None:
    before, own = [0.10, 0.14, 0.12], [0.11, 0.15, 0.12]

    verdict = judge.check_candidate(
        runs("own", "exposed_comm", own),
        runs("base", "exposed_comm", before),
        [parse_budget("exposed_comm:1pt"), parse_budget("calls:exact")],
    )

    (times,) = (one for one in verdict.gated if one.metric == "exposed_comm")
    assert times.answer == "inconclusive"
    assert times.runs_needed == significance.count_runs_needed(
        significance.estimate_noise(before, own) or 0.0, 0.01
    )
    assert times.decidable == significance.compute_decidable(
        significance.estimate_noise(before, own) or 0.0, 3
    )
    assert verdict_screen.format_headline(verdict) == (
        "INCONCLUSIVE: calls within budget (exact); exposed_comm not decided by these runs"
    )


def test_a_baseline_proposes_a_budget_that_its_own_noise_can_decide() -> None:
    noisy = runs("base", "exposed_comm", [0.10, 0.14, 0.12, 0.09, 0.15])
    quiet = runs("base", "exposed_comm", [0.100, 0.101, 0.1, 0.1005, 0.0995])
    budgets = [parse_budget("calls:exact"), parse_budget("exposed_comm:10%,1pt")]

    assert [b.text for b in samples.propose_budgets(budgets, quiet)] == ["exact", "10%,1pt"]
    exact, proposed = samples.propose_budgets(budgets, noisy)
    assert exact == budgets[0]
    noise = significance.estimate_noise([0.10, 0.14, 0.12, 0.09, 0.15]) or 0.0
    assert significance.compute_decidable(noise, 5) <= proposed.amount
    assert proposed.amount < significance.compute_decidable(noise, 5) + 0.001
