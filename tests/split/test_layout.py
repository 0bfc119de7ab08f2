"""Rank layout from run.json, group names, or messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.builders import CpuTrace, GpuTrace
from support.required import shared_repro
from support.splitting import recording_of

from stepsplit.analyzer import Group, RankTrace, UsageError, analyze
from stepsplit.analyzer.split.job_size import find_job_size
from stepsplit.analyzer.split.mesh import RankLayout, infer_layout
from stepsplit.analyzer.split.mesh_groups import GroupName, parse_group_name
from stepsplit.collectors import Mesh, RunSpec
from stepsplit.collectors.formats.run_spec import GroupInfo

MESH = Mesh.of({"pp": 2, "dp": 2, "tp": 2})


def layout_of(
    spec: RunSpec | None, traces: Sequence[RankTrace], mesh: Mesh | None = None
) -> RankLayout:
    """The layout of a job, of the size that the recording says."""
    return infer_layout(spec, traces, mesh, find_job_size(spec, traces, mesh))


def spec(mesh: Mesh | None, *groups: GroupInfo) -> RunSpec:
    return RunSpec("run", 8, "gloo", mesh=mesh, groups=groups)


def mesh_groups(*axes: str) -> list[GroupInfo]:
    lines = {(axis, MESH.line(rank, axis)) for axis in axes for rank in range(8)}
    return [GroupInfo(f"{i}", f"mesh_{a}", r) for i, (a, r) in enumerate(sorted(lines))]


def test_the_mesh_in_run_json_defines_every_axis() -> None:
    layout = layout_of(spec(MESH), [])
    assert (layout.source, layout.notes) == ("run.json", ())
    assert layout.pipelines == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [layout.find_stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    axes = [
        layout.find_axis(Group("x", ranks, "")) for ranks in ((0, 4), (1, 3), (6, 7), (0, 1, 2, 3))
    ]
    assert axes == ["pp", "dp_replicate", "tp", None]


def test_the_names_of_groups_make_the_same_mesh() -> None:
    layout = layout_of(spec(None, *mesh_groups("pp", "dp_replicate", "tp")), [])
    assert (layout.mesh, layout.source) == (MESH, "group names")
    assert [note.code for note in layout.notes] == ["mesh_inferred"]


def test_groups_that_do_not_cover_the_world_name_stages_and_axes_but_no_mesh() -> None:
    layout = layout_of(spec(None, *mesh_groups("pp", "tp")), [])
    assert (layout.mesh, layout.source) == (None, "group names")
    assert layout.pipelines == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [note.code for note in layout.notes] == ["mesh_inferred"]
    assert layout.find_axis(Group("8", (0, 1), "mesh_tp")) == "tp"


def test_a_chain_of_messages_is_a_pipeline_and_who_sends_first_is_its_start(tmp_path: Path) -> None:
    world = [("0", "default_pg", [0, 1, 2])]
    order = {2: 1, 1: 0}
    for rank in range(3):
        trace = CpuTrace(rank, 3, world).step(2, 0, 100).op("aten::mm", 0, 10)
        if rank in (1, 0):
            trace.message("recv", rank + 1, 20, 30)
        if rank in order:
            trace.message("send", order[rank], 40, 50)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert report.run.mesh_source == "messages"
    assert {row.phase for row in report.exposed if row.axis == "pp"} == {"forward"}


def test_run_json_without_its_mesh_changes_only_a_warning(tmp_path: Path) -> None:
    world = [("0", "default_pg", [0, 1])]
    first = CpuTrace(0, 2, world).step(2, 0, 100).op("aten::mm", 0, 40)
    first.message("send", 1, 40, 50).op("aten::mm", 50, 100)
    last = CpuTrace(1, 2, world).step(2, 0, 100).message("recv", 0, 5, 50).op("aten::mm", 50, 100)
    for trace in (first, last):
        trace.write(tmp_path)
    body = {"schema": "stepsplit.run/1", "name": "r", "world_size": 2, "backend": "gloo"}
    stated = body | {"mesh": [{"axis": "pp", "size": 2}]}
    (tmp_path / "run.json").write_text(json.dumps(stated))
    with_mesh = analyze(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(body))
    without = analyze(tmp_path)
    assert with_mesh.steps == without.steps
    assert with_mesh.exposed == without.exposed
    assert {row.code for row in without.warnings} - {row.code for row in with_mesh.warnings} == {
        "mesh_inferred"
    }


def test_two_ranks_that_swap_data_are_a_ring_not_a_pipeline(tmp_path: Path) -> None:
    world = [("0", "default_pg", [0, 1])]
    for rank in (0, 1):
        trace = CpuTrace(rank, 2, world).step(2, 0, 100).op("aten::mm", 0, 10 + 30 * rank)
        at = 10 + 30 * rank
        trace.message("send", 1 - rank, at, 60).message("recv", 1 - rank, at + 1.5, 62)
        trace.op("aten::mm", 62, 100).write(tmp_path)
    report = analyze(tmp_path)
    assert {row.bubble_ns for row in report.steps} == {0}
    assert report.steps[0].skew_ns > 0


MEGATRON_RANK_9 = (
    ("TENSOR_MODEL_PARALLEL_GROUP", (8, 9, 10, 11)),
    ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", (8, 9, 10, 11)),
    ("PIPELINE_MODEL_PARALLEL_GROUP", (1, 9)),
    ("EMBEDDING_GROUP", (1, 9)),
    ("DATA_PARALLEL_GROUP_WITH_CP", (9, 13)),
    ("MODEL_PARALLEL_GROUP", (0, 1, 2, 3, 8, 9, 10, 11)),
    ("EXPERT_MODEL_PARALLEL_GROUP", (8, 9, 10, 11, 12, 13, 14, 15)),
    ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", (8, 9, 10, 11, 12, 13, 14, 15)),
)
"""Of the groups of rank 9 in a real job on 16 ranks: tp 4, pp 2, dp 2, experts over 8."""


def described(world_size: int, *groups: tuple[str, tuple[int, ...]]) -> RankLayout:
    infos = [GroupInfo(f"{i}", description, ranks) for i, (description, ranks) in enumerate(groups)]
    return layout_of(RunSpec("run", world_size, "nccl", groups=tuple(infos)), [])


def axes(layout: RankLayout, *groups: tuple[str, tuple[int, ...]]) -> list[str | None]:
    return [layout.find_axis(Group(f"{i}", ranks, text)) for i, (text, ranks) in enumerate(groups)]


def read(folder: Path, *traces: GpuTrace | CpuTrace) -> RankLayout:
    for trace in traces:
        trace.write(folder)
    return layout_of(None, recorded(folder))


def recorded(folder: Path) -> tuple[RankTrace, ...]:
    return recording_of(folder).traces


@pytest.mark.parametrize(
    ("description", "found"),
    [
        ("mesh_tp", GroupName(("tp",), whole=True)),
        ("mesh_dp", GroupName(("dp_replicate", "dp_shard"), whole=True)),
        ("mesh_dp_shard_cp", GroupName(("dp_shard", "cp"), whole=True)),
        ("mesh_dp_shard_in_ep", GroupName(("dp_shard",))),
        ("mesh_ep", GroupName(("ep",), whole=True, experts=True)),
        ("mesh_efsdp", GroupName(("dp_shard",), whole=True, experts=True)),
        ("mesh_default", GroupName()),
        ("DATA_PARALLEL_GROUP_GLOO", GroupName(("dp_replicate",), whole=True)),
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", GroupName(("dp_replicate", "cp"), whole=True)),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", GroupName(("dp_replicate", "cp"))),
        ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1", GroupName(("cp",))),
        ("POSITION_EMBEDDING_GROUP", GroupName(("pp",))),
        ("EXPERT_DATA_PARALLEL_GROUP", GroupName(("dp_replicate",), whole=True, experts=True)),
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", GroupName()),
        ("pipe_parallel", GroupName(("pp",), whole=True)),
        ("ep_size_8", GroupName(("ep",), whole=True, experts=True)),
        ("default_pg", GroupName()),
        ("undefined", GroupName()),
    ],
)
def test_frameworks_name_axes_each_in_its_own_way(description: str, found: GroupName) -> None:
    assert parse_group_name(description) == found


def test_the_groups_of_one_megatron_rank_determine_the_mesh() -> None:
    """Data parallel ranks are named only together with cp, and the ranks of tp and cp are tp's."""
    layout = described(16, *MEGATRON_RANK_9)
    assert layout.mesh == Mesh.of({"pp": 2, "dp": 2, "tp": 4})
    assert layout.pipelines == tuple((rank, rank + 8) for rank in range(8))
    assert axes(layout, *MEGATRON_RANK_9) == [
        "tp", "tp", "pp", "pp", "dp_replicate", None, "ep", "ep",
    ]  # fmt: skip


