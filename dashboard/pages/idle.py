"""Why ranks idle: by cause, by the op that has most of it, by rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from dash import html

from stepsplit.analyzer.report.build import IDLE_MEANING
from stepsplit.analyzer.report.report import IdleRow, Report
from stepsplit.dashboard.pages.averages import summed_steps
from stepsplit.dashboard.pages.parts import (
    Cell,
    count_cell,
    left_out,
    name_cell,
    on_demand,
    section,
    share_cell,
    table,
    time_cell,
    worst_cell,
)

RANKS, OPS = 64, 20


def idle(report: Report) -> list[html.Section]:
    """A row a cause, the longest first; the ops and the ranks on demand."""
    steps = summed_steps(report)
    rows = [row for row in report.idle if steps[row.rank] and row.idle_ns]
    if not rows:
        return []
    parts = [_by_cause(rows, steps), _by_op(rows, steps)]
    if len({row.rank for row in rows}) > 1:
        parts.append(_by_rank(rows, steps))
    return [section("Why ranks idle", "mean over ranks and full steps", *parts)]


def _by_cause(rows: Sequence[IdleRow], steps: Counter[int]) -> html.Table:
    total = sum(row.idle_ns for row in rows)
    by_cause: dict[str, list[IdleRow]] = defaultdict(list)
    for row in rows:
        by_cause[row.cause].append(row)
    largest = sorted(by_cause.items(), key=lambda item: -_sum(item[1]))
    body = [_cause(cause, own, steps, total) for cause, own in largest]
    heads = ("cause", "most in", "its part", "worst rank", "of idle", "a step")
    return table(heads, body)


def _cause(cause: str, rows: Sequence[IdleRow], steps: Counter[int], total: int) -> list[Cell]:
    told = html.Span(IDLE_MEANING.get(cause, ""), className="note")
    op, part = _most_op(rows)
    return [
        Cell(html.Div([_words(cause), " ", told])),
        name_cell(op),
        share_cell(part) if op else Cell(number=True),
        _worst_rank(rows, steps),
        share_cell(_sum(rows) / total),
        time_cell(_sum(rows) / steps.total()),
    ]


def _most_op(rows: Sequence[IdleRow]) -> tuple[str, float]:
    """The op with most of the rows' idle, and its part of it; ("", 0) where none is named."""
    ops = Counter[str]()
    for row in rows:
        if row.op:
            ops[row.op] += row.idle_ns
    op, ns = max(ops.items(), key=lambda item: item[1], default=("", 0))
    return op, ns / _sum(rows)


def _worst_rank(rows: Sequence[IdleRow], steps: Counter[int]) -> Cell:
    ranks = Counter[int]()
    for row in rows:
        ranks[row.rank] += row.idle_ns
    worst = max(ranks, key=lambda rank: ranks[rank] / steps[rank])
    return worst_cell(worst, ranks[worst] / steps[worst])


def _by_op(rows: Sequence[IdleRow], steps: Counter[int]) -> html.Details:
    """What the report names, all ranks together."""
    sums, gaps = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for row in rows:
        key = (row.cause, "smaller ones" if row.op is None else row.op or "nothing named")
        sums[key] += row.idle_ns
        gaps[key] += row.count
    body = [
        [Cell(_words(cause)), name_cell(op), count_cell(gaps[cause, op]), time_cell(ns)]
        for (cause, op), ns in ((key, ns / steps.total()) for key, ns in sums.most_common(OPS))
    ]
    heads = ("cause", "op, call or function", "gaps", "a step")
    return on_demand(f"by op{left_out(sums, OPS)}", table(heads, body))


def _by_rank(rows: Sequence[IdleRow], steps: Counter[int]) -> html.Details:
    """A row a rank, a column a cause."""
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    for row in rows:
        sums[row.rank][row.cause] += row.idle_ns
    causes = [c for c in IDLE_MEANING if any(own[c] for own in sums.values())]
    most = sorted(sums, key=lambda rank: -sums[rank].total() / steps[rank])[:RANKS]
    body = [
        [Cell(f"rank {rank}"), time_cell(sums[rank].total() / steps[rank])]
        + [time_cell(sums[rank][cause] / steps[rank]) for cause in causes]
        for rank in most
    ]
    heads = ("rank", "idle a step", *map(_words, causes))
    return on_demand(f"by rank, most idle first{left_out(sums, RANKS)}", table(heads, body))


def _sum(rows: Sequence[IdleRow]) -> int:
    return sum(row.idle_ns for row in rows)


def _words(cause: str) -> str:
    return cause.replace("_", " ")
