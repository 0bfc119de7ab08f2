"""Alerts of watched runs in SQL: opened once, ended, acknowledged, silenced, delivered once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from sqlalchemy import Row, Select, case, delete, func, insert, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.watch.levels import LEAST_CHANGE, POINT_STEPS, RECENT_POINTS
from stepsplit.analyzer.watch.records import WatchBatch, WatchEvent
from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.ids import clean_text
from stepsplit.dashboard.store.schema import WATCH_ALERTS, WATCH_STARTS, WATCHES

_SECOND_NS, _HOUR_NS = 10**9, 3_600 * 10**9

CAUSE_WAIT_S = 180
"""The webhook of a change waits so long for the sample that explains it."""

LASTS_S = 60
"""A change that is over sooner has no webhook."""

DROPPED_S = 3_600
"""An alert of dropped data ends when nothing was dropped for so long."""

EXPECTED_DROPS = ("sample",)
"""Not worth an alert: the oldest samples make room for new ones."""

LATEST_S = 3_600
"""What was due longer ago, as while no server was running, is not delivered any more."""

LEASE_S, TRIES = 30, 3
"""A server process has so long for one of the tries of a delivery."""

UNTIL_END_NS = (1 << 63) - 1
"""Silenced for as long as the alert is open."""

Metric = Literal["step_time", "silent", "overhead", "dropped"]

METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True, slots=True)
class WatchAlert:
    """An alert of a watched run.

    before and after are seconds for the step time, else parts or numbers. cause explains a change;
    rank is the one that others wait for. failure is the reason of the last failed delivery, due
    when the next one is to be tried; None if there is no more to do.
    """

    id: int
    run: str
    metric: Metric
    incarnation: int
    step: int
    since_unix_ns: int
    before: float | None
    after: float | None
    rank: int | None
    text: str
    cause: str
    opened_unix_ns: int
    ended_unix_ns: int | None
    acknowledged_unix_ns: int | None
    acknowledged_by: str | None
    silenced_until_unix_ns: int | None
    due_unix_ns: int | None
    tries: int
    delivered_unix_ns: int | None
    failure: str

    def is_silenced(self, now_unix_ns: int) -> bool:
        """Whether it silences its run at this time."""
        return (self.silenced_until_unix_ns or 0) > now_unix_ns


@dataclass(frozen=True, slots=True)
class AlertCondition:
    """A state of a run that is worth an alert once it has lasted for wait_s; hosts: whose state it
    is, "" if it is that of the run. An open alert follows them."""

    text: str
    incarnation: int
    step: int
    since_unix_ns: int
    before: float | None = None
    after: float | None = None
    wait_s: int = 0
    hosts: str = ""


class AlertStore:
    """The alerts of a store. Thread-safe; all processes of the store share it."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def list_alerts(self, run: str, last: int, *, is_open: bool = False) -> tuple[WatchAlert, ...]:
        """The newest alerts of a run, newest first; with is_open those that have not ended."""
        table = WATCH_ALERTS.c
        query = _select_alerts().where(WATCHES.c.name == run, table.opened_unix_ns.is_not(None))
        if is_open:
            query = query.where(table.ended_unix_ns.is_(None))
        newest = query.order_by(table.since_unix_ns.desc(), table.id.desc()).limit(last)
        with self._database.begin_read() as connection:
            return tuple(WatchAlert(*row) for row in connection.execute(newest))

    def count_open(self) -> dict[str, int]:
        """The number of open alerts by run, of the runs that have any."""
        table = WATCH_ALERTS.c
        query = (
            select(WATCHES.c.name, func.count())
            .select_from(WATCH_ALERTS.join(WATCHES))
            .where(table.opened_unix_ns.is_not(None), table.ended_unix_ns.is_(None))
            .group_by(WATCHES.c.name)
        )
        with self._database.begin_read() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def find_alert(self, run: str, alert_id: int) -> WatchAlert | None:
        """The alert of this id; None if the run has none."""
        own = (WATCHES.c.name == run, WATCH_ALERTS.c.id == alert_id)
        known = _select_alerts().where(*own, WATCH_ALERTS.c.opened_unix_ns.is_not(None))
        with self._database.begin_read() as connection:
            row = connection.execute(known).one_or_none()
        return None if row is None else WatchAlert(*row)

    def acknowledge(self, alert_id: int, user_name: str) -> None:
        """Notes who knows of the alert; the first one counts. It is not delivered any more."""
        values = {
            "acknowledged_unix_ns": self._now_ns(), "due_unix_ns": None,
            "acknowledged_by": clean_text(user_name, 200),
        }  # fmt: skip
        own = (WATCH_ALERTS.c.id == alert_id, WATCH_ALERTS.c.acknowledged_unix_ns.is_(None))
        self._update(own, values)

    def undo_acknowledge(self, alert_id: int) -> None:
        """Takes back that somebody knows of the alert; while it is open, it is delivered if it has
        not been, one of the step time not before it has lasted."""
        table, now_ns = WATCH_ALERTS.c, self._now_ns()
        own = (table.id == alert_id, table.acknowledged_unix_ns.is_not(None))
        none = (table.ended_unix_ns, table.delivered_unix_ns, table.due_unix_ns)
        unsent = (*own, *(one.is_(None) for one in none))
        lasted_ns = table.since_unix_ns + LASTS_S * _SECOND_NS
        is_too_early = (table.metric == "step_time") & (lasted_ns > now_ns)
        self._update(unsent, {"due_unix_ns": case((is_too_early, lasted_ns), else_=now_ns)})
        self._update(own, {"acknowledged_unix_ns": None, "acknowledged_by": None})

    def silence(self, alert_id: int, hours: float | None) -> None:
        """Stops the webhooks of the alert's run for so long; None for until the alert ends."""
        until_ns = UNTIL_END_NS if hours is None else self._now_ns() + int(hours * _HOUR_NS)
        is_open = WATCH_ALERTS.c.ended_unix_ns.is_(None)
        self._update((WATCH_ALERTS.c.id == alert_id, is_open), {"silenced_until_unix_ns": until_ns})

    def end_silence(self, alert_id: int) -> None:
        """Has the webhooks of the alert's run go on, unless another alert silences them."""
        self._update((WATCH_ALERTS.c.id == alert_id,), {"silenced_until_unix_ns": None})

    def list_unended(self) -> frozenset[tuple[str, Metric]]:
        """The run and metric of each alert that has not ended, or that waits to be opened."""
        query = select(WATCHES.c.name, WATCH_ALERTS.c.metric).join(WATCH_ALERTS)
        with self._database.begin_read() as connection:
            rows = connection.execute(query.where(WATCH_ALERTS.c.ended_unix_ns.is_(None)))
            return frozenset((row[0], row[1]) for row in rows)

    def update_condition(
        self, watch_id: int, metric: Metric, condition: AlertCondition | None
    ) -> None:
        """Opens an alert of the condition once it has lasted, unless one is open, which then says
        which hosts it is of now; without a condition it ends."""
        now_ns = self._now_ns()
        with self._database.begin_write() as connection:
            # One process at a time, also in a database that takes several writers.
            locked = select(WATCHES.c.id).where(WATCHES.c.id == watch_id).with_for_update()
            if connection.execute(locked).one_or_none() is not None:
                _follow_condition(connection, watch_id, metric, condition, now_ns)

    def end_dropped(self) -> None:
        """Ends the alerts of runs that have not dropped anything for some time."""
        now_ns, table = self._now_ns(), WATCH_ALERTS.c
        is_old = table.seen_unix_ns < now_ns - DROPPED_S * _SECOND_NS
        with self._database.begin_write() as connection:
            _end(connection, now_ns, table.metric == "dropped", is_old)

    def claim_delivery(self) -> WatchAlert | None:
        """The next alert to deliver, which no other process gets for LEASE_S; None if none is due.

        Alerts of a silenced run wait, and those that end meanwhile are not delivered.
        """
        now_ns, table = self._now_ns(), WATCH_ALERTS.c
        # One that was due an hour ago says nothing new: the page of the run has it.
        is_due = table.due_unix_ns.between(now_ns - LATEST_S * _SECOND_NS, now_ns)
        due = _select_alerts().where(is_due, table.tries < TRIES).order_by(table.due_unix_ns)
        locked = due.limit(1).with_for_update(skip_locked=True, of=WATCH_ALERTS)
        with self._database.begin_read() as connection:
            # In SQLite a write would have the batches wait.
            if connection.execute(due.limit(1)).first() is None:
                return None
        with self._database.begin_write() as connection:
            while (row := connection.execute(locked).one_or_none()) is not None:
                alert = WatchAlert(*row)
                own = update(WATCH_ALERTS).where(table.id == alert.id)
                query = select(WATCH_ALERTS.c.id).select_from(WATCH_ALERTS.join(WATCHES))
                silences = WATCH_ALERTS.c.silenced_until_unix_ns > now_ns
                found = connection.execute(
                    query.where(WATCHES.c.name == alert.run, silences).limit(1)
                )
                if found.first() is None:
                    lease_ns = now_ns + LEASE_S * _SECOND_NS
                    values = {"due_unix_ns": lease_ns, "tries": alert.tries + 1}
                    connection.execute(own.values(values))
                    return alert
                later = None if alert.ended_unix_ns else now_ns + 60 * _SECOND_NS
                connection.execute(own.values(due_unix_ns=later))
        return None

    def record_delivery(self, alert: WatchAlert) -> None:
        """The claimed alert has been delivered."""
        values = {"delivered_unix_ns": self._now_ns(), "due_unix_ns": None, "failure": ""}
        self._update((WATCH_ALERTS.c.id == alert.id,), values)

    def record_failure(self, alert: WatchAlert, reason: str, pause_s: float | None) -> None:
        """The claimed alert has not been delivered; it is tried again after the pause, if any."""
        due_ns = None if pause_s is None else self._now_ns() + int(pause_s * _SECOND_NS)
        values = {"failure": clean_text(reason, 200), "due_unix_ns": due_ns}
        own = (WATCH_ALERTS.c.id == alert.id, WATCH_ALERTS.c.tries == alert.tries + 1)
        # Acknowledged meanwhile, it need not be tried again.
        undone = (WATCH_ALERTS.c.delivered_unix_ns, WATCH_ALERTS.c.acknowledged_unix_ns)
        self._update((*own, *(one.is_(None) for one in undone)), values)

    def _update(self, which: tuple[Any, ...], values: Mapping[str, object]) -> None:
        with self._database.begin_write() as connection:
            connection.execute(update(WATCH_ALERTS).where(*which).values(values))


