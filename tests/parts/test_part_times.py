"""Where in the model an instant belongs: by modules, autograd's numbers, and names of ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.fleet import Fleet, run_fleet, write_fleet
from support.builders import MAIN, CpuTrace, GpuTrace
from support.part_compute import list_part_compute

from stepsplit.analyzer import analyze, examine
from stepsplit.analyzer.parts.part import PartKind, PartPhase
from stepsplit.analyzer.parts.scope_names import find_fused_kind, parse_op_kind, parse_range_name
from stepsplit.analyzer.report.report import Report

BACKWARD_THREAD = 200
ENGINE = "autograd::engine::evaluate_function: "


def list_parts(report: Report) -> dict[tuple[int | None, str, str], int]:
    """Each part's time in the mean step, in us."""
    assert report.summary is not None
    assert sum(row.total_ns for row in report.parts) == report.summary.step_ns
    return {(row.layer, row.part, row.phase): row.total_ns // 1000 for row in report.parts}


def model_on_cpu(trace: CpuTrace) -> CpuTrace:
    """A step of a model of one layer: 400 us, with a gap of Python in its attention."""

    def module(name: str, start: float, end: float) -> None:
        trace._add(f"nn.Module: {name}", "python_function", start, end, 100)

    module("LlamaForCausalLM_0", 0, 200)
    module("Embedding_0", 0, 10)
    trace.op("aten::embedding", 0, 10, **{"Sequence number": 1})
    module("LlamaDecoderLayer_0", 10, 150)
    module("LlamaAttention_0", 20, 80)
    trace.op("aten::mm", 20, 40, **{"Sequence number": 2}).op("aten::mm", 60, 80)
    module("LlamaMLP_0", 80, 150)
    trace.op("aten::mm", 80, 150, **{"Sequence number": 3})
    module("Linear_7", 150, 190)
    trace.op("aten::mm", 150, 190, **{"Sequence number": 4})
    trace.op("aten::cross_entropy_loss", 190, 200, **{"Sequence number": 5})
    for number, name, start, end in (
        (5, "NllLossBackward0", 200, 210), (4, "MmBackward0", 210, 240),
        (3, "MmBackward0", 240, 300), (2, "MmBackward0", 300, 340),
    ):  # fmt: skip
        trace.op(ENGINE + name, start, end, **{"Sequence number": number})
        trace.op(name, start, end, **{"Sequence number": number})
    # The sum of a gradient has no number: it is of the node before it.
    trace.op(ENGINE + "torch::autograd::AccumulateGrad", 340, 350)
    return trace.annotation("Optimizer.step#AdamW.step", 350, 400).op("aten::add_", 350, 400)


def test_modules_place_the_forward_and_numbers_of_autograd_the_backward(tmp_path: Path) -> None:
    trace = model_on_cpu(CpuTrace().step(1, 0, 400))
    trace.write(tmp_path)
    report = analyze(tmp_path)
    assert list_parts(report) == {
        (None, "embedding", "forward"): 10,
        (0, "other", "forward"): 10,
        (0, "attention", "forward"): 60,
        (0, "mlp", "forward"): 70,
        (None, "head", "forward"): 40,
        (None, "loss", "forward"): 10,
        (None, "loss", "backward"): 10,
        (None, "head", "backward"): 30,
        (0, "mlp", "backward"): 60,
        (0, "attention", "backward"): 50,
        (None, "optimizer", "other"): 50,
    }
    attention = next(row for row in report.parts if row.part == "attention")
    assert (attention.compute_ns, attention.idle_ns) == (40_000, 20_000)
    assert report.part_evidence is not None
    assert (report.part_evidence.evidence, report.part_evidence.layers) == ("modules", 1)
    assert report.part_evidence.unplaced_share == 0


def test_on_a_device_kernels_go_by_their_launch_and_idle_time_by_what_ends_it(
    tmp_path: Path,
) -> None:
    trace = GpuTrace().step(1, 0, 100)
    trace.python("nn.Module: Block_0", 0, 30).python("nn.Module: CausalSelfAttention_0", 0, 10)
    trace.python("nn.Module: MLP_0", 10, 30)
    trace.op("aten::mm", 2, 6, **{"Sequence number": 1})
    trace.op("aten::mm", 12, 16, **{"Sequence number": 2})
    trace.launch("gemm", (3, 4), (20, 50))
    trace.launch("gemm", (13, 14), (50, 70))
    for number, start in ((2, 40), (1, 60)):
        trace.op(ENGINE + "MmBackward0", start, start + 10, tid=BACKWARD_THREAD,
                 **{"Sequence number": number})  # fmt: skip
    trace.launch("gemm", (41, 42), (80, 90), tid=BACKWARD_THREAD)
    trace.launch("gemm", (61, 62), (90, 100), tid=BACKWARD_THREAD)
    trace.write(tmp_path)
    report = analyze(tmp_path)
    # From 0 to 20 attention is awaited, from 70 to 80 the gradient of the MLP.
    assert list_parts(report) == {
        (0, "attention", "forward"): 50,
        (0, "mlp", "forward"): 20,
        (0, "mlp", "backward"): 20,
        (0, "attention", "backward"): 10,
    }


def _launch_next(
    trace: GpuTrace, spans: Iterator[tuple[float, float]], start: float, end: float, tid: int
) -> None:
    trace.launch("gemm", (start, end), next(spans), tid=tid)


def write_steps(folder: Path, graph: bool) -> Path:
    """Three steps of a layer, forward and backward: launched one by one, or captured in the first
    step and replayed in the others. The kernels are the same."""
    trace = GpuTrace()

    def run_host(at: float, launch: Callable[[float, float, int], None]) -> None:
        trace.python("nn.Module: Block_0", at, at + 30)
        trace.python("nn.Module: CausalSelfAttention_0", at, at + 10)
        trace.python("nn.Module: MLP_0", at + 10, at + 30)
        for number, start in ((1, 2), (2, 12)):
            sequence = {"Sequence number": 10 * int(at) + number}
            trace.op("aten::mm", at + start, at + start + 4, **sequence)
            launch(at + start + 1, at + start + 2, MAIN)
        for number, start in ((2, 40), (1, 50)):
            sequence = {"Sequence number": 10 * int(at) + number}
            node = f"{ENGINE}MmBackward0"
            trace.op(node, at + start, at + start + 8, tid=BACKWARD_THREAD, **sequence)
            launch(at + start + 1, at + start + 2, BACKWARD_THREAD)

    for step in range(3):
        begin = 200.0 * step
        trace.step(step, begin, begin + 200)
        spans = [(begin + 100 + 20 * n, begin + 120 + 20 * n) for n in range(4)]
        if graph and step:
            trace.replay("gemm", (begin + 5, begin + 6), spans)
        elif graph:
            trace.call("cudaStreamBeginCapture", begin, begin)
            run_host(begin + 1, lambda a, b, tid: trace.call("cudaLaunchKernel", a, b, tid=tid))
            trace.call("cudaStreamEndCapture", begin + 99, begin + 99)
            trace.replay("gemm", (begin + 99.2, begin + 99.5), spans)
        else:
            launched = partial(_launch_next, trace, iter(spans))
            run_host(begin + 1, launched)
    folder.mkdir()
    trace.write(folder)
    return folder


def test_kernels_of_a_replayed_graph_are_where_their_capture_was(tmp_path: Path) -> None:
    def sum_compute(report: Report) -> dict[tuple[int | None, str, str], int]:
        return {
            (row.layer, row.part, row.phase): row.compute_ns
            for row in report.parts
            if row.compute_ns
        }

    plain = sum_compute(analyze(write_steps(tmp_path / "plain", graph=False)))
    assert plain == {
        (0, "attention", "forward"): 20_000, (0, "mlp", "forward"): 20_000,
        (0, "mlp", "backward"): 20_000, (0, "attention", "backward"): 20_000,
    }  # fmt: skip
    assert sum_compute(analyze(write_steps(tmp_path / "graph", graph=True))) == plain


def write_annotated_graph(folder: Path, paths: list[str], changed: Any = None) -> Path:
    """Three steps of one graph, whose kernels of 10 us say their modules as torchtitan's do."""
    trace, length = GpuTrace(), 10 * len(paths) + 20
    for step in range(3):
        begin = float(length * step)
        trace.step(step, begin, begin + length)
        for number, path in enumerate(paths):
            start = begin + 10 + 10 * number
            stated = {} if path == "" else {"module_fqn": changed or path}
            trace.kernel("gemm", start, start + 10, launched=begin + 2, **stated)
    folder.mkdir()
    trace.write(folder)
    return folder


def test_kernels_of_a_graph_that_say_their_module_are_there(tmp_path: Path) -> None:
    """Layers go up in the forward and down in the backward; of the head no pass is known."""
    layers = ["layers.0.attention.wq", "layers.0.feed_forward.w1", "layers.1.attention.wq",
              "layers.1.attention_norm"]  # fmt: skip
    report = analyze(
        write_annotated_graph(
            tmp_path / "run", ["tok_embeddings", *layers, "output", *layers[::-1], ""]
        )
    )
    assert {
        (row.layer, row.part, row.phase): row.compute_ns for row in report.parts if row.compute_ns
    } == {
        (None, "embedding", "other"): 10_000, (None, "head", "other"): 10_000,
        (None, "other", "other"): 10_000,
        **{
            (*place, phase): 10_000
            for place in ((0, "attention"), (0, "mlp"), (1, "attention"), (1, "norm"))
            for phase in ("forward", "backward")
        },
    }  # fmt: skip
    assert report.part_evidence is not None
    assert (report.part_evidence.evidence, report.part_evidence.layers) == ("modules", 2)


def test_the_one_kernel_of_many_that_says_its_module_is_there(tmp_path: Path) -> None:
    trace = GpuTrace()
    for step in range(3):
        begin = 1000.0 * step
        trace.step(step, begin, begin + 1000)
        for number in range(400):
            trace.kernel("fill", begin + 10 + 2 * number, begin + 11 + 2 * number, launched=begin)
        path = {"module_fqn": "layers.0.feed_forward.w1"}
        trace.kernel("gemm", begin + 900, begin + 930, launched=begin + 1, **path)
    trace.write(tmp_path)
    parts = {(row.layer, row.part): row.compute_ns for row in analyze(tmp_path).parts}
    assert parts[0, "mlp"] == 30_000


@pytest.mark.parametrize("value", [3, ["layers.0.mlp"], "no part of a model"])
def test_what_is_no_path_of_a_module_places_no_kernel(tmp_path: Path, value: object) -> None:
    report = analyze(write_annotated_graph(tmp_path / "run", ["a", "b"], value))
    assert {row.part for row in report.parts} == {"other"}
    assert report.part_evidence is not None and report.part_evidence.layers == 0


def test_a_module_that_is_called_inside_a_node_of_autograd_is_recomputed(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100)

    def run_block(start: float, number: int) -> None:
        trace._add("nn.Module: Block_0", "python_function", start, start + 20, 100)
        trace._add("nn.Module: MLP_0", "python_function", start, start + 20, 100)
        trace.op("aten::mm", start, start + 20, **{"Sequence number": number})

    run_block(0, 1)
    node = ENGINE + "CheckpointFunctionBackward"
    trace.op(node, 20, 90, **{"Sequence number": 1})
    run_block(30, 2)
    trace.op(ENGINE + "MmBackward0", 50, 90, **{"Sequence number": 2}).op("aten::mm", 50, 90)
    trace.write(tmp_path)
    assert list_parts(analyze(tmp_path)) == {
        (0, "mlp", "forward"): 20,
        (0, "mlp", "recompute"): 20,
        (0, "mlp", "backward"): 50,
        (None, "other", "other"): 10,
    }


def test_the_names_of_one_step_place_the_ops_of_all_that_do_the_same(tmp_path: Path) -> None:
    trace = CpuTrace()

    def run_step(number: int, start: float, pace: float, op: str = "aten::mul") -> None:
        def at(us: float) -> float:
            return start + pace * us

        trace.step(number, at(0), at(100))
        for name, begin, end, sequence in (("aten::mm", 10, 30, 1), (op, 30, 60, 2)):
            trace.op(name, at(begin), at(end), **{"Sequence number": 10 * number + sequence})
        for sequence, begin, end in ((2, 60, 80), (1, 80, 100)):
            node = {"Sequence number": 10 * number + sequence}
            trace.op(ENGINE + "MmBackward0", at(begin), at(end), **node)

    run_step(1, 0, 1)
    for name, start, end in (("layers.0.attn", 5, 30), ("layers.0.mlp", 30, 60)):
        trace.annotation(f"stepsplit::module {name}", start, end)
    # The second one takes twice as long, the third runs another op.
    run_step(2, 100, 2)
    run_step(3, 300, 1, "aten::div")
    trace.write(tmp_path)
    tables = examine([tmp_path]).tables.parts
    times = Counter[tuple[int, int, int, int]]()
    for step, layer, part, phase, ns in zip(
        tables.step.tolist(), tables.layer.tolist(), tables.part.tolist(),
        tables.phase.tolist(), tables.ns.tolist(), strict=True,
    ):  # fmt: skip
        times[step, layer, part, phase] += ns // 1000
    attention, mlp = int(PartKind.ATTENTION), int(PartKind.MLP)
    for step, pace in ((1, 1), (2, 2)):
        own = {key[1:]: us for key, us in times.items() if key[0] == step}
        assert own == {
            (-1, int(PartKind.OTHER), int(PartPhase.OTHER)): 5 * pace,
            (0, attention, 0): 25 * pace,
            (0, mlp, 0): 30 * pace,
            (0, mlp, 1): 20 * pace,
            (0, attention, 1): 20 * pace,
        }
    assert not any(key[0] == 3 and key[1] == 0 for key in times)


@pytest.mark.parametrize("has_stacks", [True, False])
def test_a_backward_begins_where_it_is_called(tmp_path: Path, has_stacks: bool) -> None:
    """What a script does with the loss before is of no part."""
    trace = CpuTrace().step(1, 0, 100)
    trace.annotation("stepsplit::module lm_head", 0, 40)
    trace.op("aten::mm", 0, 40, **{"Sequence number": 1})
    trace.op("aten::ones_like", 42, 43).op("aten::item", 45, 50).op("aten::ones_like", 71, 72)
    if has_stacks:
        trace._add("torch/autograd/__init__.py(251): backward", "python_function", 70, 100, 100)
    trace.op(ENGINE + "MmBackward0", 80, 100, **{"Sequence number": 1})
    trace.write(tmp_path)
    begin = 70 if has_stacks else 71
    assert list_parts(analyze(tmp_path)) == {
        (None, "head", "forward"): 40,
        (None, "other", "other"): begin - 40,
        (None, "head", "backward"): 100 - begin,
    }


def test_a_model_without_layers_needs_no_other_recording(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100)
    trace.annotation("stepsplit::module 0", 0, 40).op("aten::mm", 0, 40).write(tmp_path)
    evidence = analyze(tmp_path).part_evidence
    assert evidence is not None and (evidence.evidence, evidence.layers) == ("modules", 0)


def test_what_a_built_in_function_is_called_for_is_no_part(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100)
    trace._add("nn.Module: Block_0", "python_function", 0, 100, 100)
    trace._add("nn.Module: MLP_0", "python_function", 0, 100, 100)
    for name in ("next_functions of EmbeddingBackward0", "eval of LayerNorm"):
        at = 20 if name.startswith("eval") else 60
        text = f"<built-in method {name} object at 0x7f26882b7bb0>"
        trace._add(text, "python_function", at, at + 20, 100)
    trace.op("aten::mm", 0, 100).write(tmp_path)
    assert list_parts(analyze(tmp_path)) == {(0, "mlp", "forward"): 100}


def test_a_norm_of_vectors_in_a_module_is_no_optimizer(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100)
    trace._add("nn.Module: Owlv2ForObjectDetection_0", "python_function", 0, 60, 100)
    trace.op("aten::linalg_vector_norm", 10, 50).op("aten::linalg_vector_norm", 60, 100)
    trace.write(tmp_path)
    assert list_parts(analyze(tmp_path)) == {
        (None, "other", "forward"): 60, (None, "optimizer", "other"): 40,
    }  # fmt: skip


def test_a_function_around_the_model_is_no_part_of_the_loss(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100)
    trace._add("trainer.py(1): compute_loss", "python_function", 0, 100, 100)
    trace._add("nn.Module: Model_0", "python_function", 0, 80, 100)
    trace._add("nn.Module: Block_0", "python_function", 0, 60, 100)
    trace._add("nn.Module: MLP_0", "python_function", 0, 60, 100)
    trace.op("aten::mm", 0, 60).op("aten::mul", 80, 100)
    trace.write(tmp_path)
    assert list_parts(analyze(tmp_path)) == {
        (0, "mlp", "forward"): 60,
        (None, "other", "forward"): 20,
        (None, "loss", "forward"): 20,
    }


@pytest.mark.parametrize(
    ("annotation", "part", "phase"),
    [
        ("attn(F)", "attention", "forward"), ("mlp(B)", "mlp", "backward"),
        ("mlp(W)", "mlp", "backward"), ("attention_bwd", "attention", "backward"),
        ("layers.3.mlp backward", "mlp", "backward"), ("recompute mlp", "mlp", "recompute"),
        ("attn_wgrad", "attention", "backward"), ("lm_head", "head", "forward"),
        ("loss (B)", "loss", "backward"), ("optimizer backward", "optimizer", "other"),
        ("MLPBwd", "mlp", "backward"), ("mlpBackward", "mlp", "backward"),
        # Names of both passes, and of no pass.
        ("loss forward_backward", "loss", "forward"), ("attn_fwd_bwd", "attention", "forward"),
        ("attention (b)", "attention", "forward"), ("no_recompute mlp", "mlp", "forward"),
    ],
)  # fmt: skip
def test_an_annotation_says_the_pass(
    annotation: str, part: str, phase: str, tmp_path: Path
) -> None:
    trace = GpuTrace().step(1, 0, 100).annotation(annotation, 0, 50)
    trace.launch("gemm", (10, 12), (20, 100)).write(tmp_path)
    places = {(row.part, row.phase) for row in analyze(tmp_path).parts if row.compute_ns}
    assert places == {(part, phase)}


def test_an_op_between_a_forward_and_an_annotated_backward_is_of_neither(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 200).annotation("attn(F)", 0, 50).annotation("mlp(B)", 100, 150)
    trace.op("aten::add", 58, 64)
    for launched, ran in ((10, 0), (60, 50), (110, 100)):
        trace.launch("gemm", (launched, launched + 2), (ran + 12, ran + 52))
    trace.write(tmp_path)
    assert list_part_compute(analyze(tmp_path)) == {
        (None, "attention", "forward"): 40, (None, "other", "other"): 40,
        (None, "mlp", "backward"): 40,
    }  # fmt: skip


def test_a_container_of_layers_is_no_layer(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 90)
    trace._add("nn.Module: TransformerBlock_0", "python_function", 0, 90, 100)
    for layer in (0, 1):
        start = 10 + 40 * layer
        name = f"nn.Module: TransformerLayer_{layer}"
        trace._add(name, "python_function", start, start + 40, 100)
        trace.op("aten::mm", start, start + 40)
    trace.write(tmp_path)
    times = Counter[int | None]()
    for (layer, _, _), us in list_parts(analyze(tmp_path)).items():
        times[layer] += us
    assert times == {None: 10, 0: 40, 1: 40}


def test_without_any_evidence_all_is_other_and_nothing_is_said(tmp_path: Path) -> None:
    GpuTrace().step(1, 0, 100).kernel("k", 0, 50).write(tmp_path)
    report = analyze(tmp_path)
    assert list_parts(report) == {(None, "other", "other"): 100}
    assert report.part_evidence is not None
    assert report.part_evidence.evidence == "none"
    assert report.part_evidence.unplaced_share == 1


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("stepsplit::module model.layers.3.self_attn.q_proj", "ATTENTION", 3),
        ("stepsplit::module layers.11.attention_norm", "NORM", 11),
        ("stepsplit::module layers.2.attention.q_norm", "ATTENTION", 2),
        ("stepsplit::module transformer.h.0.mlp.c_fc", "MLP", 0),
        ("stepsplit::module layers.4.block_sparse_moe.gate", "ROUTER", 4),
        ("stepsplit::module layers.4.mlp.gate_proj", "MLP", 4),
        ("stepsplit::module layers.5.mlp.experts.7.w1", "EXPERTS", 5),
        ("stepsplit::module lm_head", "HEAD", -1),
        ("stepsplit::module output", "HEAD", -1),
        ("stepsplit::module tok_embeddings", "EMBEDDING", -1),
        ("nn.Module: MixtralSparseMoeBlock_2", "EXPERTS", -1),
        ("nn.Module: BertSelfAttention_0", "ATTENTION", -1),
        ("nn.Module: BertOutput_1", "MLP", -1),
        ("nn.Module: ViTOutput_1", "MLP", -1),
        ("nn.Module: FusedMoE_0", "EXPERTS", -1),
        ("nn.Module: SwiGLU_2", "MLP", -1),
        ("nn.Module: GPT2LMHeadModel_0", None, -1),
        ("nn.Module: GPT2Block_3", None, 3),
        ("nn.Module: LlamaRMSNorm_4", "NORM", -1),
        ("nn.Module: FinalProjection_0", "HEAD", -1),
        ("stepsplit::module decoder_layers.2.attention.out_proj", "ATTENTION", 2),
        ("nn.Module: Conv1D_4", None, -1),
        ("[pl][module]torch.nn.modules.linear.Linear: layers.1.mlp", "MLP", 1),
        ("FSDP::all_gather (layers.3)", None, 3),
        ("FSDP::post_backward_reduce (layers.3)", "GRADIENT_REDUCTION", 3),
        ("FSDP::all_gather (norm, head)", None, -1),
        ("TransformerLayer._forward_mlp.mlp", "MLP", -1),
        ("Optimizer.zero_grad#AdamW.zero_grad", "OPTIMIZER", -1),
        ("torch/nn/utils/clip_grad.py(22): clip_grad_norm_", "OPTIMIZER", -1),
    ],
)
def test_what_a_name_says(name: str, kind: str | None, layer: int) -> None:
    scope = parse_range_name(name)
    assert scope is not None
    assert (None if scope.kind is None else scope.kind.name) == kind
    assert scope.layer == layer


