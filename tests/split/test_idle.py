"""Idle time explained, on traces of a few events; times in microseconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import BUCKETS, analyze, examine

ENGINE = 200
"""The thread on which backward runs."""
BACKWARD = "autograd::engine::evaluate_function: MulBackward0"
LATENCY = "launch_latency", "cudaLaunchKernel"
Row = tuple[str, str | None, float, int]
"""(cause, op, idle in microseconds, gaps)"""


def first() -> GpuTrace:
    """A kernel in the first 100 microseconds."""
    return GpuTrace().kernel("first", 0, 100)


def late(trace: GpuTrace, called: float, *, call: str = "cudaLaunchKernel") -> GpuTrace:
    """A kernel that the host launches in 5 microseconds and that starts 2 later."""
    ran = (called + 7, called + 20)
    return trace.launch("late", (called, called + 5), ran, call=call)


def causes(folder: Path, trace: GpuTrace | CpuTrace) -> list[Row]:
    """Why the trace idled in its full steps; without steps, from its first event to its last."""
    rows = analyze(trace.write(folder)).idle
    return [(row.cause, row.op, row.idle_ns / 1000, row.count) for row in rows]


def test_a_busy_host_is_launch_bound_then_comes_the_latency_of_the_launch(tmp_path: Path) -> None:
    trace = late(first().op("aten::mul", 90, 150), 140)
    assert causes(tmp_path, trace) == [
        ("launch_bound", "aten::mul", 45, 1),
        (*LATENCY, 2, 1),
    ]


def test_the_outermost_op_names_what_the_host_did(tmp_path: Path) -> None:
    trace = first().op("aten::linear", 90, 150).op("aten::addmm", 95, 148)
    assert causes(tmp_path, late(trace, 140))[0] == (
        "launch_bound", "aten::linear", 45, 1
    )  # fmt: skip


def test_between_ops_the_host_runs_python(tmp_path: Path) -> None:
    trace = first().op("aten::add", 90, 110).op("aten::mul", 130, 150)
    assert causes(tmp_path, late(trace, 140)) == [
        ("python", "", 20, 1),
        ("launch_bound", "aten::mul", 15, 1),
        ("launch_bound", "aten::add", 10, 1),
        (*LATENCY, 2, 1),
    ]


def test_python_is_named_by_its_innermost_function_without_addresses(tmp_path: Path) -> None:
    trace = first().op("aten::add", 80, 100).python("train.py(7): step", 0, 200)
    trace.python("<built-in method sleep of Clock object at 0x7f0e>", 110, 130)
    trace.python("Python GC", 115, 118)
    assert causes(tmp_path, late(trace, 140)) == [
        ("python", "train.py(7): step", 60, 2),
        ("python", "<built-in method sleep of Clock object>", 17, 1),
        ("launch_bound", "cudaLaunchKernel", 5, 1),
        ("python", "Python GC", 3, 1),
        (*LATENCY, 2, 1),
    ]


def test_without_functions_python_is_named_by_the_annotation(tmp_path: Path) -> None:
    trace = first().op("aten::add", 80, 90).step(1, 0, 200).annotation("loss", 95, 200)
    assert causes(tmp_path, late(trace, 140)) == [
        ("python", "loss", 80, 2),
        ("launch_bound", "loss", 5, 1),
        (*LATENCY, 2, 1),
    ]


def test_the_ops_of_an_optimizer_are_named_after_it(tmp_path: Path) -> None:
    trace = first().annotation("Optimizer.step#AdamW.step", 90, 160).op("aten::add_", 100, 150)
    assert causes(tmp_path, late(trace, 140)) == [
        ("launch_bound", "Optimizer.step#AdamW.step", 45, 1),
        (*LATENCY, 2, 1),
    ]


def test_without_ops_in_the_trace_python_cannot_be_distinguished(tmp_path: Path) -> None:
    trace = first().annotation("forward", 90, 160)
    assert causes(tmp_path, late(trace, 140)) == [
        ("launch_bound", "forward", 45, 1),
        (*LATENCY, 2, 1),
    ]


def test_queued_kernels_lose_only_the_device_latency(tmp_path: Path) -> None:
    trace = first().kernel("queued", 102, 110, launched=5)
    assert causes(tmp_path, trace) == [(*LATENCY, 2, 1)]


def test_gaps_of_one_cause_are_summed_and_counted(tmp_path: Path) -> None:
    trace = first().kernel("a", 102, 110, launched=5).kernel("b", 113, 120, launched=6)
    assert causes(tmp_path, trace) == [(*LATENCY, 5, 2)]


def test_a_launch_before_the_recording_is_inferred_from_stream_order(tmp_path: Path) -> None:
    trace = GpuTrace().call("cudaEventQuery", 8, 9)
    trace.unlaunched("a", 10, 20).unlaunched("b", 23, 30).kernel("c", 30, 40, launched=9)
    assert causes(tmp_path, trace) == [("launch_latency", "", 5, 2)]


def test_an_unrecorded_launch_has_an_unknown_cause(tmp_path: Path) -> None:
    trace = first().unlaunched("lost", 123, 130)
    assert causes(tmp_path, trace) == [("unknown", "", 23, 1)]


def test_the_host_s_work_after_the_last_kernel_belongs_to_the_step_that_does_it(
    tmp_path: Path,
) -> None:
    trace = first().step(1, 0, 200).op("DeepSpeedCPUAdam::adam_update", 105, 195)
    assert causes(tmp_path, trace) == [
        ("launch_bound", "DeepSpeedCPUAdam::adam_update", 90, 1),
        ("python", "", 10, 1),
    ]


def test_item_delays_the_host_by_the_duration_of_its_wait(tmp_path: Path) -> None:
    trace = first().op("aten::item", 20, 105).op("aten::_local_scalar_dense", 21, 104)
    trace.call("cudaStreamSynchronize", 60, 103).op("aten::mul", 130, 160)
    assert causes(tmp_path, late(trace, 150)) == [
        ("synchronize", "aten::item", 43, 1),
        ("launch_bound", "aten::mul", 12, 1),
        (*LATENCY, 2, 1),
    ]


def test_a_synchronize_outside_of_ops_has_its_own_name(tmp_path: Path) -> None:
    trace = first().call("cudaDeviceSynchronize", 20, 105).op("aten::mul", 130, 150)
    assert causes(tmp_path, late(trace, 140)) == [
        ("synchronize", "cudaDeviceSynchronize", 45, 1),
        (*LATENCY, 2, 1),
    ]


def test_a_wait_before_an_earlier_launch_causes_no_later_gap(tmp_path: Path) -> None:
    trace = first().call("cudaDeviceSynchronize", 20, 105).op("aten::mul", 107, 200)
    trace.launch("next", (110, 115), (117, 130))
    assert causes(tmp_path, late(trace, 140)) == [
        ("launch_bound", "aten::mul", 55, 2),
        ("synchronize", "cudaDeviceSynchronize", 15, 1),
        (*LATENCY, 4, 2),
    ]


def test_a_copy_from_pageable_memory_waits_too(tmp_path: Path) -> None:
    trace = GpuTrace().kernel("first", 0, 92).op("aten::to", 20, 105)
    trace.launch(
        "Memcpy DtoH (Device -> Pageable)", (22, 103), (92, 100),
        call="cudaMemcpyAsync", category="gpu_memcpy",
    )  # fmt: skip
    assert causes(tmp_path, late(trace.op("aten::mul", 130, 150), 140)) == [
        ("synchronize", "aten::to", 45, 1),
        (*LATENCY, 2, 1),
    ]


def test_data_loading_is_reported_even_after_a_wait(tmp_path: Path) -> None:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    trace = first().call("cudaDeviceSynchronize", 0, 105).annotation(loader, 110, 135)
    assert causes(tmp_path, late(trace.op("aten::stack", 115, 130), 140)) == [
        ("data_loading", loader, 25, 1),
        ("synchronize", "cudaDeviceSynchronize", 20, 1),
        (*LATENCY, 2, 1),
    ]


def test_the_data_loader_is_known_by_its_python_function_too(tmp_path: Path) -> None:
    loader = "torch/utils/data/dataloader.py(733): __next__"
    trace = first().op("aten::add", 80, 100).python(loader, 90, 140)
    assert causes(tmp_path, late(trace, 140))[0] == ("data_loading", loader, 40, 1)


def test_an_allocation_is_named_after_the_op_that_needed_it(tmp_path: Path) -> None:
    trace = first().op("aten::empty", 100, 150).call("cudaMalloc", 105, 135)
    assert causes(tmp_path, late(trace, 140)) == [
        ("allocation", "aten::empty", 30, 1),
        ("launch_bound", "aten::empty", 15, 1),
        (*LATENCY, 2, 1),
    ]


def test_freeing_memory_waits_for_the_device(tmp_path: Path) -> None:
    trace = first().op("aten::empty", 50, 150).call("cudaFree", 60, 105)
    assert causes(tmp_path, late(trace, 140)) == [
        ("allocation", "aten::empty", 45, 1),
        (*LATENCY, 2, 1),
    ]


def test_while_backward_runs_its_thread_is_the_host(tmp_path: Path) -> None:
    trace = first().op("aten::mul", 0, 10).annotation("train", 0, 300)
    trace.op(BACKWARD, 95, 110, tid=ENGINE).op(BACKWARD, 130, 150, tid=ENGINE)
    trace.launch("late", (140, 145), (147, 160), tid=ENGINE)
    assert causes(tmp_path, trace) == [
        ("python", "train", 140, 1),
        ("launch_bound", BACKWARD, 25, 1),
        ("launch_bound", "train", 20, 1),
        (*LATENCY, 2, 1),
    ]


def test_before_backward_begins_the_main_thread_is_the_host(tmp_path: Path) -> None:
    trace = first().op("aten::mul", 90, 110).op("aten::ones_like", 120, 125)
    trace.op(BACKWARD, 130, 150, tid=ENGINE)
    trace.launch("late", (140, 145), (147, 160), tid=ENGINE)
    assert causes(tmp_path, trace) == [
        ("launch_bound", BACKWARD, 15, 1),
        ("python", "", 15, 1),
        ("launch_bound", "aten::mul", 10, 1),
        ("launch_bound", "aten::ones_like", 5, 1),
        (*LATENCY, 2, 1),
    ]


def test_a_kernel_launched_in_time_that_waits_for_an_event_depends_on_it(tmp_path: Path) -> None:
    trace = first().call("cudaStreamWaitEvent", 5, 6).kernel("waits", 150, 160, launched=7)
    assert causes(tmp_path, trace) == [("dependency", "waits", 50, 1)]


def test_a_kernel_launched_in_time_that_starts_late_without_a_cause_is_late_start(
    tmp_path: Path,
) -> None:
    trace = first().kernel("held", 150, 160, launched=7)
    assert causes(tmp_path, trace) == [("late_start", "held", 50, 1)]


def test_each_step_adds_up_and_only_idle_counts(tmp_path: Path) -> None:
    """The gap lies in two steps, and counts in each."""
    trace = CpuTrace().step(1, 0, 20).step(2, 20, 50).op("aten::mm", 0, 10).op("aten::mm", 40, 50)
    trace.annotation("enumerate(DataLoader)#__next__", 10, 35)
    found = examine([trace.write(tmp_path)])
    parts = found.tables.segments
    assert [
        (step, BUCKETS[bucket], ns)
        for step, bucket, ns in zip(
            parts.step.tolist(), parts.bucket.tolist(), parts.dur_ns.tolist(), strict=True
        )
    ] == [(1, "compute", 10_000), (1, "idle", 10_000), (2, "idle", 20_000), (2, "compute", 10_000)]
    assert [(row.cause, row.op, row.idle_ns, row.count) for row in found.report.idle] == [
        ("data_loading", "enumerate(DataLoader)#__next__", 25_000, 2),
        ("python", "", 5_000, 1),
    ]


def test_no_idle_has_no_cause(tmp_path: Path) -> None:
    assert causes(tmp_path, first()) == []


def test_on_a_cpu_run_the_training_thread_gives_the_cause(tmp_path: Path) -> None:
    trace = CpuTrace().step(1, 0, 100).op("aten::mm", 0, 10)
    trace.annotation("enumerate(DataLoader)#__next__", 10, 40)
    trace.op("c10d::allreduce_", 45, 50).op("aten::mm", 60, 100)
    assert causes(tmp_path, trace) == [
        ("data_loading", "enumerate(DataLoader)#__next__", 30, 1),
        ("python", "", 15, 1),
        ("other", "c10d::allreduce_", 5, 1),
    ]


@pytest.mark.parametrize(("name", "cause"), [("## backward ##", "unknown"), ("loss", "python")])
def test_on_a_cpu_run_a_range_may_be_a_wait(name: str, cause: str, tmp_path: Path) -> None:
    trace = CpuTrace().op("aten::mm", 0, 10).annotation(name, 10, 40).op("aten::mm", 40, 50)
    assert causes(tmp_path, trace) == [(cause, name, 30, 1)]


def test_on_a_cpu_run_a_message_open_when_compute_resumes_is_not_python(
    tmp_path: Path,
) -> None:
    trace = CpuTrace().op("aten::mm", 0, 10).annotation("gloo:send", 10, 75).op("aten::mm", 40, 80)
    assert causes(tmp_path, trace) == [("other", "gloo:send", 30, 1)]
