"""Webhooks of alerts: signed, tried three times, once for all processes, to a real HTTP server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.alert_receiver import SECRET, is_genuine, read_example, running_receiver
from support.waiting import until
from support.watch_builders import MS, batch, event, minutes_ago, window

from stepsplit.dashboard.store.alerts import WatchAlert
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import WatchStore
from stepsplit.dashboard.web import alerting
from stepsplit.dashboard.web.alerting import (
    AlertTarget,
    AlertWorker,
    build_message,
    deliver,
    post_message,
)

ADDRESS = "https://stepsplit.example/"
RUN = "llama-8b night 3"


def add_changes(store: Store, runs: list[str]) -> None:
    """A change of each run with its cause, so that its webhook is due."""
    text = "steps take 120 ms since step 2000, 100 ms before (+20.0 %)"
    cause = "rank 3: mostly compute: +20.0 ms; others wait 18.0 ms for it"
    for run in runs:
        at_ns = minutes_ago(5)
        events = (
            event("change", at_ns, text, 2_000, before_ns=100.0 * MS, after_ns=120.0 * MS),
            event("change", at_ns, cause, 2_040, rank=3),
        )
        store.watches.add_batch(batch(run=run, id=run, events=events))


@pytest.fixture
def due(store: Store) -> WatchAlert:
    add_changes(store, [RUN])
    claimed = store.alerts.claim_delivery()
    assert claimed is not None
    return claimed


def test_the_message_is_the_one_of_the_page_and_its_signature_holds(due: WatchAlert) -> None:
    with running_receiver() as receiver:
        assert post_message(AlertTarget(receiver.url, SECRET), build_message(due, ADDRESS)) == ""

    (message,) = receiver.messages
    shown = json.loads(read_example("json"))
    assert list(message) == list(shown)
    assert message == shown | {"id": due.id, "since": message["since"]}
    assert (receiver.paths, receiver.forged) == (["/hook/"], [])


def test_the_example_refuses_what_is_forged_or_old() -> None:
    body, now = b'{"id": 7}', str(int(time.time()))
    headers = {
        alerting.TIMESTAMP: now, alerting.SIGNATURE: alerting.sign(SECRET, now, body),
    }  # fmt: skip
    assert is_genuine(headers, body)

    assert not is_genuine(headers, body + b" ")
    assert not is_genuine(headers, body, "another key")
    assert not is_genuine(headers | {alerting.TIMESTAMP: str(int(now) - 1)}, body)
    old = str(int(now) - 400)
    signed = {alerting.TIMESTAMP: old, alerting.SIGNATURE: alerting.sign(SECRET, old, body)}
    assert not is_genuine(signed, body)


def test_a_redirect_is_not_followed(due: WatchAlert) -> None:
    with running_receiver(status=307) as receiver:
        reason = post_message(AlertTarget(receiver.url, SECRET), build_message(due, ADDRESS))

    assert reason == "the receiver answers 307; redirects are not followed"
    assert receiver.paths == ["/hook/"]


def test_an_answer_that_never_ends_is_cut(due: WatchAlert, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, but not all of them."""
    monkeypatch.setattr(alerting, "TIMEOUT_S", 1.0)
    begun = time.monotonic()
    with running_receiver(drip_s=0.1) as receiver:
        reason = post_message(AlertTarget(receiver.url, SECRET), build_message(due, ADDRESS))

    assert reason == "the receiver has not answered within 1 s, or not with HTTP"
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_receiver_that_is_not_there_or_speaks_no_tls_is_one_line(
    due: WatchAlert, scheme: str
) -> None:
    with running_receiver() as receiver:
        url = receiver.url.replace("http", scheme)
        if scheme == "http":
            with socket.socket() as closed:
                closed.bind(("127.0.0.1", 0))
                url = f"http://127.0.0.1:{closed.getsockname()[1]}/key-in-the-path"
        reason = post_message(AlertTarget(url, SECRET), build_message(due, ADDRESS))

    assert reason.startswith("the receiver cannot be reached: ")
    assert "\n" not in reason and "key-in-the-path" not in reason


