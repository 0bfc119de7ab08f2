"""Training loops with a DeepSpeed engine on two real ranks, at two ZeRO stages."""

from pathlib import Path

import pytest
from integrations.ranks import analyzed, calls_by_step, full_steps, needs, train
from support.turns import INTEGRATION

from stepsplit.collectors.formats.run_spec import Mesh, Training, from_json

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*INTEGRATION)]

AXES = {1: "dp_replicate", 3: "dp_shard"}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_is_an_engine_step_not_an_optimizer_step(stage: int, tmp_path: Path) -> None:
    needs("deepspeed")
    folder = tmp_path / "recorded"

    recorded = train("train_deepspeed.py", folder, str(stage))
    plain = train("train_deepspeed.py", folder, str(stage), recorded=False)

    assert recorded.losses == plain.losses
    report = analyzed(folder).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert all(calls_by_step(folder, rank, "all_gather").values())
    spec = from_json((folder / "run.json").read_bytes())
    assert spec.mesh == Mesh.of({AXES[stage]: 2})
    assert spec.model is not None and spec.model.parameters == 6792
    assert spec.training == Training(
        micro_batch=4,
        global_batch=16,
        microbatches=2,
        dtype="bf16",
        optimizer="adam",
        framework="deepspeed",
        zero=stage,
    )


def test_a_step_of_a_pipeline_is_its_train_batch(tmp_path: Path) -> None:
    needs("deepspeed")
    folder = tmp_path / "recorded"

    recorded = train("train_deepspeed_pipeline.py", folder)
    plain = train("train_deepspeed_pipeline.py", folder, recorded=False)

    assert recorded.losses == plain.losses
    report = analyzed(folder).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    assert [strategy.name for strategy in report.run.strategies] == ["pp"]
    assert report.pipeline is not None
    assert (report.pipeline.schedule, report.pipeline.microbatches) == ("1f1b", 4)
    spec = from_json((folder / "run.json").read_bytes())
    assert spec.mesh == Mesh.of({"pp": 2})
    assert spec.model is not None and spec.model.parameters is None
