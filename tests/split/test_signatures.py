"""The recipe "A strategy" of CONTRIBUTING.md: one entry of a table, and its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.builders import GpuTrace

from stepsplit.analyzer import AxisSize, Strategy, analyze
from stepsplit.analyzer.split import axis_signatures, strategies
from stepsplit.analyzer.split.axis_signatures import (
    AXIS_SIGNATURES,
    AxisSignature,
    HasMeanCalls,
    UsagePattern,
)
from stepsplit.analyzer.split.signature import (
    HasByteRatio,
    HasCalls,
    HasOrder,
    IsAlong,
    Pattern,
    Signature,
)
from stepsplit.analyzer.split.strategies import SIGNATURES
from stepsplit.analyzer.split.strategy_evidence import BACKWARD, FORWARD

TOY = Signature(
    name="weight streaming",
    axis="dp_replicate",
    unless=("tp", "cp"),
    patterns=(
        Pattern(
            needs=(
                # The owner of a layer sends its weights before each use, and gets the gradients.
                HasOrder("XL", ("broadcast",)),
                HasCalls(("broadcast",), (BACKWARD,)),
                HasByteRatio(("broadcast",), (FORWARD,), 0.9, ("reduce",), (BACKWARD,)),
            ),
            absent=(HasCalls(("all_reduce",)), IsAlong(("ep",))),
            detail="one owner per layer",
        ),
    ),
)


def write_step(folder: Path, gradients: str, size: int) -> None:
    """Both ranks: a broadcast before each of two products, again in the backward, and gradients."""
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=[("0", "", [0, 1])]).step(1, 0, 100)
        trace.op("autograd::engine::evaluate_function: MmBackward0", 50, 90)
        for at in (1, 21):
            trace.collective("Broadcast", "broadcast", at, at + 8, nelems=4096)
            trace.op("aten::linear", at + 10, at + 18).kernel("gemm", at + 10, at + 18)
        trace.collective("Broadcast", "broadcast", 52, 58, nelems=4096)
        trace.collective(gradients, gradients.lower(), 60, 68, nelems=size)
        trace.collective("Broadcast", "broadcast", 70, 76, nelems=4096)
        trace.collective(gradients, gradients.lower(), 80, 88, nelems=size)
        trace.write(folder)


def test_a_strategy_is_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, "Reduce", 4096)
    assert analyze(tmp_path).run.strategies == ()
    monkeypatch.setattr(strategies, "SIGNATURES", (TOY, *SIGNATURES))
    toy = Strategy("weight streaming", "dp_replicate", 2, "one owner per layer")
    assert analyze(tmp_path).run.strategies == (toy,)


@pytest.mark.parametrize(
    ("gradients", "size", "lacks"),
    [
        ("AllReduce", 4096, "an op that must be absent"),
        ("Reduce", 8192, "as many bytes of weights as of gradients"),
    ],
)
def test_an_entry_fits_only_what_it_describes(
    gradients: str, size: int, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, gradients, size)
    monkeypatch.setattr(strategies, "SIGNATURES", (TOY, *SIGNATURES))
    names = {strategy.name for strategy in analyze(tmp_path).run.strategies}
    assert "weight streaming" not in names, lacks


def test_the_docstring_of_a_strategy_has_the_names_of_the_table() -> None:
    described = (Strategy.__doc__ or "").split("name: ")[1].split("axis: ")[0]
    names = dict.fromkeys(signature.name for signature in SIGNATURES)
    assert re.findall(r'"([^"]+)"', described) == [*names]


def test_entries_refer_only_to_names_of_the_table() -> None:
    names = {signature.name for signature in SIGNATURES}
    assert {other for signature in SIGNATURES for other in signature.unless} <= names


def test_an_axis_is_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, "Reduce", 4096)
    assert analyze(tmp_path).run.mesh is None
    streams = UsagePattern(
        needs=(HasMeanCalls("broadcast", "early", 2), HasMeanCalls("broadcast", "late", 2)),
        absent=(HasMeanCalls("all_gather", "early"),),
    )
    toy = AxisSignature("dp_shard", patterns=(streams,))
    monkeypatch.setattr(axis_signatures, "AXIS_SIGNATURES", (*AXIS_SIGNATURES, toy))
    assert analyze(tmp_path).run.mesh == (AxisSize("dp_shard", 2),)
