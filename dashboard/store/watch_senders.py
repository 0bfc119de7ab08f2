"""Who may add to a watched run, and which start of its job may follow which."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.watch.records import WatchBatch
from stepsplit.dashboard.store.schema import (
    WATCH_ALERTS,
    WATCH_EVENTS,
    WATCH_HOSTS,
    WATCH_SAMPLES,
    WATCH_SPLITS,
    WATCH_STARTS,
    WATCH_STEPS,
    WATCHES,
)


@dataclass(frozen=True, slots=True)
class WatchSender:
    """Who sends a batch: what a token, a password or a proxy shows of him.

    name: None on a server without logins, where everyone is the same. An admin may add to the runs
    of others.
    """

    name: str | None
    is_admin: bool

    def may_write(self, owner: str | None) -> bool:
        """Whether he may add to a run that this one has begun, and silence its alerts."""
        return self.is_admin or owner is None or owner == self.name


EVERYONE = WatchSender(None, True)
"""The sender on a server without logins."""


class OtherSenderError(UsageError):
    """The run is another sender's."""


class UnknownStartError(UsageError):
    """The batch is of a start of the job that does not follow the newest one, which is `newest`."""

    def __init__(self, message: str, newest: int) -> None:
        super().__init__(message)
        self.newest = newest


def check_start(connection: Connection, watch_id: int, batch: WatchBatch) -> None:
    """Raises UnknownStartError if the batch is of a start that does not follow the newest one, and
    UsageError if it ends one that has not begun: either would make the running one an old one."""
    known = select(WATCH_STARTS.c.incarnation).where(WATCH_STARTS.c.watch_id == watch_id)
    starts = set(connection.execute(known).scalars())
    if batch.incarnation in starts or not starts:
        return
    newest = max(starts)
    if batch.incarnation > newest + 1:
        raise UnknownStartError(
            f"start {batch.incarnation} of the run {batch.run!r} does not follow its newest one,"
            f" {newest}: send the starts between them first",
            newest,
        )
    kinds = {event.kind for event in batch.events}
    if batch.incarnation > newest and "ended" in kinds and not kinds & {"started", "restarted"}:
        raise UsageError(
            f"start {batch.incarnation} of the run {batch.run!r} cannot end: it has not begun"
        )


_OF_STARTS = (
    WATCH_STARTS, WATCH_STEPS, WATCH_SPLITS, WATCH_SAMPLES, WATCH_EVENTS, WATCH_ALERTS,
)  # fmt: skip


def forget_start(connection: Connection, watch_id: int, incarnation: int) -> bool:
    """Deletes what is known of a start. False if there is none of this number, or no other one."""
    starts = (
        select(WATCH_STARTS.c.incarnation, WATCH_STARTS.c.newest_unix_ns)
        .where(WATCH_STARTS.c.watch_id == watch_id)
        .order_by(WATCH_STARTS.c.incarnation)
    )
    newest_ns = {row.incarnation: row.newest_unix_ns for row in connection.execute(starts)}
    if incarnation not in newest_ns or len(newest_ns) == 1:
        return False
    del newest_ns[incarnation]
    for table in _OF_STARTS:
        own = (table.c.watch_id == watch_id, table.c.incarnation == incarnation)
        connection.execute(delete(table).where(*own))
    # Hosts stay with the start before: each is as it was with its next batch.
    hosts = update(WATCH_HOSTS).where(
        WATCH_HOSTS.c.watch_id == watch_id, WATCH_HOSTS.c.incarnation == incarnation
    )
    connection.execute(hosts.values(incarnation=max(newest_ns), newest_unix_ns=0))
    values = {
        "newest_unix_ns": max(newest_ns.values()), "last_step": 0,
        "rolled_unix_ns": 0, "trimmed_unix_ns": max(newest_ns.values()),
    }  # fmt: skip
    connection.execute(update(WATCHES).where(WATCHES.c.id == watch_id).values(values))
    return True
