"""One clock for all ranks, from the ends of calls and causality."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.builders import BASE_NS, GpuTrace

from stepsplit.analyzer import ClockRow, Report, analyze
from stepsplit.analyzer.split.causality import Bounds
from stepsplit.analyzer.split.clock import Clock
from stepsplit.analyzer.split.clock_fit import BIAS_NS, fit_offset_and_drift
from stepsplit.collectors.formats.rank_record import ClockProbe, RankRecord, write_record
from stepsplit.collectors.formats.run_spec import RankInfo

PAIR = [("0", "", [0, 1])]
MS = 1_000_000


def every_ms(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int64) * MS


def one_kind(count: int) -> np.ndarray:
    return np.zeros(count, dtype=np.int64)


def test_a_difference_that_grows_faster_than_clocks_drift_is_no_drift() -> None:
    apart = every_ms(40) // 2  # the times of one rank are damaged

    assert fit_offset_and_drift(every_ms(40), apart, one_kind(40)).drift == 0


def test_the_offset_ignores_outliers() -> None:
    apart = np.full(40, 7_000_000, dtype=np.int64)
    apart[[3, 17, 30]] += 400_000
    found = fit_offset_and_drift(every_ms(40), apart, one_kind(40))
    assert (found.offset_ns, found.drift, found.residual_ns) == (7_000_000, 0.0, 0.0)


def test_a_drift_is_measured_if_span_and_noise_allow_it() -> None:
    noise = np.random.default_rng(5).integers(-2_000, 2_000, 400)
    found = fit_offset_and_drift(every_ms(400), every_ms(400) // 20_000 + noise, one_kind(400))
    assert found.drift == pytest.approx(50e-6, rel=0.05)
    assert found.offset_ns == pytest.approx(found.pivot_ns * 50e-6, abs=600)


@pytest.mark.parametrize("count", [3, 12])
def test_an_unmeasurable_drift_is_none_and_adds_to_the_uncertainty(count: int) -> None:
    noise = np.random.default_rng(count).integers(-4_000, 4_000, count)
    found = fit_offset_and_drift(every_ms(count) * 20, noise, one_kind(count))
    assert found.drift == 0.0
    assert found.sigma_ns > BIAS_NS


def test_kinds_of_calls_have_biases_and_the_offset_is_their_mean() -> None:
    kind = np.tile([0, 1], 30)
    apart = np.where(kind == 0, 5_001_000, 4_999_000)
    assert fit_offset_and_drift(every_ms(60), apart, kind).offset_ns == pytest.approx(
        5_000_000, abs=1
    )


def test_a_clock_maps_there_and_back_to_the_nanosecond() -> None:
    clock = Clock(1, "b", 123_456_789, wall_ns=5_000, pivot_ns=400 * MS, drift_ppm=-37.5)
    own = np.array([0, 1, 17 * MS, 999_999_999_999], dtype=np.int64)
    assert np.abs(clock.map_to_own_ns(clock.map_to_common_ns(own)) - own).max() <= 1
    at = clock.map_instant_to_common_ns(own_ns=300 * MS)
    assert clock.compute_offset_at(at) == 300 * MS + 5_000 - at


def test_bounds_shift_an_offset_as_little_as_possible() -> None:
    bounds = Bounds(-3, 8)
    assert [bounds.clamp(offset) for offset in (-9, 0, 11)] == [-3, 0, 8]
    assert Bounds(5, 4).clamp(7) == 7
    assert not Bounds(None, 4).both


def report_of(tmp_path: Path, traces: list[GpuTrace]) -> Report:
    return analyze(*[trace.write(tmp_path) for trace in traces])


def clock_of(report: Report, rank: int) -> ClockRow:
    return next(row for row in report.clocks if row.rank == rank)


def test_ranks_without_a_common_group_are_joined_through_others(tmp_path: Path) -> None:
    """0 and 1 share a group, 1 and 2 another; the clock of 2 is 30 ms ahead of that of 0."""
    chain = [("a", "", [0, 1]), ("b", "", [1, 2])]
    traces = [
        GpuTrace(rank, 3, f"host{rank}", BASE_NS + ahead * MS, chain)
        for rank, ahead in enumerate((0, 10, 30))
    ]
    for trace, groups in zip(traces, ("a", "ab", "b"), strict=True):
        for place in range(8):
            for group in groups:
                at = 1000 * place + (400 if group == "b" else 0)
                trace.all_reduce(at, at + 100, group=group, Seq=place)
    report = report_of(tmp_path, traces)
    assert [row.offset_ns for row in report.clocks] == [0, 10 * MS, 30 * MS]
    assert [row.code for row in report.warnings if row.code == "clock_unaligned"] == []


def messages_both_ways(sent_us: int) -> list[GpuTrace]:
    """Receives of 100 us and of 150 both ways; the kernels of the sends take so long, and the clock
    of host1 is 50 ms ahead."""
    stages = [("3", "mesh_pp", [0, 1])]
    first = GpuTrace(0, 2, "host0", BASE_NS, stages).step(1, 0, 2000)
    last = GpuTrace(1, 2, "host1", BASE_NS + 50 * MS, stages).step(1, 0, 2000)
    first.message("send", 1, 100, 100 + sent_us, group="3").message("recv", 1, 900, 1000, group="3")
    last.message("recv", 0, 50, 200, group="3").message("send", 0, 900, 900 + sent_us, group="3")
    return [trace.kernel("gemm", 1000, 2000) for trace in (first, last)]


@pytest.mark.parametrize(("sent_us", "sigma_us"), [(5, 100), (60, 50), (100, 10)])
def test_hosts_with_only_messages_get_the_middle_of_the_causality_bounds(
    sent_us: int, sigma_us: int, tmp_path: Path
) -> None:
    """The clock of host1 is known to half of what passes between the ends of sends, or 10 us before
    these, and those of their receives, both ways."""
    row = clock_of(report_of(tmp_path, messages_both_ways(sent_us)), 1)
    assert row.offset_ns == 50 * MS
    assert row.sigma_ns == sigma_us * 1000 + 1


def test_the_ends_of_messages_place_a_rank_that_always_comes_first(tmp_path: Path) -> None:
    """host1 waits 500 us for each message, and host0 for none: when they start says that host1 is
    up to 500 us ahead, or 100 behind."""
    stages = [("3", "mesh_pp", [0, 1])]
    first = GpuTrace(0, 2, "host0", BASE_NS, stages).step(1, 0, 2000)
    last = GpuTrace(1, 2, "host1", BASE_NS, stages).step(1, 0, 2000)
    first.message("send", 1, 600, 700, group="3").message("recv", 1, 1600, 1700, group="3")
    last.message("recv", 0, 100, 700, group="3").message("send", 0, 1100, 1700, group="3")
    for trace in (first, last):
        trace.kernel("gemm", 1700, 2000)
    assert abs(clock_of(report_of(tmp_path, [first, last]), 1).offset_ns) <= 5_000


def record_probe(folder: Path, rank: int, *probes: ClockProbe) -> None:
    place = RankInfo(rank, 0, f"host{rank}", 1, "cuda:0")
    write_record(folder, RankRecord("job", place, 2, "nccl", clocks=probes))


def test_hosts_without_a_common_call_are_joined_by_the_probe_of_their_clocks(
    tmp_path: Path,
) -> None:
    """host1 is 7 ms ahead by a round trip of 300 us, a second before the recording."""
    alone = [
        GpuTrace(rank, 2, f"host{rank}", BASE_NS + 7 * MS * rank, PAIR)
        .step(1, 0, 50)
        .kernel("gemm", 0, 50)
        for rank in range(2)
    ]
    record_probe(tmp_path, 0)
    record_probe(tmp_path, 1, ClockProbe(7 * MS, 300_000, BASE_NS + 7 * MS - 1000 * MS))
    for trace in alone:
        trace.write(tmp_path)
    report = analyze(tmp_path)
    drift_ns = 20_000  # 20 ppm of a second
    assert clock_of(report, 1) == ClockRow(1, "host1", 7 * MS, None, 150_001 + drift_ns, None)
    assert "clock_unaligned" not in {row.code for row in report.warnings}


@pytest.mark.parametrize(
    ("ahead_us", "offset_us", "sigma_us"),
    [(50_060, 50_055, 45), (49_000, 50_000, 100)],
    ids=["within what the messages allow", "the clock was set since"],
)
def test_a_probe_narrows_what_messages_leave_open(
    tmp_path: Path, ahead_us: int, offset_us: int, sigma_us: int
) -> None:
    """Messages say 50 ms, give or take 100 us; the probe is exact to 50 us."""
    for trace in messages_both_ways(5):
        trace.write(tmp_path)
    record_probe(tmp_path, 0)
    record_probe(tmp_path, 1, ClockProbe(ahead_us * 1000, 100_000, BASE_NS + 50 * MS))
    row = clock_of(analyze(tmp_path), 1)
    assert row.offset_ns == offset_us * 1000
    assert row.sigma_ns == sigma_us * 1000 + 1


def test_a_host_without_links_keeps_its_wall_clock_with_a_note(tmp_path: Path) -> None:
    alone = [
        GpuTrace(rank, 2, f"host{rank}", BASE_NS, PAIR).step(1, 0, 50).kernel("gemm", 0, 50)
        for rank in range(2)
    ]
    report = report_of(tmp_path, alone)
    assert clock_of(report, 1) == ClockRow(1, "host1", 0, None, None, None)
    assert "clock_unaligned" in {row.code for row in report.warnings}


def test_ranks_that_hang_on_an_unaligned_one_are_not_aligned_either(tmp_path: Path) -> None:
    """Two pairs 50 ms apart: an all_to_all of all four aligns no clocks, and none waited 50 ms."""
    pairs = [("a", "", [0, 1]), ("b", "", [2, 3]), ("c", "", [0, 1, 2, 3])]
    traces = [
        GpuTrace(rank, 4, f"host{rank}", BASE_NS + ahead * MS, pairs)
        for rank, ahead in enumerate((0, 10, 50, 70))
    ]
    for rank, trace in enumerate(traces):
        for place in range(8):
            at = 1000 * place
            trace.step(place, at, at + 1000).kernel("gemm", at, at + 500)
            trace.all_reduce(at + 500, at + 600, group="ab"[rank // 2], Seq=place)
            trace.collective("SendRecv", "all_to_allv", at + 600, at + 700, group="c", Seq=place)
            trace.kernel("gemm", at + 700, at + 1000)
    report = report_of(tmp_path, traces)
    assert [row.sigma_ns is None for row in report.clocks] == [False, False, True, True]
    assert clock_of(report, 3).offset_ns == 20 * MS  # against rank 2
    said = {row.rank: row.message for row in report.warnings if row.code == "clock_unaligned"}
    assert set(said) == {2, 3}
    assert "rank 3 is aligned with rank 2 alone" in said[3]
    (row,) = [row for row in report.collectives if row.op == "all_to_all"]
    assert row.wait_ns_median == 0
    assert any(row.code == "unmatched" for row in report.warnings)


def test_a_fast_clock_changes_no_bucket(tmp_path: Path) -> None:
    """The second host's clock gains 40 us a second: over two seconds every wait stays the same."""
    late = GpuTrace(0, 2, "host0", BASE_NS, PAIR)
    early = GpuTrace(1, 2, "host1", BASE_NS, PAIR)

    def fast(at: float) -> float:
        return round(at * (1 + 40e-6), 3)

    for number in range(20):
        at = 100_000 * number
        late.step(number, at, at + 100_000).kernel("gemm", at, at + 50_000)
        late.all_reduce(at + 50_000, at + 60_000, Seq=number)
        late.kernel("gemm", at + 60_000, at + 100_000)
        early.step(number, fast(at), fast(at + 100_000)).kernel("gemm", fast(at), fast(at + 20_000))
        early.all_reduce(fast(at + 20_000), fast(at + 60_000), Seq=number)
        early.kernel("gemm", fast(at + 60_000), fast(at + 100_000))
    report = report_of(tmp_path, [late, early])
    assert clock_of(report, 1).drift_ppm == pytest.approx(40, abs=0.01)
    skews = [row.skew_ns for row in report.steps if row.rank == 1]
    assert max(abs(skew - 30 * MS) for skew in skews) < 1_300
