"""Tables of nccl-tests and rccl-tests of every age: sizes, times and bandwidths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.reading import on_disk
from support.required import SHARED_TRACES, shared_trace

from stepsplit.analyzer import DataError, Sweep, SweepRow, Sweeps, Timing, read_files
from stepsplit.analyzer.readers.nccl.log import is_nccl_log as is_nccl_log
from stepsplit.analyzer.readers.nccl.nccl_tests import is_sweep, read_sweeps

NEW = """\
# nccl-tests version 2.18.2 nccl-headers=23007 nccl-library=23007
# Collective test starting: all_gather_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 1 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid  15784 on  nid007106 device  0 [0009:01:00] NVIDIA GH200 120GB
#  Rank  1 Group  0 Pid  24926 on  nid007109 device  0 [0x0f] NVIDIA GH200 120GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576        131072     float    none      -1    50.00   20.97   10.49       0    40.00   26.21   13.11       3
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 11.8
#
# Collective test concluded: all_gather_perf
"""  # noqa: E501
ROW = SweepRow(
    message_bytes=1048576,
    count=131072,
    dtype="float32",
    redop="none",
    root=-1,
    out_of_place=Timing(50_000, 20_970_000_000, 10_490_000_000, 0),
    in_place=Timing(40_000, 26_210_000_000, 13_110_000_000, 3),
)
SUM = "     1048576        262144     float     sum      -1    50.00   20.97   20.97       0"


def read(tmp_path: Path, text: str | bytes) -> Sweeps:
    file = tmp_path / "sweep.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_sweeps(on_disk(file))


@pytest.mark.parametrize("prefix", ["", " 0: ", "[1,0]<stdout>:", "    ", "[0] "])
def test_a_current_table(tmp_path: Path, prefix: str) -> None:
    text = "".join(prefix + line + "\r\n" for line in NEW.splitlines())
    found = read(tmp_path, text)
    assert found.sweeps == (
        Sweep(
            source=str(tmp_path / "sweep.txt"),
            op="all_gather",
            nranks=2,
            devices=("NVIDIA GH200 120GB", "NVIDIA GH200 120GB"),
            rows=(ROW,),
            avg_busbw_bytes_per_s=11_800_000_000,
        ),
    )
    assert found.notes == ()
    assert is_sweep(text.encode())


@pytest.mark.parametrize(
    ("row", "op", "root"),
    [
        ("1048576 262144 float sum -1 9 9.00 12.00 0", "all_reduce", -1),
        ("1048576 262144 float sum -1 9 9.00 9.00 0", "", -1),
        ("1048576 262144 float sum 9 9.00 9.00 0e+00", "all_reduce", -1),
        ("1048576 262144 float sum 3 9 9.00 9.00 0", "reduce", 3),
        ("1048576 262144 float 0 9 9.00 9.00 N/A", "broadcast", 0),
        ("1048576 131072 bfloat16 sum -1 9 9.00 8.00 0", "reduce_scatter", -1),
        ("1048576 131072 float none -1 9 9.00 8.00 0", "", -1),
        ("1048576 131072 float none 0 9 9.00 8.00 0", "", 0),
        ("1048576 131072 float 9 9.00 9.00 0e+00", "all_gather", -1),
        ("1048576 262144 float none -1 9 9.00 9.00 0", "send_recv", -1),
    ],
)
def test_the_op_is_what_columns_and_sizes_allow(
    tmp_path: Path, row: str, op: str, root: int
) -> None:
    found = read(tmp_path, f"  {row}  9 9.00 8.00 0\n")
    assert [(sweep.op, sweep.nranks, sweep.rows[0].root) for sweep in found.sweeps] == [
        (op, -1, root)
    ]
    assert [note.code for note in found.notes] == ["nccl_tests_op"]


@pytest.mark.parametrize(
    ("command", "op"),
    [
        ("mpirun ./build/alltoall_perf -b 8 -e 1G", "all_to_all"),
        ("# Collective test starting: all_gather_perf_mpi", "all_gather"),
        ("srun all_reduce_perf -b 8", ""),
    ],
)
def test_the_program_names_the_op_where_the_table_allows_it(
    tmp_path: Path, command: str, op: str
) -> None:
    row = "  1048576 131072 float none -1 9 9.00 8.00 0 9 9.00 8.00 0\n"
    assert read(tmp_path, f"{command}\n{row}").sweeps[0].op == op


@pytest.mark.parametrize(
    ("program", "last", "op"),
    [("", 1, ""), ("sendrecv_perf", 1, "send_recv"), ("all_reduce_perf", 1, "all_reduce"),
     ("", 2, "send_recv")],
)  # fmt: skip
def test_send_recv_prints_a_redop_too(tmp_path: Path, program: str, last: int, op: str) -> None:
    device = f"#  Rank {last:2} Group  0 Pid 7 on n0 device  0 [0x0f] NVIDIA A40"
    assert read(tmp_path, f"{program}\n{device}\n{SUM}\n").sweeps[0].op == op


def test_rows_may_end_with_the_time_of_day(tmp_path: Path) -> None:
    text = NEW.replace("       3\n", "       3  2026-03-04 05:06:07\n")
    assert read(tmp_path, text).sweeps[0].rows == (ROW,)


def test_columns_of_single_iterations_are_ignored(tmp_path: Path) -> None:
    each = "    48.10    53.20    53.00     1.20"
    text = NEW.replace("       0    40.00", f"       0{each}    40.00").replace(
        "       3\n", f"       3{each}\n"
    )
    assert read(tmp_path, text).sweeps[0].rows == (ROW,)


REPORT: dict[str, Any] = {
    "version": 2,
    "start_time": "2026-03-04 05:06:07",
    "args": ["./all_gather_perf", "-J", "all.json"],
    "env": ["HOME=/root"],
    "nccl_version": 22907,
    "config": {
        "ngpus": 1,
        "devices": [
            {"rank": rank, "hostname": "n0", "device_info": "NVIDIA GH200 120GB"}
            for rank in range(2)
        ],
    },
    "results": [
        {
            "size": 1048576,
            "count": 131072,
            "type": "float",
            "redop": "none",
            "root": "    -1",
            "out_of_place": {"time": 50.0, "alg_bw": 20.97, "bus_bw": 10.49, "nwrong": 0.0},
            "in_place": {"time": 40.0, "alg_bw": 26.21, "bus_bw": 13.11, "nwrong": 3.0},
            "experiment_name": "AllGather",
        }
    ],
    "average_bus_bandwidth": {"bandwidth": 11.8, "okay": "unchecked"},
}


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_report_equals_the_table(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps(REPORT, indent=indent)
    assert is_sweep(text.encode())
    assert read(tmp_path, text).sweeps == read(tmp_path, NEW).sweeps


def test_a_json_report_with_halves_that_were_not_run(tmp_path: Path) -> None:
    broken = {"time": "nan", "alg_bw": "nan", "bus_bw": "nan", "nwrong": None}
    results = [dict(REPORT["results"][0], out_of_place=None, in_place=broken)]
    (row,) = read(tmp_path, json.dumps(dict(REPORT, results=results))).sweeps[0].rows
    assert (row.out_of_place, row.in_place) == (None, None)


def test_a_truncated_json_report_is_refused(tmp_path: Path) -> None:
    text = json.dumps(REPORT)
    begin = text[: text.index('"args": ') + 8]
    for cut in [text[:size] for size in range(len(begin), len(text))] + [begin + "[" * 10**5]:
        with pytest.raises(DataError, match="incomplete nccl-tests report"):
            read(tmp_path, cut)


def test_several_tables_of_one_file(tmp_path: Path) -> None:
    cut = NEW[: NEW.index("# Out of")].replace("all_gather", "alltoall")
    found = read(tmp_path, cut + NEW + cut)
    assert [(sweep.op, sweep.avg_busbw_bytes_per_s) for sweep in found.sweeps] == [
        ("all_to_all", -1), ("all_gather", 11_800_000_000), ("all_to_all", -1),
    ]  # fmt: skip
    assert {sweep.nranks for sweep in found.sweeps} == {2}


def test_halves_that_were_not_run_or_checked(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        f"{SUM}  N/A  N/A  N/A  N/A\n{SUM}\n{SUM.replace('  0', '  N/A')}  9 9.0 9.0 N/A\n",
    )
    halves = [(row.out_of_place, row.in_place) for row in found.sweeps[0].rows]
    timing = Timing(50_000, 20_970_000_000, 20_970_000_000, 0)
    assert halves[0] == halves[1] == (timing, None)
    assert halves[2][1] == Timing(9_000, 9 * 10**9, 9 * 10**9, -1)


@pytest.mark.parametrize(
    ("heading", "time"),
    [
        ("#  bytes  N  type  op  time  algbw  busbw  res  time  algbw  busbw  res", "0.050"),
        ("#  size count type redop time algbw busbw error time algbw busbw error\n"
         "#  (B) (elements) (ms) (GB/s) (GB/s) (ms) (GB/s) (GB/s)", "0.050"),
        ("", "0.050"),
        ("", "50.0"),
    ],
)  # fmt: skip
def test_times_in_milliseconds_and_microseconds(tmp_path: Path, heading: str, time: str) -> None:
    half = f"{time} 20.97 20.97 0e+00"
    found = read(tmp_path, f"{heading}\n 1048576 262144 float sum {half} {half}\n")
    timing = Timing(50_000, 20_970_000_000, 20_970_000_000, -1)
    assert found.sweeps[0].rows[0].out_of_place == timing


def test_a_page_with_a_pasted_table(tmp_path: Path) -> None:
    page = f"# Results\n\nRun it:\n```bash\n./all_gather_perf -g 2\n```\n\n```\n{NEW}```\n"
    assert read(tmp_path, page).sweeps[0].rows == (ROW,)
    assert is_sweep(page.encode())
    assert not is_sweep(b"We like all_reduce_perf of nccl-tests: size, count, type, busbw.")


def test_torn_rows_are_counted(tmp_path: Path) -> None:
    found = read(tmp_path, f"{SUM}\n{SUM[:50]}host:1:2 [0] NCCL INFO x\n{SUM[:60]}\n{SUM}\n")
    assert len(found.sweeps[0].rows) == 2
    assert found.notes[-1].message == "2 rows are truncated; ignored"


INFO = "host:1:2 [1] NCCL INFO AllReduce: opCount 0 count 2097152 datatype 7 op 0 root 0\n"


@pytest.mark.parametrize(
    ("host", "stamp"),
    [
        ("node7", ""),
        ("7node", ""),
        ("node-1", ""),
        ("ip-10-0-0-1.ec2.internal", ""),
        ("node7", "[2025-03-18 21:25:51] "),
    ],
)
def test_rows_torn_by_the_log_are_joined(tmp_path: Path, host: str, stamp: str) -> None:
    """nccl-tests flushes a row in three parts, and NCCL's messages begin where each ends."""
    info = stamp + INFO.replace("host", host)
    [row] = [line for line in NEW.splitlines() if line.startswith("  ")]
    cells = row.split()
    parts = ["  ".join(cells[:5]), "  ".join(cells[5:9]), "  ".join(cells[9:])]
    torn = f"     {parts[0]}{info}{info}  {parts[1]}{info}  {parts[2]}\n"
    found = read(tmp_path, info + NEW.replace(f"{row}\n", torn))
    assert found.sweeps[0].rows == (ROW,)
    assert [note.message for note in found.notes] == [
        "1 rows were torn by NCCL's log; joined again"
    ]


