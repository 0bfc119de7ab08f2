"""Small errors of the times move no bucket and no finding.

A microsecond must not decide whether milliseconds are communication or idle time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cuda_simulator.kineto import TraceStyle, write_traces
from cuda_simulator.planted import plant
from cuda_simulator.simulate import simulate as simulate_cuda
from fuzz.perturbed import (
    Perturb,
    move_ends,
    read_trace,
    round_times,
    start_kernels_after,
    write_perturbed,
)
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.scenarios import SCENARIOS
from support.ground_truth import SEED
from support.required import SHARED_TRACES, absent
from support.samples import SAMPLES, analyze_recording

from stepsplit.analyzer import Report, analyze
from stepsplit.analyzer.buckets import BUCKETS

MOST_MOVED = 0.002
"""The part of a step by which a bucket may move, outside of ambiguous gaps."""
SHARED = SHARED_TRACES.parent
IN_TURN = pytest.mark.in_turn("analyzer/readers/kineto", "analyzer/split")
SLOW_IN_TURN = (pytest.mark.slow, IN_TURN)
QUICK = {"built_zero_bubble", "pp2_m2", "sample_traces/built_zero_bubble"}
PERTURBED = [
    pytest.param(move_ends, id="ends moved by up to 1 us"),
    pytest.param(round_times, id="times in whole us"),
]
JOBS = (
    "tp", "ddp", "ddp_runs_ahead", "ddp_host_stall", "fsdp_four_hosts", "cp_ring", "ep_two_streams",
    "pp_two_hosts", "pp_slow_stage", "pp_dualpipe", "tp_pp_dp", "tp_pp_dp_slow_rank",
)  # fmt: skip
RECORDED = [
    *(f"repro/causes/{job}/{which}" for job in (
        "dp16_slow_rank", "fsdp8_slow_rank", "tp2_pp2_dp4_slow_rank", "tp4_pp2_dp2_slow_link",
    ) for which in ("with", "without")),
    "repro/recorded/f_slowfwd", "repro/recorded/f_loader", "traces/kineto_megatron_tp2_v100",
]  # fmt: skip


def mark(names: Iterable[str]) -> list[object]:
    return [pytest.param(n, marks=() if n in QUICK else SLOW_IN_TURN) for n in names]


def findings_of(report: Report) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.code, finding.ranks) for finding in report.findings]


def assert_alike(one: Report, other: Report, more_ns: Callable[[int], float] = lambda _: 0) -> None:
    """No bucket of any step differs by more than the limit and more_ns of its rank, outside of
    ambiguous gaps; the findings are the same."""
    assert [(row.rank, row.step, row.kind) for row in one.steps] == [
        (row.rank, row.step, row.kind) for row in other.steps
    ]
    for row, moved in zip(one.steps, other.steps, strict=True):
        limit = MOST_MOVED * row.step_ns + more_ns(row.rank)
        limit += max(row.ambiguous_ns, moved.ambiguous_ns)
        for bucket in BUCKETS:
            by_ns = getattr(moved, f"{bucket}_ns") - getattr(row, f"{bucket}_ns")
            assert abs(by_ns) <= limit, f"rank {row.rank} step {row.step}: {bucket} {by_ns} ns"
    assert findings_of(one) == findings_of(other)


def shared(name: str) -> Path:
    if not (SHARED / name).exists():
        absent("traces", f"{name} is not next to the project")
    return SHARED / name


@pytest.mark.parametrize("perturb", PERTURBED)
@pytest.mark.parametrize("name", mark(sorted(path.name for path in SAMPLES.iterdir())))
def test_small_errors_do_not_move_the_buckets_of_a_sample(
    name: str, perturb: Perturb, tmp_path: Path
) -> None:
    sample = SAMPLES / name
    assert_alike(
        analyze_recording(sample), analyze(write_perturbed(sample, tmp_path, perturb, SEED))
    )


@pytest.mark.slow
@IN_TURN
@pytest.mark.seeded
@pytest.mark.parametrize("name", JOBS)
def test_small_errors_do_not_move_the_buckets_of_a_simulated_job(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name](SEED)
    (tmp_path / "exact").mkdir()
    write_recording(scenario, simulate(scenario.job, Noise.of(SEED)), tmp_path / "exact")
    exact = analyze(tmp_path / "exact")
    for i, perturb in enumerate((move_ends, round_times)):
        folder = write_perturbed(tmp_path / "exact", tmp_path / str(i), perturb, SEED)
        assert_alike(exact, analyze(folder))


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("perturb", PERTURBED)
@pytest.mark.parametrize("name", RECORDED)
def test_small_errors_do_not_move_the_buckets_of_recordings_of_others(
    name: str, perturb: Perturb, tmp_path: Path
) -> None:
    folder = shared(name)
    assert_alike(
        analyze_recording(folder), analyze(write_perturbed(folder, tmp_path, perturb, SEED))
    )


# Kernels that overlap with the communication that they waited for, or touch it.


def count_calls(folder: Path) -> Counter[int]:
    """The communication kernels of each rank."""
    counts: Counter[int] = Counter()
    for file in folder.iterdir():
        if (body := read_trace(file)) is not None:
            rank = body["distributedInfo"]["rank"]
            counts[rank] = sum("nccl" in event["name"] for event in body["traceEvents"])
    return counts


@pytest.mark.parametrize(
    "name",
    mark([f"sample_traces/{path.name}" for path in sorted(SAMPLES.glob("built_*"))])
    + mark(f"shared/{name}" for name in RECORDED if "causes" in name),
)
def test_kernels_that_overlap_by_2_us_split_like_kernels_2_us_apart(
    name: str, tmp_path: Path
) -> None:
    """Each bucket differs by the microseconds that were moved."""
    recording = SAMPLES / name.partition("/")[2]
    if name.startswith("shared/"):
        recording = shared(name.partition("/")[2])
    apart_us, calls = 2.0, count_calls(recording)
    exact = analyze_recording(recording)
    steps = len({row.step for row in exact.steps})
    apart = analyze(write_perturbed(recording, tmp_path / "apart", start_kernels_after(apart_us)))
    for gap_us in (0.0, -2.0):
        folder = write_perturbed(recording, tmp_path / str(gap_us), start_kernels_after(gap_us))
        moved_ns = 1000 * (apart_us - gap_us)

        def moves(rank: int, of_call: float = moved_ns) -> float:
            return calls[rank] / steps * of_call

        assert_alike(apart, analyze(folder), moves)


# What the trace records of waits changes no answer.


@pytest.mark.slow
@IN_TURN
@pytest.mark.parametrize("layout", ["tp8_dp2", "fsdp8", "cp4_dp4_ring"])
def test_recorded_waits_agree_with_the_split_without_them(layout: str, tmp_path: Path) -> None:
    job = plant(layout, "slow_rank_1.3", 1).job
    timelines = simulate_cuda(job).timelines
    reports = []
    for events in ("none", "runtime", "cuda_sync"):
        write_traces(job, timelines, tmp_path / events, TraceStyle(events=events))
        reports.append(analyze(tmp_path / events))
    for report in reports[1:]:
        assert_alike(reports[0], report)