def _select_alerts() -> Select[Any]:
    columns = [
        WATCHES.c.name if one.name == "run" else WATCH_ALERTS.c[one.name]
        for one in fields(WatchAlert)
    ]
    return select(*columns).select_from(WATCH_ALERTS.join(WATCHES))


# Opening and ending, within a write transaction.


def note_batch(connection: Connection, watch_id: int, batch: WatchBatch, now_ns: int) -> None:
    """Opens and ends alerts by a batch that has not been received before."""
    for event in batch.events:
        if event.kind == "change" and event.after_ns is not None and event.before_ns is not None:
            _note_change(connection, watch_id, batch, event, now_ns)
        elif event.kind == "change" or (event.kind == "drift" and not event.is_over):
            _explain_change(connection, watch_id, batch, event, now_ns)
        elif event.kind in ("started", "restarted", "ended"):
            # A start has a level of its own.
            last = batch.incarnation - (event.kind != "ended")
            earlier = WATCH_ALERTS.c.incarnation <= last
            _end_changes(connection, batch, now_ns, *_find_changes(watch_id), earlier)
    dropped = {name: n for name, n in batch.dropped.items() if name not in EXPECTED_DROPS and n}
    if dropped and batch.unix_ns > now_ns - DROPPED_S * _SECOND_NS:
        _note_dropped(connection, watch_id, batch, dropped, now_ns)


