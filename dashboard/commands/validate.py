"""stepsplit validate: the analytical model against published figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.analyzer.errors import write

if TYPE_CHECKING:
    from stepsplit.analyzer.validation.tables import Check

MISSED = 1


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write all checks with all rows here; - for standard output, and nothing else there.",
)  # fmt: skip
@click.option("--rows", is_flag=True, help="Print every row, not only those that are farthest off.")
@click.pass_context
def command(context: click.Context, folder: Path | None, json_file: str | None, rows: bool) -> None:
    """Hold the analytical model against published figures, and say how far off it is.

    FOLDER has more rows of the same tables: CSV files with the names and columns of those in
    stepsplit/analyzer/model/published, any of which may be absent. Ends with status 1 where a
    check is missed. Rows that a constant of the model was fitted on are left out.
    """
    # What the model needs is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.validation import to_json, validate

    checks = validate(folder)
    if json_file == "-":
        click.echo(to_json(checks))
    else:
        if json_file is not None:
            write(Path(json_file), to_json(checks).encode())
        _show(checks, rows)
    if not all(check.met for check in checks):
        context.exit(MISSED)


def _show(checks: tuple[Check, ...], rows: bool) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.validation import screen

    Console(highlight=False).print(screen(checks, rows))
