"""A training loop of accelerate on two real ranks, also with accelerate's own profiler."""

from pathlib import Path

import pytest
from integrations.ranks import analyzed, calls_by_step, full_steps, needs, train
from support.turns import INTEGRATION

from stepsplit.collectors.formats.run_spec import Mesh, Training, from_json

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*INTEGRATION)]


def test_a_loop_is_recorded_and_accelerates_own_profiler_runs_after(tmp_path: Path) -> None:
    needs("accelerate")
    folder, theirs = tmp_path / "recorded", tmp_path / "theirs"

    recorded = train("train_accelerate.py", folder, str(theirs))
    plain = train("train_accelerate.py", folder, str(theirs), recorded=False)

    assert recorded.losses == plain.losses
    assert {path.name for path in theirs.iterdir()} == {"profile_0.json", "profile_1.json"}
    assert "stepsplit: rank" not in recorded.output
    report = analyzed(folder).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert calls_by_step(folder, rank, "all_reduce") == {3: 1, 4: 1, 5: 1}
    said = [strategy.name for strategy in report.run.strategies]
    assert said == ["ddp", "gradient accumulation"]
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


def test_accelerates_own_profiler_within_ours_is_complete_and_ours_warns(
    tmp_path: Path,
) -> None:
    needs("accelerate")
    folder, theirs = tmp_path / "recorded", tmp_path / "theirs"

    recorded = train("train_accelerate.py", folder, str(theirs), "within")

    assert {path.name for path in theirs.iterdir()} == {"profile_0.json", "profile_1.json"}
    assert "lost its trace from step" in recorded.output
    assert "the script's own torch.profiler was started" in recorded.output


def test_with_deepspeed_a_step_is_an_engine_step(tmp_path: Path) -> None:
    needs("accelerate", "deepspeed")
    folder, theirs = tmp_path / "recorded", tmp_path / "theirs"

    recorded = train("train_accelerate.py", folder, str(theirs), "deepspeed")
    plain = train("train_accelerate.py", folder, str(theirs), "deepspeed", recorded=False)

    assert recorded.losses == plain.losses
    assert full_steps(analyzed(folder).report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert all(calls_by_step(folder, rank, "all_gather").values())
    spec = from_json((folder / "run.json").read_bytes())
    assert spec.mesh == Mesh.of({"fsdp": 2})
    assert spec.training is not None and spec.training.framework == "deepspeed"
