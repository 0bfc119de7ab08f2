"""The tables of a run's page; each is a list that is empty where the report says nothing."""

from __future__ import annotations

from collections import Counter, defaultdict

from dash import html

from stepsplit.analyzer.report.medians import full_steps
from stepsplit.analyzer.report.report import BlameRow, CollectiveRow, GroupRow, Report
from stepsplit.analyzer.units import gigabytes_per_second, size
from stepsplit.dashboard.web.parts import Cell, count_cell, left_out, section, table, time_cell

ROWS = 100
MOST_BLAMED = 10
MOST_COLLECTIVES = 24


def findings(report: Report) -> list[html.Section]:
    """What to mend, with what each is worth a step."""
    if not report.findings:
        return []
    rows = [
        [Cell(found.message), Cell(found.bucket), time_cell(found.gain_ns)]
        for found in report.findings[:ROWS]
    ]
    note = "by how much the mean step would be shorter without it, each alone: they do not add up"
    return [section("Why", note, table(("finding", "bucket", "gain a step"), rows))]


def warnings(report: Report) -> list[html.Details]:
    """What the data cannot tell."""
    if not report.warnings:
        return []
    of_rank = ["" if w.rank is None else f"rank {w.rank}: " for w in report.warnings]
    items = [html.Li(f"{who}{w.message}") for who, w in zip(of_rank, report.warnings, strict=True)]
    count = len(items)
    head = html.Summary(f"{count:,} warning{'' if count == 1 else 's'}")
    shown = html.Details([head, html.Ul(items[:ROWS])], className="card warnings", open=count <= 3)
    return [shown]


def exposed(report: Report) -> list[html.Section]:
    """Exposed communication and bubble by axis and phase: mean over ranks and full steps."""
    full = {(row.rank, row.step) for row in full_steps(report.steps)}
    sums: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in report.exposed:
        if (row.rank, row.step) in full:
            own = sums[row.axis or "other", row.phase]
            own["comm"] += row.collective_ns + row.p2p_ns
            own["skew"] += row.skew_ns
            own["bubble"] += row.bubble_ns
    if not sums:
        return []
    largest = sorted(sums.items(), key=lambda item: -item[1].total())
    rows = [
        [Cell(axis), Cell(phase), *(time_cell(own[part] / len(full)) for part in _EXPOSED)]
        for (axis, phase), own in largest
    ]
    note = "mean over ranks and full steps"
    heads = ("axis", "phase", "transfer", "skew", "bubble")
    return [section("Exposed by axis and phase", note, table(heads, rows))]


_EXPOSED = ("comm", "skew", "bubble")


def blame(report: Report) -> list[html.Section]:
    """Who caused waiting."""
    steps = len({row.step for row in report.steps})
    if not report.blame or not steps:
        return []
    rows = [_blame_row(row, steps) for row in report.blame[:MOST_BLAMED]]
    note = "waiting caused a step, summed over the ranks that waited" + left_out(
        report.blame, MOST_BLAMED
    )
    heads = ("rank", "cause", "axis", "skew", "bubble", "caused a step")
    return [section("Blame", note, table(heads, rows))]


def _blame_row(row: BlameRow, steps: int) -> list[Cell]:
    return [
        Cell("none" if row.rank is None else str(row.rank)),
        Cell(row.cause),
        Cell(row.axis or ""),
        time_cell(row.caused_skew_ns / steps),
        time_cell(row.caused_bubble_ns / steps),
        time_cell(row.caused_ns / steps),
    ]


def collectives(report: Report) -> list[html.Section]:
    """Every op and size on every group, the most time first."""
    if not report.collectives:
        return []
    groups = {group.id: group for group in report.groups}
    largest = sorted(report.collectives, key=_total_ns, reverse=True)[:MOST_COLLECTIVES]
    rows = [_collective_row(row, groups.get(row.group)) for row in largest]
    note = "medians; busbw over the transfer alone"
    note += left_out(report.collectives, MOST_COLLECTIVES)
    heads = ("axis", "group", "op", "size", "calls", "transfer", "wait", "busbw")
    return [section("Collectives and messages", note, table(heads, rows))]


def _total_ns(row: CollectiveRow) -> int:
    return row.count * (row.transfer_ns_median + row.wait_ns_median)


def _collective_row(row: CollectiveRow, group: GroupRow | None) -> list[Cell]:
    bytes_, busbw = row.message_bytes, row.busbw_bytes_per_s
    return [
        Cell((group.axis if group else None) or "other"),
        Cell(_members(row, group)),
        Cell(row.op if row.dtype is None else f"{row.op} {row.dtype}"),
        Cell("unknown" if bytes_ is None else size(bytes_), number=True),
        count_cell(row.count),
        time_cell(row.transfer_ns_median),
        time_cell(row.wait_ns_median),
        Cell("unknown" if busbw is None else gigabytes_per_second(busbw), number=True),
    ]


def _members(row: CollectiveRow, group: GroupRow | None) -> str:
    if group is None:
        return "unknown"
    ranks = ", ".join(str(rank) for rank in group.ranks[:8])
    more = f" and {len(group.ranks) - 8:,} more" if len(group.ranks) > 8 else ""
    return f"{group.description or row.group}: {ranks}{more}"
