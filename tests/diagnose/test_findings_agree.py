"""What holds for the findings of every report: they contradict neither each other nor the split."""

from __future__ import annotations

import gzip
import io
import json
import re
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from cuda_simulator.planted import CLEAN, LAYOUTS, plant
from cuda_simulator.simulate import simulate as simulate_cuda
from plotly.utils import PlotlyJSONEncoder
from rich.console import Console
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.noise import Noise
from simulator.planted import PLANTED, planted, scenario_of
from simulator.style import Style
from support.builders import CpuTrace
from support.ground_truth import SEED
from support.page_text import read_export
from support.required import shared_repro
from support.samples import SAMPLES, read_golden

from stepsplit.analyzer import Report, analyze, units
from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.diagnose.causes import CAUSES
from stepsplit.analyzer.report.headline import ON_AXES, describe_lacks, round_parts
from stepsplit.analyzer.report.report import SETTLES
from stepsplit.analyzer.report.step_rows import list_full_steps, select_full_steps
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.overview import build_overview
from stepsplit.dashboard.reporters.terminal import build_report_screen
from stepsplit.dashboard.web.html_export import export_html

NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
OF_PEERS = {cause.code for cause in CAUSES if cause.of_peers}
MARGIN = 1.01
SINGLE_STEP = re.compile(r"; from a single step$|\bstep \d+\b|\b1 of \d+ steps\b")
SLOW_IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("analyzer/diagnose", "analyzer/split"))


def check(report: Report) -> None:
    """One report says one thing: findings, blame, path, steps, axes, screen and page agree."""
    check_findings(report)
    check_stages(report)
    check_blame(report)
    check_sums(report)
    check_text(report)


def check_stages(report: Report) -> None:
    """The bubble of a pipeline lies between those of its stages, and its ideal not above it."""
    pipeline = report.pipeline
    if pipeline is None:
        return
    of_stages = [stage.bubble_fraction for stage in pipeline.stages]
    assert min(of_stages) / MARGIN <= pipeline.bubble_fraction <= max(of_stages) * MARGIN
    assert (pipeline.ideal_bubble_fraction or 0) <= pipeline.bubble_fraction


def check_findings(report: Report) -> None:
    """No rank is beyond its peers together with all of them, and nothing saves more than there is
    of its bucket on the rank that has most. What a finding names exists."""
    blamed: dict[str, set[int]] = defaultdict(set)
    for one in report.findings:
        if one.code in OF_PEERS:
            blamed[one.code] |= set(one.ranks)
    everyone = set(report.run.ranks)
    assert [code for code, ranks in blamed.items() if ranks >= everyone] == []
    of_rank: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for step in select_full_steps(report.steps):
        of_rank[step.rank].append(step.split.buckets_ns)
    most = {
        name: max(sum(row[i] for row in rows) / len(rows) for rows in of_rank.values())
        for i, name in enumerate(BUCKETS)
    }
    longest = max(sum(map(sum, rows)) / len(rows) for rows in of_rank.values())
    numbers = set(list_full_steps(report.steps))
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
        assert set(one.ranks) <= everyone and set(one.steps) <= numbers, one
        assert {event.rank for event in one.events} <= everyone, one
        # Those of the comparison with a model have no step of their own.
        assert one.basis is not None, one
        assert 0 < one.basis.steps <= one.basis.of_steps == len(numbers), one.basis
        assert set(one.basis.would_settle) <= set(SETTLES)
        if len(numbers) == 1:
            assert "more_steps" in one.basis.would_settle, one


def check_blame(report: Report) -> None:
    """All waiting is blamed once, on what exists; and who is named for what others wait for most is
    not found to be variation."""
    full = select_full_steps(report.steps)
    numbers = set(list_full_steps(report.steps))
    for row in report.blame:
        assert row.rank is None or 0 <= row.rank < report.run.world_size, row
        assert set(row.steps) <= numbers, row
        assert row.caused_ns == row.caused_skew_ns + row.caused_bubble_ns, row
    waited_ns = sum(step.skew_ns + step.bubble_ns for step in full)
    assert waited_ns == 0 or report.blame
    of_rank: Counter[int | None] = Counter()
    for row in report.blame:
        of_rank[row.rank] += row.caused_ns
    count = max(len(full), 1)
    for one in report.findings:
        if one.code in OF_PEERS and len(one.ranks) == 1 and waited_ns:
            caused_ns = of_rank[one.ranks[0]] / count
            # Of what it saves, at least a part is what others wait for, if they do.
            least_ns = 0.2 * min(one.gain_ns, waited_ns / count)
            assert caused_ns >= least_ns, (one.message, report.blame[:4])


