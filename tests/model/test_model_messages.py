"""Messages: the whole table of a step for every strategy, and the volumes of real traces."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support.work_builders import LITE, TINY, gpt, job, llama, published

from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.comm_volume import GradientBucket, list_comm_ops, split_buckets
from stepsplit.analyzer.model.config import Experts, JobConfig, ModelConfig, ParallelConfig

M = CommOp
MIXED = replace(TINY, layers=2, experts=Experts(4, 2, ffn=16, shared_ffn=8, dense_layers=1))
TWO_KV = replace(TINY, layers=1, kv_heads=2)
"""Keys and values of 16 tokens: 2 · 2 heads of 2 numbers in bf16, 256 bytes."""


def of(found: JobConfig, *strategies: str) -> tuple[CommOp, ...]:
    """The job's messages for those strategies."""
    return tuple(each for each in list_comm_ops(found) if each.strategy in strategies)


def sums(messages: tuple[CommOp, ...]) -> Counter[tuple[int, str]]:
    """Input bytes of a step by stage and op."""
    found: Counter[tuple[int, str]] = Counter()
    for each in messages:
        found[each.stage, each.op] += each.count * each.input_bytes
    return found


def test_one_gpu_sends_nothing() -> None:
    assert list_comm_ops(job()) == ()


def test_ddp_sums_every_gradient_once_whatever_the_number_of_microbatches() -> None:
    """4 · 784 + 2 · 4096 + 8 = 11336 gradients of 4 bytes fit the first bucket."""
    ddp = job(layout=ParallelConfig(dp_replicate=4), framework="ddp", global_batch=8)
    assert list_comm_ops(ddp) == (
        M("ddp", "all_reduce", "dp", 0, "grad_sync", 1, 45344, 45344, 68016),
    )  # fmt: skip


def test_instances_of_the_distributed_optimizer_shard_in_groups_and_sum_over_them() -> None:
    """Two instances of four ranks: each rank sums its quarter with the other instance."""
    layout = ParallelConfig(dp_replicate=2, dp_shard=4, zero=1)
    assert of(job(layout=layout, global_batch=8), "zero-1", "norm") == (
        M("zero-1", "reduce_scatter", "dp_shard", 0, "grad_sync", 1, 45344, 45344, 34008),
        M("zero-1", "all_gather", "dp_shard", 0, "optimizer", 1, 22672, 5668, 17004),
        M("zero-1", "all_reduce", "dp_replicate", 0, "grad_sync", 1, 11336, 11336, 11336),
        M("norm", "all_reduce", "dp_shard", 0, "optimizer", 1, 4, 4, 6),
    )  # fmt: skip


def test_a_process_group_of_zero_redundancy_optimizer_broadcasts_within_it() -> None:
    layout = ParallelConfig(dp_replicate=2, dp_shard=4, zero=1)
    assert of(job(layout=layout, framework="ddp", global_batch=8), "zero-1") == (
        M("zero-1", "all_reduce", "dp", 0, "grad_sync", 1, 45344, 45344, 79352),
        M("zero-1", "broadcast", "dp_shard", 0, "optimizer", 4, 5668, 5668, 5668),
    )  # fmt: skip


def test_one_instance_is_the_whole_axis() -> None:
    one, whole = (
        job(layout=ParallelConfig(zero=1, **axes), global_batch=8)
        for axes in ({"dp_shard": 4}, {"dp_replicate": 4})
    )
    assert [replace(each, axis="dp") for each in list_comm_ops(one)] == list(list_comm_ops(whole))


def test_ddp_fills_a_small_bucket_and_then_large_ones() -> None:
    """1 MiB, then 25 MiB each, then the rest of 80 million bytes."""
    ddp = job(layout=ParallelConfig(dp_replicate=4), framework="ddp")
    assert split_buckets(ddp, 20_000_000, 4) == (
        GradientBucket(1, 262_144),
        GradientBucket(3, 6_553_600),
        GradientBucket(1, 77_056),
    )


