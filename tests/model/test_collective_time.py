"""The time of one collective by the closed form, worked by hand and against published sweeps."""

from __future__ import annotations

from dataclasses import astuple, replace
from statistics import mean, median
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support.published_sweeps import (
    A100,
    ALPS,
    B200,
    GIB,
    H200,
    MI300X,
    MIB,
    Measured,
    cluster,
    measured,
)
from support.work_builders import DEVICE, job

from stepsplit.analyzer import Rates, TransferSweep, collective_time
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.model.comm_time import (
    TIMED_OPS,
    compute_ring_ns,
    compute_tree_limit_bytes,
    compute_tree_ns,
    time_of,
)
from stepsplit.analyzer.model.config import HardwareConfig, Link, ParallelConfig
from stepsplit.analyzer.model.hardware_config import load_hardware
from stepsplit.analyzer.model.prediction import Band
from stepsplit.analyzer.model.preset_names import list_hardware_names
from stepsplit.analyzer.model.rank_layout import GroupPlacement, place_group
from stepsplit.analyzer.ops import compute_busbw_factor

US, MS = 1_000, 1_000_000
PLAIN = cluster(Link("nvlink", 400e9, 0.5, 1_000), Link("net", 25e9, 0.8, 10_000), 4)
"""200 GB/s of ring inside a node, 20 GB/s a NIC."""
ONE, TWO, FOUR = GroupPlacement(4, 4), GroupPlacement(8, 4), GroupPlacement(16, 4)


def ns(
    op: str, message_bytes: float, span: GroupPlacement, hardware: HardwareConfig = PLAIN
) -> float:
    return time_of(op, message_bytes, span, hardware).ns


def test_a_large_all_gather_takes_three_steps_and_three_quarters_of_the_buffer() -> None:
    total = 8_400 + 3 * 1_000 + 3 * MS
    band = time_of("all_gather", 800_000_000, ONE, PLAIN)
    assert astuple(band)[:3] == pytest.approx((total, 0.87 * total, 1.15 * total))


def test_a_small_all_gather_uses_ll_at_half_the_rate() -> None:
    total = 6_600 + 3 * 180 + 2 * 15
    band = time_of("all_gather", 4_000, ONE, PLAIN)
    assert astuple(band)[:3] == pytest.approx((total, 0.7 * total, 1.4 * total))


def test_rings_over_nodes_reach_the_rate_of_all_nics_of_a_node() -> None:
    passed_on = 8_400 + 12 * 550 + 3 * 10_000
    assert ns("reduce_scatter", 1.28e9, FOUR) == pytest.approx(passed_on + 15 * MS)
    assert ns("broadcast", 0.8e9, FOUR) == pytest.approx(8_400 + 3 * 1_000 + 3 * 10_000 + 10 * MS)


def test_between_two_nodes_a_tree_moves_the_buffer_once_a_ring_nearly_twice() -> None:
    assert ns("all_reduce", 0.8e9, TWO) == pytest.approx(8_400 + 6 * 1_000 + 2 * 10_000 + 10 * MS)
    assert compute_ring_ns("all_reduce", 0.8e9, TWO, PLAIN) > 17.5 * MS


def test_a_doubling_of_nodes_adds_two_levels_to_a_small_all_reduce() -> None:
    times = [ns("all_reduce", 8, GroupPlacement(4 * nodes, 4)) for nodes in (4, 8, 16)]
    assert times[1] - times[0] == pytest.approx(2 * 3_600)
    assert times[2] - times[1] == pytest.approx(2 * 3_600)


def test_large_messages_over_many_nodes_use_the_ring() -> None:
    until = compute_tree_limit_bytes(FOUR, PLAIN)
    assert ns("all_reduce", until / 4, FOUR) == compute_tree_ns(until / 4, FOUR, PLAIN)
    assert ns("all_reduce", until * 4, FOUR) == compute_ring_ns(
        "all_reduce", until * 4, FOUR, PLAIN
    )


def test_near_the_switch_the_band_covers_both_algorithms() -> None:
    near = compute_tree_limit_bytes(FOUR, PLAIN) * 0.9
    band = time_of("all_reduce", near, FOUR, PLAIN)
    ring = compute_ring_ns("all_reduce", near, FOUR, PLAIN)
    assert band.low_ns == ring < 0.85 * band.ns
    assert band.high_ns == pytest.approx(1.9 * band.ns)


