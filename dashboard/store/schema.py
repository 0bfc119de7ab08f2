"""The SQL tables of the newest migration, and columns that refuse what stepsplit does not write."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.ids import NAME_LENGTH, is_relative_path, is_run_id, is_watch_name

# Columns that refuse other values when they are read, in every query: a database may come from a
# stranger, and what it names is opened and deleted later.


class RunId(sa.TypeDecorator[str]):
    """The id of a run or a token."""

    impl, cache_ok = sa.String(32), True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """The id. Raises UsageError if the store has another value."""
        return _refuse_unless(value is None or is_run_id(value), value, "an id")


class RelativePath(sa.TypeDecorator[str]):
    """The path of a file of a run."""

    impl, cache_ok = sa.Text, True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """The path. Raises UsageError if the store has another value."""
        return _refuse_unless(value is None or is_relative_path(value), value, "a path")


class WatchName(sa.TypeDecorator[str]):
    """The name of a watched run."""

    impl, cache_ok = sa.String(NAME_LENGTH), True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """The name. Raises UsageError if the store has another value."""
        return _refuse_unless(value is None or is_watch_name(value), value, "a name")


def _refuse_unless(is_valid: bool, value: str | None, what: str) -> str | None:
    if is_valid:
        return value
    raise UsageError(
        f"the store has {what} that stepsplit does not write ({value!r:.100}): it is damaged, or"
        " made by a stranger; choose another --store"
    )


# The tables.

METADATA = sa.MetaData()


def _build_run_column(**kind: bool) -> sa.Column[str]:
    """The run of a row; deleting the run deletes the row."""
    run = sa.ForeignKey("runs.id", ondelete="CASCADE")
    return sa.Column("run_id", RunId, run, nullable=False, **kind)  # type: ignore[arg-type]


RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("id", RunId, primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False, index=True),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("note", sa.String(1000), nullable=False, server_default=""),
    sa.Column("world_size", sa.Integer),
    sa.Column("mesh", sa.String(200)),
    sa.Column("backend", sa.String(100)),
    sa.Column("step_ns", sa.BigInteger),
    *(sa.Column(f"{bucket}_ns", sa.BigInteger) for bucket in BUCKETS),
    *(sa.Column(f"{bucket}_share", sa.Float) for bucket in BUCKETS),
    sa.Column("steps", sa.Integer),
    sa.Column("warnings", sa.Integer),
    sa.Column("bubble_fraction", sa.Float),
    sa.Column("mfu", sa.Float),
    sa.Column("job_key", sa.String(16)),
    sa.Column("job_label", sa.String(200)),
    sa.Column("finding", sa.String(1000)),
    sa.Column("finding_ns", sa.BigInteger),
    sa.Column("roles", sa.Text),
)
"""roles has the names of the roles of a run that is a job of several, with commas between.
job_key is NULL until the job was looked for, and empty if it is unknown. finding has the words
of the first finding: NULL until it was looked for, and empty without one."""

TAGS = sa.Table(
    "tags",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(200), nullable=False),
)

RANKS = sa.Table(
    "ranks",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("rank", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("host", sa.String(200)),
    sa.Column("step_ns", sa.BigInteger, nullable=False),
    *(sa.Column(f"{bucket}_ns", sa.BigInteger, nullable=False) for bucket in BUCKETS),
)

METRICS = sa.Table(
    "metrics",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("name", sa.String(64), primary_key=True, index=True),
    sa.Column("value", sa.Float, nullable=False),
)

FILES = sa.Table(
    "files",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("path", RelativePath, primary_key=True),
    sa.Column("received_bytes", sa.BigInteger, nullable=False),
    sa.Column("complete", sa.Boolean, nullable=False),
)

JOBS = sa.Table(
    "jobs",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    _build_run_column(unique=True),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("queued_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("worker", sa.String(200)),
    sa.Column("lease_until_unix_ns", sa.BigInteger),
    sa.Column("progress", sa.Float),
    sa.Column("progress_note", sa.String(200)),
    sa.Column("error", sa.Text),
)

TOKENS = sa.Table(
    "tokens",
    METADATA,
    sa.Column("id", RunId, primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False, unique=True),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("last_used_unix_ns", sa.BigInteger),
    sa.Column("revoked", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("role", sa.String(16), nullable=False, server_default="viewer"),
    sa.Column("expires_unix_ns", sa.BigInteger),
)

SESSIONS = sa.Table(
    "sessions",
    METADATA,
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("token_id", RunId, sa.ForeignKey("tokens.id", ondelete="CASCADE")),
    sa.Column("proof", sa.String(64)),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("last_used_unix_ns", sa.BigInteger, nullable=False, index=True),
)
"""Logins: proof shows which password was entered; token_id names the token that was."""

AUDIT = sa.Table(
    "audit",
    METADATA,
    # Only an INTEGER is numbered by SQLite; it has 64 bits there.
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("at_unix_ns", sa.BigInteger, nullable=False, index=True),
    sa.Column("user_name", sa.String(200), nullable=False),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("address", sa.String(100), nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("target", sa.String(300), nullable=False),
    sa.Column("outcome", sa.String(200), nullable=False),
    sa.Column("count", sa.Integer, nullable=False, server_default="1"),
)

VERDICTS = sa.Table(
    "verdicts",
    METADATA,
    _build_run_column(primary_key=True),
    sa.Column("answer", sa.String(16), nullable=False),
    sa.Column("words", sa.String(500), nullable=False),
    sa.Column("judged_unix_ns", sa.BigInteger, nullable=False),
)

LOGIN_FAILURES = sa.Table(
    "login_failures",
    METADATA,
    sa.Column("key", sa.String(100), primary_key=True),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("last_unix_ns", sa.BigInteger, nullable=False),
)

WATCHES = sa.Table(
    "watches",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", WatchName, nullable=False, unique=True),
    sa.Column("created_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("received_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("newest_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("rolled_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("trimmed_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("last_step", sa.BigInteger, nullable=False),
    sa.Column("batches", sa.Integer, nullable=False),
    sa.Column("sender", sa.String(300)),
)
"""Watched runs. sender is who began it, and NULL if that may be anyone. newest is the latest time
in the data, rolled and trimmed how far of it is rolled up and rid of old rows; received is by the
clock of the server."""


def _build_watch_column(**kind: bool) -> sa.Column[int]:
    """The watched run of a row; deleting the run deletes the row."""
    watch = sa.ForeignKey("watches.id", ondelete="CASCADE")
    return sa.Column("watch_id", sa.Integer, watch, nullable=False, **kind)  # type: ignore[arg-type]


WATCH_STARTS = sa.Table(
    "watch_starts",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("first_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("newest_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("ended_unix_ns", sa.BigInteger),
)
"""The incarnations of a watched run: the starts of its job."""

WATCH_HOSTS = sa.Table(
    "watch_hosts",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("host", sa.String(200), primary_key=True),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("newest_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("interval_steps", sa.BigInteger),
    sa.Column("budget", sa.Float, nullable=False),
    sa.Column("overhead", sa.Float),
)
"""The newest batch of each host."""

WATCH_LEDGERS = sa.Table(
    "watch_ledgers",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("host", sa.String(200), primary_key=True),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("unix_ns", sa.BigInteger, nullable=False),
    sa.Column("lowest_rank", sa.Integer, nullable=False),
    sa.Column("ledger", sa.LargeBinary, nullable=False),
)
"""The newest ledger of each host that sends one, as JSON: one host, or each if each has its own
folder."""

WATCH_BATCHES = sa.Table(
    "watch_batches",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("digest", sa.LargeBinary(16), primary_key=True),
    sa.Column("unix_ns", sa.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""The ids of received batches, hashed; a batch that is received twice counts once."""


