"""The sections of a run's page show the report's rows, and are absent without any."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dash import dcc, html
from dash.development.base_component import Component
from support.page_text import find
from support.report_builders import MS, analysis

from stepsplit.analyzer.report.diagnosis_rows import Lateness, PathPart, PathStep, SlowKernel
from stepsplit.analyzer.report.headline import compute_mean_step_ns
from stepsplit.analyzer.report.report import BlameRow, ContentionRow, GroupRow, IdleRow, Report
from stepsplit.analyzer.split.bandwidth import CollectiveRow, StepCallsRow
from stepsplit.analyzer.split.coverage import Coverage
from stepsplit.analyzer.split.kernels import KernelFamily
from stepsplit.analyzer.split.overlap import Overlap
from stepsplit.analyzer.split.step_times import SlowStep, StepDurations
from stepsplit.analyzer.units import format_milliseconds
from stepsplit.dashboard.pages.communication import build_overlap, build_stragglers
from stepsplit.dashboard.pages.components import View
from stepsplit.dashboard.pages.compute import build_compute, build_idle
from stepsplit.dashboard.pages.overview import (
    build_blame_table,
    build_collective_table,
    build_coverage,
    build_critical_path,
)


def with_rows(**rows: Any) -> Report:
    """The built run (four full steps a rank) with these rows and no other detail."""
    none = dict.fromkeys(_DETAIL, ())
    return msgspec.structs.replace(analysis().report, **{**none, **rows})


_DETAIL = (
    "idle", "kernels", "slow_kernels", "contention", "overlap", "lateness",
    "critical_path", "path_steps", "step_times", "slow_steps", "coverage",
)  # fmt: skip


def seen(report: Report) -> View:
    return View("a run", report, None, "abcdef012345")


def text(part: Any) -> str:
    """All that the part says, in the order of the page."""
    if isinstance(part, Component):
        return text(getattr(part, "children", None))
    return "".join(map(text, part)) if isinstance(part, list) else str(part or "")


def plain(report: Report) -> View:
    """A run in an exported file, whose ranks lead nowhere."""
    return View("a run", report, None)


def body(table: html.Table) -> list[list[str]]:
    """What the cells of a table say, without its head."""
    _head, *rows = find(table, html.Tr)
    return [[text(cell) for cell in find(row, html.Td)] for row in rows]


def test_idle_is_shown_by_cause_as_the_mean_per_step() -> None:
    report = with_rows(
        idle=(
            IdleRow(0, "synchronize", "aten::item", 24 * MS, 4),
            IdleRow(0, "launch_bound", "aten::mm", 8 * MS, 9),
            IdleRow(1, "synchronize", "aten::item", 8 * MS, 4),
            IdleRow(1, "synchronize", "cudaMemcpy", 24 * MS, 4),
        )
    )

    (section,) = build_idle(plain(report))

    by_cause, _, _ = find(section, html.Table)
    late = "synchronize late launches after a synchronization"
    busy = "launch bound launch-bound host work"
    assert body(by_cause) == [
        [late, "aten::item", "57.1 %", "rank 1, 8.00 ms", "87.5 %", "3.50 ms"],
        [busy, "aten::mm", "100.0 %", "rank 0, 2.00 ms", "12.5 %", "0.50 ms"],
    ]


def test_idle_by_op_and_by_rank_is_collapsed() -> None:
    report = with_rows(
        idle=(
            IdleRow(0, "python", "", 16 * MS, 9),
            IdleRow(0, "python", None, 8 * MS, 3),
            IdleRow(3, "data_loading", "next", 40 * MS, 4),
        )
    )

    by_op, by_rank = find(build_idle(plain(report)), html.Details)

    assert [body(one) for one in find(by_op, html.Table)] == [
        [
            ["data loading", "next", "4", "2.50 ms"],
            ["python", "unknown", "9", "1.00 ms"],
            ["python", "smaller ones", "3", "0.50 ms"],
        ]
    ]
    assert [body(one) for one in find(by_rank, html.Table)] == [
        [["rank 3", "10.0 ms", "10.0 ms", "0.00 ms"], ["rank 0", "6.00 ms", "0.00 ms", "6.00 ms"]]
    ]


def test_a_rank_without_a_full_step_counts_all_its_steps() -> None:
    partial = tuple(
        msgspec.structs.replace(row, kind="partial") if row.rank == 1 else row
        for row in analysis().report.steps
    )
    report = with_rows(steps=partial, idle=(IdleRow(1, "python", "", 5 * MS, 1),))

    (by_cause, *_) = find(build_idle(plain(report)), html.Table)

    assert "rank 1, 1.00 ms" in body(by_cause)[0]


def test_a_cause_without_an_op_shows_no_op() -> None:
    (by_cause, *_) = find(
        build_idle(plain(with_rows(idle=(IdleRow(0, "unknown", "", MS, 1),)))), html.Table
    )

    heads = [text(head) for head in find(by_cause, html.Th)]
    assert not {"top op", "share of cause"} & set(heads) and body(by_cause)[0][0].startswith(
        "unknown"
    )


def test_stragglers_come_before_ranks_late_by_chance() -> None:
    report = with_rows(
        lateness=(
            Lateness(0, "tp", False, 2, 40, 21, 3 * MS, 63 * MS, 0.4, False),
            Lateness(1, "tp", False, 2, 40, 0, 0, 0, 1.0, False),
            Lateness(2, None, False, 4, 40, 38, MS, 38 * MS, 1e-20, True),
            Lateness(0, "pp", True, 2, 10, 5, 9 * MS, 45 * MS, None, False),
        )
    )

    (section,) = build_stragglers(plain(report))

    calls, messages = find(section, html.Table)
    assert body(calls) == [
        ["rank 2", "other", "straggler", "40", "95.0 %", "25.0 %", "1.00 ms", "38.0 ms"],
        ["rank 0", "tp", "", "40", "52.5 %", "50.0 %", "3.00 ms", "63.0 ms"],
    ]
    # None of them is a straggler, so that the column is not shown.
    assert body(messages) == [["rank 0", "pp", "10", "50.0 %", "50.0 %", "9.00 ms", "45.0 ms"]]
    assert text(section).count("a straggler arrives last more often than expected by chance") == 1


def test_without_a_straggler_the_section_says_so() -> None:
    late = Lateness(0, "tp", False, 2, 40, 21, 3 * MS, 63 * MS, 0.4, False)

    (section,) = build_stragglers(plain(with_rows(lateness=(late,))))

    assert "no straggler: no rank is significantly later than its peers" in text(section)


def test_overlap_is_summed_over_ranks_and_shown_per_step() -> None:
    report = with_rows(
        overlap=(
            Overlap(0, "tp", "all_reduce", 32 * MS, 8 * MS, 24 * MS),
            Overlap(1, "tp", "all_reduce", 32 * MS, 24 * MS, 8 * MS),
            Overlap(0, "pp", "send", 16 * MS, 0, 16 * MS),
        )
    )

    (table,) = find(build_overlap(report), html.Table)

    assert body(table) == [
        ["tp", "all_reduce", "4.00 ms", "2.00 ms", "2.00 ms", "50.0 %"],
        ["pp", "send", "1.00 ms", "0.00 ms", "1.00 ms", "0.0 %"],
    ]


def test_families_share_the_compute_of_all_ranks() -> None:
    report = with_rows(
        kernels=(
            KernelFamily(0, "gemm", 8, 40 * MS, 0.5),
            KernelFamily(0, "attention", 8, 40 * MS, 0.5),
            KernelFamily(1, "gemm", 8, 80 * MS, 1.0),
        )
    )

    (table,) = find(build_compute(plain(report)), html.Table)

    assert body(table) == [
        ["gemm", "rank 1, 20.0 ms", "75.0 %", "7.50 ms"],
        ["attention", "rank 0, 10.0 ms", "25.0 %", "2.50 ms"],
    ]


def test_slow_kernels_and_contention_are_sorted_by_cost() -> None:
    report = with_rows(
        slow_kernels=(
            SlowKernel(2, "ampere_gemm", "gemm", 1.08, MS, 96),
            SlowKernel(3, "flash_fwd", "attention", 1.2, 3 * MS, 48),
        ),
        contention=(ContentionRow(0, 0.99, 12, -4 * MS), ContentionRow(1, 1.25, 14, 8 * MS)),
    )

    contended, slow = find(build_compute(plain(report)), html.Table)

    assert body(contended) == [
        ["rank 1", "14", "1.25 x", "2.00 ms"],
        ["rank 0", "12", "0.99 x", "-1.00 ms"],
    ]
    assert body(slow) == [
        ["rank 3", "flash_fwd", "attention", "48", "1.20 x", "3.00 ms"],
        ["rank 2", "ampere_gemm", "gemm", "96", "1.08 x", "1.00 ms"],
    ]


def test_the_path_names_the_ranks_that_have_most_of_it() -> None:
    (section,) = build_critical_path(seen(analysis().report))

    (table,) = find(section, html.Table)
    assert body(table) == [
        ["compute", "rank 3 78.3 %, rank 0 21.7 %", "82.9 %", "120 ms"],
        ["collective on tp", "rank 3 58.3 %, rank 2 41.7 %", "12.0 %", "17.3 ms"],
        ["idle", "rank 0 100.0 %", "2.1 %", "3.00 ms"],
        ["p2p on pp", "rank 2 100.0 %", "2.0 %", "2.89 ms"],
        ["bubble on pp", "rank 0 100.0 %", "1.0 %", "1.44 ms"],
    ]
    assert "rank 3 finishes last in 4 of 4 steps" in text(section)


def test_a_slow_step_is_a_sentence_with_a_link() -> None:
    report = with_rows(
        slow_steps=(
            SlowStep(7, 160 * MS, 15 * MS, 1, "compute", 9 * MS),
            SlowStep(5, 170 * MS, 25 * MS, 3, "idle", 24 * MS),
        ),
        step_times=(StepDurations(None, 12, 145 * MS, 170 * MS, 170 * MS, (5, 7)),),
    )

    (section,) = build_critical_path(seen(report))

    assert [text(item) for item in find(section, html.Li)] == [
        "step 5 took 170 ms (+25.0 ms over the median), mainly rank 3 idle +24.0 ms",
        "step 7 took 160 ms (+15.0 ms over the median), mainly rank 1 compute +9.00 ms",
    ]
    assert [link.href for link in find(section, dcc.Link)] == [
        "/run/abcdef012345/timeline?step=5&rank=3",
        "/run/abcdef012345/timeline?step=7&rank=1",
    ]
    assert "median step on its slowest rank: 145 ms (12 steps)" in text(section)


def test_the_path_of_one_rank_alone_is_not_shown() -> None:
    report = analysis().report
    alone = msgspec.structs.replace(report.run, world_size=1, ranks=(0,))

    assert build_critical_path(seen(msgspec.structs.replace(report, run=alone))) == []


def test_estimated_waits_are_shown_by_axis() -> None:
    report = with_rows(
        coverage=(
            Coverage("tp", 2, 2, 0, 40, 0),
            Coverage("dp_shard", 4, 1, 2, 80, 30),
            Coverage(None, 1, 0, 1, 6, 6),
        )
    )

    (table,) = find(build_coverage(report), html.Table)

    assert body(table) == [
        ["tp", "measured", "2", "2", "0", "40", "0"],
        ["dp_shard", "partly estimated", "4", "1", "2", "80", "30"],
        ["other", "estimated", "1", "0", "1", "6", "6"],
    ]


def test_missing_ranks_are_listed() -> None:
    run = msgspec.structs.replace(analysis().report.run, world_size=8, ranks=(0, 2, 3))

    (section,) = build_coverage(with_rows(run=run))

    assert text(section).endswith("5 of 8 ranks were not recorded: 1, 4 to 7.")


def test_a_complete_recording_has_no_coverage_section() -> None:
    assert build_coverage(analysis().report) == []


@pytest.mark.parametrize(
    "section",
    [
        lambda report: build_idle(plain(report)),
        lambda report: build_stragglers(plain(report)),
        lambda report: build_compute(plain(report)),
        build_overlap,
        build_coverage,
    ],
)
def test_a_section_without_rows_is_absent(section: Any) -> None:
    assert section(with_rows()) == []


@pytest.mark.parametrize(
    "section",
    [
        lambda report: build_idle(plain(report)),
        lambda report: build_stragglers(plain(report)),
        lambda report: build_compute(plain(report)),
        build_overlap,
    ],
)
def test_a_recording_without_steps_has_no_averages(section: Any) -> None:
    report = msgspec.structs.replace(analysis().report, steps=(), lateness=(), slow_kernels=())

    assert section(report) == []


def test_a_long_name_is_in_full_in_the_tooltip() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, " + "x" * 200 + ">"
    report = with_rows(slow_kernels=(SlowKernel(0, name, "elementwise", 1.1, MS, 20),))

    titles = [
        span.title
        for span in find(build_compute(plain(report)), html.Span)
        if hasattr(span, "title")
    ]

    assert titles == [name]


def test_groups_with_the_same_calls_are_one_row_and_a_row_each_below() -> None:
    pairs = ((0, 1), (2, 3), (0, 3))
    groups = tuple(GroupRow(n, "tp", f"tp{n}", pair) for n, pair in enumerate(pairs))
    rows = tuple(
        CollectiveRow(n, "all_reduce", "float32", 1000, 4, (n + 1) * MS, 0, 1e9, (n + 1) * 1e9)
        for n in range(3)
    )
    calls = tuple(StepCallsRow(n, "all_reduce", "float32", 1000, 2 * n + 8, 0, 0) for n in range(3))
    report = with_rows(groups=groups, collectives=rows, step_calls=calls)

    [section] = build_collective_table(report)

    folded, single = find(section, html.Table)
    [row] = folded.children[1].children
    assert [text(cell) for cell in row.children] == [
        "tp", "3 of 2 ranks", "all_reduce float32", "1.00 kB", "5",
        "2.00 ms1.00 ms to 3.00 ms", "0.00 ms", "2.00 GB/s1.00 GB/s to 3.00 GB/s",
    ]  # fmt: skip
    lines = [[text(cell) for cell in line.children] for line in single.children[1].children]
    assert [(line[1], line[4]) for line in lines] == [
        ("tp2: 0, 3", "6"), ("tp1: 2, 3", "5"), ("tp0: 0, 1", "4"),
    ]  # fmt: skip


def test_blame_is_a_mean_over_ranks_and_full_steps() -> None:
    report = analysis().report
    full = sum(row.kind == "full" for row in report.steps)
    assert 0 < full < len(report.steps)
    sum_ns = 3 * MS * full
    waited = BlameRow(1, "compute", sum_ns, 0, sum_ns, "tp", (1,))

    [section] = build_blame_table(plain(msgspec.structs.replace(report, blame=(waited,))))

    [row] = next(find(section, html.Table)).children[1].children
    assert [text(cell) for cell in row.children][-1] == "3.00 ms"


def test_a_path_that_is_longer_than_a_step_says_why() -> None:
    report = analysis().report
    step_ns = compute_mean_step_ns(report.steps)
    part, step = PathPart(1, 0, "compute", None, 2 * step_ns), PathStep(1, 0, 2 * step_ns, 0, 0)
    longer = with_rows(critical_path=(part,), path_steps=(step,))

    [section] = build_critical_path(seen(longer))

    assert f"longer than a rank's mean step ({format_milliseconds(step_ns)})" in text(section)
