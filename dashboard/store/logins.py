"""Who may use a store: roles, tokens, sessions, and waits after failed logins."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Literal, Self

from sqlalchemy import ColumnElement, Row, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from stepsplit.dashboard.store.database import (
    LOGIN_FAILURES,
    SESSIONS,
    TOKENS,
    Database,
    clean_text,
)

_SECOND_NS = 10**9

_USED_EVERY_NS = 60 * _SECOND_NS
"""The last use of a token or session is recorded at most this often."""

# Roles and users.


class Role(IntEnum):
    """What a user may do; each role may do what those before it may.

    A viewer reads, an uploader adds runs, an admin deletes them and reads the audit log.
    """

    VIEWER = 1
    UPLOADER = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """Its name in options, the database and messages."""
        return self.name.lower()

    @classmethod
    def parse(cls, label: str) -> Self | None:
        """The role of this label; None if there is none."""
        return next((role for role in cls if role.label == label), None)


ROLES = tuple(role.label for role in Role)


@dataclass(frozen=True, slots=True)
class User:
    """Who sends a request: a name for the audit log, and a role.

    token_id: of the token that was sent, or entered to log in. in_session: logged in by the form,
    so able to log out. authenticated: by a secret or a proxy, not just let in because everybody is.
    """

    name: str
    role: Role
    token_id: str | None = None
    in_session: bool = False
    authenticated: bool = True


# API tokens for scripts: shown once, stored as a hash.

PREFIX = "sst_"

TOKEN_NAME_LENGTH = 200

DAY_S, MAX_TOKEN_DAYS = 86_400, 36_500


@dataclass(frozen=True, slots=True)
class Token:
    """A stored token; last_used_unix_ns has a resolution of a minute, None for never, as has
    expires_unix_ns."""

    id: str
    name: str
    created_unix_ns: int
    last_used_unix_ns: int | None
    revoked: bool
    role: Role
    expires_unix_ns: int | None = None

    @property
    def label(self) -> str:
        """Its id, name and role, for the audit log."""
        return f"{self.id} {self.name} ({self.role.label})"

    def find_state(self, now_ns: int) -> Literal["valid", "revoked", "expired"]:
        """Whether it is valid at this time."""
        if self.revoked:
            return "revoked"
        return "expired" if (self.expires_unix_ns or now_ns + 1) <= now_ns else "valid"


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token just created, and its secret, which is not stored."""

    token: Token
    secret: str = field(repr=False)