def test_a_failure_is_noted_and_logged_in_one_line(
    store: Store, due: WatchAlert, caplog: pytest.LogCaptureFixture
) -> None:
    with running_receiver(failures=9) as receiver:
        target = AlertTarget(receiver.url, SECRET, pauses_s=(0.0, 0.0))
        deliver(store.alerts, due, target, ADDRESS)
        for _ in range(2):
            again = store.alerts.claim_delivery()
            assert again is not None
            deliver(store.alerts, again, target, ADDRESS)

    assert store.alerts.claim_delivery() is None
    (alert,) = store.alerts.list_alerts(RUN, 1)
    assert (alert.tries, alert.failure) == (3, "the receiver answers 503")
    assert [one.getMessage() for one in caplog.records] == [
        f"webhook of alert {alert.id} of {RUN} failed: the receiver answers 503; {then}"
        for then in ("trying again in 0 s", "trying again in 0 s", "given up")
    ]
    assert SECRET not in caplog.text and receiver.url not in caplog.text


_WORKER = """
import sys, time
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.alerting import AlertTarget, AlertWorker
url, artifacts, hook, secret = sys.argv[1:]
target = AlertTarget(hook, secret, pauses_s=(0.2, 0.2))
AlertWorker(Store.open(url, artifacts), target, "http://here").start()
print("started", flush=True)
time.sleep(120)
"""


@contextmanager
def _running_workers(url: str, folder: Path, hook: str) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-c", _WORKER, url, str(folder), hook, SECRET]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for one in workers:
            assert one.stdout is not None and one.stdout.readline() == "started\n"
        yield workers
    finally:
        for one in workers:
            one.kill()
            one.communicate(timeout=10)


@pytest.mark.slow
def test_two_server_processes_send_each_alert_once(database_url: str, tmp_path: Path) -> None:
    """Each message is refused twice, and accepted at the third try."""
    runs = [f"run {number}" for number in range(8)]
    store = Store.open(database_url, tmp_path)
    with (
        running_receiver(failures=2) as receiver,
        _running_workers(database_url, tmp_path, receiver.url),
    ):
        add_changes(store, runs)
        until(lambda: len(receiver.messages) == len(runs))
        time.sleep(2.5)

    assert sorted(one["run"] for one in receiver.messages) == runs
    assert set(receiver.tries.values()) == {3} and receiver.forged == []
    for run in runs:
        (alert,) = store.alerts.list_alerts(run, 9)
        assert (alert.tries, alert.failure, alert.due_unix_ns) == (3, "", None)
        assert alert.delivered_unix_ns is not None
    store.close()


@pytest.mark.slow
def test_a_receiver_that_hangs_holds_up_no_batch(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerting, "TIMEOUT_S", 2.0)
    with running_receiver(drip_s=0.2) as receiver:
        worker = AlertWorker(store, AlertTarget(receiver.url, SECRET), ADDRESS)
        add_changes(store, [RUN])
        worker.start()
        until(lambda: receiver.paths)

        begun = time.monotonic()
        store.watches.add_batch(batch(id="next", run=RUN))
        assert time.monotonic() - begun < 1
        worker.stop()


def test_the_thread_finds_runs_that_are_silent(database_url: str, tmp_path: Path) -> None:
    """Not before hosts have found a dashboard that has just begun."""
    database = open_database(database_url)
    one = batch(unix_ns=minutes_ago(60), windows=(window(0, minutes_ago(61)),))
    WatchStore(database, lambda: minutes_ago(60)).add_batch(one)
    database.close()
    opened = Store.open(database_url, tmp_path)
    for first_check_s, number in ((60.0, 0), (0.0, 1)):
        worker = AlertWorker(opened, None, ADDRESS, first_check_s)
        worker.start()
        time.sleep(1.5)
        worker.stop()
        assert len(opened.alerts.list_alerts("night", 9)) == number
    opened.close()


def test_without_a_target_alerts_are_kept_but_not_sent(store: Store) -> None:
    add_changes(store, [RUN])
    worker = AlertWorker(store, None, ADDRESS)
    worker.start()
    time.sleep(1.5)
    worker.stop()

    (alert,) = store.alerts.list_alerts(RUN, 1)
    assert (alert.tries, alert.delivered_unix_ns) == (0, None)


def test_the_rules_for_prometheus_are_yaml_and_cover_every_metric_of_an_alert() -> None:
    (group,) = yaml.safe_load(read_example("yaml"))["groups"]

    rules: list[dict[str, Any]] = group["rules"]
    assert all({"alert", "expr", "annotations"} <= set(rule) for rule in rules)
    names = ("last_data_timestamp_seconds", "level_ratio", "overhead_ratio", "dropped_total")
    for rule, name in zip(rules, names, strict=True):
        assert f"stepsplit_watch_{name}" in rule["expr"]
