"""Watched runs in SQL: batches are added, rolled up and read."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
from sqlalchemy import (
    Executable,
    Row,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from stepsplit.analyzer.buckets import BUCKETS, MEMOS, Split
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.watch.records import (
    SAMPLE_TAG,
    RankSample,
    WatchBatch,
    WatchEvent,
    WatchSample,
)
from stepsplit.collectors.formats.watch_notes import RankWindow
from stepsplit.dashboard.store import watch_slots
from stepsplit.dashboard.store.alerts import note_batch
from stepsplit.dashboard.store.database import (
    TAGS,
    WATCH_ALERTS,
    WATCH_BATCHES,
    WATCH_DROPPED,
    WATCH_EVENTS,
    WATCH_HOSTS,
    WATCH_SAMPLES,
    WATCH_SPLITS,
    WATCH_STARTS,
    WATCH_STEPS,
    WATCHES,
    Database,
    clean_text,
)
from stepsplit.dashboard.store.ids import NAME_LENGTH, fold_name, is_watch_name
from stepsplit.dashboard.store.watch_senders import (
    EVERYONE,
    OtherSenderError,
    WatchSender,
    check_start,
    forget_start,
)

_SECOND_NS = 10**9

LATE_S = 3 * watch_slots.DAY_S
"""A batch may be so much older than the newest of its run: ids are kept for so long. With a day
within a batch, its step times still find the slots of a minute."""

SPAN_S, AHEAD_S = watch_slots.DAY_S, watch_slots.HOUR_S
"""How far the times in a batch may lie before and after its closing, and that after now."""

KEPT_SAMPLES_S, KEPT_EVENTS_S = 8 * watch_slots.DAY_S, 100 * watch_slots.DAY_S

MAX_RANKS, MAX_STARTS = 1 << 17, 1 << 20

REOPENED_S = 300
"""Steps so long after the reported end of a job show that it has not ended: the clocks of its hosts
may differ by less."""

MAX_NAMES = 24
"""Axes, and reasons for no data, that are counted apart in a slot."""

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
class WatchRange:
    """A range of time, and the level of the slots that are read for it."""

    first_unix_s: int
    last_unix_s: int
    level_s: int


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """Whether the batch was new, and whether it was the first of its run."""

    accepted: bool
    is_new_run: bool = False


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
            watch, is_new_run = _find_or_add(connection, batch, sender, now_ns)
            check_start(connection, watch.id, batch)
            if batch.unix_ns < watch.newest_unix_ns - LATE_S * _SECOND_NS:
                days = LATE_S // watch_slots.DAY_S
                raise UsageError(
                    f"the batch is over {days} days older than the newest of its run; drop it"
                )
            if not _add_batch_id(connection, watch.id, batch):
                return BatchReceipt(False)
            _add_contents(connection, watch.id, batch)
            note_batch(connection, watch.id, batch, now_ns)
            _update_status(connection, watch, batch, now_ns)
        return BatchReceipt(True, is_new_run)

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
            found = connection.execute(newest).all()
            wanted = list(dict.fromkeys((row.incarnation, row.step) for row in found))[:steps]
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


# Checks of a batch: numbers must fit into the database, and times must be sane.

_MAX_NUMBER, _MAX_SUM = 1 << 53, (1 << 63) - 1


def check_batch(batch: WatchBatch, now_ns: int) -> None:
    """Raises UsageError if the batch has a name, number or time that cannot be stored."""
    if not is_watch_name(batch.run):
        raise UsageError(
            f"the name of the run must have 1 to {NAME_LENGTH} printable characters without / \\ %"
            " ? #; choose another --name"
        )
    if not 0 < batch.world_size <= MAX_RANKS or not batch.id or not batch.host:
        raise UsageError(f"a batch needs an id, a host and a world_size of 1 to {MAX_RANKS}")
    if not all(0 <= number < _MAX_NUMBER for number in _list_numbers(batch)):
        raise UsageError(f"the numbers of a batch must be between 0 and {_MAX_NUMBER}")
    if batch.incarnation >= MAX_STARTS:
        raise UsageError(f"the incarnation of a batch must be below {MAX_STARTS}")
    if not 0 <= batch.budget <= 1 or not 0 <= (batch.overhead or 0) < 1e6:
        raise UsageError("budget and overhead must be parts of the training time, such as 0.005")
    if any(rank >= batch.world_size for rank in _list_ranks(batch)):
        raise UsageError(f"a rank of the batch is not below its world_size {batch.world_size}")
    for one in batch.windows:
        if not (one.steps and one.min_step_ns <= one.median_step_ns <= one.max_step_ns):
            raise UsageError(f"the step times of rank {one.rank} are not min <= median <= max")
    _check_times(batch, now_ns)


def _check_times(batch: WatchBatch, now_ns: int) -> None:
    if batch.unix_ns > now_ns + AHEAD_S * _SECOND_NS:
        raise UsageError(f"the clock of host {clean_text(batch.host, 100)} is over an hour ahead")
    times = [one.end_unix_ns for one in batch.windows]
    times += [one.unix_ns for one in batch.samples] + [one.unix_ns for one in batch.events]
    begin = batch.unix_ns - SPAN_S * _SECOND_NS
    if times and not begin <= min(times) <= max(times) <= batch.unix_ns + AHEAD_S * _SECOND_NS:
        raise UsageError("the times in a batch must be of the day before it was closed")


def _list_numbers(batch: WatchBatch) -> Iterator[int]:
    yield from (batch.incarnation, batch.interval_steps or 0, *batch.dropped.values())
    # Times in ns are above 2 ** 53.
    yield from (batch.unix_ns >> 10, *_list_ranks(batch))
    for window in batch.windows:
        yield from (window.steps, window.last_step, window.end_unix_ns >> 10)
        yield from (window.min_step_ns, window.median_step_ns, window.max_step_ns)
        yield window.local_ns
    for sample in batch.samples:
        yield from (sample.step, sample.unix_ns >> 10, sample.cost_ns)
        for one in sample.ranks:
            yield from one.split.buckets_ns
            yield from (getattr(one.split, memo) for memo in MEMOS)
            yield from (*one.exposed_ns.values(), one.caused_wait_ns)
    for event in batch.events:
        yield from (event.step, event.unix_ns >> 10)
        # A rank that is less late than the others has a negative lateness.
        levels = (event.before_ns or 0, event.after_ns or 0)
        yield from map(math.floor, levels if event.kind == "change" else map(abs, levels))


def _list_ranks(batch: WatchBatch) -> Iterator[int]:
    yield from (window.rank for window in batch.windows)
    yield from (one.rank for sample in batch.samples for one in sample.ranks)
    yield from (sample.pivot or 0 for sample in batch.samples)
    yield from (event.rank or 0 for event in batch.events)


# Adding a batch, within a write transaction.


def _find_or_add(
    connection: Connection, batch: WatchBatch, sender: WatchSender, now_ns: int
) -> tuple[Row[Any], bool]:
    """The row of the run, locked until the transaction ends, and whether it is new. Raises
    OtherSenderError."""
    query = select(WATCHES).where(WATCHES.c.name == batch.run).with_for_update()
    row, is_new = connection.execute(query).one_or_none(), False
    if row is None:
        is_new = _add_watch(connection, batch, sender, now_ns)
        # Else another host was first, in a database that takes several writers.
        row = connection.execute(query).one()
    if not sender.may_write(row.sender):
        raise OtherSenderError(
            f"the watched run {batch.run!r} is of another sender; choose another --name, or have an"
            " admin hand it over"
        )
    if row.sender is None and sender.name is not None:
        own = update(WATCHES).where(WATCHES.c.id == row.id)
        connection.execute(own.values(sender=sender.name))
    return row, is_new


def _add_watch(connection: Connection, batch: WatchBatch, sender: WatchSender, now_ns: int) -> bool:
    """Adds the run. False if there is one now. Raises OtherSenderError if its name looks like that
    of another sender's run."""
    if not sender.is_admin:
        folded = fold_name(batch.run)
        for name, owner in connection.execute(select(WATCHES.c.name, WATCHES.c.sender)):
            if not sender.may_write(owner) and fold_name(name) == folded:
                raise OtherSenderError(
                    f"the name {batch.run!r} looks like {name!r}, a watched run of another sender;"
                    " choose another --name"
                )
    new = {
        "name": batch.run, "created_unix_ns": now_ns, "received_unix_ns": now_ns,
        "newest_unix_ns": batch.unix_ns, "rolled_unix_ns": 0, "trimmed_unix_ns": batch.unix_ns,
        "last_step": 0, "batches": 0, "sender": sender.name,
    }  # fmt: skip
    try:
        with connection.begin_nested():
            connection.execute(insert(WATCHES), new)
    except IntegrityError:
        return False
    return True


