"""Layouts of today: recomputed parts, bf16 moments, routed tokens, rings with heads, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.work_builders import TINY, job

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.model.comm_volume import list_comm_ops
from stepsplit.analyzer.model.config import (
    Experts,
    JobConfig,
    Link,
    ParallelConfig,
    RecomputePart,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_file import parse_job
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.host_time import compute_expert_wait, compute_launch_time
from stepsplit.analyzer.model.layer_time import compute_chunk_passes
from stepsplit.analyzer.model.memory import compute_memory
from stepsplit.analyzer.model.memory_states import (
    compute_layer_activations,
    compute_parameter_bytes,
    compute_stage_activations,
)
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns
from stepsplit.analyzer.model.parameters import (
    count_hardware_flops,
    count_model_flops,
    count_parameters,
    count_stage_parameters,
)
from stepsplit.analyzer.model.plan import plan
from stepsplit.analyzer.model.plan_space import format_job_lines, list_families
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.rank_layout import GroupPlacement, list_stages, place_group

V3 = load_model("deepseek-v3")
MIXED = replace(TINY, experts=Experts(8, 2, ffn=16))
IN_FLIGHT = 57
"""Layers times microbatches of DeepSeek-V3 with pp 4, 4 chunks and 14 layers on the first rank."""

PUBLISHED = """
[model]
preset = "deepseek-v3"
mtp_layers = 1
[parallel]
pp = 16
ep = 64
dp = 128
expert_tp = 1
zero = 1
schedule = "dualpipe"
overlap = ["ep", "dp"]
layers_per_stage = [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2]
dispatcher = "deepep"
expert_nodes = 4
[training]
seq_len = 4096
micro_batch = 1
global_batch = 15360
dtype = "fp8"
recompute = ["mla-up", "norms", "activation"]
fp8_activations = true
moments_dtype = "bf16"
[hardware]
preset = "h800-sxm"
"""
"""DeepSeek-V3, arXiv:2412.19437, sections 3.2 and 4.2; the weights' average is on the host."""


def saved(parts: frozenset[RecomputePart], **recipe: Any) -> int:
    """Saved bytes of a layer with experts of DeepSeek-V3, 4,096 tokens."""
    one = job(V3, ParallelConfig(ep=64, dp_replicate=64), seq_len=4096, global_batch=64, **recipe)
    one = replace(one, training=replace(one.training, recompute_parts=parts))
    return compute_layer_activations(one, expert=True).total_bytes


@pytest.mark.parametrize(
    ("part", "dtype", "gigabytes"),
    [("mla-up", "fp8", 30.6), ("norms", "bf16", 7.7), ("activation", "fp8", 3.8 + 0.5)],
)
def test_parts_save_what_is_published_of_deepseek_v3(
    part: RecomputePart, dtype: Any, gigabytes: float
) -> None:
    """Megatron-Core MoE report, section 4, by the shapes of the tensors; the shared expert's
    activation, 0.5 GB, is recomputed too."""
    dropped = saved(frozenset(), dtype=dtype) - saved(frozenset({part}), dtype=dtype)
    assert IN_FLIGHT * dropped / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_parts_add_their_own_forward_to_the_backward() -> None:
    """TINY's MLP is 16 tokens through 8 x 32: 2 x 16 x 256 FLOPs, 2 x 16 x 8, 2 x 256 and 2 x 512
    bytes, and its activation moves 2 x 2 x 512; both norms move 4 x 128 x 2."""
    plain, mlp, norms = (
        passes(job(recompute_parts=frozenset(parts))) for parts in ((), ("mlp",), ("norms",))
    )
    assert mlp - plain == 4 * (2 * 16 * 256 + 2 * 128 + 2 * 256 + 2 * 512 + 2 * 2 * 512)
    assert norms - plain == 4 * 2 * 4 * 128


