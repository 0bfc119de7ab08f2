"""What holds for the findings of every report: they contradict neither each other nor the split."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from cuda_simulator.planted import CLEAN, plant
from cuda_simulator.simulate import simulate as simulate_cuda
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.planted import planted, scenario_of
from simulator.style import Style
from support.builders import CpuTrace
from support.ground_truth import SEED
from support.required import shared_repro

from stepsplit.analyzer import Report, analyze
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.causes import CAUSES

SAMPLES = sorted(
    path for path in (Path(__file__).parents[2] / "sample_traces").iterdir() if path.is_dir()
)
OF_PEERS = {cause.code for cause in CAUSES if cause.of_peers}
MARGIN = 1.01


def check(report: Report) -> None:
    """No rank is beyond its peers together with all of them, and nothing saves more than there is
    of its bucket on the rank that has most."""
    blamed: dict[str, set[int]] = defaultdict(set)
    for one in report.findings:
        if one.code in OF_PEERS:
            blamed[one.code] |= set(one.ranks)
    everyone = set(report.run.ranks)
    assert [code for code, ranks in blamed.items() if ranks >= everyone] == []
    of_rank: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    is_any_full = any(step.kind == "full" for step in report.steps)
    for step in report.steps:
        if step.kind == "full" or not is_any_full:
            of_rank[step.rank].append(step.split.buckets_ns)
    most = {
        name: max(sum(row[i] for row in rows) / len(rows) for rows in of_rank.values())
        for i, name in enumerate(BUCKETS)
    }
    longest = max(sum(map(sum, rows)) / len(rows) for rows in of_rank.values())
    for one in report.findings:
        if one.code == "other_steps":
            # Of steps that are not of the headline: at most what they take of the mean step.
            own = [row.step_ns for row in report.steps if row.step in one.steps]
            every = [row for row in report.steps if row.kind != "partial"]
            assert one.gain_ns <= sum(own) / len(every)
            continue
        # Without a call no rank waits for it either, and a wait has its cause elsewhere.
        waits = one.bucket in ("collective", "p2p", "skew", "bubble")
        bound = longest if waits else most[one.bucket]
        assert one.gain_ns <= MARGIN * bound, (one.code, one.bucket, one.gain_ns, bound)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_the_samples(sample: Path) -> None:
    check(analyze(sample))


@pytest.mark.parametrize("name", ["slow_rank fsdp", "allocation tp_dp", "nothing fsdp"])
def test_simulated_jobs(name: str, tmp_path: Path) -> None:
    scenario = scenario_of(planted(name, SEED), SEED)
    write_recording(scenario, simulate(scenario.job, Noise.of(SEED)), tmp_path, Style())
    check(analyze(tmp_path))


@pytest.mark.parametrize(
    ("layout", "cause"), [("tp8_dp2", "host_stall"), ("fsdp8", "two_slow_ranks"), ("fsdp8", CLEAN)]
)
def test_jobs_of_the_other_simulator(layout: str, cause: str, tmp_path: Path) -> None:
    found = plant(layout, cause, 1)
    simulate_cuda(found.job).write(tmp_path, found.style)
    check(analyze(tmp_path))


def pair(folder: Path, *idle_us: tuple[int, int]) -> Report:
    """Two ranks that idle so long in each step between 300 us of compute and an all_reduce."""
    for rank in (0, 1):
        trace, at = CpuTrace(rank, 2, [("0", "mesh_dp_replicate", [0, 1])]), 0
        for step, idle in enumerate(idle_us):
            called, end = at + 300 + idle[rank], at + 400 + max(idle)
            trace.step(step, at, end + 200).op("aten::mm", at, at + 100)
            trace.op("aten::mm", called - 200, called)
            trace.all_reduce(called, called, end, group="0", seq=step, tid=7)
            trace.annotation("wait", called + 1, end).op("aten::mm", end, end + 200)
            at = end + 200
        trace.write(folder)
    return analyze(folder)


def list_late(report: Report) -> list[tuple[int, ...]]:
    return [one.ranks for one in report.findings if one.code == "host_stall"]


@pytest.mark.parametrize(
    ("idle_us", "late"),
    [
        (((20, 90), (30, 100), (10, 95), (25, 80)), [(1,)]),
        (((20, 90), (90, 30), (10, 60), (70, 25)), []),  # in turn
        (((20, 25), (25, 20), (20, 600), (24, 22)), [(1,)]),  # in one step
        (((20, 90), (90, 80), (10, 95), (65, 20)), []),  # within the spread
        (((20, 90),), [(1,)]),
    ],
)
def test_a_rank_is_late_if_it_exceeds_its_spread(
    idle_us: tuple[tuple[int, int], ...], late: list[tuple[int, ...]], tmp_path: Path
) -> None:
    report = pair(tmp_path, *idle_us)
    assert list_late(report) == late
    check(report)


def test_a_finding_from_a_single_step_says_so(tmp_path: Path) -> None:
    (found,) = [one for one in pair(tmp_path, (20, 90)).findings if one.code == "host_stall"]
    assert found.message.endswith("; from a single step")


def test_two_single_steps_of_a_symmetric_job() -> None:
    report = analyze(shared_repro("users3/noise_findings") / "ownprof_rec")
    check(report)
    assert all(
        one.message.endswith("; from a single step")
        for one in report.findings
        if one.code in OF_PEERS
    )


@pytest.mark.parametrize(
    "name",
    ["find_unused/red", "periodic_step_dropped/red", "post_backward_allreduce/red",
     "recompile/red", "dualpipe_cp/rec2"],
)  # fmt: skip
def test_recorded_jobs(name: str) -> None:
    check(analyze(shared_repro("users3") / name))
