"""The script of the charts, which is kept here: of the locked plotly, loaded where charts are."""

from __future__ import annotations

import gzip
import re
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import plotly.offline
import pytest
from support.report_builders import report_and_tables
from support.store_builders import uploaded

from stepsplit.dashboard.pages.run_pages import RUN_PAGES
from stepsplit.dashboard.store.store import Store
from stepsplit.dashboard.web import plotly_script
from stepsplit.dashboard.web.plotly_script import PLOTLY_PATH, read_plotly_script
from stepsplit.dashboard.web.server import create_server

ROOT = Path(__file__).parents[2]

VERSION = "4.1.1"
SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""Of package/plotly-cartesian.min.js of the npm package."""


def test_the_script_is_the_published_one() -> None:
    script = read_plotly_script()
    assert sha256(script.encode()).hexdigest() == SHA256
    assert script.startswith(f"/**\n* plotly.js (cartesian - minified) v{VERSION}\n")
    assert f"version {VERSION}," in (plotly_script.__doc__ or "")
    license_text = files("stepsplit.dashboard.web") / "scripts" / "plotly-cartesian.LICENSE"
    assert "MIT License" in license_text.read_text()


def test_the_locked_plotly_brings_this_plotly_js() -> None:
    found = re.search(r"^plotly==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert found is not None
    if version("plotly") != found[1]:
        pytest.skip(f"plotly {version('plotly')} is not the locked {found[1]}")
    assert plotly.offline.get_plotlyjs_version() == VERSION


def test_the_script_is_sent_packed_or_not_with_one_digest_each(store: Store) -> None:
    client = create_server(store).test_client()
    packed, plain, again = (
        client.get(PLOTLY_PATH, headers={"Accept-Encoding": encoding})
        for encoding in ("gzip", "identity", "identity")
    )
    assert gzip.decompress(packed.data) == plain.data == read_plotly_script().encode()
    assert plain.headers["ETag"] == again.headers["ETag"] != packed.headers["ETag"]
    known = {"If-None-Match": packed.headers["ETag"], "Accept-Encoding": "gzip"}
    assert client.get(PLOTLY_PATH, headers=known).status_code == 304


def test_only_pages_with_charts_of_nearly_every_run_load_the_script_ahead(store: Store) -> None:
    report, tables = report_and_tables()
    run = store.import_report("run", report, tables)
    client = create_server(store).test_client()
    loading = []
    for page in RUN_PAGES:
        response = client.get(f"/run/{run}/{page.key}" if loading else f"/run/{run}")
        is_marked = b'<meta name="charts"' in response.data
        assert is_marked == (PLOTLY_PATH in response.headers.get("Link", ""))
        loading += [page.key] * is_marked
    assert loading == ["overview", "collectives"]
    # A run that waits, failed or hangs has no charts, and the browser warns of an unused script.
    assert "as=script" not in client.get(f"/run/{uploaded(store)}").headers["Link"]
