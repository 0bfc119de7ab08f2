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

from stepsplit.analyzer import UsageError, what_if

FEW, MORE = 8, 16


def build_scenario(schedule: str, stages: int, microbatches: int, boxes: bool) -> Scenario:
    """Stages whose gradients are also reduced over two replicas, which more microbatches do not
    make longer."""
    fleet = Fleet((("pp", stages), ("dp_replicate", 2)), (), "mesh", 1)
    work = Work(600_000, 1, activation_bytes=4_000_000, weight_bytes=400_000_000)
    how = Pipeline(schedule, microbatches, 2 if schedule == "interleaved" else 1, boxes)
    return Scenario(pipeline(fleet, work, 1, how), 1)


def measure_step_ns(run: Run) -> float:
    """The mean step of all ranks."""
    lengths = [row.end_ns - row.start_ns for row in truth_of(run).splits if not row.partial]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_a_step_of_twice_as_many_microbatches_is_known_within_two_percent(
    schedule: str, tmp_path: Path
) -> None:
    recorded = build_scenario(schedule, 4, FEW, boxes=True)
    run = simulate(recorded.job, Noise.of(1))
    write_recording(recorded, run, tmp_path, Style(run_json=False))
    (said,) = what_if(tmp_path, changes=[f"microbatches={MORE}"]).changes
    changed = simulate(build_scenario(schedule, 4, MORE, boxes=True).job, Noise.of(1))
    same_work_ns = measure_step_ns(changed) * FEW / MORE
    assert said.step_ns == pytest.approx(same_work_ns, rel=0.02)
    assert measure_step_ns(run) > 1.03 * same_work_ns, "the change is too small to be tested"


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