@pytest.mark.parametrize(
    "name",
    ["ProfilerStep#3", "loss.py(3): step", "forward", "nccl:all_reduce", "normalize", "nn.Module",
     "gloo:send", "stepsplit::F stage=0 mb=0"],
)  # fmt: skip
def test_names_that_say_nothing(name: str) -> None:
    assert parse_range_name(name) is None
    assert parse_op_kind(name) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_red_fused__fused_rms_norm__unsafe_view_add_mul_3", "NORM"),
        ("triton_per_fused_add_native_layer_norm_2", "NORM"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "NORM"),
        ("triton_red_fused__log_softmax_div_nll_loss_forward_5", "LOSS"),
        # The gradient of an activation, which torch names with the loss that it follows.
        ("triton_poi_fused__unsafe_view_mul_nll_loss_forward_pow_relu_view_5", "MLP"),
        ("triton_poi_fused_mul_silu_4", "MLP"),
        ("triton_poi_fused_embedding_0", "EMBEDDING"),
        ("triton_poi_fused_embedding_dense_backward_21", "EMBEDDING"),
        ("triton_per_fused__flash_attn_backward__view_mul_10", "ATTENTION"),
        ("triton_poi_fused__to_copy_t_8", None),
        ("my_rms_norm_kernel", None),
    ],
)
def test_what_a_kernel_of_torch_compile_fuses(name: str, kind: str | None) -> None:
    found = find_fused_kind(name)
    assert (None if found is None else found.name) == kind


