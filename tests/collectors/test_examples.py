"""Every parallelism strategy in a real run: recorded, recognized, and consistent with the model."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support.example_runs import JOBS, SEEN, Example, Outcome, outcome, record_example  # noqa: E402
from support.required import absent  # noqa: E402

from stepsplit.analyzer import Report, analyze  # noqa: E402

pytestmark = pytest.mark.slow

RECORDINGS = 4
"""Of an example at most: one in four of some was undecided here."""


@pytest.mark.in_turn("examples")
@pytest.mark.parametrize("example", JOBS, ids=lambda example: example.name)
def test_each_strategy_is_recorded_recognized_and_counted(example: Example, tmp_path: Path) -> None:
    if "deepspeed" in example.script:
        _need_deepspeed()
    folder, report = record_until_decided(example, tmp_path)
    found = outcome(example, folder)

    assert report.run.ranks == tuple(range(example.ranks))
    full = [step for step in report.steps if step.kind == "full"]
    assert {step.rank for step in full} == set(range(example.ranks))
    assert all(step.split.step_ns == step.step_ns for step in report.steps)
    assert (found.strategies, found.mesh) == SEEN[example.name]
    assert different(found) == []


def record_until_decided(example: Example, out: Path) -> tuple[Path, Report]:
    """A recording and its report. Where a worker of gloo was late, a recording without shapes does
    not tell which of two calls it carried out, as its warning says: then another one is made."""
    for attempt in range(RECORDINGS):
        folder = out / str(attempt)
        record_example(example, folder)
        report = analyze(folder)
        if "gloo_order_unknown" not in {warning.code for warning in report.warnings}:
            break
    return folder, report


def different(found: Outcome) -> list[object]:
    return [row for row in found.messages.rows if not row.equal]


def _need_deepspeed() -> None:
    try:
        import deepspeed  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        absent("integrations", "deepspeed is not installed")
