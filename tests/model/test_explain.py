"""Formulas with a job's numbers, and the rules of thumb that differ from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from support.prediction_builders import GIB, GPT, H100, MIB, MS, job, prediction

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_measured import SWEEP
from stepsplit.analyzer.model.comm_ops import EXPERT_ROUTING, SEQUENCE, CommOp
from stepsplit.analyzer.model.comm_time import (
    ALL_TO_ALL,
    CHOICE,
    compute_nvls_ns,
    compute_ring_ns,
    compute_tree_ns,
    time_of,
)
from stepsplit.analyzer.model.comm_volume import DDP, FSDP_MESSAGES, ZERO
from stepsplit.analyzer.model.config import (
    Experts,
    HardwareConfig,
    JobConfig,
    Link,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.explain import explain
from stepsplit.analyzer.model.formulas import (
    Explanation,
    Formula,
    RuleOfThumb,
    Symbol,
    find_misleading_rules,
)
from stepsplit.analyzer.model.parameters import TOTAL
from stepsplit.analyzer.model.prediction import (
    Band,
    Communication,
    Prediction,
    prediction_from_json,
    prediction_to_json,
)
from stepsplit.analyzer.model.rank_layout import GroupPlacement

SLOW_HOPS = replace(H100, gpus_per_node=2, inter=Link("ib-ndr-400", 50e9, 0.9, 50_000))
"""Four nodes of two GPUs, far from each other: a tree has fewer hops than a ring."""
PER_TOKEN = 72 * 24 * 2048**2 + 12 * 24 * 2048 * 2048 + 6 * 2048 * 50_176
LAYER = 4 * 2048**2 // 2 + 3 * 1024 + 2048 + 8 * 2048**2 // 2 + 4096 + 2048 + 4 * 2048
"""Parameters of one layer on one of two tensor-parallel ranks: attention, MLP, two norms."""
FIRST = 12 * LAYER + 25_088 * 2048 + 2048 * 2048
LAST = 12 * LAYER + 25_088 * 2048 + 2 * 2048


def of(formula: str, a_job: JobConfig, a_prediction: Prediction) -> Explanation:
    return next(one for one in explain(a_job, a_prediction) if one.formula.id == formula)


def rules(one: Explanation) -> dict[str, float]:
    return {rule.rule: rule.value for rule in one.rules}


def values(explained: tuple[Explanation, ...]) -> dict[str, tuple[float, dict[str, float]]]:
    return {one.formula.id: (one.value, rules(one)) for one in explained}


def with_messages(why: Formula, *messages: CommOp, by: Formula = CHOICE) -> Prediction:
    """The built prediction with other communication, sent for why, each kind timed by a formula."""
    time = Band(3 * MS, 3 * MS, 3 * MS, (by,))
    rows = tuple(Communication(replace(message, formulas=(why,)), time, 0) for message in messages)
    return replace(prediction(), communication=rows)


def one_stage() -> Prediction:
    """The built prediction's last stage, as if it were alone."""
    whole = prediction()
    return replace(
        whole, splits=whole.splits[1:], memory=(replace(whole.memory[1], stage=0),),
        communication=(), parameters_per_stage=(LAST,),
    )  # fmt: skip