def passes(one: JobConfig) -> float:
    """Input gradients of all layers and the head, with what is recomputed."""
    speed = replace(compute_device_speed(one), linear_flops_per_ns=1.0, bytes_per_ns=1.0)
    (found,) = compute_chunk_passes(one, speed, list_stages(one)[0].chunks)
    return found.input_ns


def test_recomputed_gemms_count_as_hardware_flops() -> None:
    """One of the MLP's two products in 4 layers: 2 x 16 tokens x 8 x 32 each."""
    one = job(recompute_parts=frozenset({"mlp", "norms"}))
    assert count_hardware_flops(one) - count_model_flops(one) == 4 * 2 * 16 * 8 * 32


def test_full_recomputation_of_some_layers_keeps_the_others_whole() -> None:
    """Two of four: two inputs of 256 bytes and two layers; half of the forward runs again."""
    layer = compute_layer_activations(job()).total_bytes
    half, whole = (job(recompute="full", recompute_layers=count) for count in (2, 0))
    (stage,) = list_stages(half)
    assert compute_stage_activations(half, stage).saved_bytes == 2 * 256 + 2 * layer
    again = passes(half) - passes(job()), passes(whole) - passes(job())
    assert again[0] == pytest.approx(again[1] / 2)
    spent = [count_hardware_flops(each) - count_model_flops(each) for each in (half, whole)]
    assert spent[0] == spent[1] / 2


def test_moments_in_bf16_are_half_as_large() -> None:
    """Adam: 4 bytes of master weight and 2 moments of 2 bytes; its update moves 2 x 8 + 4 + 2,
    clipping and zeroing 16."""
    assert compute_parameter_bytes(job().training).optimizer == 4 + 8
    small = job(moments_dtype="bf16")
    assert compute_parameter_bytes(small.training).optimizer == 4 + 4
    (params,) = count_stage_parameters(small)
    speed = replace(compute_device_speed(small), bytes_per_ns=1.0)
    assert compute_optimizer_ns(small, speed, params) == (22 + 16) * params.total
    muon = compute_parameter_bytes(job(moments_dtype="bf16", optimizer="muon").training)
    assert (muon.optimizer, muon.extra_adam) == (4 + 2, 2)


def test_fp8_keeps_inputs_of_the_activation_in_one_byte() -> None:
    """2 x 2,048 of each of 8 routed experts and of the shared one."""
    wide, small = (saved(frozenset(), dtype="fp8", fp8_activations=on) for on in (False, True))
    assert wide - small == 4096 * 9 * 2 * 2048


def test_multi_token_prediction_adds_a_layer_a_projection_and_the_head() -> None:
    """Beside a layer of 784 parameters, 2 x 8 x 8 and three norms of 8 on the last stage; all other
    stages are as before."""
    model = replace(TINY, mtp_layers=1)
    before, after = (
        count_stage_parameters(job(each, ParallelConfig(pp=2), global_batch=2))
        for each in (TINY, model)
    )
    assert after[0].total == before[0].total
    assert after[1].total - before[1].total == 784 + 128 + 24
    assert count_parameters(model) == count_parameters(TINY)
    assert list_stages(job(model))[0].layers == 5
    layer = passes(job(replace(TINY, layers=5))) - passes(job())
    head = passes(job()) - 4 * layer
    projection = 2 * 16 * 8 * 16 + 2 * 16 * 8 + 2 * 16 * 8 + 2 * 16 * 16
    added = passes(job(model)) - passes(job())
    assert added == pytest.approx(layer + head + projection + 4 * 128 * 2)


def exchanged(layout: ParallelConfig, nodes_of: int = 8) -> set[int]:
    one = job(MIXED, layout, global_batch=layout.dp)
    one = replace(one, hardware=replace(one.hardware, gpus_per_node=nodes_of))
    return {op.message_bytes for op in list_comm_ops(one) if op.strategy == "ep"}


