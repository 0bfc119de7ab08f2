"""Adam by torch's lists of tensors (foreach): its bytes, counted as torch runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.work_builders import UNIT, job

from stepsplit.analyzer import JobConfig, predict, read_job
from stepsplit.analyzer.analysis import Analysis, examine_with_inferred_job
from stepsplit.analyzer.model.memory_peak import compute_optimizer_bytes
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns
from stepsplit.analyzer.model.parameters import count_stage_parameters

PLAIN: dict[str, Any] = {"framework": "ddp", "dtype": "fp32", "clip_gradients": False}

ROOT = Path(__file__).parents[2]


def count_bytes(one: JobConfig) -> float:
    """The bytes that the optimizer step moves for each parameter."""
    (parameters,) = count_stage_parameters(one)
    return compute_optimizer_ns(one, UNIT, parameters) / parameters.total


def count_bytes_of_torch(**options: bool) -> float:
    """The bytes of the tensors that the operations of torch's AdamW read and write."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    moved = []

    def is_large(each: Any) -> bool:
        """Whether it is a tensor of a weight's size; steps are tensors of one element."""
        return isinstance(each, torch.Tensor) and each.numel() > 1

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            lists = [one for one in args if isinstance(one, (list, tuple)) and is_large(one[0])]
            read = {id(tensor): tensor for one in lists for tensor in one}
            written = made or lists[0] if lists else ()
            moved.extend(tensor.nbytes for tensor in (*read.values(), *written))
            return made

    weights = [torch.nn.Parameter(torch.randn(64, 32)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW(weights, **options)
    optimizer.step()
    with Counter():
        optimizer.step()
    return sum(moved) / sum(weight.numel() for weight in weights)


def test_its_bytes_are_those_of_torchs_operations() -> None:
    assert count_bytes(job(**PLAIN, fused_optimizer=False)) == count_bytes_of_torch(foreach=True)
    assert count_bytes(job(**PLAIN)) == 28


def test_moments_in_bf16_move_half() -> None:
    one = job(**PLAIN, fused_optimizer=False, moments_dtype="bf16")
    assert count_bytes(job(**PLAIN, moments_dtype="bf16")) == 20
    assert count_bytes(one) == 20 + 8 + 4 + 20


def test_it_needs_the_root_of_a_moment() -> None:
    (parameters,) = count_stage_parameters(job())
    fused, lists, halved = (
        compute_optimizer_bytes(job(fused_optimizer=is_fused, moments_dtype=dtype), parameters)
        for is_fused, dtype in ((True, "fp32"), (False, "fp32"), (False, "bf16"))
    )
    assert (lists - fused, halved - fused) == (4 * parameters.total, 2 * parameters.total)


def test_the_step_is_longer_and_says_why() -> None:
    fused, lists = (predict(job(fused_optimizer=is_fused)) for is_fused in (True, False))
    assert lists.split.compute_ns > fused.split.compute_ns
    assert [one.id for one in set(lists.formulas) - set(fused.formulas)] == ["step.foreach"]


def test_a_recording_shows_which_it_is() -> None:
    """The H100's step by lists of tensors; the CPU's has neither."""
    for sample, is_known in (("h100_pp2", True), ("dp4", False)):
        made = examine_with_inferred_job([ROOT / "sample_traces" / sample])
        assert isinstance(made, Analysis)
        draft = made.job_draft
        assert draft is not None
        assert ("fused_optimizer = false" in draft.text) is is_known


@pytest.mark.parametrize(
    ("framework", "preset", "is_fused"),
    [
        ("huggingface", "h100-sxm", False),
        ("ddp", "h100-sxm", False),
        ("ddp", "cpu", True),
        ("megatron", "h100-sxm", True),
        ("fsdp2", "h100-sxm", True),
    ],
)
def test_plain_loops_use_it_on_gpus(
    framework: str, preset: str, is_fused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "[model]\nlayers = 2\nhidden = 64\nheads = 4\nvocab = 512\n"
        "[training]\nseq_len = 64\nmicro_batch = 1\nglobal_batch = 1\n"
        f'framework = "{framework}"\n[hardware]\npreset = "{preset}"\n'
    )
    assert read_job(path).training.fused_optimizer is is_fused
