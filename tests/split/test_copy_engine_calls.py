"""Collectives of NCCL's copy engines: flags and copies, and waits that no trace has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cuda_simulator.jobs import SlowLink
from cuda_simulator.simulate import simulate
from support.builders import MAIN, GpuTrace
from support.unnamed_jobs import APART, COPIES, assert_costs, assert_true, change_traces, run

from stepsplit.analyzer import Report, analyze

GATHERS = replace(COPIES, weights_by="nccl_copies")

Span = tuple[float, float, int]
"""Start, end and bytes of a copy."""


def trace_rank(rank: int, op: str, computes_us: float, copies: list[Span]) -> GpuTrace:
    """A step of 500 us: compute, a collective by copies on three ranks, and compute from 400 us."""
    trace = GpuTrace(rank, 3, groups=[("0", "default_pg", (0, 1, 2))]).step(0, 0, 500)
    trace.kernel("gemm", 1, computes_us, launched=0)
    args = {"Collective name": op, "In msg nelems": 3000, "Out msg nelems": 9000, "dtype": "Float",
            "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2]", "Group size": 3,
            "Seq": 7}  # fmt: skip
    trace.events.append({"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1,
                         "tid": MAIN, "ts": 1, "dur": 40, "args": args})  # fmt: skip
    for number, (start, end, size) in enumerate(copies):
        trace.kernel("Memcpy DtoD (Device -> Device)", start, end, launched=2 + number, stream=20,
                     category="gpu_memcpy", bytes=size)  # fmt: skip
    return trace.kernel("gemm", 400, 499, launched=60)


def analyze_ranks(folder: Path, op: str, *ranks: tuple[float, list[Span]]) -> Report:
    for rank, (computes_us, copies) in enumerate(ranks):
        trace_rank(rank, op, computes_us, copies).write(folder)
    return analyze(folder)


def list_us(report: Report, *buckets: str) -> list[float]:
    return [sum(getattr(row, f"{one}_ns") for one in buckets) / 1000 for row in report.steps]


FLAG, DATA = 4, 12_000


def list_copies(came: float, begin: float, end: float, flags: int) -> list[Span]:
    """The first copies are flags, then the two parts of the peers, then flags."""
    half, last = (end - begin) / 2, range(flags)
    return [
        *((came + i, came + i + 1, FLAG) for i in last),
        (begin, begin + half, DATA), (begin + half, end, DATA),
        *((end + i, end + i + 1, FLAG) for i in last),
    ]  # fmt: skip


@pytest.mark.parametrize("flags", [1, 2], ids=["multicast", "to each peer"])
@pytest.mark.parametrize("op", ["_allgather_base", "alltoall_base"])
def test_a_rank_waits_from_its_first_flag_until_its_copies_begin(
    op: str, flags: int, tmp_path: Path
) -> None:
    """Rank 2 comes last, at 150 us; the copies of rank 1 take until 390 us, those of the others
    until 300 us: they wait for its data, which moves."""
    begin_us, last_us = 150 + flags, 390 + flags
    report = analyze_ranks(
        tmp_path, op,
        (50, list_copies(50, begin_us, 300, flags)),
        (100, list_copies(100, begin_us, 390, flags)),
        (150, list_copies(150, begin_us, 300, flags)),
    )  # fmt: skip
    assert list_us(report, "skew") == [100, 50, 0]
    assert list_us(report, "collective") == [last_us - 150] * 3
    assert list_us(report, "copy") == [0, 0, 0]
    assert {row.estimated for row in report.steps} == {False}
    [row] = report.collectives
    assert (row.count, row.message_bytes) == (1, 36_000 if "gather" in op else 12_000)
    assert row.transfer_ns_median == (last_us - 150) * 1000
    [message] = {row.message for row in report.warnings if row.code == "copy_engine"}
    assert message.startswith("1 collectives ran on NCCL's copy engines")
    assert not any(row.code.startswith("launches") for row in report.warnings)


@pytest.mark.parametrize(
    "sizes",
    [[DATA, DATA], [FLAG, DATA, DATA], [FLAG, DATA, FLAG, FLAG], [FLAG, FLAG]],
    ids=["no flags", "one end", "other ends", "flags alone"],
)
def test_other_copies_of_a_collective_stay_copies_that_communicate(
    sizes: list[int], tmp_path: Path
) -> None:
    copies = [(100 + 50 * i, 140 + 50 * i, size) for i, size in enumerate(sizes)]
    report = analyze_ranks(tmp_path, "_allgather_base", *[(99.0, copies)] * 3)
    assert list_us(report, "collective", "skew") == [40 * len(sizes)] * 3
    assert not [row for row in report.warnings if row.code == "copy_engine"]


@pytest.mark.parametrize("sequence", [True, False])
def test_a_late_rank_is_named_where_nccl_gathers_by_copies(sequence: bool, tmp_path: Path) -> None:
    style = replace(APART, sequence=sequence)
    simulation, report = run(GATHERS, tmp_path, style)
    assert_true(simulation, report, style)
    row = next(row for row in report.collectives if row.op == "all_gather")
    assert (row.count, row.message_bytes) == (4 * 16, 33_554_432)
    assert row.busbw_bytes_per_s == pytest.approx(7 / 8 * (row.algbw_bytes_per_s or 0))


@pytest.mark.slow
def test_a_slow_link_of_copies_is_slow_for_as_many_bytes(tmp_path: Path) -> None:
    job = replace(GATHERS, dp=16, shards=8, causes=(SlowLink("dp", 2, 3.0),))
    simulation, report = run(job, tmp_path)
    assert_costs(simulation, report, "slow_link", set(range(8)))


def test_one_rank_alone_shows_how_long_it_waited(tmp_path: Path) -> None:
    """Rank 5 is late and waits for none; rank 1 waits for it."""
    simulation = simulate(GATHERS)
    waits_ns = {}
    for rank in (1, 5):
        folder = tmp_path / str(rank)
        simulation.write(folder, APART)
        change_traces(folder, lambda own, trace, rank=rank: trace if own == rank else None)
        report = analyze(folder)
        assert all(row.estimated for row in report.steps)
        waits_ns[rank] = next(r.wait_ns_median for r in report.collectives if r.op == "all_gather")
    assert waits_ns[5] < 5_000 < waits_ns[1] * 5