def test_a_dispatcher_sends_a_token_once_to_each_rank_or_node() -> None:
    """16 tokens of 16 bytes to 2 of 8 experts: 2 copies with NCCL; to 4 ranks 4 (1 - (3/4)^2) =
    1.75; over 2 nodes of them 2 (1 - (1/2)^2) = 1.5 through the network, with a limit of one 1."""
    ranks = ParallelConfig(dp_replicate=4, ep=4)
    assert exchanged(ranks) == {256 * 2}
    deep = replace(ranks, dispatcher="deepep")
    assert exchanged(deep) == {448}
    assert exchanged(deep, nodes_of=2) == {384}
    assert exchanged(replace(deep, expert_nodes=1), nodes_of=2) == {256}


def test_a_dispatcher_sends_one_message_to_each_node_and_nccl_one_to_each_rank() -> None:
    """4 ranks on 2 nodes: 128 bytes to each of 2 ranks, 192 bytes to one node."""
    for dispatcher, parts, part_bytes in (("all-to-all", 2, 128), ("deepep", 1, 192)):
        layout = ParallelConfig(dp_replicate=4, ep=4, dispatcher=dispatcher)
        one = job(MIXED, layout, global_batch=4)
        slow = Link("net", 1e6, 1.0, 0.0)
        one = replace(one, hardware=replace(one.hardware, gpus_per_node=2, inter=slow))
        [ns] = {
            each.time.ns / each.message.count
            for each in predict(one).communication
            if each.message.strategy == "ep"
        }
        moved = parts * (part_bytes + (0.34e6 * part_bytes) ** 0.5) * 1e3
        assert ns == pytest.approx(8_400 + moved, rel=1e-6)


def test_a_dispatcher_takes_multiprocessors_from_the_compute_that_it_overlaps() -> None:
    """20 of 100: a fifth of the calls' time stays exposed however much compute there is."""
    layout = ParallelConfig(dp_replicate=4, ep=4, overlap=frozenset({"ep"}))
    shares = []
    for dispatcher in ("all-to-all", "deepep"):
        one = job(MIXED, replace(layout, dispatcher=dispatcher), global_batch=4)
        slow = replace(one.hardware, multiprocessors=100, peaks_flops_per_s=(("bf16", 1e7),))
        calls = [
            each
            for each in predict(replace(one, hardware=slow)).communication
            if each.message.strategy == "ep"
        ]
        shares += [each.exposed_ns / each.time.ns for each in calls]
    assert shares == pytest.approx([0.0, 0.0, 0.2, 0.2], abs=1e-3)


def test_heads_are_exchanged_inside_of_a_ring() -> None:
    """cp 8 of 4 neighbors with 2 heads each and a ring of 2: keys and values of 2 tokens go one hop
    forward, two backward; queries and output, keys and values in two calls each."""
    layout = ParallelConfig(cp=8, ulysses=4)
    one = job(layout=layout)
    found = {
        (op.axis, op.op, op.phase): (op.count, op.message_bytes)
        for op in list_comm_ops(one)
        if op.strategy == "cp"
    }
    hop, heads = 2 * 2 * 8 * 2, 2 * 8 * 2
    assert found == {
        ("cp", "send", "forward"): (4, hop),
        ("cp", "recv", "forward"): (4, hop),
        ("cp", "send", "backward"): (8, hop),
        ("cp", "recv", "backward"): (8, hop),
        ("ulysses", "all_to_all", "forward"): (8, heads),
        ("ulysses", "all_to_all", "backward"): (8, heads),
    }
    assert (place_group(one, "ulysses").ranks, place_group(one, "cp").ranks) == (4, 2)
    ring = compute_layer_activations(job(layout=ParallelConfig(cp=8)))
    assert compute_layer_activations(one).attention == ring.attention + 2 * 8 * 2


