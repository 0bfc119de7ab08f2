"""Tokens over the API: who creates, lists and revokes them, and what is shown of them."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from store_builders import uploaded

from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import Access, choose_access
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
    assert (made.status_code, made.headers["Cache-Control"]) == (201, "no-store")
    new: dict[str, Any] = made.json or {}
    mine, run_id = _bearer(new["secret"]), uploaded(store)
    status = f"/api/v1/runs/{run_id}"

    assert client.post(f"{status}/finish", headers=mine).status_code == 202
    listed = client.get(TOKENS, headers=admin)
    ci = (listed.json or {})["tokens"][1]
    assert (ci["id"], ci["name"], ci["role"], ci["revoked"]) == (new["id"], "ci", "uploader", False)
    assert ci["last_used"] >= ci["created"] == new["created"]
    assert new["secret"] not in listed.text and listed.headers["Cache-Control"] == "no-store"

    assert client.delete(f"{TOKENS}/{ci['id']}", headers=admin).status_code == 204
    assert client.get(status, headers=mine).status_code == 401
    assert [token.revoked for token in store.tokens.list_tokens()] == [False, True]
    assert client.delete(f"{TOKENS}/{'0' * 8}", headers=admin).status_code == 404


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
        {"name": "ci", "role": None}, {"name": "ci", "role": ["admin"]}, {"name": "ci", "days": 3},
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
