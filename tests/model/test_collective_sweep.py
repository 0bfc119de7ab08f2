"""Measured sweeps and NCCL's own table, before the closed form."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from statistics import mean

import pytest
from support.published_sweeps import A100, ALPS, measured
from support.required import shared_trace

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_measured import (
    Rates,
    TransferSweep,
    TunerCost,
    TunerTable,
    build_sweeps,
    build_tuner_table,
    build_tuner_tables,
)
from stepsplit.analyzer.model.comm_time import time_of
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.rank_layout import GroupPlacement
from stepsplit.analyzer.readers.nccl import nccl_tests as read
from stepsplit.analyzer.readers.nccl.log import read_nccl_log
from stepsplit.analyzer.readers.sources import DiskFile

EIGHT = GroupPlacement(8, 8)
SWEEP = TransferSweep("all_gather", 8, 8, (1_000, 4_000, 16_000), (10_000.0, 20_000.0, 80_000.0))


def test_between_two_sizes_the_logarithm_of_time_is_linear() -> None:
    assert [SWEEP.interpolate_ns(size) for size in (1_000, 2_000, 4_000, 8_000)] == pytest.approx(
        [10_000, 10_000 * 2**0.5, 20_000, 40_000]
    )


def test_below_the_sweep_time_is_constant_and_beyond_it_bandwidth_is() -> None:
    assert [SWEEP.interpolate_ns(size) for size in (1, 16_000, 32_000)] == [10_000, 80_000, 160_000]


@pytest.mark.parametrize(
    ("sizes", "times", "expected"),
    [
        ((8, 16), (1.0,), "2 sizes but 1 times"),
        ((), (), "0 sizes but 0 times"),
        ((16, 8), (1.0, 2.0), "ascending sizes"),
        ((8, 16), (1.0, 0.0), "times > 0"),
    ],
)
def test_invalid_sizes_and_times_of_a_sweep_are_refused(
    sizes: tuple[int, ...], times: tuple[float, ...], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        TransferSweep("send", 2, 2, sizes, times)


def row(
    message_bytes: int, out_of_place_ns: int, wrong: int = 0, in_place_ns: int = 7
) -> read.SweepRow:
    out = read.Timing(out_of_place_ns, -1, -1, wrong) if out_of_place_ns else None
    inside = read.Timing(in_place_ns, -1, -1, 0)
    return read.SweepRow(message_bytes, 1, "float32", "", -1, out, inside)


def table(op: str, nranks: int, *rows: read.SweepRow) -> read.Sweep:
    return read.Sweep("sweep.txt", op, nranks, (), rows, -1)


def test_tables_of_nccl_tests_become_sweeps_without_their_wrong_rows() -> None:
    tables = [
        table("send_recv", 8, row(16, 200), row(8, 100), row(32, 1, wrong=3), row(16, 999)),
        table("all_gather", 2, row(8, 0)),
        table("", 8, row(8, 100)),
        table("reduce", -1, row(8, 100)),
    ]
    assert build_sweeps(tables, ranks_per_node=4) == (
        TransferSweep("send", 8, 4, (8, 16), (100.0, 200.0)),
        TransferSweep("all_gather", 2, 2, (8,), (7.0,)),
    )
    assert build_sweeps(tables)[0].ranks_per_node == 8


def test_a_sweep_of_the_same_ranks_is_preferred() -> None:
    rates = Rates((SWEEP,), (TunerTable(8, 8, (TunerCost("all_gather", 1.0, 1e9),)),))
    assert rates.estimate_call_time("all_gather", 4_000, EIGHT, A100) == Band(
        20_000, 16_000, 25_000
    )


def test_a_sweep_of_other_ranks_is_scaled_by_the_closed_form() -> None:
    four = GroupPlacement(4, 4)
    ratio = (
        time_of("all_gather", 4_000, four, A100).ns / time_of("all_gather", 4_000, EIGHT, A100).ns
    )
    assert 0.4 < ratio < 0.9
    found = Rates((SWEEP,)).estimate_call_time("all_gather", 4_000, four, A100)
    assert astuple(found)[:3] == pytest.approx((20_000 * ratio, 12_000 * ratio, 34_000 * ratio))


def test_the_sweep_with_the_closest_number_of_ranks_is_used() -> None:
    near = TransferSweep("all_gather", 4, 4, (1_000,), (1.0,))
    rates = Rates((SWEEP, near))
    assert rates.estimate_call_time("all_gather", 1_000, GroupPlacement(4, 4), A100).ns == 1.0


@pytest.mark.parametrize(
    ("op", "span"),
    [
        ("all_reduce", EIGHT),
        ("all_gather", GroupPlacement(16, 8)),
        ("all_gather", GroupPlacement(64, 64)),
    ],
)
def test_other_ops_and_much_larger_or_inter_node_groups_use_no_sweep(
    op: str, span: GroupPlacement
) -> None:
    assert Rates((SWEEP,)).estimate_call_time(op, 4_000, span, A100) == time_of(
        op, 4_000, span, A100
    )


def test_without_a_sweep_the_fastest_cell_of_nccls_table_is_used() -> None:
    costs = (TunerCost("all_reduce", 5_000.0, 1e9), TunerCost("all_reduce", 30_000.0, 100e9))
    rates = Rates(tables=(TunerTable(8, 8, costs),))
    assert rates.estimate_call_time("all_reduce", 1_000, EIGHT, A100).ns == 6_000
    assert rates.estimate_call_time("all_reduce", 1_000_000, EIGHT, A100) == Band(
        40_000, 24_000, 80_000
    )
    other = GroupPlacement(16, 8)
    assert rates.estimate_call_time("all_reduce", 8, other, A100) == time_of(
        "all_reduce", 8, other, A100
    )


def test_recv_is_measured_as_send() -> None:
    rates = Rates((TransferSweep("send", 2, 1, (1_000,), (5.0,)),))
    assert rates.estimate_call_time("recv", 1_000, GroupPlacement(2, 1), A100).ns == 5.0


def test_a_single_rank_takes_no_time() -> None:
    assert Rates((SWEEP,)).estimate_call_time(
        "all_gather", 4_000, GroupPlacement(1, 1), A100
    ) == Band(0, 0, 0)


LOG = """\
{0}:10:10 [0] NCCL INFO ncclCommInitRank comm 0xa0 rank 0 nranks 2 cudaDev 0 nvmlDev 0 \
busId 0b000 commId 0xc0 - Init COMPLETE
{1}:11:11 [1] NCCL INFO ncclCommInitRank comm 0xa1 rank 1 nranks 2 cudaDev 1 nvmlDev 1 \
busId 1b000 commId 0xc0 - Init COMPLETE
{0}:10:20 [0] NCCL INFO Latency/AlgBw |    Tree/    LL |    Ring/Simple |
{0}:10:20 [0] NCCL INFO  Max NThreads |            512 |            256 |
{0}:10:20 [0] NCCL INFO     AllReduce |     6.3/   0.0 |    10.0/   9.0 |
{0}:10:20 [0] NCCL INFO     Broadcast |     0.0/   0.0 |    10.0/   9.0 |
"""


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (
            ("a", "a"),
            TunerTable(2, 2, (TunerCost("all_reduce", 1e4, 9e9), TunerCost("broadcast", 1e4, 9e9))),
        ),
        (
            ("a", "b"),
            TunerTable(
                2, 1, (TunerCost("all_reduce", 1.4e4, 9e9), TunerCost("broadcast", 1e4, 9e9))
            ),
        ),
    ],
)
def test_the_table_of_a_log_knows_its_ranks_and_nodes(
    tmp_path: Path, hosts: tuple[str, str], expected: TunerTable
) -> None:
    file = tmp_path / "nccl.log"
    file.write_text(LOG.format(*hosts))
    assert build_tuner_tables(read_nccl_log(DiskFile(file))) == (expected,)


def test_a_real_table_without_a_communicator_is_used_for_given_ranks() -> None:
    folder = shared_trace("nccl_logs")
    log = read_nccl_log(DiskFile(folder / "issue_nccltests_89_2.8.3_tuning_table.log"))
    assert build_tuner_tables(log) == ()
    table = build_tuner_table(log.costs[0], EIGHT)
    assert table.estimate_ns("broadcast", 9_000_000) == 18_000 + 1_000_000
    assert table.estimate_ns("all_reduce", 9_000_000) is None


def test_one_size_left_out_of_a_sweep_of_one_node_is_within_8_percent() -> None:
    rows = measured()
    for system in ("1x8 A100 (NVLink3)", "1x8 B200 p6-b200 (NVLink5)", "Alps, 1 nodes"):
        points = [(one.message_bytes, one.ns) for one in rows if one.system == system]
        errors = []
        for i in range(1, len(points) - 1):
            sizes, times = zip(*points[:i], *points[i + 1 :], strict=True)
            size, ns = points[i]
            errors.append(
                abs(TransferSweep("all_reduce", 8, 8, sizes, times).interpolate_ns(size) / ns - 1)
            )
        assert len(errors) >= 18
        assert mean(errors) <= 0.08


def test_a_sweep_of_16_nodes_is_more_accurate_than_the_closed_form() -> None:
    rows = [one for one in measured() if one.system == "Alps, 16 nodes"]
    known = [one for one in rows if one.fitted]
    sweep = TransferSweep(
        "all_reduce", 64, 4,
        tuple(one.message_bytes for one in known), tuple(one.ns for one in known),
    )  # fmt: skip
    asked = [one for one in rows if not one.fitted and one.message_bytes > known[0].message_bytes]
    rates = Rates((sweep,))

    def error(of: Rates) -> float:
        each = (
            of.estimate_call_time("all_reduce", one.message_bytes, one.span, ALPS).ns / one.ns
            for one in asked
        )
        return mean(abs(ratio - 1) for ratio in each)

    assert error(rates) < 0.15 < error(Rates())