def _find_changes(watch_id: int) -> tuple[Any, ...]:
    return WATCH_ALERTS.c.watch_id == watch_id, WATCH_ALERTS.c.metric == "step_time"


def _note_change(
    connection: Connection, watch_id: int, batch: WatchBatch, event: WatchEvent, now_ns: int
) -> None:
    """Opens an alert of slower steps, unless another host has reported the change; the host that
    was first ends it, by its end or by its next change, also to faster steps."""
    table, host = WATCH_ALERTS.c, clean_text(batch.host, 200)
    own = (*_find_changes(watch_id), table.incarnation == batch.incarnation)
    if event.is_over:
        of_step = table.step == event.step
        _end_changes(connection, batch, now_ns, *own, table.host == host, of_step)
        return
    assert event.before_ns is not None and event.after_ns is not None
    if event.after_ns < event.before_ns:
        _end_changes(connection, batch, now_ns, *own, table.host == host)
        return
    later = (WATCH_STARTS.c.watch_id == watch_id, WATCH_STARTS.c.incarnation > batch.incarnation)
    if connection.execute(select(WATCH_STARTS.c.incarnation).where(*later)).first() is not None:
        # The batch is late, of an earlier start of the job.
        return
    after = event.after_ns / _SECOND_NS
    for row in connection.execute(select(WATCH_ALERTS).where(*own)).all():
        # Another host has found the change: it is open there and of the same level, or began with
        # this one.
        is_of_other = row.ended_unix_ns is None and row.host != host
        is_same_level = is_of_other and abs(after - row.after) <= LEAST_CHANGE * row.after
        if is_same_level or _is_near(row, batch, event):
            return
    _end_changes(connection, batch, now_ns, *own, table.host == host)
    due_ns = now_ns + (CAUSE_WAIT_S * _SECOND_NS if event.rank is None else 0)
    _add(
        connection, watch_id, "step_time", now_ns, host=host, incarnation=batch.incarnation,
        step=event.step, since_unix_ns=event.unix_ns, before=event.before_ns / _SECOND_NS,
        after=event.after_ns / _SECOND_NS, rank=event.rank, text=clean_text(event.text, 500),
        due_unix_ns=max(due_ns, event.unix_ns + LASTS_S * _SECOND_NS),
    )  # fmt: skip


