"""The whole prediction: hand-computed examples, and properties of every job."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from support.work_builders import DEVICE, TINY, job

from stepsplit.analyzer.buckets import Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model import hardware_config, model_table
from stepsplit.analyzer.model.comm_measured import Rates
from stepsplit.analyzer.model.confidence import (
    RUN_CONFIDENCES,
    UPDATE_SHARE_LIMIT,
    RunConfidence,
    RunKind,
    StepBand,
    find_error_band,
    find_run_kind,
)
from stepsplit.analyzer.model.config import (
    Experts,
    HardwareConfig,
    JobConfig,
    Link,
    ParallelConfig,
    TrainingConfig,
)
from stepsplit.analyzer.model.config_checks import find_violation
from stepsplit.analyzer.model.device_speed import compute_device_speed
from stepsplit.analyzer.model.hardware_config import load_link
from stepsplit.analyzer.model.ideal_bubble import compute_ideal_bubble_fraction
from stepsplit.analyzer.model.layer_time import LayerPass
from stepsplit.analyzer.model.parameters import count_stage_parameters
from stepsplit.analyzer.model.pipeline import compute_pipeline
from stepsplit.analyzer.model.predict import compute_stage_times, predict, time_messages
from stepsplit.analyzer.model.prediction import (
    Band,
    Communication,
    Prediction,
    prediction_from_json,
    prediction_to_json,
)
from stepsplit.analyzer.model.profile import list_frameworks
from stepsplit.analyzer.model.rank_layout import list_stages
from stepsplit.analyzer.model.schedule_names import SCHEDULES, Schedule
from stepsplit.analyzer.model.stage_time import StageTime, compute_stage_time
from stepsplit.analyzer.units import format_percent

FAST = replace(DEVICE, peaks_flops_per_s=(("bf16", 1e9),), memory_bytes_per_s=1e9)
"""A FLOP and a byte each take a ns."""
SLOW = replace(DEVICE, peaks_flops_per_s=(("bf16", 1e8),), memory_bytes_per_s=1e8)
"""Each takes 10 ns: TINY's kernels take longer than their launches."""
LAYER_FORWARD, LAYER_BACKWARD = 39_936, 50_176 + 30_208
EMBEDDING, HEAD_FORWARD, HEAD_BACKWARD = 768, 221_440, 205_056 + 155_904
"""TINY's times on FAST, as tests/model/test_model_step_kernels.py works them out; the embedding
takes as long backward as forward."""
MICROBATCH = 4 * (LAYER_FORWARD + LAYER_BACKWARD) + 2 * EMBEDDING + HEAD_FORWARD + HEAD_BACKWARD
LAYER, VOCABULARY, NORM = 784, 4096, 8
ADAM = 30 + 12 + 4
"""Bytes that its update, clipping and zeroing of gradients move for each parameter."""


def test_one_gpu_computes_two_microbatches_and_updates() -> None:
    one = replace(job(global_batch=2), hardware=SLOW)
    parameters = 4 * LAYER + 2 * VOCABULARY + NORM
    compute_ns = 10 * (2 * MICROBATCH + ADAM * parameters)
    found = predict(one)
    assert found.splits == (Split(compute_ns=compute_ns),)
    assert (found.parameters, found.parameters_per_stage) == (parameters, (parameters,))
    assert (found.communication, found.bubble_fraction, found.bubble_overhead) == ((), 0.0, 0.0)


HOST_NS = 20 * 13_480
"""To launch a layer's forward: Megatron-LM's calls, each as long as one of torch's Linear."""


def test_a_device_too_fast_for_its_host_waits_in_every_microbatch() -> None:
    update_ns = ADAM * (4 * LAYER + 2 * VOCABULARY + NORM)
    launches_ns = 4 * 2 * HOST_NS
    assert predict(replace(job(global_batch=2), hardware=FAST)).split == Split(
        compute_ns=2 * MICROBATCH + update_ns, idle_ns=2 * (launches_ns - MICROBATCH)
    )