def test_torchtitan_dims_map_to_the_axes_that_they_flatten() -> None:
    groups = (
        ("mesh_pp", (0, 8)), ("mesh_fsdp", (0, 2, 4, 6)), ("mesh_loss", (0, 2, 4, 6)),
        ("mesh_cp", (0, 2)), ("mesh_tp", (0, 1)), ("mesh_efsdp", (0, 4)), ("mesh_ep", (0, 1, 2, 3)),
    )  # fmt: skip
    layout = described(16, *groups)
    assert layout.mesh == Mesh.of({"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2})
    assert axes(layout, *groups) == ["pp", None, None, "cp", "tp", "dp_shard", "ep"]


def test_a_group_of_experts_lies_along_ep_even_if_the_mesh_lacks_it() -> None:
    stated = RunSpec("run", 4, "nccl", mesh=Mesh.of({"dp": 4}))
    layout = layout_of(stated, [])
    pairs = (("mesh_ep", (0, 1)), ("mesh_dp", (0, 1, 2, 3)))
    assert axes(layout, *pairs) == ["ep", "dp_replicate"]


@pytest.mark.parametrize(
    ("mesh", "contradiction"),
    [
        ("dp=2,tp=2", ""),
        ("fsdp=2,tp=2", ""),
        ("tp=2,dp=2", "ranks 0, 2 are along tp, but the name of their group shows dp_replicate"),
        ("pp=2,tp=2", "ranks 0, 2 are along pp, but the name of their group shows dp_replicate"),
        ("tp=4", "ranks 0, 2 are along tp, but the name of their group shows dp_replicate"),
    ],
)
def test_a_stated_mesh_is_used_and_a_contradicting_name_is_a_warning(
    mesh: str, contradiction: str
) -> None:
    stated = Mesh.parse(mesh)
    groups = (GroupInfo("0", "mesh_dp", (0, 2)), GroupInfo("1", "mesh_tp", (0, 1)))
    spec = RunSpec("run", 4, "nccl", groups=groups)
    layout = layout_of(spec, [], stated)
    assert (layout.mesh, layout.source) == (stated, "stated")
    in_run_json = layout_of(RunSpec("run", 4, "nccl", mesh=stated, groups=groups), [])
    assert (in_run_json.source, in_run_json.notes) == ("run.json", layout.notes)
    full = mesh.replace("fsdp", "dp_shard").replace("dp=", "dp_replicate=")
    assert [(note.code, note.message) for note in layout.notes] == (
        [("mesh_contradicted", f"stated mesh {full}: {contradiction}")] if contradiction else []
    )


def test_ranks_may_have_a_group_of_another_axis_beside_the_stated_one() -> None:
    """The demo calibrates on groups of its own, and a job may build two meshes."""
    stated = Mesh.parse("pp=2,tp=2")
    names = (("mesh_dp_replicate", (0, 2)), ("mesh_pp", (0, 2)), ("mesh_tp", (0, 1)))
    groups = tuple(GroupInfo(str(i), name, ranks) for i, (name, ranks) in enumerate(names))
    assert layout_of(RunSpec("run", 4, "nccl", groups=groups), [], stated).notes == ()


@pytest.mark.parametrize(
    ("mesh", "contradiction"),
    [
        ("dp=2", ""),
        ("cp=2", ""),
        ("fsdp=2", "dp_shard, but the code that issued their calls shows dp_replicate"),
        ("tp=2", "tp, but the code that issued their calls shows dp_replicate"),
    ],
)
def test_a_stated_mesh_is_compared_with_the_code_that_issued_the_calls(
    mesh: str, contradiction: str, tmp_path: Path
) -> None:
    """Whoever shards sequences reduces gradients over their ranks too."""
    trace = step_of(0, 2, plain([0, 1]), [], []).op(HOOK, 800, 820).all_reduce(810, 812)
    trace.write(tmp_path)
    report = analyze(tmp_path, mesh=Mesh.parse(mesh))
    assert report.run.mesh_source == "stated"
    assert [
        row.message.split("are along ")[1]
        for row in report.warnings
        if row.code == "mesh_contradicted"
    ] == ([contradiction] if contradiction else [])


def test_a_stated_mesh_without_the_pipeline_of_the_messages_is_contradicted(
    tmp_path: Path,
) -> None:
    for rank in (0, 1):
        swap(rank, works_first=True).write(tmp_path)
    layout = layout_of(None, recorded(tmp_path), Mesh.of({"tp": 2}))
    assert [note.message for note in layout.notes] == [
        "stated mesh tp=2: ranks 0, 1 are along tp, but their messages show pp"
    ]


def test_a_stated_mesh_of_other_ranks_is_refused() -> None:
    spec = RunSpec("run", 4, "nccl", groups=(GroupInfo("0", "mesh_tp", (0, 1, 2, 3)),))
    with pytest.raises(UsageError) as error:
        layout_of(spec, [], MESH)
    assert str(error.value) == (
        "stated mesh pp=2,dp_replicate=2,tp=2 has 8 ranks, but the job has 4; state a mesh of 4, "
        "or none"
    )


def test_names_that_contradict_one_another_are_no_mesh() -> None:
    layout = described(4, ("mesh_pp", (0, 1)), ("mesh_pp", (0, 2)), ("mesh_tp", (0, 1)))
    assert (layout.mesh, layout.pipelines, layout.source) == (None, (), None)
    assert [note.code for note in layout.notes] == ["mesh_unknown"]


def test_one_named_pipeline_determines_the_others_in_the_grid() -> None:
    layout = described(8, ("mesh_pp", (1, 5)))
    assert layout.mesh is None
    assert layout.pipelines == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_named_pipeline_off_the_grid_determines_no_others() -> None:
    layout = described(8, ("mesh_pp", (1, 2, 5)))
    assert layout.pipelines == ((1, 2, 5),)


def step_of(
    rank: int,
    world_size: int,
    groups: list[tuple[str, str, list[int]]],
    forward: list[tuple[str, str]],
    backward: list[tuple[str, str]],
    floats: int = 1000,
) -> GpuTrace:
    """A step of one rank: (op, group) of the collectives before its first backward, and after."""
    kinds = {"allreduce": "AllReduce", "_allgather_base": "AllGather",
             "_reduce_scatter_base": "ReduceScatter", "all_to_all": "SendRecv"}  # fmt: skip
    trace = GpuTrace(rank, world_size, groups=groups).step(1, 0, 1000).kernel("gemm", 0, 5)
    for i, (op, group) in enumerate(forward):
        trace.collective(kinds[op], op, 10 + 10 * i, 15 + 10 * i, group=group, nelems=floats + i)
    trace.annotation("autograd::engine::evaluate_function: MmBackward0", 500, 900)
    for i, (op, group) in enumerate(backward):
        trace.collective(kinds[op], op, 510 + 10 * i, 515 + 10 * i, group=group, nelems=floats + i)
    return trace


def plain(*groups: list[int]) -> list[tuple[str, str, list[int]]]:
    return [(f"{i}", "undefined", ranks) for i, ranks in enumerate(groups)]


def test_sums_in_both_passes_are_tp_and_sums_after_the_backward_are_dp(tmp_path: Path) -> None:
    """Rank 0 alone was recorded: its groups have shapes, and shapes make up the four ranks."""
    groups = plain([0, 1], [0, 2], [0, 1, 2, 3])
    both = [("allreduce", "0")] * 4
    layout = read(tmp_path, step_of(0, 4, groups, both, [*both, ("allreduce", "1")]))
    assert (layout.mesh, layout.source) == (
        Mesh.of({"dp": 2, "tp": 2}),
        "rank sets and operations",
    )
    assert axes(layout, *((d, tuple(ranks)) for _, d, ranks in groups)) == [
        "tp", "dp_replicate", None,
    ]  # fmt: skip
    assert [note.code for note in layout.notes] == ["mesh_inferred"]


@pytest.mark.parametrize(
    ("forward", "floats"),
    [([("allreduce", "0")] * 4, 1000), ([("allreduce", "0")], 1000), ([], 10)],
    ids=["a sum per layer", "one sum", "tiny gradients"],
)
def test_a_group_on_which_ddp_reduces_is_dp_whatever_else_it_reduces(
    forward: list[tuple[str, str]], floats: int, tmp_path: Path
) -> None:
    """The later sums are as many as tp's would be: with gradient accumulation there are more
    forwards after the first backward."""
    trace = step_of(0, 2, plain([0, 1]), forward, [("allreduce", "0")] * 4, floats=floats)
    without = read(tmp_path, trace)
    assert without.mesh == (Mesh.of({"tp": 2}) if len(forward) == 4 else None)
    trace.annotation("DistributedDataParallel.forward", 0, 400)
    assert read(tmp_path, trace).mesh == Mesh.of({"dp": 2})


HOOK = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def step_with_odd_calls() -> GpuTrace:
    """A step whose forward has four reductions of 4 kB, and whose backward lasts from 500 to 900,
    with four more of another forward."""
    sums = [("allreduce", "0")] * 4
    return step_of(0, 2, plain([0, 1], [0, 1]), sums, sums)


def test_a_reduction_in_a_hook_of_autograd_is_of_gradients(tmp_path: Path) -> None:
    """Of 40 bytes, by whoever, and on another group of the ranks that reduce in the forward."""
    trace = step_with_odd_calls()
    assert read(tmp_path, trace).mesh == Mesh.of({"tp": 2})
    trace.op(HOOK, 800, 820).all_reduce(810, 812, group="1", nelems=10)
    layout = read(tmp_path, trace)
    assert (layout.mesh, layout.notes[0].message) == (
        Mesh.of({"dp": 2}),
        "run.json has no mesh: inferred from the code that issued the calls of the process groups "
        "(confidence: high)",
    )


def test_large_reductions_after_the_backward_are_of_gradients_whatever_the_forward_reduces(
    tmp_path: Path,
) -> None:
    """A loop averages the gradients itself: by size and time, not by a name."""
    trace = step_with_odd_calls().all_reduce(920, 930, group="0", nelems=100_000)
    layout = read(tmp_path, trace)
    assert (layout.mesh, layout.notes[0].message) == (
        Mesh.of({"dp": 2}),
        "run.json has no mesh: inferred from the ranks and operations of the process groups "
        "(confidence: medium)",
    )


def test_sharded_weights_stay_sharded_with_a_reduced_metric(tmp_path: Path) -> None:
    """As in DeepSpeed's ZeRO-3, which annotates nothing."""
    gather, scatter = ("_allgather_base", "0"), ("_reduce_scatter_base", "0")
    forward = [gather, gather, gather, ("allreduce", "0")]
    trace = step_of(0, 2, plain([0, 1]), forward, [gather, scatter])
    assert read(tmp_path, trace).mesh == Mesh.of({"fsdp": 2})


@pytest.mark.parametrize(
    ("layer", "at", "mesh"),
    [
        ("_ReduceFromModelParallelRegion", 10, Mesh.of({"tp": 8})),
        ("nn.Module: RowParallelLinear_3", 10, Mesh.of({"tp": 8})),
        ("LinearWithGradAccumulationAndAsyncCommunicationBackward", 610, Mesh.of({"tp": 8})),
        ("Redistribute", 10, Mesh.of({"tp": 8})),
        ("Redistribute", 910, None),
        ("", 10, None),
    ],
    ids=lambda value: str(value),
)
def test_a_reduction_in_a_layer_of_tensor_parallelism_is_tp(
    layer: str, at: int, mesh: Mesh | None, tmp_path: Path
) -> None:
    """Of 400 bytes, in one layer, on a group without a name. DTensor redistributes activations in
    the forward, and after the backward the norms of gradients."""
    trace = step_of(0, 8, plain([*range(8)]), [], []).op("aten::mm", 0, 5)
    trace.op(layer, at, at + 20).all_reduce(at + 5, at + 15, nelems=100)
    assert read(tmp_path, trace).mesh == mesh
    strategies = analyze(tmp_path).run.strategies
    assert [one.in_words for one in strategies] == (["tp 8"] if mesh and at == 10 else [])


def test_calls_without_a_group_in_layers_of_tensor_parallelism_are_tp(tmp_path: Path) -> None:
    """All ranks are recorded, and their kernels name neither group nor size, as in old traces."""
    for rank in range(8):
        trace = step_of(rank, 8, [], [], [])
        for at in (10, 60, 110):
            trace.op("_ReduceFromModelParallelRegion", at, at + 20)
            trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_half", at + 5, at + 15, stream=20)
            trace.op("aten::mm", at + 30, at + 40).kernel("gemm", at + 30, at + 40)
        trace.write(tmp_path)
    report = analyze(tmp_path)
    assert [(one.axis, one.size) for one in report.run.mesh or ()] == [("tp", 8)]
    assert [one.in_words for one in report.run.strategies] == ["tp 8"]
    assert {row.code for row in report.warnings} >= {"groups_inferred", "mesh_inferred"}


@pytest.mark.parametrize(
    ("mark", "backward", "mesh"),
    [
        ("FSDP::all_gather", ["_reduce_scatter_base"], {"fsdp": 2}),
        ("", ["_allgather_base", "_reduce_scatter_base"], {"fsdp": 2}),
        ("", ["_reduce_scatter_base"], {"dp": 2}),
    ],
    ids=["FSDP's gathers", "gathers in both passes", "the distributed optimizer's gathers"],
)
def test_megatrons_data_parallel_group_is_dp_shard_where_it_gathers_weights_for_each_use(
    mark: str, backward: list[str], mesh: dict[str, int], tmp_path: Path
) -> None:
    groups = [("0", "DATA_PARALLEL_GROUP", [0, 2]), ("1", "TENSOR_MODEL_PARALLEL_GROUP", [0, 1])]
    forward = [("_allgather_base", "0")]
    trace = step_of(0, 4, groups, forward, [(op, "0") for op in backward])
    trace.annotation(mark, 10, 20)
    layout = read(tmp_path, trace)
    assert (layout.mesh, layout.source) == (Mesh.of(mesh | {"tp": 2}), "group names")
    (axis,) = Mesh.of(mesh).axes
    assert axes(layout, *((d, tuple(ranks)) for _, d, ranks in groups)) == [axis, "tp"]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("ddptut", "ddp 2 on dp_replicate"),
        ("lit", "ddp 2 on dp_replicate"),
        ("f_extra", "ddp 2 on dp_replicate"),
        ("f_cap", "ddp 2 on dp_replicate"),
        ("m_tp1", "ddp 2 on dp_replicate"),
        ("m_crash", "ddp 2 on dp_replicate"),
        ("ds2t", "zero-2 2 on dp_replicate"),
        ("pipe", "pp 3 (gpipe)"),
    ],
)
def test_the_layout_of_other_peoples_scripts(name: str, strategy: str) -> None:
    run = analyze(shared_repro(f"recorded/{name}")).run
    axis, size = ("pp", 3) if name == "pipe" else ("dp_replicate", 2)
    assert [(one.axis, one.size) for one in run.mesh or ()] == [(axis, size)]
    assert run.strategies[0].in_words == strategy


