"""stepsplit mcp, schema and skill: what agents and scripts read."""

from __future__ import annotations

import click

# stepsplit schema: the JSON Schema of what the commands write.


@click.command()
@click.argument("name", required=False)
def schema_command(name: str | None) -> None:
    """Print the JSON Schema of a report or another result.

    NAME is report, prediction, hang, check, comparison or finding. Without it the names are listed,
    with the commands that write such JSON.
    """
    from stepsplit.analyzer.schemas import SCHEMAS, schema_to_json
    from stepsplit.dashboard.commands.common import print_line, put_json

    if name is None:
        for each, entry in SCHEMAS.items():
            print_line(f"{each:12}{entry.version or 'no version of its own':26}{entry.written_by}")
        return
    put_json(name, schema_to_json, "-")