def _add_batch_id(connection: Connection, watch_id: int, batch: WatchBatch) -> bool:
    """Records the id of the batch. False if it is known."""
    digest = blake2b(batch.id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    key = {"watch_id": watch_id, "digest": digest}
    if _find_row(connection, WATCH_BATCHES, key) is not None:
        return False
    connection.execute(insert(WATCH_BATCHES), {**key, "unix_ns": batch.unix_ns})
    return True


def _add_contents(connection: Connection, watch_id: int, batch: WatchBatch) -> None:
    by_minute: dict[int, list[RankWindow]] = defaultdict(list)
    for window in batch.windows:
        by_minute[watch_slots.compute_slot_start(window.end_unix_ns, watch_slots.MINUTE_S)].append(
            window
        )
    for start_s, windows in sorted(by_minute.items()):
        key = _SlotKey(watch_id, watch_slots.MINUTE_S, start_s, batch.incarnation)
        parts = watch_slots.merge_steps(watch_slots.build_step_columns(windows))
        _add_steps(connection, key, parts, watch_slots.build_local_sums(windows))
    for sample in batch.samples:
        if _add_sample(connection, watch_id, batch, sample):
            for level_s in watch_slots.LEVELS_S:
                start_s = watch_slots.compute_slot_start(sample.unix_ns, level_s)
                _add_split(
                    connection, _SlotKey(watch_id, level_s, start_s, batch.incarnation), sample
                )
    if batch.events:
        connection.execute(
            insert(WATCH_EVENTS),
            [_build_event_row(watch_id, batch, event) for event in batch.events],
        )
    for reason, number in batch.dropped.items():
        _count_dropped(connection, watch_id, clean_text(reason, 200), number)


@dataclass(frozen=True, slots=True)
class _SlotKey:
    watch_id: int
    level_s: int
    start_unix_s: int
    incarnation: int

    @property
    def columns(self) -> dict[str, int]:
        """The values of the key's columns."""
        return {
            "watch_id": self.watch_id, "level_s": self.level_s,
            "start_unix_s": self.start_unix_s, "incarnation": self.incarnation,
        }  # fmt: skip


def _add_steps(
    connection: Connection, key: _SlotKey, parts: watch_slots.Columns, local: watch_slots.Columns
) -> None:
    """Adds parts to a slot of a minute. A rank may have several, so that the median of all of them
    does not depend on their order."""
    known = _find_row(connection, WATCH_STEPS, key.columns)
    if known is not None:
        parts = np.concatenate([watch_slots.unpack_steps(known.by_rank), parts], axis=1)
        local = watch_slots.merge_sums(
            np.concatenate([watch_slots.unpack_sums(known.local), local], axis=1)
        )
    _write_steps(connection, key, parts, local)


def _write_steps(
    connection: Connection, key: _SlotKey, parts: watch_slots.Columns, local: watch_slots.Columns
) -> None:
    values = {
        **asdict(watch_slots.summarize_steps(parts)),
        "rolled": False, "by_rank": watch_slots.pack_steps(parts),
        "local": watch_slots.pack_columns(local) if local.size else None,
    }  # fmt: skip
    _write_row(connection, WATCH_STEPS, key.columns, values)


def _add_sample(
    connection: Connection, watch_id: int, batch: WatchBatch, sample: WatchSample
) -> bool:
    """Adds a sample. False if one of this id is known."""
    sample_id = clean_text(sample.id, 200)
    key = {"watch_id": watch_id, "sample_id": sample_id}
    if _find_row(connection, WATCH_SAMPLES, key) is not None:
        return False
    row = {
        **key, "incarnation": batch.incarnation, "step": sample.step, "unix_ns": sample.unix_ns,
        "host": clean_text(batch.host, 200), "pivot": sample.pivot,
        "no_data": clean_text(sample.no_data, 500), "finding": clean_text(sample.finding, 500),
        "cost_ns": sample.cost_ns, "traces": clean_text(sample.traces, 500),
        "by_rank": watch_slots.pack_splits(_select_ranks(sample)),
    }  # fmt: skip
    connection.execute(insert(WATCH_SAMPLES), row)
    return True


def _select_ranks(sample: WatchSample) -> tuple[RankSample, ...]:
    """The ranks of a sample that counts."""
    return () if sample.no_data else sample.ranks


def _add_split(connection: Connection, key: _SlotKey, sample: WatchSample) -> None:
    """Adds a sample to the sums of a slot."""
    ranks = _select_ranks(sample)
    known = _find_row(connection, WATCH_SPLITS, key.columns)
    exposed: dict[str, int] = json.loads(known.exposed) if known else {}
    no_data: dict[str, int] = json.loads(known.no_data) if known else {}
    for one in ranks:
        for axis, ns in one.exposed_ns.items():
            _count_name(exposed, clean_text(axis, 40), ns)
    if not ranks:
        _count_name(no_data, clean_text(sample.no_data or "no rank has data", 200), 1)
    waits = watch_slots.build_wait_sums(ranks)
    if known:
        waits = np.concatenate([watch_slots.unpack_sums(known.waits), waits], axis=1)
    sums = {
        name: min(
            sum(getattr(one.split, name) for one in ranks) + (getattr(known, name) if known else 0),
            _MAX_SUM,
        )
        for name in _BUCKET_NAMES
    }
    values = {
        "samples": 1 + (known.samples if known else 0),
        "rank_samples": len(ranks) + (known.rank_samples if known else 0),
        "exposed": json.dumps(exposed), "no_data": json.dumps(no_data),
        "waits": watch_slots.pack_columns(watch_slots.merge_sums(waits)), **sums,
    }  # fmt: skip
    _write_row(connection, WATCH_SPLITS, key.columns, values)


def _count_name(counts: dict[str, int], name: str, number: int) -> None:
    """Adds to the number of this name, or to that of all others if there are too many."""
    key = name if name in counts or len(counts) < MAX_NAMES else "other"
    counts[key] = counts.get(key, 0) + number


def _build_event_row(watch_id: int, batch: WatchBatch, event: WatchEvent) -> dict[str, Any]:
    return {
        "watch_id": watch_id, "incarnation": batch.incarnation, "kind": event.kind,
        "step": event.step, "unix_ns": event.unix_ns, "host": clean_text(batch.host, 200),
        "rank": event.rank, "text": clean_text(event.text, 500),
    }  # fmt: skip


def _count_dropped(connection: Connection, watch_id: int, reason: str, number: int) -> None:
    key = {"watch_id": watch_id, "reason": reason}
    known = _find_row(connection, WATCH_DROPPED, key)
    total = min(number + (known.number if known else 0), _MAX_NUMBER)
    _write_row(connection, WATCH_DROPPED, key, {"number": total})


# Statements on one row, which are built once: that takes longer than to execute them.


@cache
def _build_find(table: Table) -> Select[Any]:
    return select(table).where(*(c == bindparam(c.name) for c in table.primary_key.columns))


@cache
def _build_upsert(dialect: str, table: Table) -> Executable:
    new = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    values = {c.name: new.excluded[c.name] for c in table.columns if not c.primary_key}
    upsert: Executable = new.on_conflict_do_update(
        index_elements=[*table.primary_key.columns], set_=values
    )
    return upsert


def _find_row(connection: Connection, table: Table, key: Mapping[str, Any]) -> Row[Any] | None:
    """The row of this primary key; None if there is none."""
    return connection.execute(_build_find(table), key).one_or_none()


def _write_row(
    connection: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Writes the row of this primary key, which may exist."""
    connection.execute(_build_upsert(connection.dialect.name, table), {**key, **values})


# The status of the run, its hosts and starts; rolling up and trimming as its time goes on.


def _update_status(connection: Connection, watch: Row[Any], batch: WatchBatch, now_ns: int) -> None:
    newest_ns = max(watch.newest_unix_ns, batch.unix_ns)
    steps = [one.last_step for one in batch.windows] + [one.step for one in batch.samples]
    values = {
        "received_unix_ns": now_ns, "newest_unix_ns": newest_ns, "batches": watch.batches + 1,
        "last_step": max(watch.last_step, *steps, 0),
    }  # fmt: skip
    if newest_ns >= watch.rolled_unix_ns + watch_slots.MINUTE_S * _SECOND_NS:
        _roll_up(connection, watch.id)
        values["rolled_unix_ns"] = newest_ns
    if newest_ns >= watch.trimmed_unix_ns + watch_slots.HOUR_S * _SECOND_NS:
        _trim(connection, watch.id, newest_ns)
        values["trimmed_unix_ns"] = newest_ns
    _update_host(connection, watch.id, batch)
    _update_start(connection, watch.id, batch, now_ns)
    connection.execute(update(WATCHES).where(WATCHES.c.id == watch.id).values(values))


def _update_host(connection: Connection, watch_id: int, batch: WatchBatch) -> None:
    key = {"watch_id": watch_id, "host": clean_text(batch.host, 200)}
    known = _find_row(connection, WATCH_HOSTS, key)
    if known is None or known.newest_unix_ns <= batch.unix_ns:
        values = {
            "incarnation": batch.incarnation, "newest_unix_ns": batch.unix_ns,
            "interval_steps": batch.interval_steps, "budget": batch.budget,
            "overhead": batch.overhead,
        }  # fmt: skip
        _write_row(connection, WATCH_HOSTS, key, values)


def _update_start(connection: Connection, watch_id: int, batch: WatchBatch, now_ns: int) -> None:
    key = {"watch_id": watch_id, "incarnation": batch.incarnation}
    known = _find_row(connection, WATCH_STARTS, key)
    times = [one.start_unix_ns for one in batch.windows]
    times += [one.unix_ns for one in batch.samples] + [one.unix_ns for one in batch.events]
    first = min([batch.unix_ns, *times])
    ended = [min(one.unix_ns, now_ns) for one in batch.events if one.kind == "ended"]
    if known is not None and known.ended_unix_ns is not None:
        # A job that goes on has not ended, whatever a batch has said.
        last_ns = max((one.end_unix_ns for one in batch.windows), default=0)
        if last_ns <= known.ended_unix_ns + REOPENED_S * _SECOND_NS:
            ended.append(known.ended_unix_ns)
    values = {
        "world_size": batch.world_size,
        "first_unix_ns": min(first, known.first_unix_ns) if known else first,
        "newest_unix_ns": max(batch.unix_ns, known.newest_unix_ns if known else 0),
        "ended_unix_ns": max(ended, default=None),
    }
    _write_row(connection, WATCH_STARTS, key, values)


def _roll_up(connection: Connection, watch_id: int) -> None:
    """Makes the longer slots of step times anew whose shorter ones have changed."""
    table = WATCH_STEPS.c
    for level_s, longer_s in pairwise(watch_slots.LEVELS_S):
        changed = (table.watch_id == watch_id, table.level_s == level_s, table.rolled.is_(False))
        rows = connection.execute(select(table.start_unix_s, table.incarnation).where(*changed))
        wanted = {(start_s // longer_s * longer_s, number) for start_s, number in rows}
        for start_s, number in sorted(wanted):
            shorter = select(table.by_rank, table.local).where(
                table.watch_id == watch_id,
                table.level_s == level_s,
                table.start_unix_s.between(start_s, start_s + longer_s - 1),
                table.incarnation == number,
            )
            slots = connection.execute(shorter).all()
            parts = [
                watch_slots.merge_steps(watch_slots.unpack_steps(row.by_rank)) for row in slots
            ]
            local = [watch_slots.unpack_sums(row.local) for row in slots]
            key = _SlotKey(watch_id, longer_s, start_s, number)
            _write_steps(
                connection, key,
                watch_slots.merge_steps(np.concatenate(parts, axis=1)),
                watch_slots.merge_sums(np.concatenate(local, axis=1)),
            )  # fmt: skip
        connection.execute(update(WATCH_STEPS).where(*changed).values(rolled=True))


def _trim(connection: Connection, watch_id: int, newest_ns: int) -> None:
    """Deletes what is older than is kept, by the newest time of the run."""
    for table in (WATCH_STEPS, WATCH_SPLITS):
        for level_s, kept_s in watch_slots.KEPT_S.items():
            oldest_s = newest_ns // _SECOND_NS - kept_s
            connection.execute(
                delete(table).where(
                    table.c.watch_id == watch_id,
                    table.c.level_s == level_s,
                    table.c.start_unix_s < oldest_s,
                )
            )
    for table, kept_s in (
        (WATCH_BATCHES, LATE_S),
        (WATCH_SAMPLES, KEPT_SAMPLES_S),
        (WATCH_EVENTS, KEPT_EVENTS_S),
    ):
        oldest_ns = newest_ns - kept_s * _SECOND_NS
        connection.execute(
            delete(table).where(table.c.watch_id == watch_id, table.c.unix_ns < oldest_ns)
        )
    ended = WATCH_ALERTS.c.ended_unix_ns < newest_ns - KEPT_EVENTS_S * _SECOND_NS
    connection.execute(delete(WATCH_ALERTS).where(WATCH_ALERTS.c.watch_id == watch_id, ended))
