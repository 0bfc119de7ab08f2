"""Low-rank adapters: what they train, keep, send and compute, beside frozen weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.work_builders import TINY, UNIT, job, llama

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.comm_ops import ADAPTED
from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.config import ParallelConfig
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.host_time import compute_launch_time
from stepsplit.analyzer.model.layer_time import time_dense_layer
from stepsplit.analyzer.model.memory import compute_memory
from stepsplit.analyzer.model.memory_states import compute_layers_by_kind, compute_states
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.optimizer_time import compute_orthogonalization_ns
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


def test_megatrons_tensor_parallelism_divides_both_matrices_of_an_adapter() -> None:
    """TINY: 8 hidden, 4 heads of 2, MLP of 32. Rank 2: queries, keys and values 2 (8 + 24),
    output 2 (8 + 8), first matrix 2 (8 + 32), second 2 (32 + 8), all over two ranks."""
    one = job(model=replace(TINY, layers=1), layout=ParallelConfig(tp=2), lora_rank=2)
    (params,) = count_stage_parameters(one)
    assert select_trained(one, params).total == 32 + 16 + 40 + 40


def test_torchs_tensor_parallelism_divides_what_it_divides_of_the_layer() -> None:
    """Rank 1: queries, keys and values 3 x 8 + 24/2, output 8/2 + 8, the MLP 8 + 32/2, 32/2 + 8."""
    layout = ParallelConfig(tp=2)
    one = job(model=replace(TINY, layers=1), layout=layout, framework="fsdp2", lora_rank=1)
    (params,) = count_stage_parameters(one)
    assert select_trained(one, params).total == 36 + 12 + 24 + 24


def test_adapters_of_row_parallel_layers_gather_their_outputs() -> None:
    """Two tokens of 8 hidden in 16 bits at rank 2, 32 and 8 bytes, in one layer with two adapters
    of each kind: read in Megatron-Bridge's ParallelLinearAdapter."""
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    model = replace(TINY, layers=1)
    with_adapters = job(model=model, layout=layout, seq_len=2, lora_rank=2)
    ops = [op for op in list_comm_ops(with_adapters) if ADAPTED in op.formulas]
    assert [(op.phase, op.op, op.count, op.message_bytes) for op in ops if op.count] == [
        ("forward", "all_gather", 2, 8),
        ("forward", "all_reduce", 2, 8),
        ("forward", "all_gather", 2, 32),
        ("backward", "all_reduce", 4, 8),
        ("backward", "all_gather", 2, 32),
    ]
    without = replace(with_adapters, parallel=ParallelConfig(tp=2))
    ops = [op for op in list_comm_ops(without) if ADAPTED in op.formulas]
    assert [(op.phase, op.op, op.count, op.message_bytes) for op in ops if op.count][3:] == [
        ("backward", "all_reduce", 4, 8),
        ("backward", "all_reduce", 2, 32),
    ]


def test_frozen_weights_have_two_bytes_and_adapters_all_states() -> None:
    full, frozen = job(), job(lora_rank=2)
    (params,) = count_stage_parameters(full)
    adapters = select_trained(frozen, params).total
    states = compute_states(frozen, params)
    assert states.weights_bytes == 2 * (params.total + adapters)
    assert states.frozen_bytes == 2 * params.total
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


def test_frozen_weights_that_are_replicated_have_no_gradients_to_add() -> None:
    """Neither a tied embedding's over pp nor the norms' over tp with sequence parallelism."""
    layout = ParallelConfig(tp=2, pp=2, sequence_parallel=True)
    model = replace(TINY, tied=True)
    full = job(model=model, layout=layout)
    assert {op.strategy for op in list_comm_ops(full) if op.phase == "grad_sync"} == {"sp", "tied"}
    frozen = job(model=model, layout=layout, lora_rank=2)
    assert not [op for op in list_comm_ops(frozen) if op.phase == "grad_sync"]


def test_inputs_of_layers_without_adapters_are_not_kept() -> None:
    """With sequence parallelism the gathered input of an adapter; never those of experts."""
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    none = job(layout=layout, lora_rank=2, lora_targets=frozenset({"output"}))
    norms = compute_layers_by_kind(none).dense.norms
    both = compute_layers_by_kind(job(layout=layout, lora_rank=2)).dense.norms
    hidden_bytes = 2 * none.tokens * none.model.hidden
    assert both - norms == 2 * hidden_bytes
    experts = load_model("mixtral-8x7b")
    kinds = [
        compute_layers_by_kind(job(model=experts, lora_rank=8, lora_targets=targets)).expert
        for targets in (frozenset({"qkv"}), frozenset({"qkv", "mlp"}))
    ]
    assert kinds[0] == kinds[1]
    assert kinds[0].routed < compute_layers_by_kind(job(model=experts)).expert.routed / 1.5


def test_muon_makes_the_momentum_of_adapters_orthogonal() -> None:
    model = load_model("llama-3-8b")
    (params,) = count_stage_parameters(job(model=model))
    full = job(model=model, optimizer="muon")
    adapted = job(model=model, optimizer="muon", lora_rank=8)
    whole_ns = compute_orthogonalization_ns(full, UNIT, params)
    assert 0.0 < compute_orthogonalization_ns(adapted, UNIT, params) < whole_ns / 50


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
    with pytest.raises(DataError, match=r"lora_rank \(4097\) exceeds hidden \(4096\)"):
        parse_job(text.replace("lora_rank = 16", "lora_rank = 4097"))
    with pytest.raises(DataError, match="routed experts, without adapters; name qkv or output too"):
        parse_job(text.replace("llama-3.1-8b", "mixtral-8x7b").replace('"qkv", "output"', '"mlp"'))


@pytest.mark.parametrize(("layers", "torch_mib"), [(16, 244.2), (32, 464.4)])
def test_a_checkpoint_keeps_no_copies_of_frozen_weights(layers: int, torch_mib: float) -> None:
    """Autocast caches the copies of weights with gradients alone: the peaks are those that torch's
    MemTracker finds of transformers' Llama, with checkpoints of all layers."""
    model = llama(layers, 512, 8, 4, 1376, 512)
    one = job(
        model=model, framework="huggingface", recompute="full", seq_len=512, global_batch=1,
        lora_rank=16,
    )  # fmt: skip
    found = compute_memory(one)[0]
    workspace_bytes = 32 * 2**20
    assert found.total_bytes - workspace_bytes == pytest.approx(torch_mib * 2**20, rel=0.01)


def test_the_host_launches_adapters_too() -> None:
    """TINY has six of a layer; transformers' Llama with seven runs 1.78 times the operations
    forward and 1.45 times backward."""
    full, frozen = job(framework="fsdp2"), job(framework="fsdp2", lora_rank=2)
    full_ns = compute_launch_time(full, 2).forward_ns
    assert compute_launch_time(frozen, 2).forward_ns == pytest.approx(1.48 * full_ns)
