"""Lightning fits on two real ranks, with both package names."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integrations.ranks import analyzed, calls_by_step, full_steps, needs, train
from support.turns import INTEGRATION

from stepsplit.collectors.formats.run_spec import Mesh, Training, from_json

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*INTEGRATION)]


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


def describe(strategy: Any, ranks: int) -> tuple[Any, Training | None]:
    """What run.json says of a fit with this strategy, which needs a GPU to run."""
    from stepsplit.collectors.integrations.lightning import read_trainer_spec

    trainer = SimpleNamespace(
        strategy=strategy,
        world_size=ranks,
        global_step=0,
        train_dataloader=SimpleNamespace(batch_size=4),
        accumulate_grad_batches=2,
        precision="bf16-mixed",
        optimizers=[],
    )
    spec = read_trainer_spec(trainer, None)
    return spec.mesh, spec.training


def test_the_mesh_and_the_offloading_of_its_fsdp_strategies() -> None:
    needs("lightning")
    from lightning.pytorch.strategies import FSDPStrategy

    common = {"micro_batch": 4, "microbatches": 2, "dtype": "bf16", "framework": "fsdp2"}
    full = FSDPStrategy(sharding_strategy="FULL_SHARD", cpu_offload=True)
    assert describe(full, 4) == (
        {"dp_shard": 4},
        Training(**common, global_batch=32, offload="optimizer, parameters"),
    )
    replicas = FSDPStrategy(sharding_strategy="NO_SHARD")
    assert describe(replicas, 4) == ({"dp_replicate": 4}, Training(**common, global_batch=32))
    hybrid = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4))
    assert describe(hybrid, 8) == (
        {"dp_replicate": 2, "dp_shard": 4},
        Training(**common, global_batch=64),
    )


def test_the_mesh_zero_and_offloading_of_its_deepspeed_strategy() -> None:
    needs("lightning", "deepspeed")
    from lightning.pytorch.strategies import DeepSpeedStrategy

    common = {"micro_batch": 4, "global_batch": 32, "microbatches": 2, "dtype": "bf16"}
    stage2 = DeepSpeedStrategy(stage=2, offload_optimizer=True)
    assert describe(stage2, 4) == (
        {"dp_replicate": 4},
        Training(**common, framework="deepspeed", zero=2, offload="optimizer"),
    )
    stage3 = DeepSpeedStrategy(stage=3)
    assert describe(stage3, 4) == (
        {"dp_shard": 4},
        Training(**common, framework="deepspeed", zero=3),
    )