def check_sums(report: Report) -> None:
    """Steps, axes and summary add up; a path is as long as its step; no ideal is worse than what
    was measured."""
    by_row: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    for row in report.exposed:
        for bucket in ON_AXES:
            by_row[row.rank, row.step][bucket] += getattr(row, f"{bucket}_ns")
    for step in report.steps:
        for bucket in ON_AXES:
            assert by_row[step.rank, step.step][bucket] == getattr(step, f"{bucket}_ns"), step
    summary = report.summary
    assert summary is not None
    assert sum(one.mean_ns for one in summary.buckets) == summary.step_ns
    for one in summary.buckets:
        assert not one.by_axis or sum(axis.ns for axis in one.by_axis) == one.mean_ns, one
        assert one.worst_rank in report.run.ranks
    path = Counter[int]()
    for part in report.critical_path:
        path[part.step] += part.ns
        assert part.rank in report.run.ranks
    assert dict(path) == {one.step: one.end_ns - one.start_ns for one in report.path_steps}
    for slow in report.slow_steps:
        assert slow.rank in report.run.ranks and slow.step in {one.step for one in report.steps}
    if report.pipeline is not None and report.pipeline.ideal_bubble_fraction is not None:
        assert report.pipeline.ideal_bubble_fraction <= report.pipeline.bubble_fraction


