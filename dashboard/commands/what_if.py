"""stepsplit what-if: a recording -> its step with something changed, by replay."""

from __future__ import annotations

import click
from rich.console import Console

from stepsplit.analyzer.diagnose.what_if import EXAMPLES, to_json, what_if
from stepsplit.dashboard.commands.json_out import put_json
from stepsplit.dashboard.reporters.what_if import screen


@click.command(epilog=f"Changes are written so: {', '.join(EXAMPLES)}.")
@click.argument("places", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--change", "changes", metavar="CHANGE", multiple=True,
    help="Replay with this changed; may be repeated. All usual changes where left out.",
)  # fmt: skip
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the result here; - for standard output, and nothing else there.",
)  # fmt: skip
def command(places: tuple[str, ...], changes: tuple[str, ...], json_file: str | None) -> None:
    """Replay a recording with something changed: how long were a step?

    PATH is as for analyze. A replay runs through what each instant of the measured steps waited
    for; other microbatches and schedules are timed by the schedule's own order.
    """
    found = what_if(*places, changes=changes)
    if not put_json(found, to_json, json_file):
        Console(highlight=False).print(screen(found))
