"""Low-rank adapters: what they train, keep, send and compute, beside frozen weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from work_builders import TINY, UNIT, job

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.config import ParallelConfig
from stepsplit.analyzer.model.config_file import load_model, parse_job
from stepsplit.analyzer.model.layer_time import time_dense_layer
from stepsplit.analyzer.model.memory_states import compute_states
from stepsplit.analyzer.model.parameters import (
    count_model_flops,
    count_stage_parameters,
    select_trained,
)
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.validation.tables import Published, build_recipe

QKV = frozenset({"qkv"})


def test_adapters_of_all_linear_layers_have_the_parameters_that_peft_prints() -> None:
    """peft prints 19,988,480 for Llama 2 7B at rank 8, 4,194,304 for its queries and values: with
    the keys half as much again."""
    model = load_model("llama-2-7b")
    whole = job(model=model, framework="huggingface", lora_rank=8)
    (params,) = count_stage_parameters(whole)
    assert select_trained(whole, params).total == 19_988_480
    part = job(model=model, framework="huggingface", lora_rank=8, lora_targets=QKV)
    assert select_trained(part, params).total == 4_194_304 * 3 // 2


def test_tensor_parallelism_divides_what_it_divides_of_the_layer() -> None:
    """TINY: 8 hidden, 4 heads of 2, MLP of 32. Rank 1 on two ranks: queries, keys and values
    8 + 24/2, output 8/2 + 8, first matrix 8 + 32/2, second 32/2 + 8."""
    one = job(model=replace(TINY, layers=1), layout=ParallelConfig(tp=2), lora_rank=1)
    (params,) = count_stage_parameters(one)
    assert select_trained(one, params).total == 20 + 12 + 24 + 24


def test_frozen_weights_have_two_bytes_and_adapters_all_states() -> None:
    full, frozen = job(), job(lora_rank=2)
    (params,) = count_stage_parameters(full)
    adapters = select_trained(frozen, params).total
    states = compute_states(frozen, params)
    assert states.weights_bytes == 2 * (params.total + adapters)
    assert states.gradients_bytes == 4 * adapters
    assert states.optimizer_bytes == 12 * adapters


def test_only_the_gradients_of_adapters_are_reduced() -> None:
    layout = ParallelConfig(dp_replicate=2)
    one = job(layout=layout, global_batch=2, lora_rank=2)
    (params,) = count_stage_parameters(one)
    (reduced,) = [op for op in list_comm_ops(one) if op.phase == "grad_sync"]
    assert (reduced.op, reduced.input_bytes) == (
        "all_reduce", 4 * select_trained(one, params).total
    )  # fmt: skip


def test_the_backward_has_no_gradients_of_frozen_weights() -> None:
    full = time_dense_layer(job(), UNIT)
    frozen = time_dense_layer(job(lora_rank=1, lora_targets=frozenset()), UNIT)
    assert (frozen.forward_ns, frozen.input_ns) == (full.forward_ns, full.input_ns)
    assert frozen.weight_ns == 0.0
    adapted = time_dense_layer(job(lora_rank=1), UNIT)
    assert 0.0 < adapted.weight_ns < full.weight_ns


def test_model_flops_count_two_passes_of_weights_and_three_of_attention() -> None:
    full, frozen = job(), job(lora_rank=2)
    model, tokens = full.model, full.training.global_batch * full.training.seq_len
    attention = 3 * model.layers * 4 * full.training.seq_len * model.hidden * tokens
    weights = count_model_flops(full) - attention
    assert count_model_flops(frozen) == attention + weights * 2 // 3


def test_published_steps_are_predicted_although_no_constant_knows_adapters() -> None:
    cases = [
        build_recipe(row)
        for table in ("training_runs", "megatron_bridge_performance")
        for row in Published().read_records(table)
        if row.read_text("kind").startswith("LoRA")
    ]
    errors = sorted(abs(predict(one.job).split.step_ns / one.step_ns - 1) for one in cases)
    assert len(errors) == 19
    assert sum(errors) / len(errors) < 0.09
    assert "adapters alone are trained" in " ".join(predict(cases[0].job).notes)


def test_a_file_states_rank_and_layers() -> None:
    text = """
    model = { preset = "llama-3.1-8b" }
    hardware = { preset = "h100-sxm" }
    [training]
    seq_len = 4096
    micro_batch = 1
    global_batch = 8
    lora_rank = 16
    lora_targets = ["qkv", "output"]
    """
    training = parse_job(text).training
    assert (training.lora_rank, training.lora_targets) == (16, {"qkv", "output"})
    with pytest.raises(DataError, match=r"training.lora_targets: .*'q_proj'.*qkv, output or mlp"):
        parse_job(text.replace('"qkv"', '"q_proj"'))
    with pytest.raises(DataError, match="lora_targets is empty, so that nothing is trained"):
        parse_job(text.replace('"qkv", "output"', ""))
    with pytest.raises(DataError, match="lora_targets needs lora_rank; give the rank"):
        parse_job(text.replace("lora_rank = 16", ""))
