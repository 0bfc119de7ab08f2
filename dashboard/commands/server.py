"""stepsplit dashboard, worker, token, audit and upload."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import StepsplitError, UsageError
from stepsplit.analyzer.units import format_date
from stepsplit.dashboard.commands.common import (
    FiniteRange,
    artifacts_option,
    claim_store,
    log_option,
    open_store,
    parse_mesh,
    parse_tag,
    print_line,
    put_json,
    record_command,
    require_package,
    store_option,
    token_option,
)

if TYPE_CHECKING:
    from stepsplit.dashboard.store.audit import AuditEntry
    from stepsplit.dashboard.store.database import Database
    from stepsplit.dashboard.store.ingest import LogFormat
    from stepsplit.dashboard.store.logins import Token
    from stepsplit.dashboard.upload import Connection, LeftOut, Sender

# The roles of stepsplit.dashboard.store.logins, without its imports.

_ROLE = click.Choice(["viewer", "uploader", "admin"])

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
@click.option(
    "--password-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Require the password in this file, or in STEPSPLIT_PASSWORD; its role is admin.",
)
@click.option(
    "--uploader-password-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A password for uploaders, or STEPSPLIT_UPLOADER_PASSWORD.",
)
@click.option(
    "--viewer-password-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
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
    type=_ROLE,
    help="Role of the proxy's users; by default admin.",
)
@click.option(
    "--trusted-proxy-role-header",
    metavar="NAME",
    help="Header in which the proxy sets each user's role instead.",
)
@click.option(
    "--trusted-proxy-secret-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
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
@click.option(
    "--alert-secret-file",
    metavar="FILE",
    type=click.Path(path_type=Path),
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
    from stepsplit.dashboard.web.auth import choose_access, find_first_place, parse_trusted_proxy
    from stepsplit.dashboard.web.options import ServeOptions
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
    from stepsplit.dashboard.store.ingest import (
        WorkerOptions,
        choose_memory_bytes,
        run_worker,
        set_up_logs,
    )

    set_up_logs(log_format)
    signal.signal(signal.SIGTERM, _stop_worker)
    worker_name = name or f"{socket.gethostname()}-{os.getpid()}"
    memory_bytes = _to_bytes(memory) or choose_memory_bytes(1)
    run_worker(store, WorkerOptions(worker_name, 60 * limit, memory_bytes, parent=parent))


def _to_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * 2**30)


def _stop_worker(number: int, frame: FrameType | None) -> None:
    """Signal handler: exits, which returns the current job to the queue."""
    raise SystemExit(0)


# stepsplit token: access tokens of a dashboard.


@click.group()
def token_command() -> None:
    """Create, list and revoke access tokens of a dashboard."""


@token_command.command()
@click.argument("name")
@click.option("--role", type=_ROLE, default="uploader", show_default=True,
              help="What it may do: read, also upload, or also delete.")  # fmt: skip
@click.option("--days", type=FiniteRange(0, 36_500, min_open=True), metavar="N",
              help="Let it expire after N days. Default: when it is revoked.")  # fmt: skip
@store_option
def create(name: str, role: str, days: float | None, url: str) -> None:
    """Create a token and print it; it cannot be shown again."""
    database = _open_database(url)
    from stepsplit.dashboard.store.audit import AuditLog
    from stepsplit.dashboard.store.logins import DAY_S, Role, Tokens

    lifetime_s = None if days is None else days * DAY_S
    new = Tokens(database).create(name, Role.parse(role) or Role.VIEWER, lifetime_s)
    record_command(AuditLog(database), "token created", new.token.label)
    print_line(new.secret)


@token_command.command("list")
@store_option
def list_tokens(url: str) -> None:
    """Print the id, state, role, creation, last use, expiry and name of each token."""
    database = _open_database(url)
    from stepsplit.dashboard.store.logins import Tokens

    for token in Tokens(database).list_tokens():
        print_line(_format_token(token))


def _format_token(token: Token) -> str:
    used = format_date(token.last_used_unix_ns) if token.last_used_unix_ns else "never used"
    state, created = token.find_state(time.time_ns()), format_date(token.created_unix_ns)
    expires_ns = token.expires_unix_ns
    expires = "does not expire" if expires_ns is None else f"until {format_date(expires_ns)}"
    described = f"{token.id}  {state:7}  {token.role.label:8}  created {created}  {used:16}"
    return f"{described}  {expires:22}  {token.name}"


@token_command.command()
@click.argument("token_id", metavar="ID")
@store_option
def revoke(token_id: str, url: str) -> None:
    """Revoke a token."""
    database = _open_database(url)
    from stepsplit.dashboard.store.audit import AuditLog
    from stepsplit.dashboard.store.logins import Tokens

    if not Tokens(database).revoke(token_id):
        raise UsageError(f"no token has the id {token_id}; list them with stepsplit token list")
    record_command(AuditLog(database), "token revoked", token_id)
    print_line(f"token {token_id} is revoked")


def _open_database(url: str) -> Database:
    """Opens the store without opening its artifacts."""
    require_package("sqlalchemy", "dashboard")
    from stepsplit.dashboard.store.database import open_database

    claim_store(url)
    return open_database(url)


# stepsplit audit: what was done with a store, and by whom.


@click.command()
@click.option("--since", metavar="DATE", help="From this date or time (UTC), such as 2026-11-30.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", default=100, show_default=True,
              help="The newest entries only.")  # fmt: skip
@click.option("--json", "json_file", metavar="FILE",
              help="Write the log as JSON; - for standard output.")  # fmt: skip
@store_option
def audit_command(since: str | None, last: int, json_file: str | None, url: str) -> None:
    """Print the audit log: logins, uploads, deletions, tokens.

    One line for each entry, oldest first: time (UTC), action, user, role, address, target, and why
    it was refused. Entries are kept for a year, at most 100,000 of them and 10,000 refused ones.
    """
    database = _open_database(url)
    from stepsplit.dashboard.store.audit import AuditLog, audit_to_json, parse_since

    since_ns = parse_since(since) if since is not None else 0
    entries = AuditLog(database).list_entries(last, since_ns)
    if not put_json(entries, audit_to_json, json_file):
        for entry in reversed(entries):
            print_line(_format_audit_entry(entry))


def _format_audit_entry(entry: AuditEntry) -> str:
    from stepsplit.dashboard.store.audit import OK, format_time

    user = f"{entry.user_name} ({entry.role})" if entry.role else entry.user_name
    parts = [format_time(entry.at_unix_ns), f"{entry.action:14}", user, entry.address, entry.target]
    parts += [] if entry.outcome == OK else [f"refused: {entry.outcome}"]
    parts += [] if entry.count == 1 else [f"{entry.count} times"]
    return "  ".join(part for part in parts if part)


# stepsplit upload: sends a recording to a dashboard.

ASK_EVERY_S = 1.0


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="PATH...",
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--to", "url", required=True, metavar="URL", help="Address of the dashboard.")
@click.option("--name", metavar="NAME", help="Name of the run; by default the name of its files.")
@click.option("--tag", "tags", metavar="KEY=VALUE", multiple=True,
              help="Tag of the run, such as branch=main; may be repeated.")  # fmt: skip
@click.option("--mesh", metavar="AXES",
              help="The job's mesh, outermost axis first, such as pp=2,dp=2,tp=2; by default from "
                   "run.json, else inferred.")  # fmt: skip
@token_option
@click.option("--resume", metavar="ID", help="Resume the upload of this run.")
@click.option("--redact", is_flag=True,
              help="Upload a copy without hosts, users, paths and names.")  # fmt: skip
@click.option("--each", is_flag=True,
              help="Upload each of several recordings in PATH as a run of its own.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Wait until the run is analyzed.")
def upload_command(
    places: tuple[Path, ...],
    url: str,
    name: str | None,
    tags: tuple[str, ...],
    mesh: str | None,
    token: str | None,
    resume: str | None,
    redact: bool,
    each: bool,
    wait: bool,
) -> None:
    """Upload a recording to a dashboard and print its URL.

    PATH is a file or a folder. Interrupted transfers are resumed automatically.
    """
    from stepsplit.dashboard.upload import Connection, collect_files, split_recordings

    parse_mesh(mesh)
    pairs, connection = dict(parse_tag(tag) for tag in tags), Connection(url, token)
    several = split_recordings(collect_files(places, _warn_of_left_out))
    if several and not each:
        named = ", ".join(one.folder for one in several)
        raise UsageError(
            f"these are {len(several)} recordings: {named}; upload one of the folders, "
            "or each as a run of its own with --each"
        )
    if several and resume:
        raise UsageError("--resume is for one run; upload the folder of that recording")
    with closing(connection):
        if not several:
            _send_run(connection, places, name, pairs, mesh, resume, redact=redact, wait=wait)
        for one in several:
            own = None if name is None else f"{name} {one.folder.rpartition('/')[2]}"
            _send_run(connection, one.places, own, pairs, mesh, None, redact=redact, wait=wait)


def _warn_of_left_out(one: LeftOut) -> None:
    print_line(f"stepsplit: {one.path} is not uploaded: it is {one.reason}", err=True)


def _send_run(
    connection: Connection,
    places: Sequence[Path],
    name: str | None,
    tags: Mapping[str, str],
    mesh: str | None,
    resume: str | None,
    *,
    redact: bool,
    wait: bool,
) -> None:
    """Uploads one recording and prints the address of its run."""
    from stepsplit.dashboard.reporters.progress import show_sending_bar
    from stepsplit.dashboard.upload import RetriesExhausted, Sender, choose_run_name, collect_files

    with ExitStack() as stack:
        given = _redact_places(places, stack) if redact else places
        files = collect_files([*given, *_write_mesh(mesh, stack)])
        sent = stack.enter_context(show_sending_bar(sum(one.size_bytes for one in files)))
        sender = Sender(connection, sent)
        named = name or choose_run_name([one.path for one in files])
        run_id = resume or sender.create(named, tags)
        try:
            for one in files:
                sender.send(run_id, one)
            sender.finish(run_id)
        except (RetriesExhausted, KeyboardInterrupt) as error:
            paths = [*map(str, places), *(["--mesh", mesh] if mesh else [])]
            paths += ["--redact"] if redact else []
            raise _build_resume_error(error, paths, connection.url, run_id) from None
    print_line(f"{connection.url}/run/{run_id}")
    if wait:
        _wait_until_analyzed(sender, run_id)


def _redact_places(places: Sequence[Path], stack: ExitStack) -> list[Path]:
    """The folder of a redacted copy of the recording, until the stack is closed.

    The same recording gives the same bytes, so that its upload can be resumed.
    """
    from stepsplit.analyzer.redact import redact_recording

    copy = Path(stack.enter_context(TemporaryDirectory(prefix="stepsplit-"))) / "redacted"
    redact_recording(places, copy)
    return [copy]


def _write_mesh(mesh: str | None, stack: ExitStack) -> list[Path]:
    """The file in which an upload states its mesh, until the stack is closed; none without."""
    if not mesh:
        return []
    from stepsplit.collectors.formats.run_spec import MESH_FILE

    file = Path(stack.enter_context(TemporaryDirectory(prefix="stepsplit-"))) / MESH_FILE
    file.write_text(mesh)
    return [file]


def _build_resume_error(
    error: BaseException, words: Sequence[str], url: str, run_id: str
) -> StepsplitError:
    paths = shlex.join(words)
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