def test_a_row_whose_rest_is_missing_is_not_joined_to_the_next(tmp_path: Path) -> None:
    found = read(tmp_path, f"{INFO}{SUM[:50]}{INFO}{SUM}\n{SUM[:60]}{INFO}# Out of bounds\n{SUM}\n")
    assert len(found.sweeps[0].rows) == 2
    assert [note.message for note in found.notes][1:] == ["2 rows are truncated; ignored"]


def test_torn_rows_alone_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "nccl.log"
    file.write_text(f"{NEW[: NEW.index('     1048576')]}{SUM[:50]}{INFO}")
    [sweep] = [one for one in read_files(file) if one.kind == "nccl-tests output"]
    assert (sweep.content, sweep.refused) == (
        None,
        "no whole row of nccl-tests: 1 rows are truncated; ignored",
    )


def test_damage_does_not_raise(tmp_path: Path) -> None:
    text = NEW.encode()
    for content in [text[:size] for size in range(len(text))] + [
        text.replace(b"0", b"\xff"), bytes(range(256)) * 64, text.replace(b"1", b"9" * 30), b"",
        b"9 " * 2_000_000,
    ]:  # fmt: skip
        read(tmp_path, content)
        is_sweep(content[:65536])


TABLES = "nccl_tests"


@pytest.mark.parametrize(
    ("name", "op", "largest_busbw", "average"),
    [
        ("allreduce", "all_reduce", 235_260_000_000, 68_404_800_000),
        ("broadcast", "broadcast", 232_810_000_000, 64_865_300_000),
        ("reduce", "reduce", 228_380_000_000, 65_018_000_000),
        ("reducescatter", "reduce_scatter", 231_520_000_000, 60_168_000_000),
        ("allgather", "", 223_390_000_000, 58_265_100_000),
    ],
)
def test_one_node_of_eight_a100(name: str, op: str, largest_busbw: int, average: int) -> None:
    (sweep,) = read_sweeps(
        on_disk(shared_trace(TABLES) / f"superbench_a100x8_nccl_{name}.txt")
    ).sweeps
    assert (sweep.op, sweep.nranks, len(sweep.rows)) == (op, 8, 34)
    assert sweep.devices == ("A100-SXM4-40GB",) * 8
    last = sweep.rows[-1]
    assert last.message_bytes == 8 << 30
    assert last.out_of_place is not None
    assert last.out_of_place.busbw_bytes_per_s == largest_busbw
    assert sweep.avg_busbw_bytes_per_s == average


