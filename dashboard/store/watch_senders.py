"""Who may add to a watched run, and which start of its job may follow which."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.engine import Connection

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.watch.records import WatchBatch
from stepsplit.dashboard.store.schema import WATCH_STARTS


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
    """Raises UnknownStartError if the batch is of a start after the one that follows the newest,
    and UsageError if it ends one that has not begun: either would make the running one an old
    one."""
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
