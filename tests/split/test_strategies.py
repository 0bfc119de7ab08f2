"""Detected strategies: constructed call sequences, and real trainings with known answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.builders import GpuTrace
from support.required import shared_trace

from stepsplit.analyzer import Strategy, analyze
from stepsplit.analyzer.report.io import from_json, to_json
from stepsplit.analyzer.split.strategies import SIGNATURES
from stepsplit.collectors.demo.launch import launch_workload

SAMPLES = Path(__file__).parents[2] / "sample_traces"
OPS = {
    "E": "aten::embedding",
    "L": "aten::linear",
    "A": "aten::scaled_dot_product_attention",
    "K": "aten::topk",
    "N": "aten::layer_norm",
    "U": "aten::_amp_foreach_non_finite_check_and_unscale_",
    "8": "aten::_scaled_mm",
    "S": "aten::_amp_update_scale_",
    "Z": "PreBackwardFunctionForModule",
}
CALLS = {
    "r": ("AllReduce", "allreduce"),
    "g": ("AllGather", "_allgather_base"),
    "s": ("ReduceScatter", "_reduce_scatter_base"),
    "x": ("AllToAll", "alltoall_base"),
    "b": ("Broadcast", "broadcast"),
}
"""The letters of a story: what the host does, one after the other, ten microseconds each. Brackets
are spans: () of autograd, [] of the optimizer, {} of FSDP. A digit names the group that follows."""
SPANS = {"(": ")", "[": "]", "{": "}"}
NAMED = {
    "(": "autograd::engine::evaluate_function: MulBackward0",
    "[": "Optimizer.step#AdamW.step",
    "{": "FSDP::unit",
}


def rank_of(rank: int, story: str, groups, steps: int = 2) -> GpuTrace:
    """A rank that goes through the story in each of its steps."""
    trace, size = GpuTrace(rank, len(groups[0][2]), groups=groups), 10 * (len(story) + 1)
    for number in range(steps):
        trace.step(number, number * size, (number + 1) * size - 1)
        _tell(trace, story, number * size)
    return trace


def _tell(trace: GpuTrace, story: str, begin: float) -> None:
    opened: list[tuple[str, float]] = []
    group = "0"
    for i, letter in enumerate(story):
        at = begin + 10 * i + 1
        if letter in SPANS:
            opened.append((letter, at))
        elif letter in SPANS.values():
            opening, start = opened.pop()
            span = trace.op if opening == "(" else trace.annotation
            span(NAMED[opening], start, at)
        elif letter in OPS:
            trace.op(OPS[letter], at, at + 8).kernel("gemm", at, at + 8)
        elif letter in CALLS:
            trace.collective(*CALLS[letter], at, at + 8, group=group)
        else:
            group = letter


def strategies(folder: Path, story: str, ranks: int = 2, *groups) -> list[tuple]:
    """What is recognized of ranks that all go through the story."""
    world = ("0", "default_pg", list(range(ranks)))
    for rank in range(ranks):
        own = [world, *(group for group in groups if rank in group[2])]
        rank_of(rank, story, own).write(folder)
    found = analyze(folder).run.strategies
    return [(one.name, one.axis, one.size, one.detail) for one in found]


EITHER = "or zero-2: with one microbatch they send the same"
TWO_LAYERS = "LrLrLrLr(rrrr)"
STORIES = {
    "gradients summed in the backward": ("LL(rr)[]", [("ddp", "dp_replicate", 2, "")]),
    "gradients summed behind the backward": ("LL()rr[]", [("ddp", "dp_replicate", 2, "")]),
    "owners hand weights on": ("LL(rr)[bb]", [("zero-1", "dp_replicate", 2, EITHER)]),
    "gradients scattered behind the backward": (
        "LL()s[]g",
        [("zero-1", "dp_replicate", 2, EITHER)],
    ),
    "gradients of two microbatches scattered at once": (
        "L()L()s[]g",
        [
            ("zero-1", "dp_replicate", 2, ""),
            ("gradient accumulation", None, None, "2 microbatches, gradients summed once"),
        ],
    ),
    "gradients of each microbatch scattered": (
        "L()sL()s[]g",
        [
            ("zero-2", "dp_replicate", 2, ""),
            ("gradient accumulation", None, None, "2 microbatches, gradients summed after each"),
        ],
    ),
    "gradients scattered as they come": (
        "LL(ss)[]gg",
        [("zero-2", "dp_replicate", 2, "gradients scattered during the backward")],
    ),
    "weights gathered once": (
        "{g}L{g}L({s}{s})[]",
        [("zero-2", "dp_shard", 2, "weights kept until the backward")],
    ),
    "weights gathered again": ("{g}L{g}L({g}{s}{g}{s})[]", [("fsdp", "dp_shard", 2, "")]),
    "weights gathered once by DeepSpeed's ZeRO-3": (
        "gZLgZLgZLgZL(ssss)[]",
        [("fsdp", "dp_shard", 2, "weights kept until the backward")],
    ),
    "weights that DeepSpeed's ZeRO-3 does not shard": (
        "LZLZ(ss)[]gg", [("fsdp", "dp_replicate", 2, "weights too small to shard")],
    ),
    "two microbatches": (
        "L()L(r)[]",
        [
            ("ddp", "dp_replicate", 2, ""),
            ("gradient accumulation", None, None, "2 microbatches, gradients summed once"),
        ],
    ),
    "two microbatches, each summed": (
        "L(r)L(r)[]",
        [
            ("ddp", "dp_replicate", 2, ""),
            ("gradient accumulation", None, None, "2 microbatches, gradients summed after each"),
        ],
    ),
    "the last microbatch in a closure of the optimizer": (
        "L()[L(r)]",
        [
            ("ddp", "dp_replicate", 2, ""),
            ("gradient accumulation", None, None, "2 microbatches, gradients summed once"),
        ],
    ),
    "a closure that the optimizer calls twice": (
        "[L(r)L(r)]", [("ddp", "dp_replicate", 2, "")],
    ),
    "the only microbatch in a closure of the optimizer": (
        "[L(r)]", [("ddp", "dp_replicate", 2, "")],
    ),
    "weights updated in several groups": (
        "L()L(r)[][][]",
        [
            ("ddp", "dp_replicate", 2, ""),
            ("gradient accumulation", None, None, "2 microbatches, gradients summed once"),
        ],
    ),
    "two models, each with its optimizer": (
        "L(r)[]L(r)[]", [("ddp", "dp_replicate", 2, "")],
    ),
    "two backwards of one forward": ("LL(r)(r)[]", [("ddp", "dp_replicate", 2, "")]),
    "activations summed": (f"{TWO_LAYERS}[]", [("tp", "tp", 2, "")]),
    "a vocabulary in parts": (
        "ErLrLrLrLrLrrr(rrrr)[]",
        [("tp", "tp", 2, ""), ("vocabulary", "tp", 2, ""), ("loss", "tp", 2, "")],
    ),
    "sequences in parts": (
        "gLsgLsgLsgLs(sgsgsgsg)[]",
        [("tp", "tp", 2, ""), ("sp", "tp", 2, "")],
    ),
    "keys and values gathered": ("LgALLgAL(ss)r[]", [("cp", "cp", 2, "all-gather")]),
    "heads for sequences": ("LxxxAxLLxxxAxL(xxxxxxxx)r[]", [("cp", "cp", 2, "ulysses")]),
    "tokens go to their experts": (
        "LALKxLxLALKxLx(xxxx)",
        [("ep", "ep", 2, "")],
    ),
    "products in 8 bits": ("LL()8[]", [("fp8", None, None, "")]),
    "layers computed again": ("NLNL(NLNL)[]", [("recompute", None, None, "full")]),
    "attention computed again": ("NALNAL(AA)[]", [("recompute", None, None, "selective")]),
    "gradients unscaled": ("LL()U[]S", [("loss scaling", None, None, "")]),
    "no backward": ("LLrr", []),
}  # fmt: skip


@pytest.mark.parametrize(("story", "expected"), STORIES.values(), ids=STORIES)
def test_the_strategy_of_a_call_sequence_is_detected(
    story: str, expected: list[tuple], tmp_path: Path
) -> None:
    assert strategies(tmp_path, story) == expected


def test_the_redundancy_optimizer_is_zero_1(tmp_path: Path) -> None:
    for rank in range(2):
        trace = rank_of(rank, "LL(rr)[bb]", [("0", "", [0, 1])], steps=1)
        trace.annotation("Optimizer.step#ZeroRedundancyOptimizer.step", 51, 99).write(tmp_path)
    assert analyze(tmp_path).run.strategies == (Strategy("zero-1", "dp_replicate", 2),)


def test_ddp_around_the_ranks_of_a_ring(tmp_path: Path) -> None:
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=[("0", "", [0, 1])]).step(1, 0, 200)
        trace.annotation("DistributedDataParallel.forward", 0, 80)
        for at in (0, 40):
            trace.op(OPS["L"], at, at + 8).op("aten::softmax", at + 20, at + 28)
            trace.message("send", 1 - rank, at + 10, at + 18)
            trace.message("recv", 1 - rank, at + 11, at + 19)
        trace.op(NAMED["("], 100, 150).all_reduce(110, 140).kernel("gemm", 150, 160)
        trace.write(tmp_path)
    assert analyze(tmp_path).run.strategies == (
        Strategy("ddp", "cp", 2),
        Strategy("cp", "cp", 2, "ring"),
    )


def test_shards_of_several_models_are_hybrid(tmp_path: Path) -> None:
    shards = [("1", "", [0, 1]), ("1", "", [2, 3])]
    replicas = [("2", "", [0, 2]), ("2", "", [1, 3])]
    story = "{1g}L{1g}L({1g}{1s}{2r}{1g}{1s}{2r})[]"
    found = strategies(tmp_path, story, 4, *shards, *replicas)
    assert found == [("hsdp", "dp_shard", 2, "2 replicas")]


def test_shards_gathered_in_one_precision_and_summed_in_another(tmp_path: Path) -> None:
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=[("0", "", [0, 1])]).step(1, 0, 100)
        trace.annotation("FSDP::all_gather", 0, 10).op(OPS["L"], 10, 20).op(NAMED["("], 20, 60)
        trace.annotation("FSDP::post_backward_reduce", 40, 50).kernel("gemm", 60, 70)
        trace.collective(*CALLS["g"], 1, 9, dtype="BFloat16")
        trace.collective(*CALLS["g"], 21, 29, dtype="BFloat16")
        trace.annotation("FSDP::pre_backward", 20, 30).collective(*CALLS["s"], 41, 49)
        trace.write(tmp_path)
    assert analyze(tmp_path).run.strategies == (
        Strategy("fsdp", "dp_shard", 2),
        Strategy(
            "mixed precision", detail="weights gathered in bfloat16, gradients summed in float32"
        ),
    )


def test_an_op_that_casts_and_calls_itself_runs_under_autocast(tmp_path: Path) -> None:
    trace = GpuTrace().step(1, 0, 100).op(OPS["L"], 0, 30).op("aten::_to_copy", 5, 10)
    trace.op(OPS["L"], 12, 28).kernel("gemm", 20, 30).op(NAMED["("], 40, 60)
    trace.op("ToCopyBackward0", 42, 44).write(tmp_path)
    assert analyze(tmp_path).run.strategies == (Strategy("autocast"),)


@pytest.mark.parametrize(
    ("away", "back", "updated", "expected"),
    [
        (5, 40, 75, (Strategy("offload", detail="activations"),)),
        (40, 5, None, (Strategy("offload", detail="optimizer"),)),
        (40, 5, 75, ()),
    ],
)
def test_what_leaves_the_device_and_returns_is_offloaded(
    away: float, back: float, updated: float | None, expected: tuple, tmp_path: Path
) -> None:
    trace = GpuTrace().step(1, 0, 100).op(OPS["L"], 0, 30).kernel("gemm", 1, 30)
    trace.op(NAMED["("], 35, 60).annotation(NAMED["["], 70, 90)
    for i in range(4):
        for copy, at in (("Memcpy DtoH", away), ("Memcpy HtoD", back)):
            trace.launch(copy, (at + i, at + i), (at + i, at + i + 1), category="gpu_memcpy")
    if updated is not None:
        trace.kernel("adam", updated, updated + 5)
    trace.write(tmp_path)
    assert analyze(tmp_path).run.strategies == expected


def test_without_host_ops_strategies_are_inferred_from_group_axes(tmp_path: Path) -> None:
    groups = [("1", "mesh_dp_shard", [0, 1]), ("2", "mesh_tp", [0, 2])]
    groups += [("1", "mesh_dp_shard", [2, 3]), ("2", "mesh_tp", [1, 3])]
    found = strategies(tmp_path, "1g2r1g2r1g1s2r1g1s2r", 4, *groups)
    assert found == [("fsdp", "dp_shard", 2, ""), ("tp", "tp", 2, "")]
    assert strategies(tmp_path, "1g2r1s2r", 4, *groups) == [("tp", "tp", 2, "")]


KNOWN = {
    "dp4": (Strategy("ddp", "dp_replicate", 4),),
    "fsdp4": (Strategy("fsdp", "dp_shard", 4),),
    "pp2_m8": (Strategy("pp", "pp", 2, "1f1b"),),
    "tp2_pp2": (Strategy("tp", "tp", 2), Strategy("pp", "pp", 2, "1f1b")),
    "tp2_pp2_dp2": (
        Strategy("ddp", "dp_replicate", 2),
        Strategy("tp", "tp", 2),
        Strategy("pp", "pp", 2, "1f1b"),
    ),
    "built_zero_bubble": (Strategy("pp", "pp", 2, "zb-h1"),),
}


def test_saved_results_of_a_checkpoint_are_not_recomputed(tmp_path: Path) -> None:
    """Its product is called again, but holds no other: a mode of dispatch has kept the result."""
    trace = GpuTrace().step(1, 0, 200).op(NAMED["("], 100, 150)
    for at, done in ((0, True), (40, True), (100, False), (120, False)):
        trace.op("aten::layer_norm", at, at + 5).op(OPS["L"], at + 5, at + 18)
        trace.op("aten::mm", at + 6, at + 17).kernel("gemm", at + 6, at + 17)
        if done:
            trace.op("aten::mm", at + 8, at + 16)
    trace.write(tmp_path)
    assert analyze(tmp_path).run.strategies == (Strategy("recompute", detail="selective"),)


@pytest.mark.parametrize("name", KNOWN)
def test_a_sample_is_recognized_without_its_run_json(name: str, tmp_path: Path) -> None:
    copy = tmp_path / name
    shutil.copytree(SAMPLES / name, copy)
    (copy / "run.json").unlink()
    assert analyze(copy).run.strategies == KNOWN[name]


def test_megatrons_tensor_parallel_step_on_two_v100() -> None:
    assert analyze(shared_trace("kineto_megatron_tp2_v100")).run.strategies == (
        Strategy("tp", "tp", 2),
        Strategy("vocabulary", "tp", 2),
        Strategy("loss", "tp", 2),
    )


def test_a_resnet_with_checkpoints_on_eight_mi300() -> None:
    trace = shared_trace("kineto_tracelens") / "mi300__resnet_act_checkpoint.json.gz"
    assert analyze(trace).run.strategies == (
        Strategy("ddp", "dp_replicate", 8),
        Strategy("recompute", detail="full"),
    )


def test_a_trace_of_one_gpu_shows_no_strategy() -> None:
    trace = (
        shared_trace("kineto_hta")
        / "critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz"
    )
    assert analyze(trace).run.strategies == ()


def test_a_report_without_strategies_still_loads() -> None:
    report = analyze(SAMPLES / "pp2_m2")
    text = to_json(report).decode()
    start = text.index(',\n  "strategies"')
    older = text[:start] + text[text.index("]", start) + 1 :]
    assert from_json(older.encode()).run.strategies == ()


def test_the_words_are_those_of_a_predictions_messages() -> None:
    assert {"ddp", "zero-1", "zero-2", "fsdp", "hsdp", "tp", "sp", "cp", "ep", "pp", "loss"} < {
        signature.name for signature in SIGNATURES
    }


@pytest.mark.slow
def test_a_training_whose_last_microbatch_alone_sums(tmp_path: Path) -> None:
    launch_workload("fsdp=2", tmp_path)
    (tmp_path / "run.json").unlink()
    assert analyze(tmp_path).run.strategies == (
        Strategy("fsdp", "dp_shard", 2),
        Strategy("gradient accumulation", detail="4 microbatches, gradients summed once"),
    )