def test_megatron_cuts_buckets_only_where_gradients_overlap() -> None:
    alone = job(layout=ParallelConfig(dp_replicate=4))
    hidden = job(layout=ParallelConfig(dp_replicate=4, overlap=frozenset({"dp"})))
    assert split_buckets(alone, 100_000_000, 4) == (GradientBucket(1, 100_000_000),)
    assert split_buckets(hidden, 100_000_000, 4) == (
        GradientBucket(2, 40_000_000),
        GradientBucket(1, 20_000_000),
    )
    assert split_buckets(hidden, 100_000_000, 64) == (
        GradientBucket(1, 64_000_000),
        GradientBucket(1, 36_000_000),
    )


def test_zero_1_scatters_gradients_and_gathers_weights() -> None:
    """11336 gradients of 4 bytes; a quarter of as many weights of 2 bytes."""
    assert list_comm_ops(job(layout=ParallelConfig(dp_replicate=4, zero=1), global_batch=8)) == (
        M("zero-1", "reduce_scatter", "dp", 0, "grad_sync", 1, 45344, 45344, 34008),
        M("zero-1", "all_gather", "dp", 0, "optimizer", 1, 22672, 5668, 17004),
        M("norm", "all_reduce", "dp", 0, "optimizer", 1, 4, 4, 6),
    )


def test_with_ddp_zero_1_all_reduces_gradients_and_broadcasts_weights() -> None:
    """A quarter of 11336 weights of 2 bytes from each of 4 ranks."""
    zero = job(layout=ParallelConfig(dp_replicate=4, zero=1), framework="ddp", global_batch=8)
    assert of(zero, "zero-1") == (
        M("zero-1", "all_reduce", "dp", 0, "grad_sync", 1, 45344, 45344, 68016),
        M("zero-1", "broadcast", "dp", 0, "optimizer", 4, 5668, 5668, 5668),
    )


def test_zero_2_scatters_the_gradients_of_every_microbatch() -> None:
    layout = ParallelConfig(dp_replicate=4, zero=2)
    assert of(job(layout=layout, global_batch=8, framework="zero-paper"), "zero-2") == (
        M("zero-2", "reduce_scatter", "dp", 0, "grad_sync", 2, 45344, 45344, 34008),
        M("zero-2", "all_gather", "dp", 0, "optimizer", 1, 22672, 5668, 17004),
    )


def test_deepspeed_sums_whole_buckets_of_every_microbatch_under_zero_2() -> None:
    layout = ParallelConfig(dp_replicate=4, zero=2)
    assert of(job(layout=layout, global_batch=8, framework="deepspeed"), "zero-2") == (
        M("zero-2", "all_reduce", "dp", 0, "grad_sync", 2, 45344, 45344, 68016),
        M("zero-2", "all_gather", "dp", 0, "optimizer", 1, 22672, 5668, 17004),
    )


def test_deepspeeds_zero_3_gathers_layers_and_ends_and_sums_in_buckets() -> None:
    """Beside 4 layers the embedding, the norm and the head; 11336 gradients in one bucket."""
    zero = job(layout=ParallelConfig(dp_shard=4, zero=3), framework="deepspeed", global_batch=4)
    found = of(zero, "fsdp")
    gathers = [one for one in found if one.op == "all_gather"]
    assert sum(one.count for one in gathers if one.phase == "forward") == 4 + 3
    assert sum(one.count for one in gathers if one.phase == "backward") == 4 + 3
    assert [one for one in found if one.op == "reduce_scatter"] == [
        M("fsdp", "reduce_scatter", "dp_shard", 0, "grad_sync", 1, 45344, 45344, 34008)
    ]