def test_each_formula_has_the_value_of_the_job_and_the_rules_that_differ() -> None:
    assert values(explain(job(), prediction())) == {
        "parameters.total": (1_311_000_000, {"12 L h^2": 12 * 24 * 2048**2}),
        "flops.C1": (
            PER_TOKEN * 32_768,
            {"6 FLOPs per parameter and token": 6 * 1_311_000_000 * 32_768},
        ),
        "flops.mfu": (0.0808, {"all FLOPs that the GPUs execute": 0.1059}),
        "flops.recompute": (
            pytest.approx(1.31068, abs=1e-5), {"recomputing doubles the compute": 2.0},
        ),
        "memory.states_megatron": (
            7 * GIB,
            {
                "16 bytes per parameter (2 + 2 + 12)": 16 * FIRST,
                "the optimizer doubles the memory of the weights": 2 * GIB,
            },
        ),
        "memory.recompute_full": (
            2 * 2048 * 2048, {"full recomputation saves O(1)": 0.0},
        ),
        "pipeline.bubble_fraction": (
            1 / 9,
            {
                "(p-1)/m of the step": 1 / 8,
                "a pipeline of p stages is idle (p-1)/p of the time": 1 / 2,
            },
        ),
        "pipeline.bubble_overhead": (1 / 8, {"(p-1)/(m+p-1)": 1 / 9}),
        "schedule.in_flight": (2, {"p stages divide the activations by p": 1}),
        "comm.tensor": (384, {"two all_reduces per layer": 192}),
        "comm.ddp": (
            30 * 40 * MIB, {"2 P, read as bytes": 2 * LAST},
        ),
        "comm.choice": (
            62_500,
            {
                "size / 900 GB/s, the link's data-sheet rate": pytest.approx(
                    8 * MIB / 900
                )
            },
        ),
        "comm.pipeline": (8 * 8 * MIB, {}),
        "link.nvlink": (450e9, {"the rate on the data sheet": 900e9}),
    }  # fmt: skip


def test_symbols_carry_name_meaning_value_and_unit() -> None:
    assert of("parameters.total", job(), prediction()) == Explanation(
        TOTAL,
        "parameters of the whole model",
        (
            Symbol("L", "layers", 24),
            Symbol("h", "hidden size", 2048),
            Symbol("a", "heads", 16),
            Symbol("k", "key-value heads", 16),
            Symbol("d", "head size", 128),
            Symbol("f", "width of the MLP", 8192),
            Symbol("G", "linear layers of the MLP (3 if gated)", 2),
            Symbol("V", "vocabulary", 50_000),
            Symbol("layer", "parameters of one layer", 12 * 2048**2 + 13 * 2048, "parameters"),
        ),
        1_311_000_000,
        "parameters",
        (
            RuleOfThumb(
                "12 L h^2",
                1_207_959_552,
                "it omits embedding and head, and assumes an MLP of 4h without a gate and as many"
                " key-value heads as heads",
            ),
        ),
    )


def test_a_rule_that_is_right_here_is_not_shown() -> None:
    paper = job(recipe=TrainingConfig(2048, 1, 16, framework="zero-paper", gradient_dtype="bf16"))
    stage = replace(
        prediction().memory[0],
        weights_bytes=2 * FIRST, gradients_bytes=2 * FIRST, optimizer_bytes=12 * FIRST,
    )  # fmt: skip
    states = of("memory.states", paper, replace(prediction(), memory=(stage,)))
    assert rules(states) == {"the optimizer doubles the memory of the weights": 4 * FIRST}


def test_zero_shards_the_sixteen_bytes_as_in_its_paper() -> None:
    sharded = job(layout=ParallelConfig(tp=2, pp=2, dp_replicate=2, zero=1))
    rule = "16 bytes per parameter (2 + 2 + 12), sharded by ZeRO-1 over N"
    states = of("memory.states_megatron", sharded, prediction())
    assert rules(states)[rule] == (4 + 12 / 2) * FIRST


def test_fused_attention_saves_no_scores_unlike_the_gpt_formula() -> None:
    one = of("memory.activations", job(recipe=TrainingConfig(2048, 1, 16)), prediction())
    token = 2048 * (10 + 24 / 2 + 5 * 16 * 2048 / (2048 * 2))
    assert rules(one) == {"s b h (34 + 5 a s / h), sharded by tp": 2048 * token}


def test_interleaving_halves_the_bubble_of_the_simple_formula() -> None:
    two = job(layout=ParallelConfig(tp=2, pp=2, dp_replicate=2, schedule="interleaved", chunks=2))
    measured = replace(prediction(), bubble_fraction=1 / 17, bubble_overhead=1 / 16)
    found = values(explain(two, measured))
    assert found["pipeline.bubble_fraction"][1]["(p-1)/(m+p-1)"] == 1 / 9
    assert found["schedule.in_flight"] == (5, {"p stages divide the activations by p": 2})


def test_one_stage_has_no_bubble_to_explain() -> None:
    alone = one_stage()
    found = values(explain(job(layout=ParallelConfig(tp=2, dp_replicate=4)), alone))
    assert not {"pipeline.bubble_fraction", "pipeline.bubble_overhead", "schedule.in_flight"} & set(
        found
    )


