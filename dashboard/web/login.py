"""Logging in and out: the login page, and the cookie of a session."""

from __future__ import annotations

from dataclasses import dataclass

from flask import Blueprint, Response, g, render_template_string, request
from werkzeug.urls import iri_to_uri

from stepsplit.dashboard.store.logins import LIFETIME_S
from stepsplit.dashboard.web.auth import (
    LOGIN_PATH,
    SESSION,
    Authenticator,
    is_encrypted,
    record_action,
)
from stepsplit.dashboard.web.uploads import JSON_BYTES, HttpError

LOGOUT_PATH = "/logout"

_MAX_NEXT = 2_000

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Log in - stepsplit</title>
<link rel="icon" type="image/svg+xml" href="/assets/favicon.svg">
<script src="/assets/theme.js"></script>
<link rel="stylesheet" href="/assets/style.css">
</head>
<body>
<header class="top"><div class="inner">
<a class="brand" href="/">stepsplit</a>
<span class="tagline">where every training step went</span>
<button id="theme" type="button" class="theme">light / dark</button>
</div></header>
<main>
<form class="card login" method="post" action="{{ action }}">
<h1>Log in</h1>
<label for="password">Password or token</label>
<input id="password" name="password" type="password" autocomplete="current-password" required
 autofocus{% if problem %} aria-describedby="problem"{% endif %}>
<input type="hidden" name="next" value="{{ next }}">
{% if problem %}<p id="problem" class="problem" role="alert">{{ problem }}</p>{% endif %}
<button type="submit">Log in</button>
</form>
</main>
</body>
</html>
"""


def build_login_routes(authenticator: Authenticator) -> Blueprint:
    """The routes of the login page, and of logging out."""
    routes, pages = Blueprint("login", __name__), LoginPages(authenticator)
    routes.add_url_rule(LOGIN_PATH, "show", pages.show)
    routes.add_url_rule(LOGIN_PATH, "enter", pages.enter, methods=["POST"])
    routes.add_url_rule(LOGOUT_PATH, "leave", pages.leave, methods=["POST"])
    return routes


@dataclass(frozen=True, slots=True)
class LoginPages:
    """The request handlers."""

    authenticator: Authenticator

    def show(self) -> Response:
        """GET ?next=PATH: the form; who is logged in goes on to the path."""
        place = parse_next(request.args.get("next", ""))
        if self.authenticator.find_user(request) is not None:
            return _go_to(place)
        return _build_form(place)

    def enter(self) -> Response:
        """POST password, next: begins a session."""
        request.max_content_length = JSON_BYTES
        place = parse_next(request.form.get("next", ""))
        secret, store = request.form.get("password", ""), self.authenticator.store
        if not self.authenticator.access.guarded:
            return _go_to(place)
        if not secret:
            return _build_form(place, "enter the password or a token", 400)
        try:
            user = self.authenticator.check_secret(request, secret)
        except HttpError as error:
            return _build_form(place, str(error), error.status, error.headers.get("Retry-After"))
        self._end_session()
        session_id = store.sessions.create(secret, user.token_id)
        g.user = store.sessions.find(session_id, self.authenticator.access.passwords) or user
        record_action(store.audit, "login")
        response = _go_to(place)
        response.set_cookie(
            SESSION, session_id, LIFETIME_S,
            secure=is_encrypted(request), httponly=True, samesite="Strict",
        )  # fmt: skip
        return response

    def leave(self) -> Response:
        """POST: ends the session."""
        self._end_session()
        response = _go_to(LOGIN_PATH)
        response.delete_cookie(
            SESSION, secure=is_encrypted(request), httponly=True, samesite="Strict"
        )
        return response

    def _end_session(self) -> None:
        """Ends the session that the browser has, if any."""
        session_id, store = request.cookies.get(SESSION), self.authenticator.store
        user = self.authenticator.find_user(request) if session_id else None
        if session_id and user is not None and store.sessions.end(session_id):
            g.user = user
            record_action(store.audit, "logout")


def parse_next(text: str) -> str:
    """The path and query on this server to show after the login; / if it is none."""
    is_own = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if is_own and text.isprintable() and len(text) <= _MAX_NEXT else "/"


def _go_to(place: str) -> Response:
    headers = {"Location": iri_to_uri(place), "Cache-Control": "no-store"}
    return Response("", 303, headers)


def _build_form(
    place: str, problem: str = "", status: int = 200, wait_s: str | None = None
) -> Response:
    page = render_template_string(_PAGE, action=LOGIN_PATH, next=place, problem=problem)
    response = Response(page, status, {"Cache-Control": "no-store"})
    if wait_s is not None:
        response.headers["Retry-After"] = wait_s
    return response
