"""The calls that torch's own ring attention makes, and the model's list of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from support.work_builders import TINY, job
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.config import JobConfig, ParallelConfig

RANKS = 4
TWO_KV = replace(TINY, layers=1, kv_heads=2)
"""4 heads of 2 numbers, 2 of keys and values."""

OPS = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "all_to_all"}

Call = tuple[str, int]
"""Op and input bytes."""


class CallLog(TorchDispatchMode):
    """The functional collectives called below it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "_c10d_functional" and func._opname in OPS:
            self.calls.append((OPS[func._opname], args[0].nbytes))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    """The last of four ranks whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS - 1, world_size=RANKS)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def attend(q: Any, k: Any, v: Any, is_causal: bool, **rest: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def attend_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool
) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )


def list_calls(found: JobConfig, phase: str) -> list[Call]:
    """What the model expects of one microbatch and layer."""
    calls: list[Call] = []
    for each in list_comm_ops(found):
        if each.strategy == "cp" and each.phase == phase:
            calls += [(each.op, each.input_bytes)] * each.count
    return calls


def test_torch_gathers_keys_and_values_and_passes_their_gradients_on_in_fp32(
    fake_group: dist.ProcessGroup,
) -> None:
    """16 tokens a rank; torchtitan repeats keys and values for every query head."""
    found = job(TWO_KV, ParallelConfig(cp=RANKS), seq_len=64, framework="fsdp2")
    q, k, v = (torch.randn(1, 4, 16, 2, dtype=torch.bfloat16) for _ in range(3))
    with CallLog() as forward:
        out, sums = _attention._templated_ring_attention(
            fake_group, 2, attend, q, k, v, is_causal=True
        )
    with CallLog() as backward:
        _attention._templated_ring_attention_backward(
            fake_group, 2, attend_backward, out, "grad_out", q, k, v, out, sums, True
        )
    assert forward.calls == list_calls(found, "forward") == [("all_gather", 512)]
    assert backward.calls == list_calls(found, "backward")
    assert backward.calls == [("all_gather", 512), *4 * [("all_to_all", 1024)]]


def test_an_all_to_all_to_one_rank_sends_all_its_bytes() -> None:
    found = job(TWO_KV, ParallelConfig(cp=RANKS), seq_len=64, framework="fsdp2")
    passed = [each for each in list_comm_ops(found) if each.op == "all_to_all"]
    assert passed == [CommOp("cp", "all_to_all", "cp", 0, "backward", 4, 1024, 1024, 1024)]