def test_more_than_64_nodes_make_the_band_wider() -> None:
    few = time_of("all_gather", GIB, GroupPlacement(256, 4), PLAIN)
    many = time_of("all_gather", GIB, GroupPlacement(260, 4), PLAIN)
    assert (few.low_ns / few.ns, few.high_ns / few.ns) == pytest.approx((0.75, 1.36))
    assert (many.low_ns / many.ns, many.high_ns / many.ns) == pytest.approx((0.8, 1.9))


def test_nvls_needs_five_ranks_and_an_all_reduce() -> None:
    summing = cluster(PLAIN.intra, PLAIN.inter, 8, nvls=1.0)
    of_five = ns("all_reduce", 40e9, GroupPlacement(5, 5), summing)
    assert of_five == pytest.approx(90 * US + 175 * MS)  # 400 GB/s over 2 (8-1)/8
    assert of_five < ns("all_reduce", 40e9, GroupPlacement(5, 5), PLAIN)
    assert ns("all_reduce", 40e9, ONE, summing) == ns("all_reduce", 40e9, ONE)
    assert ns("all_gather", 40e9, GroupPlacement(5, 5), summing) == ns(
        "all_gather", 40e9, GroupPlacement(5, 5)
    )


def test_an_all_to_all_waits_for_the_slower_of_node_and_network() -> None:
    assert ns("all_to_all", 1.6e9, ONE) == pytest.approx(8_400 + 1_000 + 6 * MS / 0.89)
    slower = 1 + (0.34e6 / 200e6) ** 0.5
    assert ns("all_to_all", 1.6e9, TWO) == pytest.approx(8_400 + 10_000 + 40 * MS * slower)


def test_small_messages_of_an_all_to_all_reach_half_of_the_rate_between_nodes() -> None:
    assert ns("all_to_all", 8 * 0.34e6, TWO) == pytest.approx(8_400 + 10_000 + 2 * 4 * 0.34e6 / 20)


def test_an_all_to_all_of_one_rank_a_node_uses_no_link_inside() -> None:
    """Also on MI300X, whose links one GPU of a node has none of."""
    one_each = GroupPlacement(4, 1)
    for hardware in (PLAIN, load_hardware("mi300x")):
        assert 0 < ns("all_to_all", 1e8, one_each, hardware) < 100 * MS


def test_a_gather_over_many_ranks_waits_for_all_of_its_steps() -> None:
    """Each rank's part passes all others, however small it is; over InfiniBand with LL128."""
    many = GroupPlacement(256, 8)
    waits = 31 * 10_000 + 224 * 550
    took = ns("all_gather", 64e6, many)
    assert took == pytest.approx(8_400 + waits + 64e6 * 255 / 256 / 160)
    sold = cluster(PLAIN.intra, replace(PLAIN.inter, name="ib-ours"), 8)
    assert ns("all_gather", 64e6, many, sold) == pytest.approx(
        14_000 + waits / 2 + 64e6 * 255 / 256 / 160 / 0.92
    )
    assert ns("broadcast", 64e6, many, sold) == ns("broadcast", 64e6, many)


def test_a_message_takes_the_latency_and_bytes_of_the_link_between_its_ranks() -> None:
    assert ns("send", 200_000_000, GroupPlacement(2, 2)) == pytest.approx(8_400 + 1_000 + MS)
    assert ns("recv", 200_000_000, GroupPlacement(2, 1)) == pytest.approx(8_400 + 10_000 + 10 * MS)
    assert ns("send", 8, GroupPlacement(2, 2)) == pytest.approx(6_600 + 180, abs=1)


def test_two_gpus_of_a_mesh_share_one_of_its_links() -> None:
    """Published for 2 of 8 MI300X: 47.7 GB/s; the share of 8 is the one that was fitted."""
    took = ns("all_reduce", 4 * GIB, GroupPlacement(2, 2), MI300X)
    assert 4 * GIB / took == pytest.approx(47.671, rel=0.07)


def test_the_dies_of_mi250x_are_no_mesh_so_that_two_use_a_connection_as_fast_as_eight() -> None:
    dies, rate = load_hardware("mi250x"), 50e9 * 0.8
    for ranks in (2, 4, 8):
        took = ns("all_gather", 4 * GIB, GroupPlacement(ranks, ranks), dies)
        busbw = 4 * GIB * (ranks - 1) / ranks / took * 1e9
        assert busbw == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("op", TIMED_OPS)
