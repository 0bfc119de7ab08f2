"""Layers from the sequence of ops, where no range names a module."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import CpuTrace

from stepsplit.analyzer import analyze
from stepsplit.analyzer.parts.layer_sequence import label_pass
from stepsplit.analyzer.parts.part import NO_LAYER

SHORT = {"attention": "a", "mlp": "m", "experts": "x", "router": "r", "norm": "n", "embedding": "e",
         "head": "h", "loss": "l", "other": "o"}  # fmt: skip


def show(letters: str) -> str | None:
    """The places of a pass as text, such as "0a"; without a layer, the kind alone."""
    places = label_pass(letters)
    if places is None:
        return None
    return " ".join(
        f"{'' if layer == NO_LAYER else layer}{SHORT[kind.label]}" for layer, kind in places
    )


@pytest.mark.parametrize(
    ("letters", "places"),
    [
        # Two layers: norm, qkv, core, projection, norm, two products of the MLP; norm, head, loss.
        ("ENGAGNGGNGAGNGGNGL", "e 0n 0a 0a 0a 0n 0m 0m 1n 1a 1a 1a 1n 1m 1m n h l"),
        # A stage in the middle of a pipeline has no embedding and no head.
        ("NGAGNGGNGAGNGG", "0n 0a 0a 0a 0n 0m 0m 1n 1a 1a 1a 1n 1m 1m"),
        # Separate projections, a gated MLP, and one layer before a loss.
        ("ENGGGAGNGGGNGL", "e 0n 0a 0a 0a 0a 0a 0n 0m 0m 0m n h l"),
        # A router and the products of its experts.
        ("NGAGNGMMNGAGNGMM", "0n 0a 0a 0a 0n 0r 0x 0x 1n 1a 1a 1a 1n 1r 1x 1x"),
        # Kernels of one core follow each other.
        ("GAAGGG", "0a 0a 0a 0a 0m 0m"),
        ("", None), ("GGGG", None), ("AAAA", None), ("AG", None), ("GAGGAGA", None),
    ],
)  # fmt: skip
def test_a_pass_has_layers(letters: str, places: str | None) -> None:
    assert show(letters) == places


def test_ops_without_any_range_have_layers_and_their_backward_too(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 220)
    names = {"E": "aten::embedding", "N": "aten::layer_norm", "G": "aten::linear",
             "A": "aten::scaled_dot_product_attention",
             "L": "aten::cross_entropy_loss"}  # fmt: skip
    letters = "ENGAGNGGNGL"
    for place, letter in enumerate(letters):
        begin = 10 * place
        trace.op(names[letter], begin, begin + 10, **{"Sequence number": place})
    for place in reversed(range(len(letters))):
        begin = 110 + 10 * (len(letters) - 1 - place)
        node = "autograd::engine::evaluate_function: AnyBackward0"
        trace.op(node, begin, begin + 10, **{"Sequence number": place})
        trace.op("aten::mm", begin, begin + 10)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.part_evidence is not None
    assert (report.part_evidence.evidence, report.part_evidence.layers) == ("sequence", 1)
    expected = {(None, "embedding"): 10, (0, "norm"): 20, (0, "attention"): 30, (0, "mlp"): 20,
                (None, "norm"): 10, (None, "head"): 10, (None, "loss"): 10}  # fmt: skip
    for phase in ("forward", "backward"):
        own = {
            (row.layer, row.part): row.total_ns // 1000
            for row in report.parts
            if row.phase == phase
        }
        assert own == expected
