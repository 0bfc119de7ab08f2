"""The options of every command that opens the store of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.dashboard.commands.extras import need

if TYPE_CHECKING:
    from stepsplit.dashboard.store.store import Store

HOME = Path(".stepsplit")
STORE_URL = f"sqlite:///{HOME / 'store.db'}"
ARTIFACTS = HOME / "artifacts"

store_option = click.option(
    "--store",
    "url",
    default=STORE_URL,
    show_default=True,
    envvar="STEPSPLIT_STORE",
    metavar="URL",
    help="Database of the runs.",
)
artifacts_option = click.option(
    "--artifacts",
    default=str(ARTIFACTS),
    show_default=True,
    envvar="STEPSPLIT_ARTIFACTS",
    metavar="URL",
    help="Where traces and reports are kept: a folder, or a URL such as s3://bucket/stepsplit.",
)
log_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Quiet text, or a JSON line a request and an analysis, on standard error.",
)


def open_store(url: str = STORE_URL, artifacts: str | Path = ARTIFACTS) -> Store:
    """The store of the runs, made where it is missing."""
    need("sqlalchemy", "dashboard")
    from stepsplit.dashboard.store.store import Store

    return Store.open(url, artifacts)
