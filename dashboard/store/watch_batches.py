"""Adding batches to watched runs: checks, sums in slots of time, rolling up and trimming."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Executable, Row, Select, Table, bindparam, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from stepsplit.analyzer.buckets import BUCKETS, MEMOS
from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.report.ledger import (
    ROW_KINDS,
    SCHEMA,
    IncarnationLedger,
    Ledger,
    leave_out_start,
    sum_rows,
)
from stepsplit.analyzer.watch.records import RankSample, WatchBatch, WatchSample
from stepsplit.collectors.formats.watch_notes import RankWindow
from stepsplit.dashboard.store import watch_slots
from stepsplit.dashboard.store.alerts import note_batch
from stepsplit.dashboard.store.ids import NAME_LENGTH, clean_text, fold_name, is_watch_name
from stepsplit.dashboard.store.schema import (
    METADATA,
    WATCH_ALERTS,
    WATCH_BATCHES,
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
from stepsplit.dashboard.store.watch_senders import OtherSenderError, WatchSender, check_start

_SECOND_NS = 10**9

_BUCKET_NAMES = tuple(f"{bucket}_ns" for bucket in BUCKETS)

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

# Checks of a batch: numbers must fit into the database, and times must be sane.

_MAX_NUMBER, _MAX_SUM = 1 << 53, (1 << 63) - 1
"""JSON and the browser hold whole numbers up to the first; the second is the largest BIGINT."""


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
    if batch.ledger is not None:
        _check_ledger(batch.ledger)
    if batch.unix_ns > now_ns + AHEAD_S * _SECOND_NS:
        raise UsageError(f"the clock of host {clean_text(batch.host, 100)} is over an hour ahead")
    times = [one.end_unix_ns for one in batch.windows]
    times += [one.unix_ns for one in batch.samples] + [one.unix_ns for one in batch.events]
    begin = batch.unix_ns - SPAN_S * _SECOND_NS
    if times and not begin <= min(times) <= max(times) <= batch.unix_ns + AHEAD_S * _SECOND_NS:
        raise UsageError("the times in a batch must be of the day before it was closed")


def _check_ledger(ledger: Ledger) -> None:
    """Raises UsageError if the ledger contradicts itself, or has what cannot be stored."""
    if ledger.schema != SCHEMA:
        raise UsageError(f"a ledger must be of {SCHEMA}; update stepsplit on the dashboard")
    parts: list[Ledger | IncarnationLedger] = [ledger, *ledger.incarnations]
    for part in parts:
        kinds = [row.kind for row in part.rows]
        if len({*kinds}) < len(kinds) or len({*kinds} - {*ROW_KINDS}) > _MOST_LATER_KINDS:
            raise UsageError(
                f"a ledger has one row of a kind, and at most {_MOST_LATER_KINDS} that are unknown"
            )
        for kind in kinds:
            if not (kind.isascii() and kind.isidentifier() and len(kind) <= NAME_LENGTH):
                raise UsageError("the rows of a ledger are of kinds such as train")
        if sum(row.ns for row in part.rows) != part.wall_ns:
            raise UsageError("the rows of a ledger must add up to its wall clock")
    train_ns = sum(row.ns for row in ledger.rows if row.kind == "train")
    goodput = train_ns / ledger.wall_ns if ledger.wall_ns else 0.0
    if not abs(ledger.goodput - goodput) < _ROUNDING or not ledger.incarnations:
        raise UsageError("a ledger has a start, and as its goodput the share of its row train")
    numbers = [start.incarnation for start in ledger.incarnations]
    if numbers != sorted({*numbers}) or numbers[-1] >= MAX_STARTS:
        raise UsageError(f"the starts of a ledger are in order, with numbers below {MAX_STARTS}")
    for start in ledger.incarnations:
        ranks = sorted({*start.ranks})
        is_known = ranks and ranks[0] >= 0 and ranks[-1] < start.world_size <= MAX_RANKS
        if not is_known or len(ranks) < len(start.ranks):
            raise UsageError(
                "the ranks of a start in a ledger are below its world_size, each once, and that is"
                f" at most {MAX_RANKS}"
            )
        begin = start.begin_unix_ns
        if not (begin.isascii() and begin.isdecimal() and len(begin) < 20):
            raise UsageError("a start in a ledger begins at a time in ns")
    # A ledger that is too large for a batch has its newest start only.
    whole = {row.kind: row for row in ledger.rows}
    for row in sum_rows([row for start in ledger.incarnations for row in start.rows]):
        known = whole.get(row.kind)
        if known is None or row.ns > known.ns or row.count > known.count:
            raise UsageError("the starts of a ledger have more than all of it")


_MOST_LATER_KINDS = 8
"""Kinds of rows of a later version, each of which is two series of /metrics."""

_ROUNDING = 1e-9


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
    if (ledger := batch.ledger) is not None:
        yield from (ledger.wall_ns >> 10, ledger.hosts)
        for row in (*ledger.rows, *(row for one in ledger.incarnations for row in one.rows)):
            # Not a number is none that can be stored, as a negative one.
            hours = row.gpu_hours if row.gpu_hours >= 0 else -1
            yield from (row.ns >> 10, row.count, math.floor(min(hours, _MAX_NUMBER)))
        for start in ledger.incarnations:
            yield from (start.wall_ns >> 10, start.incarnation, start.world_size)
            yield from (start.first_step, start.last_step or 0)


def _list_ranks(batch: WatchBatch) -> Iterator[int]:
    yield from (window.rank for window in batch.windows)
    yield from (one.rank for sample in batch.samples for one in sample.ranks)
    yield from (sample.pivot or 0 for sample in batch.samples)
    yield from (event.rank or 0 for event in batch.events)


# Adding a batch, within a write transaction.


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """Whether the batch was new, and whether it was the first of its run."""

    accepted: bool
    is_new_run: bool = False


def add_batch(
    connection: Connection, batch: WatchBatch, sender: WatchSender, now_ns: int
) -> BatchReceipt:
    """Adds a checked batch once. Raises UsageError if it is too old, OtherSenderError if the run is
    another sender's, and UnknownStartError."""
    # The row of the run stays locked from here on: hosts of one job send at the same time, and each
    # reads the slots before it writes them.
    watch, is_new_run = _find_or_add(connection, batch, sender, now_ns)
    check_start(connection, watch.id, batch)
    if batch.unix_ns < watch.newest_unix_ns - LATE_S * _SECOND_NS:
        days = LATE_S // watch_slots.DAY_S
        raise UsageError(f"the batch is over {days} days older than the newest of its run; drop it")
    # A digest has a fixed size, whatever a sender takes for an id.
    digest = blake2b(batch.id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    key = {"watch_id": watch.id, "digest": digest}
    # A host that got no answer sends its batch again.
    if _find_row(connection, WATCH_BATCHES, key) is not None:
        return BatchReceipt(False)
    connection.execute(insert(WATCH_BATCHES), {**key, "unix_ns": batch.unix_ns})
    _add_contents(connection, watch.id, batch, now_ns)
    note_batch(connection, watch.id, batch, now_ns)
    _update_status(connection, watch, batch, now_ns)
    return BatchReceipt(True, is_new_run)


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
        # An admin may take any name; for others a name that reads as another one would pass for
        # that run in the list.
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
        # In a savepoint, so that the transaction goes on if another host has added the run
        # meanwhile.
        with connection.begin_nested():
            connection.execute(insert(WATCHES), new)
    except IntegrityError:
        return False
    return True


def _add_contents(connection: Connection, watch_id: int, batch: WatchBatch, now_ns: int) -> None:
    by_minute: dict[int, list[RankWindow]] = defaultdict(list)
    for window in batch.windows:
        by_minute[watch_slots.compute_slot_start(window.end_unix_ns, watch_slots.MINUTE_S)].append(
            window
        )
    for start_s, windows in sorted(by_minute.items()):
        key = _SlotKey(watch_id, watch_slots.MINUTE_S, start_s, batch.incarnation)
        parts = watch_slots.merge_steps(watch_slots.build_step_columns(windows))
        local = watch_slots.build_local_sums(windows)
        known = _find_row(connection, WATCH_STEPS, key.columns)
        if known is not None:
            # A rank may have several parts in a slot of a minute, so that the median of all of them
            # does not depend on their order.
            parts = np.concatenate([watch_slots.unpack_steps(known.by_rank), parts], axis=1)
            sums = np.concatenate([watch_slots.unpack_sums(known.local), local], axis=1)
            local = watch_slots.merge_sums(sums)
        _write_steps(connection, key, parts, local)
    for sample in batch.samples:
        if _add_sample(connection, watch_id, batch, sample):
            # Sums can be added to each level at once; medians of steps cannot, and are rolled up
            # later.
            for level_s in watch_slots.LEVELS_S:
                start_s = watch_slots.compute_slot_start(sample.unix_ns, level_s)
                _add_split(
                    connection, _SlotKey(watch_id, level_s, start_s, batch.incarnation), sample
                )
    if batch.events:
        rows = [
            {
                "watch_id": watch_id, "incarnation": batch.incarnation, "kind": event.kind,
                "step": event.step, "unix_ns": event.unix_ns, "host": clean_text(batch.host, 200),
                "rank": event.rank, "text": clean_text(event.text, 500),
            }
            for event in batch.events
        ]  # fmt: skip
        connection.execute(insert(WATCH_EVENTS), rows)
    if batch.ledger is not None:
        _write_ledger(connection, watch_id, batch, batch.ledger, now_ns)
    for reason, number in batch.dropped.items():
        place = {"watch_id": watch_id, "reason": clean_text(reason, 200)}
        known = _find_row(connection, WATCH_DROPPED, place)
        # The sum of valid numbers need not be one.
        total = min(number + (known.number if known else 0), _MAX_NUMBER)
        _write_row(connection, WATCH_DROPPED, place, {"number": total})


_MOST_LACKS = 50


def _write_ledger(
    connection: Connection, watch_id: int, batch: WatchBatch, ledger: Ledger, now_ns: int
) -> None:
    key = {"watch_id": watch_id, "host": clean_text(batch.host, 200)}
    known = _find_row(connection, WATCH_LEDGERS, key)
    # A late batch has an older one.
    if known is not None and known.unix_ns > batch.unix_ns:
        return
    lacks = tuple(clean_text(one, 500) for one in ledger.lacks[:_MOST_LACKS])
    ledger = msgspec.structs.replace(ledger, run=batch.run, lacks=lacks)
    values = {
        "incarnation": batch.incarnation,
        # A clock that was ahead once must not keep out the ledgers of the next hour.
        "unix_ns": min(batch.unix_ns, now_ns),
        "lowest_rank": min(ledger.incarnations[-1].ranks),
        "ledger": msgspec.json.encode(ledger),
    }  # fmt: skip
    _write_row(connection, WATCH_LEDGERS, key, values)


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
    # By the time of the batches, not by the clock: batches that were kept while the server was away
    # are rolled up as they come.
    if newest_ns >= watch.rolled_unix_ns + watch_slots.MINUTE_S * _SECOND_NS:
        _roll_up(connection, watch.id)
        values["rolled_unix_ns"] = newest_ns
    if newest_ns >= watch.trimmed_unix_ns + watch_slots.HOUR_S * _SECOND_NS:
        # Deletes what is older than is kept, by the newest time of the run.
        for table in (WATCH_STEPS, WATCH_SPLITS):
            for level_s, kept_s in watch_slots.KEPT_S.items():
                oldest_s = newest_ns // _SECOND_NS - kept_s
                connection.execute(
                    delete(table).where(
                        table.c.watch_id == watch.id,
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
                delete(table).where(table.c.watch_id == watch.id, table.c.unix_ns < oldest_ns)
            )
        ended = WATCH_ALERTS.c.ended_unix_ns < newest_ns - KEPT_EVENTS_S * _SECOND_NS
        connection.execute(delete(WATCH_ALERTS).where(WATCH_ALERTS.c.watch_id == watch.id, ended))
        values["trimmed_unix_ns"] = newest_ns
    key = {"watch_id": watch.id, "host": clean_text(batch.host, 200)}
    known = _find_row(connection, WATCH_HOSTS, key)
    # A late batch says how the host was, not how it is.
    if known is None or known.newest_unix_ns <= batch.unix_ns:
        of_host = {
            "incarnation": batch.incarnation, "newest_unix_ns": batch.unix_ns,
            "interval_steps": batch.interval_steps, "budget": batch.budget,
            "overhead": batch.overhead,
        }  # fmt: skip
        _write_row(connection, WATCH_HOSTS, key, of_host)
    _update_start(connection, watch.id, batch, now_ns)
    connection.execute(update(WATCHES).where(WATCHES.c.id == watch.id).values(values))


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
        # From all shorter slots, not only the changed ones: a median cannot be corrected by what is
        # new.
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


# Forgetting a start.

_OF_STARTS = [
    table for table in METADATA.tables.values()
    if {"watch_id", "incarnation"} <= {*table.c.keys()}
    and table not in (WATCH_HOSTS, WATCH_LEDGERS)
]  # fmt: skip
"""The tables with rows of single starts of a job."""


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
    for row in connection.execute(
        select(WATCH_LEDGERS).where(WATCH_LEDGERS.c.watch_id == watch_id)
    ).all():
        known = ledger = None
        with suppress(msgspec.MsgspecError, ValueError):
            known = msgspec.json.decode(row.ledger, type=Ledger)
            ledger = leave_out_start(known, incarnation)
        key = {"watch_id": watch_id, "host": row.host}
        if ledger is None or (ledger is known and row.incarnation == incarnation):
            # Nothing is left of it, or it came in a start that it does not have, or cannot be read.
            connection.execute(
                delete(WATCH_LEDGERS).where(*(WATCH_LEDGERS.c[name] == key[name] for name in key))
            )
            continue
        last = ledger.incarnations[-1]
        is_own = row.incarnation == incarnation
        values = {
            "incarnation": last.incarnation if is_own else row.incarnation,
            "unix_ns": row.unix_ns, "lowest_rank": min(last.ranks),
            "ledger": msgspec.json.encode(ledger),
        }  # fmt: skip
        _write_row(connection, WATCH_LEDGERS, key, values)
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
