"""Page: overview of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from dash import html
from dash.development.base_component import Component

from stepsplit.analyzer.report.report import (
    NO_MODEL,
    BlameRow,
    Finding,
    GroupRow,
    Report,
    full_steps,
    step_median_ns,
)
from stepsplit.analyzer.split.attribute import Coverage
from stepsplit.analyzer.split.bandwidth import CollectiveRow
from stepsplit.analyzer.split.steps import SlowStep
from stepsplit.analyzer.units import (
    gigabytes_per_second,
    milliseconds,
    milliseconds_between,
    percent,
    signed_percent,
    size,
)
from stepsplit.dashboard.figures.run import (
    by_rank,
    by_step,
    critical_path,
    path_shares,
    sides,
    waterfall,
)
from stepsplit.dashboard.pages.components import (
    COLOR,
    Cell,
    Content,
    View,
    cards,
    count_cell,
    graph,
    led,
    left_out,
    on_demand,
    page_url,
    section,
    share_cell,
    subtitle,
    table,
    time_cell,
)
from stepsplit.dashboard.store.metrics import headline

# Overview: headline numbers, model comparison, bottlenecks, time split by rank and by step.


def overview(view: View) -> list[Component]:
    """The overview page of a run."""
    report = view.report
    return [
        html.P(subtitle(report), className="subtitle"),
        cards(headline(report), report),
        html.Div([_first(view), _second(view)], className="columns"),
        *path(view),
        *holds(report),
        *warnings(report),
    ]


def against_the_model(report: Report) -> list[html.Section]:
    """Predicted against measured step, with the differences in between; a hint without a model."""
    gap = report.gap
    if gap is None:
        return _unmodelled(report)
    shown = gap.shown
    measured, predicted = shown.measured.step_ns, shown.predicted.step_ns
    stage = f" of stage {gap.stage}" if len(gap.stages) > 1 else ""
    difference = signed_percent(measured / predicted - 1) if predicted else "?"
    note = (
        f"step{stage}: measured {milliseconds(measured)} ({difference}), "
        f"predicted {milliseconds(predicted)} "
        f"(range {milliseconds_between(gap.low_ns, gap.high_ns)}, confidence {gap.confidence})"
    )
    caveats = [html.P(f"caveat: {one}", className="note") for one in gap.notes]
    figures = graph("sides", sides(gap)), graph("waterfall", waterfall(gap))
    return [section("Model comparison", note, *figures, *caveats)]


def _unmodelled(report: Report) -> list[html.Section]:
    warning = next((one.message for one in report.warnings if one.code == NO_MODEL), None)
    text = "This report has no prediction to compare with."
    hint = "Add a job.toml next to the traces, or run: stepsplit analyze RUN --job job.toml"
    words = [html.P(warning or text), html.P(hint, className="note")]
    return [section("Model comparison", "not available", *words)]


def _first(view: View) -> html.Div:
    """Top bottlenecks, and the time split by rank and by step."""
    ranks = graph("by-rank", by_rank(view.report))
    steps = graph("by-step", by_step(view.report))
    led = "; click a bar to open its timeline" if view.run_id else ""
    return html.Div(
        [
            *findings(view),
            section("By rank", f"median of each bucket over full steps{led}", ranks),
            section("By step", f"mean over ranks; pale steps are not in medians{led}", steps),
        ]
    )


def _second(view: View) -> html.Div:
    """Model comparison and exposed communication."""
    return html.Div([*against_the_model(view.report), *exposed(view.report)])


# The tables of a run's page; each is an empty list if the report has no rows for it.

ROWS = 100

FIRST = 5

MOST_BLAMED = 10

MOST_COLLECTIVES = 24


def findings(view: View) -> list[html.Section]:
    """Bottlenecks by estimated saving, largest first, each with a link to the timeline."""
    report = view.report
    if not report.findings:
        nothing = html.P("No bottleneck found: no cause accounts for 1 % of the step.")
        return [section("Top bottlenecks", "", nothing)]
    step_ns = step_median_ns(report.steps)
    items = [_finding(found, step_ns, view.run_id) for found in report.findings[:ROWS]]
    note = "estimated saving per step (not additive)"
    shown: list[Component] = [html.Ol(items[:FIRST], className="findings")]
    if items[FIRST:]:
        rest = html.Ol(items[FIRST:], className="findings")
        shown.append(on_demand(f"{len(items) - FIRST:,} smaller", rest))
    return [section("Top bottlenecks", note, *shown)]


def _finding(found: Finding, step_ns: int, run_id: str) -> html.Li:
    share = f" ({percent(found.gain_ns / step_ns)})" if step_ns else ""
    gain = html.Span(f"{milliseconds(found.gain_ns)}{share}", className="gain")
    words: list[Content] = [gain, html.Span(found.message)]
    if run_id and found.ranks:
        words += [" ", html.Span(led("open in timeline", _where(found, run_id)), className="note")]
    mark = {"borderLeftColor": COLOR.get(found.bucket, COLOR["idle"])}
    return html.Li(words, style=mark)


def _where(found: Finding, run_id: str) -> str:
    """The URL of the finding's first event with some margin, or of its first rank and step."""
    if found.events:
        one = found.events[0]
        edge = max(one.dur_ns, 1_000)
        window = {"from": one.start_ns - edge, "to": one.start_ns + one.dur_ns + edge}
        return page_url(run_id, "timeline", rank=one.rank, **window)
    step = found.steps[0] if found.steps else None
    return page_url(run_id, "timeline", rank=found.ranks[0], step=step)


