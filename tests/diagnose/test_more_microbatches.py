"""The step of more microbatches by what-if, against the same simulated pipeline run with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator.engine import simulate
from simulator.kineto import write_recording
from simulator.layers import Work
from simulator.meshes import Fleet
from simulator.noise import Noise
from simulator.pipelines import pipeline
from simulator.plans import Pipeline
from simulator.program import Scenario
from simulator.ran import Run
from simulator.style import Style
from simulator.truth import truth_of

from stepsplit.analyzer import UsageError, analyze, what_if

FEW, MORE = 8, 16


def build_scenario(
    schedule: str,
    stages: int,
    microbatches: int,
    boxes: bool,
    layers: tuple[int, ...] = (),
    axis: str = "dp_replicate",
) -> Scenario:
    """Stages whose gradients are also reduced over two replicas, which more microbatches do not
    make longer, or whose attention passes keys around a ring of two ranks."""
    fleet = Fleet((("pp", stages), (axis, 2)), (), "mesh", 1)
    work = Work(600_000, 1, activation_bytes=4_000_000, weight_bytes=400_000_000)
    how = Pipeline(schedule, microbatches, 2 if schedule == "interleaved" else 1, boxes)
    return Scenario(pipeline(fleet, work, 1, how, layers), 1)


def measure_step_ns(run: Run) -> float:
    """The mean step of all ranks."""
    lengths = [row.end_ns - row.start_ns for row in truth_of(run).splits if not row.partial]
    return sum(lengths) / len(lengths)


def record(recorded: Scenario, folder: Path) -> Run:
    run = simulate(recorded.job, Noise.of(1))
    write_recording(recorded, run, folder, Style(run_json=False))
    return run


@pytest.mark.in_turn("analyzer/diagnose", "analyzer/split")
@pytest.mark.parametrize(
    ("schedule", "layers", "few", "more"),
    [
        *((each, (), FEW, MORE)
          for each in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v")),
        ("1f1b", (), FEW, 4), ("zb-h1", (), FEW, 4), ("gpipe", (), FEW, 4), ("1f1b", (), 2, 8),
        ("zb-h1", (1, 1, 1, 2), FEW, 4), ("zb-h1", (1, 1, 1, 2), FEW, MORE),
        ("zb-h1", (3, 1, 1, 1), FEW, 4), ("1f1b", (3, 1, 1, 1), FEW, MORE),
    ],
)  # fmt: skip
def test_a_step_of_other_microbatches_is_known_within_two_percent(
    schedule: str, layers: tuple[int, ...], few: int, more: int, tmp_path: Path
) -> None:
    run = record(build_scenario(schedule, 4, few, True, layers), tmp_path)
    (said,) = what_if(tmp_path, changes=[f"microbatches={more}"]).changes
    changed = simulate(build_scenario(schedule, 4, more, True, layers).job, Noise.of(1))
    same_work_ns = measure_step_ns(changed) * few / more
    assert said.step_ns == pytest.approx(same_work_ns, rel=0.02)
    change = measure_step_ns(run) / same_work_ns
    assert max(change, 1 / change) > 1.03, "the change is too small to be tested"


@pytest.mark.parametrize("more", [2, 64])
def test_messages_of_a_ring_within_a_stage_are_part_of_its_passes(
    more: int, tmp_path: Path
) -> None:
    """They come with each microbatch; for some the rank waits, as nothing covers them."""
    record(build_scenario("1f1b", 4, FEW, True, axis="cp"), tmp_path)
    (said,) = what_if(tmp_path, changes=[f"microbatches={more}"]).changes
    changed = simulate(build_scenario("1f1b", 4, more, True, axis="cp").job, Noise.of(1))
    assert said.step_ns == pytest.approx(measure_step_ns(changed) * FEW / more, rel=0.02)


def test_the_finding_of_few_microbatches_gains_what_the_what_if_says(tmp_path: Path) -> None:
    record(build_scenario("zb-h1", 4, 4, boxes=True), tmp_path)
    (finding,) = (one for one in analyze(tmp_path).findings if one.code == "few_microbatches")
    (said,) = what_if(tmp_path, changes=["microbatches=8"]).changes
    assert finding.gain_ns == said.gain_ns


@pytest.mark.parametrize("schedule", ["1f1b", "none-such"])
def test_a_schedule_that_is_not_known_exactly_is_not_changed(schedule: str, tmp_path: Path) -> None:
    """The word that is not understood is the recording's, whatever the user asks for."""
    record(build_scenario("zb-h1", 4, 2, boxes=True), tmp_path)
    with pytest.raises(UsageError, match="that of the recording is not known exactly"):
        what_if(tmp_path, changes=[f"schedule={schedule}"])


def test_a_schedule_that_is_not_known_exactly_has_no_other_microbatches(tmp_path: Path) -> None:
    """Two microbatches on four stages fit several zero-bubble schedules."""
    record(build_scenario("zb-h1", 4, 2, boxes=True), tmp_path)
    with pytest.raises(UsageError, match="the schedule is not known exactly"):
        what_if(tmp_path, changes=["microbatches=8"])


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_two_chunks_without_marks_are_not_taken_for_twice_the_microbatches(
    schedule: str, tmp_path: Path
) -> None:
    """Each microbatch crosses a link twice."""
    recorded = build_scenario(schedule, 4, FEW, boxes=False)
    run = simulate(recorded.job, Noise.of(1))
    write_recording(recorded, run, tmp_path, Style(run_json=False))
    with pytest.raises(UsageError, match="may have several chunks"):
        what_if(tmp_path, changes=[f"microbatches={MORE}"])
