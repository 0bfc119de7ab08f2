"""NCCL and RCCL debug logs of every age: who talks to whom, over what, and what was called."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.reading import on_disk
from support.required import shared_trace

from stepsplit.analyzer import (
    OPS,
    AlgorithmChoice,
    Communicator,
    CostCell,
    DataError,
    GraphPattern,
    Group,
    Member,
    NcclLog,
    NcclSetting,
    NcclWarning,
    RankCalls,
    Ring,
    RingNeighbors,
    SystemBandwidth,
    TopologyLink,
    TreeNode,
)
from stepsplit.analyzer.readers.nccl.log import is_nccl_log, read_nccl_log

AT = "node0:10:20 [0] NCCL INFO "
STREAM = "stream 0x9"


def read(tmp_path: Path, *lines: str) -> NcclLog:
    file = tmp_path / "nccl.log"
    file.write_text("\n".join(lines) + "\n")
    return read_nccl_log(on_disk(file))


def init(pid: int, rank: int, pointer: str, nranks: int = 2, comm_id: str = "0xc0") -> str:
    return (
        f"node0:{pid}:{pid} [{rank}] NCCL INFO ncclCommInitRank comm {pointer} rank {rank} "
        f"nranks {nranks} cudaDev {rank} nvmlDev {rank} busId {rank}b000 commId {comm_id} "
        "- Init COMPLETE"
    )


def call(op: str, pid: int, pointer: str, seq: int = 0, count: int = 8, root: int = 0) -> str:
    return (
        f"node0:{pid}:{pid} [0] NCCL INFO {op}: opCount {seq:x} sendbuff 0x7f recvbuff (nil) "
        f"count {count} datatype 7 op 0 root {root} comm {pointer} [nranks=2] {STREAM}"
    )


def rows(calls: RankCalls) -> list[tuple[str, int, int, int, int]]:
    """Op, seq, peer, input and message bytes of each call."""
    c = calls.calls
    columns = (c.seq, c.peer, c.input_bytes, c.message_bytes)
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    return [(OPS[op], *row) for op, row in zip(c.op.tolist(), numbers, strict=True)]


def test_only_what_nccl_writes_is_recognized() -> None:
    assert is_nccl_log(b"noise\n" + call("Send", 10, "0xa0").encode())
    assert is_nccl_log(b"\n[2026-05-05 06:16:47] n:1:1 [3] plugin/net.cc:334 (open) NCCL WARN no")
    assert not is_nccl_log(b"set NCCL_DEBUG=INFO, then look for NCCL INFO lines")


def test_calls_are_matched_to_the_initialized_communicator(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        "node0:10:10 [0] NCCL INFO NCCL version 2.21.5+cuda12.4",
        init(10, 0, "0xa0"),
        init(11, 1, "0xa1"),
        call("AllGather", 10, "0xa0", seq=10),
        call("ReduceScatter", 11, "0xa1", seq=11),
        call("Send", 10, "0xa0", seq=12, root=1),
    )
    assert log.versions == ("2.21.5+cuda12.4",)
    assert log.communicators == (
        Communicator("0xc0", 2, (
            Member(0, "node0", 10, 0, 0, "0b000", "0xa0", -1),
            Member(1, "node0", 11, 1, 1, "1b000", "0xa1", -1),
        )),
    )  # fmt: skip
    first, second = log.calls
    assert (first.rank, first.world_size, first.host, second.rank) == (0, 2, "node0", 1)
    assert first.groups == second.groups == (Group("0xc0", (0, 1), ""),)
    assert rows(first) == [("all_gather", 10, -1, 32, 64), ("send", 12, 1, 32, 32)]
    assert rows(second) == [("reduce_scatter", 11, -1, 64, 64)]
    assert first.calls.dtypes == ("float32",)
    assert set(first.calls.issued_ns.tolist() + first.dur_ns.tolist()) == {-1}
    assert (log.lines, log.nccl_lines, log.torn) == (6, 6, 0)


@pytest.mark.parametrize(
    ("op", "input_bytes", "message_bytes"),
    [
        ("AllReduce", 32, 32),
        ("AllGather", 32, 64),
        ("ReduceScatter", 64, 64),
        ("AlltoAll", 64, 64),
        ("AllToAll", 64, 64),
        ("Broadcast", 32, 32),
        ("Reduce", 32, 32),
        ("Gather", 32, 64),
        ("Scatter", 64, 64),
        ("Recv", 32, 32),
    ],
)
def test_bytes_follow_nccl_tests(
    tmp_path: Path, op: str, input_bytes: int, message_bytes: int
) -> None:
    (calls,) = read(tmp_path, call(op, 10, "0xa0")).calls
    assert rows(calls) == [(rows(calls)[0][0], 0, -1, input_bytes, message_bytes)]
    assert rows(calls)[0][0] != "unknown"


@pytest.mark.parametrize(
    "prefix",
    [
        "", " 0: ", "14: ", "[default0]:", "[1,0]<stdout>:", "    ", "[rank0]: ",
        "(RayTrainWorker pid=615, ip=10.72.7.6) ",
        "\x1b[36m(ActorClassName=W, pid=7)\x1b[0m [2025-03-18 21:25:51] ",
        "[2025-03-18 21:25:51] ", "[2025-03-18 21:25:51.250] ", "2025-03-18T21:25:51.25Z ",
        "2025-03-18T21:25:51.25Z stderr F ", "Mar 18 21:25:51 n0 job[7]: ",
        "(EngineCore_DP0 pid=7) (RayWorkerWrapper pid=615, ip=10.72.7.6) ",
    ],
)  # fmt: skip
def test_launchers_prefix_their_lines(tmp_path: Path, prefix: str) -> None:
    log = read(tmp_path, prefix + call("AllReduce", 10, "0xa0") + "\r")
    (calls,) = log.calls
    assert (calls.host, rows(calls)) == ("node0", [("all_reduce", 0, -1, 32, 32)])
    assert is_nccl_log((prefix + call("AllReduce", 10, "0xa0")).encode())
    assert log.torn == 0


def test_the_suffix_of_ray_is_removed(tmp_path: Path) -> None:
    ray = "\x1b[32m [repeated 7x across cluster]\x1b[0m (Ray deduplicates logs by default.)"
    log = read(
        tmp_path, *(AT + text + ray for text in ("Channel 00/02 :    0   1", "Using network IB"))
    )
    assert (log.rings, log.networks, log.torn) == ((Ring(-1, 0, (0, 1)),), ("IB",), 0)


def test_the_log_files_of_docker_wrap_each_line(tmp_path: Path) -> None:
    time = "2025-03-18T21:25:51.25Z"
    lines = (call("AllReduce", 10, "0xa0"), AT + "Ring 00 : 1 -> 0 -> 1", "other output")
    wrapped = [json.dumps({"log": f"{line}\n", "stream": "stderr", "time": time}) for line in lines]
    odd = ['{"log":', '{"log": "NCCL INFO", "x": ' + "[" * 10**5]
    log = read(tmp_path, *(line.replace(">", "\\u003e") for line in wrapped), *odd)
    (calls,) = log.calls
    assert (calls.host, calls.t0_unix_ns) == ("node0", 1_742_333_151_250_000_000)
    assert (log.neighbors, log.nccl_lines) == ((RingNeighbors(0, 0, 1, 0, 1),), 3)
    assert is_nccl_log("\n".join(wrapped).encode())


@pytest.mark.parametrize("suffix", ["", " acc (nil)"])
def test_rccl_names_the_global_rank(tmp_path: Path, suffix: str) -> None:
    line = call("AllReduce", 10, "0xa0").replace(" count", f"{suffix} count")
    (calls,) = read(tmp_path, line + " task 0 globalrank 5").calls
    assert (calls.rank, len(calls.calls)) == (5, 1)


def test_times_count_from_the_first_call_of_the_log(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        "[2025-03-18 21:25:51.500000] " + call("AllReduce", 10, "0xa0"),
        "[2025-03-18 21:25:50] " + call("AllReduce", 11, "0xa1"),
        call("AllReduce", 11, "0xa1"),
        "2025-03-18T22:25:52.000000001+01:00 " + call("AllReduce", 11, "0xa1"),
    )
    first, second = log.calls
    assert first.t0_unix_ns == second.t0_unix_ns == 1742333150 * 10**9
    assert first.calls.issued_ns.tolist() == [1_500_000_000]
    assert second.calls.issued_ns.tolist() == [0, -1, 2_000_000_001]


def test_interleaved_messages_are_separated(tmp_path: Path) -> None:
    whole, other = call("AllReduce", 10, "0xa0"), call("AllReduce", 11, "0xa1")
    log = read(
        tmp_path,
        whole,
        other,
        whole + other,
        "node0:10:10 [0] NCCL INFO " + other,
        whole[:80] + other,
        whole[80:],
        whole[:80],
    )
    assert [len(calls.calls) for calls in log.calls] == [2, 4]
    assert [calls.host for calls in log.calls] == ["node0", "node0"]
    assert log.torn == 4
    assert [note.code for note in log.notes] == ["nccl_torn_lines", "nccl_no_world"]


@pytest.mark.parametrize(
    "line",
    [
        "comm 0xa0 rank 0 nranks 1 cudaDev 3 busId 1b000 - Init COMPLETE",
        "comm 0xa0 rank 0 nranks 1 cudaDev 3 busId 1b000 commId 0xc0 - Init COMPLETE",
        "comm 0xa0 rank 0 nranks 1 cudaDev 3 nvmlDev 3 busId 1b000 commId 0xc0 - Init COMPLETE",
        "[Rank 0] ncclCommInitRankConfig comm 0xa0 rank 0 nranks 1 cudaDev 3 nvmlDev 3 busId 1b000 "
        "commId 0xc0 - Init START",
    ],
)
def test_a_member_of_each_version(tmp_path: Path, line: str) -> None:
    (one,) = read(tmp_path, AT + line).communicators
    nvml_dev = 3 if "nvmlDev" in line else -1
    assert one.id == ("0xc0" if "commId" in line else "0xa0@node0:10")
    assert one.members == (Member(0, "node0", 10, 3, nvml_dev, "1b000", "0xa0", -1),)


@pytest.mark.parametrize("split", ["", "splitCount 1 ", "childCount 1 "])
def test_a_split_knows_its_parent_and_the_global_ranks(tmp_path: Path, split: str) -> None:
    def child(pid: int, rank: int, parent: str, pointer: str) -> str:
        return (
            f"node0:{pid}:{pid} [{pid - 10}] NCCL INFO ncclCommSplit comm {pointer} rank {rank} "
            f"nranks 2 cudaDev {pid - 10} nvmlDev 0 busId 1 parent {parent} {split}color 7 "
            f"key {rank}- Init START"
        )

    world = [init(10 + rank, rank, f"0xa{rank}", nranks=4) for rank in range(4)]
    log = read(
        tmp_path,
        *world,
        child(11, 0, "0xa1", "0xb1"),
        child(13, 1, "0xa3", "0xb3"),
        call("Recv", 11, "0xb1", root=1),
    )
    assert [(one.nranks, one.parent, one.color) for one in log.communicators] == [
        (4, -1, None), (2, 0, 7),
    ]  # fmt: skip
    (calls,) = log.calls
    assert (calls.rank, calls.world_size) == (1, 4)
    assert calls.groups == (Group("0xb1@node0:11", (1, 3), ""),)
    assert rows(calls) == [("recv", 0, 3, 32, 32)]


def test_splits_of_an_unknown_parent_differ_by_color(tmp_path: Path) -> None:
    def child(pid: int, rank: int, color: int) -> str:
        return (
            f"node0:{pid}:{pid} [0] NCCL INFO ncclCommSplit comm 0xb{pid} rank {rank} nranks 2 "
            f"cudaDev 0 nvmlDev 0 busId 1 parent 0xa0 splitCount 1 color {color} key 0- Init START"
        )

    log = read(tmp_path, child(10, 0, 5), child(11, 0, 6), child(12, 1, 6), child(13, 1, 5))
    assert [[m.pid for m in one.members] for one in log.communicators] == [[10, 13], [11, 12]]
    assert {one.parent for one in log.communicators} == {-1}


def test_init_messages_belong_to_their_communicator(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        AT + "comm 0xa0 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0",
        AT + "Channel 00/02 :    0   1",
        AT + "Ring 00 : 1 -> 0 -> 1",
        AT + "Tree 0 : -1 -> 0 -> 1/-1/-1",
        AT + "16 coll channels, 16 collnet channels, 0 nvls channels, 24 p2p channels, 2 p2p "
        "channels per peer",
        AT + "comm 0xa0 rank 0 nranks 2 cudaDev 0 busId 1b000 commId 0xc0 - Init COMPLETE",
        AT + "Init timings - ncclCommInitRank: rank 0 nranks 2 total 2.46 (kernels 0.18, rest 0.0)",
        AT + "Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM",
    )
    assert log.communicators == (
        Communicator(
            "0xc0", 2, (Member(0, "node0", 10, 0, -1, "1b000", "0xa0", 2_460_000_000),),
            nodes=1, local_ranks=2, coll_channels=16, p2p_channels=24,
        ),
    )  # fmt: skip
    assert log.rings == (Ring(0, 0, (0, 1)),)
    assert log.neighbors == (RingNeighbors(0, 0, 1, 0, 1),)
    assert log.trees == (TreeNode(0, 0, -1, 0, (1,)),)
    assert log.links == (TopologyLink(0, 0, 1, 1, "P2P", "CUMEM"),)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("Channel 00 : 0[1b000] -> 1[1c000] via P2P/IPC/read", (0, 1, 0, "P2P", "IPC/read")),
        ("Ring 00 : 0[0] -> 1[1] via direct shared memory",
         (0, 1, 0, "SHM", "direct shared memory")),
        ("Channel 02/1 : 3[3] -> 4[4] via SHM/direct/direct", (3, 4, 2, "SHM", "direct/direct")),
        ("Channel 00/0 : 1[1] -> 0[0] via P2P/IPC comm 0xa0 nRanks 02", (1, 0, 0, "P2P", "IPC")),
        ("Ring 00 : 34 -> 33 [send] via NET/Socket/0",
         (34, 33, 0, "NET", "", "send", "Socket", 0)),
        ("Channel 01/0 : 9[1] -> 1[1] [receive] via NET/IB/3(2)/GDRDMA/Shared",
         (9, 1, 1, "NET", "GDRDMA/Shared", "receive", "IB", 3)),
        ("Channel 01/0 : 9[1] -> 1[1] [receive] via NET/AWS Libfabric/0/GDRDMA(PCI)",
         (9, 1, 1, "NET", "GDRDMA(PCI)", "receive", "AWS Libfabric", 0)),
        ("CollNet 00/0 : 0 [receive] via COLLNET/SHARP/1/GDRDMA",
         (0, -1, 0, "COLLNET", "GDRDMA", "receive", "SHARP", 1)),
    ],
)  # fmt: skip
def test_links_of_every_transport(tmp_path: Path, text: str, link: tuple[object, ...]) -> None:
    assert read(tmp_path, AT + text).links == (TopologyLink(-1, *link),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "trees",
    [
        "Trees [0] 1/2/-1->0->4 [1] -1/-1/-1->0->1",
        "Trees [0] 1/2/-1->0->4|4->0->1/2/-1 [1] -1/-1/-1->0->1|1->0->-1/-1/-1",
        "Trees [0] 4->0->1/2/-1 [1] 1->0->-1/-1/-1",
        "Trees [0] 1/2/-1->0->4 [1] -1/-1/-1->0->1 comm 0xa0 nRanks 08 busId 1000",
    ],
)
def test_trees_of_all_versions_give_the_same_nodes(tmp_path: Path, trees: str) -> None:
    expected = (TreeNode(-1, 0, 4, 0, (1, 2)), TreeNode(-1, 1, 1, 0, ()))
    assert read(tmp_path, AT + trees).trees == expected


@pytest.mark.parametrize("speed", ["speed", "bw"])
def test_graph_search_results_are_read(tmp_path: Path, speed: str) -> None:
    pattern = (
        f"Pattern 4, crossNic 0, nChannels 12, {speed} 20.0/12.5, type NVL/PIX, sameChannels 1"
    )
    log = read(
        tmp_path,
        AT + "=== System : maxBw 48.0 totalBw 370.8 ===",
        AT + pattern,
        AT + pattern,
        AT + "Using network AWS Libfabric",
        AT + "Assigned NET plugin IB to comm",
        AT + "NCCL_IB_GID_INDEX set by environment to 3.",
        AT + "Comm config MaxCTAs reset to NCCL_MAX_CTAS=8",
    )
    assert log.systems == (SystemBandwidth(48 * 10**9, 370_800_000_000),)
    assert log.patterns == (GraphPattern(4, 0, 12, 20 * 10**9, 12_500_000_000, "NVL", "PIX"),)
    assert log.networks == ("AWS Libfabric", "IB")
    assert log.settings == (
        NcclSetting("NCCL_IB_GID_INDEX", "3"),
        NcclSetting("NCCL_MAX_CTAS", "8"),
    )


OLD_TABLE = (
    AT + "Latency/AlgBw |    Tree/    LL |    Ring/Simple |",
    AT + " Max NThreads |            512 |            256 |",
    AT + "    AllReduce |     6.3/   1.5 |    18.0/   9.0 |",
)
NEW_TABLE = (
    AT + "  Algorithm   |                            Tree                  |",
    AT + "  Protocol    |             LL |          LL128 |         Simple |",
    AT + " Max NThreads |            512 |            640 |            512 |",
    AT + "    AllReduce |     6.3/   1.5 |    14.0/   0.0 |    18.0/   9.0 |",
    AT + "  Algorithm   |                             PAT                  |",
    AT + "  Protocol    |    LL |  LL128 | Simple |    LL |  LL128 | Simple |",
    AT + " Max NThreads |              0 |              0 |            640 |",
    AT + "    AllReduce |     0.0/   0.0 |     0.0/   0.0 |     8.0/   2.0 |",
)


def test_the_cost_table_of_before_2_23(tmp_path: Path) -> None:
    first, second = read(tmp_path, *OLD_TABLE, *OLD_TABLE).costs
    assert first.cells == (
        CostCell("all_reduce", "Tree", "LL", 6_300, 1_500_000_000, 512),
        CostCell("all_reduce", "Ring", "Simple", 18_000, 9 * 10**9, 256),
    )
    assert (second, first.comm, first.host, first.pid) == (first, -1, "node0", 10)


def test_the_cost_table_in_blocks_of_algorithms(tmp_path: Path) -> None:
    first, second = read(tmp_path, *NEW_TABLE, *NEW_TABLE).costs
    assert first == second
    assert [(cell.algorithm, cell.protocol) for cell in first.cells] == [
        ("Tree", "LL"), ("Tree", "LL128"), ("Tree", "Simple"),
        ("PAT", "LL"), ("PAT", "LL128"), ("PAT", "Simple"),
    ]  # fmt: skip
    assert first.cells[-1] == CostCell("all_reduce", "PAT", "Simple", 8_000, 2 * 10**9, 640)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("8 Bytes -> Algo 1 proto 0 time 9.304444",
         AlgorithmChoice("", 8, "global", "Ring", "LL", 9_304, -1, 2)),
        ("AllGather: 8 Bytes -> Algo 6 proto 2 time 9.5",
         AlgorithmChoice("all_gather", 8, "global", "PAT", "Simple", 9_500, -1, 2)),
        ("AllReduce: 8 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..31}",
         AlgorithmChoice("all_reduce", 8, "per_rank", "NVLSTree", "Simple", -1, 32, 2)),
        ("AllReduce [Symmetric]: 8 Bytes -> Kernel RSxLD nchannels 4 nthreads 512 nWorks 1",
         AlgorithmChoice("all_reduce", 8, "", "RSxLD", "Symmetric", -1, 4, 2)),
        ("AllGather [Copy Engine]: 8 Bytes -> cudaMemcpyBatch",
         AlgorithmChoice("all_gather", 8, "", "cudaMemcpyBatch", "Copy Engine", -1, -1, 2)),
    ],
)  # fmt: skip
def test_algorithm_choices_are_read(tmp_path: Path, text: str, choice: AlgorithmChoice) -> None:
    assert read(tmp_path, AT + text, AT + text).choices == (choice,)


@pytest.mark.parametrize("where", ["transport/net.cc:334", "plugin/net.cc:334 (open)"])
def test_warnings_are_counted_by_process(tmp_path: Path, where: str) -> None:
    line = f"[2026-05-05 06:16:47] node0:10:20 [3] {where} NCCL WARN no plugin"
    assert read(tmp_path, line, line).warnings == (NcclWarning("no plugin", "node0", 10, 2),)


def test_versions_are_read_in_all_spellings(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        "NCCL version 2.7.8+cuda10.2NCCL version 2.7.8+cuda10.2",
        AT + "NCCL version 2.29.7+cuda12.9",
        "RCCL version : 2.22.3-develop:abc",
        "RCCL version 2.18.6+hip6.0 HEAD:abc",
    )
    assert log.versions == (
        "2.7.8+cuda10.2", "2.29.7+cuda12.9", "RCCL 2.22.3-develop:abc", "RCCL 2.18.6+hip6.0",
    )  # fmt: skip


def test_a_reused_pointer_is_another_communicator(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        init(10, 0, "0xa0", nranks=1),
        call("AllReduce", 10, "0xa0"),
        init(10, 0, "0xa0", nranks=1, comm_id="0xc1"),
        call("AllReduce", 10, "0xa0"),
    )
    assert log.calls[0].calls.group_id.tolist() == [0, 1]
    assert [group.name for group in log.calls[0].groups] == ["0xc0", "0xc1"]


def test_damage_raises_only_data_errors(tmp_path: Path) -> None:
    text = "\n".join(
        (init(10, 0, "0xa0"), call("Send", 10, "0xa0"), AT + "Trees [0] 1/2/-1->0->4", *NEW_TABLE)
    ).encode()
    file = tmp_path / "cut.log"
    for content in [text[:size] for size in range(len(text))] + [
        text.replace(b"0", b"\xff"), bytes(range(256)) * 64 + text, b"NCCL INFO " * 1000,
        text.replace(b"2", b"99999999999999999999"), text.replace(b"0", b"9" * 5000),
        text.replace(b"nranks 2", b"nranks 999999999"),
        *(text[:at] + b"9" * 6000 + text[at:] for at in range(0, len(text), 7)),
        b"a" * 3_000_000 + b" NCCL INFO x: opCount ",
    ]:  # fmt: skip
        file.write_bytes(content)
        read_nccl_log(on_disk(file))
        is_nccl_log(content[:65536])
    file.write_bytes(gzip.compress(text)[:-9])
    assert read_nccl_log(on_disk(file)).notes[0].code == "nccl_torn_file"
    with pytest.raises(DataError, match="No such file"):
        read_nccl_log(on_disk(tmp_path / "none.log"))


LOGS = "nccl_logs"


def real(name: str) -> NcclLog:
    (file,) = shared_trace(LOGS).glob(f"*{name}*")
    return read_nccl_log(on_disk(file))


@pytest.mark.parametrize(
    ("name", "nranks", "hosts", "rings", "trees", "links"),
    [
        ("full_aws_2.18.3", 16, 2, 8, 128, 366),
        ("2.10.3_a100_n4", 32, 4, 2, 64, 152),
        ("2.10.3_v100_n4", 16, 4, 4, 64, 184),
        ("2.7.8_v100_n1", 4, 1, 12, 48, 100),
    ],
)
def test_whole_logs_of_one_communicator(
    name: str, nranks: int, hosts: int, rings: int, trees: int, links: int
) -> None:
    log = real(name)
    (one,) = log.communicators
    assert [member.rank for member in one.members] == list(range(nranks)) == list(range(one.nranks))
    assert len({member.host for member in one.members}) == hosts
    assert {len(ring.ranks) for ring in log.rings} == {min(nranks, 20)}  # 128 characters a line
    assert (len(log.rings), len(log.trees), len(log.links)) == (rings, trees, links)
    assert {link.comm for link in log.links} == {0}
    assert log.torn == 0


def test_efa_reads_gpu_memory() -> None:
    log = real("full_aws_2.18.3")
    net = [link for link in log.links if link.transport == "NET"]
    assert {(link.net, link.detail[:6]) for link in net} == {("AWS Libfabric", "GDRDMA")}
    assert (len(net), log.networks) == (96, ("AWS Libfabric",))
    assert log.communicators[0].id == "0x94343f5a50e0fc8e"
    assert (log.communicators[0].coll_channels, log.communicators[0].p2p_channels) == (8, 8)


def test_64_ranks_of_2_7_8_with_tensor_and_pipeline_communicators() -> None:
    """400 "Init COMPLETE": 128 of 64 ranks, 16 of 16, 64 of 4, 128 of 2, 64 of 1."""
    log = real("64xV100")
    sizes = [(one.nranks, len(one.members)) for one in log.communicators]
    assert {size: sizes.count(size) for size in sizes} == {
        (64, 64): 2, (16, 16): 1, (4, 4): 16, (2, 1): 128, (1, 1): 64,
    }  # fmt: skip
    assert sum(members for _, members in sizes) == 400
    assert all(
        len({member.host for member in one.members}) == 1
        for one in log.communicators
        if one.nranks == 4
    )
    assert (len(log.links), log.versions, log.torn) == (3832, ("2.7.8+cuda10.2",), 0)


def test_quoted_log_lines_are_read() -> None:
    log = real("userguide")
    assert (log.nccl_lines, sum(len(calls.calls) for calls in log.calls)) == (74, 2)
    assert [choice.count for choice in log.choices] == [3]


def test_calls_and_their_choice_agree_on_the_size() -> None:
    log = real("eks_fsdp4")
    assert log.choices[0].bytes == 37_756_928
    gathers = {row[4] for calls in log.calls for row in rows(calls) if row[0] == "all_gather"}
    assert gathers == {37_756_928}


def test_every_real_log_is_recognized_and_read() -> None:
    deep = "64xV100"  # its first line of NCCL's comes after 139,840 bytes
    for file in sorted(shared_trace(LOGS).glob("*.*")):
        expected = file.name != "SOURCE.txt" and deep not in file.name
        assert is_nccl_log(file.read_bytes()[:65536]) == expected, file.name
        content = file.read_bytes()
        log = read_nccl_log(on_disk(file))
        assert log.nccl_lines == sum(
            b"NCCL INFO" in line or b"NCCL WARN" in line for line in content.split(b"\n")
        )
        assert sum(len(calls.calls) for calls in log.calls) == content.count(b": opCount ")