def test_a_single_rank_and_an_empty_message_take_no_time(op: str) -> None:
    assert time_of(op, GIB, GroupPlacement(1, 1), PLAIN) == Band(0, 0, 0)
    assert time_of(op, 0, TWO, PLAIN) == Band(0, 0, 0)


@pytest.mark.parametrize("op", TIMED_OPS)
@pytest.mark.parametrize("hardware", [A100, H200, B200, ALPS, MI300X])
def test_a_larger_message_never_takes_less(op: str, hardware: HardwareConfig) -> None:
    for nodes in (1, 2, 3, 16, 256):
        span = GroupPlacement(4 * nodes, 4)
        times = [ns(op, 2 ** (k / 4), span, hardware) for k in range(140)]
        assert times == sorted(times)


@given(
    name=st.sampled_from(list_hardware_names()),
    ranks_per_node=st.sampled_from((1, 2, 4, 8)),
    nodes=st.sampled_from((1, 2, 3, 4, 16, 64)),
    message_bytes=st.floats(1e3, 1e10),
    link=st.sampled_from(("intra", "inter")),
    factors=st.tuples(st.floats(1.0, 4.0), st.floats(1.0, 4.0)),
)
def test_a_faster_link_never_makes_a_message_slower(
    name: str,
    ranks_per_node: int,
    nodes: int,
    message_bytes: float,
    link: str,
    factors: tuple[float, float],
) -> None:
    """Whatever algorithm NCCL then chooses."""
    hardware, span = load_hardware(name), GroupPlacement(ranks_per_node * nodes, ranks_per_node)
    plain: Link = getattr(hardware, link)
    fast = replace(
        plain,
        bytes_per_s=plain.bytes_per_s * factors[0],
        latency_ns=plain.latency_ns / factors[1],
    )
    before_ns = ns("all_reduce", message_bytes, span, hardware)
    after_ns = ns("all_reduce", message_bytes, span, replace(hardware, **{link: fast}))
    assert after_ns <= before_ns * (1 + 1e-9)


@pytest.mark.parametrize(
    "span",
    [GroupPlacement(2, 2), GroupPlacement(8, 8), GroupPlacement(16, 8), GroupPlacement(2, 1)],
)
def test_within_two_nodes_all_reduce_takes_the_best_algorithm(span: GroupPlacement) -> None:
    for message_bytes in (8, MIB, GIB):
        took = ns("all_reduce", message_bytes, span, H200)
        assert took <= compute_ring_ns("all_reduce", message_bytes, span, H200)
        assert took <= compute_tree_ns(message_bytes, span, H200)


def test_gloo_over_loopback_takes_milliseconds_where_gpus_take_microseconds() -> None:
    cpu = cluster(Link("loopback", 2e9, 0.5, 50_000), Link("ethernet-10", 1.25e9, 0.8, 30_000))
    assert ns("all_reduce", MIB, ONE, cpu) == pytest.approx(8_400 + 6 * 50_000 + 1.5 * MIB)


@pytest.mark.parametrize(
    ("op", "message_bytes", "span", "expected"),
    [
        ("allreduce", 8, ONE, "op 'allreduce' has no time model; use one of all_reduce, "),
        ("send", -8, ONE, "message_bytes (-8) must be >= 0"),
        ("send", 8, GroupPlacement(4, 8), "ranks_per_node (8) must be between 1 and ranks (4)"),
    ],
)
def test_invalid_calls_are_refused(
    op: str, message_bytes: int, span: GroupPlacement, expected: str
) -> None:
    with pytest.raises(UsageError) as refused:
        time_of(op, message_bytes, span, PLAIN)
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize(
    ("op", "ranks", "gigabytes_per_s"),
    [
        ("all_reduce", 4, 363.3), ("all_reduce", 5, 414.2), ("all_reduce", 6, 435.6),
        ("all_reduce", 7, 460.0), ("all_gather", 8, 361.4), ("reduce_scatter", 8, 362.9),
    ],
)  # fmt: skip
def test_ranks_and_ops_of_an_h200_node_that_were_not_fitted(
    op: str, ranks: int, gigabytes_per_s: float
) -> None:
    """ml-engineering network/README.md at 744d01e, 8 and 16 GiB."""
    busbw = (
        8
        * GIB
        * compute_busbw_factor(op, ranks)
        / ns(op, 8 * GIB, GroupPlacement(ranks, ranks), H200)
    )
    assert busbw == pytest.approx(gigabytes_per_s, rel=0.05)


