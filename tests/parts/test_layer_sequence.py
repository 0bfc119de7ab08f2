"""Layers from the sequence of ops, where no range names a module."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import MAIN, CpuTrace, GpuTrace
from support.part_compute import list_part_compute

from stepsplit.analyzer import analyze
from stepsplit.analyzer.parts.layer_sequence import Size, label_by_sizes, label_pass
from stepsplit.analyzer.parts.part import NO_LAYER
from stepsplit.analyzer.report.report import Report

BACKWARD = 200
SHORT = {"attention": "a", "mlp": "m", "experts": "x", "router": "r", "norm": "n", "embedding": "e",
         "head": "h", "loss": "l", "other": "o"}  # fmt: skip


def show(letters: str, sizes: str = "") -> str | None:
    """The places of a pass as text, such as "0a"; without a layer, the kind alone. Products of one
    size have the same letter in sizes."""
    known: tuple[Size | None, ...] = tuple(None if one == "?" else (ord(one), 1) for one in sizes)
    places = label_by_sizes(letters, known) if sizes else label_pass(letters)
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


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        # A gate before the first layer is no projection of each: an MLP has two of one size.
        ("gq.ommq.ommh", "0a 0a 0a 0a 0m 0m 1a 1a 1a 1m 1m h"),
        # Nothing is known, or no number of projections makes the sizes those of one kind each.
        ("??.????.????", "0a 0a 0a 0a 0m 1a 1a 1a 1a 1m h h"),
        ("aa.aaaa.aaaa", "0a 0a 0a 0a 0m 1a 1a 1a 1a 1m h h"),
    ],
)
def test_products_of_one_size_are_of_one_kind(sizes: str, places: str) -> None:
    assert show("GGAGGGGAGGGG", sizes) == places


def test_a_compiled_backward_has_the_products_of_its_forward(tmp_path: Path) -> None:
    """Their kind, by their sizes; the layer is not known."""
    trace, at = GpuTrace().step(1, 0, 1_000), 10
    hidden, wide, tokens = 8, 32, 64
    products = {"qkv": (hidden, 24), "out": (hidden, hidden), "up": (hidden, wide)}
    products |= {"down": (wide, hidden)}

    def multiply(left: list[int], right: list[int], tid: int) -> None:
        nonlocal at
        trace.op("aten::mm", at, at + 4, tid=tid, **{"Input Dims": [left, right]})
        trace.launch("nvjet_tst_128x64", (at + 1, at + 2), (at, at + 10), tid=tid)
        at += 10

    def run_forward(name: str) -> None:
        multiply([tokens, products[name][0]], list(products[name]), MAIN)

    for _ in range(2):
        run_forward("qkv")
        trace.op("aten::_flash_attention_forward", at, at + 4)
        trace.launch("flash_fwd_kernel", (at + 1, at + 2), (at, at + 10))
        at += 10
        for name in ("out", "up", "down"):
            run_forward(name)
    begin = at
    for _ in range(2):
        for name in ("down", "up", "out", "qkv"):
            inner, columns = products[name]
            multiply([tokens, columns], [columns, inner], BACKWARD)
            multiply([inner, tokens], [tokens, columns], BACKWARD)
    node = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    trace.op(node, begin, at, tid=BACKWARD, **{"Sequence number": 1})
    trace.write(tmp_path)
    assert list_part_compute(analyze(tmp_path)) == {
        (0, "attention", "forward"): 30, (0, "mlp", "forward"): 20,
        (1, "attention", "forward"): 30, (1, "mlp", "forward"): 20,
        (None, "attention", "backward"): 80, (None, "mlp", "backward"): 80,
    }  # fmt: skip


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


def test_the_devices_copy_of_a_steps_mark_does_not_end_a_pass(tmp_path: Path) -> None:
    """It begins with the step's first kernel, while the host is in the middle of its forward."""
    trace = GpuTrace().step(1, 0, 200).gpu_annotation("ProfilerStep#1", 12, 110)
    ops = {"G": ("aten::mm", "nvjet_tst"), "A": ("aten::_flash_attention_forward", "flash_fwd")}
    for place, letter in enumerate("GAGGGAGGG"):
        op, kernel = ops[letter]
        at = 10 * place
        trace.op(op, at, at + 9)
        trace.launch(kernel, (at + 1, at + 2), (at + 12, at + 22))
    trace.write(tmp_path)
    assert list_part_compute(analyze(tmp_path)) == {
        (0, "attention", "forward"): 30, (0, "mlp", "forward"): 10,
        (1, "attention", "forward"): 30, (1, "mlp", "forward"): 10,
        (None, "head", "forward"): 10,
    }  # fmt: skip


