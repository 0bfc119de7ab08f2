"""The background work of alerts, in a thread of the serving process: finds runs that are silent or
over their budget, and delivers each alert to a webhook."""

from __future__ import annotations

import hmac
import http.client
import logging
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct
from sqlalchemy.exc import SQLAlchemyError

from stepsplit.analyzer import units
from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.alerts import AlertCondition, AlertStore, Metric, WatchAlert
from stepsplit.dashboard.store.audit import format_time
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import WatchedRun, WatchHost, WatchStore
from stepsplit.dashboard.store.watch_slots import DAY_S, HOUR_S, MINUTE_S

_LOG = logging.getLogger("stepsplit.alerts")

_SECOND_NS = 10**9

# The webhook: its body, its signature, and one request.

SCHEMA = "stepsplit.alert/1"

SIGNATURE, TIMESTAMP = "X-Stepsplit-Signature", "X-Stepsplit-Timestamp"

TIMEOUT_S = 5.0
"""A receiver must have answered within this time."""


@dataclass(frozen=True, slots=True)
class AlertTarget:
    """Where alerts are delivered to: an http or https URL, which may contain secrets, and the key
    of the signature. A failed delivery is tried again after each of the pauses."""

    url: str = field(repr=False)
    secret: str = field(repr=False)
    pauses_s: tuple[float, ...] = (10.0, 60.0)


class AlertMessage(Struct, frozen=True, kw_only=True):
    """The body of a webhook.

    Attributes:
        schema: "stepsplit.alert/1".
        id: Unique within the dashboard. A message may come twice if its answer was lost.
        run: The name of the watched run.
        metric: "step_time", "silent", "overhead" or "dropped".
        before: The level before; None if there is none.
        after: The level since; the age of the data of a silent run.
        unit: "s" of times, "1" of parts and numbers.
        since: The time of the change (UTC).
        step: Its step.
        incarnation: The number of the job's start, from 0.
        rank: The rank that others wait for; None if it is unknown or none.
        text: One sentence.
        cause: What explains the change; "" if it is unknown.
        ended: When it was over (UTC); None while it goes on.
        link: The page of the run.
    """

    schema: str = SCHEMA
    id: int
    run: str
    metric: Metric
    before: float | None
    after: float | None
    unit: str
    since: str
    step: int
    incarnation: int
    rank: int | None
    text: str
    cause: str
    ended: str | None
    link: str


def parse_alert_target(url: str, secret: str | None) -> AlertTarget:
    """The target from the server's configuration. Raises UsageError; it does not contain the URL,
    which may have a secret in its path."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.username is not None or not url.isascii() or not url.isprintable():
        raise UsageError("--alert-url: write http:// or https://HOST[:PORT]/PATH, without user")
    if not secret:
        raise UsageError(
            "--alert-url needs a key for its signature; set STEPSPLIT_ALERT_SECRET or"
            " --alert-secret-file"
        )
    return AlertTarget(url, secret)


def check_public_url(url: str) -> str:
    """The address of the dashboard in messages. Raises UsageError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--public-url {url}: write an address such as https://stepsplit.example")
    return url


def build_message(alert: WatchAlert, address: str) -> AlertMessage:
    """The message of an alert of the dashboard at this address."""
    ended_ns = alert.ended_unix_ns
    return AlertMessage(
        id=alert.id, run=alert.run, metric=alert.metric, before=alert.before, after=alert.after,
        unit="s" if alert.metric in ("step_time", "silent") else "1",
        since=format_time(alert.since_unix_ns), step=alert.step, incarnation=alert.incarnation,
        rank=alert.rank, text=alert.text, cause=alert.cause,
        ended=None if ended_ns is None else format_time(ended_ns),
        link=f"{address.rstrip('/')}/watch/{quote(alert.run)}",
    )  # fmt: skip


def sign(secret: str, timestamp: str, body: bytes) -> str:
    """The signature: HMAC-SHA256 over the timestamp, a dot and the body."""
    signed = timestamp.encode() + b"." + body
    return "sha256=" + hmac.new(secret.encode(), signed, "sha256").hexdigest()


