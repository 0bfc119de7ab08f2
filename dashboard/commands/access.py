"""stepsplit token and audit: who may use a dashboard, and what was done with it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import UsageError
from stepsplit.analyzer.units import format_date
from stepsplit.dashboard.commands.common import (
    ROLE,
    FiniteRange,
    build_json_option,
    claim_store,
    print_line,
    put_json,
    record_command,
    require_package,
    store_option,
)

if TYPE_CHECKING:
    from stepsplit.dashboard.store.database import Database

# stepsplit token: access tokens of a dashboard.


@click.group()
def token_command() -> None:
    """Create, list and revoke access tokens of a dashboard."""


@token_command.command()
@click.argument("name")
@click.option("--role", type=ROLE, default="uploader", show_default=True,
              help="What it may do: read, also upload, or also delete.")  # fmt: skip
@click.option("--days", type=FiniteRange(0, 36_500, min_open=True), metavar="N",
              help="Let it expire after N days. Default: when it is revoked.")  # fmt: skip
@store_option
def create(name: str, role: str, days: float | None, url: str) -> None:
    """Create a token and print it; it cannot be shown again."""
    database = _open_database(url)
    from stepsplit.dashboard.store.audit import AuditLog
    from stepsplit.dashboard.store.logins import DAY_S, Role, Tokens

    lifetime_s = None if days is None else days * DAY_S
    new = Tokens(database).create(name, Role.parse(role) or Role.VIEWER, lifetime_s)
    record_command(AuditLog(database), "token created", new.token.label)
    print_line(new.secret)


@token_command.command("list")
@store_option
def list_tokens(url: str) -> None:
    """Print the id, state, role, creation, last use, expiry and name of each token."""
    database = _open_database(url)
    from stepsplit.dashboard.store.logins import Tokens

    for token in Tokens(database).list_tokens():
        last_ns, expires_ns = token.last_used_unix_ns, token.expires_unix_ns
        used = format_date(last_ns) if last_ns else "never used"
        expires = "does not expire" if expires_ns is None else f"until {format_date(expires_ns)}"
        state, created = token.find_state(time.time_ns()), format_date(token.created_unix_ns)
        print_line(
            f"{token.id}  {state:7}  {token.role.label:8}  created {created}  {used:16}"
            f"  {expires:22}  {token.name}"
        )


@token_command.command()
@click.argument("token_id", metavar="ID")
@store_option
def revoke(token_id: str, url: str) -> None:
    """Revoke a token."""
    database = _open_database(url)
    from stepsplit.dashboard.store.audit import AuditLog
    from stepsplit.dashboard.store.logins import Tokens

    if not Tokens(database).revoke(token_id):
        raise UsageError(f"no token has the id {token_id}; list them with stepsplit token list")
    record_command(AuditLog(database), "token revoked", token_id)
    print_line(f"token {token_id} is revoked")


def _open_database(url: str) -> Database:
    """Opens the store without opening its artifacts."""
    require_package("sqlalchemy", "dashboard")
    from stepsplit.dashboard.store.database import open_database

    claim_store(url)
    return open_database(url)


# stepsplit audit: what was done with a store, and by whom.


@click.command()
@click.option("--since", metavar="DATE", help="From this date or time (UTC), such as 2026-11-30.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", default=100, show_default=True,
              help="The newest entries only.")  # fmt: skip
@build_json_option("Write the log as JSON; - for standard output.")
@store_option
def audit_command(since: str | None, last: int, json_file: str | None, url: str) -> None:
    """Print the audit log: logins, uploads, deletions, tokens.

    One line for each entry, oldest first: time (UTC), action, user, role, address, target, and why
    it was refused. Entries are kept for a year, at most 100,000 of them and 10,000 refused ones.
    """
    database = _open_database(url)
    from stepsplit.dashboard.store.audit import (
        OK,
        AuditLog,
        audit_to_json,
        format_time,
        parse_since,
    )

    since_ns = parse_since(since) if since is not None else 0
    entries = AuditLog(database).list_entries(last, since_ns)
    if not put_json(entries, audit_to_json, json_file):
        for one in reversed(entries):
            user = f"{one.user_name} ({one.role})" if one.role else one.user_name
            parts = [format_time(one.at_unix_ns), f"{one.action:14}", user, one.address, one.target]
            parts += [] if one.outcome == OK else [f"refused: {one.outcome}"]
            parts += [] if one.count == 1 else [f"{one.count} times"]
            print_line("  ".join(part for part in parts if part))