def test_weights_gathered_in_both_passes_and_scattered_in_one_are_dp_shard(tmp_path: Path) -> None:
    gather, scatter = ("_allgather_base", "0"), ("_reduce_scatter_base", "0")
    trace = step_of(0, 2, plain([0, 1]), [gather] * 2, [gather, scatter, scatter])
    assert read(tmp_path, trace).mesh == Mesh.of({"fsdp": 2})


def test_gathers_of_ranks_whose_gradients_a_larger_group_sums_may_be_of_attention(
    tmp_path: Path,
) -> None:
    gather, scatter = ("_allgather_base", "0"), ("_reduce_scatter_base", "0")
    groups = plain([0, 1], [0, 1, 2, 3])
    trace = step_of(0, 4, groups, [gather], [gather, scatter, ("allreduce", "1")])
    layout = read(tmp_path, trace)
    assert (layout.mesh, layout.find_axis(Group("0", (0, 1), "undefined"))) == (None, None)


def test_expert_all_to_alls_vary_in_size_and_those_of_attention_heads_do_not(
    tmp_path: Path,
) -> None:
    tokens = step_of(0, 8, plain([0, 1], [0, 2]), [("all_to_all", "0")] * 6, [("all_to_all", "1")])
    layout = read(tmp_path, tokens)
    assert axes(layout, ("undefined", (0, 1)), ("undefined", (0, 2))) == ["ep", None]
    assert [note.code for note in layout.notes] == ["mesh_unknown"]


