"""The analyzer against the truth of simulated jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator.program import Collective, Compute, Messages, Scenario
from simulator.ran import RankRun
from simulator.recorded import recorded, whole_steps
from simulator.scenarios import SCENARIOS
from simulator.style import Style
from simulator.truth import TrueSplit, truth_of
from support.ground_truth import SEED, TOLERANCE, Miss, Trial, check, first_blamed, misses, trial

pytestmark = pytest.mark.seeded
QUICK = ("tp_slow_rank", "ddp_host_stall", "fsdp_four_hosts", "pp_1f1b")
IN_TURN = pytest.mark.in_turn("analyzer/readers/kineto", "analyzer/split")
EVERY = [
    pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow, IN_TURN))
    for name in SCENARIOS
]
SOME = ("tp", "ddp_two_hosts", "fsdp", "cp_ring", "ep", "pp_1f1b", "pp_gpipe", "tp_pp_dp_slow_rank")


@pytest.mark.parametrize("name", EVERY)
def test_every_bucket_every_clock_and_the_planted_cause(name: str, tmp_path: Path) -> None:
    check(trial(SCENARIOS[name](SEED), tmp_path))


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "style",
    [Style(nccl="2.17"), Style(numbered=False), Style(descriptions="none", run_json=False)],
    ids=["nccl 2.17", "no seq", "no mesh"],
)
def test_missing_trace_fields_change_no_bucket(name: str, style: Style, tmp_path: Path) -> None:
    check(trial(SCENARIOS[name](SEED), tmp_path, style))


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("name", SOME)
def test_lost_kernels_do_not_change_the_remaining_ones(name: str, tmp_path: Path) -> None:
    """Outside of ambiguous gaps, and of gaps of lost kernels in which a call ended by chance."""
    style = Style(missing="lost_events")
    found = trial(SCENARIOS[name](SEED), tmp_path, style)
    left = recorded(found.run, style, found.scenario.seed)
    unsure = {(row.rank, row.step): row.ambiguous_ns / row.step_ns for row in found.report.steps}
    splits = truth_of(left).splits
    for split in splits:
        unknown_ns = _sum_unknown_gaps(found.run.ranks[split.rank], left.ranks[split.rank], split)
        unsure[split.rank, split.step] += unknown_ns / (split.end_ns - split.start_ns)
    for miss in misses(found, splits):
        assert abs(miss.share) <= TOLERANCE + unsure[miss.rank, miss.step]


def _sum_unknown_gaps(whole: RankRun, left: RankRun, step: TrueSplit) -> int:
    """The time of the step's gaps that lost kernels leave and in which a call ended by chance.

    By the gap rule it held the gap up, if it ended at most 10 us after the next kernel's start.
    """
    kept = [ran for ran in left.device if isinstance(ran.work, Compute)]
    known = {(ran.work, ran.start_ns) for ran in kept}
    ends_ns = [ran.end_ns for ran in left.device if isinstance(ran.work, Collective | Messages)]
    gaps: set[tuple[int, int]] = set()
    for lost in whole.device:
        is_lost = isinstance(lost.work, Compute) and (lost.work, lost.start_ns) not in known
        if is_lost and step.start_ns <= lost.start_ns < step.end_ns:
            before = [ran.end_ns for ran in kept if ran.start_ns <= lost.start_ns]
            after = [ran.start_ns for ran in kept if ran.start_ns > lost.start_ns]
            gaps.add((max(before, default=step.start_ns), min(after, default=step.end_ns)))
    return sum(
        end_ns - start_ns
        for start_ns, end_ns in gaps
        if any(start_ns <= at_ns <= end_ns + 10_000 for at_ns in ends_ns)
    )


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("name", SOME)
def test_recordings_with_different_edges_match_their_common_calls(
    name: str, tmp_path: Path
) -> None:
    style = Style(missing="cut_windows")
    found = trial(SCENARIOS[name](SEED), tmp_path, style)
    whole = whole_steps(found.run, style, found.scenario.seed)
    wrong = [
        miss
        for miss in misses(found)
        if (miss.rank, miss.step) in whole and abs(miss.share) > TOLERANCE
    ]
    assert all(miss.estimated for miss in wrong), wrong[:3]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fsdp", "pp_1f1b") else (pytest.mark.slow, IN_TURN))
        for name in SOME
    ],
)
def test_kernels_without_arguments_are_matched_or_estimated(name: str, tmp_path: Path) -> None:
    """Without names a message is like a collective, and without stages bubble is like skew."""
    found = trial(SCENARIOS[name](SEED), tmp_path, Style(missing="no_args", run_json=False))
    for row, off in _together(found, ("collective", "p2p"), ("skew", "bubble")).items():
        assert off.estimated or abs(off.share) <= TOLERANCE, (row, off)


@pytest.mark.parametrize(
    "name",
    [
        "ddp_two_hosts",
        pytest.param("fsdp", marks=(pytest.mark.slow, IN_TURN)),
        pytest.param("tp_pp_dp_slow_rank", marks=(pytest.mark.slow, IN_TURN)),
    ],
)
def test_without_step_marks_the_bucket_shares_of_the_run_do_not_change(
    name: str, tmp_path: Path
) -> None:
    """Steps are then cut elsewhere, or not at all."""
    marked, unmarked = tmp_path / "marked", tmp_path / "unmarked"
    marked.mkdir()
    unmarked.mkdir()
    scenario = SCENARIOS[name](SEED)
    shares = [
        _shares(trial(scenario, folder, style))
        for folder, style in ((marked, Style()), (unmarked, Style(missing="no_steps")))
    ]
    assert shares[1] == pytest.approx(shares[0], abs=0.03)


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("name", [*SOME, "tp_slow_rank", "ddp_host_stall", "pp_slow_stage"])
def test_with_a_missing_rank_compute_is_exact_and_waits_are_close_or_estimated(
    name: str, tmp_path: Path
) -> None:
    scenario = SCENARIOS[name](SEED)
    gone = _anybody_but_the_cause(scenario)
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    part.mkdir()
    every = trial(scenario, whole)
    some = trial(scenario, part, ranks=[r for r in range(len(scenario.job.programs)) if r != gone])
    compute = {(row.rank, row.step): row.compute_ns for row in every.report.steps}
    for row in some.report.steps:
        assert row.compute_ns == compute[row.rank, row.step]
    for miss in misses(some):
        assert abs(miss.share) <= 0.03 or (miss.estimated and _alone(scenario, gone)), miss


def test_a_missing_rank_may_be_the_cause(tmp_path: Path) -> None:
    """With some other seeds the transfer of its only partner, or variation, comes first."""
    scenario = SCENARIOS["tp_pp_dp_slow_rank"](1)
    assert scenario.cause is not None
    others = [r for r in range(len(scenario.job.programs)) if r != scenario.cause.rank]
    found = trial(scenario, tmp_path, ranks=others)
    assert first_blamed(found.report) == (scenario.cause.rank, "missing")


def _anybody_but_the_cause(scenario: Scenario) -> int:
    ranks = range(len(scenario.job.programs))
    return next(r for r in reversed(ranks) if scenario.cause is None or r != scenario.cause.rank)


def _alone(scenario: Scenario, gone: int) -> bool:
    """Whether some group of the rank that is gone has but one member left."""
    return any(len(group.ranks) <= 2 for group in scenario.job.groups if gone in group.ranks)


def _together(found: Trial, *kinds: tuple[str, ...]) -> dict[tuple[int, int, str], Miss]:
    """The misses of buckets taken together, by (rank, step, first bucket)."""
    sums: dict[tuple[int, int, str], Miss] = {}
    for miss in misses(found):
        first = next((kind[0] for kind in kinds if miss.bucket in kind), miss.bucket)
        key = (miss.rank, miss.step, first)
        share = miss.share + (sums[key].share if key in sums else 0.0)
        sums[key] = Miss(miss.rank, miss.step, first, share, miss.estimated)
    return sums


def _shares(found: Trial) -> list[float]:
    """The share of each bucket in all steps of all ranks."""
    rows = found.report.steps
    total = sum(row.step_ns for row in rows)
    return [sum(row.split.buckets_ns[i] for row in rows) / total for i in range(7)]
