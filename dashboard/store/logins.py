"""Who may use a store: roles, tokens, sessions, and waits after failed logins."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal

from sqlalchemy import ColumnElement, Table, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from stepsplit.dashboard.store.database import Database
from stepsplit.dashboard.store.ids import clean_text
from stepsplit.dashboard.store.schema import LOGIN_FAILURES, SESSIONS, TOKENS

_SECOND_NS = 10**9


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
    def parse(cls, label: str) -> Role | None:
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


class _Secrets:
    """A table of secrets, each stored as its hash. Thread-safe; all processes of the store share
    it."""

    table: Table

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def _change(self, statement: Any) -> int:
        """Executes the statement, and returns the number of rows that it changed."""
        with self._database.begin_write() as connection:
            return connection.execute(statement).rowcount

    def _record_use(self, secret: str, last_used_ns: int | None) -> None:
        # At most once a minute: a page has dozens of requests, and each write is one of the disk.
        if (now_ns := self._now_ns()) > (last_used_ns or 0) + 60 * _SECOND_NS:
            used = update(self.table).where(self.table.c.sha256 == _hash(secret))
            self._change(used.values(last_used_unix_ns=now_ns))


def _hash(secret: str) -> str:
    # A plain hash is enough: the secret is random and as long as its hash.
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


# API tokens for scripts: shown once.

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


class Tokens(_Secrets):
    """The tokens of a store."""

    table = TOKENS

    def create(
        self, name: str, role: Role = Role.UPLOADER, lifetime_s: float | None = None
    ) -> NewToken:
        """Creates a token, whose secret is to be shown once. Without a lifetime it does not
        expire."""
        secret, now_ns = PREFIX + secrets.token_urlsafe(32), self._now_ns()
        expires_ns = None if lifetime_s is None else now_ns + int(lifetime_s * _SECOND_NS)
        shown_name = clean_text(name, TOKEN_NAME_LENGTH)
        token = Token(uuid.uuid4().hex[:8], shown_name, now_ns, None, False, role, expires_ns)
        row = asdict(token) | {"role": role.label, "sha256": _hash(secret)}
        self._change(insert(TOKENS).values(row))
        return NewToken(token, secret)

    def list_tokens(self, *which: ColumnElement[bool]) -> tuple[Token, ...]:
        """The tokens, by default also revoked and expired ones, oldest first."""
        columns = [TOKENS.c[one.name] for one in fields(Token)]
        found = select(*columns).where(*which).order_by(TOKENS.c.created_unix_ns)
        with self._database.begin_read() as connection:
            rows = [row._asdict() for row in connection.execute(found)]
        return tuple(Token(**row | {"role": _read_role(row["role"])}) for row in rows)

    def has_active(self) -> bool:
        """Whether there is a valid token."""
        return bool(self.list_tokens(_is_valid(self._now_ns())))

    def revoke(self, token_id: str) -> bool:
        """Revokes the token, which ends its sessions. False if there is none of this id."""
        return self._change(update(TOKENS).where(TOKENS.c.id == token_id).values(revoked=True)) > 0

    def verify(self, secret: str) -> Token | None:
        """The valid token that the secret is, and records its use; None if it is none."""
        if not secret.startswith(PREFIX):
            return None
        found = self.list_tokens(TOKENS.c.sha256 == _hash(secret), _is_valid(self._now_ns()))
        if not found:
            return None
        self._record_use(secret, found[0].last_used_unix_ns)
        return found[0]


def _is_valid(now_ns: int) -> ColumnElement[bool]:
    expires = TOKENS.c.expires_unix_ns
    return TOKENS.c.revoked.is_(False) & (expires.is_(None) | (expires > now_ns))


def _read_role(label: str) -> Role:
    return Role.parse(label) or Role.VIEWER


# Sessions: a random id in the browser, its hash in the database.

IDLE_S, LIFETIME_S = 12 * 3_600, 7 * 86_400
"""A session ends when it was not used for so long, and in any case after so long."""

MAX_SESSIONS = 10_000
"""Beyond these, the sessions that were not used for longest end."""


class Sessions(_Secrets):
    """The sessions of a store, and the one-time tokens that begin one."""

    table = SESSIONS

    def create(self, secret: str, token_id: str | None) -> str:
        """Begins a session of who has entered the secret, which is the password, or the token of
        this id. Returns the session's id, which only the browser keeps."""
        session_id = secrets.token_urlsafe(32)
        self._add(session_id, None if token_id else _prove(session_id, secret), token_id)
        return session_id

    def create_one_time(self, password: str) -> str:
        """A token that begins one session of this password; unused, it ends as a session does."""
        token = secrets.token_urlsafe(32)
        self._add(token, _prove(f"once {token}", password), None)
        return token

    def redeem(self, token: str, password: str) -> str | None:
        """Begins the session of the one-time token; None if it was used before or is none."""
        session_id, now_ns = secrets.token_urlsafe(32), self._now_ns()
        # One statement: of two processes with the same token, the second finds no row.
        of_token = update(SESSIONS).where(
            SESSIONS.c.sha256 == _hash(token),
            SESSIONS.c.proof == _prove(f"once {token}", password),
            _is_current(now_ns),
        )
        new = {"sha256": _hash(session_id), "proof": _prove(session_id, password)}
        times = {"created_unix_ns": now_ns, "last_used_unix_ns": now_ns}
        return session_id if self._change(of_token.values(new | times)) else None

    def find(self, session_id: str, passwords: Mapping[Role, str]) -> User | None:
        """The user of the session, and records its use. None if it has ended, or if its token is no
        longer valid or its password is none of these."""
        now_ns = self._now_ns()
        # With its token in one query, so that the sessions of a revoked token end with it.
        columns = (*SESSIONS.c, TOKENS.c.name, TOKENS.c.role, _is_valid(now_ns).label("valid"))
        joined = SESSIONS.outerjoin(TOKENS, SESSIONS.c.token_id == TOKENS.c.id)
        found = select(*columns).select_from(joined)
        current = found.where(SESSIONS.c.sha256 == _hash(session_id), _is_current(now_ns))
        with self._database.begin_read() as connection:
            row = connection.execute(current).one_or_none()
        if row is None:
            return None
        name, role = f"session {row.sha256[:8]}", None
        if row.token_id is None:
            # The password is not stored: a session is of the one whose proof it has, and ends when
            # that is changed.
            roles = {_prove(session_id, password): role for role, password in passwords.items()}
            role = roles.get(row.proof)
        elif row.valid:
            name, role = f"{name} of token {row.name}", _read_role(row.role)
        if role is None:
            return None
        self._record_use(session_id, row.last_used_unix_ns)
        return User(name, role, row.token_id, in_session=True)

    def end(self, session_id: str) -> bool:
        """Ends the session. False if there is none of this id."""
        return self._change(delete(SESSIONS).where(SESSIONS.c.sha256 == _hash(session_id))) > 0

    def end_all(self) -> int:
        """Ends all sessions, and returns their number."""
        return self._change(delete(SESSIONS))

    def _add(self, secret: str, proof: str | None, token_id: str | None) -> None:
        row = {"sha256": _hash(secret), "token_id": token_id, "proof": proof}
        times = dict.fromkeys(("created_unix_ns", "last_used_unix_ns"), self._now_ns())
        newest = select(SESSIONS.c.sha256).order_by(SESSIONS.c.last_used_unix_ns.desc())
        kept = newest.limit(MAX_SESSIONS - 1)
        over = ~_is_current(self._now_ns()) | SESSIONS.c.sha256.not_in(kept)
        with self._database.begin_write() as connection:
            # At each login, so that no job has to tidy up.
            connection.execute(delete(SESSIONS).where(over))
            connection.execute(insert(SESSIONS).values(row | times))


