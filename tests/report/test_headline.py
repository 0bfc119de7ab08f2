"""The mean step of a run: what is printed adds up, on the terminal and in the cards of a page."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from dash import html
from hypothesis import given, strategies as st
from msgspec import structs
from support.report_builders import analysis
from support.screens import print_lines

from stepsplit.analyzer import BUCKETS, AxisTime, BucketMean, ExposedRow, Split, StepRow, Summary
from stepsplit.analyzer.report.headline import (
    compute_mean_split,
    compute_mean_step_ns,
    divide_parts,
    round_parts,
    round_shares,
    summarize,
)
from stepsplit.analyzer.report.io import read_report
from stepsplit.analyzer.report.kind_rows import build_kind_rows, describe_other_steps
from stepsplit.analyzer.report.report import AxisSize, Report
from stepsplit.analyzer.split.step_kinds import KindCalls, StepKind
from stepsplit.analyzer.units import choose_part_unit_ns, format_parts, format_signed_parts
from stepsplit.dashboard.pages.components import build_cards
from stepsplit.dashboard.pages.overview import build_exposed_table
from stepsplit.dashboard.reporters.terminal import build_report_screen

SAMPLES = Path(__file__).parents[2] / "sample_traces"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


def build_step(rank: int, step: int, kind: str = "full", **spent_ns: int) -> StepRow:
    """A step of these buckets and memos, each given without its unit."""
    names = [one.name for one in fields(Split)]
    split = Split(**{name: spent_ns.get(name.removesuffix("_ns"), 0) for name in names})
    return StepRow(
        rank=rank, step=step, kind=kind, start_ns=0, step_ns=split.step_ns, estimated=False,
        **{name: getattr(split, name) for name in names},
    )  # fmt: skip


def test_a_table_by_hand() -> None:
    steps = (
        build_step(0, 1, compute=100, collective=30, skew=7, idle=3, overlapped=9),
        build_step(0, 2, compute=101, collective=31, skew=8, idle=0, overlapped=10),
        build_step(1, 1, compute=110, collective=20, skew=0, idle=11, fused=8),
        build_step(1, 3, "partial", compute=9_000),
    )
    exposed = (
        ExposedRow(0, 1, "tp", "forward", 10, 0, 7, 0),
        ExposedRow(0, 1, "dp_shard", "backward", 20, 0, 0, 0),
        ExposedRow(0, 2, "tp", "forward", 11, 0, 0, 0),
        ExposedRow(0, 2, None, "other", 20, 0, 0, 0),
        ExposedRow(1, 1, "tp", "forward", 20, 0, 0, 0),
        ExposedRow(1, 3, "pp", "forward", 0, 500, 0, 500),
    )

    summary = summarize(steps, exposed)

    # The parts end at 311, 352, 372, 392, 399, 407 and 421 ns, and their means at a third of each,
    # floored. The 8 ns of skew that no row has are on no known axis.
    assert summary == Summary(
        steps=2,
        step_ns=140,
        median_ns=140,
        p99_ns=None,
        slowest_ns=140,
        buckets=(
            BucketMean("compute", 103, 311 / 421, (), 1, 110),
            BucketMean(
                "collective", 27, 81 / 421,
                (AxisTime("tp", 14), AxisTime("dp_shard", 7), AxisTime(None, 6)), 0, 31,
            ),
            BucketMean("p2p", 0, 0.0, (), 0, 0),
            BucketMean("skew", 5, 15 / 421, (AxisTime("tp", 3), AxisTime(None, 2)), 0, 7),
            BucketMean("bubble", 0, 0.0, (), 0, 0),
            BucketMean("copy", 0, 0.0, (), 0, 0),
            BucketMean("idle", 5, 14 / 421, (), 1, 11),
        ),
        overlapped_ns=6,
        bubble_covered_ns=0,
        fused_ns=2,
        ambiguous_ns=0,
    )  # fmt: skip
    assert (compute_mean_step_ns(steps), compute_mean_step_ns(())) == (140, 0)
    assert summarize((), exposed) is None


def test_one_in_a_hundred_steps_is_longer_than_the_99th_percentile() -> None:
    steps = [build_step(number % 2, number // 2, compute=1 + number) for number in range(200)]

    few, many = summarize(steps[:99], ()), summarize(steps, ())

    assert few is not None and many is not None
    assert (few.p99_ns, many.p99_ns, many.slowest_ns, many.median_ns) == (None, 198, 199, 100)


NS = st.integers(0, 10**10)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.lists(NS, min_size=7, max_size=7)),
        min_size=1, max_size=12, unique_by=lambda one: one[:2],
    ),
    st.data(),
)  # fmt: skip
def test_parts_add_up_as_shown(
    drawn: list[tuple[int, int, list[int]]], data: st.DataObject
) -> None:
    steps, exposed = [], []
    for rank, number, times in drawn:
        steps.append(build_step(rank, number, **dict(zip(BUCKETS, times, strict=True))))
        on_tp = [data.draw(st.integers(0, ns)) for ns in times[1:5]]
        on_dp = [ns - part for ns, part in zip(times[1:5], on_tp, strict=True)]
        exposed += [
            ExposedRow(rank, number, "tp", "forward", *on_tp),
            ExposedRow(rank, number, "dp_shard", "backward", *on_dp),
        ]

    summary = summarize(steps, exposed)

    assert summary is not None
    whole_ns = sum(row.step_ns for row in steps)
    assert summary.step_ns == whole_ns // len(steps)
    assert sum(one.mean_ns for one in summary.buckets) == summary.step_ns
    for one in summary.buckets:
        assert not one.by_axis or sum(part.ns for part in one.by_axis) == one.mean_ns
    assert summary.step_ns == compute_mean_split(steps).step_ns == compute_mean_step_ns(steps)
    parts = [
        ns for one in summary.buckets for ns in [part.ns for part in one.by_axis] or [one.mean_ns]
    ]
    unit_ns = choose_part_unit_ns(summary.step_ns)
    counts = round_parts(parts, unit_ns)
    assert sum(counts) == (summary.step_ns + unit_ns // 2) // unit_ns
    shown = [abs(count * unit_ns - ns) < unit_ns for count, ns in zip(counts, parts, strict=True)]
    assert all(shown)
    means = [one.mean_ns for one in summary.buckets]
    assert round(1000 * sum(round_shares(means))) == (1000 if summary.step_ns else 0)


@given(st.lists(st.integers(-(10**12), 10**12)), st.integers(1, 10**6))
def test_divided_parts_add_up_to_the_divided_sum(parts: list[int], by: int) -> None:
    assert sum(divide_parts(parts, by)) == sum(parts) // by
    assert sum(round_parts(parts, by)) == (sum(parts) + by // 2) // by


def test_a_part_has_the_decimals_of_its_unit() -> None:
    lengths_ns = (4_812_000_000, 999_999_999, 99_999_999, 9_999_999, 0)
    units_ns = [choose_part_unit_ns(ns) for ns in lengths_ns]
    assert units_ns == [1_000_000, 100_000, 10_000, 1_000, 1_000]
    assert [format_parts(4812, one) for one in units_ns[:4]] == [
        "4,812 ms", "481.2 ms", "48.12 ms", "4.812 ms",
    ]  # fmt: skip
    signed = [format_signed_parts(count, 100_000) for count in (-12_345, 0, 7)]
    assert signed == ["-1,234.5 ms", "0.0 ms", "+0.7 ms"]


def read_numbers(line: str) -> list[float]:
    """The times and shares of a line of the screen, as printed."""
    return [
        float(text.replace(",", "")) for text in re.findall(r"[-+]?[\d,]+\.?\d*(?= ms| %)", line)
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [100, 200])
def test_the_screen_of_a_sample_adds_up(name: str, width: int) -> None:
    report = read_report(SAMPLES / name)
    lines = print_lines(build_report_screen(report), width=width)

    step = next(read_numbers(line)[0] for line in lines if line.startswith("step "))
    top = next(at for at, line in enumerate(lines) if line.split()[:2] == ["measured", "share"])
    table = [lines[top + 1 + place] for place in range(len(BUCKETS))]
    assert [line.split()[0] for line in table] == list(BUCKETS)
    rows = [read_numbers(re.sub(r" r\d+ .*", "", line)) for line in table]
    assert sum(row[0] for row in rows) == pytest.approx(step, abs=1e-9)
    assert sum(row[1] for row in rows) == pytest.approx(100, abs=1e-9)
    for row, bucket in zip(rows, BUCKETS, strict=True):
        axes = row[2:]
        assert bucket in ("collective", "p2p", "skew", "bubble") or not axes
        assert not axes or sum(axes) == pytest.approx(row[0], abs=1e-9)


def test_an_axis_of_another_name_has_its_column() -> None:
    report = Report(
        run=structs.replace(analysis().report.run, mesh=(AxisSize("spatial", 2),)),
        steps=(build_step(0, 1, compute=900_000, collective=100_000),),
        exposed=(ExposedRow(0, 1, "spatial", "forward", 60_000, 0, 0, 0),),
    )

    lines = print_lines(build_report_screen(report), width=100)

    assert next(line.split()[:4] for line in lines if "measured" in line) == [
        "measured", "share", "spatial", "other",
    ]  # fmt: skip
    row = next(line for line in lines if line.startswith("collective"))
    assert read_numbers(row)[:4] == [0.1, 10.0, 0.06, 0.04]


@pytest.mark.parametrize("name", NAMES)
def test_the_exposed_communication_of_a_page_adds_up_to_the_screen(name: str) -> None:
    report = read_report(SAMPLES / name)
    summary = summarize(report.steps, report.exposed)
    assert summary is not None
    unit_ns = choose_part_unit_ns(summary.step_ns)
    screen = round_parts([one.mean_ns for one in summary.buckets], unit_ns)
    _, collective, p2p, skew, bubble, *_ = screen

    [section] = build_exposed_table(report)

    [table] = [one for one in section._traverse() if isinstance(one, html.Table)]
    rows = [[str(cell.children) for cell in row.children] for row in table.children[1].children]
    columns = [[float(row[at].split()[0].replace(",", "")) for row in rows] for at in (2, 3, 4)]
    assert [round(sum(column) * 1e6 / unit_ns) for column in columns] == [
        collective + p2p, skew, bubble,
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_shares_of_the_cards_add_up(name: str) -> None:
    page = build_cards(read_report(SAMPLES / name))

    cards = [[str(part.children) for part in card.children] for card in page.children]
    shown = {label: value for label, value, _ in cards}
    shares = [float(shown[one].split()[0]) for one in ("compute", "collective", "bubble", "other")]
    assert sum(shares) == pytest.approx(100, abs=1e-9)
    assert cards[0][0] == "mean step" and "; median " in cards[0][2]


def test_steps_of_another_kind_are_counted_and_their_difference_is_named() -> None:
    """Every third step has an evaluation of 60 more compute and 2 less idle time."""
    rows = [
        build_step(rank, step, compute=100, idle=20)
        if step % 3
        else build_step(rank, step, "other", compute=160, idle=18)
        for rank in (0, 1)
        for step in range(1, 7)
    ]
    calls = (KindCalls("dp_replicate", "all_reduce", 2),)
    evaluates = (*calls, KindCalls("dp_replicate", "all_gather", 2))
    kinds = [
        StepKind("headline", (1, 2, 4, 5), calls, 10.0),
        StepKind("other 1", (3, 6), evaluates, 16.0, period=3),
    ]
    rows.append(build_step(0, 7, "partial", compute=9_000))
    usual, other = build_kind_rows(kinds, rows, on_device=True)
    assert (usual.mean_ns, other.count, other.steps, other.mean_ns) == (120, 2, (3, 6), 178)
    assert sum(getattr(other, f"{bucket}_ns") for bucket in BUCKETS) == other.mean_ns
    assert other.share == pytest.approx(2 * 178 / (2 * 178 + 4 * 120))
    assert (usual.extra, other.extra) == ("", "1 all_gather on dp_replicate, 6 compute kernels")
    assert describe_other_steps([usual, other]) == (
        "2 of 6 complete steps do other work (#3, #6): 0.00 ms each, most apart in compute "
        "(+0.00 ms); they take 42.6 % of the time, and all 6 steps take 0.00 ms in the mean"
    )


def test_of_one_kind_of_steps_nothing_is_said() -> None:
    assert build_kind_rows((), [build_step(0, 1)], on_device=True) == ()
    assert describe_other_steps(()) == ""
