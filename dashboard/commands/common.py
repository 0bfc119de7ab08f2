"""What commands share: workers, missing extras, JSON output, options of the store."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from stepsplit.analyzer.errors import UsageError, write

if TYPE_CHECKING:
    from stepsplit.analyzer.readers.kernel_rules import Rules
    from stepsplit.dashboard.store.store import Store


# How many processes a command starts unless it is told.


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# What a command found as JSON, where --json asks for it.

Found = TypeVar("Found")


def put_json(found: Found, to_json: Callable[[Found], str | bytes], json_file: str | None) -> bool:
    """Writes the JSON of what was found into the file, "-" for standard output, None for nowhere.

    Whether standard output has it, which then has nothing else. Raises UsageError where the file
    cannot be written.
    """
    if json_file is None:
        return False
    text = to_json(found)
    if json_file == "-":
        click.echo(text, nl=False)
        return True
    write(Path(json_file), text.encode() if isinstance(text, str) else text)
    return False


# The rules of the user, for every command that reads a recording.

rules_option = click.option(
    "--rules",
    "rules_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Take kernels for what the rules in this TOML file say.",
)


def load_rules(file: Path | None) -> Rules:
    """The rules of the file before the built-in ones, or these alone. Raises DataError."""
    from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, read_rules

    return BUILT_IN if file is None else read_rules(file)


# The options of every command that opens the store of runs.

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


# What a command needs beyond the base install, asked for by name.


def need(module: str, extra: str) -> None:
    """Raises UsageError, with the command that installs it, where the module is missing."""
    if find_spec(module) is None:
        raise UsageError(f"this needs {module}; install it with: pip install 'stepsplit[{extra}]'")
