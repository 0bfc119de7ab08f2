"""stepsplit mcp, schema and skill: what agents and scripts read."""

from __future__ import annotations

from pathlib import Path

import click

from stepsplit.dashboard.commands.common import (
    artifacts_option,
    open_existing_store,
    print_line,
    put_json,
    require_package,
)

# stepsplit mcp: serves the tools to an agent.


@click.command()
@click.argument(
    "folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path, file_okay=False)
)
@click.option(
    "--store", "url", metavar="URL", envvar="STEPSPLIT_STORE",
    help="Also offer the runs of this database.",
)  # fmt: skip
@artifacts_option
def mcp_command(folders: tuple[Path, ...], url: str | None, artifacts: str) -> None:
    """Serve read-only tools to an agent by the Model Context Protocol.

    The agent's program starts this command and speaks to it on standard input and output. It may
    read recordings below FOLDER, by default below the current folder, and nothing else; nothing is
    written. A dashboard offers the same for its runs at /api/v1/mcp, with its tokens and roles.
    """
    require_package("mcp", "agents")
    import os

    from stepsplit.analyzer.errors import UsageError
    from stepsplit.dashboard.agents.recordings import Recordings
    from stepsplit.dashboard.agents.server import serve_stdio

    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; name the folder of your recordings")
    # Nothing is written: not even tables of large traces, to read them sooner the next time.
    os.environ["STEPSPLIT_CACHE"] = "off"
    store = None if url is None else open_existing_store(url, artifacts)
    serve_stdio(Recordings(folders or (Path(),), store))


# stepsplit schema: the JSON Schema of what the commands write.


@click.command()
@click.argument("name", required=False)
def schema_command(name: str | None) -> None:
    """Print the JSON Schema of a report or another result.

    NAME is report, prediction, ledger, roles, hang, check, comparison or finding. Without it the
    names are listed, with the commands that write such JSON.
    """
    from stepsplit.analyzer.schemas import SCHEMAS, schema_to_json

    if name is None:
        for each, entry in SCHEMAS.items():
            print_line(f"{each:12}{entry.version or 'no version of its own':26}{entry.written_by}")
        return
    put_json(name, schema_to_json, "-")


# stepsplit skill: what an agent should know to use all this.


@click.command()
@click.option("--print", "is_printed", is_flag=True, help="Print the file.")
def skill_command(is_printed: bool) -> None:
    """Say where SKILL.md for agents is, or print it.

    Copy it to where your agent looks for skills: how to record, which question goes to which tool,
    and the traps.
    """
    from stepsplit.dashboard.agents.answers import SKILL

    for line in SKILL.read_text().splitlines() if is_printed else [str(SKILL)]:
        print_line(line)
