"""Jobs whose groups have no names and whose hosts recorded no ranges: what their calls alone show.

The jobs are simulated by a machine that knows nothing of the analysis; a job of each kind is small
enough to run every time, the others run in turn.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from cuda_simulator.jobs import ExpertLoad, Job
from cuda_simulator.kineto import TraceStyle
from cuda_simulator.program import Kernel
from cuda_simulator.simulate import simulate
from support.builders import GpuTrace

from stepsplit.analyzer import Report, analyze

ADAM = "void at::native::multi_tensor_apply_kernel"
IN_TURN = (pytest.mark.slow, pytest.mark.in_turn("analyzer/split"))


def record(folder: Path, **job: Any) -> Report:
    simulate(Job("unnamed", steps=2, **job)).write(folder, TraceStyle(names_groups=False))
    return analyze(folder)


def format_mesh(report: Report) -> str:
    return " ".join(f"{one.axis}={one.size}" for one in report.run.mesh or ())


def name_strategies(report: Report) -> list[str]:
    return [one.in_words for one in report.run.strategies]


def is_pass(kernel: Kernel) -> bool:
    return kernel.call is None and not kernel.name.startswith(("Memcpy", ADAM))


def layout(job: dict[str, Any], mesh: str, *strategies: str, quick: bool = False) -> object:
    name = " ".join(f"{key} {value}" for key, value in job.items() if key != "causes")
    return pytest.param(job, mesh, strategies, id=name, marks=() if quick else IN_TURN)


@pytest.mark.parametrize(
    ("job", "mesh", "strategies"),
    [
        layout({"cp": 4, "microbatches": 1}, "cp=4", "cp 4 (ring)", quick=True),
        layout({"cp": 8, "microbatches": 2, "layers": 3, "whole_kernels": True}, "cp=8",
               "cp 8 (ring)"),
        layout({"cp": 4, "cp_ring": False, "microbatches": 1}, "cp=4", "cp 4 (all-gather)",
               quick=True),
        layout({"cp": 2, "dp": 2, "cp_ring": False, "microbatches": 2}, "dp_replicate=2 cp=2",
               "ddp 4 on dp_replicate x cp", "cp 2 (all-gather)"),
        layout({"tp": 2, "cp": 2, "cp_ring": False, "microbatches": 2}, "cp=2 tp=2", "tp 2",
               "cp 2 (all-gather)"),
        layout({"cp": 4, "dp": 2, "microbatches": 2}, "dp_replicate=2 cp=4",
               "ddp 8 on dp_replicate x cp", "cp 4 (ring)"),
        layout({"cp": 2, "dp": 2, "tp": 2, "microbatches": 2}, "dp_replicate=2 cp=2 tp=2",
               "ddp 4 on dp_replicate x cp", "tp 2", "cp 2 (ring)"),
        layout({"cp": 4, "dp": 2, "pp": 2, "microbatches": 4, "cp_ring": False,
                "whole_kernels": True}, "pp=2 dp_replicate=2 cp=4",
               "ddp 8 on dp_replicate x cp", "cp 4 (all-gather)", "pp 2 (1f1b)"),
        layout({"dp": 2, "cp": 2, "fsdp": True, "cp_ring": False, "layers": 4, "microbatches": 1},
               "dp_shard=2 cp=2", "fsdp 4 on dp_shard x cp", "cp 2 (all-gather)"),
        layout({"dp": 2, "cp": 4, "fsdp": True, "layers": 4, "microbatches": 1},
               "dp_shard=2 cp=4", "fsdp 8 on dp_shard x cp", "cp 4 (ring)"),
        layout({"dp": 4, "ep": 4, "microbatches": 1, "causes": (ExpertLoad(1, 1.5),)},
               "dp_replicate=4", "ddp 4 on dp_replicate", "ep 4", quick=True),
        layout({"dp": 4, "ep": 2, "microbatches": 2}, "dp_replicate=4",
               "ddp 4 on dp_replicate", "ddp 2 on dp_replicate", "ep 2"),
        layout({"dp": 4, "ep": 4, "tp": 2, "pp": 2, "microbatches": 4},
               "pp=2 dp_replicate=4 tp=2", "ddp 4 on dp_replicate", "tp 2", "ep 4", "pp 2 (1f1b)"),
        layout({"dp": 4, "fsdp": True, "layers": 4, "microbatches": 3}, "dp_shard=4",
               "fsdp 4 on dp_shard"),
        layout({"dp": 8, "shards": 4, "fsdp": True, "layers": 4, "microbatches": 1},
               "dp_replicate=2 dp_shard=4", "hsdp 4 on dp_shard (2 replicas)"),
        layout({"tp": 4, "pp": 4, "dp": 4, "microbatches": 8, "whole_kernels": True},
               "pp=4 dp_replicate=4 tp=4", "ddp 4 on dp_replicate", "tp 4", "pp 4 (1f1b)"),
    ],
)  # fmt: skip
def test_axes_and_strategies_by_the_calls_and_what_is_next_to_them(
    job: dict[str, Any], mesh: str, strategies: tuple[str, ...], tmp_path: Path
) -> None:
    report = record(tmp_path, **job)
    assert (format_mesh(report), tuple(name_strategies(report))) == (mesh, strategies)


def schedule(
    name: str, stages: int, microbatches: int, *, quick: bool = False, **job: Any
) -> object:
    marks = () if quick else IN_TURN
    sizes = " ".join(f"{key} {value}" for key, value in job.items())
    name_of_test = f"{name} {stages} {microbatches} {sizes}"
    return pytest.param(name, stages, microbatches, job, id=name_of_test, marks=marks)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "job"),
    [
        schedule("1f1b", 2, 4, quick=True, early_receives=True),
        schedule("1f1b", 4, 2),
        schedule("1f1b", 4, 8, early_receives=True),
        schedule("1f1b", 4, 8, one_thread=True),
        schedule("1f1b", 2, 4, tp=2, dp=2),
        schedule("gpipe", 4, 6, early_receives=True),
        schedule("zb-h1", 2, 4, quick=True),
        schedule("zb-h1", 4, 8),
        schedule("zb-h1", 4, 8, early_receives=True),
        schedule("interleaved", 2, 4, quick=True, chunks=2, layers=1),
        schedule("interleaved", 4, 8, chunks=2, layers=1),
        schedule("interleaved", 4, 8, chunks=3, layers=1, tp=2, whole_kernels=True),
        schedule("interleaved", 4, 8, chunks=2, layers=1, early_receives=True),
    ],
)
def test_schedules_by_the_order_of_sends_and_launches(
    name: str, stages: int, microbatches: int, job: dict[str, Any], tmp_path: Path
) -> None:
    report = record(tmp_path, schedule=name, pp=stages, microbatches=microbatches, **job)
    pipeline = report.pipeline
    assert pipeline is not None
    assert (pipeline.schedule, pipeline.microbatches) == (name, microbatches)
    assert pipeline.ideal_bubble_fraction is not None
    assert pipeline.ideal_bubble_fraction <= pipeline.bubble_fraction
    assert pipeline.bubble_fraction < pipeline.ideal_bubble_fraction + 0.06


@pytest.mark.parametrize(
    ("stages", "microbatches", "job"),
    [
        pytest.param(2, 2, {}),
        pytest.param(2, 4, {"one_thread": True, "early_receives": True}, marks=IN_TURN),
        pytest.param(3, 3, {"early_receives": True}, marks=IN_TURN),
        pytest.param(4, 2, {}, marks=IN_TURN),
    ],
)
def test_a_schedule_whose_backwards_may_be_split_has_no_ideal(
    stages: int, microbatches: int, job: dict[str, bool], tmp_path: Path
) -> None:
    """Few microbatches of ZB-H1 are in the order of 1F1B; their weight gradients run elsewhere."""
    report = record(tmp_path, schedule="zb-h1", pp=stages, microbatches=microbatches, **job)
    assert report.pipeline is not None
    assert (report.pipeline.schedule, report.pipeline.ideal_bubble_fraction) == ("unknown", None)
    assert name_strategies(report) == [f"pp {stages}"]
    assert "schedule_unknown" in {warning.code for warning in report.warnings}


@pytest.mark.slow
@pytest.mark.in_turn("analyzer/split")
@pytest.mark.parametrize("name", ["zb-h1", "interleaved"])
def test_a_schedule_that_one_thread_launches_is_unknown_and_said_to_be(
    name: str, tmp_path: Path
) -> None:
    chunks = 2 if name == "interleaved" else 1
    report = record(
        tmp_path, schedule=name, pp=4, microbatches=8, chunks=chunks, layers=1, one_thread=True
    )
    assert format_mesh(report) == "pp=4"
    assert report.pipeline is None
    assert "no_grid" in {warning.code for warning in report.warnings}


@pytest.mark.parametrize("names_groups", [True, False])
@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "one_thread"),
    [
        pytest.param("dualpipe", 2, 4, False),
        pytest.param("dualpipe", 2, 4, True, marks=IN_TURN),
        pytest.param("dualpipe", 4, 8, True, marks=IN_TURN),
        pytest.param("zb-v", 2, 4, True, marks=IN_TURN),
    ],
)
def test_schedules_with_two_stages_on_a_rank_have_no_name_rather_than_a_wrong_one(
    name: str, stages: int, microbatches: int, one_thread: bool, names_groups: bool, tmp_path: Path
) -> None:
    job = Job("v", steps=2, layers=1, schedule=name, pp=stages, microbatches=microbatches,
              one_thread=one_thread)  # fmt: skip
    simulate(job).write(tmp_path, TraceStyle(names_groups=names_groups))
    report = analyze(tmp_path)
    assert format_mesh(report) in (f"pp={stages}", "")
    assert set(name_strategies(report)) <= {f"pp {stages}"}
    assert report.pipeline is None
    assert {"no_grid", "mesh_unknown"} & {warning.code for warning in report.warnings}


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "more"),
    [
        ("zb-v", 2, 4, {}),
        pytest.param("zb-v", 4, 6, {"layers": 3}, marks=IN_TURN),
        pytest.param("zb-v", 4, 8, {"dp": 2, "early_receives": True}, marks=IN_TURN),
        # Nothing but their kernels separates the last backwards of the last rank.
        pytest.param("dualpipe-v", 3, 6, {"layers": 2}, marks=IN_TURN),
        pytest.param("dualpipe-v", 4, 12, {"dp": 2}, marks=IN_TURN),
        pytest.param("dualpipe", 4, 12, {}, marks=IN_TURN),
        pytest.param("dualpipe", 6, 12, {}, marks=IN_TURN),
    ],
)
def test_two_stages_on_a_rank_are_distinguished_by_where_their_passes_send(
    name: str, stages: int, microbatches: int, more: dict[str, int], tmp_path: Path
) -> None:
    """The bubble of each stage is what its kernels leave of the time from the first to the last."""
    job = Job("v", schedule=name, pp=stages, microbatches=microbatches, **{"layers": 1, **more})
    ran = simulate(job)
    ran.write(tmp_path)
    report = analyze(tmp_path)
    assert f"pp {stages} ({name})" in name_strategies(report)
    assert report.pipeline is not None
    assert (report.pipeline.schedule, report.pipeline.microbatches) == (name, microbatches)
    left = []
    for number in range(job.warmup, job.warmup + job.steps):
        passes = [
            [run for run in rank.kernels if run.step == number and is_pass(run.kernel)]
            for rank in ran.timelines
        ]
        begin = min(run.start_ns for own in passes for run in own)
        window_ns = max(run.end_ns for own in passes for run in own) - begin
        left += [1 - sum(run.end_ns - run.start_ns for run in own) / window_ns for own in passes]
    assert report.pipeline.bubble_fraction == pytest.approx(mean(left), abs=0.02)


@pytest.mark.parametrize(
    ("dispatch", "combine", "expected"),
    [
        ("void deep_ep::internode::dispatch<8>()", "void deep_ep::internode::combine<8>()",
         "ep (DeepEP)"),
        ("_ZN7deep_ep9intranode8dispatchILi8EEEvv", "_ZN7deep_ep9intranode7combineILi8EEEvv",
         "ep (DeepEP, 8 ranks)"),
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>()",
         "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 24>()",
         "ep 64 (DeepEP)"),
        ("_ZN7deep_ep9internode8dispatchILb0ELi4ELb1ELi8EEEvv",
         "_ZN7deep_ep9internode7combineILb0ELi4E13__nv_bfloat16Li8EEEvv", "ep (DeepEP, 32 ranks)"),
        ("void hybrid_ep::dispatch_kernel<16>()", "void hybrid_ep::combine_kernel<16>()",
         "ep (HybridEP)"),
        ("void mori::moe::EpDispatchIntraNodeKernel<float>()",
         "void mori::moe::EpCombineIntraNodeKernel<float>()", "ep (MORI)"),
        ("void deep_ep::internode::dispatch<8>()", "void deep_ep::layout::get_dispatch_layout<2>()",
         None),
    ],
)  # fmt: skip
def test_kernels_that_only_move_the_tokens_of_experts_show_them_on_one_rank(
    dispatch: str, combine: str, expected: str | None, tmp_path: Path
) -> None:
    trace = GpuTrace(0, 64).step(1, 0, 100).kernel("gemm", 0, 20)
    trace.kernel(dispatch, 20, 40, stream=20).kernel("gemm", 40, 60)
    trace.kernel(combine, 60, 80, stream=20).write(tmp_path)
    assert name_strategies(analyze(tmp_path)) == ([expected] if expected else [])


def test_passes_around_expert_kernels_are_not_known_to_accumulate_gradients(
    tmp_path: Path,
) -> None:
    """Of a rank whose trace has neither an optimizer nor a reduction of gradients, as of a few
    layers; two passes in a step may be of two batches that hide each other's communication."""
    trace = GpuTrace(0, 64).step(1, 0, 400)
    for at in (0, 200):
        trace.op("aten::linear", at, at + 20).kernel("gemm", at, at + 20)
        trace.kernel("void deep_ep::internode::dispatch<8>()", at + 20, at + 40, stream=20)
        trace.kernel("void deep_ep::internode::combine<8>()", at + 60, at + 80, stream=20)
        trace.op("autograd::engine::evaluate_function: MmBackward0", at + 90, at + 150)
        trace.kernel("gemm", at + 100, at + 140)
    trace.write(tmp_path)
    assert name_strategies(analyze(tmp_path)) == ["ep (DeepEP)"]