def test_sums_that_span_stages_are_embeddings_and_not_data_parallel(tmp_path: Path) -> None:
    groups = [("0", "mesh_pp", [0, 1]), ("1", "undefined", [0, 1])]
    trace = step_of(0, 4, groups, [], [("allreduce", "1")])
    layout = read(tmp_path, trace)
    assert (layout.mesh, layout.pipelines) == (None, ((0, 1), (2, 3)))
    assert layout.find_axis(Group("1", (0, 1), "undefined")) == "pp"


ATTENTION = "aten::scaled_dot_product_attention"


def swap(rank: int, *, works_first: bool, mark: str = "", work: str = "aten::mm") -> CpuTrace:
    """Rank 0 sends first and rank 1 receives first; rank 1 works before it answers, or after."""
    trace = CpuTrace(rank, 2, [("0", "default_pg", [0, 1])]).step(2, 0, 200)
    if rank == 0:
        for at in (10, 110):
            trace.op(work, at - 10, at).message("send", 1, at, at + 5)
            trace.message("recv", 1, at + 5, at + 60)
    for at in (15, 115) if rank == 1 else ():
        trace.message("recv", 0, at - 10, at)
        sends = at + 50 if works_first else at + 1
        trace.message("send", 0, sends, sends + 5)
        start = at if works_first else at + 10
        trace.op(work, start, start + 40)
    return trace.annotation(mark, 0, 10) if mark else trace


