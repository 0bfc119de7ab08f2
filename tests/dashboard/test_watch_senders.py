"""A watched run takes batches of who began it only, and its starts follow each other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.store_builders import Serving
from support.watch_builders import MS, RUN, SECOND_NS, batch, event, minutes_ago, window

from stepsplit.analyzer.watch.records import WatchBatch, encode_batch
from stepsplit.analyzer.watch.reducer import ReducerState, WatchFolder
from stepsplit.dashboard.store.ids import fold_name
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.store.watch import WatchedRun
from stepsplit.dashboard.watch_sender import send_rest
from stepsplit.dashboard.web.options import PROXY_SECRET, Access, TrustedProxy, choose_access
from stepsplit.dashboard.web.server import create_server

WATCH = "/api/v1/watch"
HOST = {"Host": "traces.example"}
PASSWORDS = choose_access("traces.example", password="adm", uploader_password="upl")

Headers = dict[str, str]


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_server(store, PASSWORDS).test_client()


def _token(store: Store, role: Role = Role.UPLOADER) -> Headers:
    return HOST | {"Authorization": f"Bearer {store.tokens.create(role.label, role).secret}"}


def _send(client: FlaskClient, headers: Headers, **parts: Any) -> tuple[int, str]:
    """The status and the reason of a batch, which is another one than those before."""
    one = batch(**{"id": f"b{time.time_ns()}"} | parts)
    answer = client.post(
        WATCH, data=encode_batch(one), content_type="application/json", headers=headers
    )
    return answer.status_code, (answer.json or {}).get("error", "")


def _found(store: Store, name: str = RUN) -> WatchedRun:
    found = store.watches.find_watch(name)
    assert found is not None
    return found


def _list_refused(store: Store) -> list[tuple[str, str]]:
    return [(one.action, one.target) for one in store.audit.list_entries(99) if one.outcome != "ok"]


def test_only_who_began_a_run_and_admins_add_to_it(client: FlaskClient, store: Store) -> None:
    mine, other, admin = _token(store), _token(store), _token(store, Role.ADMIN)
    by_password = {"auth": ("x", "upl")}
    assert _send(client, mine)[0] == 200
    before = _found(store)

    forged = _send(client, other, incarnation=1, events=(event("ended", minutes_ago(1), "x"),))
    answer = client.post(
        WATCH, data=encode_batch(batch(id="p")), content_type="application/json", headers=HOST,
        **by_password,
    )  # fmt: skip

    assert forged == (
        403,
        f"the watched run '{RUN}' is of another sender; choose another --name, or have an admin"
        " hand it over",
    )
    assert answer.status_code == 403
    assert _found(store) == before
    assert _list_refused(store) == [("watch refused", RUN)] * 2
    assert [_send(client, one)[0] for one in (admin, mine)] == [200, 200]


def test_all_of_a_role_who_share_a_password_are_one_sender(
    client: FlaskClient, store: Store
) -> None:
    for name in ("a", "b"):
        answer = client.post(
            WATCH, data=encode_batch(batch(id=name)), content_type="application/json",
            headers=HOST, auth=(name, "upl"),
        )  # fmt: skip
        assert answer.status_code == 200
    assert _found(store).sender == "password of uploaders"


def test_without_logins_all_are_one_sender_and_a_login_takes_the_run_over(store: Store) -> None:
    open_client = create_server(store).test_client()
    assert [_send(open_client, {})[0] for _ in range(2)] == [200, 200]
    assert _found(store).sender is None

    guarded, mine, other = create_server(store, PASSWORDS).test_client(), *map(_token, [store] * 2)
    assert [_send(guarded, one)[0] for one in (mine, other)] == [200, 403]
    assert _send(open_client, {})[0] == 200


@pytest.mark.parametrize("number", [2, 3, 1 << 19, (1 << 20) - 1, 1 << 20, (1 << 31) - 1, 1 << 60])
def test_a_start_that_does_not_follow_the_newest_one_is_refused(
    client: FlaskClient, store: Store, number: int
) -> None:
    mine = _token(store)
    assert _send(client, mine)[0] == 200
    before = _found(store)

    ended = (event("ended", minutes_ago(1), "x"),)
    answers = [_send(client, mine, incarnation=number, events=one)[0] for one in ((), ended)]

    assert set(answers) == {400 if number >= 1 << 20 else 409}
    assert _found(store) == before
    assert [_send(client, mine, incarnation=one)[0] for one in (1, 2, 0)] == [200, 200, 200]
    assert _found(store).start.incarnation == 2


def test_a_start_ends_only_after_it_has_begun(client: FlaskClient, store: Store) -> None:
    mine, at = _token(store), minutes_ago(1)
    assert _send(client, mine)[0] == 200

    assert _send(client, mine, incarnation=1, events=(event("ended", at, "x"),)) == (
        400, f"start 1 of the run '{RUN}' cannot end: it has not begun",
    )  # fmt: skip

    short = (event("restarted", at, "x"), event("ended", at, "x"))
    assert _send(client, mine, incarnation=1, events=short)[0] == 200
    assert _found(store).start.ended_unix_ns == at


def test_a_job_whose_steps_go_on_has_not_ended(client: FlaskClient, store: Store) -> None:
    mine = _token(store)
    ended = (event("ended", minutes_ago(30), "forged"),)
    _send(client, mine, unix_ns=minutes_ago(30), events=ended)
    assert _found(store).start.ended_unix_ns is not None

    _send(client, mine, windows=(window(0, minutes_ago(26)),))
    assert _found(store).start.ended_unix_ns is not None
    _send(client, mine, windows=(window(0, minutes_ago(20)),))
    assert _found(store).start.ended_unix_ns is None

    _send(client, mine, events=(event("ended", time.time_ns() + 3_000 * SECOND_NS, "early"),))
    assert (_found(store).start.ended_unix_ns or 0) <= time.time_ns()


def test_an_admin_takes_back_what_a_sender_has_done(client: FlaskClient, store: Store) -> None:
    mine, thief, admin = _token(store), _token(store), _token(store, Role.ADMIN)
    at = minutes_ago(2)
    _send(client, thief, events=(event("started", at, "x"), event("ended", at, "x")))
    assert _send(client, mine)[0] == 403

    owner = {"sender": f"token {store.tokens.list_tokens()[0].id}"}
    paths = [f"{WATCH}/{RUN}", f"{WATCH}/{RUN}/starts/0", f"{WATCH}/{RUN}/starts/1"]
    for body in (owner, {"ended": None}, None):
        assert client.patch(paths[0], json=body, headers=thief).status_code == 403
    assert client.patch(paths[0], json=owner, headers=admin).status_code == 204
    assert [_send(client, one)[0] for one in (thief, mine)] == [403, 200]
    assert client.patch(paths[1], json={"ended": None}, headers=admin).status_code == 204
    assert _found(store).start.ended_unix_ns is None

    _send(client, mine, unix_ns=time.time_ns() + 1_000 * SECOND_NS, incarnation=1,
          windows=(window(0, minutes_ago(1), 2 * MS, 10**9),))  # fmt: skip
    assert client.delete(paths[2], headers=thief).status_code == 403
    assert client.delete(paths[2], headers=admin).status_code == 204
    _send(client, mine, windows=(window(0, minutes_ago(0)),))
    found = _found(store)
    assert ([one.incarnation for one in found.starts], found.last_step) == ([0], 20)
    assert [one.incarnation for one in found.current_hosts] == [0]
    assert found.newest_unix_ns <= time.time_ns()

    assert [client.delete(path, headers=admin).status_code for path in paths[1:]] == [409, 404]
    done = [one.action for one in store.audit.list_entries(99) if one.outcome == "ok"]
    assert {"watch handed over", "start reopened", "start forgotten"} <= set(done)
    assert client.patch(paths[0], json={"sender": None}, headers=admin).status_code == 204
    assert [_send(client, one)[0] for one in (thief, mine)] == [200, 403]


@pytest.mark.parametrize("body", [None, {}, {"sender": 1}, {"sender": ""}, {"sender": "a\nb"}, []])
def test_a_sender_of_another_form_is_refused(store: Store, body: object) -> None:
    client = create_server(store).test_client()
    _send(client, {})

    answer = client.patch(f"{WATCH}/{RUN}", json=body)

    assert answer.status_code == 400 and "send JSON such as" in answer.text


@pytest.mark.parametrize(
    "name", ["Night", "NIGHT", "n\u0456ght", "nigh\u0442", "n1ght", "nig\u0301ht", "\uff4eight"]
)
def test_a_name_that_looks_like_that_of_another_senders_run_is_refused(
    client: FlaskClient, store: Store, name: str
) -> None:
    mine, other = _token(store), _token(store)
    assert _send(client, mine)[0] == 200

    assert _send(client, other, run=name)[0] == 403
    assert [_send(client, mine, run=name)[0], _send(client, other, run="day")[0]] == [200, 200]
    assert fold_name(name) == fold_name(RUN)


def test_alerts_are_silenced_by_who_began_the_run_also_after_a_login(
    client: FlaskClient, store: Store
) -> None:
    secret = store.tokens.create("mine").secret
    mine, other = HOST | {"Authorization": f"Bearer {secret}"}, _token(store)
    slow = event("change", minutes_ago(5), "slow", before_ns=1e9, after_ns=2e9, rank=0)
    _send(client, mine, events=(slow,))
    (alert,) = store.alerts.list_alerts(RUN, 9)
    path, silence = f"{WATCH}/{RUN}/alerts/{alert.id}", {"action": "silence"}

    assert client.post(path, json=silence, headers=other).status_code == 403
    assert store.alerts.list_alerts(RUN, 9) == (alert,)
    assert ("watch refused", f"{RUN}, alert {alert.id}") in _list_refused(store)
    client.post("/login", data={"password": secret}, headers=HOST)
    assert client.post(path, json=silence, headers=HOST).status_code == 204


def test_a_proxys_user_is_a_sender(store: Store) -> None:
    from ipaddress import ip_network

    networks = (ip_network("127.0.0.0/8"),)
    proxy = TrustedProxy("X-User", networks, "secret of the proxy", Role.UPLOADER)
    client = create_server(store, Access(local=False, guarded=True, proxy=proxy)).test_client()
    ann, bob = (
        HOST | {"X-User": name, PROXY_SECRET: "secret of the proxy"} for name in ("ann", "bob")
    )

    assert [_send(client, one)[0] for one in (ann, bob, ann)] == [200, 403, 200]


def test_counters_and_sums_of_huge_numbers_are_stored(client: FlaskClient, store: Store) -> None:
    mine, huge = _token(store), (1 << 53) - 1
    for _ in range(3):
        assert _send(client, mine, dropped={"sample": huge})[0] == 200
    assert dict(_found(store).dropped) == {"sample": 1 << 53}


def _write_outbox(folder: Path, *batches: WatchBatch) -> None:
    """What a watch has left unsent."""
    place = WatchFolder(folder, "", "a")
    place.batches.parent.mkdir(parents=True)
    place.batches.write_bytes(b"".join(encode_batch(one) + b"\n" for one in batches))
    state = ReducerState(batches=len(batches))
    place.state.write_text(json.dumps({"token": state.token, "batches": len(batches)}))


def test_a_dashboard_from_a_backup_hears_of_the_starts_that_it_does_not_know(
    store: Store, tmp_path: Path
) -> None:
    """And a batch for the run of another sender waits until it is handed over."""
    access = Access(local=False, guarded=True)
    first, second = (store.tokens.create(name).secret for name in ("first", "second"))
    folder = tmp_path / "watch"
    with Serving(create_server(store, access)) as url:
        client = create_server(store, access).test_client()
        mine = HOST | {"Authorization": f"Bearer {first}"}
        assert _send(client, mine, incarnation=3)[0] == 200
        _write_outbox(
            folder, batch(id="later", incarnation=7, windows=(window(0, minutes_ago(1)),))
        )

        with pytest.raises(Exception, match="0 batches sent, 1 not yet"):
            send_rest(folder, url, second)
        assert send_rest(folder, url, first) == 1

    starts = _found(store).starts
    assert [one.incarnation for one in starts] == [3, 4, 5, 6, 7]
    assert _found(store).last_step == 20
