"""The predicted compute of a stage by part of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.work_builders import job

from stepsplit.analyzer import predict, read_job
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.part_time import predict_part_times

JOB = Path(__file__).parents[2] / "docs" / "job.toml"


def test_the_parts_of_a_pipeline_add_up_and_only_its_ends_embed_and_classify() -> None:
    one = read_job(JOB)
    parts = predict_part_times(one, Rates())
    assert [sum(own.values()) for own in parts] == [
        split.compute_ns for split in predict(one).splits
    ]
    assert ["embedding" in own for own in parts] == [True, False, False, False]
    assert ["head" in own for own in parts] == [False, False, False, True]
    # Llama 2 70B: attention has 1/4.7 of the weights of the MLP, and its core.
    assert parts[1]["mlp"] / parts[1]["attention"] == pytest.approx(3.1, abs=0.3)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ("llama-3-8b", {}),
        ("llama-3-8b", {"recompute": "full"}),
        ("llama-3-8b", {"flash_attention": False, "recompute": "selective"}),
        ("llama-3-8b", {"lora_rank": 16}),
        ("mixtral-8x7b", {}),
        ("deepseek-v3", {"recompute": "full"}),
    ],
)
def test_no_part_is_negative(model: str, training: dict[str, Any]) -> None:
    one = job(load_model(model), **training)
    one = replace(one, hardware=load_hardware("h100-sxm"))
    (parts,) = predict_part_times(one, Rates())
    assert sum(parts.values()) == predict(one).split.compute_ns
    assert all(ns > 0 for ns in parts.values()), parts
    assert ("experts" in parts) == (one.model.experts is not None)
    more = {"recompute": "full"}
    if "recompute" not in training:
        again = job(load_model(model), **training, **more)
        (recomputed,) = predict_part_times(replace(again, hardware=one.hardware), Rates())
        assert recomputed["attention"] > parts["attention"]
        assert recomputed["head"] == parts["head"]
