"""Classification of events by the rules with which the recording is read."""

from __future__ import annotations

from pathlib import Path

from support.builders import CpuTrace, GpuTrace

from stepsplit.analyzer import analyze
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, FamilyRule, KernelRule, Rules
from stepsplit.analyzer.readers.recording import read_recording
from stepsplit.analyzer.trace import EventKind, RankTrace

OWN = Rules(
    (KernelRule("my_sync", "communication", "barrier"), KernelRule("gemm_and", "fused")),
    (FamilyRule("gemm_and", "mine"),),
).combine(BUILT_IN)


def kinds(trace: RankTrace) -> dict[str, EventKind]:
    """The kind of each name; each has one event."""
    of = map(EventKind, trace.kinds.kind.tolist())
    names = [trace.events.name_of(row) for row in range(len(trace.events))]
    return {name: kind for name, kind in zip(names, of, strict=True) if not name.startswith("cuda")}


def test_kernels_and_copies_are_classified_by_the_rules(tmp_path: Path) -> None:
    rank = GpuTrace(groups=[("0", "", [0])]).step(1, 0, 90).kernel("gemm", 0, 10)
    rank.kernel("my_sync_kernel", 10, 20).all_reduce(20, 30).memcpy(30, 40)
    rank.collective("gemm_and_reduce", "allreduce", 40, 50).kernel("gemm_and_send", 50, 60)
    rank.write(tmp_path)
    [plain] = read_recording([tmp_path]).traces
    [ruled] = read_recording([tmp_path], rules=OWN).traces
    common = {
        "ProfilerStep#1": EventKind.OTHER,
        "gemm": EventKind.COMPUTE,
        "ncclDevKernel_AllReduce": EventKind.COMMUNICATION,
        "Memcpy HtoD": EventKind.COPY,
    }
    called = "ncclDevKernel_gemm_and_reduce"
    assert kinds(plain) == common | {
        "my_sync_kernel": EventKind.COMPUTE,
        called: EventKind.COMMUNICATION,
        "gemm_and_send": EventKind.COMPUTE,
    }
    assert kinds(ruled) == common | {
        "my_sync_kernel": EventKind.COMMUNICATION,
        called: EventKind.FUSED,
        "gemm_and_send": EventKind.FUSED,
    }
    family = {n: ruled.kinds.find_family(i) for i, n in enumerate(ruled.events.names)}
    assert (family["gemm"], family["gemm_and_send"]) == ("gemm", "mine")


def test_ops_of_training_threads_are_compute_in_a_cpu_run(tmp_path: Path) -> None:
    CpuTrace().step(1, 0, 50).op("aten::mm", 0, 10).op("c10d::allreduce_", 10, 20).write(tmp_path)
    [trace] = read_recording([tmp_path]).traces
    found = kinds(trace)
    assert (found["aten::mm"], found["c10d::allreduce_"]) == (EventKind.COMPUTE, EventKind.OTHER)
    assert trace.kinds.find_family(trace.events.names.index("aten::mm")) == "gemm"


def old_trace() -> CpuTrace:
    """A step of torch 1.8, whose ranges have the category of the ops."""
    trace = CpuTrace().op("ProfilerStep#0", 0, 100).op("enumerate(DataLoader)#next", 0, 20)
    trace.op("## forward ##", 20, 50).op("aten::mm", 22, 32).op("MyFunction", 34, 46)
    trace.op("aten::add", 35, 40).op("MmBackward", 50, 60).op("detach", 61, 62)
    trace.op("Optimizer.step#SGD.step", 62, 95).op("aten::add_", 70, 80)
    for event in trace.events:
        event["cat"] = "Operator"
    return trace


def test_ranges_of_old_traces_are_no_compute(tmp_path: Path) -> None:
    old_trace().write(tmp_path)
    [trace] = read_recording([tmp_path]).traces
    computing = {name for name, kind in kinds(trace).items() if kind == EventKind.COMPUTE}
    assert computing == {"aten::mm", "aten::add", "MmBackward", "detach", "aten::add_"}
    [step] = analyze(tmp_path).steps
    assert (step.step, step.step_ns, step.compute_ns) == (0, 100_000, 36_000)


def test_ops_of_new_traces_need_no_namespace(tmp_path: Path) -> None:
    """torch.compile's regions and kernels are ops; the marks of torch_npu are not."""
    CpuTrace().op("ProfilerStep#0", 0, 100).op("graph_0_cpp_fused_add", 10, 60).write(tmp_path)
    [step] = analyze(tmp_path).steps
    assert (step.step_ns, step.compute_ns) == (100_000, 50_000)
