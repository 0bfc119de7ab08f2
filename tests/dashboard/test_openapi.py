"""The API describes itself, lists runs with their numbers, and says who asks."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from support.report_builders import analysis
from support.store_builders import queued

from stepsplit.analyzer.buckets import BUCKETS
from stepsplit.dashboard.store.logins import Role
from stepsplit.dashboard.store.run_row import Tag
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.options import choose_access
from stepsplit.dashboard.web.server import create_server

RUNS = "/api/v1/runs"


def describe(client: FlaskClient) -> dict[str, Any]:
    answer = client.get("/api/v1/openapi.json")
    assert answer.status_code == 200
    body: dict[str, Any] = answer.json
    return body


def test_every_route_of_the_api_is_described(client: FlaskClient) -> None:
    body = describe(client)
    assert body["openapi"] == "3.1.0"
    described = {(path, method.upper()) for path, own in body["paths"].items() for method in own}
    routes = {
        (rule.rule, method)
        for rule in client.application.url_map.iter_rules()
        for method in (rule.methods or set()) - {"OPTIONS", "HEAD"}
        if rule.rule.startswith("/api/v1/") and rule.endpoint != "api.unknown"
    }
    assert len(described) >= len(routes) > 30
    assert ("/api/v1/runs/{run_id}/files/{path}", "PUT") in described
    assert ("/api/v1/watch/{name}/starts/{incarnation}", "PATCH") in described


def test_the_document_is_valid_and_complete(client: FlaskClient) -> None:
    body, ids = describe(client), set()
    for path, own in body["paths"].items():
        assert path.count("{") == path.count("}") and "<" not in path
        for operation in own.values():
            ids.add(operation["operationId"])
            named = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert named == {part.split("}")[0] for part in path.split("{")[1:]}, path
            assert operation["summary"], path
            assert operation["description"].startswith("Needs the role "), path
    assert len(ids) == sum(len(own) for own in body["paths"].values())


def test_every_described_address_answers_and_none_fails(client: FlaskClient, store: Store) -> None:
    """Requests as the document describes them, with odd values: refused, and never an error of the
    server."""
    made = analysis()
    run_id = store.import_report("run", made.report, made.tables)
    values = {"run_id": [run_id, "x", "%00"], "path": ["a", ".."], "name": ["w", "%22"]}
    for path, own in describe(client)["paths"].items():
        for method in own:
            for at in range(3):
                address = path
                for name in [part.split("}")[0] for part in path.split("{")[1:]]:
                    known = values.get(name, ["1", "x", "-1"])
                    address = address.replace(f"{{{name}}}", known[at % len(known)])
                for body in (None, {}, [], {"name": 5}):
                    answer = client.open(address, method=method.upper(), json=body)
                    assert answer.status_code < 500, (method, address, body, answer.text)
                    answer.close()


def test_the_list_has_the_numbers_of_its_runs(client: FlaskClient, store: Store) -> None:
    made = analysis()
    store.import_report("done", made.report, made.tables, [Tag("branch", "main")])
    queued(store, "waits")
    waits, done = client.get(RUNS).json["runs"]
    numbers = store.list_runs()[1].headline
    assert numbers is not None and numbers.median_step is not None
    assert done["median_step_ns"] == numbers.median_step.step_ns
    assert set(done["shares"]) == set(BUCKETS)
    assert sum(done["shares"].values()) == pytest.approx(1)
    assert done["finding"] == made.report.findings[0].message
    assert done["finding_gain_ns"] == made.report.findings[0].gain_ns
    assert done["tags"] == {"branch": "main"} and done["mfu"] == numbers.mfu
    assert (waits["state"], waits["median_step_ns"], waits["finding"]) == ("queued", None, None)


def test_unknown_parameters_of_the_list_are_refused(client: FlaskClient) -> None:
    answer = client.get(f"{RUNS}?branch=main&last=5")
    assert answer.status_code == 400
    assert answer.json["error"] == "unknown parameters branch; known are tag, job, state, last"


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("/api/v1/audit?until=2026-11-30", "known are since, last"),
        (f"{RUNS}/0/timeline/measure?from=0&to=1&rank=0&x=1", "known are from, to, ranks"),
        ("/api/v1/tokens?last=5", "this address has none"),
    ],
)
def test_unknown_parameters_are_refused_everywhere(
    client: FlaskClient, address: str, known: str
) -> None:
    answer = client.get(address)
    assert answer.status_code == 400
    assert answer.json is not None and answer.json["error"].endswith(known)


def test_the_parameters_that_an_address_is_read_with_are_described(client: FlaskClient) -> None:
    paths = client.get("/api/v1/openapi.json").json["paths"]
    for path, names in (
        ("/api/v1/audit", {"since", "last"}),
        ("/api/v1/runs/{run_id}/timeline/names", {"from", "to", "ranks"}),
        ("/api/v1/runs/{run_id}/report.html", {"note"}),
    ):
        described = paths[path]["get"]["parameters"]
        assert {one["name"] for one in described if one["in"] == "query"} == names


def test_who_am_i(store: Store) -> None:
    client = create_server(store, choose_access("0.0.0.0", password="adm")).test_client()
    token = store.tokens.create("ci", Role.UPLOADER)
    header = {"Authorization": f"Bearer {token.secret}"}
    assert client.get("/api/v1/whoami", headers=header).json["role"] == "uploader"
    assert client.get("/api/v1/whoami").status_code == 401
