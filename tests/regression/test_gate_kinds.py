"""A check of runs whose steps are of several kinds: each is compared with its like."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.gate_builders import CALLS, MS, check, run

from stepsplit.analyzer import CheckResult
from stepsplit.analyzer.regression.metrics import KindMetrics, RunMetrics
from stepsplit.analyzer.split.step_kinds import KindCalls

USUAL = (KindCalls("dp_replicate", "all_reduce", 16), KindCalls("tp", "all_reduce", 64))


def evaluating(
    name: str, step: float, other: float, *, steps: int = 8, every: int = 4, gathers: int = 4
) -> RunMetrics:
    """A run in ms, of whose steps every so many-th evaluates and gathers a metric."""
    count = steps // every
    calls = (*USUAL, KindCalls("dp_replicate", "all_gather", gathers))
    buckets = tuple(int(other * MS) if place == 0 else 0 for place in range(7))
    kinds = (
        KindMetrics("headline", "", steps - count, None, "", step * MS, buckets, USUAL, 100.0),
        KindMetrics(
            "other 1", f"every {every}th step", count, every, "1 all_gather", other * MS, buckets,
            calls, 150.0,
        ),
    )  # fmt: skip
    mean = ((steps - count) * step + count * other) / steps
    made = run(name, {"step": step * MS, "mean_step": mean * MS}, calls=CALLS)
    return replace(made, kinds=kinds, kernels=100.0, complete=steps)


NOISE = (0.0, 0.3, -0.2)
BASE = [evaluating(f"base{i}", 100 + ms, 180 + ms) for i, ms in enumerate(NOISE)]


def decide(candidate: list[RunMetrics], *rules: str) -> CheckResult:
    return check(candidate, BASE, *rules)


def answers(result: CheckResult) -> dict[str, str]:
    return {one.metric: one.answer for one in result.gated}


@pytest.mark.parametrize("steps", [8, 12, 16])
def test_equal_runs_pass_with_any_number_of_steps(steps: int) -> None:
    own = [evaluating(f"own{i}", 100.1 + m, 180.1 + m, steps=steps) for i, m in enumerate(NOISE)]
    result = decide(own, "step:5%", "mean_step:5%")
    assert answers(result) == {"step": "pass", "mean_step": "pass", "step.other": "pass"}


def test_a_slower_evaluation_is_named_as_that_kind() -> None:
    own = [evaluating(f"own{i}", 100.1 + ms, 240 + ms) for i, ms in enumerate(NOISE)]
    result = decide(own, "step:5%")
    assert result.answer == "regressed"
    assert answers(result) == {"step": "pass", "step.other": "regressed"}
    assert result.gated[1].kind == "every 4th step (1 all_gather more)"
    assert [one.message for one in result.causes] == [
        "every 4th step (1 all_gather more): compute +60.0 ms per such step and rank"
    ]


def test_the_mean_over_all_steps_needs_equal_mixes() -> None:
    own = [evaluating(f"own{i}", 100 + m, 180 + m, every=2) for i, m in enumerate(NOISE)]
    result = decide(own, "mean_step:5%")
    assert result.answer == "inconclusive"
    assert result.gated[0].note == (
        "the mix of kinds of steps differs: other than the headline are 2 of 8 in base0, 4 of 8 in"
        " own0"
    )


def test_a_candidate_that_recorded_mostly_evaluations_raises_no_alarm() -> None:
    """Its most frequent steps are the kind that evaluates."""
    more = replace(CALLS[0], axis="dp_replicate", op="all_gather", calls=4)
    own = [
        replace(run(f"own{i}", {"step": (180 + ms) * MS}, calls=(*CALLS, more)), kernels=150.0)
        for i, ms in enumerate(NOISE)
    ]
    result = decide(own, "step:5%", "calls:exact")
    assert set(answers(result).values()) == {"inconclusive"}
    assert result.gated[0].note.startswith("most steps of own0 are of the kind that base0 has as")