def warnings(report: Report) -> list[html.Details]:
    """Warnings about the recording and its analysis."""
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
    return [section("Exposed communication by axis and phase", note, table(heads, rows))]


_EXPOSED = ("comm", "skew", "bubble")


def blame(report: Report) -> list[html.Section]:
    """Waiting time caused by each rank."""
    steps = len({row.step for row in report.steps})
    if not report.blame or not steps:
        return []
    rows = [_blame_row(row, steps) for row in report.blame[:MOST_BLAMED]]
    note = "waiting time caused per step, summed over the waiting ranks" + left_out(
        report.blame, MOST_BLAMED
    )
    heads = ("rank", "cause", "axis", "skew", "bubble", "caused per step")
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
    """One row per op, size and group, by total time, largest first."""
    if not report.collectives:
        return []
    groups = {group.id: group for group in report.groups}
    largest = sorted(report.collectives, key=taken_ns, reverse=True)[:MOST_COLLECTIVES]
    rows = [_collective_row(row, groups.get(row.group)) for row in largest]
    note = "medians; busbw over the transfer part only"
    note += left_out(report.collectives, MOST_COLLECTIVES)
    heads = ("axis", "group", "op", "size", "calls", "transfer", "wait", "busbw")
    return [section("Collectives and messages", note, table(heads, rows))]


def taken_ns(row: CollectiveRow) -> int:
    """Estimated total time of the row's calls in ns: count times the median call."""
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


# The critical path, and slow steps.

PARTS, STEPS = 6, 8


def path(view: View) -> list[html.Section]:
    """The critical path of the average step, and one sentence per slow step."""
    report = view.report
    shown = [*_path(report), *_slow_steps(view)]
    return [section("Critical path", _note(report), *shown)] if shown else []


def _path(report: Report) -> list[Component]:
    """Empty for a single rank: its critical path equals its split."""
    shares = path_shares(report) if len(report.run.ranks) > 1 else ()
    if not shares:
        return []
    largest = sorted(shares, key=lambda one: -one.ns)[:PARTS]
    rows = [
        [Cell(one.label), Cell(one.whose), share_cell(one.share), time_cell(one.ns)]
        for one in largest
    ]
    heads = ("bucket", "mostly on", "share of path", "per step")
    return [graph("critical-path", critical_path(report)), table(heads, rows)]


def _note(report: Report) -> str:
    """The rank that finishes the step last most often."""
    last = Counter(one.last_rank for one in report.path_steps)
    if not last or len(report.run.ranks) < 2:
        return ""
    rank, often = last.most_common(1)[0]
    return f"rank {rank} finishes last in {often:,} of {last.total():,} steps"


def _slow_steps(view: View) -> list[Component]:
    report = view.report
    if not report.slow_steps:
        return []
    worst = sorted(report.slow_steps, key=lambda one: -one.excess_ns)[:STEPS]
    left = len(report.slow_steps) - len(worst)
    items = [_sentence(one, view.run_id) for one in worst]
    items += [html.Li(f"{left:,} more are in report.json")] if left else []
    head = [html.H3("Slow steps"), html.Span(_usual(report), className="note")]
    return [html.Div([*head, html.Ul(items)], className="slow-steps")]


def _usual(report: Report) -> str:
    """The median step time, each step measured on its slowest rank."""
    run = next((one for one in report.step_times if one.rank is None), None)
    if run is None:
        return ""
    return f"median step on its slowest rank: {milliseconds(run.median_ns)} ({run.steps:,} steps)"


def _sentence(one: SlowStep, run_id: str) -> html.Li:
    where = page_url(run_id, "timeline", step=one.step, rank=one.rank)
    link = led(f"step {one.step}", where if run_id else None)
    cause = f"rank {one.rank} {one.bucket} +{milliseconds(one.excess_in_bucket_ns)}"
    took = f"{milliseconds(one.step_ns)} (+{milliseconds(one.excess_ns)} over the median)"
    return html.Li([link, f" took {took}, mainly {cause}"])


# Measurement coverage: which waits are measured and which are estimates.

RUNS = 12

_WAITS = {"measured": "measured", "partly": "partly estimated", "estimated": "estimated"}


def holds(report: Report) -> list[html.Section]:
    """How completely waits are measured on each axis; empty if all of them are."""
    missing = _missing(report)
    if not missing and all(one.holds == "measured" for one in report.coverage):
        return []
    parts: list[html.P | html.Table] = [html.P(missing)] if missing else []
    if report.coverage:
        heads = ("axis", "waits", "groups", "complete", "one rank only", "calls", "unmatched")
        parts.append(table(heads, [_row(one) for one in report.coverage]))
    note = "compute, copy, idle and the step time are measured even if ranks are missing"
    return [section("Coverage", note, *parts)]


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
    """A sentence on the ranks that were not recorded; "" if all were."""
    run = report.run
    absent = sorted(set(range(run.world_size)) - set(run.ranks))
    if not absent:
        return ""
    return f"{len(absent):,} of {run.world_size:,} ranks were not recorded: {_listed(absent)}."


def _listed(ranks: Sequence[int]) -> str:
    """The ranks as text, with consecutive ones joined to ranges."""
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