def large_and_not_fitted() -> list[Measured]:
    rows = measured()
    reported = [row for row in rows if not row.fitted and row.message_bytes >= 64 * MIB]
    fitted = {(row.system, row.message_bytes) for row in rows if row.fitted}
    assert fitted.isdisjoint((row.system, row.message_bytes) for row in reported)
    return reported


def error(row: Measured) -> float:
    return abs(ns("all_reduce", row.message_bytes, row.span, row.hardware) / row.ns - 1)


def test_large_messages_inside_a_node_are_within_5_percent() -> None:
    """B200 alone is not: 15 % at 64 MiB, and at 16 GiB, where it runs another algorithm."""
    rows = [row for row in large_and_not_fitted() if row.span.nodes == 1]
    assert len(rows) == 14
    assert mean(error(row) for row in rows) <= 0.05
    assert median(error(row) for row in rows) <= 0.02


def test_large_messages_over_nodes_are_within_10_percent() -> None:
    rows = [row for row in large_and_not_fitted() if row.span.nodes > 1]
    assert len(rows) == 15
    assert median(error(row) for row in rows) <= 0.10
    assert max(error(row) for row in rows if row.span.nodes <= 64) <= 0.10


def held(row: Measured) -> bool:
    band = time_of("all_reduce", row.message_bytes, row.span, row.hardware)
    return band.low_ns <= row.ns <= band.high_ns


def test_the_band_covers_messages_that_it_was_not_fitted_on() -> None:
    large = large_and_not_fitted()
    every = [row for row in measured() if not row.fitted]
    assert mean(held(row) for row in large) >= 0.9
    assert mean(held(row) for row in every) >= 0.85


def test_a_job_uses_as_many_gpus_of_each_node_as_divide_its_ranks() -> None:
    """512 ranks take 64 of the 72 GPUs of a rack: 8 of the 16 replicas of tp 8 are in one."""
    layout = ParallelConfig(tp=8, pp=4, dp_replicate=16)
    rack = replace(DEVICE, gpus_per_node=72)
    assert place_group(replace(job(layout=layout), hardware=rack), "dp") == GroupPlacement(16, 8)
    small = ParallelConfig(tp=8, dp_replicate=4)
    assert place_group(replace(job(layout=small), hardware=rack), "dp") == GroupPlacement(4, 4)


@pytest.mark.parametrize(("ranks", "stated", "group"), [
    (8, None, GroupPlacement(8, 8)),
    (64, None, GroupPlacement(64, 8)),
    (100, None, GroupPlacement(100, 5)),
    (16, 1, GroupPlacement(16, 1)),
    (1, None, GroupPlacement(1, 1)),
])  # fmt: skip
def test_a_user_asks_for_one_call_by_ranks(
    ranks: int, stated: int | None, group: GroupPlacement
) -> None:
    """By default a group fills its nodes; 100 ranks fill 20 nodes with 5 each."""
    found = collective_time("all_reduce", 2**20, ranks, "h100-sxm", stated)
    assert found == time_of("all_reduce", 2**20, group, load_hardware("h100-sxm"))
    assert found.low_ns <= found.ns <= found.high_ns


def test_a_sweep_of_the_cluster_comes_before_the_closed_form() -> None:
    sweep = TransferSweep("all_reduce", 8, 8, (2**20,), (123_000.0,))
    found = collective_time("all_reduce", 2**20, 8, "h100-sxm", rates=Rates((sweep,)))
    assert found.ns == 123_000
    assert found.formulas[0].id == "comm.sweep"


@pytest.mark.parametrize(("arguments", "problem"), [
    (("all_reduce", 8, 0, "h100-sxm"), "ranks .0. must be at least 1"),
    (("all_sum", 8, 8, "h100-sxm"), "op 'all_sum' has no time model"),
    (("all_reduce", 8, 8, "h100"), "unknown hardware preset 'h100'"),
    (("all_reduce", 8, 8, "h100-sxm", 16), "ranks_per_node .16. must be between 1 and"),
])  # fmt: skip
def test_an_impossible_call_is_refused(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        collective_time(*arguments)
