"""The GEMMs of Muon's update, counted by torch as its own Muon runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.work_builders import LITE, job, llama

from stepsplit.analyzer import JobConfig, ModelConfig, ParallelConfig, TrainingConfig, predict
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.optimizer_time import compute_orthogonalization_ns
from stepsplit.analyzer.model.parameters import count_stage_parameters

UNIT = DeviceSpeed(
    linear_flops_per_ns=1.0, head_flops_per_ns=1.0, attention_flops_per_ns=1.0,
    attention_backward_flops_per_ns=1.0, bytes_per_ns=float("inf"), launch_ns=0.0,
)  # fmt: skip
"""A FLOP takes a ns, everything else no time."""


def count_flops(model: ModelConfig, layout: ParallelConfig | None = None) -> float:
    """The FLOPs of one rank of the first stage."""
    muon = job(model, layout, optimizer="muon")
    return compute_orthogonalization_ns(muon, UNIT, count_stage_parameters(muon)[0])


def test_flops_are_those_of_the_muon_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    hidden, ffn, layers = 32, 96, 3
    shapes = [(3 * hidden, hidden), (hidden, hidden), (ffn, hidden), (hidden, ffn)] * layers
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(weights).step()

    model = ModelConfig(layers, hidden, heads=4, kv_heads=4, head_size=8, ffn=ffn, vocab=512)
    assert count_flops(model) == counter.get_total_flops()


def test_ranks_that_shard_the_states_share_the_matrices_but_none_is_divided() -> None:
    model = llama(8, 64, 4, 4, 256, 512)
    alone = count_flops(model)
    assert count_flops(model, ParallelConfig(dp_replicate=4)) == alone
    assert count_flops(model, ParallelConfig(dp_replicate=4, zero=1)) == alone / 4
    first_of_mlp = 5 * (4 * 64**2 * 512 + 2 * 64**3)
    assert count_flops(model, ParallelConfig(dp_replicate=256, zero=1)) == first_of_mlp


def test_experts_are_matrices_of_their_own() -> None:
    """Of DeepSeek-V2-Lite with 8 ranks each has 8 experts of a layer."""
    all_of_them, of_one = count_flops(LITE), count_flops(LITE, ParallelConfig(dp_replicate=8, ep=8))
    first = 5 * (4 * 2048**2 * 2816 + 2 * 2048**3)
    second = 5 * (4 * 1408**2 * 2048 + 2 * 1408**3)
    assert all_of_them - of_one == 26 * 56 * (first + second)


def test_without_sharding_a_step_is_longer_by_the_orthogonalization() -> None:
    """7B on 64 GPUs, 65,536 tokens each: if every rank has all matrices, 22 h FLOPs per weight
    beside 6 T of the training are a quarter as many; divided, less than a hundredth."""

    def step_ns(optimizer: str, zero: int) -> float:
        training = TrainingConfig(
            seq_len=4096, micro_batch=1, global_batch=1024, optimizer=optimizer
        )
        layout = ParallelConfig(dp_replicate=64, zero=zero)
        hardware = replace(load_hardware("h100-sxm"), memory_bytes=2**40)
        model = load_model("llama-2-7b")
        return predict(JobConfig(model, layout, training, hardware)).split.step_ns

    assert 1.1 < step_ns("muon", 0) / step_ns("lion", 0) < 1.25
    assert 1.0 < step_ns("muon", 1) / step_ns("lion", 1) < 1.01
