"""plotly.js with the traces of flat axes, which all charts are: a third of what plotly brings.

scripts/plotly-cartesian.min.js.gz is the file of the npm package plotly.js-cartesian-dist-min,
version 4.1.1, packed; CONTRIBUTING.md says how it is renewed, and
tests/dashboard/test_plotly_script.py pins it.
"""

from __future__ import annotations

import gzip
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flask import Flask

PLOTLY_PATH = "/_dash-component-suites/plotly/package_data/plotly.min.js"
"""Where Dash's charts ask for it."""


def read_plotly_script() -> str:
    """The script as text, to be in a page."""
    return gzip.decompress(_SCRIPT.read_bytes()).decode()


def add_plotly_route(server: Flask) -> None:
    """Serves the script in place of the whole plotly.js."""
    # The HTML export has the script without a server.
    from stepsplit.dashboard.web.packed_files import add_packed_route

    add_packed_route(
        server, PLOTLY_PATH, "text/javascript", _SCRIPT.read_bytes,
        lambda: read_plotly_script().encode(),
    )  # fmt: skip


_SCRIPT = files("stepsplit.dashboard.web") / "scripts" / "plotly-cartesian.min.js.gz"