def test_a_pipeline_of_two_stages_waits_for_the_one_with_the_head() -> None:
    two = replace(job(layout=ParallelConfig(pp=2), global_batch=4), hardware=SLOW)
    there, back = 10 * (2 * LAYER_FORWARD + EMBEDDING), 10 * (2 * LAYER_BACKWARD + EMBEDDING)
    last = 10 * (2 * (LAYER_FORWARD + LAYER_BACKWARD) + HEAD_FORWARD + HEAD_BACKWARD)
    sends_ns = 2 * 6_605
    """Forward and backward: 6600 ns, and 256 bytes at half of 100 GB/s."""
    norm_ns = 6_600
    first_update, last_update = (10 * ADAM * (2 * LAYER + VOCABULARY + norm) for norm in (0, NORM))
    holes_ns = there + 4 * last + back - 4 * (there + back)
    found = predict(two)
    assert found.splits == (
        Split(
            4 * (there + back) + first_update, norm_ns, sends_ns,
            bubble_ns=holes_ns + last_update - first_update,
        ),
        Split(4 * last + last_update, norm_ns, sends_ns, bubble_ns=there + back),
    )  # fmt: skip
    assert found.split == found.splits[1]
    window_ns = there + 4 * last + back + sends_ns
    fraction = (holes_ns + there + back + 2 * sends_ns) / (2 * window_ns)
    assert found.bubble_fraction == pytest.approx(fraction, rel=1e-6)
    assert found.bubble_overhead == pytest.approx(fraction / (1 - fraction), rel=1e-6)


def test_pipeline_messages_have_their_exposed_time() -> None:
    found = predict(replace(job(layout=ParallelConfig(pp=2), global_batch=4), hardware=SLOW))
    rows = [
        (c.message.stage, c.message.op, c.message.phase, c.message.count, c.exposed_ns)
        for c in found.communication
    ]
    assert rows == [
        (0, "all_reduce", "optimizer", 1, 6_600),
        (0, "send", "forward", 4, 6_605),
        (0, "recv", "backward", 4, 6_605),
        (1, "all_reduce", "optimizer", 1, 6_600),
        (1, "recv", "forward", 4, 6_605),
        (1, "send", "backward", 4, 6_605),
    ]


def test_a_step_waits_for_the_slowest_of_its_nodes() -> None:
    nodes = replace(SLOW, gpus_per_node=1, efficiency=replace(SLOW.efficiency, jitter=0.1))
    found = predict(
        replace(job(layout=ParallelConfig(dp_replicate=4), global_batch=8), hardware=nodes)
    )
    slowest = 0.1 * math.sqrt(2 * math.log(4))
    assert found.split.skew_ns == round(slowest * (found.split.step_ns - found.split.skew_ns))


EQUAL, NOTHING = LayerPass(30.0, 30.0, 20.0), LayerPass(0.0, 0.0, 0.0)


