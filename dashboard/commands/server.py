"""stepsplit dashboard, worker, token and upload."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.dashboard.commands.common import (
    artifacts_option,
    log_option,
    open_store,
    require_package,
    store_option,
)

if TYPE_CHECKING:
    from stepsplit.dashboard.store.ingest import LogFormat
    from stepsplit.dashboard.store.store import Tokens
    from stepsplit.dashboard.upload import FileToSend, Sender


# stepsplit dashboard: serves the pages of a store of runs.


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
    help="Processes that analyze uploads; 0 if separate workers do.",
)
@click.option(
    "--password-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Require the password in this file, or in STEPSPLIT_PASSWORD.",
)
@click.option(
    "--trusted-proxy-header",
    metavar="NAME",
    help="Trust the user name that a proxy sets in this header, such as X-Forwarded-User.",
)
@click.option(
    "--trusted-proxy",
    "proxies",
    metavar="ADDRESS",
    multiple=True,
    help="Address or network of that proxy; may be repeated.",
)
@click.option("--open-to-anyone", is_flag=True, help="Allow access without authentication.")
@log_option
def dashboard_command(
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
    """Serve the dashboard: runs, uploads and the report of each run."""
    require_package("dash", "dashboard")
    from stepsplit.dashboard.web.auth import ServeOptions, choose_access, parse_trusted_proxy
    from stepsplit.dashboard.web.serve import find_free_port, serve

    proxy, password = (
        parse_trusted_proxy(trusted_proxy_header, proxies),
        _read_password(password_file),
    )
    store = open_store(url, artifacts)
    access = choose_access(
        host, password=password, proxy=proxy, has_tokens=store.tokens.has_active(),
        open_to_anyone=open_to_anyone,
    )  # fmt: skip
    serving = ServeOptions(access, workers=workers, log_format=log_format)
    serve(store, host, port or find_free_port(host), options=serving,
          ready=lambda address: click.echo(f"dashboard: {address}   (Ctrl-C ends it)"))  # fmt: skip


def _read_password(file: Path | None) -> str | None:
    """Reads the password from the file or the environment; None if neither is given.

    Raises UsageError if the file cannot be read or is empty.
    """
    # Removed from the environment, so that the workers do not inherit it.
    from_environment = os.environ.pop("STEPSPLIT_PASSWORD", None)
    if file is None:
        return from_environment or None
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"{file}: {reason}; put a password into it") from None
    if not password:
        raise UsageError(f"{file} is empty; put a password into it")
    return password


# stepsplit worker: analyzes uploads, on the machine of the dashboard or another one.


@click.command()
@store_option
@artifacts_option
@click.option("--limit", type=click.FloatRange(min=1), metavar="MINUTES", default=60.0,
              show_default=True, help="Time limit of one analysis.")  # fmt: skip
@click.option("--name", hidden=True, help="Name of this worker in the queue.")
@click.option("--parent", type=int, hidden=True, help="Exit when this process ends.")
@log_option
def worker_command(
    url: str,
    artifacts: str,
    limit: float,
    name: str | None,
    parent: int | None,
    log_format: LogFormat,
) -> None:
    """Analyze uploads one after the other until Ctrl-C.

    A dashboard starts one worker by default. Start more on any machine that can reach the same
    store and artifacts.
    """
    store = open_store(url, artifacts)
    from stepsplit.dashboard.store.ingest import WorkerOptions, run_worker, set_up_logs

    set_up_logs(log_format)
    signal.signal(signal.SIGTERM, _stop_worker)
    worker_name = name or f"{socket.gethostname()}-{os.getpid()}"
    run_worker(store, WorkerOptions(worker_name, limit_s=60 * limit, parent=parent))


def _stop_worker(number: int, frame: FrameType | None) -> None:
    """Signal handler: exits, which returns the current job to the queue."""
    raise SystemExit(0)


# stepsplit token: access tokens of a dashboard.


@click.group()
def token_command() -> None:
    """Create, list and revoke access tokens of a dashboard."""


@token_command.command()
@click.argument("name")
@store_option
def create(name: str, url: str) -> None:
    """Create a token and print it; it cannot be shown again."""
    click.echo(_open_tokens(url).create(name))


@token_command.command("list")
@store_option
def list_tokens(url: str) -> None:
    """Print the id, state, creation, last use and name of each token."""
    for token in _open_tokens(url).list_tokens():
        used = _format_date(token.last_used_unix_ns) if token.last_used_unix_ns else "never used"
        state = "revoked" if token.revoked else "valid"
        created = _format_date(token.created_unix_ns)
        click.echo(f"{token.id}  {state:7}  created {created}  {used:16}  {token.name}")


@token_command.command()
@click.argument("token_id", metavar="ID")
@store_option
def revoke(token_id: str, url: str) -> None:
    """Revoke a token."""
    if not _open_tokens(url).revoke(token_id):
        raise UsageError(f"no token has the id {token_id}; list them with stepsplit token list")
    click.echo(f"token {token_id} is revoked")


def _open_tokens(url: str) -> Tokens:
    """Opens the tokens of the store without opening its artifacts."""
    require_package("sqlalchemy", "dashboard")
    from stepsplit.dashboard.store.database import open_database
    from stepsplit.dashboard.store.store import Tokens

    return Tokens(open_database(url))


def _format_date(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M")


# stepsplit upload: sends a recording to a dashboard.

ASK_EVERY_S = 1.0


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...",
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--to", "url", required=True, metavar="URL", help="Address of the dashboard.")
@click.option("--name", metavar="NAME", help="Name of the run; by default the name of its files.")
@click.option("--tag", "tags", metavar="KEY=VALUE", multiple=True,
              help="Tag of the run, such as branch=main; may be repeated.")  # fmt: skip
@click.option("--token", metavar="TOKEN", envvar="STEPSPLIT_TOKEN",
              help="Access token of the dashboard; by default STEPSPLIT_TOKEN.")  # fmt: skip
@click.option("--resume", metavar="ID", help="Resume the upload of this run.")
@click.option("--wait", is_flag=True, help="Wait until the run is analyzed.")
def upload_command(
    places: tuple[Path, ...],
    url: str,
    name: str | None,
    tags: tuple[str, ...],
    token: str | None,
    resume: str | None,
    wait: bool,
) -> None:
    """Upload a recording to a dashboard and print its URL.

    PATH is a file or a folder. Interrupted transfers are resumed automatically.
    """
    from stepsplit.dashboard.reporters.terminal import show_sending_bar
    from stepsplit.dashboard.upload import Connection, RetriesExhausted, Sender, collect_files

    files, pairs = collect_files(places), dict(_parse_tag(tag) for tag in tags)
    connection = Connection(url, token)
    with closing(connection), show_sending_bar(sum(one.size_bytes for one in files)) as sent:
        sender = Sender(connection, sent)
        run_id = resume or sender.create(name or _name_run(files), pairs)
        try:
            for one in files:
                sender.send(run_id, one)
            sender.finish(run_id)
        except (RetriesExhausted, KeyboardInterrupt) as error:
            raise _build_resume_error(error, places, url, run_id) from None
    click.echo(f"{connection.url}/run/{run_id}")
    if wait:
        _wait_until_analyzed(sender, run_id)


def _parse_tag(tag: str) -> tuple[str, str]:
    key, equals, value = tag.partition("=")
    if not key or not equals:
        raise UsageError(f"--tag {tag}: write KEY=VALUE, such as branch=main")
    return key, value


def _name_run(files: Sequence[FileToSend]) -> str:
    first = files[0].path.partition("/")[0]
    alone = len(files) == 1 or "/" in files[0].path
    return first if alone else f"{first} and {len(files) - 1} more"


def _build_resume_error(
    error: BaseException, places: Sequence[Path], url: str, run_id: str
) -> StepsplitError:
    paths = shlex.join(str(place) for place in places)
    reason = str(error) or "interrupted"
    return UsageError(
        f"{reason}; resume with: stepsplit upload {paths} --to {url} --resume {run_id}"
    )


def _wait_until_analyzed(sender: Sender, run_id: str) -> None:
    while True:
        run = sender.fetch_run(run_id)
        if run["state"] == "done":
            return
        if run["state"] == "failed":
            raise StepsplitError(f"the analysis failed: {run['error']}")
        time.sleep(ASK_EVERY_S)
