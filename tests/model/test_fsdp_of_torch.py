"""Peak memory and messages of a step of torch's FSDP on one of four ranks, and the model's."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.work_builders import TINY, job
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.config import LORA_TARGETS, JobConfig, ParallelConfig
from stepsplit.analyzer.model.memory import compute_memory

RANKS, TOKENS = 4, 64
SMALL = replace(
    TINY, layers=3, hidden=128, heads=4, kv_heads=4, head_size=32, ffn=256, gated=True, vocab=64
)
"""A Llama whose layers have more parameters than its embedding."""
WORDY = replace(SMALL, vocab=8192)


class Norm(nn.Module):
    """The RMS norm of a Llama: in fp32, by single operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SMALL.hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Linear(nn.Linear):
    """A linear layer, with an adapter if rank is not 0."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.rank = rank
        if rank:
            self.down = nn.Linear(inputs, rank, bias=False)
            self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out + self.up(self.down(x)) * 2 if self.rank else out


class Layer(nn.Module):
    """A layer of Llama, which checkpoint runs again if is_rerun."""

    def __init__(self, is_rerun: bool, rank: int, targets: Collection[str]) -> None:
        super().__init__()
        self.is_rerun = is_rerun
        hidden, ffn = SMALL.hidden, SMALL.ffn
        self.first, self.second = Norm(), Norm()
        qkv, output, mlp = (rank if each in targets else 0 for each in LORA_TARGETS)
        self.q, self.k, self.v = (Linear(hidden, hidden, qkv) for _ in range(3))
        self.o = Linear(hidden, hidden, output)
        self.w1, self.w3 = (Linear(hidden, ffn, mlp) for _ in range(2))
        self.w2 = Linear(ffn, hidden, mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (
            checkpoint(self.compute, x, use_reentrant=False) if self.is_rerun else self.compute(x)
        )
        return out

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        heads = (
            each(normed).view(1, TOKENS, SMALL.heads, -1).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        normed = self.second(x)
        out: torch.Tensor = x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return out


class Llama(nn.Module):
    """The model of a job, which FSDP shards as the job says."""

    def __init__(self, one: JobConfig) -> None:
        super().__init__()
        is_rerun, rank = one.training.recompute == "full", one.training.lora_rank
        targets = one.training.lora_targets
        self.embedding = nn.Embedding(one.model.vocab, one.model.hidden)
        self.layers = nn.ModuleList(Layer(is_rerun, rank, targets) for _ in range(one.model.layers))
        self.norm = Norm()
        self.head = nn.Linear(one.model.hidden, one.model.vocab, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = not rank or ".down." in name or ".up." in name
        policy = MixedPrecisionPolicy()
        if one.training.dtype == "bf16":
            reduced = torch.float32 if one.training.gradient_bytes == 4 else torch.bfloat16
            policy = MixedPrecisionPolicy(torch.bfloat16, reduced)
        kept: dict[str, Any] = {"mesh": init_device_mesh("cpu", (RANKS,)), "mp_policy": policy}
        for layer in self.layers:
            fully_shard(layer, **kept)
        if not one.parallel.root_unit:
            fully_shard(self.embedding, **kept)
            fully_shard([self.norm, self.head], **kept, reshard_after_forward=False)
        fully_shard(self, **kept)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass
class Step:
    """A step of training, of the job's microbatches."""

    job: JobConfig
    model: Llama
    optimizer: torch.optim.Optimizer
    words: torch.Tensor

    def run(self, tracker: MemTracker) -> None:
        assert isinstance(self.model, FSDPModule)
        for left in reversed(range(self.job.microbatches)):
            tracker.reset_mod_stats()
            self.model.set_requires_gradient_sync(not left or not self.job.parallel.sum_once)
            logits = self.model(self.words).view(TOKENS, -1)
            loss = F.cross_entropy(logits.float(), self.words.view(-1))
            del logits
            loss.backward()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def fake_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The first of four ranks whose collectives return at once."""
    allow_hooks(monkeypatch)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def allow_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """MemTracker's hooks on the gradients of parameters also for those that have none."""
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        register = getattr(torch.Tensor, name)

        def allow(one: torch.Tensor, hook: Any, register: Any = register) -> Any:
            return register(one, hook) if one.requires_grad else RemovableHandle(OrderedDict())

        monkeypatch.setattr(torch.Tensor, name, allow)


