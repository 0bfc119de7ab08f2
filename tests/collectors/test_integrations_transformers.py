"""transformers' Trainer on two real ranks, with and without our callback."""

from pathlib import Path

import pytest
from integrations.ranks import analyzed, calls_by_step, full_steps, needs, train
from support.turns import INTEGRATION

from stepsplit.collectors.formats.run_spec import Mesh, ModelSpec, Training, from_json

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*INTEGRATION)]


def test_the_callback_records_optimizer_steps_without_changing_the_training(
    tmp_path: Path,
) -> None:
    needs("transformers", "accelerate")
    folder = tmp_path / "recorded"

    recorded = train("train_transformers.py", folder)
    plain = train("train_transformers.py", folder, recorded=False)

    assert recorded.losses == plain.losses
    report = analyzed(folder).report
    assert full_steps(report) == {0: [3, 4, 5], 1: [3, 4, 5]}
    for rank in (0, 1):
        assert all(calls_by_step(folder, rank, "all_reduce").values())
    said = [strategy.name for strategy in report.run.strategies]
    assert said == ["ddp", "gradient accumulation"]
    spec = from_json((folder / "run.json").read_bytes())
    assert spec.mesh == Mesh.of({"dp": 2})
    assert spec.model == ModelSpec(
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=64,
        gated=True,
        vocab=128,
        tied=False,
        parameters=26_784,
    )
    assert spec.training == Training(
        micro_batch=4,
        global_batch=16,
        microbatches=2,
        dtype="fp32",
        optimizer="adam",
        framework="huggingface",
    )
