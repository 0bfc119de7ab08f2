"""stepsplit dashboard: the pages over a store of runs."""

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


@click.command()
@click.option(
    "--store",
    "url",
    default=STORE_URL,
    show_default=True,
    metavar="URL",
    help="Database of the runs.",
)
@click.option(
    "--artifacts",
    default=ARTIFACTS,
    show_default=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where traces and reports are kept.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=8050,
    show_default=True,
    help="Port to listen on; 0 for a free one.",
)
def command(url: str, artifacts: Path, host: str, port: int) -> None:
    """Serve the pages: runs, uploads, and where each step of a run went."""
    need("dash", "dashboard")
    from stepsplit.dashboard.web.serve import free_port, serve

    store = open_store(url, artifacts)
    serve(store, host, port or free_port(host),
          ready=lambda address: click.echo(f"dashboard: {address}   (Ctrl-C ends it)"))  # fmt: skip


def open_store(url: str = STORE_URL, artifacts: Path = ARTIFACTS) -> Store:
    """The store of the runs, made where it is missing."""
    from stepsplit.dashboard.store.store import Store

    return Store.open(url, artifacts)
