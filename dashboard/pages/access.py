"""Page: tokens, users and the audit log, for admins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from stepsplit.analyzer.units import format_date
from stepsplit.dashboard.pages.components import build_aria_label, build_section, build_time_fields
from stepsplit.dashboard.pages.page import PageContent, PageRequest, StorePage
from stepsplit.dashboard.pages.tables import Cell, build_count_cell, build_table
from stepsplit.dashboard.store.audit import OK, AuditEntry
from stepsplit.dashboard.store.logins import ROLES, Token

_MOST_ENTRIES = 500

_SECOND_NS = 10**9


def build_tokens_section(
    tokens: Sequence[Token], now_ns: int, *, has_login: bool = True
) -> html.Section:
    """The tokens, the newest first, with a form for a new one; assets/access.js handles clicks."""
    options = [html.Option(role, value=role, selected=role == "uploader") for role in ROLES]
    form: Component = html.Div(
        [
            html.Label([_build_label("name"), dcc.Input(id="token-name", maxLength=100)]),
            html.Label([_build_label("role"), html.Select(options, id="token-role")]),
            html.Label(
                [
                    _build_label("days, if it expires"),
                    dcc.Input(id="token-days", inputMode="numeric"),
                ]
            ),
            html.Button("create a token", id="token-create", type="button", className="button"),
        ],
        className="choices",
    )
    if not has_login:
        # Whoever reaches this server could make one that stays valid when it asks for logins.
        command = html.Code("stepsplit token create NAME --role admin")
        form = html.P(["This server has no login. Who can write to its store makes a ",
                       "token for others with ", command, "."], className="message")  # fmt: skip
    status = html.P("", id="token-status", role="status", className="message")
    rows = []
    for one in reversed(tokens):
        state = one.find_state(now_ns)
        act: Any = ""
        if state == "valid":
            attributes: Any = {"data-revoke": one.id, "data-name": one.name}
            label = build_aria_label(f"revoke {one.name}")
            act = html.Button("revoke", type="button", className="delete", **attributes, **label)
        rows.append(
            [
                Cell(one.name), Cell(one.id), Cell(one.role.label),
                Cell(html.Span(state, className="pill done" if state == "valid" else "pill")),
                *(
                    Cell(html.Span(format_date(ns), className="when") if ns else never)
                    for ns, never in (
                        (one.created_unix_ns, ""), (one.last_used_unix_ns, "never"),
                        (one.expires_unix_ns, "never"),
                    )
                ),
                Cell(act),
            ]
        )  # fmt: skip
    heads = ("name", "id", "role", "state", "created", "last used", "expires", "")
    table = build_table(heads, rows) if rows else html.P("No token yet.", className="message")
    return build_section("Tokens", "secrets are shown once and not stored", form, status, table)


def _build_label(words: str) -> html.Span:
    return html.Span(words, className="menu-label")


def _build_page(request: PageRequest) -> PageContent:
    chosen, now_ns = request.address.chosen, time.time_ns()
    first_s, last_s = chosen.parse_time_s("from"), chosen.parse_time_s("to")
    # To the end of the last second of the range.
    until_ns = now_ns if last_s is None else (last_s + 1) * _SECOND_NS - 1
    first_ns = (first_s or 0) * _SECOND_NS
    entries = request.store.audit.list_entries(_MOST_ENTRIES, first_ns, until_ns)
    begin_s = min((one.at_unix_ns for one in entries), default=now_ns) / _SECOND_NS
    fields = build_time_fields(chosen, begin_s, now_ns / _SECOND_NS)
    # Who has done something, by the same entries: when last, and how much. Users have no table of
    # their own: passwords and proxies name them with each request.
    by_user: dict[tuple[str, str], list[AuditEntry]] = {}
    for one in entries:
        by_user.setdefault((one.user_name, one.role), []).append(one)
    users = [
        [
            Cell(name), Cell(role), build_count_cell(sum(one.count for one in own)),
            build_count_cell(sum(one.count for one in own if one.outcome != OK)),
            Cell(html.Span(format_date(own[0].at_unix_ns), className="when")),
            Cell(own[0].action),
        ]
        for (name, role), own in by_user.items()
    ]  # fmt: skip
    done = [
        [
            Cell(html.Span(format_date(one.at_unix_ns), className="when")),
            Cell(one.user_name), Cell(one.role), Cell(one.action),
            Cell(html.Div(one.target, className="result")), Cell(one.outcome),
            build_count_cell(one.count), Cell(one.address),
        ]
        for one in entries
    ]  # fmt: skip
    tables = (
        ("Users",
         "tokens, passwords, users of a proxy and of the command line, by the entries below",
         ("user", "role", "actions", "refused", "last seen", "last action"), users),
        ("Audit log", f"the newest {_MOST_ENTRIES} of this range; they are kept for a year",
         ("when", "user", "role", "action", "what", "outcome", "times", "address"), done),
    )  # fmt: skip
    none = html.P("No entry in this range.", className="message")
    page = [
        html.Div(html.H1("Access"), className="heading"),
        build_tokens_section(
            request.store.tokens.list_tokens(), now_ns, has_login=request.has_login
        ),
        html.Div(fields, className="choices pickers"),
        *(
            build_section(title, note, build_table(heads, rows) if rows else none)
            for title, note, heads, rows in tables
        ),
    ]
    return PageContent(html.Div(page))


PAGE = StorePage("Access", "/access", _build_page, needs_admin=True)
