"""Shared code of the commands: worker count, JSON output, store options, optional packages."""

from __future__ import annotations

import getpass
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from stepsplit.analyzer.errors import UsageError, write
from stepsplit.collectors.formats.file_names import is_recorded_name, is_trace_name
from stepsplit.collectors.safe_io.safe_text import escape_controls, escape_json

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.kernel_rules import Rules
    from stepsplit.collectors.formats.run_spec import Mesh
    from stepsplit.dashboard.reporters.console import SafeConsole
    from stepsplit.dashboard.store.audit import AuditLog
    from stepsplit.dashboard.store.store import Store


_Command = TypeVar("_Command", bound=Callable[..., object])

# Default number of worker processes.


def count_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Numbers of options.


class FiniteRange(click.FloatRange):
    """A range of numbers without nan, which compares with nothing, and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


# Options for files: commands differ only in what such a file is for.


def build_path_option(*names: str, metavar: str, help: str) -> Callable[[_Command], _Command]:
    """An option for the path of a file or folder."""
    return click.option(*names, metavar=metavar, type=click.Path(path_type=Path), help=help)


def build_json_option(help: str) -> Callable[[_Command], _Command]:
    """The option --json, whose file is for `put_json`."""
    return click.option("--json", "json_file", metavar="FILE", help=help)


# Output files of a command, which never replace a recording.


def check_output(path: Path) -> None:
    """Raises UsageError for a file of a recording: a forgotten value of an option names one."""
    is_recorded = is_recorded_name(path.name) or is_trace_name(path.name)
    if not is_recorded or not path.is_file():
        return
    # An output of a command, such as an earlier --json run.json, may be replaced.
    with path.open("rb") as file:
        if _OUTPUT.search(file.read(256)) is None:
            raise UsageError(f"{path} is a file of a recording; choose another name for the output")


# Any document of stepsplit but the two that a recording consists of.
_OUTPUT = re.compile(rb'"schema"\s*:\s*"stepsplit\.(?!run/|record/)')


def write_output(path: Path, content: bytes) -> None:
    """Writes the file atomically. Raises UsageError if it cannot be written, or `check_output`."""
    check_output(path)
    write(path, content)


# What a command prints besides screens.


def print_line(text: str = "", err: bool = False) -> None:
    """Prints one line on standard output or error; a line break of a name is shown as an escape."""
    click.echo(escape_controls(text), err=err)  # noqa: TID251 - the place of it


def print_annotations(lines: Iterable[str]) -> None:
    """Prints what `format_workflow_command` made, for GitHub Actions to execute."""
    # The guard of standard output would escape the commands themselves.
    stream = getattr(sys.stdout, "unguarded", sys.stdout)
    for line in lines:
        click.echo(line, file=stream)  # noqa: TID251 - it consists of escaped text


# JSON output of a command.

ResultT = TypeVar("ResultT")


def put_json(
    result: ResultT, to_json: Callable[[ResultT], str | bytes], json_file: str | None
) -> bool:
    """Writes a result as JSON to a file, or to standard output for "-"; None writes nothing.

    Returns whether it was printed; then the caller must not print anything else. Raises UsageError
    if the file cannot be written.
    """
    if json_file is None:
        return False
    found = to_json(result)
    # In a file as well: it is printed sooner or later.
    text = escape_json(found if isinstance(found, str) else found.decode())
    if json_file == "-":
        click.echo(text, nl=not text.endswith("\n"))  # noqa: TID251 - it is escaped
        return True
    write_output(Path(json_file), text.encode())
    return False


# Options of the commands that read recordings.

places_argument = click.argument("places", nargs=-1, required=True, metavar="PATH...")

workers_option = click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(min=1),
    default=None,
    help="Read with up to N processes; by default one per core.",
)

rules_option = click.option(
    "--rules",
    "rules_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="TOML file of rules that classify kernels.",
)


def load_rules(file: Path | None) -> Rules:
    """The built-in kernel rules, preceded by those of the file if given. Raises DataError."""
    from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, read_rules

    return BUILT_IN if file is None else read_rules(file)


# Options of the commands that open the store of runs.

HOME = Path(".stepsplit")

STORE = HOME / "store.db"

STORE_URL = f"sqlite:///{STORE}"

ARTIFACTS = HOME / "artifacts"


def _keep_named(context: click.Context, option: click.Parameter, value: str) -> str:
    """The value; one that is named and is the default too gets an absolute path, so that it can be
    distinguished from what is not named at all, which must be the user's own."""
    is_default = context.get_parameter_source(option.name or "") is ParameterSource.DEFAULT
    if is_default or value not in (STORE_URL, str(ARTIFACTS)):
        return value
    return str(ARTIFACTS.absolute()) if value == str(ARTIFACTS) else f"sqlite:///{STORE.absolute()}"