def test_sequence_parallelism_replaces_each_call_with_two() -> None:
    split = job(layout=ParallelConfig(tp=2, pp=2, dp_replicate=2, sequence_parallel=True))
    calls = (
        CommOp("sp", "all_gather", "tp", 1, "forward", 200, 8 * MIB, 4 * MIB, 4 * MIB),
        CommOp("sp", "reduce_scatter", "tp", 1, "backward", 192, 8 * MIB, 8 * MIB, 4 * MIB),
        CommOp("sp", "all_reduce", "tp", 1, "grad_sync", 1, 4096, 4096, 4096),
        CommOp("loss", "all_reduce", "tp", 1, "forward", 24, 8192, 8192, 8192),
    )
    one = of("comm.sequence", split, with_messages(SEQUENCE, *calls))
    assert (one.value, rules(one)) == (392, {"two all_reduces per layer": 192})
    assert one.rules[0].why.endswith("sequence parallelism replaces each with two calls")


def test_zero_1_needs_no_all_reduce() -> None:
    zero = job(layout=ParallelConfig(tp=2, pp=2, dp_replicate=2, zero=1))
    calls = (
        CommOp("zero-1", "reduce_scatter", "dp", 1, "grad_sync", 1, 4 * LAST, 4 * LAST, 2 * LAST),
        CommOp("zero-1", "all_gather", "dp", 1, "optimizer", 1, 2 * LAST, LAST, LAST),
    )
    one = of("comm.zero", zero, with_messages(ZERO, *calls))
    assert (one.value, rules(one)) == (
        3 * LAST,
        {
            "2 P, read as bytes": 2 * LAST,
            "ZeRO-1 is an all_reduce and an all_gather: 3 P": 5 * LAST,
        },
    )


def test_fsdp_gathers_for_every_microbatch() -> None:
    layout = ParallelConfig(tp=2, pp=2, dp_shard=2, zero=3)
    calls = (
        CommOp("fsdp", "all_gather", "dp_shard", 1, "forward", 8, 2 * LAST, LAST, LAST),
        CommOp("fsdp", "all_gather", "dp_shard", 1, "backward", 8, 2 * LAST, LAST, LAST),
        CommOp("fsdp", "reduce_scatter", "dp_shard", 1, "grad_sync", 8, 4 * LAST, 4 * LAST,
                2 * LAST),
    )  # fmt: skip
    one = of("comm.fsdp", job(layout=layout), with_messages(FSDP_MESSAGES, *calls))
    rule = "3 P per step, 1.5 times the volume without sharding (16-bit elements)"
    assert (one.value, rules(one)) == (32 * LAST, {rule: 6 * LAST})


def of_large_sum() -> Explanation:
    """The explanation of a tree for an all_reduce of 8 MiB on 16 ranks of two nodes."""
    wide = job(layout=ParallelConfig(pp=2, dp_replicate=16))
    call = CommOp("ddp", "all_reduce", "dp", 1, "grad_sync", 2, 8 * MIB, 8 * MIB, 15 * MIB)
    return of("comm.tree", wide, with_messages(DDP, call))


def test_a_tree_moves_the_buffer_twice_however_many_ranks() -> None:
    tree = of_large_sum()
    assert tree.value == 16 * MIB
    assert rules(tree) == {"a tree moves 2 log2(n) times the buffer": 64.0 * MIB}


def test_between_nodes_the_network_is_the_link_of_the_ring() -> None:
    network = replace(H100, inter=Link("ib-hdr-200", 25e9, 0.5, 5_000))
    wide = job(layout=ParallelConfig(pp=2, dp_replicate=16), hardware=network)
    call = CommOp("ddp", "all_reduce", "dp", 1, "grad_sync", 2, 8 * MIB, 8 * MIB, 15 * MIB)
    ring = of("comm.choice", wide, with_messages(DDP, call))
    assert ring.symbols == (
        Symbol("S", "message", 8 * MIB, "bytes"),
        Symbol("f", "fraction that each rank sends", 1.875),
        Symbol("n", "ranks", 16),
        Symbol("k", "nodes of these ranks", 2),
        Symbol("B", "ib-hdr-200, one direction of 8 GPUs of a node", 200e9, "bytes_per_s"),
        Symbol("e", "fraction of it that large rings reach", 0.5, "ratio"),
        Symbol("a", "latency of a step between nodes", 5_000, "ns"),
    )
    assert ring.rules[0].why == (
        "that rate is the sum of both directions, no ring reaches all of it, all_reduce sends"
        " 1.88 times its buffer, and between nodes the network is the bottleneck"
    )


