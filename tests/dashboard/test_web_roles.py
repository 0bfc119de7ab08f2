"""Roles: what viewers, uploaders and admins may do, by password, token and proxy."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import create_engine, text
from support.report_builders import report_and_tables
from support.store_builders import claimed, known_analysis, queued, uploaded
from support.watch_builders import batch, event, minutes_ago

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.watch.records import encode_batch
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.ingest import process_job
from stepsplit.dashboard.store.logins import ROLES, Role, Tokens
from stepsplit.dashboard.store.schema import METADATA
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import find_needed_role
from stepsplit.dashboard.web.options import Access, choose_access, parse_trusted_proxy
from stepsplit.dashboard.web.server import create_server
from stepsplit.dashboard.web.uploads import Limits

HOST = {"Host": "traces.example"}
RUNS = "/api/v1/runs"
JOB = b'[hardware]\npreset = "h100-sxm"\n'
GUARDED = Access(local=False, guarded=True)
PASSWORDS = {"password": "adm", "uploader_password": "upl", "viewer_password": "vie"}
SECRET = "0123456789abcdef"
FROM_PROXY = {"X-Stepsplit-Proxy-Secret": SECRET}
PROPERTIES = [("page", "children"), ("zone", "hidden"), ("tick", "disabled"), ("mark", "data")]


def _client(store: Store, access: Access = GUARDED) -> FlaskClient:
    return create_server(store, access, Limits(spare_bytes=0)).test_client()


def _token(store: Store, role: Role) -> dict[str, str]:
    return HOST | {"Authorization": f"Bearer {store.tokens.create(role.label, role).secret}"}


NEEDED = {
    ("create", "POST"): Role.UPLOADER,
    ("check", "POST"): Role.UPLOADER,
    ("put", "PUT"): Role.UPLOADER,
    ("patch", "PATCH"): Role.UPLOADER,
    ("remove", "DELETE"): Role.UPLOADER,
    ("finish", "POST"): Role.UPLOADER,
    ("edit", "PATCH"): Role.UPLOADER,
    ("analyze", "POST"): Role.UPLOADER,
    ("attach_job", "PUT"): Role.UPLOADER,
    ("read_job_form", "POST"): Role.UPLOADER,
    ("add_watch_batch", "POST"): Role.UPLOADER,
    ("act_on_alert", "POST"): Role.UPLOADER,
    ("delete_watch", "DELETE"): Role.ADMIN,
    ("hand_over_watch", "PATCH"): Role.ADMIN,
    ("reopen_start", "PATCH"): Role.ADMIN,
    ("forget_start", "DELETE"): Role.ADMIN,
    ("delete_run", "DELETE"): Role.ADMIN,
    ("end_sessions", "DELETE"): Role.ADMIN,
    ("create_token", "POST"): Role.ADMIN,
    ("revoke_token", "DELETE"): Role.ADMIN,
    ("list_tokens", "GET"): Role.ADMIN,
    ("list_tokens", "HEAD"): Role.ADMIN,
    ("list_tokens", "OPTIONS"): Role.ADMIN,
    ("list_audit", "GET"): Role.ADMIN,
    ("list_audit", "HEAD"): Role.ADMIN,
    ("list_audit", "OPTIONS"): Role.ADMIN,
}
"""What a viewer may not do in the API."""

DROP_WATCHES = [
    f"DROP TABLE {table.name}"
    for table in reversed(METADATA.sorted_tables)
    if table.name.startswith("watch")
]

ELSEWHERE = {("login.enter", "POST"), ("login.leave", "POST")}
"""Before the login. No other write outside of the API is for a viewer, except for callbacks."""


def test_every_route_that_writes_needs_its_role(store: Store) -> None:
    server = create_server(store)

    needed = {
        (endpoint, method): find_needed_role(endpoint, method)
        for endpoint, method in _list_routes(server)
        if endpoint != "api.unknown" and (endpoint, method) not in ELSEWHERE
    }

    above = {route: role for route, role in needed.items() if role > Role.VIEWER}
    assert above == {(f"api.{name}", method): role for (name, method), role in NEEDED.items()}
    writes = {route for route in needed if route[1] not in ("GET", "HEAD", "OPTIONS")}
    assert writes - set(above) == {("/_dash-update-component", "POST"), ("agents.answer", "POST")}
    assert find_needed_role("a route of tomorrow", "POST") is Role.ADMIN


def test_the_callbacks_only_read(store: Store) -> None:
    """A new callback may be sent by a viewer: it must not write either."""
    client = create_server(store).test_client()

    outputs = [one["output"] for one in client.get("/_dash-dependencies").json or []]

    assert [sorted(set(re.findall(r"(\w+)\.\w+", one))) for one in outputs] == [
        ["mark", "page", "tick", "zone"], ["live", "mark"],
        # The range of time of two pages, by the browser alone, and the run of a click.
        *[["url"]] * 4,
    ]  # fmt: skip


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.label)
def test_each_role_does_what_it_may(store: Store, role: Role) -> None:
    client, headers = _client(store), _token(store, role)
    ended, again = queued(store), queued(store)
    for _ in range(2):
        assert process_job(store, claimed(store), known_analysis) == "done"
    run_id, done = uploaded(store), store.import_report("done", *report_and_tables())
    other = store.tokens.create("other", Role.ADMIN)
    store.artifacts.save_file(ended, "job.toml", JOB)
    changed = event("change", minutes_ago(1), "slower", before_ns=1.0, after_ns=2.0)
    store.watches.add_batch(batch(id="known", events=(changed,)))
    alerts, (alert,) = "/api/v1/watch/night/alerts", store.alerts.list_alerts("night", 1)
    requests: list[tuple[Role, str, str, dict[str, Any]]] = [
        (Role.VIEWER, "GET", "/", {}),
        (Role.VIEWER, "GET", RUNS, {}),
        (Role.VIEWER, "GET", f"{RUNS}/{done}/report.json", {}),
        (Role.VIEWER, "GET", f"{RUNS}/{ended}/job", {}),
        (Role.VIEWER, "GET", f"{RUNS}/{ended}/job/form", {}),
        (Role.VIEWER, "POST", "/_dash-update-component", _ask_page("/")),
        (Role.UPLOADER, "POST", RUNS, {"json": {"name": "new"}}),
        (Role.UPLOADER, "PUT", f"{RUNS}/{run_id}/files/rank1", {"data": b"trace"}),
        (Role.UPLOADER, "DELETE", f"{RUNS}/{run_id}/files/rank1", {}),
        (Role.UPLOADER, "POST", f"{RUNS}/{run_id}/finish", {}),
        (Role.UPLOADER, "POST", f"{RUNS}/{done}/check",
         {"json": {"answer": "pass", "headline": "fine"}}),
        (Role.UPLOADER, "PATCH", f"{RUNS}/{done}", {"json": {"note": "warm caches"}}),
        (Role.UPLOADER, "POST", f"{RUNS}/{ended}/job/form", {"data": JOB}),
        (Role.UPLOADER, "PUT", f"{RUNS}/{again}/job", {"data": JOB}),
        (Role.UPLOADER, "POST", f"{RUNS}/{ended}/analyze", {}),
        (Role.UPLOADER, "POST", "/api/v1/watch", {"data": encode_batch(batch())}),
        (Role.VIEWER, "GET", "/api/v1/watch", {}),
        (Role.VIEWER, "GET", alerts, {}),
        (Role.UPLOADER, "POST", f"{alerts}/{alert.id}", {"json": {"action": "silence"}}),
        (Role.ADMIN, "DELETE", "/api/v1/watch/night", {}),
        (Role.ADMIN, "GET", "/api/v1/audit", {}),
        (Role.ADMIN, "GET", "/api/v1/tokens", {}),
        *((Role.ADMIN, "POST", "/api/v1/tokens", {"json": {"name": "x", "role": one}})
          for one in ROLES),
        (Role.ADMIN, "DELETE", f"/api/v1/tokens/{other.token.id}", {}),
        (Role.ADMIN, "DELETE", f"{RUNS}/{done}", {}),
        (Role.ADMIN, "DELETE", "/api/v1/sessions", {}),
    ]  # fmt: skip
    before = store.list_runs()

    for needed, method, path, sent in requests:
        answer = client.open(path, method=method, headers=headers, **sent)
        if role >= needed:
            assert answer.status_code < 300, (method, path, answer.text)
        else:
            reason = f"this needs the role {needed.label}; yours is {role.label}"
            assert (answer.status_code, answer.json) == (403, {"error": reason}), (method, path)
        answer.close()

    assert (store.list_runs() == before) == (role is Role.VIEWER)
    # No token was made by a lower role.
    made = [token for token in store.tokens.list_tokens() if token.name == "x"]
    assert len(made) == (3 if role is Role.ADMIN else 0)
    assert (store.tokens.verify(other.secret) is None) == (role is Role.ADMIN)


def test_each_password_has_its_role(store: Store) -> None:
    access = choose_access("0.0.0.0", **PASSWORDS)
    client, run_id = _client(store, access), uploaded(store)

    codes = {
        password: (
            client.get("/", headers=HOST, auth=("me", password)).status_code,
            client.post(RUNS, json={"name": "x"}, headers=HOST, auth=("me", password)).status_code,
            client.delete(f"{RUNS}/{run_id}", headers=HOST, auth=("me", password)).status_code,
        )
        for password in ("vie", "upl", "adm")
    }

    assert codes == {"vie": (200, 403, 403), "upl": (200, 201, 403), "adm": (200, 201, 204)}
    assert not any(word in repr(access) for word in PASSWORDS.values())


def test_passwords_come_from_files_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Access] = []
    monkeypatch.setattr(
        "stepsplit.dashboard.web.serve.serve",
        lambda *_, options, **__: served.append(options.access),
    )
    monkeypatch.setenv("STEPSPLIT_PASSWORD", "adm")
    monkeypatch.setenv("STEPSPLIT_UPLOADER_PASSWORD", "other")
    monkeypatch.setenv("STEPSPLIT_VIEWER_PASSWORD", "vie")
    (tmp_path / "upl").write_text("upl\n")
    words = ["--store", f"sqlite:///{tmp_path}/runs.db", "--artifacts", str(tmp_path / "artifacts")]

    words += ["--uploader-password-file", str(tmp_path / "upl")]
    assert cli.run(["dashboard", *words]) == 0

    assert served[0].passwords == {Role.ADMIN: "adm", Role.UPLOADER: "upl", Role.VIEWER: "vie"}
    # Workers are started later and must not inherit them.
    assert not [name for name in os.environ if name.startswith("STEPSPLIT") and "PASSW" in name]


def test_two_roles_cannot_share_a_password() -> None:
    with pytest.raises(UsageError, match="two roles have the same password"):
        choose_access("0.0.0.0", password="same", viewer_password="same")


def test_users_of_the_proxy_have_its_role(store: Store) -> None:
    proxy = parse_trusted_proxy("X-User", ["10.0.0.7"], Role.VIEWER, secret=SECRET)
    client = _client(store, choose_access("0.0.0.0", proxy=proxy))
    ada, there = HOST | FROM_PROXY | {"X-User": "ada"}, {"REMOTE_ADDR": "10.0.0.7"}

    assert client.get("/", headers=ada, environ_base=there).status_code == 200
    denied = client.post(RUNS, json={"name": "x"}, headers=ada, environ_base=there)
    assert denied.status_code == 403


def test_the_proxy_may_set_the_role_of_each_user(store: Store) -> None:
    proxy = parse_trusted_proxy("X-User", ["10.0.0.7"], role_header="X-Role", secret=SECRET)
    client = _client(store, choose_access("0.0.0.0", proxy=proxy))

    def post(role: str | None, address: str = "10.0.0.7") -> int:
        headers = HOST | FROM_PROXY | {"X-User": "ada"} | ({} if role is None else {"X-Role": role})
        there = {"REMOTE_ADDR": address}
        return client.post(
            RUNS, json={"name": "x"}, headers=headers, environ_base=there
        ).status_code

    codes = {role: post(role) for role in ("admin", "uploader", "viewer", "root", "", None)}

    assert codes == {"admin": 201, "uploader": 201, "viewer": 403, "root": 403, "": 403, None: 403}
    assert post("viewer,admin") == 403
    assert post("admin", "10.0.0.8") == 401


@pytest.mark.parametrize(
    ("role", "header"), [(Role.VIEWER, None), (None, "X-Role"), (Role.VIEWER, "X-Role")]
)
def test_a_proxys_role_needs_a_proxy(role: Role | None, header: str | None) -> None:
    with pytest.raises(UsageError, match="--trusted-proxy"):
        parse_trusted_proxy(None, [], role, header)


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.label)
def test_a_page_has_the_buttons_that_its_user_may_use(store: Store, role: Role) -> None:
    client, headers = _client(store), _token(store, role)
    done, waiting = store.import_report("done", *report_and_tables()), uploaded(store)

    layout = client.get("/_dash-layout", headers=headers).text
    # The pages of finished runs are cached: an admin's must not be a viewer's.
    admin = _token(store, Role.ADMIN)
    client.post("/_dash-update-component", headers=admin, **_ask_page(f"/run/{done}"))
    pages = [
        client.post("/_dash-update-component", headers=headers, **_ask_page(f"/run/{run_id}")).text
        for run_id in (done, waiting)
    ]

    assert ("drop-zone" in layout) == (role >= Role.UPLOADER)
    assert ["data-delete" in page for page in pages] == [role is Role.ADMIN] * 2
    assert all("heading" in page for page in pages)


def test_this_machine_may_do_everything(store: Store) -> None:
    client = create_server(store).test_client()
    run_id = uploaded(store)

    assert "drop-zone" in client.get("/_dash-layout").text
    assert client.get("/api/v1/audit").status_code == 200
    assert client.delete(f"{RUNS}/{run_id}").status_code == 204


def test_tokens_of_older_stores_keep_what_they_may(database_url: str) -> None:
    database = open_database(database_url)
    secret = Tokens(database).create("old", Role.VIEWER).secret
    database.close()
    engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        for command in (
            *DROP_WATCHES, "DROP TABLE audit", "DROP TABLE sessions",
            "ALTER TABLE tokens DROP COLUMN role", "ALTER TABLE tokens DROP COLUMN expires_unix_ns",
            "ALTER TABLE runs DROP COLUMN note",
            "ALTER TABLE login_failures ADD COLUMN blocked_until_unix_ns BIGINT",
            "ALTER TABLE runs DROP COLUMN job_key", "ALTER TABLE runs DROP COLUMN job_label",
            "ALTER TABLE runs DROP COLUMN finding", "ALTER TABLE runs DROP COLUMN finding_ns",
            "ALTER TABLE runs DROP COLUMN roles",
            "UPDATE alembic_version SET version_num = '0004'",
        ):  # fmt: skip
            connection.execute(text(command))
    engine.dispose()

    migrated = open_database(database_url)
    token = Tokens(migrated).verify(secret)
    migrated.close()

    assert token is not None and (token.name, token.role) == ("old", Role.ADMIN)


def test_tokens_are_made_with_a_role(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--store", f"sqlite:///{tmp_path}/runs.db"]
    for words in (["ci"], ["ada", "--role", "admin"], ["wall", "--role", "viewer"]):
        assert cli.run(["token", "create", *words, *url]) == 0
    assert capsys.readouterr().out.count("sst_") == 3

    assert cli.run(["token", "list", *url]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(words[2], words[-1]) for words in listed] == [
        ("uploader", "ci"), ("admin", "ada"), ("viewer", "wall"),
    ]  # fmt: skip
    assert cli.run(["token", "create", "x", "--role", "root", *url]) == 2


def _list_routes(server: Flask) -> list[tuple[str, str]]:
    return [
        (rule.endpoint, method) for rule in server.url_map.iter_rules()
        for method in rule.methods or ()
    ]  # fmt: skip


def _ask_page(path: str) -> dict[str, Any]:
    """What a browser sends to show a page."""
    body = {
        "output": f"..{'...'.join('.'.join(name) for name in PROPERTIES)}..",
        "outputs": [{"id": part, "property": name} for part, name in PROPERTIES],
        "inputs": [
            {"id": "url", "property": "pathname", "value": path},
            {"id": "url", "property": "search", "value": ""},
            {"id": "tick", "property": "n_intervals", "value": 0},
        ],
        "changedPropIds": ["url.pathname"],
        "state": [{"id": "mark", "property": "data", "value": None}],
    }
    return {"data": json.dumps(body), "content_type": "application/json"}
