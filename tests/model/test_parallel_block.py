"""Blocks in which attention and MLP read the same input (GPT-J, GPT-NeoX, PaLM, Falcon)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.work_builders import TINY, job

from stepsplit.analyzer import JobConfig, ParallelConfig, predict
from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.memory_states import compute_layer_activations

PARALLEL = replace(TINY, parallel_block=True)


def count_calls(job: JobConfig, op: str, phase: str) -> int:
    return sum(
        one.count
        for one in list_comm_ops(job)
        if (one.op, one.phase, one.axis) == (op, phase, "tp")
    )


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_layer_all_reduces_once_a_pass(phase: str) -> None:
    """4 layers, 4 microbatches; the loss and the vocabulary's own calls stay."""
    layout = ParallelConfig(tp=2)
    one_after_the_other = count_calls(job(TINY, layout, global_batch=4), "all_reduce", phase)
    beside = count_calls(job(PARALLEL, layout, global_batch=4), "all_reduce", phase)
    assert one_after_the_other - beside == 4 * 4


def test_with_sequence_parallelism_it_gathers_and_scatters_once() -> None:
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    for op in ("all_gather", "reduce_scatter"):
        both = (count_calls(job(model, layout), op, "forward") for model in (TINY, PARALLEL))
        before, after = both
        assert before - after == 4


def test_its_norms_save_one_input_as_torch_does() -> None:
    torch = pytest.importorskip("torch")

    def count_saved(is_parallel: bool) -> int:
        """Elements that torch saves for the backward of a block of 8 features and 16 tokens."""
        first, second = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
        attention, mlp = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        saved: dict[int, int] = {}

        def note(tensor: Any) -> Any:
            saved[tensor.data_ptr()] = tensor.numel()
            kept.append(tensor)
            return tensor

        kept: list[Any] = []
        x = torch.randn(16, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            between = x if is_parallel else x + attention(first(x))
            beside = attention(first(x)) if is_parallel else 0
            (between + mlp(second(between)) + beside).sum().backward()
        return sum(saved.values())

    of_torch = count_saved(False) - count_saved(True)
    plain, parallel = (compute_layer_activations(job(one), False) for one in (TINY, PARALLEL))
    assert plain.total_bytes - parallel.total_bytes == 2 * of_torch == 2 * 16 * 8


def test_a_step_that_waits_for_tensor_parallelism_is_shorter() -> None:
    layout = ParallelConfig(tp=8)
    before, after = (
        predict(job(replace(model, heads=8, kv_heads=8, hidden=16), layout)).split
        for model in (TINY, PARALLEL)
    )
    assert after.collective_ns < before.collective_ns
    assert after.compute_ns < before.compute_ns