def test_of_two_ranks_the_later_stage_works_before_it_answers(tmp_path: Path) -> None:
    layout = read(tmp_path, *(swap(rank, works_first=True) for rank in (0, 1)))
    assert (layout.source, layout.pipelines) == ("messages", ((0, 1),))


def test_two_ranks_that_swap_before_attention_are_a_ring(tmp_path: Path) -> None:
    traces = [swap(rank, works_first=False, work=ATTENTION) for rank in (0, 1)]
    layout = read(tmp_path, *traces)
    assert (layout.mesh, layout.source) == (Mesh.of({"cp": 2}), "messages")
    assert layout.pipelines == ()


def test_two_ranks_that_swap_before_other_work_may_be_a_pipeline_both_ways(tmp_path: Path) -> None:
    """Without a backward a swap is of a ring only around attention."""
    layout = read(tmp_path, *(swap(rank, works_first=False) for rank in (0, 1)))
    assert (layout.mesh, layout.pipelines) == (None, ())
    assert "could be a pipeline or a ring" in layout.notes[0].message


def passes(rank: int, *, within: bool, last: bool) -> CpuTrace:
    """A step of two forwards and two backwards in which the ranks swap messages: between the passes
    or within them; after the last backward, or not."""
    trace = CpuTrace(rank, 2, [("0", "default_pg", [0, 1])]).step(2, 0, 450)
    for number in range(4):
        at = 10 + 100 * number
        end = at + (90 if within else 40)
        if number > 1:
            trace.op("autograd::engine::evaluate_function: MmBackward0", at, end)
        trace.op("aten::mm", at, at + 30)
        if number < 3 or last:
            trace.message("send", 1 - rank, at + 50, at + 60)
            trace.message("recv", 1 - rank, at + 52, at + 60)
        if within:
            trace.op("aten::mm", at + 65, at + 85)
    return trace


