"""Bytes of one parameter by dtype, optimizer, ZeRO stage and framework."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.work_builders import LITE, job, published

from stepsplit.analyzer.model.config import Dtype, Optimizer, ParallelConfig, TrainingConfig
from stepsplit.analyzer.model.memory_peak import compute_optimizer_bytes
from stepsplit.analyzer.model.memory_states import (
    ParameterBytes,
    States,
    compute_parameter_bytes,
    compute_states,
    shard_states,
)
from stepsplit.analyzer.model.offload import apply_offload, estimate_deepspeed_host_bytes
from stepsplit.analyzer.model.parameters import count_stage_parameters

PAPER = TrainingConfig(16, 1, 1, framework="zero-paper")
DEEPSPEED = TrainingConfig(16, 1, 1, dtype="fp16", framework="deepspeed")


@pytest.mark.parametrize(
    ("framework", "dtype", "gradients", "each"),
    [
        ("zero-paper", "bf16", "fp32", ParameterBytes(2, 2, 12)),
        ("zero-paper", "fp32", "fp32", ParameterBytes(4, 4, 8)),
        ("megatron", "bf16", "fp32", ParameterBytes(2, 4, 12)),
        ("megatron", "bf16", "bf16", ParameterBytes(2, 2, 12, gradient_copy=4)),
        ("megatron", "fp8", "fp32", ParameterBytes(2, 4, 12)),
        ("deepspeed", "fp16", "fp16", ParameterBytes(2, 2, 16)),
        ("fsdp2", "bf16", "fp32", ParameterBytes(4, 4, 8)),
        ("ddp", "bf16", "fp32", ParameterBytes(4, 4, 8)),
        ("huggingface", "bf16", "fp32", ParameterBytes(4, 4, 8)),
        ("nanotron", "bf16", "fp32", ParameterBytes(2, 6, 12)),
    ],
)
def test_each_framework_keeps_its_own_bytes_of_a_parameter(
    framework: str, dtype: Dtype, gradients: Dtype, each: ParameterBytes
) -> None:
    recipe = job(framework=framework, dtype=dtype, gradient_dtype=gradients).training
    assert compute_parameter_bytes(recipe) == each


@pytest.mark.parametrize(
    ("optimizer", "bytes_each", "beside"),
    [
        ("adam", 12, 0), ("adam-8bit", 6, 0), ("sgd", 4, 0), ("sgd-momentum", 8, 0),
        ("lion", 8, 0), ("muon", 8, 4),
    ],
)  # fmt: skip
def test_an_optimizer_has_moments_and_fp32_weights(
    optimizer: Optimizer, bytes_each: int, beside: int
) -> None:
    each = compute_parameter_bytes(TrainingConfig(16, 1, 1, optimizer=optimizer))
    assert (each.optimizer, each.extra_adam) == (bytes_each, beside)


def test_muon_leaves_embedding_head_and_norm_to_adam() -> None:
    """8 bytes of 11336 parameters, 4 more of 4096 + 4096 + 8 outside the layers."""
    muon = job(optimizer="muon")
    (stage,) = count_stage_parameters(muon)
    assert compute_states(muon, stage).optimizer_bytes == 8 * 11336 + 4 * 8200


@pytest.mark.parametrize(
    ("zero", "states"),
    [
        (0, States(200, 200, 1200)),
        (1, States(200, 200, 300)),
        (2, States(200, 50, 300)),
        (3, States(50, 50, 300)),
    ],
)
def test_each_zero_stage_shards_one_more_state(zero: int, states: States) -> None:
    assert shard_states(100, 4, compute_parameter_bytes(PAPER), PAPER, zero) == states


def test_a_share_that_does_not_divide_is_rounded_up() -> None:
    assert shard_states(3, 4, compute_parameter_bytes(PAPER), PAPER, 3) == States(2, 2, 9)


def test_experts_are_sharded_over_the_ranks_with_the_same_experts() -> None:
    """8 ranks in 4 expert groups: each expert is on 2 ranks."""
    layout = ParallelConfig(dp_replicate=8, ep=4, zero=1)
    assert (layout.shard_size, layout.expert_shards) == (8, 2)
    moe = job(LITE, layout)
    (stage,) = count_stage_parameters(moe)
    expected = -(-12 * stage.dense // 8) + 6 * stage.experts
    assert compute_states(moe, stage).optimizer_bytes == expected


def test_hybrid_sharding_shards_experts_only_within_a_shard_group() -> None:
    assert ParallelConfig(dp_replicate=2, dp_shard=8, ep=4, zero=3).expert_shards == 2


def test_fsdp_shards_its_states_at_zero_2_too() -> None:
    two = job(layout=ParallelConfig(dp_shard=4, zero=2), framework="fsdp2")
    (stage,) = count_stage_parameters(two)
    assert compute_states(two, stage) == States(11336, 11336, 2 * 11336)


def test_offloading_the_optimizer_leaves_weights_and_gradients() -> None:
    recipe = TrainingConfig(16, 1, 1, framework="nanotron", offload=frozenset({"optimizer"}))
    moved = apply_offload(States(2, 4, 12), recipe)
    assert (moved.states, moved.offloaded_bytes) == (States(2, 4, 0), 12)


def test_deepspeed_offloads_gradients_with_the_optimizer() -> None:
    both = frozenset({"optimizer", "parameters"})
    recipe = TrainingConfig(16, 1, 1, framework="deepspeed", offload=both)
    assert apply_offload(States(2, 2, 16), recipe).states == States(0, 0, 0)


def test_zero_table_1_comes_out_as_printed() -> None:
    for row in published("zero_table1_model_states"):
        zero, shards = int(row["stage"][-1]), int(row["dp"])
        found = shard_states(
            round(float(row["params"])), shards, compute_parameter_bytes(PAPER), PAPER, zero
        )
        _, _, decimals = row["GB_decimal"].partition(".")
        unit = 10.0 ** -len(decimals)
        assert found.total_bytes / 1e9 == pytest.approx(float(row["GB_decimal"]), abs=unit)


def test_zero_table_2_largest_models_fill_the_memory() -> None:
    size = {"B": 1e9, "T": 1e12}
    for row in published("zero_table2_max_model"):
        mp, gpus, memory = int(row["mp"]), int(row["gpus"]), float(row["gpu_mem_GB"])
        for zero, name in enumerate(("baseline", "zero1", "zero2", "zero3")):
            largest = row[f"max_theory_{name}"]
            parameters = round(float(largest[:-1]) * size[largest[-1]] / mp)
            found = shard_states(
                parameters, gpus // mp, compute_parameter_bytes(PAPER), PAPER, zero
            )
            assert found.total_bytes / 1e9 == pytest.approx(memory, rel=0.025)


def test_megatrons_copy_of_16_bit_gradients_exists_in_the_optimizer_step_alone() -> None:
    """4 bytes of a parameter of two ranks' shard; moments in bf16 need no copy, fp32 sums have
    none."""
    layout = ParallelConfig(dp_replicate=2, zero=1)
    short = job(layout=layout, global_batch=2, gradient_dtype="bf16")
    (params,) = count_stage_parameters(short)
    assert compute_optimizer_bytes(short, params) == 2 * params.total
    for kept in ({"moments_dtype": "bf16"}, {"gradient_dtype": "fp32"}):
        one = job(layout=layout, global_batch=2, **{"gradient_dtype": "bf16", **kept})
        assert compute_optimizer_bytes(one, params) == 0


def test_megatron_distributed_optimizer_bytes() -> None:
    for row in published("megatron_dist_optimizer_bytes"):
        dtype, gradients = row["param_dtype"], row["grad_dtype"]
        recipe = job(dtype=dtype, gradient_dtype=gradients).training
        whole, _, spread = row["distributed"].removesuffix("/d").partition("+")
        expected = int(whole) * 800 + int(spread) * 800 // 8
        found = compute_parameter_bytes(recipe)
        # The table counts what exists in the optimizer step alone.
        each = replace(found, optimizer=found.optimizer + found.gradient_copy)
        assert shard_states(800, 8, each, recipe, 1).total_bytes == expected
        assert (
            shard_states(800, 1, each, recipe, 0).total_bytes == int(row["non_distributed"]) * 800
        )


def test_deepspeed_estimators_come_out_as_printed() -> None:
    for row in published("deepspeed_estimator_outputs"):
        parameters, largest = (
            round(float(row[f"{name}_params"])) for name in ("total", "largest_layer")
        )
        zero, nodes, per_node = int(row["stage"][-1]), int(row["nodes"]), int(row["gpus_per_node"])
        moved = frozenset(
            name + "s" * (name == "parameter")
            for name, word in (("optimizer", "offload_optimizer"), ("parameter", "offload_param"))
            if word in row["options"]
        )
        recipe = job(framework="deepspeed", dtype="fp16", offload=moved).training
        states = shard_states(
            parameters, nodes * per_node, compute_parameter_bytes(recipe), recipe, zero
        )
        gpu = apply_offload(states, recipe).states.total_bytes + (4 * largest if zero == 3 else 0)
        assert round(gpu / 2**30, 2) == float(row["per_gpu_GB_as_printed"])
        init = largest if row["zero_init"] == "1" else None
        host = estimate_deepspeed_host_bytes(parameters, per_node, nodes, zero, moved, init)
        assert round(host / 2**30, 2) == float(row["per_cpu_GB_as_printed"])
