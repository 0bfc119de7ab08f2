"""Execution traces of torch in every schema."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.reading import on_disk
from support.required import shared_trace

from stepsplit.analyzer import OPS, DataError, ExecutionTrace, Group
from stepsplit.analyzer.readers.execution_trace import is_execution_trace, read_execution_trace

MEGATRON = "kineto_megatron_tp2_v100"
Json = dict[str, Any]
TENSORS = {
    "values": [[[5, 6, 0, 1000, 4, "cuda:0"], [7, 8, 0, 500, 4, "cuda:0"]]],
    "shapes": [[[1000], [500]]],
    "types": ["GenericList[Tensor(float),Tensor(float)]"],
}
NOTHING: Json = {"values": [], "shapes": [], "types": []}
WORLD = [
    {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4, "group_count": 2},
    {"pg_name": "tp", "backend_id": 139_874, "pg_desc": "tensor", "ranks": [2, 3], "group_size": 2},
]


def node(
    number: int, name: str, parent: int = 2, inputs: Json = NOTHING, outputs: Json = NOTHING,
    rf_id: int = 0, **attrs: object,
) -> Json:  # fmt: skip
    """A node as the observer writes it since Chakra."""
    scalars = {"rf_id": rf_id, "fw_parent": 0, "seq_id": -1, "scope": 7, "tid": 1, "fw_tid": 0}
    attributes = scalars | {"op_schema": ""} | attrs
    named = [{"name": k, "type": "uint64", "value": v} for k, v in attributes.items()]
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": inputs, "outputs": outputs,
            "attrs": named}  # fmt: skip


def groups(*configs: Json) -> Json:
    values = {"values": [json.dumps(configs)], "shapes": [[]], "types": ["String"]}
    return node(3, "## process_group:init ##", inputs=values)


def comm(rf_id: int, *inputs: object, tensors: bool = True, **attrs: object) -> Json:
    """A record_param_comms with these positional inputs after two float tensors."""
    types = [type(value).__name__ for value in inputs]
    given = {
        "values": TENSORS["values"] * tensors + list(inputs),
        "shapes": [],
        "types": TENSORS["types"] * tensors + types,
    }
    return node(
        rf_id + 10, "record_param_comms", inputs=given, outputs=TENSORS, rf_id=rf_id, **attrs
    )


def trace(*nodes: Json, schema: str = "1.1.1-chakra.0.0.4", indent: int | None = None) -> bytes:
    root = node(1, "[pytorch|profiler|execution_trace|process]", 1)
    thread = node(2, "[pytorch|profiler|execution_trace|thread]", 1)
    begin = {"schema": schema, "pid": 77, "time": "2026-08-19 11:25:30", "start_ts": 6418}
    body = begin | {"nodes": [thread, *nodes, root], "finish_ts": 6420}
    return json.dumps(body, indent=indent).encode()


def read(folder: Path, content: bytes, name: str = "host.json") -> ExecutionTrace:
    file = folder / name
    file.write_bytes(content)
    return read_execution_trace(on_disk(file))


def rows(found: ExecutionTrace) -> list[tuple[object, ...]]:
    """(rf_id, op, group, seq, peer, dtype, input, message) of each call."""
    calls = found.calls.calls
    return [
        (int(found.call_rf_id[i]), OPS[calls.op[i]],
         found.calls.groups[calls.group_id[i]].name if calls.group_id[i] >= 0 else "",
         int(calls.seq[i]), int(calls.peer[i]), calls.dtypes[calls.dtype[i]],
         int(calls.input_bytes[i]), int(calls.message_bytes[i]))
        for i in range(len(calls))
    ]  # fmt: skip


def codes(found: ExecutionTrace) -> list[str]:
    return [note.code for note in found.notes]


def test_nodes_are_columns(tmp_path: Path) -> None:
    forward = node(5, "aten::mm", 4, rf_id=9, fw_parent=4, seq_id=3, scope=1, tid=2, fw_tid=1)
    found = read(tmp_path, trace(node(4, "aten::linear"), forward, node(6, "aten::mm")))
    nodes = found.nodes
    assert (found.schema, found.pid, found.rank, found.notes) == ("1.1.1-chakra.0.0.4", 77, -1, ())
    assert [nodes.names[i] for i in nodes.name_id][1:-1] == ["aten::linear", "aten::mm", "aten::mm"]
    assert nodes.node_id.tolist() == [2, 4, 5, 6, 1]
    assert nodes.parent.tolist() == [1, 2, 4, 2, 1]
    row = [column[2] for column in (nodes.rf_id, nodes.fw_parent, nodes.seq_id, nodes.scope)]
    assert [*row, nodes.tid[2], nodes.fw_tid[2]] == [9, 4, 3, 1, 2, 1]
    assert len(nodes) == 5
    assert found.calls.groups == ()


@pytest.mark.parametrize(
    "inputs",
    [
        (12, 139_874, 0, "allreduce", [], [], 2),
        (12, "tp", 0, "allreduce", [], [], 2),
        (12, ["tp", "tensor"], 0, "allreduce", [], [], 2, 1, 2),
        ([12, False], ["tp", "tensor"], 0, "allreduce", [], [], 2, 1, 2),
    ],
)
def test_the_inputs_of_every_release_give_the_same_calls(
    tmp_path: Path, inputs: tuple[object, ...]
) -> None:
    found = read(tmp_path, trace(groups(*WORLD), comm(40, *inputs)))
    assert rows(found) == [(40, "all_reduce", "tp", 12, -1, "float32", 6000, 6000)]
    assert found.calls.groups == (
        Group("0", (0, 1, 2, 3), "default_pg"),
        Group("tp", (2, 3), "tensor"),
    )
    assert (found.rank, found.calls.rank, found.calls.world_size) == (2, 2, 4)
    assert found.calls.dur_ns.tolist() == [-1]


def test_traces_before_chakra_are_read(tmp_path: Path) -> None:
    scalars = {"rf_id": 40, "fw_parent": 0, "seq_id": 5, "scope": 0, "tid": 3, "fw_tid": 0}
    old = {"name": "record_param_comms", "id": 9, "parent": 4} | scalars | {
        "op_schema": "", "inputs": [*TENSORS["values"], 12, 5, 1, "all_gather", [], [], 2],
        "input_shapes": [], "input_types": [*TENSORS["types"], "Int"],
        "outputs": TENSORS["values"], "output_shapes": [], "output_types": TENSORS["types"],
    }  # fmt: skip
    body = {"schema": "1.0.1", "pid": 77, "time": "", "start_ts": 1, "nodes": [old]}
    content = json.dumps(body).encode()
    found = read(tmp_path, content)
    assert is_execution_trace(content)
    assert rows(found) == [(40, "all_gather", "5", 12, -1, "float32", 6000, 12000)]
    nodes = found.nodes
    assert (nodes.parent[0], nodes.tid[0], nodes.seq_id[0], found.schema) == (4, 3, 5, "1.0.1")


def test_sizes_from_attributes_take_precedence_over_tensors(tmp_path: Path) -> None:
    """A reduce-scatter of 16-bit floats: its input is the message."""
    attributes = {"collective_name": "_reduce_scatter_base", "dtype": "BFloat16"}
    sizes = {"in_msg_nelems": 800, "out_msg_nelems": 200, "pg_name": "0", "pg_size": 4}
    inputs = ([3, False], ["0", "default_pg"], 3, "_reduce_scatter_base", [], [], 0, 1, 4)
    found = read(tmp_path, trace(groups(*WORLD), comm(40, *inputs, **attributes, **sizes)))
    assert rows(found) == [(40, "reduce_scatter", "0", 3, -1, "bfloat16", 1600, 1600)]
    assert found.rank == 3


def test_peers_are_global_ranks_and_roots_are_not_the_own_rank(tmp_path: Path) -> None:
    """The rank of a send is its peer, that of a broadcast its root, both within the group."""
    send = comm(40, [1, True], ["tp", "tensor"], 1, "send", [], [], 2, 1, 2)
    root = comm(41, [2, False], ["tp", "tensor"], 1, "broadcast", [], [], 2, 1, 2)
    found = read(tmp_path, trace(groups(*WORLD), send, root))
    assert [row[1:5] for row in rows(found)] == [
        ("send", "tp", 1, 3),
        ("broadcast", "tp", 2, -1),
    ]
    assert found.rank == -1


def test_groups_named_only_by_calls_get_ranks_from_start_and_stride(tmp_path: Path) -> None:
    strided = comm(40, 1, ["pp", "pipeline"], 1, "allreduce", [], [], 1, 4, 3)
    irregular = comm(41, 1, ["odd", ""], 1, "allreduce", [], [], 1, -1, 3)
    found = read(tmp_path, trace(strided, irregular))
    assert found.calls.groups == (Group("pp", (1, 5, 9), "pipeline"), Group("odd", (), ""))
    assert found.rank == 5


def test_bookkeeping_is_ignored_and_unknown_calls_are_counted(tmp_path: Path) -> None:
    rest = (["0", ""], 0, "wait", [], [], -1, -1, 1)
    wait = comm(40, 79, *rest, tensors=False)
    init = comm(41, 80, *(rest[:2]), "init", [], [], -1, -1, 1, tensors=False)
    barrier = comm(42, 81, ["0", ""], 2, "barrier", [], [], 0, 1, 4)
    new = comm(43, 82, ["0", ""], 2, "teleport", [], [], 0, 1, 4)
    found = read(tmp_path, trace(groups(*WORLD), wait, init, barrier, new))
    assert [row[1] for row in rows(found)] == ["barrier"]
    assert codes(found) == ["calls_skipped"]


def test_a_rank_is_inferred_from_its_groups_or_the_name(tmp_path: Path) -> None:
    alone = {"pg_name": "9", "ranks": [2], "group_size": 1}
    assert read(tmp_path, trace(groups(*WORLD, alone))).rank == 2
    for name, rank in (
        ("pytorch_et_3.json", 3),
        ("rank2_et.json.gz", 2),
        ("rank12_et.json", -1),
        ("et_2024-08.json", -1),
    ):
        found = read(tmp_path, trace(groups(*WORLD)), name)
        assert (found.rank, codes(found)) == (rank, ["rank_guessed"] if rank >= 0 else [])


def test_torch_2_1_names_groups_by_ids_and_maps_their_ranks(tmp_path: Path) -> None:
    pair = {"pg_id": 4, "backend_id": 140_211, "ranks": {"2": 0, "3": 1}}
    call = comm(40, 12, 140_211, 1, "allreduce", [], [], 2)
    found = read(tmp_path, trace(groups({"pg_id": 0, "ranks": {"2": 0, "3": 1}}, pair), call))
    assert found.calls.groups == (Group("0", (2, 3), ""), Group("4", (2, 3), ""))
    assert (rows(found)[0][2], found.rank, codes(found)) == ("4", 3, [])


def test_torch_2_3_names_groups_by_their_uid(tmp_path: Path) -> None:
    pair = {"pg_name": "tp", "uid": 7, "ranks": [2, 3], "group_size": 2}
    found = read(tmp_path, trace(groups(pair), comm(40, 12, 7, 1, "allreduce", [], [], 2)))
    assert (rows(found)[0][2], found.rank) == ("tp", 3)


def test_complete_groups_of_a_truncated_list_are_read(tmp_path: Path) -> None:
    cut = groups(*WORLD, *WORLD)
    cut["inputs"]["values"][0] = cut["inputs"]["values"][0][:-20]
    found = read(tmp_path, trace(cut))
    assert [group.name for group in found.calls.groups] == ["0", "tp"]
    assert codes(found) == ["groups_skipped"]


def test_missing_parameters_of_gloo_give_a_note(tmp_path: Path) -> None:
    found = read(tmp_path, trace(groups(*WORLD), node(9, "c10d::allreduce_")))
    assert codes(found) == ["calls_missing"]


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_invalid_nodes_are_counted(tmp_path: Path, indent: int | None) -> None:
    """The observer does not escape the names of nodes."""
    names = ['a "quoted" one', 'one quote " more', "a \\ path", "aten::{mm}", "fine"]
    nodes = [node(10 + i, name) for i, name in enumerate(names)]
    content = trace(*nodes, indent=indent).replace(b'\\"', b'"').replace(b"\\\\", b"\\")
    found = read(tmp_path, content)
    assert [found.nodes.names[i] for i in found.nodes.name_id][1:-1] == names[3:]
    assert codes(found) == ["nodes_skipped"]
    assert found.nodes.node_id.tolist() == [2, 13, 14, 1]


def test_a_truncated_trace_gives_its_complete_nodes(tmp_path: Path) -> None:
    content = trace(groups(*WORLD), comm(40, 1, ["0", ""], 2, "allreduce", [], [], 0, 1, 4))
    for end in range(0, len(content), 9):
        try:
            found = read(tmp_path, content[:end])
        except DataError:
            continue
        assert found.nodes.node_id.tolist() == [2, 3, 50, 1][: len(found.nodes)]
    cut = read(tmp_path, content[: content.rindex(b'{"id"')])
    assert (cut.schema, cut.pid, cut.rank, codes(cut)) == (
        "1.1.1-chakra.0.0.4", 77, 2, ["file_cut"],
    )  # fmt: skip


def test_a_truncated_compressed_trace_gives_a_note(tmp_path: Path) -> None:
    packed = gzip.compress(trace(*(node(i, f"aten::mm{i * 7919}") for i in range(9000))))
    found = read(tmp_path, packed[: len(packed) // 2])
    assert 100 < len(found.nodes) < 9000
    assert codes(found) == ["file_cut"]


@pytest.mark.parametrize(
    "content",
    [b"", b'{"nodes": []}', b'{"nodes": [', b'{"nodes": [' + b"[" * 90_000, b"\x00" * 999],
)
def test_a_file_without_nodes_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match="no complete node"):
        read(tmp_path, content)


def test_damage_raises_only_dataerror(tmp_path: Path) -> None:
    content = trace(groups(*WORLD), comm(40, 1, ["0", ""], 2, "allreduce", [], [], 0, 1, 4),
                    comm(41, [1, True], ["tp", ""], 1, "send", [], [], 2, 1, 2))  # fmt: skip
    chance = random.Random(7)
    for _ in range(500):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 6)):
            damaged[chance.randrange(len(damaged))] = chance.choice(b'0129{}[]",:-\\ab\xff\x00')
        is_execution_trace(bytes(damaged))
        try:
            read(tmp_path, bytes(damaged))
        except DataError:
            continue


def test_traces_are_recognized_by_content() -> None:
    for indent in (None, 2):
        assert is_execution_trace(trace(indent=indent))
    for other in (b"", b"\xff" * 99, b'{"nodes": [{"id": 7}]}', b'{"traceEvents": [], "nodes": [{'):
        assert not is_execution_trace(other)


def test_no_other_real_file_is_recognized_as_a_trace() -> None:
    taken = []
    for file in shared_trace(MEGATRON).parent.rglob("*.*"):
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
            if is_execution_trace(content.read(1 << 16)):
                taken.append(file.name)
    assert sorted(taken) == ["pytorch_et_0.json", "pytorch_et_1.json"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_real_trace_agrees_with_its_kineto_trace(rank: int) -> None:
    """Megatron, TP 2: 13 all-reduces of floats, that Kineto names by the same rf_id."""
    folder = shared_trace(MEGATRON)
    found = read_execution_trace(on_disk(folder / f"pytorch_et_{rank}.json"))
    assert (found.schema, found.rank, found.calls.world_size) == ("1.1.0-chakra.0.0.4", rank, 2)
    assert (len(found.nodes), len(found.calls.groups), found.notes) == (1884, 19, ())
    assert [row[1:4] for row in rows(found)] == [("all_reduce", "13", n) for n in range(79, 92)]
    assert found.calls.groups[found.calls.calls.group_id[0]] == Group("13", (0, 1), "undefined")

    (kineto,) = folder.glob(f"rank{rank}.*")
    args = [event["args"] for event in json.loads(kineto.read_text())["traceEvents"]
            if event["name"] == "record_param_comms"]  # fmt: skip
    named = {a["Record function id"]: a["In msg nelems"] * 4
             for a in args if a["Collective name"] == "allreduce"}  # fmt: skip
    assert {row[0]: row[6] for row in rows(found)} == named
    assert len(named) == 13