def test_graphs_leave_the_host_less_to_launch() -> None:
    """A layer takes 20 calls of 13.48 us, one with experts 40 more, which graphs leave."""
    none, layers, step = (job(MIXED, cuda_graph=graph) for graph in ("none", "layers", "step"))
    ms = [compute_launch_time(each, 2, 1).forward_ns / 1e6 for each in (none, layers, step)]
    assert ms == pytest.approx([0.01348 * calls for calls in (80, 40, 0)])
    device = replace(none.hardware, efficiency=replace(none.hardware.efficiency, expert_ns=1e6))
    waits = [compute_expert_wait(replace(each, hardware=device), 3) for each in (none, step)]
    own = 8 / 32
    assert [(each.forward_ns, each.input_ns) for each in waits] == [
        (3e6 * (1 + own), 6e6 * (1 + own)),
        (0.0, 0.0),
    ]
    part = compute_expert_wait(replace(layers, hardware=device), 3)
    assert (part.forward_ns, part.input_ns) == (3e6 * own, 6e6 * own)


def test_experts_wait_as_long_for_the_host_where_no_run_tells_how_long() -> None:
    """On other GPUs the mean of what runs on hopper and blackwell tell."""

    def wait_ns(name: str) -> float:
        one = replace(job(MIXED), hardware=load_hardware(name))
        return compute_expert_wait(one, 1).forward_ns

    mean_ns = (wait_ns("h100-sxm") + wait_ns("b200-sxm")) / 2
    for name in ("v100-sxm-32gb", "a100-sxm-80gb", "mi250x", "mi300x", "mi355x"):
        assert wait_ns(name) == pytest.approx(mean_ns, rel=0.01)
    assert mean_ns == pytest.approx(0.768e6 * (1 + 8 / 32), rel=0.01)


def test_compiled_models_move_fewer_bytes() -> None:
    """GPT's layers under FSDP2 move 2.4 times the bytes of fused ones, 1.3 times if compiled."""
    layout, model = ParallelConfig(dp_shard=2, zero=3), replace(TINY, norm="layer", positions=16)
    times = []
    for compiled in (False, True):
        one = job(model, layout, framework="fsdp2", compile=compiled, global_batch=2)
        times.append(passes(one))
    hidden, inner = 16 * 8, 16 * 32
    moved = 2 * (12 * hidden + 3 * inner)
    assert times[0] - times[1] == pytest.approx(4 * moved * (2.4 - 1.3))


def test_deepseek_v3_fits_as_it_was_trained() -> None:
    """Section 3.2.2: no tensor parallelism, because MLA's projections, norms and SwiGLU are
    recomputed, moments are in bf16 and activations in fp8."""
    one = parse_job(PUBLISHED)
    found = predict(one)
    assert found.fits
    assert one.parallel.world_size == 2048
    plain = replace(one.training, recompute_parts=frozenset(), moments_dtype="fp32")
    plain = replace(plain, fp8_activations=False)
    assert not predict(replace(one, training=plain)).fits
    assert max(stage.total_bytes for stage in compute_memory(one)) < 75 * 2**30


def test_plan_keeps_the_parts_as_a_list_and_gives_full_recomputation_none() -> None:
    """Its families of one rank: as stated, and with full recomputation."""
    one = job(recompute_parts=frozenset({"norms", "mlp"}))
    found = {
        (each.training.recompute, each.training.recompute_parts)
        for family in list_families(one, 1)
        for each in family
    }
    assert found == {("none", frozenset({"norms", "mlp"})), ("full", frozenset())}
    best = plan(replace(one, hardware=load_hardware("h100-sxm")), 1).best.choice
    assert 'recompute = ["mlp", "norms"]' in format_job_lines(one, best)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("recompute = [", "recompute_layers = 2\nrecompute = [", "recompute_layers (2) needs"),
        ("recompute = [", "offload_layers = 2\nrecompute = [", "offload_layers (2) needs"),
        ('dtype = "fp8"', 'dtype = "bf16"', "fp8_activations needs dtype fp8, not bf16"),
        ('"norms",', '"norm",', "'norm' is unknown"),
        ("pp = 16", "pp = 16\nulysses = 3", "cp (1) must be divisible by ulysses (3)"),
        ('"deepep"', '"deep"', "'deep' is unknown"),
    ],
)
def test_what_does_not_belong_together_is_named(old: str, new: str, problem: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_job(PUBLISHED.replace(old, new))
    assert problem in str(raised.value)


FUSED = """
[model]
preset = "{model}"
[training]
framework = "{framework}"
seq_len = 1024
micro_batch = 2
global_batch = 2
recompute = "{recompute}"
{more}
[hardware]
preset = "h100-sxm"
"""


@pytest.mark.parametrize("model", ["gpt2-1.5b", "llama-3-8b"])
@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("megatron", ""),
        ("ddp", ""),
        ("huggingface", ""),
        ("huggingface", "master_weights = false"),
        ("nanotron", ""),
    ],
)
def test_selective_recomputation_of_fused_attention_keeps_what_is_kept_without(
    model: str, framework: str, more: str
) -> None:
    none, selective = (
        compute_layer_activations(
            parse_job(
                FUSED.format(model=model, framework=framework, recompute=recompute, more=more)
            )
        ).total_bytes
        for recompute in ("none", "selective")
    )
    assert none == selective


