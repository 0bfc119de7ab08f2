"""The audit log: who logged in, uploaded, deleted, or changed access, and what was refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import orjson
from sqlalchemy import delete, func, insert, select, update

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.ids import clean_text
from stepsplit.dashboard.store.schema import AUDIT

OK = "ok"
"""The outcome of what was done; any other outcome says why it was refused."""

KEPT_S, MAX_OF_ACTION = 365 * 86_400, 20_000
"""Entries are kept for this long, and at most so many of each action; refusals of it count apart.
So who repeats one thing, such as a viewer who logs in, pushes out nothing else."""

PERIOD_S = 3_600
"""What is refused again in this time is counted in the entry of the first time."""

TRIM_EVERY = 500
"""Old entries are deleted after so many new ones."""

_SECOND_NS, _MAX_NS = 10**9, (1 << 63) - 1

_LOG = logging.getLogger("stepsplit.audit")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry. user_name: a token, session, user of the proxy or of the command line. count: how
    often it was refused in the period that begins here."""

    at_unix_ns: int
    user_name: str
    role: str
    address: str
    action: str
    target: str
    outcome: str
    count: int = 1


class AuditLog:
    """The audit log of a store. Thread-safe; all processes of the store share it."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def record(
        self,
        action: str,
        target: str = "",
        *,
        user_name: str,
        role: str = "",
        address: str = "",
        outcome: str = OK,
    ) -> None:
        """Adds an entry, here and to the log of the process."""
        entry = {
            "user_name": clean_text(user_name, 200),
            "role": role,
            "address": clean_text(address, 100),
            "action": action,
            "target": clean_text(target, 300),
            "outcome": clean_text(outcome, 200),
        }
        _LOG.info("audit", extra={"fields": entry})
        now_ns = self._now_ns()
        again = update(AUDIT).where(AUDIT.c.at_unix_ns > now_ns - PERIOD_S * _SECOND_NS)
        same = again.where(*(AUDIT.c[name] == value for name, value in entry.items()))
        new = insert(AUDIT).values(at_unix_ns=now_ns, **entry).returning(AUDIT.c.id)
        with self._database.begin_write() as connection:
            counted = same.values(count=AUDIT.c.count + 1)
            if outcome != OK and connection.execute(counted).rowcount:
                return
            if connection.execute(new).scalar_one() % TRIM_EVERY:
                return
            kind = (AUDIT.c.action, AUDIT.c.outcome == OK)
            place = func.row_number().over(partition_by=kind, order_by=AUDIT.c.id.desc())
            placed = select(AUDIT.c.id, place.label("place")).subquery()
            excess = select(placed.c.id).where(placed.c.place > MAX_OF_ACTION)
            too_old = AUDIT.c.at_unix_ns < now_ns - KEPT_S * _SECOND_NS
            connection.execute(delete(AUDIT).where(too_old | AUDIT.c.id.in_(excess)))

    def list_entries(
        self, last: int, since_unix_ns: int = 0, until_unix_ns: int = (1 << 63) - 1
    ) -> tuple[AuditEntry, ...]:
        """The newest entries of the range, newest first."""
        columns = [AUDIT.c[name] for name in AuditEntry.__dataclass_fields__]
        newest = select(*columns).where(AUDIT.c.at_unix_ns.between(since_unix_ns, until_unix_ns))
        ordered = newest.order_by(AUDIT.c.id.desc()).limit(last)
        with self._database.begin_read() as connection:
            return tuple(AuditEntry(*row) for row in connection.execute(ordered))


def parse_since(text: str) -> int:
    """The ns since 1970 of a date or time, in UTC if it names no zone. Raises UsageError."""
    try:
        moment = datetime.fromisoformat(text)
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return min(max(int(aware.timestamp()) * _SECOND_NS, 0), _MAX_NS)
    except (ValueError, OverflowError):
        raise UsageError("since must be a date such as 2026-11-30 or 2026-11-30T14:00Z") from None


def audit_to_json(entries: Sequence[AuditEntry]) -> bytes:
    """The entries as JSON, with their times in UTC."""
    rows = [{"at": format_time(one.at_unix_ns)} | asdict(one) for one in entries]
    for row in rows:
        del row["at_unix_ns"]
    return orjson.dumps({"schema": "stepsplit.audit/1", "entries": rows}) + b"\n"


def format_time(unix_ns: int) -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.fromtimestamp(unix_ns // _SECOND_NS, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