def test_between_nodes_with_slow_links_inside_the_ring_waits_for_those() -> None:
    inside = replace(H100, intra=Link("nvlink4", 100e9, 0.5, 2_000))
    call = CommOp("ddp", "all_reduce", "dp", 1, "grad_sync", 2, 8 * MIB, 8 * MIB, 15 * MIB)
    wide = job(layout=ParallelConfig(pp=2, dp_replicate=16), hardware=inside)
    ring = of("comm.choice", wide, with_messages(DDP, call))
    assert ring.symbols[4] == Symbol("B", "nvlink4, one direction of one GPU", 100e9, "bytes_per_s")
    assert not ring.rules[0].why.endswith("the network is the bottleneck")


@pytest.mark.parametrize(
    ("formula", "message_bytes", "hardware", "closed_form"),
    [
        ("comm.ring", 8 * MIB, replace(H100, nvls=0.0), partial(compute_ring_ns, "all_reduce")),
        ("comm.nvls", GIB, H100, compute_nvls_ns),
        ("comm.tree", 8 * MIB, SLOW_HOPS, compute_tree_ns),
    ],
)
def test_the_algorithm_whose_closed_form_gives_the_time_is_named(
    formula: str,
    message_bytes: int,
    hardware: HardwareConfig,
    closed_form: Callable[[float, GroupPlacement, HardwareConfig], float],
) -> None:
    span = GroupPlacement(8, 8) if hardware is not SLOW_HOPS else GroupPlacement(8, 2)
    time = time_of("all_reduce", message_bytes, span, hardware)
    assert time.ns == closed_form(message_bytes, span, hardware)
    message = CommOp(
        "ddp", "all_reduce", "dp", 0, "grad_sync", 2, message_bytes, message_bytes, 14 * MIB,
        (DDP,),
    )  # fmt: skip
    of_job = replace(one_stage(), communication=(Communication(message, time * 2, 0),))
    one = of(formula, job(layout=ParallelConfig(dp_replicate=8), hardware=hardware), of_job)
    assert one.value == time.ns


def test_a_mixture_has_inactive_parameters() -> None:
    mixture = replace(GPT, gated=True, experts=Experts(count=8, top_k=2, ffn=4096))
    one = of("flops.C1", job(model=mixture), prediction())
    assert one.rules[0].why.endswith(", and inactive experts")
    assert one.symbols[-1] == Symbol(
        "W", "weights of all layers that one token is multiplied with",
        24 * (4 * 2048**2 + 2048 * 8 + 2 * 3 * 2048 * 4096), "parameters",
    )  # fmt: skip
    assert one.note.endswith("here B s (6 W + 6 h V + 12 L s a d), a d = 2,048")


def test_without_a_peak_there_is_no_mfu_to_explain() -> None:
    unknown = explain(job(), replace(prediction(), mfu=None, hfu=None))
    assert "flops.mfu" not in values(unknown)


def test_another_link_than_nvlink_has_no_double_rate() -> None:
    pcie = replace(H100, intra=H100.host)
    assert "link.nvlink" not in values(explain(job(hardware=pcie), prediction()))


def test_offloaded_states_are_left_to_the_memory_table() -> None:
    away = TrainingConfig(2048, 1, 16, offload=frozenset({"optimizer"}))
    found = values(explain(job(recipe=away), prediction()))
    assert not [name for name in found if name.startswith("memory.states")]