def _end_changes(connection: Connection, batch: WatchBatch, now_ns: int, *which: Any) -> None:
    """Ends these alerts of the step time; one that has not lasted is not delivered any more."""
    table = WATCH_ALERTS.c
    is_brief = table.since_unix_ns > batch.unix_ns - LASTS_S * _SECOND_NS
    unsent = (*which, table.ended_unix_ns.is_(None), table.tries == 0, is_brief)
    connection.execute(update(WATCH_ALERTS).where(*unsent).values(due_unix_ns=None))
    _end(connection, now_ns, *which)


def _is_near(row: Row[Any], batch: WatchBatch, event: WatchEvent) -> bool:
    """Whether the event began with the alert: the first step is found within some points."""
    steps = RECENT_POINTS * max(batch.interval_steps or 0, POINT_STEPS)
    near: bool = abs(event.unix_ns - row.since_unix_ns) <= steps * row.after * _SECOND_NS
    return near


_ENOUGH = 200
"""Length of a cause to which no more is added: many hosts may have one."""


def _explain_change(
    connection: Connection, watch_id: int, batch: WatchBatch, event: WatchEvent, now_ns: int
) -> None:
    """Adds a cause to the open alert: a sample after the change, with which it can be delivered, or
    a rank that is late since then."""
    table, is_sample = WATCH_ALERTS.c, event.kind == "change"
    own = (*_find_changes(watch_id), table.incarnation == batch.incarnation)
    query = select(WATCH_ALERTS).where(*own, table.ended_unix_ns.is_(None))
    for row in connection.execute(query).all():
        is_of_change = event.step >= row.step if is_sample else _is_near(row, batch, event)
        if not is_of_change or len(row.cause) > _ENOUGH:
            continue
        causes = [row.cause, event.text] if row.cause else [event.text]
        rank = row.rank if row.rank is not None else event.rank
        due_ns = row.due_unix_ns
        if is_sample and due_ns is not None and not row.tries:
            due_ns = min(due_ns, max(now_ns, row.since_unix_ns + LASTS_S * _SECOND_NS))
        cause = clean_text("; ".join(causes), 500)
        values = {"cause": cause, "rank": rank, "due_unix_ns": due_ns}
        connection.execute(update(WATCH_ALERTS).where(table.id == row.id).values(values))


