"""Odd requests to the pages and the timeline are refused with 4xx and one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.report_builders import analysis
from werkzeug.test import TestResponse

from stepsplit.dashboard.store.store import Store

CALLBACK = "/_dash-update-component"
PROPERTIES = [("page", "children"), ("zone", "hidden"), ("tick", "disabled"), ("mark", "data")]


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


@pytest.mark.parametrize(
    "query",
    [
        "search",
        "search?q=",
        "search?q=%20",
        f"search?q={'x' * 201}",
        "search?q=a&from=5&to=5",
        "search?q=a&from=5",
        "search?q=a&near=nan",
        "search?q=a&at=inf",
        "search?q=a&limit=all",
        "measure?from=0",
        "measure?from=9&to=1&ranks=0",
        "measure?from=0&to=1e300&ranks=0",
        "slice?rank=0&lane=buckets&depth=0",
        "slice?rank=0&lane=buckets&depth=x&start=1",
        "name?rank=0&bucket=0",
        "name?rank=0&bucket=&from=0&to=5",
        "window?from=0&to=5&slots=5&ranks=0&compact=wide",
        f"window?from=0&to=5&slots=5&ranks=0&q={'x' * 201}",
    ],
)
def test_an_odd_question_to_the_timeline_is_refused(
    query: str, client: FlaskClient, store: Store
) -> None:
    known = analysis()
    run_id = store.import_report("run", known.report, known.tables)

    _is_refused(client.get(f"/api/v1/runs/{run_id}/timeline/{query}"))


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("search?q=%00%ed%a0%80(.*", {"count": 0, "ranks": [], "first": 0, "matches": []}),
        ("search?q=a&at=-5&limit=-1&ranks=,x,-1,99999999999", {"count": 0, "ranks": [], "first": 0,
                                                               "matches": []}),
        ("measure?from=0&to=5&ranks=9,x", {"from": 0, "to": 5, "ranks": []}),
        ("measure?from=-9e17&to=9e17&ranks=", {"from": -9 * 10**17, "to": 9 * 10**17, "ranks": []}),
        ("slice?rank=&lane=&depth=0&start=0", {"slice": None}),
        ("slice?rank=0&lane=buckets&depth=7&start=-5", {"slice": None}),
        ("slice?rank=77&lane=%00&depth=1e18&start=1e18", {"slice": None}),
        ("name?rank=0&bucket=-7&from=0&to=5", {"name": None}),
        ("name?rank=0&bucket=1e18&from=0&to=5", {"name": None}),
        ("window?from=0&to=1&slots=5&compact=1e18&ranks=&q=x", {"from": 0, "to": 1, "rows": [],
                                                               "names": [""]}),
    ],
)  # fmt: skip
def test_a_question_about_nothing_is_answered_with_nothing(
    query: str, answer: dict[str, Any], client: FlaskClient, store: Store
) -> None:
    known = analysis()
    run_id = store.import_report("run", known.report, known.tables)

    got = client.get(f"/api/v1/runs/{run_id}/timeline/{query}")

    assert (got.status_code, got.json) == (200, answer)


def test_a_rank_that_is_asked_for_often_is_counted_once(client: FlaskClient, store: Store) -> None:
    known = analysis()
    run_id = store.import_report("run", known.report, known.tables)
    for question in ("names", "measure", "window"):
        asked = ("slots=5&" if question == "window" else "") + "from=0&to=1e15&ranks="
        path = f"/api/v1/runs/{run_id}/timeline/{question}?{asked}"
        once, often = client.get(path + "0"), client.get(path + ",".join("0" * 512))
        assert once.status_code == 200 and often.json == once.json, question
    assert client.get(path + ",".join([*"0" * 512, "1"])).json == client.get(path + "0,1").json


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
