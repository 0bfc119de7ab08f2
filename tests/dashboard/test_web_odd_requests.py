"""Odd requests to the pages and the timeline are refused with 4xx and one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from report_builders import analysis
from werkzeug.test import TestResponse

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server

CALLBACK = "/_dash-update-component"
PROPERTIES = [("page", "children"), ("zone", "hidden"), ("tick", "disabled"), ("mark", "data")]


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_server(store).test_client()


@pytest.mark.parametrize(
    ("path", "search"),
    [
        ("/", "?q=\ud800"),
        ("/run/\ud800", ""),
        ("/compare", "?baseline=\ud800&candidate=x"),
        ("/history", "?metric=\ud800"),
        (5, ""),
        (["/"], {"q": 1}),
    ],
)
def test_an_address_that_is_no_text_is_refused(
    path: object, search: object, client: FlaskClient
) -> None:
    _is_refused(_ask(client, _page(path, search)))


@pytest.mark.parametrize(
    ("path", "search"),
    [
        ("/compare", "?baseline=%00&candidate=%ed%a0%80"),
        ("/run/a\0b", ""),
        ("/", "?" + "&".join(f"a{n}=1" for n in range(200))),
    ],
)
def test_an_address_without_a_page_is_answered(path: str, search: str, client: FlaskClient) -> None:
    assert _ask(client, _page(path, search)).status_code == 200


@pytest.mark.parametrize("path", ["/nowhere", "/run/0123456789ab", "/run/0123456789ab/memory"])
def test_a_page_that_does_not_exist_is_not_found(path: str, client: FlaskClient) -> None:
    assert [client.get(one).status_code for one in (path, "/history")] == [404, 200]


@pytest.mark.parametrize(
    "changes",
    [
        {"output": "nothing.children"},
        {"output": ["page.children"]},
        {"outputs": None},
        {"outputs": []},
        {"inputs": "url"},
        {"inputs": []},
        {"inputs": [[{"id": "url"}]]},
        {"changedPropIds": 5},
        {"changedPropIds": ["tick.disabled"]},
        {"state": [{"id": "mark"}]},
    ],
)
def test_a_callback_of_another_shape_is_refused(
    changes: dict[str, object], client: FlaskClient
) -> None:
    _is_refused(_ask(client, _page("/", "") | changes))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"5", b"\xff", b"[" * 60_000])
def test_a_callback_without_an_object_is_refused(body: bytes, client: FlaskClient) -> None:
    _is_refused(client.post(CALLBACK, data=body, content_type="application/json"))


@pytest.mark.parametrize("clicked", [5, [1], {"points": []}, {"points": [{"x": ""}]}])
def test_a_click_on_no_bar_is_refused(clicked: object, client: FlaskClient) -> None:
    rank, step = ({"id": f"by-{name}", "property": "clickData"} for name in ("rank", "step"))
    _is_refused(_ask(client, {
        "output": "..url.pathname...url.search..",
        "outputs": [{"id": "url", "property": name} for name in ("pathname", "search")],
        "inputs": [rank | {"value": clicked}, step],
        "changedPropIds": ["by-rank.clickData"],
        "state": [{"id": "url", "property": "pathname", "value": "/run/0123456789ab"}],
    }))  # fmt: skip


@pytest.mark.parametrize(
    "query", ["", "from=nan&to=1", "from=0&to=1e300", "from=-1e300&to=1", "from=0&to=%ed%a0%80"]
)
def test_a_window_that_is_no_range_of_times_is_refused(
    query: str, client: FlaskClient, store: Store
) -> None:
    known = analysis()
    run_id = store.import_report("run", known.report, known.tables)

    _is_refused(client.get(f"/api/v1/runs/{run_id}/timeline/window?slots=5&ranks=0&{query}"))


def _page(path: object, search: object) -> dict[str, Any]:
    """What a browser sends to show a page."""
    return {
        "output": f"..{'...'.join('.'.join(name) for name in PROPERTIES)}..",
        "outputs": [{"id": part, "property": name} for part, name in PROPERTIES],
        "inputs": [
            {"id": "url", "property": "pathname", "value": path},
            {"id": "url", "property": "search", "value": search},
            {"id": "tick", "property": "n_intervals", "value": 0},
        ],
        "changedPropIds": ["url.pathname"],
        "state": [{"id": "mark", "property": "data", "value": None}],
    }


def _ask(client: FlaskClient, body: dict[str, Any]) -> TestResponse:
    return client.post(CALLBACK, data=json.dumps(body), content_type="application/json")


def _is_refused(answer: TestResponse) -> None:
    assert answer.status_code == 400
    assert answer.json is not None and list(answer.json) == ["error"]
