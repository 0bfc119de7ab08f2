"""The terminal's answer, as a person reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.report_builders import analysis
from support.samples import analyze_recording
from support.screens import print_lines

from stepsplit.analyzer.report.report import MemoryRow, Report
from stepsplit.analyzer.split.bandwidth import StepCallsRow
from stepsplit.analyzer.split.strategy import Strategy
from stepsplit.dashboard.reporters.terminal import build_collectives_table, build_report_screen

SAMPLES = Path(__file__).parents[2] / "sample_traces"


def shown(width: int, report: Report | None = None) -> list[str]:
    return print_lines(build_report_screen(report or analysis().report), width=width)


@pytest.fixture(scope="module")
def compared_report() -> Report:
    """A report of three axes with the model's prediction."""
    return analyze_recording(SAMPLES / "tp2_pp2_dp2", "auto")


def test_the_screen_answers_what_ran_where_it_went_and_why() -> None:
    text = "\n".join(shown(120))
    for part in ("run ", "steps ", "compute", "bubble fraction", "busbw", "BOTTLENECKS"):
        assert part in text


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("compared", [False, True])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(
    width: int, compared: bool, compared_report: Report
) -> None:
    lines = shown(width, compared_report if compared else None)
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if "…" in line]


def test_where_the_model_and_the_axes_do_not_fit_the_axes_stand_alone(
    compared_report: Report,
) -> None:
    heads = {width: next(line.split() for line in shown(width, compared_report) if "worst" in line)
             for width in (60, 80, 100)}  # fmt: skip
    start, end, axes = ["measured", "share"], ["worst", "rank"], ["tp", "pp", "dp", "repl"]
    assert heads == {
        60: [*start, *end],
        80: [*start, *axes, *end],
        100: [*start, "model", "diff", *axes, *end],
    }


def test_what_the_steps_show_of_strategies_stands_in_one_line() -> None:
    seen = (Strategy("ddp", "dp_replicate", 2), Strategy("tp", "tp", 2),
            Strategy("pp", "pp", 2, "1f1b"), Strategy("recompute", detail="full"))  # fmt: skip
    report = analysis().report
    run = msgspec.structs.replace(report.run, strategies=seen)
    line = "detected parallelism: DDP 2 on dp_replicate, TP 2, PP 2 (1F1B), recompute (full)"
    assert shown(160, msgspec.structs.replace(report, run=run))[1] == line


def test_the_screen_shows_profiled_steps_and_memory_of_the_fullest_rank() -> None:
    report = analysis().report
    rows = (
        MemoryRow(0, None, None, 1000, 1000, 2000, None, None, None),
        MemoryRow(1, None, None, 2_000_000, 2_000_000, 4_000_000, 600_000, None, None),
    )
    slowed = msgspec.structs.replace(report.run, profiling_slowdown=0.331)

    lines = shown(160, msgspec.structs.replace(report, run=slowed, memory=rows))

    assert lines[2].endswith("; +33.1 % against steps without profiler)")
    memory = "weights 2.00 MB, gradients 2.00 MB, optimizer 4.00 MB, activations 600 kB"
    assert f"memory (largest on r1): {memory}" in lines


def test_the_screen_shows_how_much_of_the_gaps_is_ambiguous() -> None:
    report = analysis().report
    rows = tuple(
        msgspec.structs.replace(row, ambiguous_ns=1_234_000, estimated=True) for row in report.steps
    )
    text = " ".join(shown(250, msgspec.structs.replace(report, steps=rows)))
    assert "ambiguous gaps: 1.23 ms" in text
    assert "steps are estimates (ranks or ends of calls missing)" in text


@pytest.mark.parametrize(("calls", "said"), [(0, "some steps"), (6, "3")])
def test_calls_that_most_steps_do_not_have_stand_without_a_number(calls: int, said: str) -> None:
    report = analysis().report
    counted = tuple(
        StepCallsRow(row.group, row.op, row.dtype, row.message_bytes, calls, 0, 6)
        for row in report.collectives
    )
    table = build_collectives_table(msgspec.structs.replace(report, step_calls=counted))
    first = [next(iter(column.cells)) for column in table.columns]
    assert first[1:4] == ["all_reduce", "33.6 MB", said]
