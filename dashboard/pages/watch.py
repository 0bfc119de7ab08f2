"""Pages: the list of watched runs, and the live page of one."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median
from urllib.parse import quote

import numpy as np
from dash import dcc, html

from stepsplit.analyzer.errors import DataError
from stepsplit.analyzer.units import (
    format_date,
    format_milliseconds,
    format_percent,
    format_signed_percent,
)
from stepsplit.dashboard.figures.watch import (
    MAX_ROWS,
    EventMark,
    SplitBins,
    StepCurve,
    TimeAxis,
    draw_exposed_over_time,
    draw_rank_grid,
    draw_split_over_time,
    draw_step_times,
)
from stepsplit.dashboard.pages.address import AddressQuery, build_page_url
from stepsplit.dashboard.pages.components import (
    COLOR,
    build_card,
    build_collapsed,
    build_empty_card,
    build_graph,
    build_legend,
    build_menu,
    build_section,
    build_share_bar,
)
from stepsplit.dashboard.pages.page import PageContent, PageRequest, StorePage, build_live_frame
from stepsplit.dashboard.pages.tables import (
    Cell,
    Content,
    build_count_cell,
    build_number_cell,
    build_table,
    build_time_cell,
)
from stepsplit.dashboard.pages.watch_alerts import (
    build_alerts_section,
    build_incidents_section,
    build_stop_section,
    is_named_after,
    list_incidents,
)
from stepsplit.dashboard.pages.watch_ledger import build_goodput_card, build_ledger_section
from stepsplit.dashboard.pages.watch_range import ShownRange, build_range_controls, choose_range
from stepsplit.dashboard.store.alerts import WatchAlert
from stepsplit.dashboard.store.ids import is_watch_name
from stepsplit.dashboard.store.run_row import RunRow
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import (
    SplitSlot,
    StepSlot,
    StoredEvent,
    StoredLedger,
    StoredSample,
    WatchedRun,
    WatchRange,
    WatchStore,
)
from stepsplit.dashboard.store.watch_slots import (
    DAY_S,
    HOUR_S,
    LEVELS_S,
    MINUTE_S,
    TEN_MINUTES_S,
    RankGrid,
    StepSummary,
    compute_slot_start,
)

_SECOND_NS = 10**9

# What the page shows, read from the store.

_LAST_EVENTS, _LAST_SAMPLES, _LAST_ALERTS, _SHOWN_ALERTS = 1_000, 20, 500, 20

_SILENT_NS = 5 * 60 * _SECOND_NS
"""A run or host without a batch for so long is silent."""


@dataclass(frozen=True, slots=True)
class WatchView:
    """A watched run in a range of time.

    shorter_steps: the slots that those of steps are made of, as far as they are kept; none of the
    shortest. first_hour is None unless its start is longer ago. ledger is that of the whole job.
    """

    run: WatchedRun
    now_unix_ns: int
    shown: ShownRange
    steps: tuple[StepSlot, ...]
    shorter_steps: tuple[StepSlot, ...]
    splits: tuple[SplitSlot, ...]
    waits: RankGrid
    lateness: RankGrid
    events: tuple[StoredEvent, ...]
    samples: tuple[StoredSample, ...]
    newest_steps: tuple[StepSlot, ...]
    first_hour: StepSummary | None
    ledger: StoredLedger | None

    @property
    def axis(self) -> TimeAxis:
        """The range of time of all charts."""
        return TimeAxis(self.shown.within.first_unix_s, self.shown.within.last_unix_s)


def read_watch_view(
    watches: WatchStore, run: WatchedRun, chosen: AddressQuery, now_unix_ns: int
) -> WatchView:
    """Reads what the page of a watched run shows; a run that ended is shown until its end."""
    shown = choose_range(run, chosen, now_unix_ns)
    within, bin_s = shown.within, shown.bin_s
    shorter = [level_s for level_s in LEVELS_S if level_s < within.level_s]
    # Several hosts may report one event of the whole job.
    events: dict[object, StoredEvent] = {}
    for one in watches.read_events(run.id, within, _LAST_EVENTS):
        event = one.event
        key = (one.incarnation, event.kind, event.step, event.rank, event.text)
        events.setdefault(key, one)
    return WatchView(
        run, now_unix_ns, shown,
        watches.read_steps(run.id, within),
        watches.read_steps(run.id, replace(within, level_s=shorter[-1])) if shorter else (),
        watches.read_splits(run.id, within),
        watches.read_waits(run.id, within, bin_s), watches.read_lateness(run.id, within, bin_s),
        tuple(events.values()),
        watches.list_samples(run.id, _LAST_SAMPLES),
        watches.read_steps(run.id, run.newest_minutes), read_first_hour(watches, run),
        watches.read_ledger(run.id),
    )  # fmt: skip


def read_first_hour(watches: WatchStore, run: WatchedRun) -> StepSummary | None:
    """The step times of the first hour of the newest start; None within it."""
    first_s = compute_slot_start(run.start.first_unix_ns, HOUR_S)
    if first_s == compute_slot_start(run.newest_unix_ns, HOUR_S):
        return None
    slots = watches.read_steps(run.id, WatchRange(first_s, first_s + HOUR_S, HOUR_S))
    own = [one.summary for one in slots if one.incarnation == run.start.incarnation]
    return own[0] if own else None


# The list of watched runs.


def build_watch_list(
    runs: Sequence[WatchedRun], now_unix_ns: int, open_alerts: Mapping[str, int]
) -> html.Div:
    """The watched runs, those with the newest batches first.

    open_alerts: the number of open alerts by name of the run; none for those that are not in it.
    """
    if not runs:
        hint: list[Content] = [
            "Watch a training with ",
            html.Code("stepsplit watch --to URL -- torchrun ... train.py"),
            ", where URL is the address of this dashboard.",
        ]
        return html.Div([html.H1("Watch"), html.P(hint, className="card empty")])
    heads = (
        "run", "state", "open alerts", "ranks", "starts", "last step", "last data", "overhead",
        "sample each", "dropped",
    )  # fmt: skip
    table = build_table(heads, [_build_list_row(run, now_unix_ns, open_alerts) for run in runs])
    head = html.Div(html.H1("Watch"), className="heading")
    return html.Div([head, html.Section(table, className="card")])


def _build_list_row(
    run: WatchedRun, now_unix_ns: int, open_alerts: Mapping[str, int]
) -> list[Cell]:
    number = open_alerts.get(run.name, 0)
    when = html.Span(format_date(run.newest_unix_ns), className="when")
    overhead, steps = "no sample yet", run.interval_steps
    if run.overhead is not None:
        overhead = f"{format_percent(run.overhead, 2)} of {format_percent(run.budget, 2)}"
    interval = "no more samples" if steps is None else f"{steps:,} steps"
    return [
        Cell(dcc.Link(run.name, href=f"/watch/{quote(run.name)}", className="run-link")),
        Cell(_build_state(run, now_unix_ns)),
        Cell(html.Span(number, className="pill failed") if number else "none", value=number),
        build_count_cell(run.start.world_size),
        build_count_cell(len(run.starts)),
        build_count_cell(run.last_step),
        Cell(when, value=run.newest_unix_ns / 1e9),
        build_number_cell(overhead, run.overhead, "ratio"),
        build_number_cell(interval, steps),
        build_count_cell(sum(run.dropped.values())),
    ]


def _is_silent(run: WatchedRun, now_unix_ns: int) -> bool:
    is_old = now_unix_ns - run.received_unix_ns > _SILENT_NS
    return is_old and run.start.ended_unix_ns is None


def _build_state(run: WatchedRun, now_unix_ns: int) -> html.Span:
    if run.start.ended_unix_ns is not None:
        return html.Span("ended", className="pill")
    if _is_silent(run, now_unix_ns):
        return html.Span("silent", className="pill failed")
    return html.Span("live", className="pill done")


# The page of one run.


def build_watch_page(
    view: WatchView,
    chosen: AddressQuery,
    alerts: Sequence[WatchAlert] = (),
    hangs: Sequence[RunRow] = (),
    *,
    may_act: bool = False,
) -> html.Div:
    """The live page of a watched run, with its open alerts at the top, and what happened.

    alerts: the newest ones, open or ended; hangs: runs of dumps, the newest first; may_act: with
    buttons.
    """
    run, start = view.run, view.run.start
    state = _build_state(run, view.now_unix_ns)
    ranges = build_range_controls(run, chosen, view.shown, view.now_unix_ns)
    head = html.Div([html.H1(run.name), state, ranges], className="heading")
    n_hosts = len(run.current_hosts)
    which = "first start" if len(run.starts) == 1 else f"start {len(run.starts)} of the job"
    facts = [
        f"{start.world_size:,} ranks on {n_hosts:,} host{'' if n_hosts == 1 else 's'}",
        f"{which}, {format_date(start.first_unix_ns)}",
        f"step {run.last_step:,}",
    ]
    subtitle = html.P("  ·  ".join(facts), className="subtitle")
    opened = [one for one in alerts if one.ended_unix_ns is None][:_SHOWN_ALERTS]
    urgent = build_alerts_section(opened, view.now_unix_ns, may_act=may_act)
    incidents = list_incidents(alerts, view.events, _list_gaps_s(view), view.shown)
    happened = build_incidents_section(incidents, run.name, chosen, view.shown)
    ledger = [] if view.ledger is None else [build_ledger_section(view.ledger)]
    silent_s = None
    if _is_silent(run, view.now_unix_ns):
        silent_s = (view.now_unix_ns - run.newest_unix_ns) / _SECOND_NS
    parts = [
        head, subtitle, *build_stop_section(run, hangs, silent_s),
        *([] if urgent is None else [urgent]), _build_watch_cards(view),
    ]  # fmt: skip
    if not view.steps and not view.splits:
        hint = f"No batch has data of this {view.shown.label}; choose a longer or another one."
        empty = build_empty_card("No data in this range", hint)
        return html.Div([*parts, empty, happened, *ledger])
    as_share, sums = chosen.find_text("unit") != "ms", _sum_samples(view)
    return html.Div(
        [
            *parts,
            _build_steps_section(view),
            happened,
            *ledger,
            _build_split_section(view, sums, as_share),
            *_build_exposed_section(view, sums),
            # By the unprofiled steps of all ranks, and by samples.
            _build_grid_section(
                "Lateness", view.lateness, view.axis,
                "how much later than the others a rank has its last gradient, by steps without the"
                " profiler; before it waits for the gradients of others",
                "rank {rank} is {ms} late", "No rank has noted when its gradients are ready.",
            ),
            _build_grid_section(
                "Caused waits", view.waits, view.axis,
                "how long others waited for each rank in a step; empty where it was not sampled",
                "others waited {ms} a step for rank {rank}", "No sample with data in this range.",
            ),
            _build_samples_section(view),
            _build_events_section(view),
            _build_hosts(view),
        ]
    )  # fmt: skip


def _build_watch_cards(view: WatchView) -> html.Div:
    run = view.run
    over = run.overhead is not None and run.overhead > run.budget
    measured = "none yet" if run.overhead is None else format_percent(run.overhead, 2)
    given_up = sum(run.dropped.values())
    reasons = "; ".join(f"{number:,} {reason}" for reason, number in run.dropped.items())
    interval = run.interval_steps
    # Against the first hour of the same start: another start may have another job's settings.
    own = [s for s in view.newest_steps if s.incarnation == run.start.incarnation]
    step, first, note = "none", view.first_hour, "no step times in its last 10 min of data"
    if own:
        newest_ns = median(s.summary.median_step_ns for s in own)
        step, note = format_milliseconds(newest_ns), "over its last 10 min of data"
        if first is not None and first.median_step_ns:
            change = newest_ns / first.median_step_ns - 1
            note += f"; {format_signed_percent(change)} since the first hour of this start"
    # Against the newest host, not against now: a run that has ended has no silent hosts.
    silent = [
        host.host for host in run.current_hosts
        if run.newest_unix_ns - host.newest_unix_ns > _SILENT_NS
    ]  # fmt: skip
    number = len(run.current_hosts)
    host_note = f"of all {number:,} hosts" if number > 1 else f"of host {run.hosts[0].host}"
    if silent:
        more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
        host_note = f"{len(silent)} of {number:,} hosts silent: {', '.join(silent[:3])}{more}"
    seconds = max((view.now_unix_ns - run.newest_unix_ns) // _SECOND_NS, 0)
    age = f"{seconds} s ago"
    # From two units on: "1 h ago" would be anything up to two hours.
    for unit, length in (("min", MINUTE_S), ("h", HOUR_S), ("d", DAY_S)):
        if seconds >= 2 * length:
            age = f"{seconds // length} {unit} ago"
    cards = [
        build_card("median step", step, note, COLOR["compute"] if own else None),
        *([] if view.ledger is None else [build_goodput_card(view.ledger)]),
        build_card(
            "overhead of samples", measured, f"budget {format_percent(run.budget, 2)}",
            "var(--bad)" if over else None,
        ),
        build_card("interval of samples", "none", "no more samples") if interval is None
        else build_card("interval of samples", f"{interval:,}", "steps"),
        build_card("last data", age, host_note, "var(--bad)" if silent else None),
        build_card(
            "dropped", f"{given_up:,}", reasons or "nothing was given up",
            "var(--bad)" if given_up else None,
        ),
    ]  # fmt: skip
    return html.Div(cards, className="cards")


# Step times, with a mark for each event.

_LANES = {
    "started": "start", "restarted": "restart", "ended": "end", "pause": "pause",
    "change": "change", "drift": "drift", "capture": "capture", "no_data": "no data",
    "dropped": "dropped", "sampling_ended": "no more samples", "lost_rank": "lost rank",
}  # fmt: skip

_PROBLEMS = ("change", "drift", "no_data", "dropped", "sampling_ended", "lost_rank")

_IN_SPLIT = ("capture", "no_data", "sampling_ended")


def _build_steps_section(view: WatchView) -> html.Section:
    level_s = view.shown.level_s
    within: dict[tuple[int, int], list[int]] = defaultdict(list)
    for slot in view.shorter_steps:
        start_s = slot.start_unix_s // level_s * level_s
        within[slot.incarnation, start_s].append(slot.summary.median_step_ns)
    lines = [
        _build_step_curve(list(slots), level_s, within)
        for _, slots in groupby(
            sorted(view.steps, key=lambda s: (s.incarnation, s.start_unix_s)),
            key=lambda s: s.incarnation,
        )
    ]
    marks = [_build_mark(one) for one in view.events]
    for gap_s in _list_gaps_s(view):
        begin, end = (format_date(at_s * _SECOND_NS) for at_s in gap_s)
        text = f"no step times have arrived, from {begin} to {end}"
        marks.append(EventMark(_LANES["no_data"], sum(gap_s) / 2, text, True))
    marks.sort(key=lambda one: (list(_LANES.values()).index(one.lane), one.unix_s))
    note = "median over the ranks; thin lines are the shortest and the longest step of any rank"
    if view.shorter_steps:
        parts = _PART_NAMES[view.shown.level_s]
        note += f"; the band holds 8 of 10 medians of the {parts} in each point"
    if view.steps:
        longest = max(slot.summary.max_step_ns for slot in view.steps)
        note += f" (longest {format_milliseconds(longest)})"
    figure = draw_step_times(lines, marks, view.axis)
    return build_section("Step time", note, build_graph("watch-steps", figure))


def _find_gap_s(starts_s: Sequence[int], level_s: int) -> float:
    """The distance in s from which on two neighbors have a gap between them: three times the usual
    one, since slow steps do not end in every slot."""
    usual = median(np.diff(starts_s).tolist()) if len(starts_s) > 1 else level_s
    return 3.0 * max(usual, level_s)


def _list_gaps_s(view: WatchView) -> list[tuple[int, int]]:
    """Begin and end of the times of which no step times have arrived."""
    level_s = view.shown.level_s
    starts = sorted({slot.start_unix_s for slot in view.steps})
    gap_s = _find_gap_s(starts, level_s)
    return [(one + level_s, other) for one, other in pairwise(starts) if other - one > gap_s]


def _build_mark(one: StoredEvent) -> EventMark:
    event = one.event
    is_named = event.rank is None or f"rank {event.rank}" in event.text
    where = "" if is_named else f", rank {event.rank}"
    text = f"step {event.step:,}{where}: {event.text}"
    return EventMark(_LANES[event.kind], event.unix_ns / 1e9, text, event.kind in _PROBLEMS)


_PART_NAMES = {TEN_MINUTES_S: "minutes", HOUR_S: "ten minutes", DAY_S: "hours"}
"""The slots that a slot of this length is made of."""


def _build_step_curve(
    slots: Sequence[StepSlot], level_s: int, within: Mapping[tuple[int, int], Sequence[int]]
) -> StepCurve:
    """The slots of one start as a line, which ends where a slot has no steps.

    within: the medians of the shorter slots by start of the job and start of the slot.
    """
    rows: list[tuple[float, ...]] = []
    notes: list[str] = []
    gap_s = _find_gap_s([slot.start_unix_s for slot in slots], level_s)
    for slot in slots:
        at, summary = slot.start_unix_s + level_s / 2, slot.summary
        if rows and at - rows[-1][0] > gap_s:
            rows.append((rows[-1][0] + level_s, *[np.nan] * 5))
            notes.append("")
        low, middle, high = summary.min_step_ns, summary.median_step_ns, summary.max_step_ns
        medians = within.get((slot.incarnation, slot.start_unix_s), [])
        # Of one part there is no spread.
        spread = np.percentile(medians, [10, 90]).tolist() if len(medians) > 1 else [middle] * 2
        rows.append((at, low, middle, high, *spread))
        low_ms, middle_ms, high_ms, slowest = (
            format_milliseconds(ns) for ns in (low, middle, high, summary.slowest_median_ns)
        )
        notes.append(
            f"<b>median {middle_ms}</b><br>{low_ms} to {high_ms}<br>"
            f"{summary.steps:,} steps of {summary.ranks:,} ranks<br>"
            f"slowest rank {summary.slowest_rank}: median {slowest}"
        )
    unix_s, low_ns, median_ns, high_ns, p10_ns, p90_ns = np.array(rows, dtype=np.float64).T
    return StepCurve(unix_s, low_ns, median_ns, high_ns, p10_ns, p90_ns, tuple(notes))


# The split of the samples.


@dataclass(frozen=True, slots=True)
class _SampleSums:
    """Sums of the samples in bins of time."""

    bins: SplitBins
    exposed_ns: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]
    no_data: Mapping[int, Counter[str]]


def _sum_samples(view: WatchView) -> _SampleSums:
    bin_s = view.shown.bin_s
    first_s = view.shown.within.first_unix_s // bin_s * bin_s
    number = (view.shown.within.last_unix_s - first_s) // bin_s + 1
    totals, counts = np.zeros((7, number)), np.zeros(number)
    exposed: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = defaultdict(
        lambda: np.zeros(number)
    )
    no_data: dict[int, Counter[str]] = defaultdict(Counter)
    for slot in view.splits:
        at = (slot.start_unix_s - first_s) // bin_s
        totals[:, at] += slot.total.buckets_ns
        counts[at] += slot.rank_samples
        for axis, ns in slot.exposed_ns.items():
            exposed[axis][at] += ns
        if slot.no_data:
            no_data[at].update(slot.no_data)
    known = np.where(counts > 0, counts, np.nan)
    notes = tuple(f"mean of {int(n):,} steps of sampled ranks" for n in counts)
    starts = first_s + bin_s * np.arange(number, dtype=np.int64)
    return _SampleSums(
        SplitBins(starts, bin_s, totals / known, notes),
        {axis: values / known for axis, values in exposed.items()},
        no_data,
    )


def _build_split_section(view: WatchView, sums: _SampleSums, as_share: bool) -> html.Section:
    # Samples without data, and what else keeps samples away.
    bin_s, marks = sums.bins.bin_s, []
    reasons = {reason for counted in sums.no_data.values() for reason in counted}
    for at, counted in sorted(sums.no_data.items()):
        text = "; ".join(f"{number} of {reason}" for reason, number in counted.items())
        middle = float(sums.bins.start_unix_s[at]) + bin_s / 2
        marks.append(EventMark(_LANES["no_data"], middle, f"samples without data: {text}", True))
    marks += [
        _build_mark(one)
        for one in view.events
        if one.event.kind in _IN_SPLIT and one.event.text not in reasons
    ]
    marks.sort(key=lambda one: (one.lane, one.unix_s))
    figure = draw_split_over_time(sums.bins, marks, view.axis, as_share=as_share)
    menu = build_menu(
        "unit", {"": "share of the step", "ms": "ms"}, "" if as_share else "ms", "", "shown as"
    )
    note = "mean step of the sampled ranks; a gap where no sample has data, with the reason above"
    head = html.Div([html.Div(menu, className="choices"), build_legend()], className="split-head")
    return build_section("Split", note, head, build_graph("watch-split", figure))


def _build_exposed_section(view: WatchView, sums: _SampleSums) -> list[html.Section]:
    if not sums.exposed_ns:
        return []
    # The bins that a line goes through: those with data, and an empty one in each gap.
    known = np.flatnonzero(np.isfinite(sums.bins.buckets_ns[0])).tolist()
    gap, shown = _find_gap_s(known, 1), known[:1]
    for one, other in pairwise(known):
        if other - one > gap or any(one < at < other for at in sums.no_data):
            shown.append(one + 1)
        shown.append(other)
    unix_s = sums.bins.start_unix_s[shown].astype(np.float64) + sums.bins.bin_s / 2
    exposed = {axis: values[shown] for axis, values in sums.exposed_ns.items()}
    figure = draw_exposed_over_time(unix_s, exposed, view.axis)
    note = "exposed time of the mean step by axis, waits included"
    graph = build_graph("watch-exposed", figure)
    return [build_section("Exposed communication", note, graph)]


# Ranks that are late.


SAMPLE_CHARTS = (
    "watch-steps", "watch-split", "watch-exposed", "watch-lateness", "watch-caused-waits",
)  # fmt: skip
"""The charts on which a click opens the stored run of the nearest sample."""


def parse_click(clicked: object) -> int:
    """The time of the point that was clicked on in a chart over time, in ns since 1970.

    Raises ValueError.
    """
    try:
        text = str(clicked["points"][0]["x"])  # type: ignore[index]
        return int(np.datetime64(text.strip().replace(" ", "T"), "ns").astype(np.int64))
    except (LookupError, TypeError) as error:
        raise ValueError(f"no point of a chart: {error}") from None


def _build_grid_section(
    title: str, grid: RankGrid, axis: TimeAxis, note: str, sentence: str, without: str
) -> html.Section:
    if not np.isfinite(grid.mean_ns).any():
        return build_section(title, note, html.P(without, className="message"))
    figure = draw_rank_grid(grid.start_unix_s, grid.bin_s, grid.mean_ns, axis, sentence)
    if len(grid.mean_ns) > MAX_ROWS:
        size = -(-len(grid.mean_ns) // MAX_ROWS)
        note += f"; a row shows the worst of {size} ranks"
    name = title.lower().replace(" ", "-")
    return build_section(title, note, build_graph(f"watch-{name}", figure))


# The newest samples, events and hosts as tables.


def _build_samples_section(view: WatchView) -> html.Section:
    key = lambda one: (one.incarnation, one.sample.step)  # noqa: E731
    newest = sorted(view.samples, key=key, reverse=True)
    groups = [list(own) for _, own in groupby(newest, key=key)]
    note = f"the newest {len(groups)}, of all hosts" if groups else "none yet"
    if any(one.run_id for one in newest):
        note += "; a click on a chart opens the nearest one that is stored as a run"
    heads = ("step", "when", "ranks", "median step", "split", "waited for", "cost", "result")
    table = build_table(heads, [_build_sample_row(own) for own in groups])
    return build_section("Samples", note, table)


def _build_sample_row(hosts: Sequence[StoredSample]) -> list[Cell]:
    """A row for the samples of one step, which all hosts took together."""
    samples = [one.sample for one in hosts]
    ranks = [one for sample in samples for one in sample.ranks]
    when = format_date(min(sample.unix_ns for sample in samples))
    unknown = Cell("", number=True)
    worst = max(ranks, key=lambda one: one.caused_wait_ns, default=None)
    totals = [sum(own) for own in zip(*(one.split.buckets_ns for one in ranks), strict=True)]
    # The hosts sample at once: the job stood still for the longest of them.
    cost_ns = max(sample.cost_ns for sample in samples)
    reasons = Counter(sample.no_data for sample in samples if sample.no_data)
    number = len(hosts)
    parts: list[Content] = [
        f"no data: {reason}" if count == number else f"no data of {count} of {number}: {reason}"
        for reason, count in reasons.items()
    ]
    parts += list(dict.fromkeys(sample.finding for sample in samples if sample.finding))
    parts += [
        dcc.Link("open the run", href=build_page_url(one.run_id)) for one in hosts if one.run_id
    ]
    parts += [f"traces on {one.host}: {one.sample.traces}" for one in hosts if one.sample.traces]
    return [
        build_count_cell(samples[0].step),
        Cell(html.Span(when, className="when")),
        build_count_cell(len(ranks)),
        build_time_cell(median(one.split.step_ns for one in ranks)) if ranks else unknown,
        Cell(
            build_share_bar([one / max(sum(totals), 1) for one in totals]) if ranks else "no data"
        ),
        Cell(f"rank {worst.rank}, {format_milliseconds(worst.caused_wait_ns)}")
        if worst is not None and worst.caused_wait_ns
        else Cell(""),
        build_time_cell(cost_ns),
        Cell(html.Div([html.Div(part) for part in parts], className="result")),
    ]


def _build_events_section(view: WatchView) -> html.Section:
    heads = ("when", "event", "step", "where", "what")
    rows = [
        [
            Cell(html.Span(format_date(one.event.unix_ns), className="when")),
            Cell(_LANES[one.event.kind]),
            build_count_cell(one.event.step),
            Cell(one.host if one.event.rank is None else f"rank {one.event.rank}, {one.host}"),
            Cell(html.Div(one.event.text, className="result")),
        ]
        for one in view.events[:100]
    ]
    if not rows:
        none = html.P("No events in this range.", className="message")
        return build_section("Events", "", none)
    return build_section("Events", "of this range, newest first", build_table(heads, rows))


def _build_hosts(view: WatchView) -> html.Section:
    heads = ("host", "start", "last batch", "overhead")
    # Those of earlier starts too: a host that was replaced may be why the job began again.
    rows = [
        [
            Cell(host.host),
            build_count_cell(host.incarnation),
            Cell(html.Span(format_date(host.newest_unix_ns), className="when")),
            Cell("", number=True)
            if host.overhead is None
            else build_number_cell(format_percent(host.overhead), host.overhead, "ratio"),
        ]
        for host in view.run.hosts
    ]
    table = build_table(heads, rows)
    return html.Section(build_collapsed(f"{len(rows):,} hosts", table), className="card")


# The entry.


def _build_live(request: PageRequest) -> PageContent | None:
    """The list of watched runs, or the page of one; None if the run does not exist, or if the mark
    shows that it is still the same."""
    store, name, now_ns = request.store, request.address.item, time.time_ns()
    run = store.watches.find_watch(name) if name else None
    if name and run is None:
        return None
    chosen = request.address.chosen
    runs = store.watches.list_watches() if run is None else (run,)
    # Changes when the page is to be drawn again: each minute, and in the shortest range with each
    # batch.
    minute = now_ns // (60 * _SECOND_NS)
    number = sum(run.batches for run in runs if choose_range(run, chosen, now_ns).name == "1h")
    newest = f"{minute}.{number}"
    if newest == request.mark:
        return None
    if run is None:
        page = build_watch_list(runs, now_ns, store.alerts.count_open())
        return PageContent(page, fingerprint=newest)
    view = read_watch_view(store.watches, run, chosen, now_ns)
    alerts = store.alerts.list_alerts(run.name, _LAST_ALERTS)
    hangs = _list_dumps(store, run) if _is_silent(run, now_ns) else []
    page = build_watch_page(view, chosen, alerts, hangs, may_act=request.rights.edit)
    return PageContent(page, fingerprint=newest)


_MOST_DUMPS = 10


def _list_dumps(store: Store, run: WatchedRun) -> list[RunRow]:
    """Runs of dumps that may be of the job, the newest first, uploaded from an hour before its last
    data on: with its name, or without a rank that the job does not have."""
    since_ns = run.newest_unix_ns - 3_600 * _SECOND_NS
    hangs = [one for one in store.list_runs() if one.is_hang and one.created_unix_ns >= since_ns]
    named = [one for one in hangs if is_named_after(one, run)]
    for one in [one for one in hangs if one not in named][:_MOST_DUMPS]:
        with suppress(DataError):
            hang = store.load_hang(one.id)
            if max((*hang.ranks, *hang.no_dump), default=0) < run.start.world_size:
                named.append(one)
    return named


def _build_page(request: PageRequest) -> PageContent | None:
    live = _build_live(request)
    return live and PageContent(build_live_frame(live.children, live.fingerprint))


def _find_run(store: Store, name: str, clicked: object) -> str | None:
    """The stored run of the sample that is nearest to the click."""
    unix_ns, run = parse_click(clicked), store.watches.find_watch(name)
    return None if run is None else store.watches.find_run_of_sample(run.id, unix_ns)


PAGE = StorePage(
    "Watch", "/watch", _build_page, _build_live,
    is_item=is_watch_name,
    has_item=lambda store, name: not name or store.watches.find_watch(name) is not None,
    loads_charts=True, charts=SAMPLE_CHARTS, find_run=_find_run,
)  # fmt: skip
