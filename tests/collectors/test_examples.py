"""Every parallelism strategy in a real run: recorded, recognized, and consistent with the model."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from example_runs import SEEN, Outcome, outcome, record_example  # noqa: E402
from jobs import EXAMPLES, Example  # type: ignore[import-not-found]  # noqa: E402
from required import absent  # noqa: E402

from stepsplit.analyzer import analyze  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.in_turn("examples")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_each_strategy_is_recorded_recognized_and_counted(example: Example, tmp_path: Path) -> None:
    if "deepspeed" in example.script:
        _need_deepspeed()
    record_example(example, tmp_path)
    report = analyze(tmp_path)
    found = outcome(example, tmp_path)

    assert report.run.ranks == tuple(range(example.ranks))
    full = [step for step in report.steps if step.kind == "full"]
    assert {step.rank for step in full} == set(range(example.ranks))
    assert all(step.split.step_ns == step.step_ns for step in report.steps)
    assert (found.strategies, found.mesh) == SEEN[example.name]
    assert different(found) == []


def different(found: Outcome) -> list[object]:
    return [row for row in found.messages.rows if not row.equal]


def _need_deepspeed() -> None:
    try:
        import deepspeed  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        absent("integrations", "deepspeed is not installed")