def test_a_group_of_one_rank_communicates_nothing(tmp_path: Path) -> None:
    groups = [("0", "mesh_dp", [0, 1]), ("1", "mesh_tp", [0])]
    trace = GpuTrace(0, 2, groups=groups).step(1, 0, 100).kernel("gemm", 0, 40)
    trace.all_reduce(40, 70, group="1").all_reduce(70, 90, group="0").write(tmp_path)
    other = GpuTrace(1, 2, groups=[groups[0]]).step(1, 0, 100).kernel("gemm", 0, 70)
    other.all_reduce(70, 90, group="0").write(tmp_path)
    report = analyze(tmp_path)
    ranks = {row.id: row.ranks for row in report.groups}
    assert [ranks[row.group] for row in report.collectives] == [(0, 1)]
    alone = next(row for row in report.steps if row.rank == 0)
    assert (alone.copy_ns, alone.collective_ns, alone.skew_ns) == (30_000, 20_000, 0)


def test_two_communicators_of_the_same_ranks_are_two_rows(tmp_path: Path) -> None:
    groups = [("0", "", [0, 1]), ("1", "", [0, 1])]
    for rank in (0, 1):
        trace = GpuTrace(rank, 2, groups=groups).step(1, 0, 100).kernel("gemm", 0, 40)
        trace.all_reduce(40, 60, group="0").all_reduce(60, 90, group="1").write(tmp_path)
    report = analyze(tmp_path)
    assert [row.count for row in report.collectives] == [1, 1]
    assert len({row.group for row in report.collectives}) == 2


