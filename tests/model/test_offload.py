"""Offloading: what leaves the device, the copies that take time, the update on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.work_builders import DEVICE, TINY, job

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import Framework, JobConfig, ParallelConfig, State
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.memory import compute_memory
from stepsplit.analyzer.model.memory_states import States
from stepsplit.analyzer.model.offload import (
    PassCopies,
    apply_offload,
    compute_host_updates_ns,
    compute_offload_ns,
    find_gpus_per_host,
    list_copies,
)
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns
from stepsplit.analyzer.model.parameters import count_stage_parameters, count_updated_parameters
from stepsplit.analyzer.model.predict import predict

ALONE = ParallelConfig()
FORWARD, BACKWARD = 300.0, 600.0


def offloading(
    *states: State, layout: ParallelConfig = ALONE, batch: int = 1, **recipe: Any
) -> JobConfig:
    """A job on hosts of four devices that update 1e9 bytes per second."""
    one = job(TINY, layout, global_batch=batch, offload=frozenset(states), **recipe)
    device = replace(DEVICE, host_update_bytes_per_s=1e9, gpus_per_node=4)
    return replace(one, hardware=device)


def copies(one: JobConfig, saved_bytes: float = 0.0) -> tuple[PassCopies, ...]:
    held = count_stage_parameters(one)[0]
    found = list_copies(one, held, saved_bytes, FORWARD, BACKWARD)
    return tuple(each for each in found if each.sent_bytes or each.loaded_bytes)


def test_the_host_updates_the_states_of_all_ranks_of_a_host() -> None:
    """Adam in 16 bits: 2 x 12 bytes of states, the gradient, a copy of the weight."""
    one = offloading(
        "optimizer", layout=ParallelConfig(dp_shard=8, zero=3), batch=8, framework="deepspeed"
    )
    (held,) = params = count_stage_parameters(one)
    moved_bytes = held.dense / 8 * (24 + one.training.gradient_bytes + 2)
    assert compute_host_updates_ns(one, params) == (4 * moved_bytes,)
    assert compute_optimizer_ns(one, compute_device_speed(one), held) == 0.0
    listed = replace(one, training=replace(one.training, fused_optimizer=False))
    assert compute_host_updates_ns(listed, params) == (6 * 4 * moved_bytes,)
    assert compute_host_updates_ns(offloading(), params) == (0.0,)


def test_stages_on_one_host_wait_for_the_states_of_all_of_them() -> None:
    one = offloading("optimizer", layout=ParallelConfig(pp=4), batch=4)
    params = count_stage_parameters(one)
    counts = [count_updated_parameters(one, each) for each in params]
    each_bytes = 24 + one.training.gradient_bytes + 2
    assert compute_host_updates_ns(one, params) == (pytest.approx(sum(counts) * each_bytes),) * 4
    apart = replace(one, hardware=replace(one.hardware, gpus_per_host=2))
    halves = sum(counts[:2]) * each_bytes, sum(counts[2:]) * each_bytes
    assert compute_host_updates_ns(apart, params) == pytest.approx(
        (halves[0], halves[0], halves[1], halves[1])
    )


def test_a_rack_has_many_hosts() -> None:
    """Four GPUs share two Grace CPUs, 72 the switches; eight of the others share a host."""
    assert find_gpus_per_host(load_hardware("gb200")) == 4
    assert find_gpus_per_host(load_hardware("h100-sxm")) == 8
    assert find_gpus_per_host(replace(DEVICE, gpus_per_node=256)) == 8


def test_a_cpu_is_its_own_host() -> None:
    one = offloading("optimizer", "activations")
    processor = replace(one, hardware=load_hardware("cpu"))
    plain = replace(processor, training=replace(one.training, offload=frozenset()))
    assert predict(processor).split == predict(plain).split
    assert compute_memory(processor)[0].total_bytes == compute_memory(plain)[0].total_bytes


def test_activations_are_sent_beside_the_forward_and_loaded_beside_the_backward() -> None:
    found = copies(offloading("activations", batch=3), saved_bytes=500)
    assert found == (PassCopies(3, 500, 0.0, FORWARD), PassCopies(3, 0.0, 500, BACKWARD))
    hardware = replace(DEVICE, host=replace(DEVICE.host, bytes_per_s=2e9, ring=0.5))
    assert compute_offload_ns(hardware, found) == 3 * 200


def test_passes_of_equal_times_are_two_passes() -> None:
    """Of a host-bound job both take as long as their launches."""
    one = offloading("activations", batch=3)
    held = count_stage_parameters(one)[0]
    found = list_copies(one, held, 500, FORWARD, FORWARD)
    assert found == (PassCopies(3, 500, 0.0, FORWARD), PassCopies(3, 0.0, 500, FORWARD))


@pytest.mark.parametrize(
    ("framework", "batch", "expected"),
    [
        ("megatron", 1, [(1, 4, 0, 0.0), (1, 0, 4, 0.0)]),
        ("deepspeed", 1, [(1, 0, 2, 0.0), (1, 4, 0, BACKWARD)]),
        ("deepspeed", 3, [(1, 0, 2, 0.0), (3, 4, 4, BACKWARD)]),
    ],
)
def test_an_offloaded_optimizer_gets_gradients_and_returns_weights(
    framework: Framework, batch: int, expected: list[tuple[int, int, int, float]]
) -> None:
    """DeepSpeed sends gradients in fp32 beside the backward, and sums earlier ones with them."""
    one = offloading("optimizer", batch=batch, framework=framework)
    count = count_updated_parameters(one, count_stage_parameters(one)[0])
    assert copies(one) == tuple(
        PassCopies(times, sent * count, loaded * count, beside)
        for times, sent, loaded, beside in expected
    )


def test_offloaded_parameters_are_copied_as_often_as_they_are_gathered() -> None:
    layout = ParallelConfig(dp_shard=4, zero=3)
    one = offloading("parameters", layout=layout, batch=8, framework="deepspeed")
    (held,) = count_stage_parameters(one)
    shard_bytes = held.dense / 4 * 2
    assert copies(one) == (
        PassCopies(2, 0.0, shard_bytes, FORWARD),
        PassCopies(2, shard_bytes, shard_bytes, BACKWARD),
    )
    both = replace(
        one, training=replace(one.training, offload=frozenset({"parameters", "optimizer"}))
    )
    assert copies(both) == copies(one)


def test_fsdp2_that_accumulates_sends_gradients_beside_nothing() -> None:
    layout = ParallelConfig(dp_shard=4, zero=3)
    once, twice = (
        copies(offloading("parameters", layout=layout, batch=4 * m, framework="fsdp2"))
        for m in (1, 2)
    )
    assert [each.overlapping_ns for each in once if each.sent_bytes] == [BACKWARD]
    assert [(each.count, each.overlapping_ns) for each in twice if each.sent_bytes] == [(2, 0.0)]


def test_a_pipeline_of_fsdp2_loads_its_parameters_once() -> None:
    layout = ParallelConfig(pp=2, dp_shard=2, zero=3)
    found = copies(offloading("parameters", layout=layout, batch=16, framework="fsdp2"))
    assert [each.count for each in found] == [1, 1]


@pytest.mark.parametrize(
    ("framework", "states", "left"),
    [
        ("megatron", ["optimizer"], States(2, 4, 4)),
        ("deepspeed", ["optimizer"], States(2, 0, 0)),
        ("fsdp2", ["optimizer", "parameters"], States(0, 0, 0)),
        ("zero-paper", ["parameters"], States(0, 4, 12)),
    ],
)
def test_each_framework_leaves_its_own_states_on_the_device(
    framework: Framework, states: list[State], left: States
) -> None:
    """Megatron-LM's moments leave, its fp32 weights stay; FSDP2's gradients follow the weights."""
    recipe = offloading(*states, framework=framework).training
    assert apply_offload(States(2, 4, 12), recipe).states == left


def test_parameters_are_offloaded_with_zero_3_alone() -> None:
    text = """
    model = { preset = "llama-3.1-8b" }
    training = { seq_len = 4096, micro_batch = 1, global_batch = 8, offload = ["parameters"] }
    hardware = { preset = "h100-sxm" }
    """
    with pytest.raises(DataError, match=r"offload of parameters needs ZeRO-3, not zero \(0\)"):
        parse_job(text)