def test_fsdp_gathers_each_unit_twice_a_microbatch_and_the_last_once() -> None:
    """Four ranks hold 196 of a layer, 1024 of the embedding, 1026 of norm and head; m = 2."""
    fsdp = job(layout=ParallelConfig(dp_shard=4, zero=3), framework="fsdp2", global_batch=8)
    assert list_comm_ops(fsdp) == (
        M("fsdp", "all_gather", "dp_shard", 0, "forward", 8, 1568, 392, 1176),
        M("fsdp", "all_gather", "dp_shard", 0, "backward", 8, 1568, 392, 1176),
        M("fsdp", "reduce_scatter", "dp_shard", 0, "grad_sync", 8, 3136, 3136, 2352),
        M("fsdp", "all_gather", "dp_shard", 0, "forward", 2, 8192, 2048, 6144),
        M("fsdp", "all_gather", "dp_shard", 0, "backward", 2, 8192, 2048, 6144),
        M("fsdp", "reduce_scatter", "dp_shard", 0, "grad_sync", 2, 16384, 16384, 12288),
        M("fsdp", "all_gather", "dp_shard", 0, "forward", 2, 8208, 2052, 6156),
        M("fsdp", "reduce_scatter", "dp_shard", 0, "grad_sync", 2, 16416, 16416, 12312),
        M("norm", "all_reduce", "dp_shard", 0, "optimizer", 1, 4, 4, 6),
    )


def test_without_clipping_there_is_no_norm_of_the_gradients() -> None:
    layout = ParallelConfig(tp=2, pp=2, dp_shard=4, zero=3)
    clipped, plain = (
        list_comm_ops(job(layout=layout, global_batch=8, clip_gradients=clips))
        for clips in (True, False)
    )
    assert [op for op in clipped if op.strategy != "norm"] == list(plain)
    assert {op.axis for op in set(clipped) - set(plain)} == {"tp", "pp", "dp_shard"}


@pytest.mark.parametrize(
    ("pp", "policy", "framework", "forward", "backward", "gradients"),
    [
        (1, "default", "fsdp2", 8, 8, 8),
        (1, "always", "fsdp2", 8, 8, 8),
        (1, "never", "fsdp2", 8, 0, 8),
        (1, "never", "deepspeed", 8, 8, 0),
        (2, "default", "fsdp2", 2, 0, 2),
        (2, "never", "fsdp2", 2, 0, 2),
        (2, "always", "fsdp2", 4, 2, 2),
    ],
)
def test_units_kept_gathered_are_not_gathered_again(
    pp: int, policy: str, framework: str, forward: int, backward: int, gradients: int
) -> None:
    """The layers of stage 0, m = 2. In a pipeline m + 1 gathers and one sum are left of each."""
    layout = ParallelConfig(pp=pp, dp_shard=2, zero=3, reshard_after_forward=policy)  # type: ignore[arg-type]
    counts = Counter[str]()
    for each in of(job(layout=layout, framework=framework, global_batch=4), "fsdp"):
        if each.stage == 0 and each.message_bytes in (784 * 2, 784 * 4):
            counts[each.phase] += each.count
    assert counts == Counter(forward=forward, backward=backward, grad_sync=gradients)


def test_fsdp2_with_stage_2_gathers_as_stage_3_that_frees_no_unit() -> None:
    kept = ParallelConfig(dp_shard=4, zero=3, reshard_after_forward="never")
    two, three = (
        list_comm_ops(job(layout=layout, framework="fsdp2", global_batch=8))
        for layout in (ParallelConfig(dp_replicate=4, zero=2), kept)
    )
    assert {each.axis for each in two} == {"dp"}
    assert [replace(each, axis="dp_shard") for each in two] == list(three)


def test_hsdp_sums_each_share_over_the_replicas() -> None:
    """Four layers of 784 parameters, half of each on a rank."""
    layout = ParallelConfig(dp_shard=2, dp_replicate=2, zero=3, reshard_after_forward="always")
    hsdp = job(layout=layout, framework="fsdp2", global_batch=4)
    assert of(hsdp, "hsdp")[:4] == (
        M("hsdp", "all_gather", "dp_shard", 0, "forward", 4, 1568, 784, 784),
        M("hsdp", "all_gather", "dp_shard", 0, "backward", 4, 1568, 784, 784),
        M("hsdp", "reduce_scatter", "dp_shard", 0, "grad_sync", 4, 3136, 3136, 1568),
        M("hsdp", "all_reduce", "dp_replicate", 0, "grad_sync", 4, 1568, 1568, 1568),
    )