def test_fused_kernels_in_no_module_have_a_kind_by_what_they_fuse(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 100)
    trace.op("CompiledFunction", 0, 20, **{"Sequence number": 1})
    trace.launch("triton_red_fused_add_rms_norm_0", (3, 4), (10, 40))
    trace.launch("triton_poi_fused__to_copy_t_8", (5, 6), (40, 50))
    trace.op(ENGINE + "CompiledFunctionBackward", 30, 60, tid=BACKWARD_THREAD,
             **{"Sequence number": 1})  # fmt: skip
    trace.launch("triton_poi_fused_mul_silu_backward_1", (31, 32), (50, 100), tid=BACKWARD_THREAD)
    trace.write(tmp_path)
    assert list_part_compute(analyze(tmp_path)) == {
        (None, "norm", "other"): 30, (None, "other", "other"): 10, (None, "mlp", "backward"): 50,
    }  # fmt: skip


@pytest.mark.slow
def test_ops_without_autograd_are_of_the_pass_that_the_schedule_runs(tmp_path: Path) -> None:
    """Backwards take twice as long as forwards here."""
    write_fleet(run_fleet(Fleet(pp=2, dp=1, microbatches=3, layers=2, steps=3)), tmp_path, 1)
    report = analyze(tmp_path)
    compute = dict.fromkeys(("forward", "backward", "other"), 0)
    for row in report.parts:
        assert row.part != "optimizer" or row.phase == "other"
        compute[row.phase] += row.compute_ns
    assert compute["backward"] / compute["forward"] == pytest.approx(2, rel=0.02)
    attention = [row for row in report.parts if row.part == "attention"]
    assert {row.phase for row in attention} == {"forward", "backward"}
