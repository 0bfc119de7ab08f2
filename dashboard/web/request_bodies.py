"""What the JSON bodies of the API say, checked. Each function raises HttpError if it is invalid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import orjson
from flask import request

from stepsplit.dashboard.store.logins import DAY_S, MAX_TOKEN_DAYS, ROLES, TOKEN_NAME_LENGTH, Role
from stepsplit.dashboard.store.run_row import RunEdit, Tag
from stepsplit.dashboard.store.runs import NOTE_LENGTH
from stepsplit.dashboard.store.watch_senders import EVERYONE, WatchSender
from stepsplit.dashboard.web.auth import current_user
from stepsplit.dashboard.web.http_error import HttpError


def read_json() -> object:
    """The JSON body of the request; None if it is not JSON, nested too deeply, or not Unicode."""
    try:
        return orjson.loads(request.get_data()) if request.is_json else None
    except orjson.JSONDecodeError:
        return None


# Name, tags and note of a run.

_KEY_LENGTH, _VALUE_LENGTH, _MOST_TAGS = 64, 200, 32


@dataclass(frozen=True, slots=True)
class NewRun:
    """Validated name and tags; without a name the run is named by its files."""

    name: str
    tags: tuple[Tag, ...]


def parse_new_run(body: object) -> NewRun:
    """Name and tags from the JSON body. Raises HttpError if they are invalid."""
    if not isinstance(body, Mapping):
        raise HttpError(400, _NAME_HINT)
    name = _parse_name(body["name"]) if "name" in body else ""
    return NewRun(name, _parse_tags(body.get("tags") or {}))


def parse_run_edit(body: object) -> RunEdit:
    """What to change, from the JSON body. Raises HttpError if it is invalid."""
    known = ("name", "note", "tags")
    if not isinstance(body, Mapping) or not body or not set(body) <= set(known):
        raise HttpError(400, f"send JSON with what to change: {', '.join(known)}")
    note = body.get("note")
    if note is not None and not (isinstance(note, str) and len(note) <= NOTE_LENGTH):
        raise HttpError(400, f"note must be text of at most {NOTE_LENGTH} characters")
    return RunEdit(
        _parse_name(body["name"]) if "name" in body else None,
        note,
        _parse_tags(body["tags"]) if "tags" in body else None,
    )


_NAME_HINT = 'send JSON with a name: {"name": "my run"}'


def _parse_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip() or not name.strip().isprintable():
        raise HttpError(400, _NAME_HINT)
    return name.strip()


def _parse_tags(tags: object) -> tuple[Tag, ...]:
    if not isinstance(tags, Mapping) or len(tags) > _MOST_TAGS:
        raise HttpError(400, f'tags: at most {_MOST_TAGS} strings by key: {{"branch": "main"}}')
    for key, value in tags.items():
        if not (_is_text(key, 1, _KEY_LENGTH) and _is_text(value, 0, _VALUE_LENGTH)):
            lengths = f"{_KEY_LENGTH} and {_VALUE_LENGTH}"
            reason = f"a tag's key and value must be strings of at most {lengths} characters"
            raise HttpError(400, reason)
    return tuple(Tag(str(key), str(value)) for key, value in tags.items())


def _is_text(value: object, least: int, most: int) -> bool:
    return isinstance(value, str) and least <= len(value) <= most and value.isprintable()


# Who sends the batches of a watched run.


def find_sender() -> WatchSender:
    """Who sends this request, by what is the same in each request of a job: its token, or the
    password that all of a role share. Without logins everyone is the same."""
    user = current_user()
    if not user.authenticated:
        return EVERYONE
    name = user.name
    if user.token_id is not None:
        name = f"token {user.token_id}"
    # A session has an id of its own for each login, which the next request of the job may not have.
    elif user.in_session or name == "password":
        name = f"password of {user.role.label}s"
    return WatchSender(name, user.role is Role.ADMIN)


def parse_sender(body: object) -> str | None:
    """The sender from the JSON body. Raises HttpError if it is invalid."""
    if isinstance(body, Mapping) and set(body) == {"sender"}:
        sender = body["sender"]
        if sender is None or _is_text(sender, 1, _SENDER_LENGTH):
            return cast(str | None, sender)
    raise HttpError(400, 'send JSON such as {"sender": "token 3f2a9c1e"}, or null for anyone')


_SENDER_LENGTH = 300


# What to do with an alert.

_MOST_HOURS = 24 * 30

_ALERT_HINT = (
    'send JSON such as {"action": "acknowledge"} or {"action": "silence", "hours": 24}; hours is'
    f" above 0 and at most {_MOST_HOURS}, or null for until the alert ends; unacknowledge and"
    " unsilence undo them"
)


AlertVerb = Literal["acknowledge", "unacknowledge", "silence", "unsilence"]


@dataclass(frozen=True, slots=True)
class AlertAction:
    """What to do with an alert; hours is for how long to silence its run, None for until the alert
    ends."""

    verb: AlertVerb
    hours: float | None = None

    def describe(self) -> str:
        """What was done, in the words of the audit; then for how long, if it silences."""
        done = {
            "acknowledge": "alert acknowledged", "unacknowledge": "acknowledgement undone",
            "silence": "alert silenced", "unsilence": "silence ended",
        }  # fmt: skip
        return done[self.verb]

    def describe_length(self) -> str:
        """For how long it silences; "" if it does not."""
        if self.verb != "silence":
            return ""
        return ", until it ends" if self.hours is None else f", for {self.hours:g} h"


def parse_alert_action(body: object) -> AlertAction:
    """What to do, from the JSON body. Raises HttpError if it is invalid."""
    fields = body if isinstance(body, Mapping) else {}
    action, hours = fields.get("action"), fields.get("hours")
    is_number = isinstance(hours, int | float) and not isinstance(hours, bool)
    is_valid = hours is None or (is_number and 0 < hours <= _MOST_HOURS)
    if action not in get_args(AlertVerb) or not set(fields) <= {"action", "hours"}:
        raise HttpError(400, _ALERT_HINT)
    if not is_valid or (action != "silence" and hours is not None):
        raise HttpError(400, _ALERT_HINT)
    return AlertAction(cast("AlertVerb", action), hours)


# Name and role of a token.


@dataclass(frozen=True, slots=True)
class AskedToken:
    """A token to create; lifetime_s is None for one that does not expire."""

    name: str
    role: Role
    lifetime_s: float | None


def parse_new_token(body: object) -> AskedToken:
    """Name, role and lifetime from the JSON body. Raises HttpError if they are invalid."""
    fields = body if isinstance(body, Mapping) else {}
    name, label = fields.get("name"), fields.get("role", Role.UPLOADER.label)
    role = Role.parse(label) if isinstance(label, str) else None
    valid_name = _is_text(name, 1, TOKEN_NAME_LENGTH) and bool(str(name).strip())
    days = fields.get("days", 1)
    valid_days = type(days) in (int, float) and 0 < days <= MAX_TOKEN_DAYS
    known = set(fields) <= {"name", "role", "days"}
    if role is None or not (valid_name and valid_days and known):
        example = '{"name": "ci", "role": "uploader", "days": 90}'
        days_text = f"days, if it expires, is at most {MAX_TOKEN_DAYS:,}"
        raise HttpError(400, f"send JSON such as {example}; {_ROLES}; {days_text}")
    return AskedToken(str(name).strip(), role, days * DAY_S if "days" in fields else None)


_ROLES = f"role is one of {', '.join(ROLES)}"