def test_two_ranks_that_swap_between_their_passes_are_a_pipeline_both_ways(tmp_path: Path) -> None:
    """As in DualPipe: each rank has the first stage of one direction and the last of the other."""
    traces = [passes(rank, within=False, last=False) for rank in (0, 1)]
    layout = read(tmp_path, *traces)
    assert (layout.source, layout.pipelines) == ("messages", ((0, 1),))
    report = analyze(tmp_path)
    assert [one.in_words for one in report.run.strategies] == ["pp 2"]


def test_two_ranks_that_swap_within_their_passes_are_a_ring(tmp_path: Path) -> None:
    """A ring passes the gradients of its blocks on within the backward."""
    layout = read(tmp_path, *(passes(rank, within=True, last=True) for rank in (0, 1)))
    assert (layout.mesh, layout.pipelines) == (Mesh.of({"cp": 2}), ())


def test_a_recorded_job_of_dualpipe_on_two_ranks() -> None:
    """Four microbatches each way."""
    report = analyze(shared_repro("users3/dualpipe_cp") / "rec2")
    assert [(one.axis, one.size) for one in report.run.mesh or ()] == [("pp", 2)]
    assert [one.in_words for one in report.run.strategies] == ["pp 2 (dualpipe)"]
    assert report.pipeline is not None
    assert (report.pipeline.schedule, report.pipeline.microbatches) == ("dualpipe", 8)
    assert {row.axis for row in report.exposed} == {"pp"}


@pytest.mark.parametrize("dropped", ["autograd::", "ProfilerStep", ("autograd::", "ProfilerStep")])
def test_dualpipe_of_which_no_ranges_are_known_is_no_ring(
    dropped: str | tuple[str, ...], tmp_path: Path
) -> None:
    """The same recording without the ranges of autograd, the marks of its steps, or both."""
    for path in (shared_repro("users3/dualpipe_cp") / "rec2").iterdir():
        content = path.read_bytes()
        if path.name.endswith("_trace.json.gz"):
            body = json.loads(gzip.decompress(content))
            body["traceEvents"] = [
                one for one in body["traceEvents"] if not one.get("name", "").startswith(dropped)
            ]
            content = gzip.compress(json.dumps(body).encode())
        (tmp_path / path.name).write_bytes(content)
    run = analyze(tmp_path).run
    assert (run.mesh, run.strategies) == (None, ())


def test_two_ranks_of_which_one_sends_more_at_first_may_be_a_pipeline(tmp_path: Path) -> None:
    """As in an interleaved schedule, where a stage also works while messages are on their way."""
    first, last = (swap(rank, works_first=False) for rank in (0, 1))
    for trace, op in ((first, "send"), (last, "recv")):
        trace.message(op, 1 - trace.rank, 1, 2)
    layout = read(tmp_path, first, last)
    assert (layout.mesh, layout.pipelines) == (None, ())
    assert [note.message for note in layout.notes] == [
        "unknown mesh: all waits count as skew, none as bubble; messages between ranks 0, 1 could "
        "be a pipeline or a ring"
    ]