def test_tensor_parallel_layers_sum_twice_forward_and_twice_backward() -> None:
    """4 · 2 pairs; the embedding sums forward, the head backward, the loss 16 tokens in fp32."""
    assert list_comm_ops(job(layout=ParallelConfig(tp=2), global_batch=3)) == (
        M("tp", "all_reduce", "tp", 0, "forward", 27, 256, 256, 256),
        M("tp", "all_reduce", "tp", 0, "backward", 27, 256, 256, 256),
        M("loss", "all_reduce", "tp", 0, "forward", 9, 64, 64, 64),
        M("norm", "all_reduce", "tp", 0, "optimizer", 1, 4, 4, 4),
    )


def test_full_recomputation_sums_the_forward_pass_again() -> None:
    found = of(job(layout=ParallelConfig(tp=2), recompute="full"), "tp")
    assert [(each.phase, each.count) for each in found] == [
        ("forward", 9),
        ("backward", 9),
        ("recompute", 8),
    ]


def test_the_volume_of_a_layer_and_microbatch_is_that_of_narayanan_et_al() -> None:
    """SC'21, section 3.2: 8 b s h (t-1)/t elements, here of 2 bytes, with t = 4."""
    one, two = (
        of(job(replace(TINY, layers=layers), ParallelConfig(tp=4)), "tp") for layers in (1, 2)
    )
    sent = [sum(each.count * each.wire_bytes for each in found) for found in (one, two)]
    assert sent[1] - sent[0] == 2 * 8 * 16 * 8 * 3 // 4


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    """Norms of 8 numbers, 2 a layer and a last one, are summed over tp: 72 gradients."""
    split = job(layout=ParallelConfig(tp=2, sequence_parallel=True), framework="fsdp2")
    assert of(split, "sp") == (
        M("sp", "all_gather", "tp", 0, "forward", 9, 256, 128, 128),
        M("sp", "reduce_scatter", "tp", 0, "forward", 9, 256, 256, 128),
        M("sp", "all_gather", "tp", 0, "backward", 9, 256, 128, 128),
        M("sp", "reduce_scatter", "tp", 0, "backward", 9, 256, 256, 128),
        M("sp", "all_reduce", "tp", 0, "grad_sync", 1, 288, 288, 288),
    )


def test_positions_that_each_rank_adds_to_its_tokens_are_summed_too() -> None:
    """32 positions of 8 elements and the 72 of the norms; Megatron-LM adds them all first."""
    model = replace(TINY, positions=32)
    for framework, summed in (("fsdp2", 72 + 256), ("megatron", 72)):
        split = job(model, ParallelConfig(tp=2, sequence_parallel=True), framework=framework)
        (found,) = (one for one in of(split, "sp") if one.op == "all_reduce")
        assert found.input_bytes == 4 * summed


def test_routed_tokens_bypass_sequence_parallelism_and_a_shared_expert_does_not() -> None:
    """Pairs of a dense and a mixture layer, with and without a shared expert; one for the head."""
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    alone = replace(MIXED, experts=Experts(4, 2, ffn=16, dense_layers=1))
    counts = [of(job(model, layout), "sp")[0].count for model in (MIXED, alone)]
    assert counts == [2 + 2 + 1, 2 + 1 + 1]


def test_megatron_gathers_inputs_again_for_the_gradients_of_weights() -> None:
    found = of(job(layout=ParallelConfig(tp=2, sequence_parallel=True)), "sp")
    assert [each.count for each in found if each.phase == "backward"] == [9 + 9, 9]


def test_fp8_layers_gather_their_inputs_and_gradients_in_8_bits() -> None:
    """The head and the embedding stay in 16 bits; scales per row are not known before gathering."""
    layout = ParallelConfig(tp=2, sequence_parallel=True)
    fp8 = {"dtype": "fp8", "framework": "fsdp2"}
    assert of(job(layout=layout, **fp8), "sp")[:6] == (
        M("sp", "all_gather", "tp", 0, "forward", 8, 128, 64, 64),
        M("sp", "all_gather", "tp", 0, "forward", 1, 256, 128, 128),
        M("sp", "reduce_scatter", "tp", 0, "forward", 9, 256, 256, 128),
        M("sp", "all_gather", "tp", 0, "backward", 8, 128, 64, 64),
        M("sp", "all_gather", "tp", 0, "backward", 1, 256, 128, 128),
        M("sp", "reduce_scatter", "tp", 0, "backward", 9, 256, 256, 128),
    )
    rows = job(layout=layout, fp8_scaling="row", **fp8)
    assert of(rows, "sp") == of(job(layout=layout, framework="fsdp2"), "sp")