class Tokens:
    """The tokens of a store."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def create(
        self, name: str, role: Role = Role.UPLOADER, lifetime_s: float | None = None
    ) -> NewToken:
        """Creates a token, whose secret is to be shown once: only its hash is stored. Without a
        lifetime it is valid until it is revoked."""
        secret, now_ns = PREFIX + secrets.token_urlsafe(32), self._now_ns()
        shown_name = clean_text(name, TOKEN_NAME_LENGTH)
        expires_ns = None if lifetime_s is None else now_ns + int(lifetime_s * _SECOND_NS)
        token = Token(uuid.uuid4().hex[:8], shown_name, now_ns, None, False, role, expires_ns)
        row = asdict(token) | {"role": role.label, "sha256": _hash(secret)}
        with self._database.begin_write() as connection:
            connection.execute(insert(TOKENS).values(row))
        return NewToken(token, secret)

    def list_tokens(self) -> tuple[Token, ...]:
        """All tokens including revoked and expired ones, oldest first."""
        with self._database.begin_read() as connection:
            rows = connection.execute(_SELECT_TOKENS.order_by(TOKENS.c.created_unix_ns))
            return tuple(_read_token(row) for row in rows)

    def has_active(self) -> bool:
        """Whether there is a valid token."""
        counted = select(func.count()).select_from(TOKENS).where(_is_valid(self._now_ns()))
        with self._database.begin_read() as connection:
            return bool(connection.execute(counted).scalar())

    def revoke(self, token_id: str) -> bool:
        """Revokes the token, which ends its sessions. False if there is none of this id."""
        with self._database.begin_write() as connection:
            return _update_token(connection, TOKENS.c.id == token_id, revoked=True)

    def verify(self, secret: str) -> Token | None:
        """The valid token that the secret is, and records its use; None if it is none."""
        if not secret.startswith(PREFIX):
            return None
        of_secret = TOKENS.c.sha256 == _hash(secret)
        with self._database.begin_read() as connection:
            valid = _SELECT_TOKENS.where(of_secret, _is_valid(self._now_ns()))
            row = connection.execute(valid).one_or_none()
        if row is None:
            return None
        self._record_use(of_secret, row.last_used_unix_ns)
        return _read_token(row)

    def _record_use(self, of_secret: ColumnElement[bool], last_used_ns: int | None) -> None:
        now = self._now_ns()
        if last_used_ns is None or last_used_ns < now - _USED_EVERY_NS:
            with self._database.begin_write() as connection:
                _update_token(connection, of_secret, last_used_unix_ns=now)


_SELECT_TOKENS = select(*(TOKENS.c[name] for name in Token.__dataclass_fields__))


def _read_token(row: Row[Any]) -> Token:
    times = (row.created_unix_ns, row.last_used_unix_ns)
    return Token(row.id, row.name, *times, row.revoked, _read_role(row.role), row.expires_unix_ns)


def _is_valid(now_ns: int) -> ColumnElement[bool]:
    expires = TOKENS.c.expires_unix_ns
    return TOKENS.c.revoked.is_(False) & (expires.is_(None) | (expires > now_ns))


def _read_role(label: str) -> Role:
    return Role.parse(label) or Role.VIEWER


def _update_token(connection: Connection, which: ColumnElement[bool], **values: Any) -> bool:
    return bool(connection.execute(update(TOKENS).where(which).values(values)).rowcount)


def _hash(secret: str) -> str:
    # A plain hash is enough: the secret is random and as long as its hash.
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


# Sessions: a random id in the browser, its hash in the database.

IDLE_S, LIFETIME_S = 12 * 3_600, 7 * 86_400
"""A session ends when it was not used for so long, and in any case after so long."""

MAX_SESSIONS = 10_000
"""Beyond these, the sessions that were not used for longest end."""


class Sessions:
    """The sessions of a store. Thread-safe; all processes of the store share them."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def create(self, secret: str, token_id: str | None) -> str:
        """Begins a session of who has entered the secret, which is the password, or the token of
        this id. Returns the session's id, which only the browser keeps."""
        session_id, now_ns = secrets.token_urlsafe(32), self._now_ns()
        proof = _prove(session_id, secret) if token_id is None else None
        times = {"created_unix_ns": now_ns, "last_used_unix_ns": now_ns}
        row = {"sha256": _hash(session_id), "token_id": token_id, "proof": proof} | times
        with self._database.begin_write() as connection:
            connection.execute(insert(SESSIONS).values(row))
            _drop_old_sessions(connection, now_ns)
        return session_id

    def find(self, session_id: str, passwords: Mapping[Role, str]) -> User | None:
        """The user of the session, and records its use. None if it has ended, or if its token is no
        longer valid or its password is none of these."""
        now_ns = self._now_ns()
        valid = _is_valid(now_ns).label("valid")
        fields = (*SESSIONS.c, TOKENS.c.name, TOKENS.c.role, valid)
        tables = SESSIONS.outerjoin(TOKENS, SESSIONS.c.token_id == TOKENS.c.id)
        found = select(*fields).select_from(tables).where(SESSIONS.c.sha256 == _hash(session_id))
        with self._database.begin_read() as connection:
            row = connection.execute(found.where(_is_current(now_ns))).one_or_none()
        user = None if row is None else _read_user(row, session_id, passwords)
        if row is not None and user is not None:
            self._record_use(row.sha256, row.last_used_unix_ns, now_ns)
        return user

    def end(self, session_id: str) -> bool:
        """Ends the session. False if there is none of this id."""
        ended = delete(SESSIONS).where(SESSIONS.c.sha256 == _hash(session_id))
        with self._database.begin_write() as connection:
            return bool(connection.execute(ended).rowcount)

    def end_all(self) -> int:
        """Ends all sessions, and returns their number."""
        with self._database.begin_write() as connection:
            return connection.execute(delete(SESSIONS)).rowcount

    def _record_use(self, sha256: str, last_used_ns: int, now_ns: int) -> None:
        if last_used_ns < now_ns - _USED_EVERY_NS:
            used = update(SESSIONS).where(SESSIONS.c.sha256 == sha256)
            with self._database.begin_write() as connection:
                connection.execute(used.values(last_used_unix_ns=now_ns))


