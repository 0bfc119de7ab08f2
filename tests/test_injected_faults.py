"""A fault injected into other people's training code is the first bottleneck, at its rank."""

from pathlib import Path

import pytest
from injected_faults.jobs import list_missing, record
from injected_faults.trials import Repeat, Trial, read_trials
from support.required import absent

from stepsplit.analyzer import Finding

CASES = (
    ("transformers", "slow forward"),
    ("accelerate", "slow loader"),
    ("deepspeed", "extra all_reduce"),
    ("lightning", "uneven batch"),
    ("fsdp2", "small buckets"),
    ("pipelining", "slow loader"),
)
"""One fault of each framework that is installed; docs/injected_faults.md has all, with sizes."""
TRIES = 3


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.in_turn("tests/injected_faults")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("framework", "fault"), CASES)
def test_the_fault_is_the_first_finding(framework: str, fault: str, tmp_path: Path) -> None:
    """At its rank and without a false finding, in one of three trainings: the machine does other
    things, too."""
    if missing := list_missing(framework):
        absent("integrations", f"{', '.join(missing)} is not installed")
    for turn in range(TRIES):
        record(framework, fault, tmp_path / framework / f"{turn}")
        (trial,) = read_trials(tmp_path)
        last = trial.faulty[-1]
        if trial.is_named(last) and not trial.list_false(last):
            return
    pytest.fail(str([one.findings for one in trial.faulty]))


def test_a_saving_is_near_the_truth_and_others_are_false_if_runs_without_the_fault_lack_them() -> (
    None
):
    """The fault costs 0.3 s of 1 s. The run without it is host-bound, too, but has no straggler."""
    said = [finding("host_stall", 0.25, 1), finding("host_bound", 0.3), finding("slow_rank", 0.2)]
    with_fault = Repeat((1.0, 1.0), 1e9, tuple(said))
    without = Repeat((0.8, 0.6), 0.7e9, (finding("host_bound", 0.1),))
    trial = Trial("accelerate", "slow forward", (without,), (with_fault,))
    assert trial.truth_s == pytest.approx(0.3)
    assert trial.find_said(with_fault) == said[0]
    assert (trial.is_named(with_fault), trial.is_near(with_fault)) == (True, True)
    assert trial.list_false(with_fault) == [said[2]]
    at_rank_0 = Repeat((1.0, 1.0), 1e9, (finding("host_stall", 0.25, 0),))
    assert (trial.is_named(at_rank_0), trial.is_near(at_rank_0)) == (False, False)


def finding(code: str, gain_s: float, *ranks: int) -> Finding:
    return Finding(code, "idle", round(gain_s * 1e9), None, None, ranks, (), (), code)