def _build_slot_columns() -> list[sa.Column[int]]:
    """The key of a slot of time."""
    return [
        _build_watch_column(primary_key=True),
        sa.Column("level_s", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("start_unix_s", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("incarnation", sa.Integer, primary_key=True, autoincrement=False),
    ]


WATCH_STEPS = sa.Table(
    "watch_steps",
    METADATA,
    *_build_slot_columns(),
    sa.Column("rolled", sa.Boolean, nullable=False),
    sa.Column("steps", sa.BigInteger, nullable=False),
    sa.Column("ranks", sa.Integer, nullable=False),
    sa.Column("min_step_ns", sa.BigInteger, nullable=False),
    sa.Column("median_step_ns", sa.BigInteger, nullable=False),
    sa.Column("max_step_ns", sa.BigInteger, nullable=False),
    sa.Column("slowest_rank", sa.Integer, nullable=False),
    sa.Column("slowest_median_ns", sa.BigInteger, nullable=False),
    sa.Column("by_rank", sa.LargeBinary, nullable=False),
    sa.Column("local", sa.LargeBinary),
)
"""Step times in slots of a minute, ten minutes, an hour and a day. by_rank, and local for local
times: packed arrays."""

WATCH_SPLITS = sa.Table(
    "watch_splits",
    METADATA,
    *_build_slot_columns(),
    sa.Column("samples", sa.Integer, nullable=False),
    sa.Column("rank_samples", sa.BigInteger, nullable=False),
    *(sa.Column(f"{bucket}_ns", sa.BigInteger, nullable=False) for bucket in BUCKETS),
    sa.Column("exposed", sa.Text, nullable=False),
    sa.Column("no_data", sa.Text, nullable=False),
    sa.Column("waits", sa.LargeBinary, nullable=False),
)
"""Sums over the sampled ranks, in the same slots. exposed: ns by axis, and no_data: samples by
reason, in JSON; waits: packed arrays over ranks."""

WATCH_SAMPLES = sa.Table(
    "watch_samples",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("sample_id", sa.String(200), primary_key=True),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("unix_ns", sa.BigInteger, nullable=False),
    sa.Column("host", sa.String(200), nullable=False),
    sa.Column("pivot", sa.Integer),
    sa.Column("no_data", sa.String(500), nullable=False),
    sa.Column("finding", sa.String(500), nullable=False),
    sa.Column("cost_ns", sa.BigInteger, nullable=False),
    sa.Column("traces", sa.String(500), nullable=False),
    sa.Column("by_rank", sa.LargeBinary, nullable=False),
    sa.Index("ix_watch_samples_time", "watch_id", "unix_ns"),
)

WATCH_EVENTS = sa.Table(
    "watch_events",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _build_watch_column(),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("unix_ns", sa.BigInteger, nullable=False),
    sa.Column("host", sa.String(200), nullable=False),
    sa.Column("rank", sa.Integer),
    sa.Column("text", sa.String(500), nullable=False),
    sa.Index("ix_watch_events_time", "watch_id", "unix_ns"),
)

WATCH_DROPPED = sa.Table(
    "watch_dropped",
    METADATA,
    _build_watch_column(primary_key=True),
    sa.Column("reason", sa.String(200), primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)
"""What the hosts gave up, by reason."""

WATCH_ALERTS = sa.Table(
    "watch_alerts",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _build_watch_column(),
    sa.Column("metric", sa.String(32), nullable=False),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("host", sa.String(200), nullable=False),
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("since_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("seen_unix_ns", sa.BigInteger, nullable=False),
    sa.Column("before", sa.Float),
    sa.Column("after", sa.Float),
    sa.Column("rank", sa.Integer),
    sa.Column("text", sa.String(500), nullable=False),
    sa.Column("cause", sa.String(500), nullable=False),
    sa.Column("opened_unix_ns", sa.BigInteger),
    sa.Column("ended_unix_ns", sa.BigInteger),
    sa.Column("acknowledged_unix_ns", sa.BigInteger),
    sa.Column("acknowledged_by", sa.String(200)),
    sa.Column("silenced_until_unix_ns", sa.BigInteger),
    sa.Column("due_unix_ns", sa.BigInteger, index=True),
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("delivered_unix_ns", sa.BigInteger),
    sa.Column("failure", sa.String(200), nullable=False),
    sa.Index("ix_watch_alerts_since", "watch_id", "since_unix_ns"),
)
"""Alerts. since is by the clocks of the hosts, the other times by that of the server. opened is
NULL while a condition has not lasted long enough; due is when the webhook is to be tried next, and
NULL when it need not be any more."""

DELETED = sa.Table("deleted", METADATA, sa.Column("run_id", RunId, primary_key=True))
"""Deleted runs whose files may still exist."""
