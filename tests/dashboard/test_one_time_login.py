"""The address with a token that works once, and on which hosts there is one."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from flask.testing import FlaskClient

from stepsplit.dashboard import cli
from stepsplit.dashboard.store.database import open_database
from stepsplit.dashboard.store.logins import IDLE_S, Role, Sessions
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web import shared_host
from stepsplit.dashboard.web.auth import find_first_place
from stepsplit.dashboard.web.options import Access, choose_access
from stepsplit.dashboard.web.server import create_server

HOST = {"Host": "127.0.0.1:8050"}
ANOTHER = os.getuid() + 1000


@pytest.fixture
def access() -> Access:
    return choose_access("127.0.0.1", one_time_login=True)


def _client(store: Store, access: Access) -> FlaskClient:
    return create_server(store, access).test_client()


def test_the_address_logs_in_once(
    store: Store, access: Access, caplog: pytest.LogCaptureFixture
) -> None:
    client, other = _client(store, access), _client(store, access)
    place = find_first_place(store, access, "/run/0123456789ab")
    assert client.get("/", headers=HOST).status_code == 401

    with caplog.at_level(logging.DEBUG):
        # A preview of the link is no login, nor is the token another secret.
        assert client.head(place, headers=HOST).status_code == 200
        token = parse_qs(urlsplit(place).query)["token"][0]
        as_cookie = HOST | {"Cookie": f"stepsplit-session-8050={token}"}
        plain = create_server(store, access).test_client(use_cookies=False)
        assert plain.get("/", headers=as_cookie).status_code == 401
        bearer = HOST | {"Authorization": f"Bearer {token}"}
        assert plain.get("/", headers=bearer).status_code == 401
        opened = client.get(place, headers=HOST)
        again = other.get(place, headers=HOST)

    assert (opened.status_code, opened.headers["Location"]) == (303, "/run/0123456789ab")
    assert opened.headers["Cache-Control"] == "private, no-store"
    flags = opened.headers["Set-Cookie"]
    assert flags.startswith("stepsplit-session-8050=") and token not in flags
    assert "HttpOnly" in flags and "SameSite=Strict" in flags
    assert client.get("/api/v1/audit", headers=HOST).status_code == 200
    assert (again.status_code, "used before" in again.text) == (401, True)
    assert other.get("/", headers=HOST).status_code == 401
    assert token not in caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert token.encode() not in Path(store.url.removeprefix("sqlite:///")).read_bytes()
    # Who is logged in and opens the address again goes on.
    assert client.get(place, headers=HOST).headers["Location"] == "/run/0123456789ab"


def test_another_token_does_not_log_in(store: Store, access: Access) -> None:
    find_first_place(store, access)
    client = _client(store, access)

    for token in ("", "x", "%00", "%ff%fe", "a" * 43, "a" * 9000):
        refused = client.get(f"/login?token={token}", headers=HOST)
        assert (refused.status_code, "Set-Cookie" in refused.headers) == (401, False), token


def test_the_address_leads_to_this_server_only(store: Store, access: Access) -> None:
    client = _client(store, access)

    for elsewhere in ("//evil.example", "https://evil.example", "/\\evil.example"):
        place = f"{find_first_place(store, access)}&next={elsewhere}"
        assert client.get(place, headers=HOST).headers["Location"] == "/"


def test_a_session_of_before_is_not_taken_over(store: Store, access: Access) -> None:
    client, fixed = _client(store, access), HOST | {"Cookie": "stepsplit-session-8050=fixed"}
    client.set_cookie("stepsplit-session-8050", "fixed", domain="127.0.0.1")
    client.get(find_first_place(store, access), headers=HOST)

    plain = create_server(store, access).test_client(use_cookies=False)
    assert plain.get("/", headers=fixed).status_code == 401
    assert client.get("/", headers=HOST).status_code == 200


def test_a_restart_ends_the_address_and_its_session(store: Store, access: Access) -> None:
    unused, client = find_first_place(store, access), _client(store, access)
    client.get(find_first_place(store, access), headers=HOST)
    cookie = client.get_cookie("stepsplit-session-8050", domain="127.0.0.1")
    assert cookie is not None

    later = create_server(store, choose_access("127.0.0.1", one_time_login=True))

    plain = later.test_client(use_cookies=False)
    kept = HOST | {"Cookie": f"stepsplit-session-8050={cookie.value}"}
    assert plain.get("/", headers=kept).status_code == 401
    assert plain.get(unused, headers=HOST).status_code == 401


def test_scripts_of_the_same_user_have_tokens(store: Store, access: Access) -> None:
    secret = store.tokens.create("ci", Role.UPLOADER).secret
    headers = HOST | {"Authorization": f"Bearer {secret}"}

    assert _client(store, access).get("/api/v1/runs", headers=headers).status_code == 200


def test_of_many_at_once_one_logs_in(database_url: str, tmp_path: Path) -> None:
    """As two processes do, each with its own connections."""
    stores = [Store.open(database_url, tmp_path / "artifacts") for _ in range(2)]
    token = stores[0].sessions.create_one_time("password")

    with ThreadPoolExecutor(8) as pool:
        redeem = [stores[number % 2].sessions.redeem for number in range(16)]
        begun = list(pool.map(lambda one: one(token, "password"), redeem))

    (session_id,) = (one for one in begun if one is not None)
    assert stores[1].sessions.find(session_id, {Role.ADMIN: "password"}) is not None
    for one in stores:
        one.close()


def test_an_unused_address_ends(database_url: str) -> None:
    database, clock = open_database(database_url), [10**18]
    sessions = Sessions(database, lambda: clock[0])
    token = sessions.create_one_time("password")
    clock[0] += IDLE_S * 10**9

    assert sessions.redeem(token, "password") is None
    database.close()


# On which hosts.


def test_others_on_the_host_make_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_host, "has_other_users", lambda: True)

    shared = choose_access("127.0.0.1", one_time_login=None)
    by_password = choose_access("127.0.0.1", one_time_login=None, password="adm")
    stated = choose_access("127.0.0.1", one_time_login=False)
    monkeypatch.setattr(shared_host, "has_other_users", lambda: False)
    alone = choose_access("127.0.0.1", one_time_login=None)

    assert (shared.guarded, shared.one_time, len(shared.passwords[Role.ADMIN])) == (True, True, 43)
    assert (by_password.one_time, dict(by_password.passwords)) == (False, {Role.ADMIN: "adm"})
    assert stated == alone == Access()


@pytest.mark.parametrize(
    ("init", "line", "switch", "expected"),
    [
        ("runit", f"eve:x:{ANOTHER}:100::/home/eve:/bin/bash", "files", True),
        ("systemd", f"eve:x:{ANOTHER}:100::/home/eve:/bin/bash", "files", True),
        ("systemd", f"eve:x:{ANOTHER}:100::/home/eve:/usr/sbin/nologin", "files", False),
        ("systemd", "www-data:x:33:33::/var/www:/bin/sh", "files systemd", False),
        ("systemd", "spare:x:65534:65534::/:/bin/sh", "files", False),
        ("systemd", f"me:x:{os.getuid()}:100::/home/me:/bin/bash", "files", False),
        ("systemd", "torn:x", "files sss", True),
    ],
)
def test_a_host_is_shared_if_others_may_log_in(
    tmp_path: Path, init: str, line: str, switch: str, expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {
        "proc/1/comm": init, "etc/passwd": f"{line}\n", "etc/nsswitch.conf": f"passwd: {switch}\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert shared_host.has_other_users(tmp_path) is expected


@pytest.mark.parametrize(
    ("programs", "device", "expected"),
    [
        (("bash",), False, False),
        (("systemd",), False, True),
        (("bash", "sshd"), False, True),
        (("bash",), True, True),
        (("bash", "kthreadd"), True, True),
        (("bash", "kthreadd"), False, True),
    ],
    ids=["own network", "init", "sshd", "network of the host", "machine", "machine, no network"],
)
def test_accounts_of_an_image_count_where_people_may_use_them(
    tmp_path: Path, programs: tuple[str, ...], device: bool, expected: bool
) -> None:
    _build_container(tmp_path, programs, device)
    (tmp_path / "etc").mkdir()
    line = f"ubuntu:x:{ANOTHER}:100::/home/ubuntu:/bin/bash\n"
    (tmp_path / "etc/passwd").write_text(line)

    assert shared_host.has_other_users(tmp_path) is expected


@pytest.mark.parametrize(
    ("programs", "expected"), [(("bash",), True), (("bash", "kthreadd"), False)]
)
def test_the_accounts_of_a_containers_host_are_unknown(
    tmp_path: Path, programs: tuple[str, ...], expected: bool
) -> None:
    """With the network of its host; a machine that was made of an image lists all of its own."""
    _build_container(tmp_path, programs, device=True)

    assert shared_host.has_other_users(tmp_path) is expected


def _build_container(root: Path, programs: tuple[str, ...], device: bool) -> None:
    (root / ".dockerenv").touch()
    for number, program in enumerate(programs, 1):
        (root / f"proc/{number}").mkdir(parents=True)
        (root / f"proc/{number}/comm").write_text(f"{program}\n")
    (root / "sys/class/net/eth0" / ("device" if device else "")).mkdir(parents=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of others")
def test_a_process_of_another_account_makes_a_host_shared(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    os.chown(tmp_path / "proc/7", ANOTHER, -1)

    assert shared_host.has_other_users(tmp_path)


def test_the_commands_print_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "stepsplit.dashboard.web.serve.serve",
        lambda *_, ready, **__: ready("http://127.0.0.1:8050"),
    )
    words = ["dashboard", "--store", f"sqlite:///{tmp_path}/runs.db"]
    words += ["--artifacts", str(tmp_path / "artifacts")]

    for option in ("--one-time-login", "--open-to-this-host"):
        assert cli.run([*words, option]) == 0

    once, open_to_host = capsys.readouterr().out.splitlines()
    assert once.startswith("dashboard: http://127.0.0.1:8050/login?token=")
    assert open_to_host == "dashboard: http://127.0.0.1:8050   (Ctrl-C ends it)"
