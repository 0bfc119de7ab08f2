"""The audit log: what it holds, who reads it, and how large it may be."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.report_builders import report_and_tables
from support.store_builders import uploaded

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard import cli
from stepsplit.dashboard.store import audit
from stepsplit.dashboard.store.audit import (
    KEPT_S,
    PERIOD_S,
    AuditEntry,
    AuditLog,
    audit_to_json,
    parse_since,
)
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import FREE_FAILURES, list_guessed
from stepsplit.dashboard.web.options import choose_access
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

HOST = {"Host": "traces.example"}
RUNS = "/api/v1/runs"


@pytest.fixture
def client(store: Store) -> FlaskClient:
    access = choose_access("0.0.0.0", password="right", viewer_password="look")
    return create_server(store, access, Limits(spare_bytes=0)).test_client()


def test_logins_uploads_and_deletions_are_in_the_log(client: FlaskClient, store: Store) -> None:
    ci = HOST | {"Authorization": f"Bearer {store.tokens.create('ci').secret}"}
    run_id, done = uploaded(store, "new"), store.import_report("old", *report_and_tables())
    client.post("/login", data={"password": "wrong"}, headers=HOST)
    client.post(f"{RUNS}/{run_id}/finish", headers=ci)
    client.post(f"{RUNS}/{run_id}/finish", headers=ci)
    client.delete(f"{RUNS}/{done}", headers=ci)
    client.post("/login", data={"password": "right"}, headers=HOST)
    client.delete(f"{RUNS}/{done}", headers=HOST)
    client.post("/logout", headers=HOST)

    entries = store.audit.list_entries(100)[::-1]

    shown = [(one.action, one.user_name, one.role, one.target, one.outcome) for one in entries]
    session = next(one.user_name for one in entries if one.user_name.startswith("session "))
    needs = "this needs the role admin; yours is uploader"
    assert shown == [
        ("login", "unknown", "", "", "wrong password or token"),
        ("upload", "token ci", "uploader", f"{run_id} new", "ok"),
        ("refused", "token ci", "uploader", f"DELETE {RUNS}/{done}", needs),
        ("login", session, "admin", "", "ok"),
        ("run deleted", session, "admin", f"{done} old", "ok"),
        ("logout", session, "admin", "", "ok"),
    ]
    assert {one.address for one in entries} == {"127.0.0.1"}


def test_the_log_is_read_by_admins_alone(client: FlaskClient, store: Store) -> None:
    viewer, admin = HOST | _basic("look"), HOST | _basic("right")
    client.post("/login", data={"password": "look"}, headers=HOST)
    client.post("/logout", headers=HOST)

    denied = client.get("/api/v1/audit", headers=viewer)
    read = client.get("/api/v1/audit?last=2", headers=admin)

    assert (denied.status_code, read.status_code) == (403, 200)
    assert read.json is not None and read.json["schema"] == "stepsplit.audit/1"
    assert [one["action"] for one in read.json["entries"]] == ["refused", "logout"]
    assert list(read.json["entries"][0]) == [
        "at", "user_name", "role", "address", "action", "target", "outcome", "count",
    ]  # fmt: skip
    later = client.get("/api/v1/audit?since=2999-01-01", headers=admin)
    assert later.json == {"schema": "stepsplit.audit/1", "entries": []}
    for query in ("last=x", "last=-1", "since=yesterday", "since="):
        assert client.get(f"/api/v1/audit?{query}", headers=admin).status_code == 400


def test_a_waiting_guess_adds_nothing_to_the_log(client: FlaskClient, store: Store) -> None:
    for _ in range(FREE_FAILURES + 8):
        store.login_failures.record(list_guessed("127.0.0.1"))

    codes = {
        client.post("/login", data={"password": f"guess {number}"}, headers=HOST).status_code
        for number in range(20)
    }

    assert (codes, store.audit.list_entries(100)) == ({429}, ())


def test_commands_are_in_the_log_and_print_it(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOGNAME", "ada")
    words = ["--store", store.url]
    run_id = uploaded(store, "old")
    cli.run(["token", "create", "ci", "--role", "viewer", *words])
    token_id = store.tokens.list_tokens()[0].id
    cli.run(["token", "revoke", token_id, *words])
    cli.run(["delete", run_id, *words, "--artifacts", str(tmp_path / "artifacts")])
    capsys.readouterr()

    assert cli.run(["audit", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        "token created", "token revoked", "run deleted",
    ]  # fmt: skip
    assert all("command line, ada (admin)" in line for line in lines)
    ends = [f"{token_id} ci (viewer)", token_id, f"{run_id} old"]
    assert [line.split("  ")[-1] for line in lines] == ends
    assert cli.run(["audit", "--last", "1", "--since", "2020-01-01", "--json", "-", *words]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["entries"]
    assert entry["action"] == "run deleted"
    assert cli.run(["audit", "--since", "yesterday", *words]) == 2
    assert "2026-11-30" in capsys.readouterr().err


def test_names_in_the_log_are_one_printable_line(store: Store) -> None:
    store.audit.record("login", "a\x1b[2Jb\nc\u202ed\ud800", user_name="x" * 500)

    (entry,) = store.audit.list_entries(1)
    assert entry.target == r"a\x1b[2Jb c\u202ed\ud800"
    assert len(entry.user_name) == 200


def test_entries_are_also_in_the_servers_log(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stepsplit.audit"):
        store.audit.record("login", user_name="session 1")

    (record,) = caplog.records
    assert record.fields["user_name"] == "session 1"  # type: ignore[attr-defined]


@pytest.fixture
def clock() -> list[int]:
    """The time in ns, as the only entry."""
    return [10**18]


@pytest.fixture
def log(database_url: str, clock: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[AuditLog]:
    """In each kind of database; trimmed at every entry."""
    monkeypatch.setattr(audit, "TRIM_EVERY", 1)
    database = open_database(database_url)
    yield AuditLog(database, lambda: clock[0])
    database.close()


def test_what_is_repeated_pushes_out_nothing_else(
    log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_OF_ACTION", 2)
    for number in range(4):
        log.record("run deleted", str(number), user_name="boss")
    for number in range(9):
        log.record("login", str(number), user_name="unknown", outcome="wrong password or token")
        log.record("login", str(number), user_name=f"session {number}")

    entries = log.list_entries(100)
    shown = [(one.action, one.target, one.outcome == "ok") for one in entries]
    assert shown == [
        ("login", "8", True), ("login", "8", False), ("login", "7", True), ("login", "7", False),
        ("run deleted", "3", True), ("run deleted", "2", True),
    ]  # fmt: skip


def test_what_is_refused_again_is_counted_for_an_hour(log: AuditLog, clock: list[int]) -> None:
    for _ in range(40):
        log.record("login", user_name="unknown", address="6.6.6.6", outcome="wrong password")
    log.record("login", user_name="unknown", address="6.6.6.7", outcome="wrong password")
    log.record("login", user_name="session 1", address="6.6.6.6")
    clock[0] += PERIOD_S * 10**9
    log.record("login", user_name="unknown", address="6.6.6.6", outcome="wrong password")

    entries = log.list_entries(100)

    shown = [(one.address, one.outcome, one.count) for one in entries]
    assert shown == [
        ("6.6.6.6", "wrong password", 1), ("6.6.6.6", "ok", 1),
        ("6.6.6.7", "wrong password", 1), ("6.6.6.6", "wrong password", 40),
    ]  # fmt: skip
    assert json.loads(audit_to_json(entries))["entries"][-1]["count"] == 40


def test_old_entries_are_deleted(log: AuditLog, clock: list[int]) -> None:
    begin_ns = clock[0]
    log.record("upload", "old", user_name="ci")
    clock[0] += KEPT_S * 10**9
    log.record("upload", "kept", user_name="ci", role="uploader", address="10.0.0.7")
    clock[0] += 1

    log.record("upload", "new", user_name="ci")

    kept = AuditEntry(begin_ns + KEPT_S * 10**9, "ci", "uploader", "10.0.0.7", "upload", "kept",
                      "ok")  # fmt: skip
    assert log.list_entries(100)[1:] == (kept,)
    assert [one.target for one in log.list_entries(100, clock[0])] == ["new"]


def test_a_date_is_in_utc_unless_it_says_otherwise() -> None:
    assert parse_since("1970-01-02") == 86_400 * 10**9
    assert parse_since("1970-01-02T02:00+02:00") == 86_400 * 10**9
    assert parse_since("0001-01-01") == 0
    assert parse_since("9999-12-31") == (1 << 63) - 1
    with pytest.raises(UsageError, match="2026-11-30"):
        parse_since("last week")


def test_uploaders_tokens_are_the_default(store: Store) -> None:
    token = store.tokens.verify(store.tokens.create("ci").secret)

    assert token is not None and token.role is Role.UPLOADER


def _basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}
