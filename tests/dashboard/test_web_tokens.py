"""Tokens over the API: who creates, lists and revokes them, and what is shown of them."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.store_builders import uploaded

from stepsplit.dashboard import cli
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.options import Access, choose_access
from stepsplit.dashboard.web.server import create_server

HOST = {"Host": "traces.example"}
TOKENS = "/api/v1/tokens"


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_server(store, choose_access("0.0.0.0", password="adm")).test_client()


@pytest.fixture
def admin(store: Store) -> dict[str, str]:
    return _bearer(store.tokens.create("boss", Role.ADMIN).secret)


def test_a_token_is_made_used_and_revoked(
    client: FlaskClient, store: Store, admin: dict[str, str]
) -> None:
    made = client.post(TOKENS, json={"name": "ci"}, headers=admin)
    assert (made.status_code, made.headers["Cache-Control"]) == (201, "private, no-store")
    new: dict[str, Any] = made.json or {}
    mine, run_id = _bearer(new["secret"]), uploaded(store)
    status = f"/api/v1/runs/{run_id}"

    assert client.post(f"{status}/finish", headers=mine).status_code == 202
    listed = client.get(TOKENS, headers=admin)
    ci = (listed.json or {})["tokens"][1]
    assert (ci["id"], ci["name"], ci["role"], ci["revoked"]) == (new["id"], "ci", "uploader", False)
    assert ci["last_used"] >= ci["created"] == new["created"]
    assert (
        new["secret"] not in listed.text and listed.headers["Cache-Control"] == "private, no-store"
    )

    assert client.delete(f"{TOKENS}/{ci['id']}", headers=admin).status_code == 204
    assert client.get(status, headers=mine).status_code == 401
    assert [token.revoked for token in store.tokens.list_tokens()] == [False, True]
    assert client.delete(f"{TOKENS}/{'0' * 8}", headers=admin).status_code == 404


def test_a_token_for_some_days_says_when_it_expires(
    client: FlaskClient, store: Store, admin: dict[str, str]
) -> None:
    new = client.post(TOKENS, json={"name": "ci", "days": 0.5}, headers=admin).json or {}

    rows = (client.get(TOKENS, headers=admin).json or {})["tokens"]

    token = store.tokens.list_tokens()[1]
    assert token.expires_unix_ns == token.created_unix_ns + 43_200 * 10**9
    assert [row["expires"] for row in rows] == [None, new["expires"]]
    assert new["created"] < new["expires"]


def test_the_command_makes_tokens_that_expire(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--store", store.url]
    assert cli.run(["token", "create", "ci", "--days", "0.000001", *words]) == 0
    assert cli.run(["token", "create", "wall", "--days", "90", *words]) == 0
    assert cli.run(["token", "create", "old", *words]) == 0
    secrets = capsys.readouterr().out.split()
    time.sleep(0.1)

    assert cli.run(["token", "list", *words]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["expired", "valid", "valid"]
    assert ["until 2" in line for line in lines] == [True, True, False]
    assert [store.tokens.verify(one) is not None for one in secrets] == [False, True, True]
    assert cli.run(["token", "create", "ci", "--days", "0", *words]) == 2


def test_what_is_done_to_tokens_is_in_the_audit_log(
    client: FlaskClient, store: Store, admin: dict[str, str]
) -> None:
    new = client.post(TOKENS, json={"name": "wall", "role": "viewer"}, headers=admin).json or {}
    client.post(TOKENS, json={"name": "me", "role": "admin"}, headers=_bearer(new["secret"]))
    client.delete(f"{TOKENS}/{new['id']}", headers=admin)

    entries = store.audit.list_entries(10)[::-1]

    assert [(one.user_name, one.action, one.target) for one in entries] == [
        ("token boss", "token created", f"{new['id']} wall (viewer)"),
        ("token wall", "refused", f"POST {TOKENS}"),
        ("token boss", "token revoked", new["id"]),
    ]
    assert not any(new["secret"] in str(one) for one in entries)


@pytest.mark.parametrize(
    "body",
    [
        None, [], {}, {"name": ""}, {"name": " "}, {"name": 5}, {"name": "a\nb"}, {"name": "a\0"},
        {"name": "x" * 201}, {"name": "\u202eci"}, {"name": "ci", "role": "root"},
        {"name": "ci", "role": None}, {"name": "ci", "role": ["admin"]}, {"name": "ci", "weeks": 3},
        {"name": "ci", "days": 0}, {"name": "ci", "days": "3"}, {"name": "ci", "days": True},
        {"name": "ci", "days": None}, {"name": "ci", "days": 1e9}, {"name": "ci", "days": math.nan},
    ],
    ids=repr,
)  # fmt: skip
def test_an_odd_request_makes_no_token(
    client: FlaskClient, store: Store, admin: dict[str, str], body: object
) -> None:
    refused = client.post(TOKENS, json=body, headers=admin)

    assert refused.status_code == 400
    assert "role is one of viewer, uploader, admin" in (refused.json or {})["error"]
    assert len(store.tokens.list_tokens()) == 1


def test_another_site_makes_no_token_in_a_session(client: FlaskClient, store: Store) -> None:
    client.post("/login", data={"password": "adm"}, headers=HOST)
    own = HOST | {"Origin": "http://traces.example"}
    form = {"data": '{"name": "x", "role": "admin"}', "content_type": "text/plain"}

    for foreign in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = client.post(TOKENS, json={"name": "x"}, headers=HOST | foreign)
        assert refused.status_code == 403
    assert client.post(TOKENS, headers=HOST, **form).status_code == 400
    assert store.tokens.list_tokens() == ()
    assert client.post(TOKENS, json={"name": "x"}, headers=own).status_code == 201


@pytest.mark.parametrize("access", [Access(), Access(local=False)], ids=["local", "open"])
def test_who_did_not_log_in_makes_no_token_that_outlasts_the_open_server(
    store: Store, access: Access
) -> None:
    client = create_server(store, access).test_client()

    refused = client.post(TOKENS, json={"name": "x", "role": "admin"})

    assert (refused.status_code, store.tokens.list_tokens()) == (403, ())
    assert "stepsplit token create" in (refused.json or {})["error"]


def _bearer(secret: str) -> dict[str, str]:
    return HOST | {"Authorization": f"Bearer {secret}"}