def _prove(session_id: str, password: str) -> str:
    # Keyed with the session's id, which the database does not have: it reveals no password.
    return hmac.new(session_id.encode("utf-8", "replace"), password.encode(), "sha256").hexdigest()


def _is_current(now_ns: int) -> ColumnElement[bool]:
    is_used = SESSIONS.c.last_used_unix_ns > now_ns - IDLE_S * _SECOND_NS
    return is_used & (SESSIONS.c.created_unix_ns > now_ns - LIFETIME_S * _SECOND_NS)


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


class LoginFailures:
    """The failed logins of a store. Thread-safe; all processes of the store share them."""

    def __init__(self, database: Database, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._database, self._now_ns = database, now_ns

    def compute_wait_s(self, guessed: Sequence[Guessed]) -> float:
        """Seconds until all of these accept a guess; 0 if they do."""
        limits = {one.key: one for one in guessed}
        found = select(LOGIN_FAILURES).where(LOGIN_FAILURES.c.key.in_(limits))
        with self._database.begin_read() as connection:
            rows = connection.execute(found).all()
        until_ns = [0]
        for row in rows:
            limit, over = limits[row.key], row.failures - limits[row.key].free
            if over >= 0:
                wait_s = min(1 << min(over, 30), limit.max_wait_s)
                until_ns.append(row.last_unix_ns + wait_s * _SECOND_NS)
        return max(0, max(until_ns) - self._now_ns()) / _SECOND_NS

    def record(self, guessed: Sequence[Guessed]) -> None:
        """Records a failed login."""
        now_ns = self._now_ns()
        too_old = LOGIN_FAILURES.c.last_unix_ns < now_ns - FORGET_S * _SECOND_NS
        with self._database.begin_write() as connection:
            connection.execute(delete(LOGIN_FAILURES).where(too_old))
            dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
            # In one order, so that two processes do not wait for each other.
            for key in sorted(one.key for one in guessed):
                first = dialect.insert(LOGIN_FAILURES).values(
                    key=key, failures=1, last_unix_ns=now_ns
                )
                again = {"failures": LOGIN_FAILURES.c.failures + 1, "last_unix_ns": now_ns}
                connection.execute(first.on_conflict_do_update(index_elements=["key"], set_=again))
