"""stepsplit dashboard: the pages over a store of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer import UsageError
from stepsplit.dashboard.commands.extras import need
from stepsplit.dashboard.commands.store_options import (
    artifacts_option,
    log_option,
    open_store,
    store_option,
)

if TYPE_CHECKING:
    from stepsplit.dashboard.store.log_lines import LogFormat


@click.command()
@store_option
@artifacts_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=8050,
    show_default=True,
    help="Port to listen on; 0 for a free one.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, 64),
    metavar="N",
    default=1,
    show_default=True,
    help="Processes that analyze uploads; 0 where others do.",
)
@click.option(
    "--password-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Let in who knows the password in this file, or in STEPSPLIT_PASSWORD.",
)
@click.option(
    "--trusted-proxy-header",
    metavar="NAME",
    help="Let in whom a proxy names in this header, such as X-Forwarded-User.",
)
@click.option(
    "--trusted-proxy",
    "proxies",
    metavar="ADDRESS",
    multiple=True,
    help="Where that proxy is: an address or network; may be repeated.",
)
@click.option("--open-to-anyone", is_flag=True, help="Let in everybody who can reach the port.")
@log_option
def command(
    url: str,
    artifacts: str,
    host: str,
    port: int,
    workers: int,
    password_file: Path | None,
    trusted_proxy_header: str | None,
    proxies: tuple[str, ...],
    open_to_anyone: bool,
    log_format: LogFormat,
) -> None:
    """Serve the pages: runs, uploads, and where each step of a run went."""
    need("dash", "dashboard")
    from stepsplit.dashboard.web.access import access_to, trusted_proxy
    from stepsplit.dashboard.web.serve import Serving, free_port, serve

    proxy, password = trusted_proxy(trusted_proxy_header, proxies), _password(password_file)
    store = open_store(url, artifacts)
    access = access_to(
        host, password=password, proxy=proxy, has_tokens=store.tokens.any(),
        open_to_anyone=open_to_anyone,
    )  # fmt: skip
    how = Serving(access, workers=workers, log_format=log_format)
    serve(store, host, port or free_port(host), how=how,
          ready=lambda address: click.echo(f"dashboard: {address}   (Ctrl-C ends it)"))  # fmt: skip


def _password(file: Path | None) -> str | None:
    """The password of the file or the environment, None without either. Raises UsageError."""
    # Taken out, so that the workers do not inherit it.
    of_environment = os.environ.pop("STEPSPLIT_PASSWORD", None)
    if file is None:
        return of_environment or None
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"{file}: {reason}; put a password into it") from None
    if not password:
        raise UsageError(f"{file} is empty; put a password into it")
    return password
