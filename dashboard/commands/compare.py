"""stepsplit compare: two recordings or reports -> what differs between the runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stepsplit.dashboard.commands.json_out import put_json

if TYPE_CHECKING:
    from stepsplit.analyzer.regression.compare import RunComparison


@click.command()
@click.argument("baseline", metavar="BASELINE")
@click.argument("candidate", metavar="CANDIDATE")
@click.option(
    "--json", "json_file", metavar="FILE",
    help="Write the comparison here; - for standard output, and nothing else there.",
)  # fmt: skip
@click.option("--rules", "rules_file", metavar="FILE", type=click.Path(path_type=Path),
              help="Take kernels for what the rules in this TOML file say.")  # fmt: skip
def command(baseline: str, candidate: str, json_file: str | None, rules_file: Path | None) -> None:
    """Say what differs between two runs, and by how much.

    BASELINE and CANDIDATE are each a recording as analyze takes it (file, folder, archive or URL),
    a report.json, or a folder that holds one. Runs of another layout are compared too.
    """
    # What reads recordings is loaded here, so that the list of commands stays quick.
    from stepsplit.analyzer.regression.compare import to_json

    found = _compared(baseline, candidate, rules_file)
    if not put_json(found, to_json, json_file):
        _show(found)


def _compared(baseline: str, candidate: str, rules_file: Path | None) -> RunComparison:
    from stepsplit.analyzer.analysis import compare_runs
    from stepsplit.analyzer.readers.kernel_rules import BUILT_IN, read_rules
    from stepsplit.dashboard.commands.cores import cores
    from stepsplit.dashboard.reporters.progress import reading_bar

    rules = BUILT_IN if rules_file is None else read_rules(rules_file)
    with reading_bar() as progress:
        return compare_runs(baseline, candidate, cores(), progress, rules)


def _show(found: RunComparison) -> None:
    from rich.console import Console

    from stepsplit.dashboard.reporters.compare import screen

    Console(highlight=False).print(screen(found))
