"""stepsplit analyze: a recording -> the screen, report.json, tables/."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from stepsplit.analyzer import examine
from stepsplit.analyzer.report.files import save, write
from stepsplit.analyzer.report.wire import to_json
from stepsplit.dashboard.reporters.terminal import screen


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path)
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Write report.json here; - for standard output."
)
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
              help="Write report.json and tables/ into this folder.")  # fmt: skip
def command(paths: tuple[Path, ...], json_file: str | None, out: Path | None) -> None:
    """Split every step of a recording: files or folders of torch.profiler traces."""
    analysis = examine(paths)
    if out is not None:
        save(out, analysis.report, analysis.tables)
    if json_file == "-":
        click.echo(to_json(analysis.report), nl=False)
        return
    if json_file is not None:
        write(Path(json_file), to_json(analysis.report))
    Console(highlight=False).print(screen(analysis.report))
