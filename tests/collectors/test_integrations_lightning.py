"""Lightning fits on two real ranks, with both package names."""

from pathlib import Path

import pytest
from integrations.ranks import analyzed, calls_by_step, full_steps, needs, train

from stepsplit.collectors.run_spec import Mesh, Training, from_json

pytestmark = [pytest.mark.slow, pytest.mark.in_turn("collectors")]


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_the_callback_records_steps_of_accumulated_batches(namespace: str, tmp_path: Path) -> None:
    needs(namespace.partition(".")[0])
    folder = tmp_path / "recorded"

    recorded = train("train_lightning.py", folder, namespace)
    plain = train("train_lightning.py", folder, namespace, recorded=False)

    assert recorded.losses == plain.losses
    report = analyzed(folder).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert all(calls_by_step(folder, rank, "all_reduce").values())
    assert "ddp" in [strategy.name for strategy in report.run.strategies]
    spec = from_json((folder / "run.json").read_bytes())
    assert spec.mesh == Mesh.of({"dp": 2})
    assert spec.model is not None and spec.model.parameters == 6792
    assert spec.training == Training(
        micro_batch=4,
        global_batch=16,
        microbatches=2,
        dtype="fp32",
        optimizer="adam",
        framework="ddp",
    )