def equal_stages(one: JobConfig) -> tuple[StageTime, ...]:
    """All stages compute the same, and only compute takes time."""
    return tuple(
        StageTime(stage, (EQUAL,) * len(nothing), nothing, nothing, (), 0.0, 0.0)
        for stage in list_stages(one)
        for nothing in [tuple(NOTHING for _ in stage.chunks)]
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_of_equal_stages_is_that_of_the_closed_form(schedule: Schedule) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layout = ParallelConfig(pp=4, schedule=schedule, chunks=chunks)
    one = job(replace(TINY, layers=8), layout, global_batch=16)
    found = compute_pipeline(one, equal_stages(one), dict.fromkeys(range(4), ()))
    ideal = compute_ideal_bubble_fraction(schedule, 4, 16, chunks, (30.0, 30.0, 20.0))
    assert ideal is not None
    assert found.time.bubble_fraction == pytest.approx(ideal)
    assert found.time.bubble_overhead == pytest.approx(ideal / (1 - ideal))


LLAMA, A100 = model_table.load_model("llama-7b"), hardware_config.load_hardware("a100-sxm-80gb")
RECIPE = TrainingConfig(seq_len=2048, micro_batch=1, global_batch=32)


def llama(layout: ParallelConfig, hardware: HardwareConfig = A100, **recipe: Any) -> JobConfig:
    """Llama 7B, 32 sequences of 2048 tokens per step."""
    return JobConfig(LLAMA, layout, replace(RECIPE, **recipe), hardware)


def test_dualpipe_computes_what_other_schedules_compute() -> None:
    plain, dual = (
        predict(llama(ParallelConfig(pp=4, schedule=schedule))).split.compute_ns
        for schedule in ("dualpipe-v", "dualpipe")
    )
    assert dual == pytest.approx(plain, rel=0.05)


def test_utilization_is_flops_over_time_and_peak() -> None:
    found = predict(llama(ParallelConfig(tp=2, pp=2, dp_replicate=2), recompute="full"))
    allowed = found.split.step_ns * 1e-9 * 8 * 312e12
    assert found.mfu is not None and found.hfu is not None
    assert found.mfu * allowed == pytest.approx(found.model_flops)
    assert found.hfu * allowed == pytest.approx(found.hardware_flops)
    assert found.tokens_per_s_per_gpu == pytest.approx(32 * 2048 / (found.split.step_ns * 1e-9) / 8)


def test_a_run_like_the_fitted_ones_has_high_confidence() -> None:
    found = predict(llama(ParallelConfig(tp=2, dp_replicate=4), recipe="a"))
    assert (found.confidence, found.notes) == ("high", ())
    band = find_error_band(RunKind("recipe", "ampere", "megatron", "dense"), "high")
    assert 0.05 < band.error < 0.2
    limits_ns = band.find_limits(found.split.step_ns)
    assert (found.low_ns, found.high_ns) == tuple(map(round, limits_ns))


def test_a_run_with_the_users_constants_is_calibrated() -> None:
    own = replace(A100, efficiency=replace(A100.efficiency, rows=("run:mine",)))
    assert predict(llama(ParallelConfig(tp=4), own)).confidence == "calibrated"


def test_constants_without_a_framework_apply_to_all() -> None:
    any_of = replace(A100, efficiency=replace(A100.efficiency, frameworks=()))
    job = llama(ParallelConfig(tp=4), any_of, framework="nanotron", recipe="a")
    assert predict(job).confidence == "high"


def doubts(one: JobConfig) -> list[str]:
    """The beginnings of the caveats, for a prediction with low confidence."""
    found = predict(one)
    assert found.confidence == "low"
    kind = find_run_kind(one)
    usual, farther, off = (find_error_band(kind, each).error for each in RUN_CONFIDENCES)
    assert usual <= farther <= off
    if one.hardware.efficiency.rows:
        assert found.high_ns == round(found.split.step_ns * (1 + off))
    return [note.split(":")[0] for note in found.notes]


def test_a_tiny_model_is_host_bound() -> None:
    tiny = JobConfig(
        model_table.load_model("gpt2-124m"), ParallelConfig(), replace(RECIPE, seq_len=256), A100
    )
    assert doubts(tiny) == ["host-bound"]


def test_tensor_parallelism_over_nodes_is_a_caveat() -> None:
    over = llama(ParallelConfig(tp=8), replace(A100, gpus_per_node=4, inter=A100.intra))
    assert doubts(over) == ["tp crosses nodes"]
    far = replace(A100.inter, bytes_per_s=1e9)
    assert doubts(replace(over, hardware=replace(over.hardware, inter=far))) == [
        "tp crosses nodes", "communication takes most of the step",
    ]  # fmt: skip


def test_a_job_that_does_not_fit_in_memory_is_not_the_one_that_ran() -> None:
    assert doubts(llama(ParallelConfig())) == ["does not fit in memory"]


def test_more_ranks_of_zero_3_than_known_are_a_caveat() -> None:
    far = llama(
        ParallelConfig(dp_shard=1024, zero=3), replace(A100, inter=A100.intra),
        framework="fsdp2", global_batch=1024, micro_batch=1,
    )  # fmt: skip
    assert doubts(far) == ["communication takes most of the step", "ZeRO-3 over 1,024 ranks"]


def test_nearly_full_memory_is_a_caveat_of_fsdp_alone() -> None:
    """The same job on a device on which its peak takes 90 %."""
    plain = llama(ParallelConfig(dp_shard=8, zero=3), framework="fsdp2", global_batch=8)
    peak_bytes = max(stage.total_bytes for stage in predict(plain).memory)
    device = replace(plain.hardware, memory_bytes=round(peak_bytes / 0.9))
    full = replace(plain, hardware=device)
    kept = {"memory is 90.0 % full: the allocator may free and retry"}
    assert kept & {*predict(full).notes} == kept
    assert not kept & {*predict(plain).notes}


def distances(one: JobConfig) -> list[str]:
    """The caveats of a prediction with medium confidence."""
    found = predict(one)
    assert found.confidence == "medium"
    return list(found.notes)


def test_what_differs_from_the_fitted_runs_leaves_a_medium_confidence() -> None:
    (note,) = distances(llama(ParallelConfig(tp=4), framework="nanotron"))
    assert note.startswith("ampere efficiencies are calibrated on ddp")
    assert note.endswith("megatron, not nanotron")
    (note,) = distances(
        llama(ParallelConfig(tp=8), seq_len=131_072, micro_batch=1, recompute="full")
    )
    assert note == "sequences of 131,072 tokens: known up to 65,536"
    h200 = hardware_config.load_hardware("h200-sxm")
    assert distances(llama(ParallelConfig(tp=4), h200)) == [
        "hopper efficiencies are calibrated on h100-sxm, not h200-sxm"
    ]


def test_a_kind_without_enough_runs_leaves_a_medium_confidence() -> None:
    dense = llama(ParallelConfig(tp=4), cuda_graph="step")
    experts = replace(dense.model, experts=Experts(4, 2, 2048))
    tuned = replace(dense.training, recipe="a")
    (note,) = distances(replace(dense, model=experts, training=tuned))
    kind = "ampere megatron experts recipe"
    assert note == f"too few published runs of this kind ({kind}) for a band of its GPUs"


def test_a_borrowed_band_is_no_evidence_of_a_high_confidence() -> None:
    """Of what others measured on A100, hundreds of runs leave something open, and none nothing."""
    one = llama(ParallelConfig(tp=2, dp_replicate=4))
    kind = RunKind("report", "ampere", "megatron", "dense")
    assert find_error_band(kind, "high").runs > 100
    assert distances(one) == [
        f"too few published runs of this kind ({kind}) leave nothing open: its band is that of"
        " others"
    ]


def test_a_step_that_waits_for_its_launches_is_a_caveat() -> None:
    """The launches of experts take 42 % of the step of a small mixture."""
    dense = llama(ParallelConfig(tp=4))
    experts = replace(dense, model=replace(dense.model, experts=Experts(4, 2, 2048)))
    assert "waiting for launches takes much of the step" in predict(experts).notes[0]


def test_offloaded_states_are_updated_on_a_host_whose_rate_the_user_can_state() -> None:
    one = llama(ParallelConfig(tp=4), offload=frozenset({"optimizer"}))
    step = predict(one).split
    share = step.idle_ns / step.step_ns
    assert share > UPDATE_SHARE_LIMIT
    assert doubts(one) == [
        f"updating optimizer states on the host takes {format_percent(share)} of the step, and "
        "hosts differ"
    ]
    known = replace(one, hardware=replace(one.hardware, host_update_bytes_per_s=2e11))
    faster = predict(known)
    assert faster.split.idle_ns == pytest.approx(step.idle_ns * 117 / 200)
    (note,) = distances(known)
    assert note.endswith("at the stated hardware.host_update_bytes_per_s")


def test_a_short_update_on_the_host_leaves_a_medium_confidence() -> None:
    one = llama(ParallelConfig(tp=4), offload=frozenset({"optimizer"}), global_batch=512)
    (note,) = distances(one)
    assert note.startswith("updating optimizer states on the host takes ")


def test_copies_to_the_host_are_assumed_to_overlap() -> None:
    one = llama(ParallelConfig(tp=4), offload=frozenset({"activations"}), recipe="a")
    assert distances(one) == ["copies to the host are assumed to overlap the compute of a pass"]
    to_nvme = replace(one, training=replace(one.training, offload_to="nvme"))
    assert "copies to NVMe are timed as those to host memory" in doubts(to_nvme)


@pytest.mark.parametrize(
    ("layout", "training", "words"),
    [
        ({"tp": 4}, {"dtype": "fp8", "fp8_scaling": "row"}, "fp8 with a scale per row"),
        ({"cp": 2, "context_kind": "ulysses"}, {}, "Ulysses"),
        ({"tp": 4}, {"offload": frozenset({"activations"})}, "offloaded activations outside of"),
        ({"dp_replicate": 4}, {"framework": "ddp", "compile": True}, "what torch.compile fuses"),
    ],
)
def test_what_published_runs_miss_leaves_a_low_confidence(
    layout: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    h100 = hardware_config.load_hardware("h100-sxm")
    one = llama(ParallelConfig(**layout), h100, **training)
    assert predict(one).confidence == "low"
    assert any(note.startswith(words) for note in predict(one).notes)
    own = replace(h100.efficiency, rows=("run:mine",))
    calibrated = replace(one, hardware=replace(h100, efficiency=own))
    assert not any(note.startswith(words) for note in predict(calibrated).notes)


def test_experts_of_a_recipe_and_of_others_have_other_caveats() -> None:
    dense = llama(
        ParallelConfig(tp=4), hardware_config.load_hardware("h100-sxm"), cuda_graph="step"
    )
    other = replace(dense, model=replace(dense.model, experts=Experts(4, 2, 2048)))
    tuned = replace(other, training=replace(other.training, recipe="a"))
    words = "experts outside of tuned recipes"
    assert any(note.startswith(words) for note in predict(other).notes)
    assert not any(note.startswith(words) for note in predict(tuned).notes)


def test_experts_over_efa_are_a_caveat() -> None:
    """An expert a rank on two nodes of eight."""
    preset = replace(A100, inter=load_link("efa-p4d"))
    model = replace(llama(ParallelConfig(tp=4)).model, experts=Experts(16, 2, 11008))
    one = llama(ParallelConfig(dp_replicate=16, ep=16), preset, micro_batch=1, global_batch=16)
    assert any("over EFA" in note for note in doubts(replace(one, model=model)))


def test_context_parallelism_over_nodes_leaves_a_medium_confidence() -> None:
    over = llama(ParallelConfig(tp=4, cp=2), replace(A100, gpus_per_node=4, inter=A100.intra))
    assert [note.split(":")[0] for note in distances(over)] == ["cp crosses nodes"]


def test_hardware_without_published_runs_is_a_caveat() -> None:
    mi300x = hardware_config.load_hardware("mi300x")
    assert doubts(llama(ParallelConfig(tp=2), mi300x)) == ["mi300x"]


def test_a_kind_with_few_runs_borrows_the_band_of_a_wider_one() -> None:
    narrow = RunKind("report", "hopper", "megatron", "dense")
    of_family = replace(narrow, framework="")
    known = (
        StepBand(0.2, 30, 4, RunKind("report")),
        StepBand(0.1, 12, 4, of_family),
        StepBand(0.01, 8, 4, narrow),
    )
    bands: dict[tuple[RunKind, RunConfidence], StepBand] = {
        (band.kind, "medium"): band for band in known
    }
    bands[RunKind("report"), "low"] = StepBand(0.4, 10, 4, RunKind("report"))
    assert find_error_band(narrow, "medium", bands).error == 0.1
    assert find_error_band(narrow, "low", bands).error == 0.4
    assert find_error_band(replace(narrow, family="volta"), "medium", bands).error == 0.2
    assert find_error_band(narrow, "high", {}).error == 0.5
    # Enough runs of few publishers are too few.
    bands[narrow, "medium"] = StepBand(0.02, 20, 3, narrow)
    assert find_error_band(narrow, "medium", bands).error == 0.1
    # A lower confidence is no narrower.
    bands[of_family, "low"] = StepBand(0.05, 10, 4, of_family)
    assert find_error_band(narrow, "low", bands).error == 0.1


def test_an_invalid_job_is_rejected() -> None:
    with pytest.raises(
        UsageError, match=r"^heads \(32\) must be divisible by tp \(3\); fix heads or tp$"
    ):
        predict(llama(ParallelConfig(tp=3)))


def test_experts_split_over_replicas_are_predicted_or_rejected() -> None:
    layout = ParallelConfig(tp=2, dp_replicate=2, cp=2, ep=8, zero=3)
    one = JobConfig(model_table.load_model("mixtral-8x7b"), layout, RECIPE, A100)
    if find_violation(one) is None:
        assert predict(one).split.step_ns > 0


def test_a_slower_device_does_not_help_a_host_bound_run() -> None:
    layout = ParallelConfig(dp_replicate=8, zero=1, overlap=frozenset({"dp"}))
    one = JobConfig(model_table.load_model("gpt2-1.5b"), layout, replace(RECIPE, seq_len=128), A100)
    assert predict(replace(one, hardware=slower(A100))).split.step_ns >= predict(one).split.step_ns


def test_expert_tp_messages_take_time_without_tensor_parallelism() -> None:
    layout = ParallelConfig(dp_replicate=8, ep=4, expert_tp=2)
    found = predict(JobConfig(model_table.load_model("mixtral-8x7b"), layout, RECIPE, A100))
    times = [c.time.ns for c in found.communication if c.message.strategy == "expert-tp"]
    assert times and min(times) > 0


def test_an_offloaded_update_does_not_run_on_the_device() -> None:
    here, away = (
        predict(llama(ParallelConfig(), offload=frozenset(states))).split
        for states in ((), ("optimizer",))
    )
    assert (away.compute_ns < here.compute_ns, away.copy_ns > 0) == (True, True)


def test_a_ring_of_context_parallelism_is_made_of_messages() -> None:
    found = predict(llama(ParallelConfig(cp=2), replace(A100, gpus_per_node=1)))
    sends_ns = sum(c.exposed_ns for c in found.communication if c.message.op == "send")
    assert (sends_ns > 0, found.split.p2p_ns) == (True, sends_ns)


def test_a_host_launches_ahead_while_the_device_communicates() -> None:
    # Beside a layer's own calls, two for each of its two collectives.
    launches_ns = 4 * 2 * 24 / 20 * HOST_NS
    assert predict(job(layout=ParallelConfig(tp=2))).split.step_ns == pytest.approx(
        launches_ns, rel=0.02
    )


def test_a_slow_host_makes_the_bubble_longer_too() -> None:
    found = predict(job(layout=ParallelConfig(pp=4), global_batch=4))
    assert found.split.step_ns >= (4 + 4 - 1) * 2 * HOST_NS


@pytest.mark.parametrize("states", ["parameters", "activations"])
def test_a_slow_link_to_the_host_exposes_copies(states: str) -> None:
    sharded = ParallelConfig(dp_shard=8, zero=3)
    copies = [
        predict(
            llama(
                sharded,
                replace(A100, host=Link("pcie", rate, 1.0, 0.0)),
                framework="fsdp2",
                offload=frozenset({states}),
            )
        ).split.copy_ns
        for rate in (1e9, 1e12)
    ]
    assert copies[0] > 1e8
    assert copies[1] < copies[0] / 100


def test_attention_is_recomputed_with_its_communication_or_not_at_all() -> None:
    plain, again = (
        predict(llama(ParallelConfig(cp=4, context_kind="all-gather"), recompute=recompute)).split
        for recompute in ("none", "selective")
    )
    assert (again.collective_ns > plain.collective_ns) == (again.compute_ns > plain.compute_ns)


FAR = JobConfig(
    model_table.load_model("gpt3-175b"),
    ParallelConfig(tp=2, pp=8),
    replace(RECIPE, global_batch=8),
    A100,
)
"""Stages of two ranks on nodes of eight: every fourth boundary is one between nodes."""


@pytest.mark.parametrize("strategy", ["tied", "pp"])
def test_messages_between_stages_on_different_nodes_use_the_network(strategy: str) -> None:
    slowest_ns, size = max(
        (each.time.ns / each.message.count, each.message.message_bytes)
        for each in predict(FAR).communication
        if each.message.strategy == strategy
    )
    assert slowest_ns >= size / A100.inter.bytes_per_s * 1e9


def slower(hardware: HardwareConfig) -> HardwareConfig:
    """The same with half its peaks."""
    peaks = tuple((dtype, peak / 2) for dtype, peak in hardware.peaks_flops_per_s)
    return replace(hardware, peaks_flops_per_s=peaks)


def faster(link: Link) -> tuple[Link, Link]:
    """Twice the bandwidth, or half the latency."""
    return replace(link, bytes_per_s=2 * link.bytes_per_s), replace(
        link, latency_ns=link.latency_ns / 2
    )


def faster_links(hardware: HardwareConfig) -> tuple[HardwareConfig, ...]:
    """The same with one of its links faster in one way."""
    return (
        *(replace(hardware, intra=link) for link in faster(hardware.intra)),
        *(replace(hardware, inter=link) for link in faster(hardware.inter)),
    )


WHOLE_BACKWARD = ("naive", "gpipe", "1f1b", "interleaved")
DENSE = ("llama-7b", "llama-3.1-8b", "gpt3-175b", "mpt-1b")
MIXTURES = ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b")
HARDWARE = ("a100-sxm-80gb", "h100-sxm", "b200-sxm", "mi300x", "gb200")


@st.composite
def layouts(draw: st.DrawFn, mixture: bool) -> ParallelConfig:
    """Axes up to 8, every schedule and ZeRO stage."""
    pp, zero = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((0, 1, 2, 3)))
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    dp = draw(st.sampled_from((1, 2, 4, 8)))
    shard = dp if zero == 3 else 1
    replicas = draw(st.sampled_from((1, 2))) if zero == 3 else dp // shard
    return ParallelConfig(
        tp=draw(st.sampled_from((1, 2, 4))),
        pp=pp,
        dp_replicate=replicas,
        dp_shard=shard,
        cp=draw(st.sampled_from((1, 1, 2))),
        ep=draw(st.sampled_from((1, dp))) if mixture else 1,
        sequence_parallel=draw(st.booleans()),
        zero=zero,
        schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
        overlap=draw(st.frozensets(st.sampled_from(("tp", "dp", "cp", "ep")))),
        context_kind=draw(st.sampled_from(("ring", "all-gather", "ulysses"))),
    )


@st.composite
def jobs(draw: st.DrawFn) -> JobConfig:
    """Valid jobs of presets."""
    mixture = draw(st.booleans())
    layout = draw(layouts(mixture))
    recipe = TrainingConfig(
        seq_len=draw(st.sampled_from((1024, 2048))),
        micro_batch=(micro_batch := draw(st.sampled_from((1, 2)))),
        global_batch=draw(st.sampled_from((8, 16, 40))) * micro_batch * layout.dp,
        dtype=draw(st.sampled_from(("bf16", "fp16"))),
        recompute=draw(st.sampled_from(("none", "selective", "full", "sqrt"))),
        framework=draw(st.sampled_from(list_frameworks())),
        flash_attention=draw(st.booleans()),
        offload=draw(st.sampled_from((frozenset(), frozenset({"optimizer"})))),
    )
    model = model_table.load_model(draw(st.sampled_from(MIXTURES if mixture else DENSE)))
    one = JobConfig(
        model, layout, recipe, hardware_config.load_hardware(draw(st.sampled_from(HARDWARE)))
    )
    assume(find_violation(one) is None)
    return one


@given(one=jobs())
@settings(max_examples=200, deadline=None)
def test_every_stage_fills_the_same_step_to_the_nanosecond(one: JobConfig) -> None:
    found = predict(one)
    buckets = [split.buckets_ns for split in found.splits]
    assert {sum(each) for each in buckets} == {found.split.step_ns}
    assert min(min(each) for each in buckets) >= 0
    assert len(buckets) == one.parallel.pp and found.split in found.splits
    assert found.low_ns <= found.split.step_ns <= found.high_ns
    assert 0 <= found.bubble_fraction < 1


@given(one=jobs())
@settings(max_examples=100, deadline=None)
def test_communication_is_never_exposed_for_longer_than_it_takes(one: JobConfig) -> None:
    for each in predict(one).communication:
        assert each.time.low_ns <= each.time.ns <= each.time.high_ns
        if each.message.strategy != "pp":
            assert 0 <= each.exposed_ns <= each.time.ns + 0.5


@given(one=jobs())
@settings(max_examples=100, deadline=None)
def test_a_prediction_is_the_same_again_and_from_its_json(one: JobConfig) -> None:
    found = predict(one)
    assert predict(one) == found
    text = prediction_to_json(found)
    again = prediction_from_json(text)
    assert prediction_to_json(again) == text
    assert rounded(again) == rounded(found)


def rounded(found: Prediction) -> Prediction:
    """Times of messages in whole ns, as JSON has them."""
    return replace(found, communication=tuple(map(_rounded, found.communication)))


def _rounded(each: Communication) -> Communication:
    one = each.time
    return replace(each, time=Band(*(float(round(ns)) for ns in (one.ns, one.low_ns, one.high_ns))))


ROUNDING_NS = 10
"""Each bucket, and the exposed time of each message, is rounded on its own."""


@given(one=jobs())
@settings(max_examples=100, deadline=None)
def test_a_faster_link_never_makes_a_step_longer(one: JobConfig) -> None:
    most_ns = predict(one).split.step_ns + ROUNDING_NS
    for hardware in faster_links(one.hardware):
        assert predict(replace(one, hardware=hardware)).split.step_ns <= most_ns


@given(one=jobs())
@settings(max_examples=100, deadline=None)
def test_a_slower_device_never_makes_a_step_shorter(one: JobConfig) -> None:
    # With a split backward, a slower weight gradient fills more of the bubble.
    assume(one.parallel.pp == 1 or one.parallel.schedule in WHOLE_BACKWARD)
    slow = predict(replace(one, hardware=slower(one.hardware)))
    assert slow.split.step_ns >= predict(one).split.step_ns - ROUNDING_NS


@given(one=jobs())
@settings(max_examples=100, deadline=None)
def test_more_layers_never_make_a_step_shorter(one: JobConfig) -> None:
    more = one.model.layers + 2 * one.parallel.pp * one.parallel.stages_per_rank
    deeper = replace(one, model=replace(one.model, layers=more))
    assert predict(deeper).split.step_ns >= predict(one).split.step_ns - ROUNDING_NS


@given(one=jobs())
@settings(max_examples=100, deadline=None)
def test_recomputing_never_makes_a_step_shorter(one: JobConfig) -> None:
    plain, full = (
        predict(replace(one, training=replace(one.training, recompute=recompute)))
        for recompute in ("none", "full")
    )
    assert full.split.step_ns >= plain.split.step_ns - ROUNDING_NS


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "dualpipe"])
def test_equal_stages_share_the_time_that_each_has_alone(schedule: Schedule) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layout = ParallelConfig(tp=2, pp=4, dp_replicate=2, schedule=schedule, chunks=chunks)
    one = llama(layout, global_batch=32)
    held, timed = count_stage_parameters(one), time_messages(one, Rates())
    alone = tuple(
        compute_stage_time(
            one, compute_device_speed(one), stage, held[stage.index], timed[stage.index]
        )
        for stage in list_stages(one)
    )
    assert compute_stage_times(one, held, timed) == alone