def test_only_the_first_stage_has_the_embedding_and_only_the_last_the_head() -> None:
    found = of(job(layout=ParallelConfig(tp=2, pp=2)), "tp", "loss")
    assert [(each.stage, each.strategy, each.phase, each.count) for each in found] == [
        (0, "tp", "forward", 5),
        (0, "tp", "backward", 4),
        (1, "tp", "forward", 4),
        (1, "tp", "backward", 5),
        (1, "loss", "forward", 3),
    ]


def test_stages_send_activations_forward_and_gradients_back() -> None:
    found = of(job(layout=ParallelConfig(pp=2), global_batch=3), "pp", "norm")
    assert found == (
        M("pp", "send", "pp", 0, "forward", 3, 256, 256, 256),
        M("pp", "recv", "pp", 0, "backward", 3, 256, 256, 0),
        M("norm", "all_reduce", "pp", 0, "optimizer", 1, 4, 4, 4),
        M("pp", "recv", "pp", 1, "forward", 3, 256, 256, 0),
        M("pp", "send", "pp", 1, "backward", 3, 256, 256, 256),
        M("norm", "all_reduce", "pp", 1, "optimizer", 1, 4, 4, 4),
    )


@pytest.mark.parametrize(
    ("layout", "forward"),
    [
        (ParallelConfig(pp=2, schedule="interleaved", chunks=2), [(2, 1), (1, 2)]),
        (ParallelConfig(pp=2, schedule="zb-v"), [(1, 1), (1, 1)]),
        (ParallelConfig(pp=4, schedule="dualpipe-v"), [(1, 1), (2, 2), (2, 2), (1, 1)]),
    ],
)
def test_a_rank_sends_for_each_chunk_whose_neighbor_is_elsewhere(
    layout: ParallelConfig, forward: list[tuple[int, int]]
) -> None:
    """(sends, receives) of a microbatch's forward pass; a V turns on its last rank."""
    counts = Counter(
        {
            (each.stage, each.op): each.count
            for each in of(job(replace(TINY, layers=8), layout), "pp")
            if each.phase == "forward"
        }
    )
    assert [(counts[r, "send"], counts[r, "recv"]) for r in range(layout.pp)] == forward


def test_sequence_parallel_stages_send_their_part() -> None:
    found = of(job(layout=ParallelConfig(pp=2, tp=2, sequence_parallel=True)), "pp")
    assert {each.input_bytes for each in found} == {128}


def test_dualpipe_feeds_half_the_microbatches_in_at_each_end() -> None:
    """Each rank holds both halves of the model: all 11336 gradients, summed with the other's."""
    both = job(layout=ParallelConfig(pp=2, schedule="dualpipe"), global_batch=4)
    assert of(both, "pp", "dualpipe")[:5] == (
        M("pp", "recv", "pp", 0, "forward", 2, 256, 256, 0),
        M("pp", "send", "pp", 0, "forward", 2, 256, 256, 256),
        M("pp", "recv", "pp", 0, "backward", 2, 256, 256, 0),
        M("pp", "send", "pp", 0, "backward", 2, 256, 256, 256),
        M("dualpipe", "all_reduce", "pp", 0, "grad_sync", 1, 45344, 45344, 45344),
    )


def test_keys_and_values_travel_a_ring_of_context_ranks() -> None:
    """Three hops of 16 tokens' keys and values forward, six backward."""
    ring = job(TWO_KV, ParallelConfig(cp=4), seq_len=64)
    assert of(ring, "cp") == (
        M("cp", "send", "cp", 0, "forward", 3, 256, 256, 256),
        M("cp", "recv", "cp", 0, "forward", 3, 256, 256, 0),
        M("cp", "send", "cp", 0, "backward", 6, 256, 256, 256),
        M("cp", "recv", "cp", 0, "backward", 6, 256, 256, 0),
    )


