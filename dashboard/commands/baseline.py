"""stepsplit baseline: runs -> a small file that a gate holds candidates against."""

from __future__ import annotations

from pathlib import Path

import click

from stepsplit.dashboard.commands.store_options import artifacts_option, open_store, store_option

ADVISED = 3


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", required=True, metavar="FILE", type=click.Path(path_type=Path),
              help="Where it goes, such as a JSON file beside the tests.")  # fmt: skip
@store_option
@artifacts_option
def command(places: tuple[str, ...], out: Path, url: str, artifacts: str) -> None:
    """Keep what a gate needs of some runs in a small file, fit for git.

    RUN is as for check; an older baseline file may be among them. Name 3 to 5 runs: they tell the
    noise. They must be of one device, mesh, backend and world size.
    """
    from stepsplit.analyzer.errors import write
    from stepsplit.analyzer.regression.judge import check_setups
    from stepsplit.analyzer.regression.metrics import to_json
    from stepsplit.dashboard.commands.sides import runs_at

    runs = [run.facts for run in runs_at(places, lambda: open_store(url, artifacts))]
    for warning in check_setups(runs, (), across_setups=False):
        click.echo(f"warning: {warning}", err=True)
    write(out, to_json(runs))
    told = "" if len(runs) >= ADVISED else f"; {ADVISED} to 5 tell the noise better"
    click.echo(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}{told}")
