"""Watched runs in SQL: what is known of them, and how it is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Row, Table, delete, func, select, update
from sqlalchemy.engine import Connection

from stepsplit.analyzer.buckets import BUCKETS, Split
from stepsplit.analyzer.report.ledger import Ledger
from stepsplit.analyzer.watch.records import SAMPLE_TAG, WatchBatch, WatchEvent, WatchSample
from stepsplit.dashboard.store import watch_slots
from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.ids import is_watch_name
from stepsplit.dashboard.store.schema import (
    TAGS,
    WATCH_DROPPED,
    WATCH_EVENTS,
    WATCH_HOSTS,
    WATCH_LEDGERS,
    WATCH_SAMPLES,
    WATCH_SPLITS,
    WATCH_STARTS,
    WATCH_STEPS,
    WATCHES,
)
from stepsplit.dashboard.store.watch_batches import (
    BatchReceipt,
    add_batch,
    check_batch,
    forget_start,
)
from stepsplit.dashboard.store.watch_senders import EVERYONE, WatchSender

_SECOND_NS = 10**9

# What is known of a watched run.


@dataclass(frozen=True, slots=True)
class WatchHost:
    """A host with the numbers of its newest batch; overhead is None before the first sample."""

    host: str
    incarnation: int
    newest_unix_ns: int
    interval_steps: int | None
    budget: float
    overhead: float | None


@dataclass(frozen=True, slots=True)
class WatchStart:
    """A start of the job; ended_unix_ns is None unless its end was reported."""

    incarnation: int
    world_size: int
    first_unix_ns: int
    newest_unix_ns: int
    ended_unix_ns: int | None


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """A watched run; batches is their number, which a new one changes.

    sender: who began it, and adds to it; None for whoever is next, as on a server without logins.
    """

    id: int
    name: str
    created_unix_ns: int
    received_unix_ns: int
    newest_unix_ns: int
    last_step: int
    batches: int
    sender: str | None
    starts: tuple[WatchStart, ...]
    hosts: tuple[WatchHost, ...]
    dropped: Mapping[str, int]

    @property
    def start(self) -> WatchStart:
        """The newest start of the job."""
        return self.starts[-1]

    @property
    def current_hosts(self) -> tuple[WatchHost, ...]:
        """The hosts of the newest start; all of them if its batches are older than theirs."""
        own = tuple(h for h in self.hosts if h.incarnation == self.start.incarnation)
        return own or self.hosts

    @property
    def overhead(self) -> float | None:
        """The largest overhead of the newest start that a host reports."""
        known = [h.overhead for h in self.current_hosts if h.overhead is not None]
        return max(known, default=None)

    @property
    def budget(self) -> float:
        """The part of the training time that samples may cost."""
        return max(h.budget for h in self.current_hosts)

    @property
    def newest_minutes(self) -> WatchRange:
        """The ten minutes until the newest batch, in slots of a minute."""
        newest_s = self.newest_unix_ns // _SECOND_NS
        return WatchRange(newest_s - watch_slots.TEN_MINUTES_S, newest_s, watch_slots.MINUTE_S)

    @property
    def interval_steps(self) -> int | None:
        """The steps between samples by the newest batch; None if there are no more."""
        return max(self.current_hosts, key=lambda h: h.newest_unix_ns).interval_steps


@dataclass(frozen=True, slots=True)
class StepSlot:
    """Step times of one start of the job in a slot of time."""

    start_unix_s: int
    incarnation: int
    summary: watch_slots.StepSummary


@dataclass(frozen=True, slots=True)
class SplitSlot:
    """Samples of one start of the job in a slot of time.

    total is the sum over the sampled ranks, as exposed_ns by axis; rank_samples their number;
    no_data the number of samples that do not count, by reason.
    """

    start_unix_s: int
    incarnation: int
    samples: int
    rank_samples: int
    total: Split
    exposed_ns: Mapping[str, int]
    no_data: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event of a host."""

    incarnation: int
    host: str
    event: WatchEvent


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample of a host; run_id is the stored run of its analysis, if there is one."""

    incarnation: int
    host: str
    sample: WatchSample
    run_id: str | None


@dataclass(frozen=True, slots=True)
class StoredLedger:
    """The newest ledger of the job, the host that sent it, and when that closed its batch."""

    host: str
    unix_ns: int
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class WatchRange:
    """A range of time, and the level of the slots that are read for it."""

    first_unix_s: int
    last_unix_s: int
    level_s: int


class WatchStore:
    """The watched runs of a store. Thread-safe; all processes of the store share it."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def add_batch(self, batch: WatchBatch, sender: WatchSender = EVERYONE) -> BatchReceipt:
        """Adds a batch once. Raises UsageError if it is invalid or too old, OtherSenderError if the
        run is another sender's, and UnknownStartError."""
        now_ns = self._now_ns()
        check_batch(batch, now_ns)
        with self._database.begin_write() as connection:
            return add_batch(connection, batch, sender, now_ns)

    def list_watches(self, since_ns: int = 0) -> tuple[WatchedRun, ...]:
        """The watched runs with data since this time, those with the newest batches first."""
        newest_first = (
            select(WATCHES)
            .where(WATCHES.c.newest_unix_ns >= since_ns)
            .order_by(WATCHES.c.received_unix_ns.desc(), WATCHES.c.id)
        )
        with self._database.begin_read() as connection:
            rows = connection.execute(newest_first).all()
            return tuple(_read_watch(connection, row) for row in rows)

    def find_watch(self, name: str) -> WatchedRun | None:
        """The watched run of this name; None if there is none."""
        if not is_watch_name(name):
            return None
        with self._database.begin_read() as connection:
            row = connection.execute(select(WATCHES).where(WATCHES.c.name == name)).one_or_none()
            return None if row is None else _read_watch(connection, row)

    def delete(self, name: str) -> bool:
        """Deletes the watched run. False if it does not exist."""
        if not is_watch_name(name):
            return False
        with self._database.begin_write() as connection:
            deleted = connection.execute(delete(WATCHES).where(WATCHES.c.name == name))
            return bool(deleted.rowcount)

    def hand_over(self, name: str, sender: str | None) -> bool:
        """Lets another sender add to the run; None for whoever is next. False if there is none of
        this name."""
        named = update(WATCHES).where(WATCHES.c.name == name)
        with self._database.begin_write() as connection:
            return bool(connection.execute(named.values(sender=sender)).rowcount)

    def reopen_start(self, watch_id: int, incarnation: int) -> bool:
        """Takes back that a start of the job has ended. False if there is none of this number."""
        own = (WATCH_STARTS.c.watch_id == watch_id, WATCH_STARTS.c.incarnation == incarnation)
        with self._database.begin_write() as connection:
            reopened = update(WATCH_STARTS).where(*own).values(ended_unix_ns=None)
            return bool(connection.execute(reopened).rowcount)

    def forget_start(self, watch_id: int, incarnation: int) -> bool:
        """Deletes what is known of a start of the job. False if there is none of this number, or no
        other one."""
        with self._database.begin_write() as connection:
            return forget_start(connection, watch_id, incarnation)

    def read_steps(self, watch_id: int, within: WatchRange) -> tuple[StepSlot, ...]:
        """The step times in the range, by time and start of the job."""
        names = watch_slots.StepSummary.__dataclass_fields__
        with self._database.begin_read() as connection:
            rows = connection.execute(
                _select_slots(WATCH_STEPS, watch_id, within, [WATCH_STEPS.c[n] for n in names])
            )
            return tuple(
                StepSlot(row[0], row[1], watch_slots.StepSummary(*row[2:])) for row in rows
            )

    def read_splits(self, watch_id: int, within: WatchRange) -> tuple[SplitSlot, ...]:
        """The samples in the range, by time and start of the job."""
        names = ["samples", "rank_samples", "exposed", "no_data", *_BUCKET_NAMES]
        with self._database.begin_read() as connection:
            rows = connection.execute(
                _select_slots(WATCH_SPLITS, watch_id, within, [WATCH_SPLITS.c[n] for n in names])
            )
            return tuple(
                SplitSlot(
                    row.start_unix_s, row.incarnation, row.samples, row.rank_samples,
                    Split(*row[6:]), json.loads(row.exposed), json.loads(row.no_data),
                )
                for row in rows
            )  # fmt: skip

    def read_waits(self, watch_id: int, within: WatchRange, bin_s: int) -> watch_slots.RankGrid:
        """The waits that each rank caused in a step of a sample, in bins of time that are a
        multiple of the level."""
        return self._read_grid(WATCH_SPLITS, "waits", watch_id, within, bin_s)

    def read_lateness(self, watch_id: int, within: WatchRange, bin_s: int) -> watch_slots.RankGrid:
        """How much later than the others each rank has its last gradient, by unprofiled steps, in
        bins of time that are a multiple of the level."""
        return watch_slots.subtract_usual(
            self._read_grid(WATCH_STEPS, "local", watch_id, within, bin_s)
        )

    def _read_grid(
        self, table: Table, column: str, watch_id: int, within: WatchRange, bin_s: int
    ) -> watch_slots.RankGrid:
        query = _select_slots(table, watch_id, within, [table.c[column]])
        with self._database.begin_read() as connection:
            slots = [(row[0], row[2]) for row in connection.execute(query)]
        first_s = within.first_unix_s // bin_s * bin_s
        return watch_slots.build_rank_grid(slots, first_s, within.last_unix_s, bin_s)

    def read_events(self, watch_id: int, within: WatchRange, last: int) -> tuple[StoredEvent, ...]:
        """The newest events in the range, newest first."""
        table = WATCH_EVENTS.c
        # The last slot counts to its end: an event within it is shown beside its steps.
        begin, end = within.first_unix_s * _SECOND_NS, (within.last_unix_s + 1) * _SECOND_NS
        query = (
            select(
                table.incarnation, table.host, table.kind, table.step, table.unix_ns, table.text,
                table.rank,
            )
            .where(table.watch_id == watch_id, table.unix_ns >= begin, table.unix_ns < end)
            .order_by(table.unix_ns.desc(), table.id.desc())
            .limit(last)
        )  # fmt: skip
        with self._database.begin_read() as connection:
            return tuple(
                StoredEvent(
                    row.incarnation, row.host,
                    WatchEvent(
                        kind=row.kind, step=row.step, unix_ns=row.unix_ns, text=row.text,
                        rank=row.rank,
                    ),
                )
                for row in connection.execute(query)
            )  # fmt: skip

    def list_samples(self, watch_id: int, steps: int) -> tuple[StoredSample, ...]:
        """The samples of all hosts at the newest sampled steps, newest first, with their ranks."""
        table = WATCH_SAMPLES.c
        newest = (
            select(table.sample_id, table.incarnation, table.step)
            .where(table.watch_id == watch_id)
            .order_by(table.unix_ns.desc(), table.sample_id)
            .limit(_MOST_SAMPLES)
        )
        with self._database.begin_read() as connection:
            # First ids alone: the packed ranks of a thousand samples are megabytes, of which a page
            # shows one or two steps.
            found = connection.execute(newest).all()
            wanted = list(dict.fromkeys((row.incarnation, row.step) for row in found))[:steps]
            # All hosts of a step belong together, also where their batches came minutes apart.
            ids = [row.sample_id for row in found if (row.incarnation, row.step) in wanted]
            whole = select(WATCH_SAMPLES).where(
                table.watch_id == watch_id, table.sample_id.in_(ids)
            )
            rows = connection.execute(whole.order_by(table.unix_ns.desc(), table.sample_id)).all()
            tagged = select(TAGS.c.value, TAGS.c.run_id).where(
                TAGS.c.key == SAMPLE_TAG, TAGS.c.value.in_(ids)
            )
            run_ids = {row[0]: row[1] for row in connection.execute(tagged)}
        return tuple(_read_sample(row, run_ids.get(row.sample_id)) for row in rows)

    def read_ledger(self, watch_id: int) -> StoredLedger | None:
        """The ledger of the job; None if no host has sent one, or only one that cannot be read.

        Hosts with folders of their own send one each, of their ranks: that of the lowest rank of
        the newest start counts.
        """
        table = WATCH_LEDGERS.c
        newest = (
            select(WATCH_LEDGERS)
            .where(table.watch_id == watch_id)
            .order_by(table.incarnation.desc(), table.lowest_rank, table.unix_ns.desc(), table.host)
            .limit(1)
        )
        with self._database.begin_read() as connection:
            row = connection.execute(newest).one_or_none()
        if row is None:
            return None
        try:
            ledger = msgspec.json.decode(row.ledger, type=Ledger)
        except (msgspec.MsgspecError, ValueError):
            # Of another version; the next batch has one of this.
            return None
        return StoredLedger(row.host, row.unix_ns, ledger)

    def find_run_of_sample(self, watch_id: int, unix_ns: int) -> str | None:
        """The stored run of the sample that is nearest in time; None if no sample has one."""
        table = WATCH_SAMPLES.c
        nearest = (
            select(TAGS.c.run_id)
            .join(WATCH_SAMPLES, table.sample_id == TAGS.c.value)
            .where(TAGS.c.key == SAMPLE_TAG, table.watch_id == watch_id)
            .order_by(func.abs(table.unix_ns - unix_ns), TAGS.c.run_id)
            .limit(1)
        )
        with self._database.begin_read() as connection:
            found: str | None = connection.execute(nearest).scalar()
            return found


