"""The page of tokens, users and the audit log, which only admins see."""

from __future__ import annotations

import time

import pytest
from support.store_builders import ask_page

from stepsplit.dashboard.store.audit import AuditLog
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.auth import Access
from stepsplit.dashboard.web.server import create_server

HOST = {"Host": "traces.example"}


@pytest.mark.parametrize("role", list(Role), ids=lambda role: role.label)
def test_only_admins_read_tokens_users_and_the_audit_log(store: Store, role: Role) -> None:
    client = create_server(store, Access(local=False, guarded=True)).test_client()
    own = store.tokens.create("mine", role)
    secret = {**HOST, "Authorization": f"Bearer {own.secret}"}
    revoked = store.tokens.create("old one", Role.VIEWER)
    store.tokens.revoke(revoked.token.id)
    store.audit.record("run deleted", "abc <b>x</b>", user_name="token ann", role="admin")
    store.audit.record("upload", "", user_name="token bob", role="viewer", outcome="refused: role")

    page = ask_page(client, "/access", **secret)

    words = ("old one", own.token.id, "revoked", "token ann", "run deleted", "token bob")
    if role is Role.ADMIN:
        for word in words:
            assert word in page, word
        assert own.secret not in page and "refused: role" in page
        # A range of time without an entry.
        later = time.strftime("%Y-%m-%d %H:%M", time.gmtime(time.time() + 7200))
        assert "run deleted" not in ask_page(client, "/access", f"?from={later}", **secret)
    else:
        assert "Only admins see this page" in page
        assert not any(word in page for word in words)
    menu = client.get("/_dash-layout", headers=secret).text
    assert ("/access" in menu.replace("\\u002f", "/")) == (role is Role.ADMIN)


def test_a_range_of_the_audit_log_is_read_whole_however_much_came_after(store: Store) -> None:
    now_ns = [1_700_000_000 * 10**9]
    log = AuditLog(store._database, lambda: now_ns[0])
    log.record("run deleted", "the one that is looked for", user_name="ann")
    now_ns[0] += 3_600 * 10**9
    for number in range(520):
        log.record("upload", str(number), user_name="ci")
    client = create_server(store).test_client()

    page = ask_page(client, "/access", "?from=2023-11-14 22:00&to=2023-11-14 22:30")

    assert "the one that is looked for" in page
    assert "the one that is looked for" not in ask_page(client, "/access")
    # Times beyond what the database can hold.
    assert "Audit log" in ask_page(client, "/access", "?to=2300-01-01")
    assert "No entry in this range" in ask_page(client, "/access", "?from=2300-01-01&to=9000-01-01")


def test_a_server_without_logins_names_the_command_instead_of_a_form(store: Store) -> None:
    page = ask_page(create_server(store).test_client(), "/access")

    assert "stepsplit token create NAME" in page and "token-create" not in page