def _prove(session_id: str, password: str) -> str:
    # Keyed with the session's id, which the database does not have: it reveals no password.
    return hmac.new(session_id.encode("utf-8", "replace"), password.encode(), "sha256").hexdigest()


def _is_current(now_ns: int) -> ColumnElement[bool]:
    is_used = SESSIONS.c.last_used_unix_ns > now_ns - IDLE_S * _SECOND_NS
    return is_used & (SESSIONS.c.created_unix_ns > now_ns - LIFETIME_S * _SECOND_NS)


def _read_user(row: Row[Any], session_id: str, passwords: Mapping[Role, str]) -> User | None:
    name = f"session {row.sha256[:8]}"
    if row.token_id is not None:
        of_token = User(
            f"{name} of token {row.name}", _read_role(row.role), row.token_id, in_session=True
        )
        return of_token if row.valid else None
    for role, password in passwords.items():
        if hmac.compare_digest(row.proof, _prove(session_id, password)):
            return User(name, role, in_session=True)
    return None


def _drop_old_sessions(connection: Connection, now_ns: int) -> None:
    connection.execute(delete(SESSIONS).where(~_is_current(now_ns)))
    latest = select(SESSIONS.c.last_used_unix_ns).order_by(SESSIONS.c.last_used_unix_ns.desc())
    oldest = connection.execute(latest.offset(MAX_SESSIONS).limit(1)).scalar()
    if oldest is not None:
        connection.execute(delete(SESSIONS).where(SESSIONS.c.last_used_unix_ns <= oldest))


# Failed logins, counted across processes, and how long the next guess has to wait.

FORGET_S = 3_600
"""Failures count until there was none for this long."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """What a guess was made at or from, such as an address.

    After `free` failures the next guess waits 1 s, and twice as long after each further one, up to
    max_wait_s.
    """

    key: str
    free: int
    max_wait_s: int

    def compute_wait_s(self, failures: int) -> int:
        """Seconds until the next guess."""
        if failures < self.free:
            return 0
        return min(1 << min(failures - self.free, 30), self.max_wait_s)


class LoginFailures:
    """The failed logins of a store. Thread-safe; all processes of the store share them."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def compute_wait_s(self, guessed: Sequence[Guessed]) -> float:
        """Seconds until all of these accept a guess; 0 if they do."""
        keys = [one.key for one in guessed]
        until = select(func.max(LOGIN_FAILURES.c.blocked_until_unix_ns))
        with self._database.begin_read() as connection:
            last = connection.execute(until.where(LOGIN_FAILURES.c.key.in_(keys))).scalar()
        return max(0, (last or 0) - self._now_ns()) / _SECOND_NS

    def record(self, guessed: Sequence[Guessed]) -> None:
        """Records a failed login."""
        now_ns = self._now_ns()
        too_old = LOGIN_FAILURES.c.last_unix_ns < now_ns - FORGET_S * _SECOND_NS
        with self._database.begin_write() as connection:
            connection.execute(delete(LOGIN_FAILURES).where(too_old))
            # In one order, so that two processes do not wait for each other.
            for one in sorted(guessed, key=lambda one: one.key):
                _count_failure(connection, one, now_ns)


def _count_failure(connection: Connection, guessed: Guessed, now_ns: int) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    empty = {"failures": 0, "last_unix_ns": now_ns, "blocked_until_unix_ns": 0}
    new = dialect.insert(LOGIN_FAILURES).values(key=guessed.key, **empty)
    connection.execute(new.on_conflict_do_nothing())
    of_key = update(LOGIN_FAILURES).where(LOGIN_FAILURES.c.key == guessed.key)
    counted = of_key.values(failures=LOGIN_FAILURES.c.failures + 1, last_unix_ns=now_ns)
    failures = connection.execute(counted.returning(LOGIN_FAILURES.c.failures)).scalar_one()
    until_ns = now_ns + guessed.compute_wait_s(failures) * _SECOND_NS
    connection.execute(of_key.values(blocked_until_unix_ns=until_ns))
