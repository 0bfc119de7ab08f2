"""Requests made from the API's own description: none ends in an error of the server, and each
answer has a status that a client can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from support.databases import make_sqlite
from support.report_builders import analysis
from support.turns import PAGES

from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web.server import create_server

pytestmark = [pytest.mark.slow, pytest.mark.in_turn(*PAGES)]

N_REQUESTS = 400


# schemathesis does not close the answers of werkzeug's client, some of which are files.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_described_request_is_an_error_of_the_server(tmp_path: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    store = Store.open(make_sqlite(tmp_path / "runs.db"), tmp_path / "artifacts")
    made = analysis()
    run_id = store.import_report("run", made.report, made.tables)
    app = create_server(store)
    schema = schemathesis.openapi.from_wsgi("/api/v1/openapi.json", app)
    operations = [one.ok() for one in schema.get_all_operations()]
    assert len(operations) > 30
    statuses: set[int] = set()

    @settings(
        max_examples=N_REQUESTS, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def ask(data: Any) -> None:
        operation = data.draw(st.sampled_from(operations))
        case = data.draw(operation.as_strategy())
        if "run_id" in (case.path_parameters or {}) and data.draw(st.booleans()):
            case.path_parameters["run_id"] = run_id
        answer = case.call()
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (operation.label, case, answer.text[:300])
        case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

    ask()
    store.close()
    assert {200, 400, 404} <= statuses