def test_keys_and_values_can_be_gathered_instead() -> None:
    gathered = ParallelConfig(cp=4, context_kind="all-gather")
    stored = {"recompute": "selective", "flash_attention": False}
    assert of(job(TWO_KV, gathered, seq_len=64, **stored), "cp") == (
        M("cp", "all_gather", "cp", 0, "forward", 1, 1024, 256, 768),
        M("cp", "all_gather", "cp", 0, "backward", 1, 1024, 256, 768),
        M("cp", "reduce_scatter", "cp", 0, "backward", 1, 1024, 1024, 768),
        M("cp", "all_gather", "cp", 0, "recompute", 1, 1024, 256, 768),
    )


def test_ulysses_exchanges_sequence_for_heads() -> None:
    """Queries and output: 4 heads of 2 numbers. Two key-value heads are copied for four ranks."""
    ulysses = ParallelConfig(cp=4, context_kind="ulysses")
    assert of(job(TWO_KV, ulysses, seq_len=64), "cp") == (
        M("cp", "all_to_all", "cp", 0, "forward", 2, 256, 256, 192),
        M("cp", "all_to_all", "cp", 0, "forward", 2, 256, 256, 192),
        M("cp", "all_to_all", "cp", 0, "backward", 2, 256, 256, 192),
        M("cp", "all_to_all", "cp", 0, "backward", 2, 256, 256, 192),
    )