def measure_peak_bytes(one: JobConfig) -> int:
    """The second step's: the first one allocates the optimizer's states."""
    model = Llama(one)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    step = Step(one, model, optimizer, torch.zeros(1, TOKENS, dtype=torch.long))
    tracker = MemTracker()
    tracker.track_external(model, optimizer, step.words)
    with tracker:
        step.run(tracker)
        tracker._peak_mem = {}
        step.run(tracker)
    snapshot = tracker.get_tracker_snapshot("peak")
    return max(int(each["Total"]) for each in snapshot.values())


def sharded(root_unit: bool = False, sum_once: bool = False, **recipe: Any) -> JobConfig:
    layout = ParallelConfig(dp_shard=RANKS, zero=3, root_unit=root_unit, sum_once=sum_once)
    recipe = {"model": SMALL, "global_batch": RANKS, "fused_loss": False, **recipe}
    return job(layout=layout, framework="fsdp2", seq_len=TOKENS, **recipe)


JOBS = {
    "one-microbatch": sharded(),
    "fp32": sharded(dtype="fp32", activation_dtype="fp32"),
    "sum-once": sharded(sum_once=True, global_batch=3 * RANKS),
    "sum-once-bf16": sharded(sum_once=True, global_batch=2 * RANKS, gradient_dtype="bf16"),
    "sum-once-rerun": sharded(sum_once=True, global_batch=2 * RANKS, recompute="full"),
    "root": sharded(root_unit=True, model=WORDY),
    "adapters": sharded(lora_rank=4),
    "adapters-of-attention": sharded(lora_rank=4, lora_targets=frozenset({"qkv"})),
    "adapters-rerun": sharded(lora_rank=4, recompute="full", global_batch=2 * RANKS),
    "adapters-root": sharded(lora_rank=4, root_unit=True, model=WORDY),
}


@dataclass
class Messages(TorchDispatchMode):  # type: ignore[misc]
    """Counts the collectives of torch by what they are given: op and bytes."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::_").removesuffix("_base_")
            given = args[1]
            self.counts[name, given.numel() * given.element_size()] += 1
        return func(*args, **(kwargs or {}))


QUICK = ("one-microbatch",)
SLOW_IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("analyzer/model"))


def list_by_tier(*names: str) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else SLOW_IN_TURN) for name in names]


NAMES = {"all_gather": "allgather", "reduce_scatter": "reduce_scatter"}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    "name", list_by_tier("one-microbatch", "adapters", "adapters-rerun", "adapters-root")
)
def test_the_messages_of_a_step_are_those_of_torch(name: str) -> None:
    one, predicted = JOBS[name], Counter[tuple[str, int]]()
    for op in list_comm_ops(one):
        if op.op in NAMES:
            predicted[NAMES[op.op], op.input_bytes] += op.count
    model = Llama(one)
    trained = [each for each in model.parameters() if each.requires_grad]
    words = torch.zeros(1, TOKENS, dtype=torch.long)
    step = Step(one, model, torch.optim.AdamW(trained), words)
    with Messages() as messages:
        step.run(MemTracker())
    assert messages.counts == predicted


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", list_by_tier(*JOBS))
def test_the_peak_of_a_step_is_that_of_torch(name: str) -> None:
    (predicted,) = compute_memory(JOBS[name])
    peak_bytes = predicted.total_bytes - predicted.other_bytes
    assert peak_bytes == pytest.approx(measure_peak_bytes(JOBS[name]), rel=0.03)
