"""Alerts and incidents of a watched run: those that are open, and a list of what happened."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.units import format_date, format_milliseconds, format_signed_percent
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url
from stepsplit.dashboard.pages.components import build_section
from stepsplit.dashboard.pages.tables import (
    Cell,
    Content,
    build_count_cell,
    build_number_cell,
    build_table,
)
from stepsplit.dashboard.pages.watch_range import ShownRange, build_range_url
from stepsplit.dashboard.store.alerts import TRIES, UNTIL_END_NS, WatchAlert
from stepsplit.dashboard.store.run_row import RunRow
from stepsplit.dashboard.store.watch import StoredEvent, WatchedRun

_SECOND_NS = 10**9

# Open alerts.

_TITLES = {
    "step_time": "step time",
    "silent": "silent",
    "overhead": "overhead",
    "dropped": "dropped",
}

_SILENCES = (("1 h", 1), ("1 day", 24), ("until it ends", None))


def build_alerts_section(
    alerts: Sequence[WatchAlert], now_unix_ns: int, *, may_act: bool
) -> html.Section | None:
    """The open alerts of a run, the newest first; None if there are none.

    may_act: with the buttons; assets/watch.js handles clicks.
    """
    if not alerts:
        return None
    number = f"{len(alerts)} open alert{'s' if len(alerts) > 1 else ''}"
    rows = [_build_alert(one, now_unix_ns, may_act=may_act) for one in alerts]
    return html.Section(
        [html.H2(number), html.Ul(rows, className="alerts")], className="card alert"
    )


def _build_alert(alert: WatchAlert, now_unix_ns: int, *, may_act: bool) -> html.Li:
    known = alert.acknowledged_unix_ns is not None
    pill = html.Span(_TITLES[alert.metric], className="pill" if known else "pill failed")
    where = [] if alert.rank is None else [f"rank {alert.rank}"]
    since = f"since {format_date(alert.since_unix_ns)}"
    since += f", step {alert.step:,}" if alert.step else ""
    parts: list[Component] = [
        html.Div([pill, html.Strong(alert.text)], className="alert-text"),
        html.Div("  ·  ".join([since, *where, *filter(None, [alert.cause])]), className="note"),
        html.Div("  ·  ".join(_describe_state(alert, now_unix_ns)), className="note"),
    ]
    if may_act:
        buttons: list[Any] = []
        if alert.acknowledged_unix_ns is None:
            buttons.append(_build_button("Acknowledge", alert, {"data-action": "acknowledge"}))
        else:
            undo = {"data-action": "unacknowledge"}
            buttons.append(_build_button("Undo acknowledge", alert, undo))
        if alert.is_silenced(now_unix_ns):
            buttons.append(_build_button("End silence", alert, {"data-action": "unsilence"}))
        else:
            buttons.append(html.Span("Silence:", className="note"))
            for label, hours in _SILENCES:
                asked = {
                    "data-action": "silence",
                    "data-hours": "" if hours is None else str(hours),
                }
                buttons.append(_build_button(label, alert, asked))
        parts.append(html.Div(buttons, className="alert-buttons"))
    return html.Li(parts)


def _describe_state(alert: WatchAlert, now_unix_ns: int) -> list[str]:
    """Who knows of it, whether its run is silenced, and what became of its webhook."""
    states = []
    if alert.acknowledged_unix_ns is not None:
        when = format_date(alert.acknowledged_unix_ns)
        states.append(f"acknowledged by {alert.acknowledged_by}, {when}")
    if alert.is_silenced(now_unix_ns):
        until_ns = alert.silenced_until_unix_ns
        assert until_ns is not None
        until = "it ends" if until_ns == UNTIL_END_NS else format_date(until_ns)
        states.append(f"webhooks of this run are silenced until {until}")
    if alert.delivered_unix_ns is not None:
        states.append(f"webhook sent {format_date(alert.delivered_unix_ns)}")
    elif alert.failure:
        then = "trying again" if alert.due_unix_ns is not None else "given up"
        states.append(f"webhook failed {alert.tries} of {TRIES} times, {then}: {alert.failure}")
    return states


def _build_button(label: str, alert: WatchAlert, asked: dict[str, str]) -> html.Button:
    attributes: Any = {"data-alert": str(alert.id), "data-run": alert.run, **asked}
    if asked["data-action"] == "silence":
        attributes["aria-label"] = f"Silence webhooks of this run for {label}".replace(
            "for until", "until"
        )
    return html.Button(label, type="button", className="button", **attributes)


# A job that has stopped.


def is_named_after(dumps: RunRow, run: WatchedRun) -> bool:
    """Whether the run of dumps has the name of the job in its own, or as the value of a tag.

    A longer name is another job's: llama-70b and llama.v2 are not llama.
    """
    whole = rf"(?<![\w.-]){re.escape(run.name)}(?![\w-]|\.\w)"
    is_named = re.search(whole, dumps.name) is not None
    return is_named or any(tag.value == run.name for tag in dumps.tags)


def build_stop_section(
    run: WatchedRun, hangs: Sequence[RunRow], silent_s: float | None
) -> list[html.Section]:
    """What to do if no data arrives any more: how to find the rank that the others wait for, and
    the dumps that were uploaded since.

    hangs: runs of dumps that may be of the job, the newest first; silent_s: for how long no data
    has arrived, None if the job has said that it ends, or if data arrives.
    """
    if silent_s is None:
        return []
    host = run.current_hosts[0].host
    steps: list[Content] = [
        html.Span(["While it still runs, on ", html.Code(host), ": ", html.Code("stepsplit hang"),
                   " names the rank that the others wait for, with its stack."]),
        html.Span(["Upload its answer (", html.Code("stepsplit hang --out FOLDER"),
                   "), the Flight Recorder dumps or the logs of NCCL's watchdog ",
                   dcc.Link("on Runs", href="/"), ": they are a run of their own."]),
    ]  # fmt: skip
    parts: list[Component] = [html.Ul([html.Li(one) for one in steps])]
    named = [one for one in hangs if is_named_after(one, run)]
    unnamed = [one for one in hangs if one not in named]
    unsure = "Uploaded since its last data; of which job is not known, if not named after it:"
    for words, own in (("Dumps of this job:", named), (unsure, unnamed)):
        links = [
            html.Li([dcc.Link(one.name, href=build_page_url(one.id)), f": {one.error}"])
            for one in own[:5]
        ]
        parts += [html.P(words), html.Ul(links)] if links else []
    note = f"no data for {silent_s / 60:,.0f} min, and no word that it ends"
    return [build_section("The job may have stopped", note, *parts)]


# What happened in the range: alerts, and what needs none.

_LANES_OF_INCIDENTS = {
    "restarted": "restart", "pause": "pause", "lost_rank": "lost rank", "drift": "late rank",
}  # fmt: skip
"""Events that are incidents; a change of the step time has an alert."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened to the training.

    Attributes:
        kind: Its name in the list.
        begin_unix_ns: When it began.
        end_unix_ns: When it ended; None if it has not, or has no length.
        is_open: Whether it goes on.
        size: The relative change, or None.
        text: What happened, and how large it was.
        cause: Why, "" if it is not known.
        rank: The rank that others wait for, or None.
        handled: What was done about it.
    """

    kind: str
    begin_unix_ns: int
    end_unix_ns: int | None
    is_open: bool
    size: float | None
    text: str
    cause: str = ""
    rank: int | None = None
    handled: str = ""


def list_incidents(
    alerts: Iterable[WatchAlert],
    events: Iterable[StoredEvent],
    gaps_s: Iterable[tuple[float, float]],
    shown: ShownRange,
) -> list[Incident]:
    """What happened in the range, the newest first.

    gaps_s: begin and end of the times without step times, in s since 1970.
    """
    first_ns, last_ns = (
        at_s * _SECOND_NS for at_s in (shown.within.first_unix_s, shown.within.last_unix_s)
    )
    found = []
    for one in alerts:
        ended_ns = one.ended_unix_ns
        if one.since_unix_ns > last_ns or (ended_ns is not None and ended_ns < first_ns):
            continue
        size, text = None, one.text
        if one.metric == "step_time" and one.before and one.after is not None:
            size = one.after / one.before - 1
            before, after = (format_milliseconds(s * _SECOND_NS) for s in (one.before, one.after))
            text = f"{before} to {after} a step"
        handled = []
        if one.acknowledged_unix_ns is not None:
            handled.append(f"acknowledged by {one.acknowledged_by}")
        if one.delivered_unix_ns is not None:
            handled.append("webhook sent")
        found.append(
            Incident(
                _TITLES[one.metric], one.since_unix_ns, ended_ns, ended_ns is None, size, text,
                one.cause, one.rank, ", ".join(handled),
            )
        )  # fmt: skip
    for event in (one.event for one in events):
        if event.kind in _LANES_OF_INCIDENTS:
            kind = _LANES_OF_INCIDENTS[event.kind]
            found.append(
                Incident(kind, event.unix_ns, None, False, None, event.text, rank=event.rank)
            )
    for begin_s, end_s in gaps_s:
        begin_ns, end_ns = (int(at_s * _SECOND_NS) for at_s in (begin_s, end_s))
        text = "no step times have arrived"
        found.append(Incident("no data", begin_ns, end_ns, False, None, text))
    return sorted(found, key=lambda one: one.begin_unix_ns, reverse=True)


def build_incidents_section(
    incidents: Sequence[Incident], run: str, chosen: AddressQuery, shown: ShownRange
) -> html.Section:
    """The list; the begin of each leads to a range around it."""
    title, note = "What happened", "alerts and incidents of this range; the begin leads to its time"
    if not incidents:
        none = html.P("No alert and no incident in this range.", className="message")
        return build_section(title, "", none)
    rows = []
    for one in incidents:
        begin_s = one.begin_unix_ns / _SECOND_NS
        end_s = shown.within.last_unix_s if one.is_open else (one.end_unix_ns or 0) / _SECOND_NS
        # Half as long before and after, and long enough to see it in slots of a minute.
        room_s = max(600.0, 0.5 * (end_s - begin_s))
        url = build_range_url(run, chosen, begin_s - room_s, max(begin_s, end_s) + room_s)
        when = dcc.Link(format_date(one.begin_unix_ns), href=url, className="when")
        end: Content = html.Span("open", className="pill failed") if one.is_open else ""
        lasted = change = Cell(number=True)
        if one.end_unix_ns is not None:
            end = html.Span(format_date(one.end_unix_ns), className="when")
            minutes = (one.end_unix_ns - one.begin_unix_ns) / 60e9
            words = f"{minutes:,.0f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"
            lasted = build_number_cell(words, one.end_unix_ns - one.begin_unix_ns, "ns")
        if one.size is not None:
            change = build_number_cell(format_signed_percent(one.size), one.size, "ratio")
        rows.append([
            Cell(when), Cell(end), lasted, Cell(one.kind), change,
            Cell(html.Div(one.text, className="result")),
            Cell(html.Div(one.cause, className="result")),
            Cell(number=True) if one.rank is None else build_count_cell(one.rank),
            Cell(one.handled),
        ])  # fmt: skip
    heads = ("begin", "end", "lasted", "what", "change", "size", "cause", "rank", "handled")
    return build_section(title, note, build_table(heads, rows))
