"""What the ops of collectives launch: kernels that no rule knows, copies, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders import MAIN, GpuTrace
from support.reading import list_messages
from support.required import shared_repro

from stepsplit.analyzer import KernelRule, Report, Rules, analyze
from stepsplit.analyzer.readers.kernel_rules import BUILT_IN

GROUPS = [("0", "default_pg", (0, 1))]
STEP_US, STEPS = 1000, 3

Launch = Callable[[GpuTrace, float], object]


def train(folder: Path, op: str, *launches: Launch, rules: Rules = BUILT_IN) -> Report:
    """Two ranks: each step computes 300 us and 100 us, with a collective between, in which the
    launches are."""
    for rank in range(2):
        trace = GpuTrace(rank, 2, groups=GROUPS)
        for step in range(STEPS):
            at = step * STEP_US
            trace.step(step, at, at + STEP_US).op("aten::mm", at + 1, at + 3)
            trace.kernel("gemm", at + 10, at + 310, launched=at + 2)
            describe(trace, op, at + 20, Seq=step)
            for launch in launches:
                launch(trace, at)
            trace.kernel("gemm", at + 820, at + 920, launched=at + 60)
        trace.write(folder)
    return analyze(folder, rules=rules)


def describe(trace: GpuTrace, op: str, at: float, **more: int) -> None:
    args = {"Collective name": op, "In msg nelems": 1000, "Out msg nelems": 2000, "dtype": "Float"}
    args |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2} | more
    trace.events.append({"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1,
                         "tid": MAIN, "ts": at, "dur": 30, "args": args})  # fmt: skip


def launch(name: str, start: float, end: float, category: str = "kernel") -> Launch:
    """A launch in the op, and what it started on the stream of communication."""
    return lambda trace, at: trace.kernel(
        name, at + start, at + end, launched=at + 30, stream=20, category=category
    )


def mean_us(report: Report, *buckets: str) -> float:
    """The sum of these buckets, which is the same in all steps."""
    found = {sum(getattr(row, f"{bucket}_ns") for bucket in buckets) for row in report.steps}
    assert len(found) == 1, found
    return found.pop() / 1000


@pytest.mark.parametrize(
    "name",
    [
        "mcclKernel_AllReduce_RING_SIMPLE_Sum_bf16(mcclDevComm*)",
        "void vendor::ring_all_reduce<float>(Args)",
        "vendor_transport_17",
        "kernel4 {kind=compute op=all_reduce family=reduce}",
    ],
)
def test_a_kernel_that_only_its_op_explains_is_communication(tmp_path: Path, name: str) -> None:
    report = train(tmp_path, "allreduce", launch(name, 310, 810))
    assert (mean_us(report, "compute"), mean_us(report, "collective", "skew")) == (400, 500)
    assert [(row.op, row.count) for row in report.collectives] == [("all_reduce", STEPS)]
    [message, _] = list_messages(report, "comm_kernels_inferred")
    assert message == (
        "3 kernels that no rule knows count as communication, as collectives launched them or by "
        f"their name: {name[:60]} (3); a rule can say otherwise (docs/rules.md)"
    )
    assert list_messages(report, "collectives_not_recorded") == []


@pytest.mark.parametrize(
    "other",
    ["void at::native::direct_copy_kernel(int)", "vendor_pack_buffers", "sm90_xmma_gemm_f32"],
)
def test_a_kernel_beside_that_of_the_collective_stays_compute(tmp_path: Path, other: str) -> None:
    known, unknown = "ncclDevKernel_AllGather", "vendor_all_gather"
    for place, name in enumerate((known, unknown)):
        folder = tmp_path / str(place)
        folder.mkdir()
        report = train(folder, "allgather", launch(other, 310, 410), launch(name, 410, 810))
        assert (mean_us(report, "compute"), mean_us(report, "collective", "skew")) == (500, 400)
        inferred = list_messages(report, "comm_kernels_inferred")
        assert len(inferred) == 2 * place
        assert not any(other in message for message in inferred)


def test_a_rule_that_says_compute_outweighs_the_op(tmp_path: Path) -> None:
    rules = Rules((KernelRule("vendor_all_gather", "compute"),), ()).combine(BUILT_IN)
    report = train(tmp_path, "allgather", launch("vendor_all_gather", 310, 810), rules=rules)
    assert mean_us(report, "compute") == 900


def test_a_replayed_kernel_of_a_library_like_nccl_is_communication(tmp_path: Path) -> None:
    trace = GpuTrace(groups=GROUPS).step(0, 0, STEP_US).kernel("gemm", 0, 500)
    trace.launch("xcclDevKernel_AllReduce", (50, 60), (500, 700), call="cudaGraphLaunch")
    trace.kernel("occlusion_Kernel", 700, 800)
    report = analyze(trace.write(tmp_path))
    assert mean_us(report, "compute") == 600
    assert "xcclDevKernel_AllReduce (1)" in list_messages(report, "comm_kernels_inferred")[0]


@pytest.mark.parametrize("copies", [1, 3])
def test_the_copies_of_a_gather_without_a_kernel_are_its_transfer(
    tmp_path: Path, copies: int
) -> None:
    name, each = "Memcpy DtoD (Device -> Device)", 480 / copies
    parts = [
        launch(name, 310 + i * each, 310 + (i + 1) * each, "gpu_memcpy") for i in range(copies)
    ]
    report = train(tmp_path, "_allgather_base", *parts)
    assert (mean_us(report, "copy"), mean_us(report, "collective", "skew")) == (0, 480)
    [row] = report.collectives
    assert (row.op, row.count) == ("all_gather", STEPS)
    assert list_messages(report, "comm_copies")[0].startswith(
        f"{3 * copies} copies on the device are launched by collectives without a kernel "
        f"(all_gather {3 * copies})"
    )


@pytest.mark.parametrize(
    ("op", "parts"),
    [
        ("_allgather_base", [("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy")]),
        ("allreduce", [("Memcpy DtoD (Device -> Device)", "gpu_memcpy")]),
        ("wait", [("Memcpy DtoD (Device -> Device)", "gpu_memcpy")]),
        (
            "allgather",
            [("Memcpy DtoD (Device -> Device)", "gpu_memcpy"), ("ncclDevKernel_X", "kernel")],
        ),
    ],
)
def test_other_copies_are_copies(tmp_path: Path, op: str, parts: list[tuple[str, str]]) -> None:
    launches = [
        launch(name, 310 + 200 * i, 510 + 200 * i, category)
        for i, (name, category) in enumerate(parts)
    ]
    report = train(tmp_path, op, *launches)
    assert mean_us(report, "copy") == 200
    assert list_messages(report, "comm_copies") == []


def test_a_group_of_one_rank_copies(tmp_path: Path) -> None:
    trace = GpuTrace().step(0, 0, STEP_US).kernel("gemm", 0, 500)
    alone = {"Group size": 1, "Process Group Ranks": "[0]"}
    describe(trace, "_allgather_base", 20, **alone)
    launch("Memcpy DtoD (Device -> Device)", 500, 600, "gpu_memcpy")(trace, 0)
    report = analyze(trace.kernel("gemm", 600, 700).write(tmp_path))
    assert (mean_us(report, "copy"), list_messages(report, "comm_copies")) == (100, [])
    assert list_messages(report, "collectives_not_recorded") == []


def test_collectives_without_a_device_event_are_said_first(tmp_path: Path) -> None:
    report = train(tmp_path, "allreduce")
    assert [row.code for row in report.warnings][:2] == ["collectives_not_recorded"] * 2
    assert list_messages(report, "collectives_not_recorded")[0] == (
        "3 of 3 collectives and messages (100.0 %) have no device event (all_reduce 3): their "
        "kernels were not recorded, and their time counts as idle"
    )


def test_some_collectives_without_a_device_event_are_counted(tmp_path: Path) -> None:
    """One op of two in each step has its kernel."""

    def more(trace: GpuTrace, at: float) -> None:
        describe(trace, "_reduce_scatter_base", at + 70, Seq=10 + round(at / STEP_US))

    report = train(tmp_path, "allreduce", launch("ncclDevKernel_AllReduce", 310, 810), more)
    assert list_messages(report, "collectives_not_recorded")[0].startswith(
        "3 of 6 collectives and messages (50.0 %) have no device event (reduce_scatter 3)"
    )


def test_captured_coalesced_and_empty_collectives_lack_nothing(tmp_path: Path) -> None:
    trace = GpuTrace(groups=GROUPS).step(0, 0, STEP_US).kernel("gemm", 0, 500)
    trace.call("cudaStreamBeginCapture", 100, 101)
    describe(trace, "allreduce", 110)
    trace.call("cudaStreamEndCapture", 150, 151)
    for i in range(4):
        describe(trace, "_allgather_base", 200 + 40 * i)
    describe(trace, "coalesced", 360)
    trace.kernel("ncclDevKernel_AllGather", 600, 700, launched=370, stream=20)
    describe(trace, "_reduce_scatter_base", 400, **{"In msg nelems": 0})
    describe(trace, "barrier", 440)
    report = analyze(trace.write(tmp_path))
    assert list_messages(report, "collectives_not_recorded") == []


def test_the_shared_traces_of_each_kind() -> None:
    wild = shared_repro("wild2")
    report = analyze(wild / "comm_kernel_unknown" / "mccl")
    assert mean_us(report, "collective", "skew") == 5000
    assert {row.compute_ns for row in report.steps} <= {3_799_000, 3_800_000}
    report = analyze(wild / "copy_engine_all_gather")
    assert (mean_us(report, "collective", "skew"), mean_us(report, "copy")) == (3000, 0)
    assert [row.op for row in report.collectives] == ["all_gather"]
    report = analyze(wild / "collective_kernels_missing")
    assert list_messages(report, "collectives_not_recorded")[0].startswith("4 of 4 collectives")