def test_rules_of_thumb_about_the_jobs_formulas_that_do_not_hold_are_found() -> None:
    about = {rule.id for rule in find_misleading_rules([of("comm.ddp", job(), prediction())])}
    assert about == {"dp-bytes", "dp-time"}
    everything = find_misleading_rules(explain(job(), prediction()))
    assert {rule.verdict for rule in everything} == {"half", "wrong"}
    assert not {"comm.zero", "comm.fsdp"} & {name for rule in everything for name in rule.formulas}


def test_a_rule_that_an_explanation_answers_is_not_repeated() -> None:
    tree = of_large_sum()
    assert "tree-volume" not in {rule.id for rule in find_misleading_rules([tree])}
    assert "tree-volume" in {rule.id for rule in find_misleading_rules([replace(tree, rules=())])}


def test_tokens_are_sent_to_each_of_their_experts() -> None:
    """Eight experts on eight ranks of a node: dispatch and combine of 12 layers of a stage."""
    mixture = replace(GPT, experts=Experts(count=8, top_k=2, ffn=4096))
    apart = job(model=mixture, layout=ParallelConfig(pp=2, dp_replicate=8, ep=8))
    calls = CommOp("ep", "all_to_all", "ep", 1, "forward", 48, 16 * MIB, 16 * MIB, 14 * MIB)
    found = explain(apart, with_messages(EXPERT_ROUTING, calls, by=ALL_TO_ALL))
    routes = next(one for one in found if one.formula.id == "comm.experts")
    assert (routes.value, routes.note) == (48 * 14 * MIB, "calls: 48 all_to_all forward")
    assert routes.symbols[-4:] == (
        Symbol("L", "layers with experts", 12),
        Symbol("top_k", "experts per token", 2),
        Symbol("h", "hidden size", 2048),
        Symbol("e", "expert-parallel ranks", 8),
    )
    each = next(one for one in found if one.formula.id == "comm.all_to_all")
    assert (each.value, each.symbols[2:]) == (
        3 * MS / 48,
        (
            Symbol("g", "ranks per node", 8),
            Symbol("NVLink", "rate that one GPU reaches over nvlink4", 360e9, "bytes_per_s"),
        ),
    )


def test_the_saved_activations_of_a_layer_add_up() -> None:
    one = of("memory.activations", job(recipe=TrainingConfig(2048, 1, 16)), prediction())
    items = {symbol.name: symbol.value for symbol in one.symbols if symbol.unit == "bytes"}
    assert set(items) == {"norms", "heads", "attention", "mlp"}
    assert sum(items.values()) == pytest.approx(one.value, abs=12)


def test_the_note_has_the_bytes_per_parameter_as_zero_shards_them() -> None:
    notes = {
        zero: of(
            "memory.states_megatron",
            job(layout=ParallelConfig(tp=2, pp=2, dp_replicate=2, zero=zero)),
            prediction(),
        ).note
        for zero in (0, 1, 2)
    }  # fmt: skip
    assert notes == {0: "here 18 P", 1: "here 6 P + 12 P/N", 2: "here 2 P + 16 P/N"}


def test_a_time_interpolated_in_a_sweep_is_explained_by_the_sweep() -> None:
    message = CommOp("sp", "all_gather", "tp", 1, "forward", 200, 8 * MIB, 4 * MIB, 4 * MIB)
    swept = with_messages(SEQUENCE, message, by=SWEEP)
    assert of("comm.sweep", job(), swept).value == 3 * MS / 200


def test_gradient_reduction_over_dp_and_cp_has_all_ranks_of_both() -> None:
    around = job(layout=ParallelConfig(cp=2, dp_replicate=4))
    call = CommOp("ddp", "all_reduce", "dp_cp", 0, "grad_sync", 2, 8 * MIB, 8 * MIB, 14 * MIB)
    rows = with_messages(DDP, call).communication
    one = of("comm.choice", around, replace(one_stage(), communication=rows))
    assert one.what == "time of one all_reduce on dp_cp (grad_sync)"
    assert one.symbols[2] == Symbol("n", "ranks", 8)


def test_a_prediction_from_a_file_cannot_be_explained() -> None:
    again = prediction_from_json(prediction_to_json(prediction()))
    with pytest.raises(UsageError, match="predict the job again"):
        explain(job(), again)
