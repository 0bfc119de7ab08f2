"""Users whom a proxy names: from the proxy alone, which shows its secret."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.dashboard_processes import open_store, running_dashboard

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard import cli
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.options import PROXY_SECRET, choose_access, parse_trusted_proxy
from stepsplit.dashboard.web.server import create_server

SECRET = "0123456789abcdef0123456789abcdef"
HOST = {"Host": "traces.example"}
TOKENS = "/api/v1/tokens"
_FORGE = """
import json, sys, urllib.error, urllib.request
url, guess = sys.argv[1:]
for headers in json.loads(guess):
    data = json.dumps({"name": "m", "role": "admin"}).encode()
    headers |= {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url + "/api/v1/tokens", data, headers)
        print(urllib.request.urlopen(request, timeout=30).status)
    except urllib.error.HTTPError as error:
        print(error.code)
"""


@pytest.fixture
def client(store: Store) -> FlaskClient:
    proxy = parse_trusted_proxy("X-Forwarded-User", ["127.0.0.1"], secret=SECRET)
    return create_server(store, choose_access("127.0.0.1", proxy=proxy)).test_client()


def test_a_local_account_that_names_a_user_is_unknown(client: FlaskClient, store: Store) -> None:
    body, forged = {"name": "m", "role": "admin"}, HOST | {"X-Forwarded-User": "root"}
    twice, last, cut = f"{SECRET},{SECRET}", f"x,{SECRET}", SECRET[:-1]
    sent = [{PROXY_SECRET: one} for one in ("", " ", twice, last, cut, SECRET.upper(), "\xff")]

    for guess in ({}, {"Authorization": f"Bearer {SECRET}"}, *sent):
        refused = client.post(TOKENS, json=body, headers=forged | guess)
        assert refused.status_code in (401, 429), guess

    assert store.tokens.list_tokens() == ()


def test_the_proxy_names_its_users_and_their_addresses(client: FlaskClient, store: Store) -> None:
    proxied = HOST | {PROXY_SECRET: SECRET, "X-Forwarded-For": "10.0.0.7"}

    made = client.post(TOKENS, json={"name": "ci"}, headers=proxied | {"X-Forwarded-User": "ada"})

    assert made.status_code == 201
    (entry,) = store.audit.list_entries(5)
    assert (entry.user_name, entry.address) == ("proxy user ada", "10.0.0.7")
    # Who names no user has to log in, and health checks need no secret.
    assert client.get("/", headers=proxied).status_code == 401
    assert client.get("/healthz", headers=HOST).status_code == 200


def test_an_address_that_a_local_account_states_does_not_count(
    client: FlaskClient, store: Store
) -> None:
    for number in range(8):
        spoofed = HOST | {"X-Forwarded-For": f"10.0.0.{number}"}
        client.get("/", headers=spoofed, auth=("me", "guess"))

    assert {one.address for one in store.audit.list_entries(10)} == {"127.0.0.1"}


@pytest.mark.parametrize("secret", [None, "", "short", "with a space in it", "ünïcödé-ünïcödé-ü"])
def test_a_proxy_without_a_secret_is_refused_with_the_fix(secret: str | None) -> None:
    with pytest.raises(UsageError, match="--trusted-proxy-secret-file") as error:
        parse_trusted_proxy("X-Forwarded-User", ["127.0.0.1"], secret=secret)

    assert "\n" not in str(error.value) and not (secret and secret in str(error.value))


def test_the_command_does_not_start_without_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trusted-proxy-header", "X-Forwarded-User", "--trusted-proxy", "127.0.0.1"]
    (tmp_path / "empty").write_text("\n")

    without = cli.run(["dashboard", "--store", f"sqlite:///{tmp_path}/runs.db", *words])
    first = capsys.readouterr().err
    words += ["--trusted-proxy-secret-file", str(tmp_path / "empty")]
    empty = cli.run(["dashboard", "--store", f"sqlite:///{tmp_path}/runs.db", *words])
    second = capsys.readouterr().err

    assert (without, empty, first.count("\n"), second.count("\n")) == (2, 2, 1, 1)
    assert "--trusted-proxy-secret-file" in first and "is empty" in second
    assert not (tmp_path / "runs.db").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user's processes")
def test_a_second_local_user_forges_no_header_of_a_real_server(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    options = ("--workers", "0", "--trusted-proxy-header", "X-Forwarded-User")
    options += ("--trusted-proxy", "127.0.0.1", "--trusted-proxy-secret-file", str(secret))
    forged = [
        '{"X-Forwarded-User": "root"}',
        '{"X_Forwarded_User": "root", "X_Stepsplit_Proxy_Secret": ""}',
        '{"x-forwarded-user": "root", "x-stepsplit-proxy-secret": "guess"}',
        '{"X-Forwarded-User": "root", "X-Forwarded-For": "127.0.0.1"}',
    ]
    with running_dashboard(tmp_path, *options) as dashboard, open_store(tmp_path) as store:
        command = ["/usr/bin/python3", "-c", _FORGE, dashboard.url, f"[{','.join(forged)}]"]
        tried = subprocess.run(
            command, user=65534, cwd="/", env={}, capture_output=True, text=True, check=True
        )

        assert tried.stdout.split() == ["401"] * len(forged)
        assert store.tokens.list_tokens() == ()
        # Nor is the secret in what every account may read.
        assert not any(SECRET in line for line in dashboard.processes().values())
        assert SECRET not in dashboard.log.read_text()