def test_a_swap_of_which_one_rank_recorded_no_message_may_be_a_pipeline(tmp_path: Path) -> None:
    silent = CpuTrace(1, 2, [("0", "default_pg", [0, 1])]).step(2, 0, 200).op("aten::mm", 15, 55)
    layout = read(tmp_path, swap(0, works_first=False), silent)
    assert (layout.mesh, layout.pipelines) == (None, ())
    assert "could be a pipeline or a ring" in layout.notes[0].message


@pytest.mark.parametrize(("stages", "pipelines"), [((1, 0), ((1, 0),)), ((0, 0), ())])
def test_stage_marks_determine_the_pipeline_and_its_order(
    tmp_path: Path, stages: tuple[int, int], pipelines: tuple[tuple[int, ...], ...]
) -> None:
    marks = [f"stepsplit::F stage={stage} mb=0" for stage in stages]
    traces = [swap(rank, works_first=False, mark=mark) for rank, mark in enumerate(marks)]
    assert read(tmp_path, *traces).pipelines == pipelines


def circle(rank: int, sends: list[int], first: str) -> CpuTrace:
    """One of three ranks that sends to these ranks and receives from the others that send here."""
    trace = CpuTrace(rank, 3, [("0", "default_pg", [0, 1, 2])]).step(2, 0, 100)
    trace.op("aten::mm", 0, 10)
    receives = [r for r in range(3) if r != rank and (len(sends) == 2 or r not in sends)]
    for i, op in enumerate(("send", "recv") if first == "send" else ("recv", "send")):
        for j, peer in enumerate(sends if op == "send" else receives):
            trace.message(op, peer, 20 + 40 * i + 10 * j, 30 + 40 * i + 10 * j)
    return trace


def test_equal_messages_around_a_ring_are_cp_not_a_pipeline(tmp_path: Path) -> None:
    layout = read(tmp_path, *(circle(rank, [(rank + 1) % 3], "send") for rank in range(3)))
    assert (layout.mesh, layout.source) == (Mesh.of({"cp": 3}), "messages")
    assert layout.pipelines == ()


def test_around_both_ways_from_one_rank_that_begins_is_an_interleaved_pipeline(
    tmp_path: Path,
) -> None:
    traces = [circle(0, [1, 2], "send"), circle(1, [2, 0], "recv"), circle(2, [0, 1], "recv")]
    layout = read(tmp_path, *traces)
    assert (layout.source, layout.pipelines) == ("messages", ((0, 1, 2),))


def test_a_chain_that_may_continue_at_an_unrecorded_rank_gives_no_mesh(tmp_path: Path) -> None:
    """Rank 2 is not there: it is unknown whether it passes on what it receives from rank 1."""
    world = [("0", "default_pg", [0, 1, 2])]
    first = CpuTrace(0, 3, world).step(2, 0, 100).op("aten::mm", 0, 10).message("send", 1, 10, 20)
    second = CpuTrace(1, 3, world).step(2, 0, 100).message("recv", 0, 10, 20)
    second.op("aten::mm", 20, 30).message("send", 2, 30, 40)
    layout = read(tmp_path, first, second)
    assert (layout.mesh, layout.pipelines) == (None, ((0, 1, 2),))


def trains_and_reports(rank: int, sender: int) -> GpuTrace:
    """One of four data-parallel ranks; the sender passes rank 0 or 1 its metrics each step."""
    trace = GpuTrace(rank, 4, groups=[("0", "default_pg", [0, 1, 2, 3])]).step(1, 0, 200)
    trace.kernel("gemm", 0, 90 if rank == 1 else 40)
    trace.annotation("autograd::engine::evaluate_function: AddmmBackward0", 5, 30)
    trace.all_reduce(90 if rank == 1 else 40, 100).kernel("adam", 100, 150)
    if rank in (0, 1):
        op = "send" if rank == sender else "recv"
        trace.message(op, 1 - rank, 150, 160).kernel("gemm", 160, 200)
    return trace


@pytest.mark.parametrize("sender", [0, 1])
def test_messages_one_way_in_training_are_no_pipeline(sender: int, tmp_path: Path) -> None:
    traces = [trains_and_reports(rank, sender) for rank in range(4)]
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    assert [row.skew_ns for row in report.steps] == [50_000, 0, 50_000, 50_000]
    assert sum(row.bubble_ns for row in report.steps) == 0
    assert [(row.axis, row.size) for row in report.run.mesh] == [("dp_replicate", 4)]


def test_a_rank_outside_of_every_pipeline_waits_in_no_bubble(tmp_path: Path) -> None:
    """Ranks 0 and 1 hand on activations only, without any backward: a pipeline of two stages."""
    traces = []
    for rank in range(3):
        trace = GpuTrace(rank, 3, groups=[("0", "default_pg", [0, 1, 2])]).step(1, 0, 100)
        trace.kernel("gemm", 0, 60 if rank == 1 else 20)
        trace.all_reduce(60 if rank == 1 else 20, 70).kernel("gemm", 70, 80)
        if rank < 2:
            trace.message("recv" if rank else "send", 1 - rank, 80, 90).kernel("gemm", 90, 100)
        traces.append(trace)
    report = analyze(*(trace.write(tmp_path) for trace in traces))
    waits = [(row.skew_ns, row.bubble_ns) for row in report.steps]
    assert waits == [(0, 40_000), (0, 0), (40_000, 0)]


