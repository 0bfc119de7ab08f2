"""Alerts of watched runs: opened once by batches, ended, silenced, delivered once to a webhook."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from plotly.io.json import to_json_plotly
from support.watch_builders import MS, RUN, SECOND_NS, batch, event, minutes_ago, window

from stepsplit.analyzer.watch.records import WatchBatch, WatchEvent, encode_batch
from stepsplit.analyzer.watch.reducer import Reducer, WatchFolder
from stepsplit.collectors.formats.watch_notes import NoteFile, RankStarted, RankWindow
from stepsplit.dashboard.pages.watch import build_watch_list
from stepsplit.dashboard.store.alerts import AlertStore, WatchAlert
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import WatchStore
from stepsplit.dashboard.web.alerting import check_runs
from stepsplit.dashboard.web.options import Access
from stepsplit.dashboard.web.server import create_server

NOON_NS = 1_790_078_400 * SECOND_NS
MINUTE_NS = 60 * SECOND_NS
HOST = {"Host": "traces.example"}


class Clocked:
    """A store of any kind whose time is set by the test."""

    def __init__(self, url: str) -> None:
        self.database, self.now_ns = open_database(url), NOON_NS
        self.watches = WatchStore(self.database, lambda: self.now_ns)
        self.alerts = AlertStore(self.database, lambda: self.now_ns)

    def wait(self, minutes: float) -> None:
        self.now_ns += int(minutes * MINUTE_NS)

    def add(self, *events: WatchEvent, **parts: Any) -> bool:
        usual = {"unix_ns": self.now_ns, "id": f"{parts.get('host')}-{self.now_ns}"}
        return self.watches.add_batch(batch(**{**usual, **parts}, events=events)).accepted

    def check(self) -> None:
        check_runs(self.watches, self.alerts, self.now_ns)

    def list_open(self) -> tuple[WatchAlert, ...]:
        return self.alerts.list_alerts(RUN, 100, is_open=True)

    def list_all(self) -> tuple[WatchAlert, ...]:
        return self.alerts.list_alerts(RUN, 100)


@pytest.fixture
def clocked(database_url: str) -> Iterator[Clocked]:
    made = Clocked(database_url)
    yield made
    made.database.close()


def change(step: int, unix_ns: int, after_ms: int = 120, **parts: Any) -> WatchEvent:
    usual = {
        "text": f"steps take {after_ms} ms since step {step}, 100 ms before",
        "before_ns": 100.0 * MS, "after_ns": float(after_ms * MS),
    }  # fmt: skip
    return event("change", unix_ns, step=step, **{**usual, **parts})


def over(step: int, unix_ns: int) -> WatchEvent:
    return change(step, unix_ns, 101, is_over=True, text=f"again as before step {step}")


def test_a_change_opens_one_alert_and_its_end_ends_it(clocked: Clocked) -> None:
    began_ns = clocked.now_ns - 20 * MINUTE_NS
    one = (change(2_000, began_ns),)

    assert [clocked.add(*one, id="x") for _ in range(3)] == [True, False, False]

    (alert,) = clocked.list_open()
    assert (alert.run, alert.metric, alert.step) == (RUN, "step_time", 2_000)
    assert (alert.before, alert.after, alert.since_unix_ns) == (0.1, 0.12, began_ns)
    assert alert.text == "steps take 120 ms since step 2000, 100 ms before"
    clocked.wait(30)
    clocked.add(over(2_000, began_ns))
    assert clocked.list_open() == ()
    assert [one.ended_unix_ns for one in clocked.list_all()] == [clocked.now_ns]


def test_hosts_that_find_the_same_change_raise_one_alert(clocked: Clocked) -> None:
    """Also if the first has ended it before the last reports it; another change is another one."""
    began_ns = clocked.now_ns
    for number, host in enumerate("abc"):
        clocked.wait(1)
        clocked.add(change(2_000 + 20 * number, began_ns + number * SECOND_NS), host=host)
    assert [one.step for one in clocked.list_open()] == [2_000]

    clocked.add(over(2_020, began_ns), host="b", id="b-over")
    assert len(clocked.list_open()) == 1, "the host that was first has not ended it"
    clocked.add(over(2_000, began_ns), host="a", id="a-over")
    clocked.add(change(2_060, began_ns + SECOND_NS), host="d")
    assert (clocked.list_open(), len(clocked.list_all())) == ((), 1)

    clocked.wait(60)
    clocked.add(change(9_000, clocked.now_ns), host="b")
    clocked.wait(60)
    clocked.add(change(9_900, clocked.now_ns, 124), host="c")
    assert [one.step for one in clocked.list_all()] == [9_000, 2_000], "to the same level"
    clocked.add(change(9_900, clocked.now_ns, 140, before_ns=120.0 * MS), host="d")
    assert [one.step for one in clocked.list_open()] == [9_900, 9_000]


def test_the_next_change_of_a_host_takes_the_place_of_one_that_has_lasted(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    clocked.wait(600)
    clocked.add(change(9_000, clocked.now_ns, 140))

    assert [one.step for one in clocked.list_open()] == [9_000]


def test_faster_steps_raise_no_alert_and_end_one_that_has_lasted(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    clocked.wait(600)
    clocked.add(change(9_000, clocked.now_ns, 80))

    assert [(one.step, one.ended_unix_ns) for one in clocked.list_all()] == [
        (2_000, clocked.now_ns)
    ]


@pytest.mark.parametrize("kind", ["restarted", "ended"])
def test_a_restart_and_the_end_of_the_job_end_its_changes(clocked: Clocked, kind: Any) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    clocked.wait(5)
    clocked.add(event(kind, clocked.now_ns, "so"), incarnation=int(kind == "restarted"))

    assert (len(clocked.list_open()), len(clocked.list_all())) == (0, 1)
    if kind == "restarted":
        clocked.wait(60)
        clocked.add(change(9_000, clocked.now_ns), host="late")
        assert len(clocked.list_all()) == 1, "a late batch of the first start"


def test_a_batch_of_an_earlier_version_raises_no_alert(clocked: Clocked) -> None:
    """Its sentences do not say whether they begin a change, end or explain it."""
    clocked.add(event("change", clocked.now_ns, "steps take 12 ms since step 7"))

    assert clocked.list_all() == ()


@pytest.mark.parametrize("bad", [-1.0, 1e300])
def test_levels_that_cannot_be_are_refused(store: Store, bad: float) -> None:
    sent = encode_batch(batch(events=(change(7, minutes_ago(1), after_ns=bad),)))

    answer = create_server(store).test_client().post("/api/v1/watch", data=sent)

    assert answer.status_code == 400
    assert "numbers of a batch" in (answer.json or {})["error"]


def test_a_webhook_waits_for_the_cause_but_not_for_long(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    assert clocked.alerts.claim_delivery() is None
    clocked.wait(1)
    cause = event("change", clocked.now_ns, "mostly compute; others wait for rank 3", 2_040, rank=3)
    clocked.add(cause)

    claimed = clocked.alerts.claim_delivery()

    assert claimed is not None
    assert (claimed.rank, claimed.cause) == (3, "mostly compute; others wait for rank 3")
    clocked.alerts.record_delivery(claimed)

    clocked.wait(100)
    clocked.add(change(9_000, clocked.now_ns))
    clocked.wait(3.1)
    late = clocked.alerts.claim_delivery()
    assert late is not None and (late.step, late.rank) == (9_000, None)


@pytest.mark.parametrize("minutes", [0.9, 1.1])
def test_a_change_that_is_over_within_a_minute_has_no_webhook(
    clocked: Clocked, minutes: float
) -> None:
    began_ns = clocked.now_ns
    clocked.wait(0.2)
    clocked.add(change(2_000, began_ns))
    clocked.add(event("change", clocked.now_ns, "mostly compute", 2_040), id="cause")
    assert clocked.alerts.claim_delivery() is None, "it may be over soon"

    clocked.wait(minutes - 0.2)
    clocked.add(over(2_000, began_ns), id="over")
    clocked.wait(1)

    delivered = clocked.alerts.claim_delivery()
    assert (delivered is not None) == (minutes > 1)
    assert [one.ended_unix_ns is None for one in clocked.list_all()] == [False]


def test_a_rank_that_is_late_since_then_is_named(clocked: Clocked) -> None:
    """But not one that was late hours before, nor one that is late no more."""
    began_ns = clocked.now_ns
    clocked.add(change(2_000, began_ns))
    clocked.wait(1)
    drift = event("drift", began_ns, "rank 2 is late", 2_020, rank=2, before_ns=-1e6, after_ns=9e6)
    earlier = event("drift", began_ns - 60 * MINUTE_NS, "rank 1 is late", 9, rank=1)
    over = event("drift", began_ns, "rank 3 is not late", 2_020, rank=3, is_over=True)
    clocked.add(earlier, over, drift)
    assert [(one.rank, one.cause) for one in clocked.list_open()] == [(2, "rank 2 is late")]
    assert clocked.alerts.claim_delivery() is None, "the sample may tell more"

    clocked.wait(1)
    clocked.add(event("change", clocked.now_ns, "mostly compute", 2_040, rank=3))

    assert [(one.rank, one.cause) for one in clocked.list_open()] == [
        (2, "rank 2 is late; mostly compute")
    ]
    assert clocked.alerts.claim_delivery() is not None


def test_of_many_processes_one_delivers_and_after_three_tries_none(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    clocked.wait(4)

    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: clocked.alerts.claim_delivery(), range(16)))
    (claimed,) = [one for one in claims if one is not None]
    clocked.alerts.record_failure(claimed, "the receiver answers 503", 10)
    assert clocked.alerts.claim_delivery() is None, "the pause has not passed"

    clocked.wait(0.2)
    assert clocked.alerts.claim_delivery() is not None
    clocked.wait(1)
    third = clocked.alerts.claim_delivery()
    assert third is not None, "the process of the second try has died"
    clocked.alerts.record_failure(third, "the receiver answers 503", None)
    clocked.wait(1)
    assert clocked.alerts.claim_delivery() is None
    (alert,) = clocked.list_open()
    assert (alert.tries, alert.failure, alert.due_unix_ns) == (3, "the receiver answers 503", None)


def test_a_silenced_run_has_no_webhooks_until_then(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    (first,) = clocked.list_open()
    clocked.alerts.silence(first.id, 1)
    clocked.wait(30)
    clocked.add(over(2_000, clocked.now_ns))
    clocked.wait(0.1)
    clocked.add(change(7_000, clocked.now_ns))
    clocked.wait(5)
    assert clocked.alerts.claim_delivery() is None

    clocked.wait(30)
    claimed = clocked.alerts.claim_delivery()
    assert claimed is not None and claimed.step == 7_000, "the one that has ended is not sent"
    assert clocked.alerts.claim_delivery() is None


def test_silenced_until_it_ends_ends_with_it(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    (first,) = clocked.list_open()
    clocked.alerts.silence(first.id, None)
    clocked.wait(10)
    assert clocked.alerts.claim_delivery() is None
    clocked.add(over(2_000, clocked.now_ns))
    clocked.wait(200)
    clocked.add(change(9_000, clocked.now_ns))
    clocked.wait(5)

    claimed = clocked.alerts.claim_delivery()

    assert claimed is not None and claimed.step == 9_000


def test_what_is_acknowledged_is_not_sent(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    (first,) = clocked.list_open()
    for name in ("token ann", "token bob"):
        clocked.alerts.acknowledge(first.id, name)
    clocked.wait(5)

    assert clocked.alerts.claim_delivery() is None
    assert [one.acknowledged_by for one in clocked.list_open()] == ["token ann"]

    clocked.wait(60)
    clocked.add(change(9_000, clocked.now_ns))
    clocked.wait(5)
    claimed = clocked.alerts.claim_delivery()
    assert claimed is not None
    clocked.alerts.acknowledge(claimed.id, "token ann")
    clocked.alerts.record_failure(claimed, "the receiver answers 503", 0)
    assert clocked.alerts.claim_delivery() is None, "acknowledged during the first try"


def test_an_acknowledgement_and_a_silence_are_undone(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    (first,) = clocked.list_open()
    clocked.alerts.undo_acknowledge(first.id)
    assert clocked.list_open() == (first,), "there was none"

    clocked.alerts.acknowledge(first.id, "token ann")
    clocked.wait(5)
    clocked.alerts.undo_acknowledge(first.id)
    assert [one.acknowledged_by for one in clocked.list_open()] == [None]
    claimed = clocked.alerts.claim_delivery()
    assert claimed is not None and claimed.id == first.id
    clocked.alerts.record_delivery(claimed)
    clocked.alerts.acknowledge(first.id, "token ann")
    clocked.alerts.undo_acknowledge(first.id)
    assert clocked.alerts.claim_delivery() is None, "it was sent before"

    clocked.alerts.silence(first.id, None)
    clocked.wait(60)
    clocked.add(change(9_000, clocked.now_ns, 150))
    clocked.wait(5)
    assert clocked.alerts.claim_delivery() is not None, "the first has ended, and its silence"
    (second,) = clocked.list_open()
    clocked.alerts.silence(second.id, 24)
    assert second.id and clocked.list_open()[0].is_silenced(clocked.now_ns)
    clocked.alerts.end_silence(second.id)
    assert not clocked.list_open()[0].is_silenced(clocked.now_ns)


def test_an_undone_acknowledgement_of_a_brief_change_sends_nothing(clocked: Clocked) -> None:
    began_ns = clocked.now_ns
    clocked.add(change(2_000, began_ns, rank=3))
    (alert,) = clocked.list_open()
    clocked.alerts.acknowledge(alert.id, "token ann")
    clocked.wait(0.2)
    clocked.alerts.undo_acknowledge(alert.id)
    assert clocked.alerts.claim_delivery() is None, "it has not lasted"
    clocked.wait(0.2)
    clocked.add(over(2_000, clocked.now_ns))
    clocked.wait(5)
    assert clocked.alerts.claim_delivery() is None and not clocked.list_open()

    clocked.add(change(3_000, clocked.now_ns, rank=3))
    (lasting,) = clocked.list_open()
    clocked.alerts.acknowledge(lasting.id, "token ann")
    clocked.wait(0.5)
    clocked.alerts.undo_acknowledge(lasting.id)
    clocked.wait(0.6)
    claimed = clocked.alerts.claim_delivery()
    assert claimed is not None and claimed.id == lasting.id


def test_what_was_due_while_no_server_ran_is_not_sent_hours_later(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    clocked.wait(90)

    assert clocked.alerts.claim_delivery() is None


def _windows(clocked: Clocked, rank: int = 0, step_ms: int = 100) -> tuple[Any, ...]:
    return (window(rank, clocked.now_ns, step_ms * MS),)


def test_a_silent_host_raises_one_alert_and_ends_it_when_it_is_back(clocked: Clocked) -> None:
    """With 200 steps of 100 ms, three intervals are a minute: 15 minutes count."""
    for host in "ab":
        clocked.add(windows=_windows(clocked), host=host)
    for minutes in (10, 4):
        clocked.wait(minutes)
        clocked.add(windows=_windows(clocked), host="a")
        clocked.check()
    assert clocked.list_open() == ()

    clocked.wait(2)
    for _ in range(3):
        clocked.check()
    (alert,) = clocked.list_open()
    assert (alert.metric, alert.text) == (
        "silent",
        "no data of 1 of 2 hosts (b) for at least 16 min",
    )
    assert (alert.since_unix_ns, alert.after) == (NOON_NS, 960.0)

    for host in "ab":
        clocked.add(windows=_windows(clocked), host=host)
    clocked.check()
    assert (len(clocked.list_open()), len(clocked.list_all())) == (0, 1)


def test_an_open_alert_names_the_hosts_that_are_silent_now(clocked: Clocked) -> None:
    """One alert until all hosts send again, as docs/alerts.md has it."""
    for host in "ab":
        clocked.add(windows=_windows(clocked), host=host)
    clocked.wait(15.5)
    clocked.add(windows=_windows(clocked), host="a")
    clocked.check()
    (first,) = clocked.list_open()
    assert first.text == "no data of 1 of 2 hosts (b) for at least 15 min"

    a_sent_ns = clocked.now_ns
    clocked.wait(60)
    clocked.check()
    (both,) = clocked.list_open()
    assert (both.id, both.since_unix_ns) == (first.id, NOON_NS)
    assert both.text == "no data of all 2 hosts for at least 60 min", "a is silent for 60"

    clocked.wait(5)
    clocked.check()
    assert clocked.list_open() == (both,), "it is still true"

    clocked.add(windows=_windows(clocked), host="b")
    clocked.check()
    (last,) = clocked.list_open()
    assert (last.id, last.since_unix_ns) == (first.id, a_sent_ns)
    assert (last.text, last.after) == ("no data of 1 of 2 hosts (a) for at least 65 min", 3_900.0)

    clocked.add(windows=_windows(clocked), host="a")
    clocked.check()
    assert (clocked.list_open(), len(clocked.list_all())) == ((), 1)


def test_samples_far_apart_give_a_run_more_time(clocked: Clocked) -> None:
    """With 1,200 steps of a second, three intervals are an hour."""
    clocked.add(windows=_windows(clocked, step_ms=1_000), interval_steps=1_200)
    clocked.wait(59)
    clocked.check()
    assert clocked.list_open() == ()
    clocked.wait(2)
    clocked.check()
    assert [one.text for one in clocked.list_open()] == ["no data of host a for at least 61 min"]


@pytest.mark.parametrize("case", ["ended", "long ago"])
def test_a_run_that_has_ended_or_is_forgotten_is_not_silent(clocked: Clocked, case: str) -> None:
    events = (event("ended", clocked.now_ns, "after 9 steps"),) if case == "ended" else ()
    clocked.add(*events, windows=_windows(clocked))
    clocked.wait(60 if case == "ended" else 60 * 30)
    clocked.check()

    assert clocked.list_all() == ()


def test_an_overhead_that_lasts_for_an_hour_raises_an_alert(clocked: Clocked) -> None:
    def go_on(minutes: int, overhead: float) -> int:
        for _ in range(minutes // 5):
            clocked.wait(5)
            clocked.add(windows=_windows(clocked), overhead=overhead)
            clocked.check()
        return len(clocked.list_open())

    assert go_on(30, 0.009) == 0
    assert go_on(60, 0.007) == 0, "below one and a half times the budget; the hour begins anew"
    assert go_on(60, 0.009) == 0
    assert go_on(10, 0.009) == 1
    (alert,) = clocked.list_open()
    assert alert.text == "samples cost 0.90 % of the training time, budget 0.50 %"
    assert (alert.before, alert.after) == (0.005, 0.009)
    assert go_on(5, 0.004) == 0


def test_dropped_data_raises_an_alert_but_old_samples_make_room(clocked: Clocked) -> None:
    clocked.add(dropped={"sample": 3})
    clocked.add(dropped={"batch": 3}, unix_ns=clocked.now_ns - 70 * MINUTE_NS, id="late")
    assert clocked.list_open() == ()
    for _ in range(3):
        clocked.wait(10)
        clocked.add(dropped={"batch": 2, "line": 1})
        clocked.check()

    (alert,) = clocked.list_open()
    assert (alert.metric, alert.after) == ("dropped", 3.0)
    assert alert.text == "host a has dropped data (batch 2, line 1)"
    clocked.wait(61)
    clocked.check()
    assert "dropped" not in [one.metric for one in clocked.list_open()]


def test_alerts_go_with_their_run(clocked: Clocked) -> None:
    clocked.add(change(2_000, clocked.now_ns))
    clocked.wait(4)
    clocked.watches.delete(RUN)

    assert clocked.list_all() == ()
    assert clocked.alerts.claim_delivery() is None
    assert clocked.alerts.list_unended() == frozenset()


def test_what_the_process_beside_the_job_finds_is_an_alert(store: Store, tmp_path: Path) -> None:
    """From the notes of a rank that slows down, and is then as fast as before."""
    reducer, begin_ns = Reducer(WatchFolder(tmp_path, RUN, "a")), minutes_ago(30)
    notes = NoteFile(tmp_path, 0)
    notes.write([RankStarted(0, 1, "a", 1, 0, 0.005, begin_ns)])

    def train(first: int, number: int, step_ns: int) -> tuple[WatchAlert, ...]:
        for step in range(first, first + 20 * number, 20):
            at_ns = begin_ns + step * 10 * MS
            notes.write([RankWindow(0, step, step + 19, at_ns, at_ns + 20 * step_ns, 20,
                                    step_ns, step_ns, step_ns)])  # fmt: skip
        found = reducer.collect()
        assert found is not None
        _send(create_server(store).test_client(), found)
        return store.alerts.list_alerts(RUN, 9, is_open=True)

    assert train(0, 60, 10 * MS) == ()
    (alert,) = train(1_200, 5, 15 * MS)
    assert (alert.step, alert.before, alert.after) == (1_200, 0.01, 0.015)
    assert alert.text == "steps take 15.0 ms since step 1200, 10.0 ms before (+50.0 %)"
    assert train(1_300, 5, 10 * MS) == ()


def test_the_list_of_runs_counts_their_open_alerts(store: Store) -> None:
    _open_alert(store)
    store.watches.add_batch(batch(id="calm", run="calm", windows=(window(0, minutes_ago(5)),)))
    assert store.alerts.count_open() == {RUN: 1}

    runs = store.watches.list_watches()
    page = to_json_plotly(build_watch_list(runs, time.time_ns(), {RUN: 1}))

    assert page.count("pill failed") == 1
    store.watches.add_batch(batch(id="back", events=(over(2_000, minutes_ago(3)),)))
    assert store.alerts.count_open() == {}


# The API.


def _open_alert(store: Store) -> int:
    at_ns = minutes_ago(5)
    store.watches.add_batch(batch(events=(change(2_000, at_ns),), windows=(window(0, at_ns),)))
    return store.alerts.list_alerts(RUN, 1)[0].id


def _send(client: FlaskClient, one: WatchBatch) -> None:
    assert client.post("/api/v1/watch", data=encode_batch(one)).status_code == 200


def test_the_api_lists_acknowledges_and_silences_alerts(store: Store) -> None:
    client = create_server(store, Access(local=False, guarded=True)).test_client()
    secret = store.tokens.create("ann", Role.UPLOADER).secret
    headers = HOST | {"Authorization": f"Bearer {secret}"}
    number = _open_alert(store)
    path = f"/api/v1/watch/{RUN}/alerts"

    bodies: list[dict[str, Any]] = [
        {"action": "acknowledge"}, {"action": "unacknowledge"}, {"action": "acknowledge"},
        {"action": "silence", "hours": 24}, {"action": "unsilence"}, {"action": "silence"},
    ]  # fmt: skip
    statuses = [
        client.post(f"{path}/{number}", json=body, headers=headers).status_code for body in bodies
    ]

    assert statuses == [204] * 6
    (row,) = (client.get(path, headers=headers).json or {})["alerts"]
    wanted = {
        "id": number, "metric": "step_time", "step": 2_000, "before": 0.1, "after": 0.12,
        "rank": None, "acknowledged_by": "token ann", "silenced_until": "its end", "ended": None,
        "delivered": None, "failure": "", "tries": 0,
    }  # fmt: skip
    assert {name: row[name] for name in wanted} == wanted
    entries = [(one.action, one.user_name, one.target) for one in store.audit.list_entries(6)]
    assert entries == [
        (action, "token ann", f"{RUN}, alert {number}{length}")
        for action, length in (
            ("alert silenced", ", until it ends"), ("silence ended", ""),
            ("alert silenced", ", for 24 h"), ("alert acknowledged", ""),
            ("acknowledgement undone", ""), ("alert acknowledged", ""),
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        None, [], {}, {"action": "delete"}, {"action": "silence", "hours": 0},
        {"action": "silence", "hours": True}, {"action": "silence", "hours": 1e9},
        {"action": "acknowledge", "hours": 1}, {"action": "unsilence", "hours": 1},
        {"action": "silence", "url": "http://x"},
    ],
)  # fmt: skip
def test_other_requests_are_refused_with_the_right_one(store: Store, body: Any) -> None:
    answer = create_server(store).test_client().post(
        f"/api/v1/watch/{RUN}/alerts/{_open_alert(store)}", json=body
    )  # fmt: skip

    assert answer.status_code == 400
    assert '{"action": "acknowledge"}' in (answer.json or {})["error"]


def test_alerts_that_do_not_exist_or_have_ended(store: Store) -> None:
    client, number = create_server(store).test_client(), _open_alert(store)
    silence, path = {"action": "silence"}, f"/api/v1/watch/{RUN}/alerts"

    missing = (f"{path}/{number + 1}", f"/api/v1/watch/none/alerts/{number}", f"{path}/{1 << 63}")
    assert [client.post(one, json=silence).status_code for one in missing] == [404, 404, 404]
    assert client.get("/api/v1/watch/none/alerts").status_code == 404
    _send(client, batch(id="over", events=(over(2_000, minutes_ago(1)),)))
    assert client.post(f"{path}/{number}", json=silence).status_code == 409


def test_another_site_cannot_silence(store: Store) -> None:
    client, path = create_server(store).test_client(), f"/api/v1/watch/{RUN}/alerts"
    own = {"json": {"action": "silence"}, "headers": {"Origin": "http://evil.example"}}

    assert client.post(f"{path}/{_open_alert(store)}", **own).status_code == 403
    assert store.alerts.list_alerts(RUN, 1)[0].silenced_until_unix_ns is None