def test_context_ranks_sum_gradients_with_the_data_parallel_ranks() -> None:
    found = list_comm_ops(
        job(layout=ParallelConfig(cp=2, dp_replicate=2), global_batch=2, framework="ddp")
    )
    assert [(each.op, each.axis, each.wire_bytes) for each in found if each.axis == "dp"] == [
        ("all_reduce", "dp", 2 * 45344 * 3 // 4)
    ]


def test_tokens_go_to_two_experts_each_and_back() -> None:
    """16 tokens, 2 experts each, 8 numbers of 2 bytes. Both ranks of ep sum the dense gradients,
    none an expert's."""
    expert = job(MIXED, ParallelConfig(dp_replicate=2, ep=2), global_batch=2)
    dense = 2 * 4096 + 8 + 784 + 256 + 128 + 16 + 32
    assert list_comm_ops(expert) == (
        M("ep", "all_to_all", "ep", 0, "forward", 2, 512, 512, 256),
        M("ep", "all_to_all", "ep", 0, "backward", 2, 512, 512, 256),
        M("ddp", "all_reduce", "dp", 0, "grad_sync", 1, 4 * dense, 4 * dense, 4 * dense),
    )


def test_ranks_with_the_same_experts_sum_their_gradients() -> None:
    """Two of four experts, 2 · 8 · 16 each, in fp32."""
    found = of(job(MIXED, ParallelConfig(dp_replicate=4, ep=2), global_batch=4), "ddp")
    assert found[1] == M("ddp", "all_reduce", "expert_dp", 0, "grad_sync", 1, 2048, 2048, 2048)


def test_divided_experts_gather_their_tokens_and_scatter_the_sums() -> None:
    """Under sequence parallelism a rank has 8 tokens: 256 bytes routed."""
    layout = ParallelConfig(tp=2, expert_tp=2, sequence_parallel=True)
    assert of(job(MIXED, layout), "expert-tp") == (
        M("expert-tp", "all_gather", "tp", 0, "forward", 1, 512, 256, 256),
        M("expert-tp", "reduce_scatter", "tp", 0, "forward", 1, 512, 512, 256),
        M("expert-tp", "all_gather", "tp", 0, "backward", 1, 512, 256, 256),
        M("expert-tp", "reduce_scatter", "tp", 0, "backward", 1, 512, 512, 256),
    )


def test_experts_are_sharded_over_the_ranks_with_the_same_experts() -> None:
    """Four ranks, ep 2: each pair shares two experts, 512 parameters, 256 each."""
    layout = ParallelConfig(dp_shard=4, ep=2, zero=3, reshard_after_forward="always")
    found = of(job(MIXED, layout, global_batch=4, framework="fsdp2"), "fsdp")
    assert [each for each in found if each.axis == "expert_dp"] == [
        M("fsdp", "all_gather", "expert_dp", 0, "forward", 1, 1024, 512, 512),
        M("fsdp", "all_gather", "expert_dp", 0, "backward", 1, 1024, 512, 512),
        M("fsdp", "reduce_scatter", "expert_dp", 0, "grad_sync", 1, 2048, 2048, 1024),
    ]


def test_two_copies_of_a_tied_embedding_sum_their_gradients() -> None:
    tied = gpt(layers=2, hidden=8, heads=4, vocab=512, seq=16)
    size = 512 * 8 * 4
    assert of(job(tied, ParallelConfig(pp=2)), "tied") == (
        M("tied", "all_reduce", "pp", 0, "grad_sync", 1, size, size, size),
        M("tied", "all_reduce", "pp", 1, "grad_sync", 1, size, size, size),
    )
    assert of(job(tied, ParallelConfig(pp=2, schedule="zb-v")), "tied") == ()


LLAMA = llama(32, 4096, 32, 8, 14336, 128256)


def recorded(row: dict[str, str]) -> JobConfig:
    """The job of a CCL-Bench trace.

    Short runs on four GPUs and those of DeepSeek name the batch of a data-parallel rank and free
    all weights after the forward pass. Without FSDP, torchtitan's activations stay in fp32.
    """
    megatron, four = row["framework"].startswith("megatron"), "4gpu" in row["trace"]
    shard, copies = int(row["dp_shard"]), int(row["dp_replicate"])
    batch = int(row["batch"]) * (shard * copies if four else 1)
    layout = ParallelConfig(
        tp=int(row["tp"]), pp=int(row["pp"]), dp_shard=shard, dp_replicate=copies,
        ep=int(row["ep"] or 1), zero=1 if megatron else 3 if shard > 1 else 0,
        sequence_parallel=not megatron,
        reshard_after_forward="always" if four or mixture(row) else "default",
    )  # fmt: skip
    m = 1 if not row["pp_mb"] else int(row["pp_mb"])
    return job(
        model_of(row), layout,
        seq_len=int(row["seq"]), global_batch=batch,
        micro_batch=1 if megatron else batch // (shard * copies) // m,
        framework="megatron" if megatron else "fsdp2", recompute="full" if megatron else "none",
        activation_dtype="bf16" if shard > 1 or megatron else "fp32",
    )  # fmt: skip


def mixture(row: dict[str, str]) -> bool:
    return row["model"].startswith("deepseek")


def model_of(row: dict[str, str]) -> ModelConfig:
    return LITE if mixture(row) else LLAMA


def test_volumes_of_real_dense_runs_agree_within_a_thousandth() -> None:
    """Only collectives whose volume the parallelism fixes: torchtitan's few summed scalars and
    norms (under 4 MB a step) differ from version to version."""
    rows = [row for row in published("ccl_bench_training_traces") if not mixture(row)]
    for row in rows:
        found = sums(list_comm_ops(recorded(row)))
        for op, column in (
            ("all_reduce", "vol_allreduce_GB"),
            ("all_gather", "vol_allgather_GB"),
            ("reduce_scatter", "vol_reducescatter_GB"),
        ):
            if float(row[column]) > 0.01:
                assert found[0, op] / 1e9 == pytest.approx(float(row[column]), rel=1e-3)


def test_volumes_of_real_mixtures_agree_but_for_unbalanced_routing() -> None:
    """What FSDP gathers is exact; tokens routed are within 16 %, a rank's luck."""
    for row in filter(mixture, published("ccl_bench_training_traces")):
        found = sums(list_comm_ops(recorded(row)))
        gathered, routed = float(row["vol_allgather_GB"]), float(row["vol_alltoall_GB"])
        assert found[0, "all_gather"] / 1e9 == pytest.approx(gathered, rel=1e-5)
        assert found[0, "all_to_all"] / 1e9 == pytest.approx(routed, rel=0.16)
