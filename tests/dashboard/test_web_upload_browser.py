"""The page's uploader: parts of a file, broken connections and lost responses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.browser_builders import running_server
from support.dashboard_processes import open_store

pytestmark = pytest.mark.slow


def test_an_upload_goes_on_after_a_broken_connection(tmp_path: Path, browser: Any) -> None:
    trace = tmp_path / "rank0_trace.json"
    trace.write_bytes(os.urandom(1 << 20) * 20)
    sent: list[str] = []

    def flaky(route: Any) -> None:
        if route.request.method != "PATCH":
            return route.continue_()
        sent.append(route.request.headers["upload-offset"])
        assert route.request.headers["content-digest"].startswith("sha-256=:")
        if len(sent) == 2:
            return route.abort("connectionreset")
        if len(sent) == 4:
            route.fetch()
            return route.abort("connectionreset")
        return route.continue_()

    with running_server(tmp_path) as url:
        page = browser.new_page()
        page.route("**/files/**", flaky)
        page.goto(url)
        page.wait_for_selector("#drop-zone")
        page.locator("#upload-files").set_input_files(trace)
        page.wait_for_url("**/run/*")

    part = 8 << 20
    assert sent == [str(at) for at in (0, part, part, 2 * part)]
    with open_store(tmp_path) as store:
        (run,) = store.list_runs()
        kept = store.find_folder(run.id) / "input" / trace.name
        assert kept.read_bytes() == trace.read_bytes()


def test_the_form_adds_the_stated_mesh_to_the_upload(tmp_path: Path, browser: Any) -> None:
    trace = tmp_path / "rank0_trace.json"
    trace.write_bytes(b"{}")
    with running_server(tmp_path) as url:
        page = browser.new_page()
        page.goto(url)
        page.fill("input#upload-mesh", "pp=x")
        page.locator("#upload-files").set_input_files(trace)
        page.wait_for_selector("#upload-status.failed")
        assert page.inner_text("#upload-status").startswith("the mesh is axes and sizes")
        page.fill("input#upload-mesh", "pp=2,tp=2")
        page.locator("#upload-files").set_input_files(trace)
        page.wait_for_url("**/run/*")

    with open_store(tmp_path) as store:
        (run,) = store.list_runs()
        assert (store.find_folder(run.id) / "input" / "mesh.txt").read_text() == "pp=2,tp=2"