def replay_layers(rank: int, kinds: tuple[str, ...], *, ranges: bool) -> GpuTrace:
    """Three steps of two graphs, of the forwards and of the backwards of all layers: the host makes
    two calls, and no op describes the collectives within."""
    trace = GpuTrace(rank, 2, groups=[("0", "default_pg", [0, 1])])
    for step in range(3):
        at = 400 * step
        trace.step(step, at, at + 400)
        for half, begin in enumerate((at, at + 180)):
            correlation = len(trace.events) + 1
            call = {"tid": 300 if half else 100, "correlation": correlation}
            trace._add("cudaGraphLaunch", "cuda_runtime", begin + 1, begin + 3, **call)
            place = {"device": 0, "correlation": correlation}
            for layer in range(4):
                for number, kind in enumerate(kinds):
                    start = begin + 40 * layer + 10 * number
                    name = kind if kind == "gemm" else f"ncclDevKernel_{kind}"
                    stream = 7 if kind == "gemm" else 20
                    trace._add(
                        name, "kernel", start + 5, start + 15, tid=stream, stream=stream, **place
                    )
            if half and ranges:
                name = "autograd::engine::evaluate_function: GraphedBackward"
                trace.op(name, begin, begin + 4, tid=300)
        trace.kernel("multi_tensor_apply_kernel<FusedAdam>", at + 370, at + 390)
        if ranges:
            trace.annotation("Optimizer.step#AdamW.step", at + 368, at + 372)
    return trace


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    ("kinds", "strategies"),
    [
        (("gemm", "AllReduce", "gemm"), ["tp 2"]),
        (("AllGather", "gemm", "ReduceScatter"), ["tp 2", "sp 2"]),
        (("SendRecv", "gemm"), []),
        (("gemm", "AllGather"), []),
    ],
)
def test_layers_replayed_as_graphs_show_what_a_forward_calls_and_no_more(
    kinds: tuple[str, ...], strategies: list[str], ranges: bool, tmp_path: Path
) -> None:
    """A graph of forwards that reduces is of tensor parallelism. Where its calls are among the ops
    of the host is not recorded: no parallel loss, vocabulary or ring is named from that."""
    for rank in (0, 1):
        replay_layers(rank, kinds, ranges=ranges).write(tmp_path)
    assert name_strategies(analyze(tmp_path)) == strategies
