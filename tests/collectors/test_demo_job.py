"""The demo training's run.json matches what it runs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from stepsplit.collectors.demo.arguments import DemoArgs, parse_parallel
from stepsplit.collectors.demo_job import build_model_spec, build_training
from stepsplit.collectors.formats.run_spec import ModelSpec, RunSpec, Training, from_json, to_json

RECIPE = DemoArgs(layers=2, hidden=64, heads=4, seq_len=32)


def test_the_model_has_learned_positions_and_no_biases() -> None:
    spec = build_model_spec(RECIPE)
    assert (spec.learned_positions, spec.norm, spec.biases) == (32, "rms", False)


@pytest.mark.parametrize(
    ("parallel", "split_vocab", "root_unit", "bucket_bytes"),
    [
        ("tp=2", False, None, None),
        ("dp=2", None, None, 4 << 20),
        ("fsdp=2", None, True, None),
        ("pp=2", None, None, None),
    ],
)
def test_training_fields_follow_the_layout(
    parallel: str, split_vocab: bool | None, root_unit: bool | None, bucket_bytes: int | None
) -> None:
    training_spec = build_training(RECIPE, parse_parallel(parallel))
    assert (training_spec.split_vocab, training_spec.root_unit, training_spec.bucket_bytes) == (
        split_vocab, root_unit, bucket_bytes,
    )  # fmt: skip


def test_run_json_keeps_all_fields() -> None:
    model = ModelSpec(experts=8, top_k=2, norm="rms", biases=False, learned_positions=0)
    training_spec = Training(split_vocab=False, root_unit=True, bucket_bytes=1024)
    spec = RunSpec("run", 1, "gloo", model=model, training=training_spec)
    assert from_json(to_json(spec)) == spec
