"""The tables of a run's page; each is a list that is empty where the report says nothing."""

from __future__ import annotations

from collections import Counter, defaultdict

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.report.report import (
    BlameRow,
    CollectiveRow,
    Finding,
    GroupRow,
    Report,
    full_steps,
    step_median_ns,
)
from stepsplit.analyzer.units import gigabytes_per_second, milliseconds, percent, size
from stepsplit.dashboard.pages.address import page_url
from stepsplit.dashboard.pages.parts import (
    COLOR,
    Cell,
    Content,
    count_cell,
    led,
    left_out,
    on_demand,
    section,
    table,
    time_cell,
)
from stepsplit.dashboard.pages.view import View

ROWS = 100
FIRST = 5
MOST_BLAMED = 10
MOST_COLLECTIVES = 24


def findings(view: View) -> list[html.Section]:
    """What to mend, the most worth first, each with a way to where it shows."""
    report = view.report
    if not report.findings:
        nothing = html.P("Nothing stands out: no cause is worth 1 % of the step.")
        return [section("Why", "", nothing)]
    step_ns = step_median_ns(report.steps)
    items = [_finding(found, step_ns, view.run_id) for found in report.findings[:ROWS]]
    note = "what a step would be shorter by without it, each alone: they do not add up"
    shown: list[Component] = [html.Ol(items[:FIRST], className="findings")]
    if items[FIRST:]:
        rest = html.Ol(items[FIRST:], className="findings")
        shown.append(on_demand(f"{len(items) - FIRST:,} smaller", rest))
    return [section("Why", note, *shown)]


def _finding(found: Finding, step_ns: int, run_id: str) -> html.Li:
    share = f" ({percent(found.gain_ns / step_ns)})" if step_ns else ""
    gain = html.Span(f"{milliseconds(found.gain_ns)}{share}", className="gain")
    words: list[Content] = [gain, html.Span(found.message)]
    if run_id and found.ranks:
        words += [" ", html.Span(led("see it", _where(found, run_id)), className="note")]
    mark = {"borderLeftColor": COLOR.get(found.bucket, COLOR["idle"])}
    return html.Li(words, style=mark)


def _where(found: Finding, run_id: str) -> str:
    """The first event of the finding with as much around it, else its first rank and step."""
    if found.events:
        one = found.events[0]
        edge = max(one.dur_ns, 1_000)
        window = {"from": one.start_ns - edge, "to": one.start_ns + one.dur_ns + edge}
        return page_url(run_id, "timeline", rank=one.rank, **window)
    step = found.steps[0] if found.steps else None
    return page_url(run_id, "timeline", rank=found.ranks[0], step=step)


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
    largest = sorted(report.collectives, key=taken_ns, reverse=True)[:MOST_COLLECTIVES]
    rows = [_collective_row(row, groups.get(row.group)) for row in largest]
    note = "medians; busbw over the transfer alone"
    note += left_out(report.collectives, MOST_COLLECTIVES)
    heads = ("axis", "group", "op", "size", "calls", "transfer", "wait", "busbw")
    return [section("Collectives and messages", note, table(heads, rows))]


def taken_ns(row: CollectiveRow) -> int:
    """What all calls of the row take together, by the median call."""
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
