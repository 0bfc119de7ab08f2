"""Access control: local requests without login, others with a secret or through a proxy."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.dashboard_processes import find_free_port

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.logins import FORGET_S, LoginFailures
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import (
    FREE_FAILURES,
    FREE_FAILURES_OF_ACCOUNT,
    MAX_WAIT_S,
    Authenticator,
    list_guessed,
)
from stepsplit.dashboard.web.options import Access, choose_access, parse_trusted_proxy
from stepsplit.dashboard.web.serve import serve
from stepsplit.dashboard.web.server import create_server

HOST = {"Host": "traces.example"}
PASSWORD = "correct horse"
SECRET = "0123456789abcdef"
FROM_PROXY = {"X-Stepsplit-Proxy-Secret": SECRET}


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
    [
        "Basic",
        "Basic !!!",
        "Basic eA==",
        "Bearer",
        "Bearer  ",
        "Digest x",
        "sst_x",
        "Bearer \xff",
        "Basic \xff=",
    ],
)
def test_invalid_credentials_are_challenged_again(authorization: str, store: Store) -> None:
    client = _client(store, choose_access("0.0.0.0", password=PASSWORD))

    answer = client.get("/", headers=HOST | {"Authorization": authorization})

    assert answer.status_code == 401


def test_a_token_is_accepted_until_revoked(store: Store) -> None:
    client = _client(store, choose_access("0.0.0.0", has_tokens=True))
    secret = store.tokens.create("ci").secret
    bearer, basic = {"Authorization": f"Bearer {secret}"}, _basic(secret)

    assert client.get("/", headers=HOST | bearer).status_code == 200
    assert client.get("/", headers=HOST | basic).status_code == 200
    store.tokens.revoke(store.tokens.list_tokens()[0].id)

    assert client.get("/", headers=HOST | bearer).status_code == 401


def test_the_proxy_header_counts_only_from_the_proxy(store: Store) -> None:
    proxy = parse_trusted_proxy("X-Forwarded-User", ["10.0.0.0/24", "::1"], secret=SECRET)
    client = _client(store, choose_access("127.0.0.1", proxy=proxy))
    named = HOST | FROM_PROXY | {"X-Forwarded-User": "ada"}

    codes = {
        address: client.get("/", headers=named, environ_base={"REMOTE_ADDR": address}).status_code
        for address in ("10.0.0.7", "::ffff:10.0.0.7", "::1", "10.0.1.7", "127.0.0.1", "")
    }

    assert codes == {
        "10.0.0.7": 200, "::ffff:10.0.0.7": 200, "::1": 200, "10.0.1.7": 401, "127.0.0.1": 401,
        "": 401,
    }  # fmt: skip
    anonymous = client.get("/", headers=HOST | FROM_PROXY, environ_base={"REMOTE_ADDR": "10.0.0.7"})
    assert anonymous.status_code == 401


@pytest.mark.parametrize(
    ("header", "addresses"), [("X-User", []), (None, ["10.0.0.1"]), ("X-User", ["proxy.example"])]
)
def test_a_proxy_is_a_header_and_addresses(header: str | None, addresses: list[str]) -> None:
    with pytest.raises(UsageError, match="--trusted-proxy"):
        parse_trusted_proxy(header, addresses, secret=SECRET)


def test_guessing_waits_in_every_process_of_the_server(store: Store) -> None:
    access = choose_access("0.0.0.0", password=PASSWORD)
    others = Store.open(store.url, store.artifacts.url)
    clients = [_client(store, access), _client(others, access)]
    guesses = [
        clients[number % 2].get("/", headers=HOST | _basic(f"guess {number}")).status_code
        for number in range(FREE_FAILURES + 4)
    ]

    waiting = clients[1].get("/", headers=HOST | _basic(PASSWORD))
    elsewhere = clients[0].get(
        "/", headers=HOST | _basic(PASSWORD), environ_base={"REMOTE_ADDR": "10.9.9.9"}
    )

    assert guesses == [401] * FREE_FAILURES + [429] * 4
    assert (waiting.status_code, waiting.headers["Retry-After"]) == (429, "1")
    assert elsewhere.status_code == 200
    assert clients[0].get("/healthz", headers=HOST).status_code == 200
    others.close()


def test_guesses_at_once_do_not_pass_together(store: Store) -> None:
    server = create_server(store, choose_access("0.0.0.0", password=PASSWORD))

    def guess(number: int) -> int:
        headers = HOST | _basic(f"guess {number}")
        return server.test_client().get("/", headers=headers).status_code

    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(guess, range(32)))

    assert codes.count(401) == FREE_FAILURES
    assert set(codes) == {401, 429}


def test_who_has_logged_in_before_or_has_a_token_does_not_wait(store: Store) -> None:
    access = choose_access("0.0.0.0", password=PASSWORD)
    known, token = _client(store, access), store.tokens.create("ci").secret
    first = known.get("/", headers=HOST | _basic(PASSWORD))
    guesser = _client(store, access)
    # As many more as make the next one wait for minutes.
    for _ in range(FREE_FAILURES + 8):
        store.login_failures.record(list_guessed("127.0.0.1"))

    assert guesser.get("/", headers=HOST | _basic(PASSWORD)).status_code == 429
    assert known.get("/", headers=HOST | _basic(PASSWORD)).status_code == 200
    assert _client(store, access).get("/", headers=HOST | _basic(token)).status_code == 200
    cookie = first.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    # The cookie is no password, and only this server's counts.
    assert known.get("/", headers=HOST).status_code == 401
    assert known.get("/", headers=HOST | _basic("wrong")).status_code == 401
    name, _, signed = cookie.partition(";")[0].partition("=")
    client, at, signature = signed.split(".")
    for forged in (
        "", "x.y", f"viewer{client}.{at}.{signature}", f"{client}.{at}.{'0' * 27}", "\xff.\xff",
    ):  # fmt: skip
        headers = HOST | _basic(PASSWORD) | {"Cookie": f"{name}={forged}"}
        stranger = create_server(store, access).test_client(use_cookies=False)
        assert stranger.get("/", headers=headers).status_code == 429


def test_a_known_client_may_enter_its_own_password_only(store: Store) -> None:
    access = choose_access("0.0.0.0", password=PASSWORD, viewer_password="look")
    viewer, admin = _client(store, access), _client(store, access)
    assert viewer.get("/", headers=HOST | _basic("look")).status_code == 200
    assert admin.get("/", headers=HOST | _basic(PASSWORD)).status_code == 200
    for _ in range(FREE_FAILURES + 8):
        store.login_failures.record(list_guessed("127.0.0.1"))

    guesses = [
        viewer.get("/", headers=HOST | _basic(f"guess {number}")).status_code
        for number in range(FREE_FAILURES + 20)
    ]

    # Its own limit ends the guesses, of which each counts for the address too.
    assert guesses[:FREE_FAILURES] == [401] * FREE_FAILURES
    assert guesses[-1] == 429
    # The admin's password is not tried, right or wrong; and the admin comes in nevertheless.
    assert viewer.get("/", headers=HOST | _basic(PASSWORD)).status_code in (401, 429)
    assert admin.get("/", headers=HOST | _basic(PASSWORD)).status_code == 200
    entries = store.audit.list_entries(10)
    assert [(one.action, one.outcome) for one in entries] == [("login", "wrong password or token")]
    assert entries[0].count >= FREE_FAILURES


def test_the_guesses_of_a_known_client_count_for_its_address_from_the_first(store: Store) -> None:
    access = choose_access("0.0.0.0", password=PASSWORD, viewer_password="look")
    viewer = _client(store, access)
    viewer.get("/", headers=HOST | _basic("look"))

    for number in range(FREE_FAILURES + 8):
        viewer.get("/", headers=HOST | _basic(f"guess {number}"))

    assert _client(store, access).get("/", headers=HOST | _basic(PASSWORD)).status_code == 429


def test_guesses_behind_a_proxy_count_for_the_client(store: Store) -> None:
    proxy = parse_trusted_proxy("X-User", ["127.0.0.1"], secret=SECRET)
    client = _client(store, choose_access("127.0.0.1", password=PASSWORD, proxy=proxy))
    guesser = HOST | FROM_PROXY | {"X-Forwarded-For": "1.2.3.4, 6.6.6.6"}
    for _ in range(FREE_FAILURES):
        client.get("/", headers=guesser | _basic("guess"))

    assert client.get("/", headers=guesser | _basic(PASSWORD)).status_code == 429
    other = HOST | FROM_PROXY | {"X-Forwarded-For": "6.6.6.6, 1.2.3.4"}
    assert client.get("/", headers=other | _basic(PASSWORD)).status_code == 200


@pytest.fixture
def clock() -> list[int]:
    """The time in ns, as the only entry."""
    return [10**18]


@pytest.fixture
def failures(database_url: str, clock: list[int]) -> Iterator[LoginFailures]:
    database = open_database(database_url)
    yield LoginFailures(database, lambda: clock[0])
    database.close()


def test_each_wrong_password_doubles_the_wait(failures: LoginFailures, clock: list[int]) -> None:
    guessed = list_guessed("6.6.6.6")
    waits = []
    for _ in range(FREE_FAILURES + 12):
        failures.record(guessed)
        waits.append(failures.compute_wait_s(guessed))
        clock[0] += int(waits[-1] * 1e9)
        assert failures.compute_wait_s(guessed) == 0

    doubled = [float(min(1 << n, MAX_WAIT_S)) for n in range(13)]
    assert waits == [0.0] * (FREE_FAILURES - 1) + doubled
    assert failures.compute_wait_s(list_guessed("6.6.6.7")) == 0


def test_failures_are_forgotten_after_a_while(failures: LoginFailures, clock: list[int]) -> None:
    guessed = list_guessed("6.6.6.6")
    for _ in range(FREE_FAILURES - 1):
        failures.record(guessed)
    clock[0] += (FORGET_S + 1) * 10**9

    failures.record(guessed)

    assert failures.compute_wait_s(guessed) == 0


def test_guesses_from_many_addresses_wait_too(failures: LoginFailures) -> None:
    for number in range(FREE_FAILURES_OF_ACCOUNT):
        failures.record(list_guessed(f"10.0.0.{number}"))

    assert failures.compute_wait_s(list_guessed("10.1.1.1")) == 1


def test_the_addresses_of_one_ipv6_host_count_together() -> None:
    assert list_guessed("2001:db8::1") == list_guessed("2001:db8::ffff:1")
    assert list_guessed("2001:db8::1") != list_guessed("2001:db8:0:1::1")
    assert list_guessed("::ffff:10.0.0.7") == list_guessed("10.0.0.7") != list_guessed("10.0.0.8")
    assert list_guessed("' OR 1") == list_guessed("")


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
    secret = store.tokens.create("ci").secret
    assert PASSWORD not in repr(access) and PASSWORD not in repr(Authenticator(access, store))

    with caplog.at_level(logging.DEBUG, logger="stepsplit"):
        client = _client(store, access)
        client.get("/", headers=HOST | _basic(PASSWORD))
        client.get("/", headers=HOST | {"Authorization": f"Bearer {secret}"})
        client.get("/", headers=HOST | _basic("wrong guess"))
    logged = caplog.text + "".join(str(vars(record)) for record in caplog.records)

    assert "request" in logged
    assert PASSWORD not in logged and secret not in logged and "wrong guess" not in logged
    assert secret.encode() not in Path(str(store.url).removeprefix("sqlite:///")).read_bytes()
