"""What holds where ranks are missing or waits are estimated."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html

from stepsplit.analyzer.report.report import Report
from stepsplit.analyzer.split.attribute import Coverage
from stepsplit.dashboard.pages.parts import Cell, count_cell, section, table

RUNS = 12
_WAITS = {"measured": "measured", "partly": "partly estimated", "estimated": "estimated"}


def holds(report: Report) -> list[html.Section]:
    """How far waits are measured on each axis; absent where all is."""
    missing = _missing(report)
    if not missing and all(one.holds == "measured" for one in report.coverage):
        return []
    parts: list[html.P | html.Table] = [html.P(missing)] if missing else []
    if report.coverage:
        heads = ("axis", "waits", "groups", "whole", "one rank only", "calls", "no counterpart")
        parts.append(table(heads, [_row(one) for one in report.coverage]))
    return [section("What holds", "compute, copy, idle and the sum, whatever is missing", *parts)]


def _row(one: Coverage) -> list[Cell]:
    return [
        Cell(one.axis or "other"),
        Cell(_WAITS[one.holds]),
        count_cell(one.groups),
        count_cell(one.whole),
        count_cell(one.alone),
        count_cell(one.calls),
        count_cell(one.unmatched),
    ]


def _missing(report: Report) -> str:
    """Which ranks were not recorded, in a sentence; "" where all were."""
    run = report.run
    absent = sorted(set(range(run.world_size)) - set(run.ranks))
    if not absent:
        return ""
    return f"{len(absent):,} of {run.world_size:,} ranks were not recorded: {_listed(absent)}."


def _listed(ranks: Sequence[int]) -> str:
    """The ranks, those in a row joined."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else _each(run) for run in runs[:RUNS]
    )
    left = sum(len(run) for run in runs[RUNS:])
    return f"{named} and {left:,} more" if left else named


def _each(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
