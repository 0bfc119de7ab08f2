"""Every parallelism strategy in a real run: recorded, recognized, and consistent with the model."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from example_runs import Outcome, outcome, record_example  # noqa: E402
from jobs import EXAMPLES, Example  # type: ignore[import-not-found]  # noqa: E402
from required import absent  # noqa: E402

from stepsplit.analyzer import analyze  # noqa: E402

pytestmark = pytest.mark.slow

ZERO_1 = "zero-1 (or zero-2: with one microbatch they send the same)"
LAYERS = ("tp", "vocabulary", "loss")
SEEN = {
    "ddp": (("ddp",), "dp_replicate=2"),
    "ddp-accumulate": (
        ("ddp", "gradient accumulation (2 microbatches, gradients summed once)"),
        "dp_replicate=2",
    ),
    "zero1": (("zero-1",), "dp_replicate=2"),
    "fsdp-zero2": (("zero-2 (weights kept until the backward)",), "dp_shard=2"),
    "fsdp-zero3": (("fsdp",), "dp_shard=2"),
    "fsdp-offload": (("fsdp",), "dp_shard=2"),
    "hsdp": (("hsdp (2 replicas)",), "dp_replicate=2 dp_shard=2"),
    "tensor": (LAYERS, "tp=2"),
    "tensor-sequence": (("tp", "sp", "vocabulary", "loss"), "tp=2"),
    "pipeline-naive": (("pp (naive)",), "pp=2"),
    "pipeline-gpipe": (("pp (gpipe)",), "pp=2"),
    "pipeline-1f1b": (("pp (1f1b)",), "pp=2"),
    "pipeline-1f1b-4-ranks": (("pp (1f1b)",), "pp=4"),
    "pipeline-interleaved": (("pp (interleaved)",), "pp=2"),
    "pipeline-zero-bubble": (("pp (zb-h1)",), "pp=2"),
    "pipeline-zb-v": (("pp (zb-v)",), "pp=2"),
    "pipeline-dualpipe-v": (("pp (dualpipe-v)",), "pp=2"),
    # DDP reduces the gradients of a ring's ranks.
    "context": (("ddp", "cp (ring)"), "cp=2"),
    "context-4-ranks": (("ddp", "cp (ring)"), "cp=4"),
    "experts": (("ddp", "ep"), "dp_replicate=2"),
    "three-d": (("ddp", *LAYERS, "pp (1f1b)"), "pp=2 dp_replicate=2 tp=2"),
    "checkpointing-none": (("fsdp",), "dp_shard=2"),
    "checkpointing-full": (("fsdp", "recompute (full)"), "dp_shard=2"),
    "checkpointing-selective": (("fsdp", "recompute (selective)"), "dp_shard=2"),
    "precision-bf16": (("ddp", "autocast"), "dp_replicate=2"),
    "precision-fp16": (("ddp", "autocast", "loss scaling"), "dp_replicate=2"),
    "deepspeed-zero1": ((ZERO_1,), "dp_replicate=2"),
    "deepspeed-zero2-accumulate": (
        (
            "zero-2",
            "gradient accumulation (2 microbatches, gradients summed after each)",
        ),
        "dp_replicate=2",
    ),
    "deepspeed-zero3": (("fsdp",), "dp_shard=2"),
    "deepspeed-zero1-offload": ((ZERO_1,), "dp_replicate=2"),
    "deepspeed-zero2-offload": ((ZERO_1,), "dp_replicate=2"),
    "deepspeed-zero3-offload": (("fsdp",), "dp_shard=2"),
}
"""The strategies and the mesh inferred from the traces alone, by run."""


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