def test_on_a_device_too_the_later_stage_works_before_it_answers(tmp_path: Path) -> None:
    """Its optimizer runs after it has sent: that alone would look like a ring."""
    pair = plain([0, 1])
    first = GpuTrace(0, 2, groups=pair).step(1, 0, 100).kernel("F0", 0, 10)
    first.message("send", 1, 10, 20).message("recv", 1, 20, 60).kernel("B0", 60, 80)
    last = GpuTrace(1, 2, groups=pair).step(1, 0, 100).message("recv", 0, 5, 20)
    last.kernel("F0B0", 20, 50).message("send", 0, 50, 60).kernel("adam", 60, 90)
    layout = read(tmp_path, first, last)
    assert (layout.source, layout.pipelines) == ("messages", ((0, 1),))


def test_with_unknown_peers_reductions_over_the_world_give_no_mesh(tmp_path: Path) -> None:
    """A kernel of messages without arguments may belong to a pipeline."""
    trace = step_of(0, 2, plain([0, 1]), [], [("allreduce", "0")])
    trace.kernel("ncclDevKernel_SendRecv", 950, 960, stream=20)
    layout = read(tmp_path, trace)
    assert (layout.mesh, [note.code for note in layout.notes]) == (None, ["mesh_unknown"])


def grid_rank(rank: int) -> GpuTrace:
    """One of four ranks, tp 2 x pp 2: stage 0 sends to its peer over the group of all ranks."""
    groups = [
        ("0", "default_pg", [0, 1, 2, 3]),
        ("1", "mesh_tp", [rank // 2 * 2, rank // 2 * 2 + 1]),
    ]
    trace = GpuTrace(rank, 4, groups=groups).step(1, 0, 100).kernel("F", 0, 40)
    trace.all_reduce(40, 45, group="1")
    if rank < 2:
        trace.message("send", rank + 2, 45, 55).message("recv", rank + 2, 55, 90)
    else:
        trace.message("recv", rank - 2, 45, 55).kernel("B", 55, 80)
        trace.message("send", rank - 2, 80, 90)
    return trace.kernel("B", 90, 100).all_reduce(95, 100, group="0")


@pytest.mark.parametrize("mesh", [{"pp": 2, "tp": 2}, None])
def test_a_message_over_the_group_of_all_ranks_has_the_axis_of_its_endpoints(
    tmp_path: Path, mesh: dict[str, int] | None
) -> None:
    """The all_reduce over that group stays on both axes."""
    for rank in range(4):
        grid_rank(rank).write(tmp_path)
    stated = [{"axis": axis, "size": size} for axis, size in (mesh or {}).items()]
    body = {"schema": "stepsplit.run/1", "name": "r", "world_size": 4, "backend": "nccl"}
    (tmp_path / "run.json").write_text(json.dumps(body | {"mesh": stated or None}))
    report = analyze(tmp_path)
    axis_of = {group.id: (group.axis, group.ranks) for group in report.groups}
    assert {(row.op, *axis_of[row.group]) for row in report.collectives} == {
        ("all_reduce", "tp", (0, 1)),
        ("all_reduce", "tp", (2, 3)),
        ("all_reduce", None, (0, 1, 2, 3)),
        *((op, "pp", ranks) for op in ("send", "recv") for ranks in ((0, 2), (1, 3))),
    }
    assert {(row.axis, row.phase, row.p2p_ns) for row in report.exposed if row.p2p_ns} == {
        ("pp", "forward", 10_000),
        ("pp", "backward", 10_000),
    }
    assert {(row.axis, row.message) for row in report.lateness} == {
        ("tp", False), ("pp x tp", False), ("pp", True),
    }  # fmt: skip
    assert {row.axis for row in report.overlap if row.op in ("send", "recv")} == {"pp"}
    assert {(row.axis, row.unmatched) for row in report.coverage} == {
        ("tp", 0), ("pp", 0), ("pp x tp", 0),
    }  # fmt: skip


def megatron_layers(rank: int) -> GpuTrace:
    """One step of Megatron-LM's layers on 8 ranks, whose NCCL kernels name no group."""
    trace, reduced = GpuTrace(rank, 8).step(1, 0, 400), "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
    backward = "autograd::engine::evaluate_function: "
    backward += "LinearWithGradAccumulationAndAsyncCommunicationBackward"
    for layer in range(2):
        at = 100 * layer
        trace.python(f"nn.Module: RowParallelLinear_{layer}", at, at + 40)
        trace.kernel("gemm", at, at + 10).kernel(reduced, at + 10, at + 30, stream=20)
        trace.op(backward, at + 200, at + 240, tid=101)
        trace.kernel("gemm", at + 200, at + 210).kernel(reduced, at + 210, at + 230, stream=20)
    return trace


def test_calls_without_a_group_in_tensor_parallel_modules_are_of_tp(tmp_path: Path) -> None:
    for rank in range(8):
        megatron_layers(rank).write(tmp_path)
    report = analyze(tmp_path)
    assert [(one.axis, one.size) for one in report.run.mesh or ()] == [("tp", 8)]
    assert "from the code that issued the calls" in report.warnings[0].message


def test_one_rank_of_them_shows_tensor_parallelism_but_not_its_size(tmp_path: Path) -> None:
    layout = read(tmp_path, megatron_layers(0))
    assert layout.mesh is None
    assert [note.message for note in layout.notes] == [
        "unknown mesh: all waits count as skew, none as bubble; layers of tensor parallelism issued"
        " calls without a group: if all ranks are in one, state --mesh tp=8"
    ]
