"""The ledger of a watched job on its page: what its wall clock went to, and its goodput."""

from __future__ import annotations

from dash import html

from stepsplit.analyzer.report.ledger import Ledger
from stepsplit.analyzer.report.ledger_words import (
    format_goodput,
    format_gpu_hours,
    format_rows,
    format_start,
    format_wall,
)
from stepsplit.analyzer.units import format_date, format_percent
from stepsplit.dashboard.pages.components import COLOR, build_card, build_collapsed, build_section
from stepsplit.dashboard.pages.tables import (
    MAX_ROWS,
    Cell,
    DataTable,
    build_number_cell,
    build_table,
)
from stepsplit.dashboard.store.watch import StoredLedger


def build_goodput_card(stored: StoredLedger) -> html.Div:
    """The goodput, and of what it is a part."""
    ledger = stored.ledger
    hours = f"{format_gpu_hours(ledger.gpu_hours)} GPU hours"
    # "at most" would not fit beside the number.
    bound = "at most; " * ledger.is_goodput_bound
    note = f"{bound}of {format_wall(ledger.wall_ns)} in steps that count; {hours}"
    return build_card("goodput", format_percent(ledger.goodput), note, COLOR["compute"])


def build_ledger_section(stored: StoredLedger) -> html.Section:
    """The rows, which add up to the wall clock, with what is not known above them; and the starts
    of the job."""
    ledger = stored.ledger
    lacks = [html.P(f"not known: {lack}", className="message") for lack in ledger.lacks]
    parts = [*lacks, _build_rows(ledger)]
    # A ledger that is too large for a batch has its newest start only.
    starts = ledger.incarnations[-MAX_ROWS:]
    if len(starts) > 1:
        heads = (
            "start", "ranks", "steps", "wall clock", "goodput", "most of the rest", "ending",
        )  # fmt: skip
        rows = []
        for start in starts:
            # Only the newest may go on, of all others the end is known.
            texts = format_start(start, is_newest=start is starts[-1])
            train_ns = sum(row.ns for row in start.rows if row.kind == "train")
            rows.append([
                build_number_cell(texts.start, start.incarnation + 1),
                build_number_cell(texts.ranks, len(start.ranks)),
                Cell(texts.steps),
                build_number_cell(texts.wall, start.wall_ns, "ns"),
                build_number_cell(texts.goodput, train_ns / (start.wall_ns or 1), "ratio"),
                Cell(texts.most_of_the_rest),
                Cell(texts.ending),
            ])  # fmt: skip
        table = build_table(heads, rows)
        parts.append(build_collapsed(f"{len(ledger.incarnations):,} starts", table))
    note = (
        f"of the whole job until {format_date(stored.unix_ns)}, in the mean of its ranks; goodput"
        f" {format_goodput(ledger)}, by the notes on {stored.host}"
    )
    return build_section("Wall clock", note, *parts)


def _build_rows(ledger: Ledger) -> DataTable:
    longest = max((row.ns for row in ledger.rows), default=0) or 1
    rows = []
    *shown, whole = format_rows(ledger)
    for row, texts in zip(ledger.rows, shown, strict=True):
        color = COLOR["compute"] if row.kind == "train" else COLOR["bubble"]
        width = {"width": f"{100 * row.ns / longest:.2f}%", "backgroundColor": color}
        rows.append([
            Cell(texts.name, head=True),
            build_number_cell(texts.time, row.ns, "ns"),
            build_number_cell(texts.share, row.ns / (ledger.wall_ns or 1), "ratio"),
            build_number_cell(texts.number, row.count or None),
            build_number_cell(texts.gpu_hours, row.gpu_hours),
            Cell(html.Div(html.Span(style=width), className="share")),
        ])  # fmt: skip
    rows.append([
        Cell(whole.name, head=True),
        build_number_cell(whole.time, ledger.wall_ns, "ns"),
        build_number_cell(whole.share, 1.0, "ratio"),
        Cell("", number=True),
        build_number_cell(whole.gpu_hours, ledger.gpu_hours),
        Cell(""),
    ])  # fmt: skip
    return build_table(("row", "time", "share", "number", "GPU hours", ""), rows)