_MOST_SAMPLES = 1_000
"""Newest samples of single hosts, among which those of one step are looked for."""

_BUCKET_NAMES = tuple(f"{bucket}_ns" for bucket in BUCKETS)


def _select_slots(table: Table, watch_id: int, within: WatchRange, columns: Sequence[Any]) -> Any:
    """The start and the incarnation of the slots in the range, and these columns."""
    return (
        select(table.c.start_unix_s, table.c.incarnation, *columns)
        .where(
            table.c.watch_id == watch_id,
            table.c.level_s == within.level_s,
            table.c.start_unix_s.between(within.first_unix_s, within.last_unix_s),
        )
        .order_by(table.c.start_unix_s, table.c.incarnation)
    )


def _read_watch(connection: Connection, row: Row[Any]) -> WatchedRun:
    starts, hosts, dropped = (
        connection.execute(select(*columns).where(table.c.watch_id == row.id).order_by(columns[0]))
        for table, columns in (
            (WATCH_STARTS, [WATCH_STARTS.c[n] for n in WatchStart.__dataclass_fields__]),
            (WATCH_HOSTS, [WATCH_HOSTS.c[n] for n in WatchHost.__dataclass_fields__]),
            (WATCH_DROPPED, [WATCH_DROPPED.c.reason, WATCH_DROPPED.c.number]),
        )
    )
    return WatchedRun(
        row.id, row.name, row.created_unix_ns, row.received_unix_ns, row.newest_unix_ns,
        row.last_step, row.batches, row.sender,
        tuple(WatchStart(*one) for one in starts), tuple(WatchHost(*one) for one in hosts),
        {row[0]: row[1] for row in dropped},
    )  # fmt: skip


def _read_sample(row: Row[Any], run_id: str | None) -> StoredSample:
    sample = WatchSample(
        id=row.sample_id, step=row.step, steps=0, unix_ns=row.unix_ns, pivot=row.pivot,
        ranks=watch_slots.unpack_splits(row.by_rank), no_data=row.no_data, finding=row.finding,
        cost_ns=row.cost_ns, traces=row.traces,
    )  # fmt: skip
    return StoredSample(row.incarnation, row.host, sample, run_id)