def _build_store_option(text: str) -> Callable[[_Command], _Command]:
    return click.option(
        "--store",
        "url",
        default=STORE_URL,
        show_default=True,
        envvar="STEPSPLIT_STORE",
        callback=_keep_named,
        metavar="URL",
        help=text,
    )


store_option = _build_store_option("Database of the runs.")

runs_option = _build_store_option("Database of the runs, or the address of a dashboard.")

token_option = click.option(
    "--token",
    metavar="TOKEN",
    envvar="STEPSPLIT_TOKEN",
    help="Access token of the dashboard; by default STEPSPLIT_TOKEN.",
)

artifacts_option = click.option(
    "--artifacts",
    default=str(ARTIFACTS),
    show_default=True,
    envvar="STEPSPLIT_ARTIFACTS",
    callback=_keep_named,
    metavar="URL",
    help="Folder of traces and reports, or a URL such as s3://bucket/stepsplit.",
)

log_option = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Log on standard error: text, or one JSON line per request and analysis.",
)


ROLE = click.Choice(["viewer", "uploader", "admin"])
"""The roles of store/logins.py, without its imports."""


# The console of a screen.

# The screens are laid out for a terminal's usual 80 columns.
MIN_COLUMNS = 80


def make_console(soft_wrap: bool = False) -> SafeConsole:
    """A console on standard output with the columns that tables need: narrower terminals fold the
    lines, so that no number is cut."""
    from stepsplit.dashboard.reporters.console import SafeConsole

    console = SafeConsole(sys.stdout, soft_wrap=soft_wrap)
    console.width = max(console.width, MIN_COLUMNS)
    return console


# The store of runs.


def open_store(url: str = STORE_URL, artifacts: str | Path = ARTIFACTS) -> Store:
    """Opens the store of runs; creates it if it is missing.

    Raises UsageError for what is in the current folder and is not the user's own, unless it was
    named.
    """
    require_package("sqlalchemy", "dashboard")
    from stepsplit.dashboard.store.default_store import check_own_place
    from stepsplit.dashboard.store.store import LOCAL, Store

    claim_store(url)
    is_remote, is_default = "://" in str(artifacts), str(artifacts) == str(ARTIFACTS)
    for place in (HOME, LOCAL if is_remote else ARTIFACTS) if is_remote or is_default else ():
        check_own_place(place, "--artifacts")
    return Store.open(url, artifacts)


def claim_store(url: str) -> None:
    """Raises UsageError if the store is the one in the current folder, it was not named, and
    this user has not made it; makes it if it is missing."""
    from stepsplit.dashboard.store.default_store import claim_default_store

    if url == STORE_URL:
        claim_default_store(HOME, STORE)


def open_existing_store(url: str = STORE_URL, artifacts: str | Path = ARTIFACTS) -> Store:
    """Opens the store of runs. Raises UsageError if it would be a new file: there are no runs."""
    require_package("sqlalchemy", "dashboard")
    from stepsplit.dashboard.store.database import find_database_file

    # Only a file can be missing: another database says so itself.
    path = find_database_file(url)
    if path is not None and not path.exists():
        raise UsageError(f"{path}: no such store; name it with --store, or upload a run first")
    return open_store(url, artifacts)


def record_command(audit: AuditLog, action: str, target: str) -> None:
    """Records an action of the command line in the audit log."""
    try:
        account = getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id without a name.
        account = str(os.getuid())
    audit.record(action, target, user_name=f"command line, {account}", role="admin")


# Tags and dates of runs.


def parse_tag(tag: str) -> tuple[str, str]:
    """Parses --tag KEY=VALUE. Raises UsageError if it is invalid."""
    key, equals, value = tag.partition("=")
    if not key or not equals:
        raise UsageError(f"--tag {tag}: write KEY=VALUE, such as branch=main")
    return key, value


# The mesh as the user states it.


def parse_mesh(text: str | None) -> Mesh | None:
    """Parses --mesh. Raises UsageError if it is invalid."""
    from stepsplit.collectors.formats.run_spec import Mesh

    try:
        return None if text is None else Mesh.parse(text)
    except ValueError as error:
        raise UsageError(f"--mesh: {error}") from None


# Optional packages.


def require_package(module: str, extra: str) -> None:
    """Raises UsageError with the install command if the module is missing."""
    if find_spec(module) is None:
        raise UsageError(f"this needs {module}; install it with: pip install 'stepsplit[{extra}]'")
