"""Time of kernels, layers, chunks and the optimizer step, on a device with all rates 1.

A FLOP and a byte each take a ns, so that a time is the sum of both counts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support.chunk_flops import count_chunk_flops
from support.work_builders import DEVICE, LITE, TINY, job

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_ops import is_fused_ring
from stepsplit.analyzer.model.config import (
    AttentionRate,
    Efficiency,
    Experts,
    HardwareConfig,
    JobConfig,
    LatentAttention,
    ModelConfig,
    ParallelConfig,
)
from stepsplit.analyzer.model.device_speed import DeviceSpeed, compute_device_speed
from stepsplit.analyzer.model.elementwise import time_elementwise
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.host_time import (
    compute_host_wait,
    compute_launch_time,
    compute_layer_host_ns,
    count_layer_calls,
    is_host_bound,
)
from stepsplit.analyzer.model.layer_time import (
    Gemm,
    LayerPass,
    build_head_gemm,
    compute_chunk_passes,
    count_accumulate_bytes,
    list_attention_gemms,
    list_expert_gemms,
    list_mlp_gemms,
    select_loss_bytes,
    time_dense_layer,
    time_expert_layer,
    time_pieces,
)
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns
from stepsplit.analyzer.model.parameters import count_stage_parameters, count_updated_parameters
from stepsplit.analyzer.model.rank_layout import Chunk, list_stages
from stepsplit.analyzer.model.weight_copies import count_copied_bytes

UNIT = DeviceSpeed(
    linear_flops_per_ns=1.0, head_flops_per_ns=1.0, attention_flops_per_ns=1.0,
    attention_backward_flops_per_ns=0.8, bytes_per_ns=1.0, launch_ns=0.0,
)  # fmt: skip
MIXED = replace(TINY, experts=Experts(4, 2, ffn=16, shared_ffn=8, dense_layers=1))
LATENT = LatentAttention(query_rank=6, kv_rank=4, nope=3, rope=1, value=2)
LINEAR = 24_576 + 5_632
"""TINY's layer, 16 tokens: 2 x 768 weights FLOPs a token, and the bytes of its four products:
1408 for the three projections in one, 640, 1792 and 1792."""
CORE = 16 * 16 * 4 * 4
"""Half of 2 x 1024 scores x (2 + 2) wide: what a causal kernel does."""
MOVED, MOVED_BACK = 5_632, 7_168
"""2 bytes of 10 x 128 (norms, residuals), 2 x 512 (activation) and 2 x 256 (rotation); backward of
12 x 128, 3 x 512 and 2 x 256."""
FORWARD, BACKWARD = LINEAR + CORE + MOVED, LINEAR + 3.125 * CORE + MOVED_BACK


def test_rates_are_shares_of_the_peaks_and_head_and_attention_stay_in_bf16() -> None:
    efficiency = Efficiency(0.5, 0.25, 0.125, memory=0.5, launch_ns=1000.0, tile=128)
    peaks = (("bf16", 1e15), ("fp8", 2e15))
    device = replace(DEVICE, peaks_flops_per_s=peaks, efficiency=efficiency, multiprocessors=100)
    eight = replace(job(dtype="fp8"), hardware=device)
    assert compute_device_speed(eight) == DeviceSpeed(
        1e6, 0.5e6, 0.25e6, 0.2e6, 500.0, 1000.0, 128, 100, operand_bytes=1, weight_gradient_bytes=5
    )
    unfused = replace(eight, training=replace(eight.training, flash_attention=False))
    assert compute_device_speed(unfused) == DeviceSpeed(
        1e6, 0.5e6, 0.125e6, 0.1e6, 500.0, 1000.0, 128, 100, operand_bytes=1,
        weight_gradient_bytes=5,
    )  # fmt: skip


def test_weight_gradients_are_summed_by_megatrons_gemm_and_written_by_the_others() -> None:
    """Megatron-LM reads and writes its sum, 4 or 2 bytes: half of what that adds to 2 counts."""
    recipes = (job(), job(gradient_dtype="bf16"), job(framework="ddp"))
    sizes = [compute_device_speed(replace(one, hardware=H100)) for one in recipes]
    assert [speed.weight_gradient_bytes for speed in sizes] == [5, 3, 2]
    gemm, speed = Gemm(16, 8, 4), replace(UNIT, weight_gradient_bytes=5)
    work, operands = 2 * 16 * 8 * 4, 2 * (4 + 8) * 16
    assert gemm.compute_weight_ns(UNIT) == work + operands + 2 * 8 * 4
    assert gemm.compute_weight_ns(speed) == work + operands + 5 * 8 * 4


def test_the_tiles_of_experts_fill_the_device_together() -> None:
    """Four experts of 128 x 384, 3 tiles each, on 4 multiprocessors: 3 waves of 4 tiles instead of
    one of 3 tiles each."""
    speed = replace(UNIT, tile=128, multiprocessors=4, bytes_per_ns=math.inf)
    together, alone = Gemm(128, 384, 64, count=4), Gemm(128, 384, 64)
    assert together.compute_forward_ns(speed) == 4 * 2 * 128 * 384 * 64
    assert alone.compute_forward_ns(speed) == 2 * 128 * 512 * 64


def test_fp8_with_a_scale_per_row_is_slower() -> None:
    tensor, row = (
        compute_device_speed(replace(job(dtype="fp8", fp8_scaling=scaling), hardware=H100))
        for scaling in ("tensor", "row")
    )
    assert row.linear_flops_per_ns == pytest.approx(0.8 * tensor.linear_flops_per_ns)
    assert row.head_flops_per_ns == tensor.head_flops_per_ns


def test_attention_does_not_look_beyond_a_packed_document() -> None:
    """Documents of 4 of the 16 tokens: a quarter of the work, at the rate of 4 tokens."""
    whole, packed = (
        _core(replace(job(document_tokens=tokens), hardware=H100)) for tokens in (0, 4)
    )
    slowdown = (4 + 670) / 4 / ((16 + 670) / 16)
    assert packed == pytest.approx(whole / 4 * slowdown, rel=1e-3)


def _core(one: JobConfig) -> float:
    speed = replace(compute_device_speed(one), launch_ns=0.0)
    return time_dense_layer(one, speed).core_ns


def test_fp8_gemms_have_a_share_of_their_own_and_all_rates_follow_the_clock() -> None:
    efficiency = Efficiency(0.5, 0.25, 0.125, memory=0.5, launch_ns=0.0, gemm_fp8=0.4)
    peaks = (("bf16", 1e15), ("fp8", 2e15))
    device = replace(DEVICE, peaks_flops_per_s=peaks, efficiency=efficiency, clock=1.5)
    speed = compute_device_speed(replace(job(dtype="fp8"), hardware=device))
    assert (speed.linear_flops_per_ns, speed.head_flops_per_ns) == (1.2e6, 0.75e6)
    assert (speed.attention_flops_per_ns, speed.bytes_per_ns) == (0.375e6, 500.0)


H100, B200 = load_hardware("h100-sxm"), load_hardware("b200-sxm")


def attention_rates(hardware: HardwareConfig, seq_len: int, **recipe: Any) -> tuple[int, int]:
    """Forward and backward of attention in TFLOP/s."""
    model = replace(TINY, head_size=recipe.pop("head_size", 128))
    one = job(model, ParallelConfig(), seq_len=seq_len, **recipe)
    speed = compute_device_speed(replace(one, hardware=hardware))
    rates = speed.attention_flops_per_ns, speed.attention_backward_flops_per_ns
    return round(rates[0] / 1e3), round(rates[1] / 1e3)


def test_attention_runs_at_the_rate_of_the_kernel_that_the_framework_calls() -> None:
    """0.92 of the benchmarks: cuDNN 683 and 588, FlashAttention-2 364 and 317 on H100."""
    assert attention_rates(H100, 1_000_000) == (628, 540)
    assert attention_rates(H100, 1_000_000, framework="fsdp2") == (628, 540)
    assert attention_rates(H100, 1_000_000, framework="nanotron") == (335, 291)
    assert attention_rates(H100, 1_000_000, attention_kernel="flash-3") == (609, 523)
    b200, b200_kernel = 2.25 * 0.926, 2.0835
    assert attention_rates(B200, 1_000_000, attention_kernel="flash-2") == (
        round(0.92 * 458 * b200 / 2.5 * 1e6 / (1e6 + 840)),
        round(0.92 * 373 * b200 / 2.5 * 1e6 / (1e6 + 780)),
    )
    assert b200 == pytest.approx(b200_kernel)


def test_heads_of_64_are_slower() -> None:
    """cuDNN's at 0.71 of the rate forward and 0.77 backward, FlashAttention-2's at 0.88."""
    assert attention_rates(H100, 1_000_000, head_size=64) == (446, 416)
    assert attention_rates(H100, 1_000_000, head_size=64, framework="nanotron") == (295, 256)


def test_attention_is_slower_on_short_sequences() -> None:
    """At s tokens s / (s + 1410) forward and s / (s + 2500) backward of the rate."""
    assert attention_rates(B200, 1410)[0] == round(0.92 * 1551 / 2)
    assert attention_rates(B200, 2500)[1] == round(0.92 * 1277 / 2)
    fp8 = attention_rates(B200, 3650, attention_kernel="cudnn-fp8")
    assert fp8[1] == round(0.92 * 1746 / 2)


def test_norms_of_queries_and_keys_read_and_write_them() -> None:
    """16 tokens of 8 + 8 numbers in bf16: two passes forward and three backward."""
    plain, normed = (
        time_dense_layer(job(replace(TINY, qk_norm=each)), UNIT) for each in (False, True)
    )
    numbers = 16 * (8 + 8)
    assert normed.forward_ns - plain.forward_ns == 2 * 2 * numbers
    assert normed.input_ns - plain.input_ns == 2 * 3 * numbers


def test_a_ring_calls_attention_on_a_part_of_the_sequence() -> None:
    ring = job(layout=ParallelConfig(cp=4), seq_len=4 * 1410)
    gathered = replace(ring, parallel=replace(ring.parallel, context_kind="all-gather"))
    part, whole = (
        compute_device_speed(replace(one, hardware=B200)).attention_flops_per_ns
        for one in (ring, gathered)
    )
    assert part / whole == pytest.approx((1 / 2) / (4 / 5))


def test_a_measured_rate_of_attention_comes_before_the_kernels() -> None:
    measured = replace(H100, attention=AttentionRate(600e12, 500e12, 1000.0, 3000.0))
    assert attention_rates(measured, 1000) == (300, 125)
    constant = replace(H100, efficiency=replace(H100.efficiency, attention=0.5))
    assert attention_rates(constant, 1000) == (495, 396)


def test_a_kernel_without_a_rate_on_the_hardware_is_refused() -> None:
    expected = (
        r"^no published rate of flash-4 on hopper \(known: flash-2, flash-3, triton, cudnn,"
        r" triton-2023\); set attention_kernel, or forward and backward of \[hardware.attention\]$"
    )
    with pytest.raises(UsageError, match=expected):
        attention_rates(H100, 1000, attention_kernel="flash-4")


def test_fp8_casts_its_operands_and_moves_less_in_gemms() -> None:
    """4 bytes an element of inputs (16 x 8, 8, 8 and 32) and output gradients (24, 8, 32, 8)."""
    wide = time_dense_layer(job(), UNIT)
    eight = time_dense_layer(job(dtype="fp8"), replace(UNIT, operand_bytes=1))
    operands = 16 * (8 + 8 + 8 + 32) + 24 * 8 + 8 * 8 + 32 * 8 + 8 * 32
    assert eight.forward_ns - wide.forward_ns == 4 * 16 * (8 + 8 + 8 + 32) - operands
    four = time_dense_layer(job(dtype="nvfp4"), replace(UNIT, operand_bytes=0.5625))
    saved = 1.4375 * operands
    assert four.forward_ns - wide.forward_ns == 8 * 16 * (8 + 8 + 8 + 32) - saved


def test_nvfp4_has_the_share_of_fp8_unless_it_has_its_own() -> None:
    hardware = load_hardware("gb200")
    one = replace(job(dtype="nvfp4"), hardware=hardware)
    share = hardware.efficiency.gemm_fp8
    assert share is not None
    speed = compute_device_speed(one)
    assert speed.linear_flops_per_ns == pytest.approx(10e15 * share / 1e9)
    assert speed.operand_bytes == 0.5 + 1 / 16
    assert speed.head_speed.operand_bytes == 2
    own = replace(hardware, efficiency=replace(hardware.efficiency, gemm_nvfp4=0.5))
    assert compute_device_speed(replace(one, hardware=own)).linear_flops_per_ns == 5e6


def test_a_device_without_a_peak_at_the_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^device has no peak FLOP/s at fp16; known: bf16$"):
        compute_device_speed(job(dtype="fp16"))


def test_a_product_takes_its_flops_its_bytes_and_its_launch() -> None:
    flops, moved = 2 * 2 * 3 * 5, 2 * (2 * 5 + 5 * 3 + 2 * 3)
    assert replace(UNIT, launch_ns=1000.0).compute_gemm_ns(2, 3, 5) == flops + moved + 1000


def test_kernels_that_move_data_take_its_bytes_and_their_launches() -> None:
    assert replace(UNIT, bytes_per_ns=2.0, launch_ns=1000.0).compute_memory_ns(500, 3) == 250 + 3000


@pytest.mark.parametrize(
    ("rows", "columns", "computed"),
    [(4, 4, 16), (3, 3, 16), (4, 6, 2 * 16), (2, 2, 16)],
    ids=["one full wave", "tiles not full", "a second wave for two tiles", "a wave of one tile"],
)
def test_the_last_wave_of_tiles_takes_as_long_as_a_full_one(
    rows: int, columns: int, computed: int
) -> None:
    tiled = replace(UNIT, tile=2, multiprocessors=4)
    moved = 2 * (rows + columns + rows * columns)
    assert tiled.compute_gemm_ns(rows, columns, 1) == pytest.approx(2 * computed + moved, rel=1e-12)


def test_the_backward_of_a_product_is_two_more_of_it() -> None:
    product, each = Gemm(2, 3, 5, count=2), 2 * (60 + 62)
    assert product.parameters == 30
    assert (
        product.compute_forward_ns(UNIT),
        product.compute_input_ns(UNIT),
        product.compute_weight_ns(UNIT),
    ) == (
        each,
        each,
        each,
    )


def test_a_plain_layer_has_four_products() -> None:
    assert (*list_attention_gemms(job()), *list_mlp_gemms(job(), 32)) == (
        Gemm(16, 24, 8), Gemm(16, 8, 8), Gemm(16, 32, 8), Gemm(16, 8, 32),
    )  # fmt: skip


def test_tensor_parallelism_divides_what_is_not_the_hidden_size() -> None:
    halved = job(layout=ParallelConfig(tp=2))
    assert (
        *list_attention_gemms(halved),
        *list_mlp_gemms(halved, 32),
        build_head_gemm(halved),
    ) == (
        Gemm(16, 12, 8),
        Gemm(16, 8, 4),
        Gemm(16, 16, 8),
        Gemm(16, 8, 16),
        Gemm(16, 256, 8),
    )


def test_grouped_queries_have_fewer_keys_and_each_rank_at_least_one() -> None:
    grouped = replace(TINY, kv_heads=1)
    assert list_attention_gemms(job(grouped))[0] == Gemm(16, 8 + 2 * 2, 8)
    assert list_attention_gemms(job(grouped, ParallelConfig(tp=4)))[0] == Gemm(16, 2 + 2 * 2, 8)


def test_a_gated_mlp_has_two_first_products_in_one() -> None:
    assert list_mlp_gemms(job(replace(TINY, gated=True)), 32) == (
        Gemm(16, 64, 8), Gemm(16, 8, 32),
    )  # fmt: skip


def test_context_parallelism_divides_the_tokens() -> None:
    assert list_attention_gemms(job(layout=ParallelConfig(cp=4)))[1] == Gemm(4, 8, 8)


def test_latent_attention_goes_down_and_up_again() -> None:
    both = replace(TINY, latent=LATENT)
    assert list_attention_gemms(job(both)) == (
        Gemm(16, 6, 8), Gemm(16, 16, 6), Gemm(16, 5, 8), Gemm(16, 20, 4),
        Gemm(16, 8, 8),
    )  # fmt: skip
    queries_whole = replace(both, latent=replace(LATENT, query_rank=0))
    assert list_attention_gemms(job(queries_whole))[:2] == (Gemm(16, 16, 8), Gemm(16, 5, 8))


def test_experts_get_an_equal_share_of_all_tokens() -> None:
    experts = Experts(4, 2, ffn=16, shared_ffn=8)
    spread = job(
        replace(TINY, experts=experts), ParallelConfig(dp_replicate=2, ep=2), global_batch=2
    )
    assert list_expert_gemms(spread, experts) == (
        Gemm(16, 4, 8),
        Gemm(16, 16, 8, count=2), Gemm(16, 8, 16, count=2),
        Gemm(16, 8, 8), Gemm(16, 8, 8),
    )  # fmt: skip


def test_expert_tp_narrows_experts_and_gathers_tokens_of_the_group() -> None:
    experts = Experts(4, 2, ffn=16)
    layout = ParallelConfig(tp=2, expert_tp=2, sequence_parallel=True)
    assert list_expert_gemms(job(replace(TINY, experts=experts), layout), experts) == (
        Gemm(8, 4, 8), Gemm(8, 8, 8, count=4), Gemm(8, 8, 8, count=4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (TINY, ParallelConfig()),
        (TINY, ParallelConfig(tp=2, cp=2, sequence_parallel=True)),
        (replace(TINY, gated=True, kv_heads=2), ParallelConfig(tp=2)),
        (replace(TINY, latent=LATENT), ParallelConfig(tp=2)),
        (MIXED, ParallelConfig(dp_replicate=4, ep=2)),
        (MIXED, ParallelConfig(tp=2, expert_tp=2, sequence_parallel=True)),
        (LITE, ParallelConfig(dp_replicate=8, ep=8)),
        (replace(TINY, latent=LATENT), ParallelConfig(tp=2, sequence_parallel=True)),
        (MIXED, ParallelConfig(tp=2)),
        (MIXED, ParallelConfig(tp=2, expert_tp=2)),
    ],
)
def test_products_are_the_flops_of_the_layers(model: ModelConfig, layout: ParallelConfig) -> None:
    one = job(model, layout, global_batch=layout.dp)
    dense, routed = model.layers - model.expert_layers, model.expert_layers
    products = [*list_attention_gemms(one), *list_mlp_gemms(one, model.ffn)] * dense
    if model.experts is not None:
        products += [*list_attention_gemms(one), *list_expert_gemms(one, model.experts)] * routed
    flops = sum(2 * each.rows * each.parameters for each in products)
    assert flops == count_chunk_flops(one, list_stages(one)[0].chunks[0]).linear


def test_a_layer_with_fused_attention() -> None:
    assert time_dense_layer(job(), UNIT) == LayerPass(FORWARD, BACKWARD, LINEAR, CORE, 3.125 * CORE)


def test_unfused_attention_computes_all_scores_and_moves_them() -> None:
    forward = 2 * CORE + 1024 * 4 * 2
    backward = 2 * 2 * CORE + 1024 * (4 + 2) * 2
    assert time_dense_layer(job(flash_attention=False), UNIT) == LayerPass(
        LINEAR + forward + MOVED, LINEAR + backward + MOVED_BACK, LINEAR, forward, backward
    )


def test_dropout_writes_masks_after_attention_and_both_residuals() -> None:
    plain = time_dense_layer(job(flash_attention=False), UNIT)
    dropped = time_dense_layer(job(flash_attention=False, dropout=True), UNIT)
    scores, masks = 1024 * (2 + 1), 2 * 128
    assert dropped.forward_ns - plain.forward_ns == scores + masks
    assert dropped.input_ns - plain.input_ns == scores + masks


def test_tensor_parallelism_halves_a_layer_but_not_its_norms() -> None:
    products = 12_288 + 2 * ((128 + 96 + 192) + (64 + 32 + 128) + 2 * (128 + 128 + 256))
    norms, norms_back = 2 * 10 * 128, 2 * 12 * 128
    rest, rest_back = 1_024 + 512, 1_536 + 512
    assert time_dense_layer(job(layout=ParallelConfig(tp=2)), UNIT) == LayerPass(
        products + CORE / 2 + norms + rest,
        products + 3.125 * CORE / 2 + norms_back + rest_back,
        products,
        CORE / 2,
        3.125 * CORE / 2,
    )


def test_sequence_parallelism_halves_the_norms_too() -> None:
    whole = time_dense_layer(job(layout=ParallelConfig(tp=2)), UNIT)
    split = time_dense_layer(job(layout=ParallelConfig(tp=2, sequence_parallel=True)), UNIT)
    assert (whole.forward_ns - split.forward_ns, whole.input_ns - split.input_ns) == (1280, 1536)


def test_frameworks_without_fusion_move_more_between_gemms() -> None:
    """Those of a model with layer norms; of others under DDP, the operations are counted."""
    model = replace(TINY, norm="layer")
    fused, eager = (
        time_dense_layer(job(model, framework=name), UNIT) for name in ("megatron", "ddp")
    )
    assert eager.forward_ns - fused.forward_ns == pytest.approx(0.75 * MOVED)
    assert eager.input_ns - fused.input_ns == pytest.approx(0.75 * MOVED_BACK)


def test_gradients_of_later_microbatches_are_added_to_those_before() -> None:
    one, four = (
        time_dense_layer(job(framework="ddp", gradient_dtype="bf16", global_batch=m), UNIT)
        for m in (1, 4)
    )
    assert four == one + LayerPass(0.0, 0.0, 3 * 2 * 768 * 3 / 4)


def test_every_kernel_of_a_layer_is_launched() -> None:
    far = time_dense_layer(job(), replace(UNIT, launch_ns=1e6))
    assert far.forward_ns - FORWARD == (4 + 1 + 6) * 1e6
    assert far.weight_ns - LINEAR == 4 * 1e6


def test_a_mixture_moves_its_tokens_to_the_experts_and_back() -> None:
    experts = Experts(4, 2, ffn=16)
    mixed = job(replace(TINY, experts=experts))
    products = (*list_attention_gemms(mixed), *list_expert_gemms(mixed, experts))
    linear, routed = sum(each.compute_forward_ns(UNIT) for each in products), 32
    moved = 2 * (10 * 128 + 2 * routed * 16 + 2 * 256)
    permuted = 2 * 4 * routed * 8
    found = time_expert_layer(mixed, UNIT, experts)
    assert found.forward_ns == linear + CORE + moved + permuted
    assert found.weight_ns == linear


def chunk(
    model: ModelConfig = TINY, layout: ParallelConfig | None = None, **recipe: Any
) -> LayerPass:
    """Two dense layers, neither first nor last."""
    return compute_chunk_passes(job(model, layout, **recipe), UNIT, (Chunk(2, 0, False, False),))[0]


def test_a_chunk_is_its_layers() -> None:
    assert chunk() == LayerPass(2 * FORWARD, 2 * BACKWARD, 2 * LINEAR, 2 * CORE, 6.25 * CORE)


def test_a_ring_adds_attention_up_piece_by_piece() -> None:
    """8 tokens of 4 heads of 2: each further piece moves 10 bytes a number of the output forward,
    of the gradients of queries, keys and values backward, with two and three launches more."""
    slow = replace(UNIT, launch_ns=1.0)
    two, four = (job(layout=ParallelConfig(cp=cp), seq_len=8 * cp) for cp in (2, 4))
    output = 10 * 8 * 4 * 2
    pairs = 10 * 8 * TINY.kv_heads * (2 + 2)
    once = LayerPass(output + 2, output + pairs + 3, 0.0)
    assert time_pieces(two, slow) == once
    assert time_pieces(four, slow) == once * 3
    gathered = ParallelConfig(cp=2, context_kind="all-gather")
    assert is_fused_ring(two) and not is_fused_ring(job(layout=gathered))


def test_torch_merges_pieces_in_separate_kernels_unless_it_compiles() -> None:
    """Keys and values are those of all four heads."""
    eager, compiled = (
        job(layout=ParallelConfig(cp=2), seq_len=16, framework="fsdp2", compile=each)
        for each in (False, True)
    )
    numbers = 8 * 4 * 2
    assert time_pieces(eager, UNIT) == LayerPass(38 * numbers, 10 * 3 * numbers, 0.0)
    assert time_pieces(compiled, UNIT) == LayerPass(10 * numbers, 10 * 3 * numbers, 0.0)


@pytest.mark.parametrize("recompute", ["full", "every", "sqrt"])
def test_full_recomputation_adds_a_forward_to_the_backward(recompute: str) -> None:
    assert chunk(recompute=recompute) == LayerPass(
        2 * FORWARD, 2 * (BACKWARD + FORWARD), 2 * LINEAR, 2 * CORE, 6.25 * CORE
    )


def test_selective_recomputation_adds_unfused_attention_alone() -> None:
    again = chunk(flash_attention=False, recompute="selective")
    plain = chunk(flash_attention=False)
    assert again == plain + LayerPass(0.0, plain.core_ns, 0.0)
    assert chunk(recompute="selective") == chunk()


def test_torchtitan_recomputes_every_second_product_instead() -> None:
    """Keys and output, and what is between the GEMMs."""
    again, plain = (chunk(framework="fsdp2", recompute=each) for each in ("selective", "none"))
    product = 2 * 16 * 8 * 8 + 2 * (16 * 8 + 8 * 8 + 16 * 8)
    between = time_elementwise(job(framework="fsdp2"), UNIT, 16 * 32).forward_ns
    assert again == plain + LayerPass(0.0, 2 * (2 * product + between), 0.0)


def test_the_embedding_copies_rows_and_the_head_computes_logits_and_loss() -> None:
    first, last = compute_chunk_passes(
        job(), UNIT, (Chunk(0, 0, True, False), Chunk(0, 0, False, True))
    )  # fmt: skip
    product, logits = 2 * 16 * 512 * 8 + 2 * (16 * 8 + 8 * 512 + 16 * 512), 16 * 512
    assert first == LayerPass(3 * 128 * 2, 0.0, 3 * 128 * 2)
    assert last == LayerPass(product + 8 * logits, product + 6 * logits, product)


def test_the_head_runs_at_its_own_rate_and_layers_at_that_of_linear_products() -> None:
    slow_head, flops = replace(UNIT, head_flops_per_ns=0.5), 2 * 16 * 512 * 8
    layer, head = (Chunk(0, 1, False, False), Chunk(0, 0, False, True))
    (layer_slow, head_slow), (layer_pass, head_pass) = (
        compute_chunk_passes(job(), speed, (layer, head)) for speed in (slow_head, UNIT)
    )
    assert layer_slow == layer_pass
    assert head_slow == head_pass + LayerPass(flops, flops, flops)


def test_the_head_is_not_recomputed() -> None:
    head = (Chunk(0, 0, False, True),)
    assert compute_chunk_passes(job(recompute="full"), UNIT, head) == compute_chunk_passes(
        job(), UNIT, head
    )


def test_the_gradient_of_the_head_is_added_up_like_that_of_layers() -> None:
    (one,), (four,) = (
        compute_chunk_passes(
            job(framework="ddp", global_batch=m), UNIT, (Chunk(0, 0, False, True),)
        )
        for m in (1, 4)
    )
    assert four == one + LayerPass(0.0, 0.0, 3 * 4 * 8 * 512 * 3 / 4)


def test_a_chunk_of_both_kinds_of_layers() -> None:
    mixed = job(MIXED)
    assert MIXED.experts is not None
    dense, routed = time_dense_layer(mixed, UNIT), time_expert_layer(mixed, UNIT, MIXED.experts)
    assert compute_chunk_passes(mixed, UNIT, (Chunk(1, 3, False, False),)) == (dense + routed * 3,)


def test_each_framework_has_its_constants() -> None:
    """Bytes of sums of gradients, of copies of weights and gradients, and of the loss."""
    found = {}
    for name in ("megatron", "nanotron", "deepspeed", "fsdp2", "huggingface"):
        layout = ParallelConfig(dp_shard=2, zero=3) if name == "fsdp2" else ParallelConfig()
        one = job(framework=name, layout=layout, gradient_dtype="bf16", global_batch=2)
        found[name] = count_accumulate_bytes(one), count_copied_bytes(one), select_loss_bytes(one)
    assert found == {
        "megatron": (0.0, 0.0, (8.0, 6.0)),
        "nanotron": (0.0, 0.0, (8.0, 6.0)),
        "deepspeed": (7.0, 0.0, (8.0, 6.0)),
        "fsdp2": (0.0, 16.0, (8.0, 6.0)),
        "huggingface": (3.0, 12.0, (18.0, 28.0)),
    }
    assert count_copied_bytes(job(framework="fsdp2")) == 0, "replicas gather nothing to copy"


TOTAL = 4 * 784 + 2 * 4096 + 8


def bytes_per_parameter(**recipe: Any) -> float:
    one = job(**recipe)
    (held,) = count_stage_parameters(one)
    return compute_optimizer_ns(one, UNIT, held) / TOTAL


def test_adam_moves_thirty_bytes_a_parameter() -> None:
    """12 more where gradients are clipped, 4 where the sums of the next step begin with zeros."""
    plain = {"framework": "deepspeed", "clip_gradients": False}
    assert bytes_per_parameter(**plain) == 30
    assert bytes_per_parameter(framework="deepspeed") == 30 + 12
    assert bytes_per_parameter() == 30 + 12 + 4
    assert bytes_per_parameter(optimizer="sgd", gradient_dtype="bf16", **plain) == 12
    assert bytes_per_parameter(optimizer="adam-8bit", **plain) == 18


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (ParallelConfig(dp_replicate=4), 1),
        (ParallelConfig(dp_replicate=4, zero=1), 4),
        (ParallelConfig(dp_replicate=2, cp=2, zero=2), 4),
        (ParallelConfig(dp_replicate=2, dp_shard=4, zero=3), 4),
    ],
    ids=["copies", "zero 1", "context-parallel ranks share too", "one replica's shards"],
)
def test_zero_leaves_each_rank_its_share_of_the_update(layout: ParallelConfig, ranks: int) -> None:
    one = job(layout=layout, global_batch=8)
    assert count_updated_parameters(one, count_stage_parameters(one)[0]) == TOTAL / ranks


def test_experts_are_updated_by_their_ranks() -> None:
    one = job(MIXED, ParallelConfig(dp_replicate=4, ep=2, zero=1), global_batch=4)
    (held,) = count_stage_parameters(one)
    assert count_updated_parameters(one, held) == held.dense / 4 + held.experts / 2


def test_replicas_of_sharded_experts_each_update_all_of_them() -> None:
    one = job(MIXED, ParallelConfig(dp_replicate=2, dp_shard=2, zero=3), global_batch=4)
    (held,) = count_stage_parameters(one)
    assert count_updated_parameters(one, held) == held.dense / 2 + held.experts / 2


def test_the_host_launches_forward_backward_and_what_is_recomputed() -> None:
    layers = 4 * 20 * 13_480.0
    assert compute_launch_time(job(), 4) == LayerPass(layers, layers, 0.0)
    assert compute_launch_time(job(recompute="full"), 4) == LayerPass(layers, 2 * layers, 0.0)


def test_the_host_makes_more_calls_for_collectives_rings_and_casts() -> None:
    """By TransformerEngine's issue 2053 a call takes 13.48 us on a Xeon, 37.08 us on Grace."""
    on_grace = replace(job(), hardware=load_hardware("gb200"))
    split = ParallelConfig(tp=2)
    counted = {
        "megatron": count_layer_calls(job()),
        "tp": count_layer_calls(job(layout=split)),
        "sequence parallel": count_layer_calls(job(layout=replace(split, sequence_parallel=True))),
        "ring": count_layer_calls(job(layout=ParallelConfig(cp=4))),
        "fp8": count_layer_calls(job(dtype="fp8")),
        "compiled": count_layer_calls(job(framework="huggingface", compile=True)),
    }
    assert counted == {
        "megatron": 20, "tp": 24, "sequence parallel": 28, "ring": 29, "fp8": 35, "compiled": 30,
    }  # fmt: skip
    assert compute_layer_host_ns(on_grace) == pytest.approx(20 * 37_080)
    stated = replace(on_grace.hardware.efficiency, host_ns=2.15e6)
    measured = replace(on_grace, hardware=replace(on_grace.hardware, efficiency=stated))
    assert compute_layer_host_ns(measured) == 2.15e6


def test_a_device_idles_if_it_is_faster_than_its_host() -> None:
    device, host = LayerPass(300.0, 400.0, 500.0, 100.0), LayerPass(1000.0, 1000.0, 0.0)
    assert compute_host_wait(device, host) == LayerPass(700.0, 100.0, 0.0)


def test_a_device_that_is_slower_than_its_host_never_waits() -> None:
    device = LayerPass(300.0, 400.0, 500.0)
    assert compute_host_wait(device, LayerPass(200.0, 900.0, 0.0)) == LayerPass(0.0, 0.0, 0.0)


def test_a_host_that_is_nearly_too_slow_counts_as_host_bound() -> None:
    device = LayerPass(200.0, 300.0, 500.0)
    near, far = LayerPass(350.0, 351.0, 0.0), LayerPass(350.0, 349.0, 0.0)
    assert (is_host_bound(device, near), is_host_bound(device, far)) == (True, False)
