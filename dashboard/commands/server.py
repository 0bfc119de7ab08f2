"""stepsplit dashboard and worker."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import UsageError
from stepsplit.dashboard.commands.common import (
    ROLE,
    FiniteRange,
    artifacts_option,
    build_path_option,
    log_option,
    open_store,
    print_line,
    require_package,
    store_option,
)

if TYPE_CHECKING:
    from stepsplit.dashboard.store.logs import LogFormat

# What one analysis may take: options of the dashboard and of a worker.

limit_option = click.option(
    "--limit",
    type=FiniteRange(0.01, 1_000_000),
    metavar="MINUTES",
    default=60.0,
    show_default=True,
    help="Time limit of one analysis.",
)

memory_option = click.option(
    "--memory",
    type=FiniteRange(0.01, 1_000_000),
    metavar="GIB",
    help="Memory limit of one analysis.  [default: 3/4 of the machine's, shared by its workers]",
)


# stepsplit dashboard: serves the pages of a store of runs.


@click.command()
@store_option
@artifacts_option
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on, or unix:PATH."
)
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
@limit_option
@memory_option
@build_path_option(
    "--password-file",
    metavar="FILE",
    help="Require the password in this file, or in STEPSPLIT_PASSWORD; its role is admin.",
)
@build_path_option(
    "--uploader-password-file",
    metavar="FILE",
    help="A password for uploaders, or STEPSPLIT_UPLOADER_PASSWORD.",
)
@build_path_option(
    "--viewer-password-file",
    metavar="FILE",
    help="A password for viewers, or STEPSPLIT_VIEWER_PASSWORD.",
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
@click.option(
    "--trusted-proxy-role",
    type=ROLE,
    help="Role of the proxy's users; by default admin.",
)
@click.option(
    "--trusted-proxy-role-header",
    metavar="NAME",
    help="Header in which the proxy sets each user's role instead.",
)
@build_path_option(
    "--trusted-proxy-secret-file",
    metavar="FILE",
    help="The secret that the proxy sends, or STEPSPLIT_PROXY_SECRET.",
)
@click.option(
    "--one-time-login/--open-to-this-host",
    default=None,
    help="Print an address that logs in once, or let every account of this host in.  [default: the "
    "first if other people have accounts here and no other option restricts access]",
)
@click.option("--open-to-anyone", is_flag=True, help="Allow access without authentication.")
@click.option("--alert-url", metavar="URL",
              help="Send each alert of a watched run to this webhook, signed.")  # fmt: skip
@build_path_option(
    "--alert-secret-file",
    metavar="FILE",
    help="The key of the signature, or STEPSPLIT_ALERT_SECRET.",
)
@click.option(
    "--public-url",
    metavar="URL",
    help="Address of this dashboard in alerts.  [default: its --host and --port]",
)
@log_option
def dashboard_command(
    url: str,
    artifacts: str,
    host: str,
    port: int,
    workers: int,
    limit: float,
    memory: float | None,
    password_file: Path | None,
    uploader_password_file: Path | None,
    viewer_password_file: Path | None,
    trusted_proxy_header: str | None,
    proxies: tuple[str, ...],
    trusted_proxy_role: str | None,
    trusted_proxy_role_header: str | None,
    trusted_proxy_secret_file: Path | None,
    one_time_login: bool | None,
    open_to_anyone: bool,
    alert_url: str | None,
    alert_secret_file: Path | None,
    public_url: str | None,
    log_format: LogFormat,
) -> None:
    """Serve the dashboard: runs, uploads and the report of each run."""
    require_package("dash", "dashboard")
    from stepsplit.dashboard.store.logins import Role
    from stepsplit.dashboard.web.alerting import check_public_url, parse_alert_target
    from stepsplit.dashboard.web.auth import find_first_place
    from stepsplit.dashboard.web.options import ServeOptions, choose_access, parse_trusted_proxy
    from stepsplit.dashboard.web.serve import serve

    role = Role.parse(trusted_proxy_role or "")
    proxy_secret = _read_password(trusted_proxy_secret_file, "STEPSPLIT_PROXY_SECRET")
    proxy = parse_trusted_proxy(
        trusted_proxy_header, proxies, role, trusted_proxy_role_header, proxy_secret
    )
    password = _read_password(password_file, "STEPSPLIT_PASSWORD")
    uploader = _read_password(uploader_password_file, "STEPSPLIT_UPLOADER_PASSWORD")
    viewer = _read_password(viewer_password_file, "STEPSPLIT_VIEWER_PASSWORD")
    secret = _read_password(alert_secret_file, "STEPSPLIT_ALERT_SECRET")
    target = parse_alert_target(alert_url, secret) if alert_url is not None else None
    store = open_store(url, artifacts)
    # Decided before anything listens: a server without restrictions is refused here.
    access = choose_access(
        host, password=password, uploader_password=uploader, viewer_password=viewer,
        proxy=proxy, has_tokens=store.tokens.has_active(), open_to_anyone=open_to_anyone,
        one_time_login=one_time_login,
    )  # fmt: skip
    place = find_first_place(store, access)
    serving = ServeOptions(
        access, workers=workers, limit_s=60 * limit, memory_bytes=_to_bytes(memory),
        log_format=log_format, alert_target=target,
        public_url=None if public_url is None else check_public_url(public_url),
    )  # fmt: skip
    serve(
        store, host, port, options=serving,
        ready=lambda address: print_line(f"dashboard: {address}{place}   (Ctrl-C ends it)"),
    )  # fmt: skip


def _read_password(file: Path | None, variable: str) -> str | None:
    """The password or key in the file or the environment variable; None if neither is given.

    Raises UsageError if the file cannot be read or is empty.
    """
    # Removed from the environment, so that the workers do not inherit it.
    from_environment = os.environ.pop(variable, None)
    if file is None:
        return from_environment or None
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UsageError(f"{file}: {reason}; write the password or key into it") from None
    if not password:
        raise UsageError(f"{file} is empty; write the password or key into it")
    return password


# stepsplit worker: analyzes uploads, on the machine of the dashboard or another one.


@click.command()
@store_option
@artifacts_option
@limit_option
@memory_option
@click.option("--name", hidden=True, help="Name of this worker in the queue.")
@click.option("--parent", type=int, hidden=True, help="Exit when this process ends.")
@log_option
def worker_command(
    url: str,
    artifacts: str,
    limit: float,
    memory: float | None,
    name: str | None,
    parent: int | None,
    log_format: LogFormat,
) -> None:
    """Analyze uploads one after the other until Ctrl-C.

    A dashboard starts one worker by default. Start more on any machine that can reach the same
    store and artifacts.
    """
    store = open_store(url, artifacts)
    from stepsplit.dashboard.store.logs import set_up_logs
    from stepsplit.dashboard.store.worker import WorkerOptions, choose_memory_bytes, run_worker

    set_up_logs(log_format)
    # An exit, and not the end of the process, returns the current job to the queue.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    worker_name = name or f"{socket.gethostname()}-{os.getpid()}"
    memory_bytes = _to_bytes(memory) or choose_memory_bytes(1)
    run_worker(store, WorkerOptions(worker_name, 60 * limit, memory_bytes, parent=parent))


def _to_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)
