"""The page of tokens, users and the audit log, which only admins see."""

from __future__ import annotations

import time

import pytest
from support.store_builders import ask_page

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