def _note_dropped(
    connection: Connection,
    watch_id: int,
    batch: WatchBatch,
    dropped: Mapping[str, int],
    now_ns: int,
) -> None:
    row = _find_unended(connection, watch_id, "dropped")
    if row is not None:
        own = update(WATCH_ALERTS).where(WATCH_ALERTS.c.id == row.id)
        connection.execute(own.values(seen_unix_ns=now_ns))
        return
    text = ", ".join(f"{reason} {number:,}" for reason, number in dropped.items())
    _add(
        connection, watch_id, "dropped", now_ns, host=clean_text(batch.host, 200),
        incarnation=batch.incarnation, since_unix_ns=batch.unix_ns, after=sum(dropped.values()),
        text=clean_text(f"host {batch.host} has dropped data ({text})", 500),
    )  # fmt: skip


def _follow_condition(
    connection: Connection,
    watch_id: int,
    metric: Metric,
    condition: AlertCondition | None,
    now_ns: int,
) -> None:
    row = _find_unended(connection, watch_id, metric)
    if row is None:
        if condition is not None:
            is_open = not condition.wait_s
            _add(
                connection, watch_id, metric, now_ns, incarnation=condition.incarnation,
                step=condition.step, since_unix_ns=condition.since_unix_ns,
                before=condition.before, after=condition.after,
                text=clean_text(condition.text, 500), host=clean_text(condition.hosts, 200),
                **({} if is_open else {"opened_unix_ns": None, "due_unix_ns": None}),
            )  # fmt: skip
        return
    own = WATCH_ALERTS.c.id == row.id
    if condition is None:
        # It did not last, so there never was an alert.
        if row.opened_unix_ns is None:
            connection.execute(delete(WATCH_ALERTS).where(own))
        else:
            _end(connection, now_ns, own)
        return
    values: dict[str, object] = {}
    # It is opened with the numbers of now: those of the first look were those of a state that might
    # have passed.
    if row.opened_unix_ns is None and now_ns - row.seen_unix_ns >= condition.wait_s * _SECOND_NS:
        values |= {"opened_unix_ns": now_ns, "due_unix_ns": now_ns}
    if (host := clean_text(condition.hosts, 200)) != row.host:
        values |= {"host": host, "since_unix_ns": condition.since_unix_ns, "step": condition.step}
    if values:
        values |= {"after": condition.after, "text": clean_text(condition.text, 500)}
        connection.execute(update(WATCH_ALERTS).where(own).values(values))


def _find_unended(connection: Connection, watch_id: int, metric: Metric) -> Row[Any] | None:
    table = WATCH_ALERTS.c
    own = (table.watch_id == watch_id, table.metric == metric, table.ended_unix_ns.is_(None))
    return connection.execute(select(WATCH_ALERTS).where(*own).limit(1)).one_or_none()


def _add(
    connection: Connection, watch_id: int, metric: Metric, now_ns: int, **values: object
) -> None:
    usual = {
        "watch_id": watch_id, "metric": metric, "host": "", "step": 0, "seen_unix_ns": now_ns,
        "cause": "", "opened_unix_ns": now_ns, "due_unix_ns": now_ns, "tries": 0, "failure": "",
    }  # fmt: skip
    connection.execute(insert(WATCH_ALERTS), usual | values)


def _end(connection: Connection, now_ns: int, *which: Any) -> None:
    """Ends the open ones of these alerts, and silences that last until then."""
    table = WATCH_ALERTS.c
    own = (*which, table.ended_unix_ns.is_(None))
    until_end = table.silenced_until_unix_ns == UNTIL_END_NS
    # First the silences, which are found by the alerts being open.
    silences = update(WATCH_ALERTS).where(*own, until_end)
    connection.execute(silences.values(silenced_until_unix_ns=now_ns))
    connection.execute(update(WATCH_ALERTS).where(*own).values(ended_unix_ns=now_ns))
