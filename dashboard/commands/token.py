"""stepsplit token: secrets that let scripts and people into a dashboard."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer import UsageError
from stepsplit.dashboard.commands.extras import need
from stepsplit.dashboard.commands.store_options import store_option

if TYPE_CHECKING:
    from stepsplit.dashboard.store.tokens import Tokens


@click.group()
def command() -> None:
    """Let scripts into a dashboard, and out again."""


@command.command()
@click.argument("name")
@store_option
def create(name: str, url: str) -> None:
    """Print a new token; nobody can show it again."""
    click.echo(_tokens(url).create(name))


@command.command("list")
@store_option
def list_tokens(url: str) -> None:
    """Print id, name, creation, last use and whether it still lets in."""
    for token in _tokens(url).all():
        used = _when(token.last_used_unix_ns) if token.last_used_unix_ns else "never used"
        state = "revoked" if token.revoked else "valid"
        created = _when(token.created_unix_ns)
        click.echo(f"{token.id}  {state:7}  created {created}  {used:16}  {token.name}")


@command.command()
@click.argument("token_id", metavar="ID")
@store_option
def revoke(token_id: str, url: str) -> None:
    """Let nobody in by this token any more."""
    if not _tokens(url).revoke(token_id):
        raise UsageError(f"no token has the id {token_id}; stepsplit token list shows them")
    click.echo(f"token {token_id} is revoked")


def _tokens(url: str) -> Tokens:
    """The tokens of the store, whose files are left alone."""
    need("sqlalchemy", "dashboard")
    from stepsplit.dashboard.store.database import open_database
    from stepsplit.dashboard.store.tokens import Tokens

    return Tokens(open_database(url))


def _when(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")