def test_the_microbatches_of_a_stage_are_no_further_layers(tmp_path: Path) -> None:
    """Without autograd's ranges a backward may look like more layers of the forward before it."""
    trace = CpuTrace(0, 2, [("0", "default_pg", [0, 1])]).step(1, 0, 400)
    names = {"N": "aten::layer_norm", "G": "aten::linear",
             "A": "aten::scaled_dot_product_attention"}  # fmt: skip
    begin = 0
    # Two forwards of two layers; then one with what follows it.
    for letters in ("NGAGNGG" * 2, "NGAGNGG" * 2, "NGAGNGG" * 4):
        for letter in letters:
            trace.op(names[letter], begin, begin + 5)
            begin += 5
        trace.message("send", 1, begin, begin + 5)
        begin += 5
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.part_evidence is not None
    assert (report.part_evidence.evidence, report.part_evidence.layers) == ("sequence", 0)
    placed = {
        (row.layer, row.part): row.total_ns // 1000 for row in report.parts if row.part != "other"
    }
    assert placed == {(None, "norm"): 80, (None, "attention"): 120, (None, "mlp"): 80}


OPS = {"N": ("aten::layer_norm", "layer_norm_kernel"), "G": ("aten::linear", "nvjet_tst"),
       "A": ("aten::_flash_attention_forward", "flash_fwd")}  # fmt: skip


@pytest.mark.parametrize(("thread", "layers"), [(BACKWARD, 2), (MAIN, 0)])
def test_accumulated_microbatches_are_no_further_layers(
    thread: int, layers: int, tmp_path: Path
) -> None:
    """Without autograd's ranges, embedding and loss, only autograd's own thread shows where the
    forward of a microbatch ends; on one thread a backward is no part of a forward."""
    trace, at = GpuTrace(), 0
    for step in (1, 2):
        begin = at
        for _ in range(3):
            for letter in "NGAGNGG" * 2:
                op, kernel = OPS[letter]
                trace.op(op, at, at + 4)
                trace.launch(kernel, (at + 1, at + 2), (at + 3, at + 9))
                at += 10
            for _ in range(4):
                trace.op("aten::_flash_attention_backward", at, at + 4, tid=thread)
                trace.launch("flash_bwd", (at + 1, at + 2), (at + 3, at + 19), tid=thread)
                at += 20
        trace.step(step, begin, at)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.part_evidence is not None and report.part_evidence.layers == layers
    compute = {
        (row.layer, row.part, row.phase): row.compute_ns // 6_000
        for row in report.parts
        if row.compute_ns
    }
    backward = {(None, "attention", "backward"): 32}
    of_layer = {"norm": 6, "attention": 9, "mlp": 6}
    if layers:
        forward = {
            (n, kind, "forward"): count for n in range(2) for kind, count in of_layer.items()
        }
        assert compute == forward | backward
    else:
        # Between two backwards may also be what one of them computes again.
        forward = {(None, kind, "forward"): 2 * count for kind, count in of_layer.items()}
        assert compute == forward | backward


