"""Parts of a layer that a program runs as separate torch operations (unfused)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.work_builders import LLAMA_ON_H100, TINY, UNIT, job

from stepsplit.analyzer import JobConfig, predict, read_job
from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.config import UNFUSED_PARTS, UnfusedPart
from stepsplit.analyzer.model.elementwise import EAGER_RATE, time_elementwise, time_softmax
from stepsplit.analyzer.model.memory_states import compute_layers_by_kind

GATED = replace(TINY, gated=True)
HIDDEN, ROTATED, ACTIVATIONS = 16 * 8, 16 * 16, 16 * 32
"""Elements of 16 tokens: hidden states, queries and keys, between the GEMMs of the MLP."""


def count_bytes(unfused: frozenset[UnfusedPart] | None, **model: Any) -> tuple[float, float]:
    """Bytes of a layer, forward and backward, at the rate of fused kernels."""
    one = job(replace(GATED, **model), unfused=unfused)
    found = time_elementwise(one, UNIT, ACTIVATIONS)
    return found.forward_ns, found.backward_ns


def only(part: UnfusedPart) -> frozenset[UnfusedPart]:
    return frozenset({part})


@pytest.mark.parametrize(
    ("part", "forward", "backward"),
    [
        ("norms", 2 * HIDDEN * (36 / EAGER_RATE - 4), 2 * HIDDEN * (92 / EAGER_RATE - 6)),
        ("rotary", ROTATED * (20 / EAGER_RATE - 4), ROTATED * (28 / EAGER_RATE - 4)),
        ("activation", ACTIVATIONS * (10 / EAGER_RATE - 6), ACTIVATIONS * (18 / EAGER_RATE - 10)),
        ("softmax", 0.0, 0.0),
    ],
)
def test_a_part_takes_the_bytes_of_its_operations_instead_of_one_kernels(
    part: UnfusedPart, forward: float, backward: float
) -> None:
    fused, apart = count_bytes(None), count_bytes(only(part))
    assert apart[0] - fused[0] == pytest.approx(forward)
    assert apart[1] - fused[1] == pytest.approx(backward)


def test_scores_are_scaled_masked_and_normalized_one_by_one() -> None:
    apart = time_softmax(job(GATED, unfused=only("softmax")), UNIT, 100.0)
    assert (apart.forward_ns, apart.backward_ns) == pytest.approx((2800 / EAGER_RATE,) * 2)


def test_what_torch_runs_in_one_kernel_anyhow_costs_nothing_more() -> None:
    """A layer norm, an activation without a gate; and learned positions rotate nothing."""
    model = {"norm": "layer", "gated": False, "positions": 64}
    assert count_bytes(frozenset(UNFUSED_PARTS), **model) == count_bytes(frozenset(), **model)


def test_unfused_parts_save_more() -> None:
    """fp32 copies of the inputs of two norms, and silu(gate)."""
    fused, apart = (
        compute_layers_by_kind(job(GATED, unfused=unfused)).dense.total_bytes
        for unfused in (None, frozenset({"norms", "activation"}))
    )
    assert apart - fused == 2 * 4 * HIDDEN + 2 * ACTIVATIONS


def test_fused_kernels_under_transformers_are_stated_likewise(tmp_path: Path) -> None:
    """Liger's: no part is left to torch."""
    eager, fused = (
        predict(read(tmp_path, f'framework = "huggingface"\n{line}'))
        for line in ("", "unfused = []")
    )
    assert fused.split.compute_ns < eager.split.compute_ns
    assert fused.memory[0].activations_bytes < eager.memory[0].activations_bytes


def read(folder: Path, lines: str) -> JobConfig:
    path = folder / "job.toml"
    path.write_text(LLAMA_ON_H100.replace('framework = "megatron"', lines).replace("tp = 8", ""))
    return read_job(path)


def test_the_step_is_longer_and_says_why(tmp_path: Path) -> None:
    plain = predict(read(tmp_path, 'framework = "megatron"'))
    stated = predict(read(tmp_path, 'framework = "megatron"\nunfused = ["norms", "rotary"]'))
    assert stated.split.compute_ns > plain.split.compute_ns
    assert [one.id for one in set(stated.formulas) - set(plain.formulas)] == ["step.unfused"]


def test_compile_leaves_nothing_unfused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="compile fuses rotary; remove compile or unfused"):
        read(tmp_path, 'framework = "fsdp2"\ncompile = true\nunfused = ["rotary"]')


def test_an_unknown_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"training\.unfused: .*'attention'.*norms"):
        read(tmp_path, 'unfused = ["attention"]')
