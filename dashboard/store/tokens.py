"""Tokens that let scripts in: shown once, of which only a hash is kept."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select, update
from sqlalchemy.engine import Connection

from stepsplit.dashboard.store.database import TOKENS, Database, plain

PREFIX = "sst_"
_USED_EVERY_NS = 60 * 10**9


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token; last_used_unix_ns is to a minute, None for never."""

    id: str
    name: str
    created_unix_ns: int
    last_used_unix_ns: int | None
    revoked: bool


class Tokens:
    """The tokens of a store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str) -> str:
        """A new token, to be shown once: nobody can read it from the store."""
        secret = PREFIX + secrets.token_urlsafe(32)
        row = {"id": uuid.uuid4().hex[:8], "name": plain(name, 200), "sha256": _hash(secret)}
        with self._database.writing() as connection:
            new = insert(TOKENS).values(row | {"created_unix_ns": time.time_ns(), "revoked": False})
            connection.execute(new)
        return secret

    def all(self) -> tuple[Token, ...]:
        """The tokens, oldest first, revoked ones too."""
        columns = [TOKENS.c[name] for name in Token.__dataclass_fields__]
        with self._database.reading() as connection:
            rows = connection.execute(select(*columns).order_by(TOKENS.c.created_unix_ns))
            return tuple(Token(*row) for row in rows)

    def any(self) -> bool:
        """Whether there is one that lets somebody in."""
        counted = select(func.count()).select_from(TOKENS).where(TOKENS.c.revoked.is_(False))
        with self._database.reading() as connection:
            return bool(connection.execute(counted).scalar())

    def revoke(self, token_id: str) -> bool:
        """From now on it lets nobody in. False where there is none of this id."""
        with self._database.writing() as connection:
            return _set(connection, TOKENS.c.id == token_id, revoked=True)

    def accepts(self, secret: str) -> bool:
        """Whether this is a token that was not revoked; notes that it was used."""
        if not secret.startswith(PREFIX):
            return False
        of_secret = TOKENS.c.sha256 == _hash(secret)
        known = select(TOKENS.c.last_used_unix_ns).where(of_secret, TOKENS.c.revoked.is_(False))
        with self._database.reading() as connection:
            row = connection.execute(known).one_or_none()
        if row is None:
            return False
        self._used(of_secret, row.last_used_unix_ns)
        return True

    def _used(self, of_secret: ColumnElement[bool], before: int | None) -> None:
        now = time.time_ns()
        if before is None or before < now - _USED_EVERY_NS:
            with self._database.writing() as connection:
                _set(connection, of_secret, last_used_unix_ns=now)


def _set(connection: Connection, which: ColumnElement[bool], **values: Any) -> bool:
    return bool(connection.execute(update(TOKENS).where(which).values(values)).rowcount)


def _hash(secret: str) -> str:
    # A token is as long as its hash: there is nothing to guess, so nothing to slow down.
    return hashlib.sha256(secret.encode()).hexdigest()