def test_forwards_that_nothing_separates_have_kinds_and_no_layers(tmp_path: Path) -> None:
    """Three forwards of a layer each, or one of three: the recording does not say."""
    trace = CpuTrace().step(1, 0, 105)
    for place, letter in enumerate("NGAGNGG" * 3):
        trace.op(OPS[letter][0].replace("flash", "scaled_dot_product"), 5 * place, 5 * place + 5)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.part_evidence is not None and report.part_evidence.layers == 0
    placed = {(row.layer, row.part): row.total_ns // 1000 for row in report.parts}
    assert placed == {(None, "norm"): 30, (None, "attention"): 45, (None, "mlp"): 30}


ON_CPU = {
    "E": "aten::embedding", "N": "aten::layer_norm", "G": "aten::linear", "L": "aten::nll_loss",
    "A": "aten::_scaled_dot_product_attention_forward",
    "a": "aten::_scaled_dot_product_attention_backward",
    "l": "aten::nll_loss_backward", "e": "aten::embedding_dense_backward",
}  # fmt: skip


def count_layers_on_cpu(letters: str, folder: Path) -> tuple[int, dict[int | None, int]]:
    """How many layers the report says, and how many of these ops are in each; a backward's have
    none."""
    trace = CpuTrace().step(1, 0, 5 * len(letters))
    for place, letter in enumerate(letters):
        trace.op(ON_CPU[letter], 5 * place, 5 * place + 5)
    trace.write(folder)
    report = analyze(folder)
    assert report.part_evidence is not None
    counts: dict[int | None, int] = {}
    for row in report.parts:
        counts[row.layer] = counts.get(row.layer, 0) + row.total_ns // 5_000
    return report.part_evidence.layers, counts


FORWARD_ON_CPU = "E" + "NGAGNGG" * 2 + "NGL"


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("backward", ["laaGe", "aaGe", "lGaGaG", ""])
def test_a_backward_on_the_thread_of_its_forward_takes_no_layers_from_it(
    backward: str, microbatches: int, tmp_path: Path
) -> None:
    """The gradients of loss and embedding are neither the loss nor the embedding."""
    letters = (FORWARD_ON_CPU + backward) * microbatches
    layers, counts = count_layers_on_cpu(letters, tmp_path)
    assert layers == 2
    of_none = len(letters) - 14 * microbatches
    assert counts == {0: 7 * microbatches, 1: 7 * microbatches, None: of_none}


def test_a_head_separates_no_forwards_of_unequal_layers(tmp_path: Path) -> None:
    """A forward with a head and a loss that is not known: of three, the first two heads are in
    between layers, and only the last is at the end."""
    letters = "NGAGNGG" * 2 + "NG"
    assert count_layers_on_cpu(letters, tmp_path)[0] == 2
    assert count_layers_on_cpu(letters * 3, tmp_path) == (0, {None: len(letters * 3)})


OF_LAYER = ("rms_norm_kernel", "nvjet_tst_a", "flash_fwd_kernel", "nvjet_tst_b", "vectorized_add",
            "rms_norm_kernel", "nvjet_tst_c", "silu_mul", "nvjet_tst_d")  # fmt: skip
FORWARD = ("embedding_kernel", *OF_LAYER * 3, "rms_norm_kernel", "nvjet_tst_h", "nll_loss_forward")
_BACKWARD_OF = {
    "flash_fwd_kernel": ("flash_bwd_kernel",), "nll_loss_forward": ("nll_loss_backward",),
    "embedding_kernel": ("embedding_backward",),
}  # fmt: skip


def run_kernels(folder: Path, forward: tuple[str, ...], lost: int = -1) -> Report:
    """Three steps of a forward and its backward, two products for each, of which one may be lost;
    each kernel takes 10 us. The host was not recorded."""
    backward = []
    for name in reversed(forward):
        twice = (name, name) if name.startswith("nvjet") else (name,)
        backward += _BACKWARD_OF.get(name, twice)
    kernels = [*forward, *backward, "multi_tensor_apply_adam"]
    trace, at = GpuTrace(), 0.0
    for step in range(3):
        begin = at
        for place, name in enumerate(kernels):
            if place != lost or step != 1:
                trace.unlaunched(name, at, at + 10)
            at += 10
        trace.step(step, begin, at)
    trace.write(folder)
    return analyze(folder)


def test_kernels_without_a_host_have_layers_if_all_passes_are_alike(tmp_path: Path) -> None:
    report = run_kernels(tmp_path, FORWARD)
    assert report.part_evidence is not None
    assert (report.part_evidence.evidence, report.part_evidence.layers) == ("sequence", 3)
    compute = {
        (row.layer, row.part, row.phase): row.compute_ns // 10_000
        for row in report.parts
        if row.compute_ns
    }
    # Two norms in a layer; what is added, and the activation, are of the part before.
    of_layer = {("attention", "forward"): 4, ("norm", "forward"): 2, ("mlp", "forward"): 3,
                ("attention", "backward"): 5, ("norm", "backward"): 3,
                ("mlp", "backward"): 5}  # fmt: skip
    expected = {(n, *key): count for n in range(3) for key, count in of_layer.items()}
    outside = {("embedding", "forward"): 1, ("norm", "forward"): 1, ("head", "forward"): 1,
               ("loss", "forward"): 1, ("loss", "backward"): 1, ("head", "backward"): 2,
               ("norm", "backward"): 1, ("embedding", "backward"): 1,
               ("optimizer", "other"): 1}  # fmt: skip
    assert compute == expected | {(None, *key): count for key, count in outside.items()}


@pytest.mark.parametrize("lost", [2, 35])
def test_a_pass_that_is_not_like_the_others_leaves_all_unplaced(lost: int, tmp_path: Path) -> None:
    report = run_kernels(tmp_path, FORWARD, lost)
    assert report.part_evidence is not None and report.part_evidence.evidence == "ranges"
    assert {row.layer for row in report.parts} == {None}


def test_products_whose_names_say_otherwise_leave_all_unplaced(tmp_path: Path) -> None:
    forward = tuple("gemm_fc1" if name == "nvjet_tst_b" else name for name in FORWARD)
    report = run_kernels(tmp_path, forward)
    assert {row.layer for row in report.parts} == {None}


def test_without_any_order_kernels_have_the_kind_and_pass_that_their_names_say(
    tmp_path: Path,
) -> None:
    names = ["gemm_qkv", "gemm_7", "silu_and_mul", "flash_fwd", "_swiglu_backward_kernel",
             "flash_bwd", "gemm_qkv", "embedding_kernel"]  # fmt: skip
    trace = GpuTrace().step(0, 0, 80)
    for number, name in enumerate(names):
        trace.unlaunched(name, 10 * number, 10 * number + 10)
    (tmp_path / "dense").mkdir()
    trace.write(tmp_path / "dense")
    dense = analyze(tmp_path / "dense").parts
    assert {(row.part, row.phase): row.compute_ns // 10_000 for row in dense} == {
        ("attention", "forward"): 3, ("other", "other"): 1, ("mlp", "forward"): 1,
        ("mlp", "backward"): 1, ("attention", "backward"): 1, ("embedding", "other"): 1,
    }  # fmt: skip
    # With experts, which run the same activations, an activation says nothing.
    (tmp_path / "experts").mkdir()
    trace.unlaunched("fused_moe_kernel", 80, 90).step(1, 80, 90).write(tmp_path / "experts")
    parts = {row.part for row in analyze(tmp_path / "experts").parts}
    assert parts == {"attention", "embedding", "experts", "other"}