def post_message(target: AlertTarget, message: AlertMessage) -> str:
    """Sends the message once, without following redirects.

    Returns:
        "" if it was accepted, else one line why not.
    """
    body, timestamp = msgspec.json.encode(message), str(int(time.time()))
    headers = {
        "Content-Type": "application/json", "User-Agent": "stepsplit", TIMESTAMP: timestamp,
        SIGNATURE: sign(target.secret, timestamp, body),
    }  # fmt: skip
    parts = urlsplit(target.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    # The timeout of the connection is for each read of it, not for all of them.
    timer = threading.Timer(TIMEOUT_S, _cut, (connection,))
    timer.daemon = True
    timer.start()
    try:
        connection.request("POST", path, body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ssl.SSLError):
            return f"the receiver cannot be reached: {error.reason or 'TLS fails'}"
        if isinstance(error, TimeoutError | http.client.HTTPException | ConnectionResetError):
            return f"the receiver has not answered within {TIMEOUT_S:g} s, or not with HTTP"
        reason = getattr(error, "strerror", None) or type(error).__name__
        return f"the receiver cannot be reached: {reason}"
    finally:
        timer.cancel()
        connection.close()
    if 200 <= status < 300:
        return ""
    # A redirect could lead the signed message to a place that was not configured.
    is_redirect = 300 <= status < 400
    return f"the receiver answers {status}" + ("; redirects are not followed" * is_redirect)


def _cut(connection: http.client.HTTPConnection) -> None:
    # None before it is connected, or after it is closed.
    sock: socket.socket | None = connection.sock
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


# Conditions of running jobs.

LEAST_SILENT_S, SILENT_INTERVALS = 15 * MINUTE_S, 3
"""A host without data for so long and for so many intervals between samples is silent."""

FORGOTTEN_S = DAY_S
"""A run of which nothing came for so long begins no alert."""

OVER_BUDGET, OVER_BUDGET_S = 1.5, HOUR_S
"""Samples that cost this part of the budget for so long are worth an alert."""


def find_silence(watches: WatchStore, run: WatchedRun, now_ns: int) -> AlertCondition | None:
    """The hosts of the newest start that send nothing, unless the job has ended."""
    if run.start.ended_unix_ns is not None:
        return None
    age_s = (now_ns - run.received_unix_ns) / _SECOND_NS
    ages_s = {
        # By this server's clock since the newest batch came, and by the clocks of the hosts among
        # each other, which may be wrong against it.
        host: age_s + max(run.newest_unix_ns - host.newest_unix_ns, 0) / _SECOND_NS
        for host in run.current_hosts
    }
    if max(ages_s.values()) <= LEAST_SILENT_S:
        return None
    # The time between two samples by the newest step times; 0 if it is unknown.
    slots, interval_s = watches.read_steps(run.id, run.newest_minutes), 0.0
    if slots and run.interval_steps is not None:
        interval_s = run.interval_steps * slots[-1].summary.median_step_ns / _SECOND_NS
    least_s = max(LEAST_SILENT_S, SILENT_INTERVALS * interval_s)
    silent = [host for host, own_s in ages_s.items() if own_s > least_s]
    if not silent:
        return None
    silent_s = [ages_s[host] for host in silent]
    # The text of an open alert stays as it is while the hosts do, and is to be true of each of
    # them, later, too.
    hosts, minutes = _describe_hosts(silent, len(ages_s)), int(min(silent_s) // MINUTE_S)
    text = f"no data of {hosts} for at least {minutes} min"
    since_ns = min(host.newest_unix_ns for host in silent)
    return AlertCondition(
        text, run.start.incarnation, run.last_step, since_ns, None, max(silent_s), hosts=hosts
    )


def _describe_hosts(silent: Sequence[WatchHost], number: int) -> str:
    names = ", ".join(sorted(host.host for host in silent)[:3])
    more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
    if len(silent) == number > 1:
        return f"all {number} hosts"
    return f"{len(silent)} of {number} hosts ({names}{more})" if number > 1 else f"host {names}"


def find_excess_overhead(run: WatchedRun) -> AlertCondition | None:
    """That samples cost over one and a half times their budget, unless the job has ended."""
    overhead, budget = run.overhead, run.budget
    if overhead is None or run.start.ended_unix_ns is not None:
        return None
    if overhead <= OVER_BUDGET * budget:
        return None
    cost, limit = (units.format_percent(part, 2) for part in (overhead, budget))
    text = f"samples cost {cost} of the training time, budget {limit}"
    return AlertCondition(
        text, run.start.incarnation, run.last_step, run.newest_unix_ns, budget, overhead,
        OVER_BUDGET_S,
    )  # fmt: skip


def check_runs(watches: WatchStore, alerts: AlertStore, now_ns: int) -> None:
    """Opens and ends the alerts that no batch does."""
    unended = alerts.list_unended()
    if any(metric == "dropped" for _, metric in unended):
        alerts.end_dropped()
    for run in watches.list_watches():
        is_forgotten = now_ns - run.received_unix_ns > FORGOTTEN_S * _SECOND_NS
        found: dict[Metric, AlertCondition | None] = {
            "silent": find_silence(watches, run, now_ns),
            "overhead": find_excess_overhead(run),
        }
        for metric, condition in found.items():
            is_known = (run.name, metric) in unended
            # An alert that is open ends also for a run that is forgotten.
            if is_known or (condition is not None and not is_forgotten):
                alerts.update_condition(run.id, metric, condition)


# The thread.

CHECK_S, POLL_S = 60.0, 1.0

FIRST_CHECK_S = 600.0
"""Hosts whose batches could not be received try again within 5 minutes."""


class AlertWorker:
    """Checks the runs of the store once a minute, and delivers alerts if there is a target. Several
    processes may do so for the same store."""

    def __init__(
        self,
        store: Store,
        target: AlertTarget | None,
        address: str,
        first_check_s: float = FIRST_CHECK_S,
    ) -> None:
        self._store, self._target, self._address = store, target, address
        self._first_check_s = first_check_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def start(self) -> None:
        """Begins. Not before this process forks."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the request in progress."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(TIMEOUT_S + 1)

    def _run(self) -> None:
        next_check = time.monotonic() + self._first_check_s
        while not self._stopped.wait(POLL_S):
            try:
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + CHECK_S
                    check_runs(self._store.watches, self._store.alerts, time.time_ns())
                while self._target is not None and not self._stopped.is_set():
                    alert = self._store.alerts.claim_delivery()
                    if alert is None:
                        break
                    deliver(self._store.alerts, alert, self._target, self._address)
            except SQLAlchemyError as error:
                _LOG.error("the database is unavailable: %s", str(error).splitlines()[0])
            except Exception:  # noqa: BLE001 - a bug in one alert; the next one may still be sent
                _LOG.exception("alerts failed")


def deliver(alerts: AlertStore, alert: WatchAlert, target: AlertTarget, address: str) -> None:
    """Tries to deliver a claimed alert once."""
    reason = post_message(target, build_message(alert, address))
    if not reason:
        alerts.record_delivery(alert)
        return
    left = target.pauses_s[alert.tries :]
    alerts.record_failure(alert, reason, left[0] if left else None)
    then = f"trying again in {left[0]:g} s" if left else "given up"
    _LOG.warning("webhook of alert %s of %s failed: %s; %s", alert.id, alert.run, reason, then)