def test_a_table_between_nccl_lines_is_both() -> None:
    file = shared_trace(TABLES) / "aws_p4d_16xA100_ofi_root0_scatter_or_gather_with_ncclinfo.txt"
    found = read_sweeps(on_disk(file))
    (sweep,) = found.sweeps
    assert (sweep.op, sweep.nranks, len(sweep.rows)) == ("", 16, 29)
    assert sweep.rows[-1].out_of_place == Timing(24_982_000, 85_960_000_000, 80_590_000_000, 0)
    assert sweep.avg_busbw_bytes_per_s == 20_263_500_000
    assert found.notes[0].message.endswith("scatter or gather")
    head = file.read_bytes()[:65536]
    assert (is_sweep(head), is_nccl_log(head)) == (True, True)


def test_times_sizes_and_bandwidths_of_real_rows_agree() -> None:
    """algbw is the size by the time, to the digits printed."""
    seen = 0
    for file in shared_trace(TABLES).glob("*.txt"):
        if "2080ti" in file.name:  # its all_gather printed busbw twice
            continue
        for sweep in read_sweeps(on_disk(file)).sweeps:
            for row in sweep.rows:
                half = row.out_of_place
                if half is not None and half.algbw_bytes_per_s > 10**9:
                    algbw = row.message_bytes / half.time_ns * 1e9
                    assert algbw == pytest.approx(half.algbw_bytes_per_s, rel=0.01)
                    seen += 1
    assert seen > 100


def test_no_other_real_file_is_a_table() -> None:
    shared_trace(TABLES)
    known = {
        file.name
        for file in SHARED_TRACES.rglob("*")
        if file.is_file() and is_sweep(file.read_bytes()[:65536])
    }
    assert {name.split("_")[0] for name in known} == {"superbench", "aws", "issue", "full"}
    assert {name for name in known if name.startswith("full")} == {
        "full_aws_2.18.3_16xA100_ofi_slurm-104.log"
    }
