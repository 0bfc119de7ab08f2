"""The grid that a schedule would have with equal stages and free links."""

from __future__ import annotations

import numpy as np
import pytest
from support.report_builders import analysis

from stepsplit.analyzer import Boxes
from stepsplit.analyzer.diagnose.what_if import build_ideal_grid
from stepsplit.analyzer.model.ideal_bubble import compute_ideal_bubble_fraction
from stepsplit.dashboard.figures.run import select_pipeline


def grid(stages: int, microbatches: int, forward: int, backward: int, ranks: int = 0) -> Boxes:
    """Boxes that are only measured: when they ran does not matter here."""
    phases = ((0, forward), (1, backward))
    rows = [
        (stage % (ranks or stages), 7, stage, m, phase, 1000 * m + 100 * phase, took)
        for stage in range(stages) for m in range(microbatches) for phase, took in phases
    ]  # fmt: skip
    table = np.array(rows, dtype=np.int64)
    whole = (table[:, i].astype(np.int32) for i in range(4))
    return Boxes(*whole, table[:, 4].astype(np.uint8), table[:, 5], table[:, 6])


def test_1f1b_on_two_stages_with_three_microbatches() -> None:
    found = build_ideal_grid(grid(2, 3, 10, 20), "1f1b", 3)
    assert found is not None
    own = found.stage == 0
    order = list(zip(found.phase[own].tolist(), found.microbatch[own].tolist(),
                     found.start_ns[own].tolist(), strict=True))  # fmt: skip
    assert order == [(0, 0, 0), (0, 1, 10), (1, 0, 40), (0, 2, 60), (1, 1, 70), (1, 2, 100)]


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "chunks"),
    [("gpipe", 4, 4, 1), ("1f1b", 4, 4, 1), ("interleaved", 8, 4, 2)],
)
def test_its_holes_are_the_ideal_bubble(
    schedule: str, stages: int, ranks: int, chunks: int
) -> None:
    found = build_ideal_grid(grid(stages, 8, 10, 20, ranks), schedule, 8)
    assert found is not None
    window = int((found.start_ns + found.dur_ns).max())
    holes = 1 - found.dur_ns.sum() / (window * ranks)
    assert holes == pytest.approx(
        compute_ideal_bubble_fraction(schedule, ranks, 8, chunks), abs=1e-3
    )


def test_a_schedule_that_is_not_modelled_has_no_ideal() -> None:
    measured = grid(2, 3, 10, 20)
    assert build_ideal_grid(measured, None, 3) is None
    assert build_ideal_grid(measured, "of my own", 3) is None
    assert build_ideal_grid(measured, "dualpipe", 3) is None


def test_one_pipeline_is_the_lowest_rank_of_each_stage() -> None:
    boxes = select_pipeline(analysis().tables.boxes, 5)
    assert sorted(set(zip(boxes.stage.tolist(), boxes.rank.tolist(), strict=True))) == [
        (0, 0),
        (1, 2),
    ]
    assert set(boxes.step.tolist()) == {5}
