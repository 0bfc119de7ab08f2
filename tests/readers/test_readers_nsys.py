"""Nsight Systems exports of two versions: events, calls and ranks."""

from __future__ import annotations

import gzip
import random
import sqlite3
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.nsys_builders import EPOCH_NS, NEW, OLD, Export
from support.reading import on_disk
from support.required import shared_repro, shared_trace

from stepsplit.analyzer import OPS, Category, DataError, Group, Lane, RankTrace, analyze
from stepsplit.analyzer.readers.nsys import is_nsys_export, read_nsys
from stepsplit.analyzer.readers.nsys_parquet import copy_tables_to_sqlite

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COMM = 0xF00D_0000_0000_0ABC


def read(export: Export, folder: Path, name: str = "rank0.sqlite") -> RankTrace:
    (trace,) = read_nsys(on_disk(export.write(folder / name)))
    return trace


def rows(trace: RankTrace) -> list[tuple[str, int, int, str]]:
    """Each event's category, start, duration and name."""
    e = trace.events
    names = [e.names[name] for name in e.name_id.tolist()]
    categories = [Category(category).name for category in e.category.tolist()]
    return list(zip(categories, e.start_ns.tolist(), e.dur_ns.tolist(), names, strict=True))


def calls(trace: RankTrace) -> list[tuple[str, int, int, int, int]]:
    """Each call's op, group, peer, input and message bytes."""
    c = trace.calls
    columns = (c.group_id, c.peer, c.input_bytes, c.message_bytes)
    ops = [OPS[op] for op in c.op.tolist()]
    return list(zip(ops, *(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("version", [OLD, NEW])
def test_events_have_the_names_of_kineto(tmp_path: Path, version: str) -> None:
    export = Export(version).range("iteration 5", 1_000, 9_000).kernel("gemm", 2_000, 3_000)
    export.copy(10, 4_000, 5_000).copy(1, 5_000, 5_500, memory=(1, 2)).memset(6_000, 6_001)
    trace = read(export, tmp_path)
    launches = [("RUNTIME", at, 1, "cudaLaunchKernel") for at in (1_000, 3_000, 4_000, 5_000)]
    assert sorted(rows(trace)) == sorted([
        ("ANNOTATION", 0, 8_000, "iteration 5"),
        ("KERNEL", 1_000, 1_000, "gemm"),
        ("MEMCPY", 3_000, 1_000, "Memcpy PtoP (Device -> Device)"),
        ("MEMCPY", 4_000, 500, "Memcpy HtoD (Pinned -> Device)"),
        ("MEMSET", 5_000, 1, "Memset (Device)"),
        *launches,
    ])  # fmt: skip
    assert sorted(trace.events.lanes, key=str) == sorted([
        Lane("100", "101", -1, -1), Lane("100", "", 0, 7), Lane("100", "", 0, 9),
    ], key=str)  # fmt: skip
    assert trace.events.find_launch_ns(
        np.flatnonzero(trace.events.is_category(Category.KERNEL))
    ).tolist() == [1_000]
    assert (trace.host, trace.device, trace.rank) == ("node7", "NVIDIA H100 80GB HBM3", 0)
    began = 0 if version == OLD else EPOCH_NS
    assert trace.t0_unix_ns == began + 1_000
    assert [note.code for note in trace.notes] == (["no_clock"] if version == OLD else [])


def write_as_parquet(export: Export, folder: Path) -> Path:
    """What nsys export --type parquetdir writes: the tables of the SQLite export as files."""
    folder.mkdir()
    with closing(sqlite3.connect(export.write(folder.parent / "of_parquet.sqlite"))) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master")]
        for table in tables:
            cursor = database.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in cursor.description]
            columns = [list(column) for column in zip(*cursor, strict=True)]
            if columns:
                pq.write_table(
                    pa.table(dict(zip(names, columns, strict=True))), folder / f"{table}.parquet"
                )
    return folder


@pytest.mark.parametrize("version", [OLD, NEW])
def test_an_export_in_parquet_is_read_as_the_same_in_sqlite(tmp_path: Path, version: str) -> None:
    export = Export(version).range("iteration 5", 1_000, 9_000).kernel("gemm", 2_000, 3_000)
    export.copy(10, 4_000, 5_000).memset(6_000, 6_001)
    payload = {"comm": COMM, "size": 4096, "ranks": 2} if version == NEW else {}
    export.range("ncclAllReduce", 7_600, 7_700, **payload)
    export.kernel(ALL_REDUCE, 8_000, 8_900, launched=7_650)
    folder = write_as_parquet(export, tmp_path / "report_rank3_pqtdir")

    (sqlite,) = read_nsys(on_disk(tmp_path / "of_parquet.sqlite"))
    (parquet,) = read_nsys(on_disk(folder / "StringIds.parquet"))

    assert (rows(parquet), calls(parquet)) == (rows(sqlite), calls(sqlite))
    assert (parquet.host, parquet.device) == (sqlite.host, sqlite.device)
    assert (parquet.rank, parquet.t0_unix_ns) == (3, sqlite.t0_unix_ns)
    assert calls(parquet)
    assert [step.rank for step in analyze(folder).steps] == [3]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[: len(data) // 2], "KERNEL.parquet: a damaged table"),
        (lambda data: b"PAR1 and something else", "KERNEL.parquet: a damaged table"),
    ],
)
def test_a_damaged_table_in_parquet_is_one_line(
    tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    folder = write_as_parquet(Export().kernel("gemm", 2_000, 3_000), tmp_path / "report_pqtdir")
    table = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    table.write_bytes(damage(table.read_bytes()))

    with pytest.raises(DataError, match=f"{says}.*nsys export --type sqlite"):
        analyze(folder)


def test_a_table_in_parquet_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    folder = write_as_parquet(Export().kernel("gemm", 2_000, 3_000), tmp_path / "report_pqtdir")
    run = pa.array(np.zeros(20_000_000, dtype=np.int64))
    pq.write_table(pa.table({"start": run, "end": run}), folder / "NVTX_EVENTS.parquet")

    with pytest.raises(DataError, match="unpacks to over 100 times its size"):
        analyze(folder)


def test_texts_in_parquet_that_many_rows_share_are_counted_before_they_are_copied(
    tmp_path: Path,
) -> None:
    # 640 MB of texts, of which the file has one.
    folder = write_as_parquet(Export().kernel("gemm", 2_000, 3_000), tmp_path / "report_pqtdir")
    shared = pa.DictionaryArray.from_arrays(np.zeros(40_000, dtype=np.int32), ["a" * 16_000])
    strings = pa.table({"id": pa.array(range(40_000)), "value": shared})
    pq.write_table(strings, folder / "StringIds.parquet", store_schema=False)

    begin, peak = time.process_time(), pa.total_allocated_bytes()
    with pytest.raises(DataError, match="unpacks to over 100 times its size"):
        analyze(folder)
    assert time.process_time() - begin < 5
    assert pa.default_memory_pool().max_memory() - peak < 100_000_000


def test_a_table_in_parquet_that_is_a_link_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = write_as_parquet(Export().kernel("gemm", 2_000, 3_000), tmp_path / "report_pqtdir")
    table = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    table.rename(tmp_path / "another.parquet")
    table.symlink_to(tmp_path / "another.parquet")

    with pytest.raises(DataError, match=r"KERNEL\.parquet: a link out of the folder"):
        analyze(folder)


def test_texts_in_parquet_within_the_limit_are_copied_in_parts(tmp_path: Path) -> None:
    # 200 MB of texts in one batch of rows.
    shared = pa.DictionaryArray.from_arrays(np.zeros(500, dtype=np.int32), ["a" * 400_000])
    strings = pa.table({"id": pa.array(range(500)), "value": shared})
    pq.write_table(strings, tmp_path / "StringIds.parquet", store_schema=False)

    tracemalloc.start()
    copy_tables_to_sqlite(tmp_path, "export", tmp_path / "copy.sqlite")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 30_000_000
    with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as database:
        found = database.execute("SELECT COUNT(*), SUM(id), SUM(LENGTH(value)) FROM StringIds")
        assert found.fetchone() == (500, 124_750, 200_000_000)


def test_types_of_columns_in_parquet_do_not_matter(tmp_path: Path) -> None:
    """Texts as a dictionary, times as such, and hashes that SQLite cannot have."""
    export = Export().range("iteration 5", 1_000, 9_000).kernel("gemm", 2_000, 3_000)
    folder = write_as_parquet(export, tmp_path / "report_pqtdir")
    expected = rows(read_nsys(on_disk(folder / "StringIds.parquet"))[0])
    assert expected

    path = folder / "StringIds.parquet"
    texts = pq.read_table(path)
    pq.write_table(texts.set_column(1, "value", texts["value"].dictionary_encode()), path)
    path = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    kernels = pq.read_table(path)
    for name, kind in (("start", pa.timestamp("ns")), ("end", pa.duration("ns"))):
        place = kernels.column_names.index(name)
        kernels = kernels.set_column(place, name, kernels[name].cast(kind))
    hashes = pa.array([(1 << 64) - 1] * len(kernels), pa.uint64())
    pq.write_table(kernels.append_column("hash", hashes), path)

    assert rows(read_nsys(on_disk(folder / "StringIds.parquet"))[0]) == expected


def test_marks_and_open_ranges_have_no_duration(tmp_path: Path) -> None:
    export = Export().kernel("gemm", 0, 5).range("a mark", 1, None, kind=34)
    export.range("open", 2, None).range("thread to thread", 3, 4, kind=60)
    trace = read(export, tmp_path)
    assert [row[3] for row in rows(trace) if row[0] == "ANNOTATION"] == ["thread to thread"]


@pytest.mark.parametrize("version", [OLD, NEW])
def test_ops_are_inferred_from_kernel_names_as_fallback(tmp_path: Path, version: str) -> None:
    export = Export(version).kernel(ALL_REDUCE, 0, 5).kernel("gemm", 5, 6)
    trace = read(export.kernel(SEND_RECV, 6, 7), tmp_path)
    assert calls(trace) == [("all_reduce", -1, -1, -1, -1), ("unknown", -1, -1, -1, -1)]
    assert (trace.groups, trace.backend) == ((), "nccl")


def test_size_and_communicator_are_from_the_nccl_range_around_the_launch(tmp_path: Path) -> None:
    export = Export().range("ncclAllReduce", 10, 20, comm=COMM, size=4096)
    export.kernel(ALL_REDUCE, 50, 90, launched=15).kernel(ALL_REDUCE, 95, 99, launched=30)
    export.range("ncclAllReduce", 25, 40, tid=102, comm=COMM, size=1)
    trace = read(export, tmp_path)
    assert calls(trace) == [
        ("all_reduce", 0, -1, 4096, 4096), ("all_reduce", -1, -1, -1, -1),
    ]  # fmt: skip
    assert trace.groups == (Group("0xf00d000000000abc", (), ""),)
    assert trace.calls.issued_ns.tolist() == [5, 20]


def test_the_end_of_a_group_launches_its_calls(tmp_path: Path) -> None:
    export = Export().range("ncclGroupStart", 0, 1).range("ncclSend", 2, 3, comm=1, size=10, peer=1)
    export.range("ncclRecv", 4, 5, comm=1, size=10, peer=1).range("ncclGroupEnd", 6, 20)
    export.kernel(SEND_RECV, 30, 40, launched=10)
    export.range("ncclGroupStart", 50, 51).range("ncclAllGather", 52, 53, comm=2, size=7)
    export.range("ncclReduceScatter", 54, 55, comm=2, size=9).range("ncclGroupEnd", 56, 60)
    export.kernel(ALL_GATHER, 61, 62, launched=57).kernel(REDUCE_SCATTER, 63, 64, launched=58)
    export.range("ncclRecv", 70, 75, comm=1, size=8, peer=0).kernel(SEND_RECV, 80, 85, launched=72)
    assert calls(read(export, tmp_path)) == [
        ("send_recv", 0, -1, 10, 10),
        ("all_gather", 1, -1, 7, -1),
        ("reduce_scatter", 1, -1, -1, -1),
        ("recv", 0, -1, 8, 8),
    ]


def test_old_ranges_without_payload_still_give_the_op(tmp_path: Path) -> None:
    export = Export(OLD).range("ncclSend", 0, 9).kernel(SEND_RECV, 20, 30, launched=5)
    assert calls(read(export, tmp_path)) == [("send", -1, -1, -1, -1)]


def test_processes_of_one_node_are_ranks_with_communicators(tmp_path: Path) -> None:
    export = Export().environment("HOME=/root RANK_OFFSET=9\nWORLD_SIZE=4")
    for rank, pid in ((1, 300), (0, 400)):
        export.put("MPI_RANKS", globalTid=export_tid(pid), rank=2 + rank)
        who = {"pid": pid, "tid": pid + 1}
        export.range("ncclCommInitRankConfig", 0, 9, **who, comm=COMM, ranks=2, rank=rank)
        export.range("ncclAllGather", 10, 19, **who, comm=COMM, size=100)
        export.kernel(ALL_GATHER, 20, 30, launched=12, device=rank, **who)
        export.range("ncclSend", 40, 49, **who, comm=COMM, size=5, peer=1 - rank)
        export.kernel(SEND_RECV, 50, 60, launched=42, device=rank, **who)
    first, second = read_nsys(on_disk(export.write(tmp_path / "node1.sqlite")))
    assert [(t.rank, t.world_size, t.notes) for t in (first, second)] == [(2, 4, ()), (3, 4, ())]
    assert first.groups == second.groups == (Group("0xf00d000000000abc", (2, 3), ""),)
    assert calls(first) == [("all_gather", 0, -1, 100, 200), ("send", 0, 3, 5, 5)]
    assert calls(second) == [("all_gather", 0, -1, 100, 200), ("send", 0, 2, 5, 5)]


def export_tid(pid: int) -> int:
    """The serialized id of the process's first thread."""
    return 0x2A << 56 | 0x01 << 48 | pid << 24 | pid


@pytest.mark.parametrize(
    ("name", "environment", "rank", "guessed"),
    [
        ("profile_node0_rank3.sqlite", "", 3, False),
        ("rank-12.sqlite", "", 12, False),
        ("report1.sqlite", "RANK=5;SLURM_PROCID=1", 5, False),
        ("report1.sqlite", '{"SLURM_PROCID": "6", "LOCAL_RANK": "2"}', 6, False),
        ("rank3.sqlite", "OMPI_COMM_WORLD_RANK=4", 4, False),
        ("report1.sqlite", "LOCAL_RANK=2", 0, True),
    ],
)
def test_a_rank_is_from_the_environment_or_the_name(
    tmp_path: Path, name: str, environment: str, rank: int, guessed: bool
) -> None:
    trace = read(Export().environment(environment).kernel("gemm", 0, 5), tmp_path, name)
    assert (trace.rank, trace.world_size) == (rank, rank + 1)
    assert ["rank_guessed"] * guessed == [note.code for note in trace.notes]
    assert not trace.states_size


def test_processes_without_rank_are_numbered_in_device_order(tmp_path: Path) -> None:
    export = Export().kernel("b", 0, 5, pid=7, device=1).kernel("a", 0, 5, pid=9, device=0)
    export.range("launcher", 0, 9, pid=3)
    traces = read_nsys(on_disk(export.write(tmp_path / "node.sqlite")))
    assert [(t.rank, t.events.names[t.events.name_id[0]]) for t in traces] == [(0, "a"), (1, "b")]
    assert [note.code for t in traces for note in t.notes] == ["rank_guessed", "rank_guessed"]


def export_of_processes(devices: list[int]) -> Export:
    """One process for each device, which computes for ten times its number plus one, in ns."""
    export = Export()
    for number, device in enumerate(devices):
        export.kernel("gemm", 0, 10 * (device + 1), pid=100 + number, device=device)
    return export


@pytest.mark.parametrize("devices", [[0, 1], [3, 1, 0, 2], [0, 0]])
def test_the_processes_of_one_export_are_ranks(tmp_path: Path, devices: list[int]) -> None:
    """As `nsys profile torchrun` writes it, without ranks: torchrun sets them below nsys."""
    export_of_processes(devices).write(tmp_path / "report1.sqlite")
    report = analyze(tmp_path)
    assert report.run.ranks == tuple(range(len(devices)))
    assert [row.compute_ns for row in report.steps] == [10 * (one + 1) for one in sorted(devices)]
    assert not {row.code for row in report.warnings} & {"older_captures", "ranks_missing"}


def test_the_processes_of_the_exports_of_two_nodes_are_ranks(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        export_of_processes([1, 0]).write(tmp_path / f"{node}.sqlite")
    assert [row.compute_ns for row in analyze(tmp_path).steps] == [10, 20, 10, 20]


def test_of_two_captures_of_two_processes_the_latest_counts(tmp_path: Path) -> None:
    for step in (10, 20):
        export_of_processes([0, step]).write(tmp_path / f"run_step{step}.sqlite")
    report = analyze(tmp_path)
    assert [row.compute_ns for row in report.steps] == [10, 210]
    assert [row.code for row in report.warnings if "capture" in row.code] == ["older_captures"]


def test_two_processes_of_a_real_shape() -> None:
    """Rank 0 waits 2 ms in each of four all_reduces, because rank 1 computes longer."""
    report = analyze(shared_repro("wild2") / "nsys_ranks_in_one_export" / "report1.sqlite")
    first, second = report.steps
    assert (first.collective_ns, first.skew_ns) == (4_000_000, 8_000_000)
    assert (second.compute_ns, second.skew_ns) == (33_996_000, 0)


def test_graphs_recorded_as_one_event_are_compute_with_a_note(tmp_path: Path) -> None:
    trace = read(Export().graph(0, 50), tmp_path)
    assert ("KERNEL", 0, 50, "CUDA graph") in rows(trace)
    assert [note.code for note in trace.notes] == ["graphs_whole"]


def test_a_column_missing_in_a_version_is_not_an_error(tmp_path: Path) -> None:
    path = Export().kernel("gemm", 0, 5).write(tmp_path / "rank0.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN globalPid")
        connection.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL DROP COLUMN demangledName")
        connection.execute("ALTER TABLE NVTX_EVENTS DROP COLUMN textId")
        connection.execute("DROP TABLE TARGET_INFO_GPU")
    connection.close()
    (trace,) = read_nsys(on_disk(path))
    assert ("KERNEL", 0, 5, "gemm") in rows(trace)
    assert trace.events.find_launch_ns(np.arange(2)).tolist() == [0, 0]


def test_two_ranks_meet_in_an_all_reduce(tmp_path: Path) -> None:
    """Rank 1 computes 20 us longer; the data moves 10 us; both then compute 5 us."""
    for rank, late in ((0, 0), (1, 20_000)):
        export = Export().range("ProfilerStep#3", 1_000, 90_000)
        export.kernel("gemm", 2_000, 32_000 + late, launched=1_500)
        export.range("ncclAllReduce", 3_000, 3_900)
        export.kernel(ALL_REDUCE, 32_000 + late, 62_000, launched=3_500, stream=20)
        export.kernel("adam", 62_000, 67_000, launched=4_000)
        export.write(tmp_path / f"rank{rank}.sqlite")
    found = analyze(tmp_path)
    early, late_rank = found.steps
    assert (early.compute_ns, early.skew_ns, early.collective_ns) == (35_000, 20_000, 10_000)
    assert (late_rank.compute_ns, late_rank.skew_ns, late_rank.collective_ns) == (55_000, 0, 10_000)
    assert early.step_ns == late_rank.step_ns
    assert [(row.op, row.count) for row in found.collectives] == [("all_reduce", 1)]


def test_the_members_of_a_communicator_are_the_ranks_that_name_it(tmp_path: Path) -> None:
    """As above, of files whose communicator was made before the recording began."""
    for rank, late in ((0, 0), (1, 20_000)):
        export = Export().range("ProfilerStep#3", 1_000, 90_000)
        export.kernel("gemm", 2_000, 32_000 + late, launched=1_500)
        export.range("ncclAllReduce", 3_000, 3_900, comm=COMM, size=4096)
        export.kernel(ALL_REDUCE, 32_000 + late, 62_000, launched=3_500, stream=20)
        export.kernel("adam", 62_000, 67_000, launched=4_000)
        export.write(tmp_path / f"report_{rank}.sqlite")
    report = analyze(tmp_path)
    assert [(row.compute_ns, row.skew_ns, row.collective_ns) for row in report.steps] == [
        (35_000, 20_000, 10_000),
        (55_000, 0, 10_000),
    ]
    assert [row.ranks for row in report.groups] == [(0, 1)]
    assert [row.code for row in report.warnings if "rank" in row.code] == ["rank_guessed"] * 2


def small(folder: Path) -> Path:
    export = Export().range("ncclAllReduce", 10, 20, comm=COMM, size=4096)
    return export.kernel(ALL_REDUCE, 50, 90, launched=15).write(folder / "rank0.sqlite")


def test_a_compressed_export_gives_the_same(tmp_path: Path) -> None:
    path = small(tmp_path)
    packed = tmp_path / "rank0.sqlite.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    (plain,), (unpacked,) = read_nsys(on_disk(path)), read_nsys(on_disk(packed))
    assert (rows(plain), calls(plain)) == (rows(unpacked), calls(unpacked))
    packed.write_bytes(packed.read_bytes()[:-30])
    with pytest.raises(DataError, match="compressed file is damaged"):
        read_nsys(on_disk(packed))


def test_a_damaged_export_is_an_error_of_one_line(tmp_path: Path) -> None:
    whole = small(tmp_path).read_bytes()
    torn, dice = tmp_path / "torn.sqlite", random.Random(5)
    damaged = [whole[:size] for size in range(0, len(whole), 997)]
    for _ in range(150):
        change = bytearray(whole)
        for _ in range(20):
            change[dice.randrange(16, len(whole))] = dice.randrange(256)
        damaged.append(bytes(change))
    for content in damaged:
        torn.write_bytes(content)
        assert isinstance(is_nsys_export(content[: 1 << 16]), bool)
        try:
            read_nsys(on_disk(torn))
        except DataError as error:
            assert str(error).startswith(f"{torn}: ")
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DROP TABLE StringIds", "not an Nsight Systems export"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "no GPU kernels"),
        ("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL", "no GPU kernels"),
        (
            "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME TO k; CREATE VIEW "
            "CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE e(start) AS (SELECT 1 UNION ALL "
            "SELECT start FROM e) SELECT start, start AS end FROM e",
            "no GPU kernels",
        ),
    ],
)
def test_an_export_without_kernels_gives_a_hint_how_to_record_them(
    tmp_path: Path, change: str, problem: str
) -> None:
    path = small(tmp_path)
    connection = sqlite3.connect(path)
    connection.executescript(change)
    connection.close()
    with pytest.raises(DataError, match=problem) as caught:
        read_nsys(on_disk(path))
    assert "nsys" in caught.value.hint


def test_values_of_unexpected_types_are_read(tmp_path: Path) -> None:
    path = small(tmp_path)
    with sqlite3.connect(path) as connection:
        for values in ("'x', 1e300, 'a', NULL", "-9e18, 9e18, 1, 1", "NULL, NULL, x'ff', 3.5"):
            connection.execute("PRAGMA ignore_check_constraints = ON")
            connection.execute(
                "INSERT OR IGNORE INTO NVTX_EVENTS (start, end, globalTid, eventType) "
                f"VALUES ({values})"
            )
        connection.execute("UPDATE NVTX_EVENTS SET binaryData = x'00ff', text = x'fffe00'")
    connection.close()
    (trace,) = read_nsys(on_disk(path))
    assert calls(trace)[0][0] == "all_reduce"


def test_exports_are_recognized_by_their_tables(tmp_path: Path) -> None:
    head = small(tmp_path).read_bytes()[: 1 << 16]
    assert is_nsys_export(head)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE runs (id INTEGER)")
    connection.close()
    assert not is_nsys_export(other.read_bytes())
    assert not is_nsys_export(b"")
    assert not is_nsys_export(head[15:])


def test_no_other_real_file_is_recognized_as_an_export() -> None:
    folder = shared_trace("kineto_megatron_tp2_v100").parent
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as content:
            assert not is_nsys_export(content.read(1 << 16)), path


def test_an_export_of_the_second_node_says_that_lower_ranks_are_missing(tmp_path: Path) -> None:
    export = Export()
    for rank in (2, 3):
        export.put("MPI_RANKS", globalTid=export_tid(100 + rank), rank=rank)
        who = {"pid": 100 + rank, "tid": 101 + rank}
        export.range("ncclCommInitRankConfig", 0, 9, **who, comm=COMM, ranks=8, rank=rank)
        export.kernel("gemm", 20, 30, device=rank - 2, **who)
    export.write(tmp_path / "node1.sqlite")
    (text,) = [row.message for row in analyze(tmp_path).warnings if row.code == "ranks_missing"]
    assert text == "at least 6 ranks are missing from the recording: 0, 1, 4, 5, 6, 7"
