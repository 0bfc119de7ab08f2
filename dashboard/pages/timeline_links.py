"""Links into the timeline, of what stands for a rank, a step, a call or a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from dash import html

from stepsplit.analyzer.report.axis_names import name_group
from stepsplit.analyzer.report.diagnosis_rows import PathKernel
from stepsplit.analyzer.report.report import EventRef, Finding, Report
from stepsplit.analyzer.report.step_rows import select_full_steps
from stepsplit.analyzer.units import format_milliseconds
from stepsplit.dashboard.pages.address import build_page_url
from stepsplit.dashboard.pages.components import View, build_link
from stepsplit.dashboard.pages.tables import Cell, Content


def build_rank_cell(view: View, rank: int | None, **chosen: object) -> Cell:
    """A cell with a rank, which leads to its timeline; None for what no single rank did."""
    if rank is None:
        return Cell("no single rank")
    known = view.run_id and rank in view.report.run.ranks
    url = build_page_url(view.run_id, "timeline", rank=rank, **chosen) if known else None
    return Cell(build_link(f"rank {rank}", url))


def build_worst_cell(view: View, rank: int, ns: float) -> Cell:
    """A cell with the worst rank, which leads to its timeline, and its time in ns."""
    who, time = build_rank_cell(view, rank).content, f", {format_milliseconds(ns)}"
    words: Content = f"{who}{time}" if isinstance(who, str) else html.Span([who, time])
    return Cell(html.Span(words, className="whole"), value=ns, unit="ns")


def build_mark_link(view: View, query: str) -> str | None:
    """Where the marks of a chart lead, see build_graph: the timeline with this query."""
    return f"{build_page_url(view.run_id, 'timeline')}?{query}" if view.run_id else None


def build_span_key(rank: int, start_ns: int, dur_ns: int) -> str:
    """The part of a timeline's address that shows this span of a rank, with a margin."""
    edge = max(dur_ns, 1_000)
    return f"rank={rank}&from={start_ns - edge}&to={start_ns + dur_ns + edge}"


def build_event_url(event: EventRef | PathKernel, run_id: str) -> str:
    """The address of the event in the timeline, with some margin."""
    key = build_span_key(event.rank, event.start_ns, event.dur_ns)
    return f"{build_page_url(run_id, 'timeline')}?{key}"


_MOST_SHOWN, _MOST_OPEN = 16, 2
"""Ranks that the evidence of a finding shows, and how many of each kind have their lanes open."""

_SHORT_SHARE = 0.05
"""Events below this share of their step are looked at in the whole step, as one of many."""


def build_evidence_url(report: Report, finding: Finding, run_id: str) -> str | None:
    """The address of the timeline at what the finding says: the ranks that it blames with their
    lanes, those that wait for them, and the step or the span of the event. None without a step."""
    full = select_full_steps(report.steps)
    event = finding.events[0] if finding.events else None
    # A finding on all ranks is looked at on the one with most of its bucket.
    buckets = report.summary.buckets if report.summary else ()
    worst = tuple(row.worst_rank for row in buckets if row.bucket == finding.bucket)
    blamed = finding.ranks or ((event.rank,) if event else ()) or worst
    if not full or not blamed:
        return None
    waiting = _list_waiting(report, blamed)
    shown = sorted({*blamed[:_MOST_SHOWN], *waiting[: _MOST_SHOWN - 1]})
    opened = [*blamed[:_MOST_OPEN], *waiting[:_MOST_OPEN]]
    chosen: dict[str, object] = {"rank": blamed[0], "open": ",".join(map(str, opened))}
    if len(shown) < len(report.run.ranks) and (waiting or len(blamed) > 1):
        chosen["show"] = ",".join(map(str, shown))
    if event is None:
        numbers = [row.step for row in full if row.rank == blamed[0]] or [full[0].step]
        steps = [step for step in finding.steps if step in numbers] or sorted(numbers)
        return build_page_url(run_id, "timeline", **chosen, step=steps[len(steps) // 2])
    end_ns = event.start_ns + event.dur_ns
    of_rank = (row for row in report.steps if row.rank == event.rank)
    at_ns = event.start_ns
    # An event between two steps has none.
    step = next((one for one in of_rank if 0 <= at_ns - one.start_ns < one.step_ns), None)
    if step is not None and event.dur_ns < _SHORT_SHARE * step.step_ns:
        chosen |= {"step": step.step, "measure": f"{event.start_ns}-{end_ns}"}
    else:
        # What others wait for comes after it.
        edge = max(event.dur_ns, 1_000)
        chosen |= {"from": event.start_ns - edge // 2, "to": end_ns + 2 * edge}
    return build_page_url(run_id, "timeline", **chosen)


def _list_waiting(report: Report, blamed: Collection[int]) -> Sequence[int]:
    """The ranks that wait for these: of their group on the axis on which most waits are blamed on
    them."""
    axes: Counter[str] = Counter()
    for row in report.blame:
        if row.rank in blamed and row.axis is not None:
            axes[row.axis] += row.caused_ns
    for axis, _ in axes.most_common(1):
        for group in report.groups:
            if name_group(group) == axis and set(blamed) & set(group.ranks):
                return [rank for rank in group.ranks if rank not in blamed]
    return ()