def test_deepspeed_gathers_the_only_layer_of_a_stage_as_one_module() -> None:
    """Only the first stage has positions, the last the final norm, which are modules of their own;
    the layers of all stages are equal."""
    model, layout = replace(TINY, positions=16), ParallelConfig(pp=4, dp_shard=2, zero=3)
    one = job(model, layout, framework="deepspeed", global_batch=2)
    sizes = {
        stage: sorted(
            op.message_bytes
            for op in list_comm_ops(one)
            if (op.stage, op.op, op.phase) == (stage, "all_gather", "forward")
        )
        for stage in range(4)
    }
    (layer,) = sizes[1]
    assert sizes[2] == [layer]
    assert layer in sizes[0]
    assert len(sizes[0]) == 3


def test_offloaded_activations_are_never_less_than_none() -> None:
    """Those of two layers stay, less than the chunk that the embedding's backward has freed."""
    one = JobConfig(
        replace(load_model("mpt-7b"), layers=16),
        ParallelConfig(tp=2, zero=3),
        TrainingConfig(512, 1, 1, framework="fsdp2", offload=frozenset({"activations"})),
        load_hardware("mi325x"),
    )
    (stage,) = compute_memory(one)
    assert stage.activations_bytes == 0


def test_ulysses_overlaps_beside_a_ring_as_alone() -> None:
    """cp 4, of which all 4 exchange heads: a ring of one."""
    steps = [
        predict(
            parse_job(
                FUSED.format(model="llama-3-8b", framework="megatron", recompute="none", more="")
                + f'[parallel]\ncp = 4\n{context}\noverlap = ["cp"]\n'
            )
        ).split
        for context in ('context = "ulysses"', 'context = "ring"\nulysses = 4')
    ]
    assert steps[0] == steps[1]
    assert steps[0].overlapped_ns > 0


@pytest.mark.parametrize(
    ("order", "cp", "expected"),
    [
        (("tp", "cp", "ep", "dp", "pp"), 1, (32, 4)),
        (("cp", "tp", "ep", "dp", "pp"), 1, (32, 4)),
        (("cp", "tp", "ep", "dp", "pp"), 2, (64, 4)),
        (("tp", "cp", "ep", "pp", "dp"), 2, (64, 2)),
        (("dp", "tp", "cp", "ep", "pp"), 2, (64, 8)),
    ],
)
def test_the_ranks_of_tp_take_places_on_a_node_from_those_of_cp_and_dp(
    order: tuple[Any, ...], cp: int, expected: tuple[int, int]
) -> None:
    """Two of tp, 32 of dp, nodes of eight; with pp = 2 before dp a node ends in one replica."""
    pp = 2 if order.index("pp") < order.index("dp") else 1
    layout = ParallelConfig(tp=2, cp=cp, pp=pp, dp_replicate=32, rank_order=order)
    one = replace(job(), parallel=layout, hardware=replace(job().hardware, gpus_per_node=8))
    assert place_group(one, "dp") == GroupPlacement(*expected)
