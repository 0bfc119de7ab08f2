"""Sessions: the login page, the cookie, logging out, and what ends a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from stepsplit.dashboard.store import logins
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.logins import IDLE_S, LIFETIME_S, Role, Sessions, Tokens
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import FREE_FAILURES, list_guessed, parse_next
from stepsplit.dashboard.web.options import Access, choose_access
from stepsplit.dashboard.web.server import create_server

PASSWORD = "correct horse"
HOST = {"Host": "traces.example"}
PAGE = HOST | {"Accept": "text/html,*/*;q=0.8"}
COOKIE = "stepsplit-session"
PASSWORDS = {Role.ADMIN: PASSWORD}


@pytest.fixture
def guarded() -> Access:
    return choose_access("0.0.0.0", password=PASSWORD)


def _client(store: Store, access: Access) -> FlaskClient:
    return create_server(store, access).test_client()


def _copier(store: Store, access: Access) -> FlaskClient:
    """A client that sends the cookies of its headers, and keeps none."""
    return create_server(store, access).test_client(use_cookies=False)


def _log_in(client: FlaskClient, password: str = PASSWORD, **headers: str) -> TestResponse:
    form = {"password": password, "next": "/history?metric=mfu"}
    return client.post("/login", data=form, headers=HOST | headers)


def test_a_session_lasts_until_the_log_out(store: Store, guarded: Access) -> None:
    client = _client(store, guarded)
    assert client.get("/api/v1/runs", headers=HOST).status_code == 401

    entered = _log_in(client)
    within = client.get("/api/v1/runs", headers=HOST)
    stolen = client.get_cookie(COOKIE, domain="traces.example")
    left = client.post("/logout", headers=HOST)

    assert (entered.status_code, entered.headers["Location"]) == (303, "/history?metric=mfu")
    assert within.status_code == 200
    assert (left.status_code, left.headers["Location"]) == (303, "/login")
    assert client.get_cookie(COOKIE, domain="traces.example") is None
    assert client.get("/api/v1/runs", headers=HOST).status_code == 401
    # It ended on the server, not only in the browser.
    assert stolen is not None
    kept = HOST | {"Cookie": f"{COOKIE}={stolen.value}"}
    assert _copier(store, guarded).get("/api/v1/runs", headers=kept).status_code == 401


def test_every_process_of_the_server_knows_the_session(
    database_url: str, tmp_path: Path, guarded: Access
) -> None:
    store, others = (Store.open(database_url, tmp_path / "artifacts") for _ in range(2))
    entered = _log_in(_client(store, guarded))
    cookie = HOST | {"Cookie": _read_cookie(entered)}

    assert _copier(others, guarded).get("/", headers=cookie).status_code == 200
    assert _copier(others, guarded).post("/logout", headers=cookie).status_code == 303
    assert _copier(store, guarded).get("/", headers=cookie).status_code == 401
    actions = [one.action for one in store.audit.list_entries(10)]
    assert actions == ["logout", "login"]
    store.close()
    others.close()


def test_the_cookie_is_only_for_this_site_and_not_for_scripts(
    store: Store, guarded: Access
) -> None:
    plain = _log_in(_client(store, guarded))
    encrypted = _log_in(_client(store, guarded), Origin="https://traces.example")

    flags = [_read_flags(answer) for answer in (plain, encrypted)]
    assert flags[0] == {"HttpOnly", f"Max-Age={LIFETIME_S}", "Path=/", "SameSite=Strict"}
    assert flags[1] == flags[0] | {"Secure"}


def test_the_database_holds_no_session_id_and_no_password(
    store: Store, guarded: Access, tmp_path: Path
) -> None:
    entered = _log_in(_client(store, guarded))
    session_id = _read_cookie(entered).partition("=")[2]
    store.close()

    content = b"".join(file.read_bytes() for file in tmp_path.glob("runs.db*"))
    assert b"sessions" in content and len(session_id) == 43
    assert session_id.encode() not in content and PASSWORD.encode() not in content


def test_who_logs_in_again_has_a_new_session(store: Store, guarded: Access) -> None:
    client = _client(store, guarded)
    first = _read_cookie(_log_in(client))
    second = _read_cookie(_log_in(client))

    assert first != second
    fresh = _copier(store, guarded)
    assert fresh.get("/", headers=HOST | {"Cookie": first}).status_code == 401
    assert fresh.get("/", headers=HOST | {"Cookie": second}).status_code == 200


def test_a_changed_password_ends_the_sessions_of_the_old_one(store: Store) -> None:
    before = choose_access("0.0.0.0", password=PASSWORD, viewer_password="look")
    admin = HOST | {"Cookie": _read_cookie(_log_in(_client(store, before)))}
    viewer = HOST | {"Cookie": _read_cookie(_log_in(_client(store, before), "look"))}

    changed = _copier(store, choose_access("0.0.0.0", password="new", viewer_password="look"))

    assert changed.get("/", headers=admin).status_code == 401
    assert changed.get("/", headers=viewer).status_code == 200


def test_a_token_may_log_in_until_it_is_revoked(store: Store, guarded: Access) -> None:
    client, secret = _client(store, guarded), store.tokens.create("ada", Role.VIEWER).secret

    assert _log_in(client, secret).status_code == 303
    assert client.get("/", headers=HOST).status_code == 200
    assert client.delete("/api/v1/runs/0123456789ab", headers=HOST).status_code == 403
    store.tokens.revoke(store.tokens.list_tokens()[0].id)

    assert client.get("/", headers=HOST).status_code == 401


def test_an_admin_ends_all_sessions(store: Store, guarded: Access) -> None:
    client, other = _client(store, guarded), _client(store, guarded)
    for one in (client, other):
        _log_in(one)

    ended = client.delete("/api/v1/sessions", headers=HOST)

    assert ended.json == {"ended": 2}
    assert [one.get("/", headers=HOST).status_code for one in (client, other)] == [401, 401]


def test_a_wrong_password_is_said_on_the_page(store: Store, guarded: Access) -> None:
    client = _client(store, guarded)

    wrong = _log_in(client, "wr<b>ong")

    assert (wrong.status_code, wrong.mimetype) == (401, "text/html")
    assert b"wrong password or token" in wrong.data and b"/history?metric=mfu" in wrong.data
    # With a challenge the browser would ask again in a window of its own.
    assert "WWW-Authenticate" not in wrong.headers and "Set-Cookie" not in wrong.headers
    assert b"wr<b>ong" not in wrong.data
    assert _log_in(client, "").status_code == 400


def test_the_form_makes_guesses_wait_as_other_logins_do(store: Store, guarded: Access) -> None:
    client = _client(store, guarded)
    known = _client(store, guarded)
    _log_in(known)
    guesses = [_log_in(client, f"guess {n}").status_code for n in range(FREE_FAILURES)]
    # As many more as make the next one wait for minutes.
    for _ in range(8):
        store.login_failures.record(list_guessed("127.0.0.1"))

    waiting = _log_in(client)

    assert guesses == [401] * FREE_FAILURES
    assert (waiting.status_code, "Retry-After" in waiting.headers) == (429, True)
    assert b"too many wrong passwords; wait" in waiting.data
    # Sessions go on, and who has logged in before may do so again.
    assert known.get("/", headers=HOST).status_code == 200
    assert _log_in(known).status_code == 303


def test_another_site_neither_logs_in_nor_out(store: Store, guarded: Access) -> None:
    client, evil = _client(store, guarded), {"Origin": "https://evil.example"}
    assert _log_in(client, **evil).status_code == 403
    _log_in(client)

    assert client.post("/logout", headers=HOST | evil).status_code == 403
    assert client.get("/", headers=HOST).status_code == 200


def test_a_page_without_a_session_leads_to_the_login(store: Store, guarded: Access) -> None:
    client = _client(store, guarded)

    asked = client.get("/run/0123456789ab/timeline?rank=3", headers=PAGE)

    assert asked.status_code == 401
    assert "Basic" not in asked.headers["WWW-Authenticate"]
    place = "/login?next=%2Frun%2F0123456789ab%2Ftimeline%3Frank%3D3"
    assert f"url={place}" in asked.text
    form = client.get(place, headers=PAGE)
    assert (form.status_code, form.headers["Cache-Control"]) == (200, "private, no-store")
    assert 'value="/run/0123456789ab/timeline?rank=3"' in form.text
    for asset in ("style.css", "theme.js", "favicon.svg"):
        found = client.get(f"/assets/{asset}", headers=HOST)
        assert found.status_code == 200
        found.close()
    _log_in(client)
    again = client.get(place, headers=PAGE)
    assert (again.status_code, again.headers["Location"]) == (
        303, "/run/0123456789ab/timeline?rank=3",
    )  # fmt: skip


def test_only_programs_are_asked_for_basic_authentication(store: Store, guarded: Access) -> None:
    client, path = _client(store, guarded), "/api/v1/runs"
    program = client.get(path, headers=HOST)
    script = client.get(path, headers=HOST | {"Referer": "http://traces.example/"})

    assert program.headers["WWW-Authenticate"].startswith("Basic")
    assert (script.status_code, "WWW-Authenticate" in script.headers) == (401, False)


def test_this_machine_has_no_login(store: Store) -> None:
    client = create_server(store).test_client()

    assert client.get("/login?next=/history").headers["Location"] == "/history"
    assert client.post("/login", data={"password": "any"}).headers["Location"] == "/"
    assert b"log-out" not in client.get("/_dash-layout").data


def test_only_a_session_has_a_button_to_log_out(store: Store, guarded: Access) -> None:
    client = _client(store, guarded)
    by_password = client.get("/_dash-layout", headers=HOST, auth=("me", PASSWORD))
    _log_in(client)

    assert b"log-out" not in by_password.data
    assert b"log-out" in client.get("/_dash-layout", headers=HOST).data


@pytest.mark.parametrize(
    "place",
    [
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "evil",
        "",
        "/a\r\nb",
        "/a" * 3000,
    ],
)
def test_the_login_leads_to_this_server_only(place: str) -> None:
    assert parse_next(place) == "/"


# The sessions of a store, in each kind of database.


@pytest.fixture
def clock() -> list[int]:
    """The time in ns, as the only entry."""
    return [10**18]


@pytest.fixture
def sessions(database_url: str, clock: list[int]) -> Iterator[Sessions]:
    database = open_database(database_url)
    yield Sessions(database, lambda: clock[0])
    database.close()


def test_an_unused_session_ends(sessions: Sessions, clock: list[int]) -> None:
    used, unused = (sessions.create(PASSWORD, None) for _ in range(2))
    clock[0] += (IDLE_S - 60) * 10**9
    assert sessions.find(used, PASSWORDS) is not None
    clock[0] += 120 * 10**9

    user = sessions.find(used, PASSWORDS)

    assert user is not None and (user.role, user.in_session) == (Role.ADMIN, True)
    assert sessions.find(unused, PASSWORDS) is None


def test_a_used_session_ends_too(sessions: Sessions, clock: list[int]) -> None:
    session_id, end_ns = sessions.create(PASSWORD, None), clock[0] + LIFETIME_S * 10**9
    while clock[0] + IDLE_S * 5 * 10**8 < end_ns:
        assert sessions.find(session_id, PASSWORDS) is not None
        clock[0] += IDLE_S * 5 * 10**8
    clock[0] = end_ns

    assert sessions.find(session_id, PASSWORDS) is None


def test_a_session_is_of_its_password(sessions: Sessions) -> None:
    session_id = sessions.create("look", None)
    both = {Role.ADMIN: PASSWORD, Role.VIEWER: "look"}

    user = sessions.find(session_id, both)

    assert user is not None and user.role is Role.VIEWER
    assert sessions.find(session_id, PASSWORDS) is None
    assert sessions.find("\udcff" + session_id[1:], both) is None
    assert sessions.end(session_id) and not sessions.end(session_id)
    assert sessions.find(session_id, both) is None


def test_a_session_is_of_its_token(database_url: str) -> None:
    database = open_database(database_url)
    tokens, sessions = Tokens(database), Sessions(database)
    secret = tokens.create("ci", Role.UPLOADER).secret
    token = tokens.verify(secret)
    assert token is not None
    session_id = sessions.create(secret, token.id)

    user = sessions.find(session_id, PASSWORDS)
    assert user is not None and user.role is Role.UPLOADER and user.name.endswith("of token ci")
    tokens.revoke(token.id)
    assert sessions.find(session_id, PASSWORDS) is None
    assert sessions.end_all() == 1
    database.close()


def test_a_token_that_expires_ends_its_sessions(database_url: str) -> None:
    database, clock = open_database(database_url), [10**18]
    tokens, sessions = Tokens(database, lambda: clock[0]), Sessions(database, lambda: clock[0])
    new, other = tokens.create("ci", Role.VIEWER, lifetime_s=60), tokens.create("wall")
    session_id = sessions.create(new.secret, new.token.id)

    clock[0] += 60 * 10**9 - 1
    assert tokens.verify(new.secret) and sessions.find(session_id, PASSWORDS)
    assert new.token.find_state(clock[0]) == "valid"
    tokens.revoke(other.token.id)
    assert tokens.has_active()
    clock[0] += 1
    assert tokens.verify(new.secret) is None and sessions.find(session_id, PASSWORDS) is None
    assert not tokens.has_active() and new.token.find_state(clock[0]) == "expired"
    assert [one.find_state(clock[0]) for one in tokens.list_tokens()] == ["expired", "revoked"]
    database.close()


def test_the_number_of_sessions_is_bounded(
    sessions: Sessions, clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logins, "MAX_SESSIONS", 3)
    begun = []
    for _ in range(5):
        clock[0] += 10**9
        begun.append(sessions.create(PASSWORD, None))

    assert [sessions.find(one, PASSWORDS) is not None for one in begun] == [False] * 2 + [True] * 3


def _read_cookie(answer: TestResponse) -> str:
    (cookie,) = (one for one in answer.headers.getlist("Set-Cookie") if one.startswith(COOKIE))
    return cookie.partition(";")[0]


def _read_flags(answer: TestResponse) -> set[str]:
    (cookie,) = (one for one in answer.headers.getlist("Set-Cookie") if one.startswith(COOKIE))
    return {flag.strip() for flag in cookie.split(";")[1:] if "Expires" not in flag}
