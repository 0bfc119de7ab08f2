"""Access control: local requests without login, others with a secret or through a proxy."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import (
    MOST_FAILURES,
    WINDOW_S,
    Access,
    Authenticator,
    Throttle,
    choose_access,
    parse_trusted_proxy,
)
from stepsplit.dashboard.web.serve import find_free_port, serve
from stepsplit.dashboard.web.server import create_server

HOST = {"Host": "traces.example"}
PASSWORD = "correct horse"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path}/runs.db", tmp_path / "artifacts")
    yield opened
    opened.close()


def _client(store: Store, access: Access) -> FlaskClient:
    return create_server(store, access).test_client()


def _basic(password: str, user: str = "anybody") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_this_machine_needs_no_login() -> None:
    assert choose_access("127.0.0.1") == choose_access("::1") == Access(local=True, guarded=False)
    # Tokens are for others: who sits here would be locked out by making one.
    assert choose_access("localhost", has_tokens=True) == Access(local=True, guarded=False)


def test_a_public_address_needs_access_control(store: Store) -> None:
    message = "0.0.0.0 is reachable by others: restrict it"
    with pytest.raises(UsageError, match=message):
        choose_access("0.0.0.0")
    with pytest.raises(UsageError, match=message):
        serve(store, "0.0.0.0", find_free_port())

    guarded = Access(local=False, guarded=True)
    assert choose_access("0.0.0.0", has_tokens=True) == guarded
    assert choose_access("0.0.0.0", open_to_anyone=True) == Access(local=False, guarded=False)


def test_only_the_password_is_accepted(store: Store) -> None:
    client = _client(store, choose_access("0.0.0.0", password=PASSWORD))

    asked = client.get("/", headers=HOST)
    wrong = client.get("/", headers=HOST | _basic("wrong"))
    right = client.get("/", headers=HOST | _basic(PASSWORD))

    assert (asked.status_code, wrong.status_code, right.status_code) == (401, 401, 200)
    assert asked.headers["WWW-Authenticate"] == 'Basic realm="stepsplit", charset="UTF-8"'
    assert "Content-Security-Policy" in asked.headers
    for path in ("/assets/upload.js", "/api/v1/runs/0", "/metrics", "/_dash-layout"):
        assert client.get(path, headers=HOST).status_code == 401
    for path in ("/healthz", "/readyz"):
        assert client.get(path, headers=HOST).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    ["Basic", "Basic !!!", "Basic eA==", "Bearer", "Bearer  ", "Digest x", "sst_x", "Bearer \xff"],
)
def test_invalid_credentials_are_challenged_again(authorization: str, store: Store) -> None:
    client = _client(store, choose_access("0.0.0.0", password=PASSWORD))

    answer = client.get("/", headers=HOST | {"Authorization": authorization})

    assert answer.status_code == 401


def test_a_token_is_accepted_until_revoked(store: Store) -> None:
    client = _client(store, choose_access("0.0.0.0", has_tokens=True))
    secret = store.tokens.create("ci")
    bearer, basic = {"Authorization": f"Bearer {secret}"}, _basic(secret)

    assert client.get("/", headers=HOST | bearer).status_code == 200
    assert client.get("/", headers=HOST | basic).status_code == 200
    store.tokens.revoke(store.tokens.list_tokens()[0].id)

    assert client.get("/", headers=HOST | bearer).status_code == 401


def test_the_proxy_header_counts_only_from_the_proxy(store: Store) -> None:
    proxy = parse_trusted_proxy("X-Forwarded-User", ["10.0.0.0/24", "::1"])
    client = _client(store, choose_access("127.0.0.1", proxy=proxy))
    named = HOST | {"X-Forwarded-User": "ada"}

    codes = {
        address: client.get("/", headers=named, environ_base={"REMOTE_ADDR": address}).status_code
        for address in ("10.0.0.7", "::ffff:10.0.0.7", "::1", "10.0.1.7", "127.0.0.1", "")
    }

    assert codes == {
        "10.0.0.7": 200, "::ffff:10.0.0.7": 200, "::1": 200, "10.0.1.7": 401, "127.0.0.1": 401,
        "": 401,
    }  # fmt: skip
    anonymous = client.get("/", headers=HOST, environ_base={"REMOTE_ADDR": "10.0.0.7"})
    assert anonymous.status_code == 401


@pytest.mark.parametrize(
    ("header", "addresses"), [("X-User", []), (None, ["10.0.0.1"]), ("X-User", ["proxy.example"])]
)
def test_a_proxy_is_a_header_and_addresses(header: str | None, addresses: list[str]) -> None:
    with pytest.raises(UsageError, match="--trusted-proxy"):
        parse_trusted_proxy(header, addresses)


def test_guessing_is_throttled(store: Store) -> None:
    client = _client(store, choose_access("0.0.0.0", password=PASSWORD))
    for _ in range(MOST_FAILURES):
        assert client.get("/", headers=HOST | _basic("guess")).status_code == 401

    waiting = client.get("/", headers=HOST | _basic(PASSWORD))
    elsewhere = client.get(
        "/", headers=HOST | _basic(PASSWORD), environ_base={"REMOTE_ADDR": "10.9.9.9"}
    )

    assert (waiting.status_code, elsewhere.status_code) == (429, 200)
    assert 1 <= int(waiting.headers["Retry-After"]) <= WINDOW_S + 1
    assert client.get("/healthz", headers=HOST).status_code == 200


def test_guesses_behind_a_proxy_count_for_the_client(store: Store) -> None:
    proxy = parse_trusted_proxy("X-User", ["127.0.0.1"])
    client = _client(store, choose_access("127.0.0.1", password=PASSWORD, proxy=proxy))
    guesser = HOST | {"X-Forwarded-For": "1.2.3.4, 6.6.6.6"}
    for _ in range(MOST_FAILURES):
        client.get("/", headers=guesser | _basic("guess"))

    assert client.get("/", headers=guesser | _basic(PASSWORD)).status_code == 429
    other = HOST | {"X-Forwarded-For": "6.6.6.6, 1.2.3.4"}
    assert client.get("/", headers=other | _basic(PASSWORD)).status_code == 200


def test_failures_are_forgotten_after_a_while() -> None:
    now = 0.0
    throttle = Throttle(lambda: now)
    for _ in range(MOST_FAILURES):
        throttle.record_failure("a")
    assert (throttle.compute_wait_s("a"), throttle.compute_wait_s("b")) == (WINDOW_S, 0.0)

    now = WINDOW_S + 1

    assert throttle.compute_wait_s("a") == 0.0


def test_many_addresses_do_not_fill_the_memory() -> None:
    throttle = Throttle()
    for number in range(12_000):
        throttle.record_failure(str(number))
    assert len(throttle._failures) == 10_000


def test_writes_from_another_site_are_refused_with_the_right_password_too(store: Store) -> None:
    client = _client(store, choose_access("0.0.0.0", password=PASSWORD))
    known = HOST | _basic(PASSWORD)

    def post(origin: str) -> int:
        headers = known | {"Origin": origin}
        return client.post("/api/v1/runs", json={"name": "x"}, headers=headers).status_code

    assert post("https://evil.example") == 403
    # A proxy that ends TLS: the browser says https where the server sees http.
    assert post("https://traces.example") == 201


def test_no_secret_is_shown_or_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    access = choose_access("0.0.0.0", password=PASSWORD)
    secret = store.tokens.create("ci")
    assert PASSWORD not in repr(access) and PASSWORD not in repr(
        Authenticator(access, store.tokens)
    )

    with caplog.at_level(logging.DEBUG):
        client = _client(store, access)
        client.get("/", headers=HOST | _basic(PASSWORD))
        client.get("/", headers=HOST | {"Authorization": f"Bearer {secret}"})
        client.get("/", headers=HOST | _basic("wrong guess"))
    logged = caplog.text + "".join(str(vars(record)) for record in caplog.records)

    assert "request" in logged
    assert PASSWORD not in logged and secret not in logged and "wrong guess" not in logged
    assert secret.encode() not in Path(str(store.url).removeprefix("sqlite:///")).read_bytes()
