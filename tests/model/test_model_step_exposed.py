"""Exposed communication of a stage, and the sum of a stage's times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.work_builders import TINY, job

from stepsplit.analyzer.model.comm_ops import CommOp
from stepsplit.analyzer.model.config import JobConfig, ParallelConfig, TrainingConfig
from stepsplit.analyzer.model.device_speed import DeviceSpeed
from stepsplit.analyzer.model.exposed_comm import OverlapCompute, TimedMessage, compute_exposed_time
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.host_time import compute_layer_host_ns
from stepsplit.analyzer.model.layer_time import LayerPass, time_dense_layer
from stepsplit.analyzer.model.model_table import load_model
from stepsplit.analyzer.model.optimizer_time import compute_optimizer_ns
from stepsplit.analyzer.model.parameters import count_stage_parameters
from stepsplit.analyzer.model.predict import predict
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.rank_layout import list_stages
from stepsplit.analyzer.model.schedule_names import Schedule
from stepsplit.analyzer.model.stage_time import StageTime, compute_stage_time

UNIT = DeviceSpeed(
    linear_flops_per_ns=1.0, head_flops_per_ns=1.0, attention_flops_per_ns=1.0,
    attention_backward_flops_per_ns=0.8, bytes_per_ns=1.0, launch_ns=0.0,
)  # fmt: skip
BESIDE = OverlapCompute(
    forward_ns=4_000.0, backward_ns=8_000.0, core_ns=400.0, core_backward_ns=1_250.0, microbatches=4
)
"""1000 ns of forward and 2000 ns of backward in each of four microbatches."""
OVERLAP = frozenset({"tp", "cp", "ep", "dp"})


def timed(
    strategy: str, axis: str, phase: str, count: int, each_ns: float, op: str = "all_reduce"
) -> TimedMessage:
    """count calls of each_ns."""
    message = CommOp(strategy, op, axis, 0, phase, count, 1, 1, 1)
    return TimedMessage(message, Band(each_ns, each_ns / 2, each_ns * 2))


def left(one: JobConfig, *calls: TimedMessage, beside: OverlapCompute = BESIDE) -> list[int]:
    """The exposed time of each kind of call."""
    return [each.exposed_ns for each in compute_exposed_time(one, calls, beside)]


def overlapping(**layout: Any) -> JobConfig:
    """A job of four microbatches with all overlap enabled."""
    return job(layout=ParallelConfig(overlap=OVERLAP, **layout), global_batch=4)


def test_without_overlap_all_of_it_is_exposed() -> None:
    gradients = timed("ddp", "dp", "grad_sync", 10, 50.0)
    products = timed("tp", "tp", "forward", 20, 5.0)
    assert left(job(), gradients, products) == [500, 100]


def test_all_calls_of_a_step_take_their_count_times_one() -> None:
    (found,) = compute_exposed_time(job(), [timed("ddp", "dp", "grad_sync", 10, 50.0)], BESIDE)
    assert found.time == Band(500.0, 250.0, 1000.0)


def test_gradients_overlap_only_the_last_backward() -> None:
    assert left(overlapping(), timed("ddp", "dp", "grad_sync", 10, 250.0)) == [2500 - 2000]


def test_interleaved_stages_reduce_gradients_beside_the_last_group_of_microbatches() -> None:
    three = replace(BESIDE, last_microbatches=3.0)
    assert left(overlapping(), timed("ddp", "dp", "grad_sync", 10, 700.0), beside=three) == [1000]
    plain, interleaved = (compute_grad_sync_ns(schedule, chunks) for schedule, chunks in ALIKE)
    assert interleaved < plain


ALIKE: tuple[tuple[Schedule, int], ...] = (("1f1b", 1), ("interleaved", 4))


def compute_grad_sync_ns(schedule: Schedule, chunks: int) -> int:
    """Exposed time of the gradients of Llama 2 70B on 256 GPUs, reduced once per step."""
    layout = ParallelConfig(
        tp=8, pp=4, dp_replicate=8, overlap=OVERLAP, schedule=schedule, chunks=chunks, zero=1
    )
    training = TrainingConfig(seq_len=4096, micro_batch=1, global_batch=64)
    hardware = load_hardware("h100-sxm", "ethernet-100")
    found = predict(JobConfig(load_model("llama-2-70b"), layout, training, hardware))
    return sum(e.exposed_ns for e in found.communication if e.message.phase == "grad_sync")


def test_the_last_gradient_bucket_is_exposed() -> None:
    assert left(overlapping(), timed("ddp", "dp", "grad_sync", 10, 50.0)) == [50]


def test_gathered_weights_overlap_the_next_forward() -> None:
    assert left(overlapping(), timed("zero-1", "dp", "optimizer", 10, 150.0)) == [1500 - 1000]
    assert left(overlapping(), timed("zero-1", "dp", "optimizer", 10, 50.0)) == [50]


def test_exposed_time_is_split_over_the_calls_of_a_phase() -> None:
    large = timed("ddp", "dp", "grad_sync", 10, 300.0)
    rest = timed("ddp", "expert_dp", "grad_sync", 1, 1000.0)
    assert left(overlapping(), large, rest) == [3 * (4000 - 2000) // 4, (4000 - 2000) // 4]


def test_fsdp_overlaps_every_microbatch_except_the_first_gather() -> None:
    layout = overlapping(zero=3)
    short = timed("fsdp", "dp_shard", "forward", 4 * 10, 50.0, "all_gather")
    long = timed("fsdp", "dp_shard", "forward", 4 * 10, 150.0, "all_gather")
    assert left(layout, short) == [4 * 50]
    assert left(layout, long) == [4 * (1500 - 1000)]


def test_fsdp_reduces_gradients_in_every_backward() -> None:
    gathers = timed("fsdp", "dp_shard", "backward", 4 * 10, 100.0, "all_gather")
    sums = timed("fsdp", "dp_shard", "grad_sync", 4 * 10, 200.0, "reduce_scatter")
    over = 4 * (1000 + 2000 - 2000)
    assert left(overlapping(zero=3), gathers, sums) == [over // 3, over - over // 3]


def test_fsdp_in_a_pipeline_leaves_one_gather_of_a_step() -> None:
    once = timed("fsdp", "dp_shard", "forward", 10, 50.0, "all_gather")
    assert left(overlapping(zero=3, pp=2), once) == [50]


def test_gradients_of_every_microbatch_overlap_every_backward() -> None:
    sums = timed("zero-2", "dp", "grad_sync", 4 * 10, 100.0, "reduce_scatter")
    one = job(layout=ParallelConfig(overlap=OVERLAP, zero=2), framework="deepspeed", global_batch=4)
    assert left(one, sums) == [4 * 100]


def test_a_quarter_of_overlapped_tensor_parallelism_stays_exposed() -> None:
    assert left(overlapping(), timed("tp", "tp", "forward", 40, 10.0)) == [100]
    assert left(overlapping(), timed("tp", "tp", "forward", 40, 500.0)) == [20_000 - 4_000]


def test_recomputed_communication_overlaps_with_that_of_the_backward() -> None:
    back, again = (timed("tp", "tp", phase, 40, 150.0) for phase in ("backward", "recompute"))
    assert left(overlapping(), back, again) == [2_000, 2_000]


def test_ring_attention_overlaps_the_core_of_attention() -> None:
    ring = job(layout=ParallelConfig(cp=2))
    forward = timed("cp", "cp", "forward", 10, 50.0, "send")
    backward = timed("cp", "cp", "backward", 10, 150.0, "send")
    piece = 400 / 2
    assert left(ring, forward, backward) == [500 - piece, 1500 - piece * 2.5 / 0.8]
    assert left(ring, timed("cp", "cp", "forward", 10, 20.0, "send")) == [0]


def test_the_last_hop_of_ring_gradients_is_exposed() -> None:
    ring = job(layout=ParallelConfig(cp=4))
    assert left(ring, timed("cp", "cp", "backward", 6, 60.0, "send")) == [60]


def test_torch_gathers_beside_the_first_piece_of_attention_and_passes_beside_all() -> None:
    """A quarter of the core's 400 ns forward; of the backward's calls the last hop is exposed."""
    torch = job(layout=ParallelConfig(cp=4), framework="fsdp2")
    gathered = timed("cp", "cp", "forward", 1, 150.0, "all_gather")
    assert left(torch, gathered) == [50]
    hops = timed("cp", "cp", "backward", 4, 60.0, "all_to_all")
    gathered = timed("cp", "cp", "backward", 1, 60.0, "all_gather")
    assert left(torch, hops, gathered) == [48, 12]
    compiled = job(layout=ParallelConfig(cp=4), framework="fsdp2", compile=True)
    assert left(compiled, hops, gathered) == [240, 60]


def test_other_context_parallelism_comes_before_the_core() -> None:
    gathered = job(layout=ParallelConfig(cp=2, context_kind="all-gather"))
    assert left(gathered, timed("cp", "cp", "forward", 10, 30.0, "all_gather")) == [300]


def test_expert_all_to_all_overlaps_if_the_framework_does() -> None:
    tokens = timed("ep", "ep", "forward", 10, 500.0, "all_to_all")
    assert left(job(), tokens) == [5000]
    assert left(overlapping(), tokens) == [5000 - 4000]


def test_a_message_without_time_exposes_none() -> None:
    assert left(overlapping(), timed("cp", "cp", "forward", 10, 0.0, "recv")) == [0]


def test_two_axes_cannot_hide_behind_the_same_compute() -> None:
    gathers = timed("fsdp", "dp_shard", "forward", 400, 10.0, "all_gather")
    tokens = timed("ep", "ep", "forward", 10, 400.0, "all_to_all")
    assert sum(left(overlapping(zero=3), gathers, tokens)) >= 8_000 - 4_000


MIDDLE = ParallelConfig(pp=4, layers_per_stage=(0, 2, 2, 0))
"""Two layers on the second stage, and neither embedding nor head."""


def test_collectives_take_processors_from_the_compute_that_overlaps_them() -> None:
    """Beyond the last bucket, 16 of 132 processors compute nothing while gradients are reduced in a
    node; over nodes two for each rank of the group in one, for it has as many network cards."""
    gradients = timed("ddp", "dp", "grad_sync", 10, 50.0)
    for layout, taken in (({}, 16), ({"dp_replicate": 32}, 16), ({"tp": 4, "dp_replicate": 8}, 4)):
        found = overlapping(**layout)
        device = replace(found.hardware, multiprocessors=132, gpus_per_node=8)
        assert left(replace(found, hardware=device), gradients) == [50 + round(500 * taken / 132)]


def test_what_overlaps_all_step_long_leaves_the_last_microbatch_its_share() -> None:
    """2,400 of 8,000 ns of backward overlap tensor parallelism: 600 of the last 2,000 ns."""
    products = timed("sp", "tp", "backward", 80, 40.0)
    gradients = timed("ddp", "dp", "grad_sync", 10, 160.0)
    assert left(overlapping(tp=2), products, gradients) == [800, 1600 - (2000 - 600)]


def test_messages_between_stages_share_the_network_with_gradients() -> None:
    """Reductions over nodes that overlap the compute take half of the link, of 2 microbatches."""
    layout = ParallelConfig(tp=8, pp=2, dp_replicate=4, schedule="interleaved", chunks=4, zero=1)
    training = TrainingConfig(seq_len=4096, micro_batch=1, global_batch=8)
    alone, beside = (
        predict(
            JobConfig(
                load_model("llama-2-13b"),
                replace(layout, overlap=overlap),
                training,
                load_hardware("h100-sxm"),
            )
        )
        for overlap in (frozenset[Any](), frozenset({"dp"}))
    )
    assert alone.split.p2p_ns < beside.split.p2p_ns <= 2 * alone.split.p2p_ns
    with_rule = [
        "pipeline.network_share" in {f.id for f in one.formulas} for one in (alone, beside)
    ]
    assert with_rule == [False, True]


def middle(one: JobConfig, *calls: TimedMessage) -> StageTime:
    """That stage with these messages."""
    return compute_stage_time(one, UNIT, list_stages(one)[1], count_stage_parameters(one)[1], calls)


def test_a_stage_computes_its_layers() -> None:
    one = job(layout=MIDDLE)
    layer = time_dense_layer(one, UNIT)
    found = middle(one)
    assert found.passes == (layer * 2,)
    assert found.compute_ns == 2 * (layer.forward_ns + layer.input_ns + layer.weight_ns)


def test_exposed_time_is_kept_for_each_microbatch_or_once_a_step() -> None:
    found = middle(
        job(layout=MIDDLE, global_batch=4),
        timed("tp", "tp", "forward", 16, 10.0),
        timed("tp", "tp", "backward", 16, 20.0),
        timed("tp", "tp", "recompute", 16, 30.0),
        timed("ddp", "dp", "grad_sync", 2, 100.0),
        timed("norm", "tp", "optimizer", 1, 7.0),
        timed("pp", "pp", "forward", 4, 1000.0, "send"),
    )
    assert found.comm == (LayerPass(40.0, 200.0, 0.0),)
    assert sum(each.exposed_ns for each in found.communication) == 4 * 240 + 207
    assert [each.message.strategy for each in found.communication] == [
        "tp", "tp", "tp", "ddp", "norm",
    ]  # fmt: skip


def test_a_pass_takes_the_longest_of_what_runs_at_once() -> None:
    layout = replace(MIDDLE, overlap=OVERLAP, zero=3, reshard_after_forward="always")
    one = job(layout=layout, framework="megatron")
    sends = timed("fsdp", "dp_shard", "forward", 1_000, 1_000.0, "all_gather")
    found = middle(one, sends)
    host_ns, computes_ns = 2 * compute_layer_host_ns(one), found.passes[0].forward_ns
    assert computes_ns < host_ns
    assert found.compute_chunk_cost(0).forward_ns == pytest.approx(sends.time.ns, rel=0.01)


def test_a_chunk_has_its_share_of_the_ranks_communication() -> None:
    layout = ParallelConfig(pp=2, schedule="interleaved", chunks=2, layers_per_stage=(1, 1, 3, 1))
    one = job(replace(TINY, layers=6), layout, global_batch=2)
    forward = timed("tp", "tp", "forward", 16, 10.0)
    backward = timed("tp", "tp", "backward", 16, 20.0)
    found = compute_stage_time(
        one, UNIT, list_stages(one)[0], count_stage_parameters(one)[0], (forward, backward)
    )
    assert found.comm == (LayerPass(20.0, 40.0, 0.0), LayerPass(60.0, 120.0, 0.0))
    assert [found.compute_chunk_cost(chunk) for chunk in (0, 1)] == [
        found.passes[chunk] + found.comm[chunk] + found.idle[chunk] for chunk in (0, 1)
    ]


def test_sharded_parameters_are_copied_a_quarter_of_it_forward() -> None:
    layout = ParallelConfig(
        pp=4, dp_shard=2, zero=3, layers_per_stage=(0, 2, 2, 0), reshard_after_forward="always"
    )
    one = job(layout=layout, framework="fsdp2", global_batch=2)
    (found,), copied = middle(one).passes, 16 * 2 * 784
    assert found == time_dense_layer(one, UNIT) * 2 + LayerPass(copied / 4, 0.0, copied * 3 / 4)


def test_what_a_pipeline_gathers_once_a_step_delays_no_microbatch() -> None:
    """Neither the gathers nor the copies around them; both take as long with 8 microbatches."""
    layout = ParallelConfig(pp=4, dp_shard=2, zero=3, layers_per_stage=(0, 2, 2, 0))
    gathers = timed("fsdp", "dp_shard", "forward", 1, 1_000.0, "all_gather")
    once = []
    for batch in (2, 16):
        one = job(layout=layout, framework="fsdp2", global_batch=batch)
        found = middle(one, gathers)
        assert found.passes == (time_dense_layer(one, UNIT) * 2,)
        assert found.comm == (LayerPass(0.0, 0.0, 0.0),)
        parameters = count_stage_parameters(one)[1]
        once.append(found.optimizer_ns - compute_optimizer_ns(one, UNIT, parameters))
    assert once == pytest.approx([16 * 2 * 784] * 2)


def test_more_microbatches_take_longer_in_a_pipeline_that_gathers_once() -> None:
    layout = ParallelConfig(tp=8, pp=8, dp_shard=16, zero=3, sequence_parallel=True)
    steps = [
        predict(
            JobConfig(
                load_model("opt-175b"),
                layout,
                TrainingConfig(512, 1, 16 * count, framework="fsdp2"),
                load_hardware("gh200"),
            )
        ).split.step_ns
        for count in range(1, 9)
    ]
    assert steps == sorted(steps)
