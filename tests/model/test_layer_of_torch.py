"""What torch's checkpoint runs again, and what its tensor parallelism copies: counted as torch runs
a layer on the first of two ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from support.work_builders import TINY, UNIT, job
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from stepsplit.analyzer import JobConfig, ParallelConfig
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.config_checks import check
from stepsplit.analyzer.model.layer_time import time_sequence_copies
from stepsplit.analyzer.model.parameters import count_hardware_flops, count_model_flops

HIDDEN, FFN, TOKENS = 16, 40, 8

ONE_LAYER = replace(
    TINY, layers=1, hidden=HIDDEN, heads=4, kv_heads=4, head_size=4, ffn=FFN, gated=True
)  # fmt: skip


class Attention(nn.Module):
    """The GEMMs of an attention without its core."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.o(self.q(x) * self.k(x) + self.v(x))
        return mixed


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return out


class Layer(nn.Module):
    """A layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


SAVED = {torch.ops.aten.mm.default, torch.ops._c10d_functional.reduce_scatter_tensor.default}


def save_every_second_gemm() -> Any:
    """As torchtitan's selective recomputation saves: what collectives return, every second GEMM."""
    gemms: Counter[bool] = Counter()

    def choose(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_gemm = op == torch.ops.aten.mm.default
        gemms[context.is_recompute] += is_gemm
        is_saved = op in SAVED and not (is_gemm and gemms[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


SELECTIVE: dict[str, Any] = {"use_reentrant": False, "context_fn": save_every_second_gemm}


def run_layer(layer: nn.Module, x: torch.Tensor, **options: Any) -> None:
    checkpoint(layer, x, **options).sum().backward()


@pytest.mark.parametrize(
    ("options", "is_stopped"),
    [
        ({"use_reentrant": False}, True),
        ({"use_reentrant": False, "early_stop": False}, False),
        ({"use_reentrant": True}, False),
    ],
)
def test_the_flops_that_are_recomputed_are_those_that_torch_runs(
    options: dict[str, bool], is_stopped: bool
) -> None:
    """Without the attention core and the head, which a layer's recomputation leaves alone."""
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        run_layer(Layer(), x, **options)
    recipe = {"seq_len": TOKENS, "framework": "fsdp2"}
    plain, full = (
        job(ONE_LAYER, recompute=recompute, early_stop=is_stopped, **recipe)
        for recompute in ("none", "full")
    )
    core = 2 * 2 * TOKENS * TOKENS * HIDDEN
    recomputed = count_hardware_flops(full) - count_model_flops(full) - core
    forward = 2 * TOKENS * HIDDEN * (4 * HIDDEN + 3 * FFN)
    assert counted.get_total_flops() == 3 * forward + recomputed
    assert recomputed == forward - is_stopped * 2 * TOKENS * FFN * HIDDEN
    assert count_hardware_flops(plain) == count_model_flops(plain)


@pytest.mark.parametrize("early_stop", [True, False])
def test_selective_recomputation_runs_every_second_gemm_again(early_stop: bool) -> None:
    """Keys, output and w3; w2 is saved."""
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        run_layer(Layer(), x, early_stop=early_stop, **SELECTIVE)
    found = job(ONE_LAYER, seq_len=TOKENS, framework="fsdp2", recompute="selective")
    recomputed = count_hardware_flops(found) - count_model_flops(found)
    forward = 2 * TOKENS * HIDDEN * (4 * HIDDEN + 3 * FFN)
    assert counted.get_total_flops() == 3 * forward + recomputed
    assert recomputed == 2 * TOKENS * HIDDEN * (2 * HIDDEN + FFN)


class SequenceLog(TorchDispatchMode):
    """Collectives by phase, and the bytes that aten.cat reads and writes forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.phase, self.copied_bytes = "forward", 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        op = func._opname.removesuffix("_into_tensor").removesuffix("_tensor")
        if func.namespace == "_c10d_functional" and op in ("all_gather", "reduce_scatter"):
            self.calls[self.phase, op] += 1
        if func._opname == "cat" and self.phase == "forward":
            self.copied_bytes += 2 * out.nbytes
        return out


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def shard_layer(mesh: DeviceMesh) -> nn.Module:
    """As torchtitan shards a layer: sequence parallelism between the GEMMs."""
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    wide, narrow = ColwiseParallel, RowwiseParallel(output_layouts=Shard(1))
    return parallelize_module(
        Layer(), mesh,
        {
            "first": SequenceParallel(), "second": SequenceParallel(),
            "attention": whole, "mlp": whole,
            "attention.q": wide(), "attention.k": wide(), "attention.v": wide(),
            "attention.o": narrow, "mlp.w1": wide(), "mlp.w3": wide(), "mlp.w2": narrow,
        },
    )  # fmt: skip


def log_layer(mesh: DeviceMesh, sequences: int, **options: Any) -> SequenceLog:
    """One pass through a sharded layer; options are those of the checkpoint, none: without it."""
    layer, x = shard_layer(mesh), torch.randn(sequences, TOKENS // 2, HIDDEN, requires_grad=True)
    with SequenceLog() as log:
        out = checkpoint(layer, x, **options) if options else layer(x)
        log.phase = "backward"
        out.sum().backward()
    return log


def build_sharded(layers: int = 1, **recipe: Any) -> JobConfig:
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    recipe = {"dtype": "fp32", "activation_dtype": "fp32", "framework": "fsdp2", **recipe}
    return job(replace(ONE_LAYER, layers=layers), layout, seq_len=TOKENS, **recipe)


def count_calls(found: JobConfig) -> Counter[tuple[str, str]]:
    """What the model lists for the sequence, embedding and head included."""
    listed: Counter[tuple[str, str]] = Counter()
    for each in list_comm_ops(found):
        if each.strategy == "sp" and each.phase != "grad_sync":
            phase = "forward" if each.phase == "forward" else "backward"
            listed[phase, each.op] += each.count
    return listed


@pytest.mark.parametrize("early_stop", [True, False])
def test_the_recomputation_leaves_out_the_last_reduce_scatter(
    mesh: DeviceMesh, early_stop: bool
) -> None:
    log = log_layer(mesh, 1, use_reentrant=False, early_stop=early_stop)
    one, two = (
        count_calls(build_sharded(layers, recompute="full", early_stop=early_stop))
        for layers in (1, 2)
    )
    assert two - one == log.calls
    assert log.calls["backward", "reduce_scatter"] == 2 + 2 - early_stop


def test_selective_recomputation_gathers_again_and_scatters_once(mesh: DeviceMesh) -> None:
    log = log_layer(mesh, 1, **SELECTIVE)
    one, two = (count_calls(build_sharded(layers, recompute="selective")) for layers in (1, 2))
    assert two - one == log.calls
    assert log.calls["backward", "all_gather"] == 2 + 2


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_copies_around_its_collectives_are_those_of_torch(
    mesh: DeviceMesh, sequences: int
) -> None:
    """Two pairs of collectives per layer; one sequence is gathered into its place."""
    expected = time_sequence_copies(
        build_sharded(micro_batch=sequences, global_batch=sequences), UNIT
    )
    assert 2 * expected.forward_ns == log_layer(mesh, sequences).copied_bytes
    assert expected.input_ns == expected.forward_ns


def test_megatron_copies_nothing_and_recomputes_whole_layers() -> None:
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    assert time_sequence_copies(job(ONE_LAYER, layout, seq_len=TOKENS), UNIT).forward_ns == 0
    with pytest.raises(UsageError, match="megatron recomputes whole layers"):
        check(job(ONE_LAYER, recompute="full", early_stop=True))


def test_dropout_needs_the_output_of_the_last_gemm() -> None:
    whole, dropped = (
        job(ONE_LAYER, recompute="full", framework="fsdp2", early_stop=not whole, dropout=not whole)
        for whole in (True, False)
    )
    assert count_hardware_flops(dropped) == count_hardware_flops(whole)


@pytest.mark.parametrize(
    ("recompute", "saved_of_four_layers"), [("full", 4), ("every", 2), ("none", 0)]
)
def test_one_layer_of_each_group_stops_early(recompute: str, saved_of_four_layers: int) -> None:
    four = replace(ONE_LAYER, layers=4)
    whole, stopped = (
        job(
            four, recompute=recompute, recompute_every=2, framework="fsdp2", early_stop=early_stop,
            seq_len=TOKENS,
        )
        for early_stop in (False, True)
    )  # fmt: skip
    saved = 2 * TOKENS * FFN * HIDDEN * saved_of_four_layers
    assert count_hardware_flops(whole) - count_hardware_flops(stopped) == saved