def check_text(report: Report) -> None:
    """Screen, page and export say the same, each finding with its saving, and what is missing
    first."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(build_report_screen(report))
    screen = " ".join(console.export_text().split())
    page = json.dumps(build_overview(View("run", report, None)), cls=PlotlyJSONEncoder)
    texts = re.findall(r'"children": "((?:[^"\\]|\\.)*)"', page)
    page = " ".join(json.loads(f'"{one}"') for one in texts)
    export = read_export(export_html(View("run", report, None)))
    assert report.summary is not None
    unit_ns = units.choose_part_unit_ns(report.summary.step_ns)
    (step,) = round_parts([report.summary.step_ns], unit_ns)
    lacks = describe_lacks(report.summary.lacks)
    for text in (screen, page, export):
        assert units.format_parts(step, unit_ns) in text
        assert lacks in text
        for one in report.findings:
            assert " ".join(one.message.split()) in " ".join(text.split()), one.message
            assert units.format_milliseconds(one.gain_ns) in text
        assert "nan" not in text.lower().split()
        assert not re.search(r"\d%", text), text
    if not report.collectives:
        assert "of transfer" not in screen


@pytest.mark.parametrize("name", NAMES)
def test_the_samples(name: str) -> None:
    check(read_golden(name))


@pytest.mark.parametrize("name", ["slow_rank fsdp", "allocation tp_dp", "nothing fsdp"])
def test_simulated_jobs(name: str, tmp_path: Path) -> None:
    scenario = scenario_of(planted(name, SEED), SEED)
    write_recording(scenario, simulate(scenario.job, Noise.of(SEED)), tmp_path, Style())
    check(analyze(tmp_path))


@pytest.mark.parametrize(
    ("layout", "cause"),
    [
        pytest.param("tp8_dp2", "host_stall", marks=SLOW_IN_TURN),
        ("fsdp8", "two_slow_ranks"),
        ("fsdp8", CLEAN),
    ],
)
def test_jobs_of_the_other_simulator(layout: str, cause: str, tmp_path: Path) -> None:
    found = plant(layout, cause, 1)
    simulate_cuda(found.job).write(tmp_path, found.style)
    check(analyze(tmp_path))


MANY = [
    *(("tests/simulator", name) for name in PLANTED),
    *((layout, cause) for layout in LAYOUTS for cause in (CLEAN, "host_stall", "slow_rank_1.1")),
]


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/diagnose")
@pytest.mark.parametrize(("layout", "name"), MANY)
def test_many_simulated_jobs(layout: str, name: str, tmp_path: Path) -> None:
    if layout in LAYOUTS:
        found = plant(layout, name, 1 + SEED % 6)
        simulate_cuda(found.job).write(tmp_path, found.style)
    else:
        scenario = scenario_of(planted(name, SEED), SEED)
        write_recording(scenario, simulate(scenario.job, Noise.of(SEED)), tmp_path, Style())
    check(analyze(tmp_path))


# What a recording lacks comes first, and nothing is found in time without data.


def damage(sample: str, folder: Path, rank: int, share: float) -> Report:
    """A sample, the file of one rank cut after a share of its text; 0: without the file."""
    shutil.copytree(SAMPLES / sample, folder, dirs_exist_ok=True)
    (folder / "report.json").unlink()
    file = folder / f"rank{rank}_trace.json.gz"
    text = gzip.decompress(file.read_bytes())
    file.unlink()
    if share:
        file.write_bytes(gzip.compress(text[: int(share * len(text))], 1))
    return analyze(folder)


@pytest.mark.parametrize(
    "share", [0, 0.6, *(pytest.param(share, marks=SLOW_IN_TURN) for share in (0.3, 0.9, 0.97))]
)
@pytest.mark.parametrize(
    ("sample", "rank"), [("h100_fsdp2", 0), ("h100_fsdp2", 1), ("dp4", 1), ("tp2_pp2", 0)]
)
def test_a_rank_without_all_its_events_is_not_blamed_for_what_is_missing(
    sample: str, rank: int, share: float, tmp_path: Path
) -> None:
    """Its idle time beyond that of its peers, and theirs beyond its, is no more than in the whole
    recording."""
    report = damage(sample, tmp_path, rank, share)
    check(report)
    assert report.summary is not None
    lacks = {row.lack: row.ranks for row in report.summary.lacks}
    assert rank in lacks.get("file truncated" if share else "ranks missing", ()) or lacks == {
        "no device events": (rank,)
    }
    assert describe_lacks(report.summary.lacks).startswith("incomplete recording: ")
    whole = analyze(SAMPLES / sample)
    known = {(one.code, one.ranks) for one in whole.findings}
    new = [one for one in report.findings if (one.code, one.ranks) not in known and one.ranks]
    assert new == []
    cut = {row.step for row in report.steps if row.rank == rank and row.kind == "full"}
    for row in report.blame:
        assert row.rank != rank or row.cause == "missing" or cut >= set(row.steps), row


def test_kernels_lost_within_steps_are_no_idle_time_to_blame(tmp_path: Path) -> None:
    """Every third kernel of rank 1 is not in its file: what it idles for is unknown."""
    shutil.copytree(SAMPLES / "h100_fsdp2", tmp_path, dirs_exist_ok=True)
    (tmp_path / "report.json").unlink()
    file = tmp_path / "rank1_trace.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    kernels = [one for one in trace["traceEvents"] if one.get("cat") == "kernel"]
    lost = {id(one) for one in kernels[::3]}
    trace["traceEvents"] = [one for one in trace["traceEvents"] if id(one) not in lost]
    file.write_bytes(gzip.compress(json.dumps(trace).encode(), 1))
    report = analyze(tmp_path)
    check(report)
    assert report.summary is not None
    assert [(row.lack, row.ranks) for row in report.summary.lacks] == [("kernels lost", (1,))]
    assert [one for one in report.findings if one.bucket == "idle" and one.ranks == (1,)] == []


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
        (((20, 90),), []),  # one step of a CPU run does not tell
    ],
)
def test_a_rank_is_late_if_it_exceeds_its_spread(
    idle_us: tuple[tuple[int, int], ...], late: list[tuple[int, ...]], tmp_path: Path
) -> None:
    report = pair(tmp_path, *idle_us)
    assert list_late(report) == late
    check(report)


def test_a_finding_from_a_single_step_says_so(tmp_path: Path) -> None:
    """What one rank does beyond its peers is a note there, as it may be of another process."""
    report = pair(tmp_path, (20, 90))
    assert "host_bound" in {one.code for one in report.findings}
    assert all(SINGLE_STEP.search(one.message) for one in report.findings)
    (note,) = [one for one in report.warnings if one.code == "single_step"]
    assert note.message.startswith("rank 1 is host-bound")


def test_two_single_steps_of_a_symmetric_job() -> None:
    report = analyze(shared_repro("users3/noise_findings") / "ownprof_rec")
    check(report)
    assert all(SINGLE_STEP.search(one.message) for one in report.findings)


@pytest.mark.parametrize(
    "name",
    ["find_unused/red", "periodic_step_dropped/red", "post_backward_allreduce/red",
     "recompile/red", "dualpipe_cp/rec2"],
)  # fmt: skip
def test_recorded_jobs(name: str) -> None:
    check(analyze(shared_repro("users3") / name))
